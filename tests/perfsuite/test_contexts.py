"""Which ways of calling are tried on which side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perfsuite import Pair, Workload, tensor
from perfsuite.contexts import _is_compiled
from perfsuite.integrity.probe import Probe
from perfsuite.pair import as_side
from perfsuite.records import Case


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (lambda: double, False),
        (lambda: torch.compile(double, backend="eager"), True),
        (lambda: torch.compile(double, backend="eager", fullgraph=True), True),
        (lambda: torch._dynamo.disable(double), False),
    ],
    ids=["plain", "compiled", "one graph", "kept from compiling"],
)
def test_a_side_that_is_compiled_is_known_at_every_call(
    make: Callable[[], Callable[[torch.Tensor], torch.Tensor]], compiled: bool
) -> None:
    side = make()
    pair = Pair(name="p", reference=double, optimized=side, inputs={"x": tensor(4)}, workloads=[Workload("w")])
    probe = Probe(
        pair=pair,
        side=as_side(side),
        name="optimized",
        case=Case(dtype="float32", sizes={}, inputs={}, seed=0),
        device="cpu",
        home=None,
    )
    assert [_is_compiled(probe) for _ in range(3)] == [compiled] * 3
