"""Host syncs and launches of one call, counted by a simulated profiler and, without a GPU, by torch's own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.errors import MachineError
from perfsuite.timing.profiler_counts import LAUNCHES, SESSIONS, SYNCS, count_calls

ASYNCHRONOUS = (
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cuMemcpyDtoHAsync_v2",
    "cudaEventRecord",
    "cudaMalloc",
    "aten::add",
)


def unset_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable, and restore its absence after the test, which delenv alone does not do."""
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    monkeypatch.delenv("TEARDOWN_CUPTI")


class Profiler:
    """Replacement of torch's profiler: it records the events given to `call`, with times in ticks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.events: list[Any] | None = []
        self.open = False
        self.closed = 0
        self.teardown: str | None = None
        self.sentinel = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"]
        self.lost: set[str] = set()
        profiler = self

        class Probe:
            def __add__(self, other: int) -> Probe:
                return self

            def item(self) -> float:
                profiler.call(*profiler.sentinel)
                return 1.0

        unset_teardown(monkeypatch)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, **given: Probe())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.call("cudaDeviceSynchronize"))
        monkeypatch.setattr(torch.profiler, "profile", self.profile)
        monkeypatch.setattr(torch.profiler, "record_function", self.range)

    def call(self, *names: str) -> None:
        """Record calls of these functions of the CUDA runtime."""
        for name in names:
            self.event(name, self.tick(), self.tick())

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def event(self, name: str, start: float, end: float, device: str = "CPU") -> None:
        if self.open and self.events is not None:
            where = SimpleNamespace(name=device)
            self.events.append(
                SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=where)
            )

    @contextmanager
    def profile(self, *, activities: list[Any], acc_events: bool) -> Iterator[Any]:
        assert {a.name for a in activities} == {"CPU", "CUDA"}
        self.teardown = os.environ.get("TEARDOWN_CUPTI")
        self.open = True
        try:
            yield SimpleNamespace(events=lambda: self.events)
        finally:
            self.open = False
            self.closed += 1

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        start = self.tick()
        yield
        if name not in self.lost:
            end = self.tick()
            self.event(name, start, end)
            # The device's copy of the range has other times.
            self.event(name, start + 1000, end + 1000, device="CUDA")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Profiler:
    return Profiler(monkeypatch)


def nothing() -> None:
    pass


def test_each_side_is_called_once_and_has_its_own_counts(profiler: Profiler) -> None:
    done: list[str] = []

    def side(name: str, *calls: str) -> tuple[Callable[[], None], Callable[[], None]]:
        def reset() -> None:
            done.append(f"reset {name}")
            profiler.call("cudaLaunchKernel", "cudaMemcpy", "cuLaunchKernel")

        def call() -> None:
            done.append(name)
            profiler.call(*calls)

        return reset, call

    counts = count_calls(
        {
            "reference": side("reference", "cudaLaunchKernel", "cudaStreamSynchronize", *["cudaLaunchKernel"] * 66),
            "optimized": side("optimized", "cuLaunchKernelEx"),
            "graph": side("graph", "cudaGraphLaunch", "cudaEventSynchronize", "cudaDeviceSynchronize"),
            "idle": side("idle"),
        }
    )
    assert counts == {"reference": (1, 67), "optimized": (0, 1), "graph": (2, 1), "idle": (0, 0)}
    assert done == [f"{what}{name}" for name in counts for what in ("reset ", "")], "one call each, after its reset"
    assert profiler.closed == 1


@pytest.mark.parametrize("name", sorted(SYNCS))
def test_each_kind_of_sync_is_counted(profiler: Profiler, name: str) -> None:
    assert count_calls({"a": (nothing, lambda: profiler.call(name, name))}) == {"a": (2, 0)}


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_each_kind_of_launch_is_counted(profiler: Profiler, name: str) -> None:
    assert count_calls({"a": (nothing, lambda: profiler.call(name))}) == {"a": (0, 1)}


def test_asynchronous_calls_are_not_counted(profiler: Profiler) -> None:
    assert not LAUNCHES & SYNCS
    assert count_calls({"a": (nothing, lambda: profiler.call(*ASYNCHRONOUS))}) == {"a": (0, 0)}


def test_no_sides_have_no_counts(profiler: Profiler) -> None:
    assert count_calls({}) == {}


@pytest.mark.parametrize(
    "seen", [[], ["cudaLaunchKernel"], ["cudaStreamSynchronize"], ["cudaMemcpyAsync"]], ids=lambda seen: "+".join(seen)
)
def test_profiler_that_captured_nothing_is_an_error(profiler: Profiler, seen: list[str]) -> None:
    """Counts of 0 instead of an error would keep every promise."""
    profiler.sentinel = seen
    with pytest.raises(MachineError, match="the profiler captured no CUDA runtime calls; run without another profiler"):
        count_calls({"a": (nothing, lambda: profiler.call("cudaLaunchKernel", "cudaMemcpy"))})
    assert profiler.closed == SESSIONS


@pytest.mark.parametrize("what", ["sentinel", "lost"])
def test_events_missed_by_one_session_are_counted_in_the_next(profiler: Profiler, what: str) -> None:
    good = {"sentinel": profiler.sentinel, "lost": set()}[what]
    setattr(profiler, what, {"sentinel": [], "lost": {"perfsuite::a"}}[what])

    def reset() -> None:
        if profiler.closed:
            setattr(profiler, what, good)

    assert count_calls({"a": (reset, lambda: profiler.call("cudaLaunchKernel"))}) == {"a": (0, 1)}
    assert profiler.closed == 2


def test_all_ranks_count_again_if_one_missed_events(profiler: Profiler) -> None:
    """Ranks call a side together, so all must count again."""
    asked: list[bool] = []

    def any_of_ranks(flag: bool) -> bool:
        asked.append(flag)
        return len(asked) == 1

    assert count_calls({"a": (nothing, lambda: profiler.call("cudaLaunchKernel"))}, any_of_ranks) == {"a": (0, 1)}
    assert asked == [False, False]
    assert profiler.closed == 2


def test_events_missed_by_another_rank_in_every_session_are_an_error(profiler: Profiler) -> None:
    with pytest.raises(MachineError, match="the profiler of another rank captured no CUDA runtime calls"):
        count_calls({"a": (nothing, nothing)}, lambda flag: True)
    assert profiler.closed == SESSIONS


@pytest.mark.parametrize("lost", ["a", "b", "@sentinel"])
def test_call_lost_by_the_profiler_is_an_error(profiler: Profiler, lost: str) -> None:
    profiler.lost = {f"perfsuite::{lost}"}
    with pytest.raises(MachineError, match=f"the profiler lost the call of '{lost}'"):
        count_calls({name: (nothing, lambda: profiler.call("cudaLaunchKernel")) for name in "ab"})


def test_profiler_without_events_is_an_error(profiler: Profiler) -> None:
    profiler.events = None
    with pytest.raises(MachineError, match="lost the call of 'a'"):
        count_calls({"a": (nothing, nothing)})


@pytest.mark.parametrize("where", ["reset", "call"])
def test_profiler_is_closed_if_a_side_raises(profiler: Profiler, where: str) -> None:
    def fail() -> None:
        raise RuntimeError("no such tile")

    side = (fail, nothing) if where == "reset" else (nothing, fail)
    with pytest.raises(RuntimeError, match="no such tile"):
        count_calls({"a": side, "b": (nothing, nothing)})
    assert profiler.closed == 1
    assert not profiler.open
    assert count_calls({"a": (nothing, nothing)}) == {"a": (0, 0)}


@pytest.mark.parametrize(("given", "then"), [(None, "1"), ("0", "0")])
def test_teardown_cupti_is_set_unless_the_user_has_set_it(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch, given: str | None, then: str
) -> None:
    """The variable is set before the profiler begins, unless the user has set it."""
    if given is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", given)
    count_calls({"a": (nothing, nothing)})
    assert profiler.teardown == then


# --- torch's own profiler, without CUDA -----------------------------------------------------------------------------


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    zeros = torch.zeros
    unset_teardown(monkeypatch)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.profiler.ProfilerActivity, "CUDA", torch.profiler.ProfilerActivity.CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.usefixtures("without_cuda")
def test_torch_profiler_without_cuda_is_detected() -> None:
    called: list[str] = []
    with pytest.raises(MachineError, match="captured no CUDA runtime calls"):
        count_calls({"a": (nothing, lambda: called.append("a")), "b": (nothing, lambda: called.append("b"))})
    assert called == ["a", "b"] * SESSIONS


@pytest.mark.usefixtures("without_cuda")
def test_torch_profiler_is_off_after_a_side_raises() -> None:
    def fail() -> None:
        assert torch._C._autograd._profiler_enabled()
        raise RuntimeError("no such tile")

    with pytest.raises(RuntimeError, match="no such tile"):
        count_calls({"a": (nothing, fail)})
    assert not torch._C._autograd._profiler_enabled()
