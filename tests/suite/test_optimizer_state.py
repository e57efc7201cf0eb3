"""State dicts of Muon, AdamW and both combined, from which a run resumes."""

from __future__ import annotations

import functools

import pytest
import torch
from scale import FULLY

from optimized.kernels import triton_reason
from optimized.memory.cpu_offload_optimizer import cpu_offload_optimizer, offloaded_hybrid
from optimized.optimizers import fused_adamw, hybrid_muon_adamw, muon
from reference.optimizers import fused_adamw as plain_adamw
from reference.optimizers import hybrid_muon_adamw as plain_hybrid
from reference.optimizers import muon as plain_muon

MATRICES = [(4, 6), (0, 3), (7, 2), (4, 6)]
OTHERS = [(5,), (2, 3, 4), (0,), (3, 2)]
BOTH = [*MATRICES, *OTHERS]
INTERPRETER = triton_reason() is None and not torch.cuda.is_available()


def in_float32(make):
    return functools.partial(make, dtype=torch.float32)


MUONS = [in_float32(plain_muon.muon), in_float32(muon.muon_torch)]
ADAMWS = [plain_adamw.adamw, fused_adamw.adamw_torch, cpu_offload_optimizer]
if INTERPRETER:
    MUONS.append(in_float32(muon.muon_triton))
    ADAMWS.append(fused_adamw.adamw_triton)
HYBRIDS = [
    in_float32(make) for make in (plain_hybrid.hybrid_muon_adamw, hybrid_muon_adamw.hybrid_muon_adamw, offloaded_hybrid)
]
KINDS = [(make, MATRICES) for make in MUONS] + [(make, OTHERS) for make in ADAMWS] + [(make, BOTH) for make in HYBRIDS]
PAIRS = [
    (first, second, shapes)
    for group, shapes in ((MUONS, MATRICES), (ADAMWS, OTHERS), (HYBRIDS, BOTH))
    for first in group
    for second in group
]


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def stepped(step, shapes, seeds):
    for seed in seeds:
        step(drawn(shapes, seed))


@pytest.mark.parametrize(("make", "shapes"), KINDS)
@pytest.mark.parametrize("before", [pytest.param(0, marks=FULLY), pytest.param(1, marks=FULLY), 3])
def test_optimizer_resumed_from_a_state_dict_is_bitwise_the_same(make, shapes, before):
    whole = drawn(shapes, 0)
    step = make(whole)
    stepped(step, shapes, range(1, before + 1))
    state, half = step.state_dict(), [p.clone() for p in whole]
    resumed = make(half)
    resumed.load_state_dict(state)
    for one, params in ((step, whole), (resumed, half)):
        stepped(one, shapes, range(10, 13))
        assert all(p.isfinite().all() for p in params)
    assert all(map(torch.equal, whole, half))


@pytest.mark.parametrize(("make", "shapes"), KINDS)
def test_state_dict_does_not_change_with_later_steps(make, shapes):
    step = make(drawn(shapes, 0))
    stepped(step, shapes, [1])
    state, before = step.state_dict(), repr(step.state_dict())
    stepped(step, shapes, [2])
    assert repr(state) == before
    assert repr(step.state_dict()) != before


@pytest.mark.parametrize(("first", "second", "shapes"), PAIRS)
def test_each_optimizer_resumes_from_the_state_of_the_others(first, second, shapes):
    params = drawn(shapes, 0)
    step = first(params)
    stepped(step, shapes, [1, 2])
    others = [p.clone() for p in params]
    other = second(others)
    other.load_state_dict(step.state_dict())
    stepped(step, shapes, [3])
    stepped(other, shapes, [3])
    for one, found in zip(params, others, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-6)
    fresh = [p.clone() for p in drawn(shapes, 0)]
    assert not all(torch.allclose(p, q, rtol=1e-4, atol=1e-6) for p, q in zip(params, fresh, strict=True))
