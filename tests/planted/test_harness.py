"""Faults in the harness or aimed at it: 10, 13, 26 and 33 to 39, some beside a case that must pass."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from catalogue import fast, pair, wave
from scale import count
from scratch import SMALL, TWO_LINES, Project, lines_with, times

from perfsuite import api, floats, tensor
from perfsuite.correctness import equivalence
from perfsuite.errors import MachineError, NotEquivalent
from perfsuite.gate.exit_codes import UNDECIDED
from perfsuite.records import Case
from perfsuite.system import machine
from perfsuite.timing import profiler_counts

pytest_plugins = ["pytester"]

FAULTS = {10, 13, 26, 33, 34, 35, 36, 37, 38, 39}
"""Numbers of the catalogue's faults that this module plants."""


def rejected(result: pytest.RunResult, *words: str, code: int = 1) -> None:
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == code, output
    assert lines_with(output, *words), output


# --- 10: a profiler that captures nothing --------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
def test_10_profiler_without_cuda_calls_raises_machine_error(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    clock = iter(range(1000))
    events: list[Any] = []

    def event(name: str, start: int, end: int) -> None:
        span = SimpleNamespace(start=start, end=end)
        events.append(SimpleNamespace(name=name, device_type=SimpleNamespace(name="CPU"), time_range=span))

    @contextlib.contextmanager
    def record(name: str) -> Any:
        start = next(clock)
        yield
        if captured:
            event("cudaLaunchKernel", next(clock), next(clock))
            event("cudaStreamSynchronize", next(clock), next(clock))
        event(name, start, next(clock))

    @contextlib.contextmanager
    def profile(**options: Any) -> Any:
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(torch, "zeros", lambda *args, **options: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.profiler, "record_function", record)
    if captured:
        assert profiler_counts.count_calls({"optimized": (lambda: None, lambda: None)}) == {"optimized": (1, 1)}
        return
    with pytest.raises(MachineError, match="the profiler captured no CUDA runtime calls"):
        profiler_counts.count_calls({"optimized": (lambda: None, lambda: None)})


# --- 13: rounding that hides a small change ------------------------------------------------------------------


@pytest.mark.parametrize(("slower", "status"), [(0.014, "REGRESSED"), (0.003, "PASS")])
def test_13_small_slowdown_is_not_rounded_away(project: Project, slower: float, status: str) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.git("init", "-q")
    accepted = project.commit()
    project.accept()
    project.replace("test_scale.py", "3 * x", "2 * x + x")

    def outcome(id: str, process: int, second: bool) -> object:
        """Return times that are slower beside the accepted revision, and equal in an A/A run."""
        beside = fake.calls[-1][1].get(id) if fake.calls else None
        return times(slower=slower if beside == accepted else 0.0)(id, process, second)

    fake = project.measured(outcome)
    result = project.gate()
    assert result.ret == (status != "PASS")
    (line,) = lines_with(result.stdout.str(), "1 " + status)[:1]
    if status != "PASS":
        assert lines_with(result.stdout.str(), "REGRESSED", SMALL, "1.4%"), line


# --- 26: results that the harness did not write ----------------------------------------------------------------

FORGER = """
    import pathlib

    from perfsuite import Pair, Workload, tensor

    HERE = pathlib.Path(__file__).parent


    def fast(x):
        for path in (HERE / ".perfsuite/workers").glob("*.jsonl"):
            with path.open("a") as out:
                out.write('{"event": "failure", "id": "test_scale.py::scale::speed[small]", ')
                out.write('"status": "PASS", "message": "splendid"}\\n')
        return 3 * x


    scale = Pair(
        reference=lambda x: x + x + x,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("small", n=64, clock="wall")],
    )
"""


def test_26_results_written_by_code_under_test_are_rejected(project: Project) -> None:
    project.write("test_scale.py", FORGER)
    rejected(project.run("-m", "perf"), "NOT_TIMED", "a result that the harness did not write")


# --- 33 to 39 --------------------------------------------------------------------------------------------------


def two(call: Any, other: Any) -> Any:
    return lambda x: (call(x), other(x))


def test_33_wrong_output_before_a_right_one_is_rejected() -> None:
    with pytest.raises(NotEquivalent, match=r"output\[0\] of the optimized side is wrong"):
        api.check(pair(two(torch.cos, fast), reference=two(wave, wave)))
    api.check(pair(two(fast, fast), reference=two(wave, wave)))


def test_34_gate_without_measurements_is_undecided(project: Project) -> None:
    project.write("test_none.py", "from perfsuite import Pair\nPAIRS = []\n")
    rejected(project.gate(), "nothing was measured", code=UNDECIDED)


def test_34_proof_without_a_possible_size_fails(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace('tensor("n")},', 'tensor("n")}, where=lambda n: n > 10**9,'))
    result = project.run("-m", "correctness")
    rejected(result, "too few sizes satisfy where=")


ELEMENTS = count(quick=1_500_000, full=10_000_000)


@pytest.mark.parametrize("wrong", [True, False])
def test_35_one_wrong_element_among_millions_is_found(wrong: bool) -> None:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = fast(x)
        if wrong:
            out[1_234_567] *= 1.0001
        return out

    made = pair(optimized, inputs={"x": tensor("n", values=floats(1, 2))}, workloads=[])
    case = Case(dtype="float32", sizes={"n": ELEMENTS}, inputs={}, seed=5)
    if not wrong:
        equivalence.check_case(made, case, "cpu")
        return
    with pytest.raises(NotEquivalent, match=rf"wrong at \[1234567\].*1 of {ELEMENTS} elements beyond budget"):
        equivalence.check_case(made, case, "cpu")


def test_36_proof_with_an_overflowing_reference_fails() -> None:
    def overflows(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * 100)

    made = pair(lambda x: torch.exp(x * 100) * 7, reference=overflows, inputs={"x": tensor("n", values=floats(3, 4))})
    with pytest.raises(NotEquivalent, match="draws were discarded, because the reference alone overflows"):
        api.check(made)


RERUNS = """
    def pytest_addoption(parser):
        parser.addoption("--reruns", type=int, default=0)
"""


def test_37_reruns_and_flaky_marks_are_rejected(project: Project) -> None:
    project.write("conftest.py", RERUNS)
    project.write("test_scale.py", TWO_LINES)
    rejected(project.run("--reruns=3"), "--reruns: a proof or a verdict that failed stays failed", code=4)
    project.write("test_scale.py", "import pytest\npytestmark = pytest.mark.flaky(reruns=2)\n" + _flat(TWO_LINES))
    project.write("pytest.ini", "[pytest]\nmarkers = flaky: by another plugin\n")
    rejected(project.run(), "is marked flaky: a proof or a verdict that failed stays failed", code=4)


def _flat(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def test_38_missing_output_is_rejected() -> None:
    with pytest.raises(NotEquivalent, match="returns 1 output where the reference returns 2"):
        api.check(pair(lambda x: (fast(x),), reference=two(wave, wave)))


def test_39_missing_baseline_other_machine_and_renamed_pair_are_undecided(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.measured(times())
    rejected(project.gate(), "NO_BASELINE", SMALL, code=UNDECIDED)
    project.accept()
    project.measured(times())
    assert project.gate().ret == 0
    other = dataclasses.replace(machine.identify(), device_name="Another device")
    with monkeypatch.context() as patch:
        patch.setattr(machine, "identify", lambda: other)
        rejected(project.gate(), "WRONG_MACHINE", SMALL, "Another device", code=UNDECIDED)
    project.replace("test_scale.py", "scale = Pair", "other = Pair")
    rejected(project.gate(), SMALL, "in the baseline but not collected", code=UNDECIDED)
