"""A reference slowed by the optimized side is detected by timing it in a process without that side."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import builders
import pytest
from scale import FULLY
from scratch import SMALL, TWO_LINES, Project, lines_with, times

from perfsuite.records import Alone, Measurement, Status
from perfsuite.session import slowed_reference
from perfsuite.session.tasks import ALONE, Failure
from perfsuite.system import import_stubs

pytest_plugins = ["pytester"]


def run(reference_s: float, **fields: object) -> Measurement:
    return builders.measurement(
        SMALL,
        ratio=0.5,
        reference_s=reference_s,
        **{"clock": "wall", **fields},  # type: ignore[arg-type]
    )


def by_itself(seconds: float, outside_s: float | None = None) -> Alone:
    return Alone(id=SMALL, blocks_s=(0.9 * seconds, seconds, 5 * seconds), outside_s=outside_s)


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "moved"), [([1e-3], True), ([1e-3, 2e-3, 1e-3], False), ([], False)])
def test_reference_has_moved_if_it_is_slower_than_in_every_accepted_process(accepted: list[float], moved: bool) -> None:
    assert slowed_reference.has_moved([run(2.2e-3), run(2.1e-3)], accepted) == moved
    assert not slowed_reference.has_moved([], accepted)


@pytest.mark.parametrize(
    ("beside", "by_themselves", "slowed"),
    [
        ([2e-3], [1e-3], True),
        ([2e-3, 3e-3], [1e-3, 1.3e-3], True),
        ([2e-3, 1.1e-3], [1e-3], False),  # one process with both sides is as fast
        ([2e-3], [1e-3, 1.8e-3], False),  # one process without the optimized side is as slow
        ([1e-3], [0.8e-3], False),  # on the wall clock
        ([1e-3], [2e-3], False),
        ([2e-3], [], False),
        ([2.0], [1.0], False),  # a call this long is timed only once
    ],
)
def test_reference_is_slowed_only_if_all_processes_agree(
    beside: list[float], by_themselves: list[float], slowed: bool
) -> None:
    assert slowed_reference.is_slowed([run(s) for s in beside], [by_itself(s) for s in by_themselves]) == slowed


@pytest.mark.parametrize(
    ("outside", "slower"), [([3e-3, 4e-3], True), ([3e-3, 1.4e-3], False), ([1.4e-3], False), ([None], False)]
)
def test_side_is_slower_outside_only_if_all_processes_agree(outside: list[float | None], slower: bool) -> None:
    runs, times = [run(2e-3, optimized_s=1e-3)], [by_itself(2e-3, s) for s in outside]
    assert slowed_reference.is_slower_outside(runs, times) == slower
    if slower:
        assert "takes 1.00 ms a call while it is measured and 3.00 ms in" in slowed_reference.outside_message(
            runs, times
        )


def test_message_contains_both_times() -> None:
    text = slowed_reference.message([run(2e-3)], [by_itself(1e-3)])
    assert "2.00 ms in a process with both, 1.00 ms in one without the optimized side (100% more)" in text


# --- modules that are left out --------------------------------------------------------------------------------------


def test_left_out_module_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "left_out_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('run')")
    (package / "kernel.py").write_text("raise AssertionError('run')")
    (package / "other.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(import_stubs.ABSENT, f"{package / '__init__.py'}:{package / 'kernel.py'}")
    import_stubs.install()
    try:
        kernel = importlib.import_module("left_out_pkg.kernel")

        class Own(kernel.Base):  # type: ignore[misc, name-defined]  # a stub
            pass

        assert Own.__mro__ == (Own, object)
        assert list(kernel.SIZES) == []
        assert "left_out_pkg.kernel.fast" in repr(kernel.fast(1)[2].more)
        assert importlib.import_module("left_out_pkg.other").VALUE == 3
        with pytest.raises(AttributeError):
            kernel.__all__  # noqa: B018 - `import *` looks for it
    finally:
        for name in [n for n in sys.modules if n.startswith("left_out_pkg")]:
            del sys.modules[name]


# --- accept ---------------------------------------------------------------------------------------------------------


def test_a_workload_whose_reference_is_slowed_is_not_accepted(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    workers = project.measured(times())
    workers.alone[SMALL] = Alone(id=SMALL, blocks_s=(1e-6,))
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code != 0
    assert lines_with(done.output, "not accepted", SMALL, "the optimized side slows the reference"), done.output
    assert not list(project.path.glob("baselines/*"))
    assert sum(task.kind == ALONE for task in workers.tasks) == slowed_reference.TRIES


@pytest.mark.parametrize(("alone_s", "green"), [(1e-6, False), (1.0, True)])
def test_gate_times_the_reference_alone_only_if_it_is_slower_than_accepted(
    project: Project, alone_s: float, green: bool
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.accept()
    same = project.measured(times())
    assert project.gate().ret == 0
    assert not [task for task in same.tasks if task.kind == ALONE]
    slower = project.measured(times(speedup=3.0))
    slower.alone[SMALL] = Alone(id=SMALL, blocks_s=(alone_s,))
    done = project.gate()
    assert (done.ret == 0) == green
    assert sum(task.kind == ALONE for task in slower.tasks) == (1 if green else slowed_reference.TRIES)
    assert bool(lines_with(done.stdout.str(), f"NOT_TIMED {SMALL}", "the optimized side slows the reference")) != green


def test_accept_prints_a_note_if_a_reference_cannot_be_timed_alone(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    workers = project.measured(times())
    workers.alone[SMALL] = Failure(status=Status.UNMEASURED, message="it could not be collected")
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code == 0
    assert lines_with(done.output, "its reference was not timed alone: it could not be collected"), done.output


PLAIN = """
    def twice(x):
        return x + x


    def thrice(x):
        return twice(x) + x


    def fourfold(x):
        return x + x + x + x


    def fivefold(x):
        return x + x + x + x + x
"""
FAST = """
    import sys
    import time

    import plain


    def slow_twice(x):
        time.sleep(3e-3)
        return x + x


    plain.twice = slow_twice


    def thrice(x):
        return 3 * x


    def fourfold(x):
        return 4 * x


    def fivefold(x):
        if "perfsuite" not in sys.modules:
            time.sleep(3e-3)
        return 5 * x
"""
PAIRS = """
    import fast
    import plain

    from perfsuite import Pair, Workload, tensor


    def pair(name):
        return Pair(
            reference=getattr(plain, name),
            optimized=getattr(fast, name),
            inputs={"x": tensor("n")},
            workloads=[Workload("w", n=64, clock="wall")],
        )


    thrice, fourfold, fivefold = pair("thrice"), pair("fourfold"), pair("fivefold")
"""


@FULLY
def test_real_accept_rejects_workloads_slowed_inside_or_outside_perfsuite(project: Project) -> None:
    project.write("plain.py", PLAIN)
    project.write("fast.py", FAST)
    project.write("test_two.py", PAIRS)
    project.write("conftest.py", "import sys\nsys.path.insert(0, '.')")
    project.commit()
    done = project.cli("accept", "--reason", "the first", "--processes", "3")
    assert lines_with(done.output, "test_two.py::thrice::speed[w]: the optimized side slows the reference"), done.output
    assert lines_with(done.output, "test_two.py::fivefold::speed[w]: its optimized side takes", "only where a test")
    assert "was not timed alone" not in done.output
    (path,) = project.path.glob("baselines/*.json")
    assert "fourfold" in path.read_text()
    assert "thrice" not in path.read_text()
    assert "fivefold" not in path.read_text()
