"""Every planted fault is rejected by name; no honest look-alike is. Faults of the harness are in test_harness.py."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time as clock_module
from collections.abc import Iterator
from typing import Any

import callers  # noqa: F401 - registers its faults
import combinations  # noqa: F401 - registers its faults
import drawn  # noqa: F401 - registers its faults
import gradients  # noqa: F401 - registers its faults
import leftovers
import meaning  # noqa: F401 - registers its faults
import pytest
import steps  # noqa: F401 - registers its faults
import test_harness
import timing
import torch
import traces  # noqa: F401 - registers its faults
import training_steps  # noqa: F401 - registers its faults
from catalogue import FAULTS, HONEST, NUMBERS, Planted, Time
from scale import FULLY, count

from perfsuite import api
from perfsuite.correctness import compilations, rule
from perfsuite.correctness.integrity import late_work
from perfsuite.errors import NotEquivalent, PerfsuiteError
from perfsuite.state import process_state
from perfsuite.system import tamper
from perfsuite.timing import clocks

EXAMPLES = 60
HONEST_EXAMPLES = count(quick=4, full=EXAMPLES)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PATCHED: tuple[tuple[Any, str], ...] = (
    (clock_module, "perf_counter_ns"),
    (torch.cuda.Event, "elapsed_time"),
    (torch, "equal"),
    (rule, "K_NORM"),
    (compilations, "graphs"),
    (statistics, "median"),
)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    """Yield the test's clock, and afterwards restore what a fault replaced."""
    before = [getattr(owner, name) for owner, name in PATCHED]
    helper = leftovers.helper
    made = Time()

    def released(seconds: float) -> None:
        for event in timing.WAITING:
            event.set()
        for thread in timing.threading.enumerate():
            if thread is not timing.threading.current_thread() and thread.daemon and timing.WAITING:
                thread.join(0.2)
        timing.WAITING.clear()

    monkeypatch.setattr(late_work, "time", type("Clock", (), {"sleep": staticmethod(released)}))
    with process_state.kept():
        yield made
    leftovers.helper = helper
    for (owner, name), value in zip(PATCHED, before, strict=True):
        setattr(owner, name, value)


@pytest.fixture(autouse=True)
def nothing_of_the_test_before_is_in_memory() -> None:
    """Collect garbage, so that a side that searches memory finds no answer of an earlier test."""
    gc.collect()


def messages(planted: Planted, time: Time, monkeypatch: pytest.MonkeyPatch, examples: int = EXAMPLES) -> Iterator[str]:
    """Yield the error messages of each proof or, for a timed fault, of the measurement."""
    simulated = planted.timed and not planted.gpu and planted.number != 3
    if simulated:
        monkeypatch.setattr(clocks, "perf_counter_ns", lambda: time.now)
        monkeypatch.setattr(clocks, "process_time_ns", lambda: time.now)
        monkeypatch.setattr(clocks, "interruptions", lambda: 0)
    if planted.number != 3:
        monkeypatch.setattr(tamper, "check", lambda: None)  # it would report the functions that this test replaces
    else:
        monkeypatch.undo()
    device = "cpu" if simulated else planted.device or DEVICE
    proofs = functools.partial(api.proofs, examples=examples, device=device)
    stages = [] if planted.timed else [name for name, _ in proofs(planted.make(time))]
    for stage in [stage for stage in stages if stage.startswith(planted.stage)] or ["measure"]:
        # Each proof gets a new pair, as if it ran alone.
        made = planted.make(time)
        try:
            if stage == "measure":
                api.measure(made, device=device)
            else:
                dict(proofs(made))[stage]()
            tamper.check()
        except (NotEquivalent, PerfsuiteError) as error:
            yield str(error)


TIMED_ALONE = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="it is timed on the GPU, which other processes use: run without -n"
)


def applicable(planted: list[Planted], of_each: int) -> list[Any]:
    """Return the parameters; only make test-all runs more than `of_each` of each number."""
    classes: dict[int, list[Planted]] = {}
    for p in planted:
        classes.setdefault(p.number, []).append(p)

    def marks(p: Planted) -> list[Any]:
        more = [] if p in classes[p.number][:of_each] else [FULLY]
        return [*more, pytest.mark.gpu, *([TIMED_ALONE] if p.timed else [])] if p.gpu else more

    return [pytest.param(p, id=str(p), marks=marks(p)) for p in planted]


@pytest.mark.parametrize("planted", applicable(FAULTS, 2))
def test_a_planted_fault_is_rejected_by_name(planted: Planted, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for message in messages(planted, time, monkeypatch):
        found.append(message)
        if all(words in message for words in planted.says):
            return
    pytest.fail("\n".join(found) or "it passed")


@pytest.mark.parametrize("planted", applicable(HONEST, 1))
def test_an_honest_look_alike_passes(planted: Planted, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FEW_DRAWS", count(quick=1, full=api.FEW_DRAWS))
    assert not list(messages(planted, time, monkeypatch, HONEST_EXAMPLES))


def test_every_fault_of_the_catalogue_is_planted() -> None:
    planted = {p.number for p in FAULTS} | set(test_harness.FAULTS)
    assert planted == set(NUMBERS)
    assert {p.number for p in FAULTS} <= {p.number for p in HONEST}, "each has an honest look-alike"
    assert all(p.says for p in FAULTS)
