"""Checks of each side in different calling contexts: autocast, inference mode, threads, CUDA graphs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfsuite import Pair, Workload, floats, tensor
from perfsuite.correctness import contexts
from perfsuite.correctness.contexts import _is_compiled
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.tally import Tally
from perfsuite.declare.sides import as_side
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

CASE = Case(dtype="float32", sizes={}, inputs={}, seed=0)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def pair_of(side: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    return Pair(name="p", reference=double, optimized=side, inputs={"x": tensor(4)}, workloads=[Workload("w")])


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
def test_compiled_side_is_recognised_at_every_call(
    make: Callable[[], Callable[[torch.Tensor], torch.Tensor]], compiled: bool
) -> None:
    side = make()
    probe = Probe(pair=pair_of(side), side=as_side(side), name="optimized", case=CASE, device="cpu", home=None)
    assert [_is_compiled(probe) for _ in range(3)] == [compiled] * 3


def lost_in_capture(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x) if torch.cuda.is_current_stream_capturing() else 2 * x


class KeptFromBefore(threading.local):
    """Side that returns, under capture, the result that its thread computed last."""

    last: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            self.last = 2 * x
            return self.last.clone()
        return self.last.clone()


def other_kernel_in_capture(x: torch.Tensor) -> torch.Tensor:
    return x + x if torch.cuda.is_current_stream_capturing() else 2 * x


def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return 2 * x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("side", [lost_in_capture, KeptFromBefore()])
def test_output_that_a_captured_graph_does_not_compute_is_detected(
    side: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(NotEquivalent, match="wrong when a CUDA graph that captured it is replayed"):
        contexts.check(pair_of(side), CASE, "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("side", [other_kernel_in_capture, waits])
def test_side_that_is_captured_correctly_or_refuses_capture_passes(
    side: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    contexts.check(pair_of(side), CASE, "cuda")


def test_costly_contexts_are_distributed_over_three_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    monkeypatch.setattr(contexts, "_try", lambda way, probe: tried[-1].append(way.__name__))
    for number in (0, 1, 2, None):
        tried.append([])
        contexts.check(pair_of(double), CASE, "cpu", number=number)
    in_turn = {way.__name__ for way in contexts.IN_TURN if way in contexts.WAYS}
    *several, every = tried
    assert set(every) == {way.__name__ for way in contexts.WAYS}
    assert all(set(every) - in_turn <= set(names) < set(every) for names in several)
    assert sorted(name for names in several for name in names if name in in_turn) == sorted(in_turn)


def test_repeated_draw_keeps_its_number() -> None:
    tally = Tally()
    assert [tally.number(line) for line in ("n=3", "n=5", "n=3", "n=7")] == [0, 1, 0, 2]


@pytest.mark.parametrize("seed", range(4))
def test_inexact_first_result_is_not_reported_as_a_fault_of_the_second_call(seed: int) -> None:
    # Its error exceeds the reference's, but the rule allows it because neighbouring inputs have such errors.
    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x[:, None], w.flip(-1)[None, None], padding=len(w) - 1)[:, 0]

    def by_transforms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        n = x.shape[1] + len(w) - 1
        return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)

    pair = Pair(
        name="p",
        reference=reference,
        optimized=by_transforms,
        inputs={"x": tensor("m", "n", values=floats(-2, 2)), "w": tensor("k", values=floats(-2, 2))},
        gradients=False,
        unsupported={"autocast": "torch has no such FFT"},
        workloads=[Workload("w", m=5, n=1090, k=2)],
    )
    case = Case(dtype="float32", sizes={"m": 5, "n": 1090, "k": 2}, inputs={}, seed=seed)
    contexts.check(pair, case, "cpu")


def test_output_overwritten_only_in_inference_mode_is_detected() -> None:
    buffer = torch.empty(4)

    def side(x: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(2 * x) if torch.is_inference_mode_enabled() else 2 * x

    with pytest.raises(NotEquivalent, match="changes output that it returned, where its inputs get other values"):
        contexts.forward.rewritten_inputs(
            Probe(pair=pair_of(side), side=as_side(side), name="optimized", case=CASE, device="cpu", home=None)
        )


def test_autocast_is_checked_in_both_half_precisions() -> None:
    tried: list[torch.dtype] = []

    def side(x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            tried.append(torch.get_autocast_dtype("cpu"))
        return 2 * x

    probe = Probe(pair=pair_of(side), side=as_side(side), name="optimized", case=CASE, device="cpu", home=None)
    contexts.forward.autocast(probe)
    assert set(tried) == {torch.bfloat16, torch.float16}


def test_wrong_gradients_are_not_attributed_to_a_context() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *incoming: torch.Tensor) -> torch.Tensor:
            return 3 * incoming[0]

    pair = dataclasses.replace(pair_of(lambda x: Wrong.apply(x)), gradients=True)
    contexts.check(pair, CASE, "cpu")  # the gradients proof reports it


def in_inference_mode(inside: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a side that computes something else under inference mode."""
    return lambda x: inside(x) if torch.is_inference_mode_enabled() else 2 * x


def refused(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not under inference mode")


@pytest.mark.parametrize("way", [contexts.inference_mode, contexts.two_threads])
def test_reference_runs_in_a_context_only_if_the_side_is_wrong_in_it(
    way: Callable[[Probe], None],
) -> None:
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return 2 * x

    pair = dataclasses.replace(pair_of(double), reference=counted)
    probe = Probe(pair=pair, side=as_side(double), name="optimized", case=CASE, device="cpu", home=None)
    for case in (CASE, probe.other_case()):
        probe.truth(case)
    before = len(calls)
    way(probe)
    assert len(calls) == before
    in_main = threading.main_thread()
    wrong = {
        contexts.inference_mode: in_inference_mode(lambda x: 3 * x),
        contexts.two_threads: lambda x: (2 if threading.current_thread() is in_main else 3) * x,
    }[way]
    with pytest.raises(NotEquivalent):
        way(dataclasses.replace(probe, side=as_side(wrong)))


@pytest.mark.parametrize("side", [refused, lambda x: 3 * x])
def test_context_that_the_reference_does_not_support_is_no_fault(side: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pair = dataclasses.replace(pair_of(in_inference_mode(side)), reference=in_inference_mode(refused))
    probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=CASE, device="cpu", home=None)
    contexts.inference_mode(probe)
