"""Warming up a side yields facts about one call."""

from __future__ import annotations

from collections.abc import Sequence
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from perfsuite import Pair, floats, tensor
from perfsuite.declare.sides import Side
from perfsuite.records import Case
from perfsuite.timing import runner
from perfsuite.timing.clocks import CudaClock
from perfsuite.timing.peers import ALONE
from perfsuite.timing.runner import Call, Runner


def made(settle: int = 0) -> Runner:
    pair = Pair(
        reference=torch.exp, optimized=torch.exp, inputs={"x": tensor("n", values=floats(-2, 2))}, name="warmed"
    )
    case = Case(sizes={"n": 5}, dtype="float32", inputs={}, seed=0)
    return Runner("optimized", Side(call=torch.exp, settle=settle), pair, case, "forward", "cpu")


@pytest.mark.parametrize(
    ("peaks", "settle", "peak"),
    [
        ([900, 10, 55], 0, 55),
        ([900, 55, 10], 0, 55),  # the last call freed memory that was held before it
        ([900, 900, 10], 2, 10),
        ([900, 900, 900, 10], 4, 10),
        ([900, 0, 0], 0, 0),
        ([None, None, None], 0, None),
    ],
)
def test_the_peak_is_the_highest_of_the_settled_calls(
    peaks: Sequence[int | None], settle: int, peak: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, left = made(settle), list(peaks)
    monkeypatch.setattr(Runner, "once", lambda self, clock: Call(1e-3, left.pop(0)))
    side.warm_up(None)  # type: ignore[arg-type]
    assert not left
    assert side.last == Call(1e-3, peak)


def test_a_call_starts_only_after_the_previous_one_has_freed_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread holds the gradients until shortly after the call that returned them."""
    side, held = made(), [1000]
    monkeypatch.setattr(runner, "sleep", lambda seconds: (sleep(seconds), held.__setitem__(0, 300)))
    fake = SimpleNamespace(
        reset_peak_memory_stats=lambda: None, memory_allocated=lambda: held[0], max_memory_allocated=lambda: 1200
    )
    monkeypatch.setattr(torch, "cuda", fake)
    clock = CudaClock.__new__(CudaClock)
    clock.peers = ALONE
    monkeypatch.setattr(CudaClock, "synchronize", lambda self: None)
    assert side.once(clock).peak_bytes == 900
