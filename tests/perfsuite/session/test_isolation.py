"""Proofs in separate processes: a crash is attributed to the right side and affects no other proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scale import FULL, FULLY
from scratch import Project

from perfsuite import Pair, faults, tensor
from perfsuite.draws.cases import parse_case
from perfsuite.draws.discarded_draws import is_left_out
from perfsuite.faults import DeviceFault
from perfsuite.records import Status
from perfsuite.session import modes, preload
from perfsuite.session.isolation import MOST_LEFT_OUT, Blame
from perfsuite.session.modes.proofs import Proofs
from perfsuite.session.tasks import Failure, Outcome, Reported, Task

pytest_plugins = ["pytester"]
SOME = "crashes or honest"
DRAW, OTHER = "n=5;x=offset/normal;seed=1", "n=5;seed=2"

CRASHING = """
    import ctypes, os, time
    from functools import partial
    import perfsuite
    from perfsuite import Workload, tensor


    def right(x):
        return x + 1.0


    def crash():
        ctypes.string_at(0)


    def leave():
        os._exit(0)


    def faulty(condition, fault):
        def call(x):
            if condition(x):
                fault()
            return x + 1.0
        return call


    def large(x):
        return x.numel() > 20


    def misaligned(x):
        return x.data_ptr() % 16 != 0


    Pair = partial(perfsuite.Pair, workloads=[Workload("w", n=8)], max_examples=15)
    DRAWS = {"x": tensor("n")}
    crashes = Pair(reference=right, optimized=faulty(large, crash), inputs=DRAWS)
    leaves = Pair(reference=right, optimized=faulty(large, leave), inputs=DRAWS)
    needs_alignment = Pair(reference=right, optimized=faulty(misaligned, crash), inputs=DRAWS)
    declares_it = Pair(reference=right, optimized=faulty(misaligned, crash), inputs={"x": tensor("n", align=16)})
    both_need_it = Pair(reference=faulty(misaligned, crash), optimized=faulty(misaligned, crash), inputs=DRAWS)
    honest = Pair(reference=right, optimized=faulty(lambda x: False, crash), inputs=DRAWS)
"""


XDIST = "def pytest_configure(config):\n    config.workerinput = {'workerid': 'gw0'}"


@pytest.mark.parametrize("conftest", [pytest.param("", id="alone"), pytest.param(XDIST, id="xdist", marks=FULLY)])
def test_crash_fails_one_proof_and_names_the_side_and_the_draw(
    project: Project, monkeypatch: pytest.MonkeyPatch, conftest: str
) -> None:
    if not FULL:  # fork the processes after one import of torch, as on a GPU
        monkeypatch.setattr(preload, "is_useful", lambda: True)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    project.write("test_faults.py", CRASHING)
    project.write("conftest.py", conftest)
    try:
        result = project.run("--perfsuite-isolate=always", "-m", "correctness", "-k", f"equivalence and ({SOME})")
    finally:
        preload.close()
    output = result.stdout.str()
    result.assert_outcomes(passed=1, failed=1)
    assert "crashes: the optimized side crashed with SIGSEGV" in output
    assert "reproduce: pytest 'test_faults.py::crashes::equivalence[float32]' --perfsuite-case=" in output


def test_proof_out_of_memory_is_repeated_after_the_others_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items: Any = {name: SimpleNamespace(nodeid=name, pair=None) for name in "abc"}
    right, events = Reported(reports=()), list[str]()

    def others() -> Iterator[tuple[str, Outcome]]:
        yield "a", Failure(status=Status.UNMEASURED, message="a: out of memory", crowded=True)
        yield "b", right
        yield "c", right
        events.append("ended")

    def work(self: Proofs, tasks: Sequence[Task], *, everywhere: bool) -> Iterator[tuple[str, Outcome]]:
        events.append(tasks[0].id)
        yield tasks[0].id, right

    monkeypatch.setattr(Proofs, "work", work)
    proofs: Any = object.__new__(Proofs)
    proofs.config = SimpleNamespace(option=SimpleNamespace(perfsuite_case=None))
    proofs.isolated, proofs._proofs, proofs._ended = items, others(), {}
    assert [proofs._outcome(items[name]) for name in "abc"] == [right] * 3
    assert events == ["ended", "a"]


def test_xdist_worker_proves_in_its_own_process_until_a_device_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    done, tasks = list[str](), list[str]()

    def here(item: Any, *, log: bool, nextitem: Any) -> list[str]:
        assert not log
        done.append(item.nodeid)
        return [f"report of {item.nodeid}"]

    def check() -> None:
        if done[-1] == "faults":
            raise faults.DeviceFault("CUDA error")

    def work(self: Proofs, given: Sequence[Task], *, everywhere: bool) -> Iterator[tuple[str, Outcome]]:
        tasks.append(given[0].id)
        yield given[0].id, Reported(reports=({"made by": "a worker"},))

    monkeypatch.setattr(modes.proofs, "runtestprotocol", here)
    monkeypatch.setattr(faults, "check", check)
    monkeypatch.setattr(Proofs, "work", work)
    proofs: Any = object.__new__(Proofs)
    option = SimpleNamespace(perfsuite_isolate="auto", perfsuite_case=None)
    proofs.config = SimpleNamespace(option=option, workerinput={})
    proofs._lost = False
    logged = list[Any]()

    def item(name: str) -> Any:
        restored = SimpleNamespace(pytest_report_from_serializable=lambda config, data: data)
        hooks = SimpleNamespace(
            pytest_runtest_logstart=lambda **given: None,
            pytest_runtest_logfinish=lambda **given: None,
            pytest_runtest_logreport=lambda report: logged.append(report),
        )
        state = SimpleNamespace(teardown_exact=lambda nextitem: done.append(f"torn down for {nextitem}"))
        made = SimpleNamespace(
            nodeid=name,
            location=(),
            ihook=hooks,
            config=SimpleNamespace(hook=restored),
            pair=None,
            session=SimpleNamespace(_setupstate=state),
        )
        proofs.isolated = {name: made}
        return made

    for name in ("sound", "faults", "after it"):
        assert proofs.pytest_runtest_protocol(item(name), None)
    assert (done, tasks) == (["sound", "faults", "torn down for None"], ["faults", "after it"])
    assert logged == ["report of sound", *2 * [{"made by": "a worker"}]]


def test_out_of_memory_errors_are_recognised() -> None:
    assert faults.lacks_memory(torch.OutOfMemoryError("no"))
    assert faults.lacks_memory(RuntimeError("CUDNN_STATUS_ALLOC_FAILED"))
    assert not faults.lacks_memory(RuntimeError("shape"))


def occupied(monkeypatch: pytest.MonkeyPatch, *, free_gib: int, initialized: bool = True) -> None:
    """Make torch report a GPU of 100 GiB, of which this process uses 5 GiB."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 100 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.parametrize(("initialized", "free", "crowded"), [(True, 9, True), (True, 90, False), (False, 9, False)])
def test_gpu_is_crowded_if_other_processes_hold_most_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, free: int, crowded: bool
) -> None:
    occupied(monkeypatch, free_gib=free, initialized=initialized)
    assert faults.is_crowded() == crowded
    assert faults.crowd() == ("other processes hold 86.0 of the GPU's 100.0 GiB" if crowded else "")


def test_gpu_that_raises_is_not_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    occupied(monkeypatch, free_gib=9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fault)
    assert not faults.is_crowded()


LACKING = """
    from perfsuite import Pair, Workload, tensor


    def right(x):
        return x + 1.0


    def lacking(x):
        raise RuntimeError("CUDA error: out of memory")


    pair = Pair(reference=right, optimized=lacking, inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)])
"""


@pytest.mark.parametrize("free", [2, 90])
def test_out_of_memory_on_a_crowded_gpu_is_no_verdict(
    project: Project, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    occupied(monkeypatch, free_gib=free)
    project.write("test_lacking.py", LACKING)
    result = project.run("--perfsuite-isolate=never", "-m", "correctness", "-k", "equivalence")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    said = "pair: no verdict, for lack of memory: other processes hold 93.0 of the GPU's 100.0 GiB; prove again when"
    assert (said in output) is (free == 2)
    assert "pair: the optimized side runs out of memory" in output


def test_fixtures_of_other_tests_are_set_up_once_between_isolated_proofs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {
        "$report_type": "TestReport",
        "location": ("", 0, ""),
        "keywords": {},
        "outcome": "passed",
        "when": "call",
    }
    monkeypatch.setattr(
        Proofs, "_outcome", lambda self, item: Reported(reports=[{**passed, "nodeid": item.nodeid, "longrepr": None}])
    )
    module = """
        import pytest
        from perfsuite import Pair, Workload, tensor


        @pytest.fixture(scope="module")
        def opened():
            print(f"opens {__name__}")
            yield
            print(f"closes {__name__}")


        def test_before(opened):
            pass


        same = Pair(
            reference=abs, optimized=lambda x: x.abs(), inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)]
        )


        def test_after(opened):
            pass
    """
    for name in ("test_a.py", "test_b.py"):
        project.write(name, module)
    chosen = "test_before or test_after or equivalence"
    result = project.run("--perfsuite-isolate=always", "-m", "not perf", "-k", chosen, "-rA")
    result.assert_outcomes(passed=6)
    output = result.stdout.str()
    assert [output.count(f"{what} test_{name}") for what in ("opens", "closes") for name in "ab"] == [1] * 4


@FULLY
def test_exit_and_crash_on_misaligned_data_are_reported(project: Project) -> None:
    project.write("test_faults.py", CRASHING)
    result = project.run("--perfsuite-isolate=always", "-m", "correctness", "-k", f"equivalence and not ({SOME})")
    output = result.stdout.str()
    result.assert_outcomes(passed=2, failed=2)
    assert "leaves: the optimized side ended with exit code 0" in output
    assert "needs_alignment: the optimized side crashed with SIGSEGV" in output
    assert "the data of x begins one element after an aligned address" in output
    assert "tensor(…, align=16)" in output


FAULTING = """
    import torch
    from perfsuite import Pair, Workload, tensor


    def right(x):
        return x + 1.0


    def faulty(x):
        if x.numel() > 20:  # a device-side assertion, after which CUDA fails in the whole process
            return x + torch.zeros(4, device=x.device)[torch.full((1,), 9, device=x.device)]
        return x + 1.0


    def honest(x):
        return 1.0 + x


    first = Pair(reference=right, optimized=faulty, inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)])
    second = Pair(reference=right, optimized=honest, inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("xdist", [(), ("-n", "1")])
def test_device_fault_fails_only_one_proof(project: Project, xdist: tuple[str, ...]) -> None:
    project.write("test_faults.py", FAULTING)
    result = project.run(*xdist, "-m", "correctness", "-k", "equivalence")
    output = result.stdout.str()
    result.assert_outcomes(passed=1, failed=1)
    assert "first: the optimized side faults: CUDA error: device-side assert" in output


# --- the side that caused a crash -----------------------------------------------------------------------------------


def crashed(case: str = DRAW) -> Failure:
    return Failure(status=Status.UNMEASURED, message="the measuring process crashed with SIGSEGV", case=case)


def reported(outcome: str = "passed") -> Reported:
    return Reported(reports=({"outcome": outcome, "duration": 0.0},))


def settled(
    answer: dict[str, Outcome], *, first: Failure | None = None, align: int = 0, requested: str = ""
) -> tuple[Outcome, list[Task]]:
    """Return a crashed proof's outcome and the tasks that were run; `answer` maps each kind of task to its outcome."""
    tasks: list[Task] = []

    def run(task: Task) -> Outcome:
        tasks.append(task)
        return answer[task.side or ("again" if task.case else "anew")]

    pair = Pair(reference=abs, optimized=abs, inputs={"x": tensor("n", align=align)})
    blame = Blame(pair=pair, dtype="float32", run=run, limit_s=9.0, requested=requested)
    return blame.settle("t.py::p::equivalence[float32]", first or crashed()), tasks


def message(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure)
    assert outcome.status is Status.NOT_EQUIVALENT
    return outcome.message


def test_side_that_crashes_on_its_own_is_blamed() -> None:
    outcome, tasks = settled({"reference": reported(), "optimized": crashed()})
    assert message(outcome).startswith("the optimized side crashed with SIGSEGV; the data of x begins")
    assert [(t.side, t.case) for t in tasks] == [("reference", DRAW), ("optimized", DRAW)]


def test_alignment_is_not_mentioned_for_an_aligned_draw() -> None:
    outcome, _ = settled({"reference": reported(), "optimized": crashed()}, first=crashed(OTHER))
    assert message(outcome) == "the optimized side crashed with SIGSEGV"
    outcome, _ = settled({"reference": reported(), "optimized": crashed()}, align=16)
    assert message(outcome) == "the optimized side crashed with SIGSEGV"


def test_draw_on_which_the_reference_crashes_is_left_out() -> None:
    outcome, tasks = settled({"reference": crashed(), "anew": reported()})
    assert outcome == reported()
    assert tasks[-1].left_out == (DRAW,)


def test_reference_that_crashes_on_many_draws_is_red() -> None:
    outcome, tasks = settled({"reference": crashed(), "anew": crashed(OTHER)})
    assert f"on {MOST_LEFT_OUT} draws the reference crashed with SIGSEGV; restrict its inputs" in message(outcome)
    assert sum(not t.side for t in tasks) == MOST_LEFT_OUT - 1


def test_crash_only_in_another_calling_context_is_reported() -> None:
    outcome, _ = settled({"reference": reported(), "optimized": reported(), "again": crashed()})
    assert message(outcome) == "the optimized side crashed with SIGSEGV, but not when it is called plainly"


def test_crash_that_does_not_repeat_is_unmeasured() -> None:
    outcome, _ = settled({"reference": reported(), "optimized": reported(), "again": reported()})
    assert isinstance(outcome, Failure)
    assert outcome.status is Status.UNMEASURED
    assert outcome.message.startswith("the process of this proof crashed with SIGSEGV, and not when")


@pytest.mark.parametrize("side", ["reference", "optimized", "again"])
def test_process_that_never_reached_the_draw_blames_no_side(side: str) -> None:
    lost = Failure(status=Status.UNMEASURED, message="the measuring process ended with exit code 3: no GPU")
    outcome, _ = settled({"reference": reported(), "optimized": reported(), side: lost})
    assert outcome is lost


def test_requested_draw_is_not_left_out() -> None:
    outcome, tasks = settled({"reference": crashed()}, requested=DRAW)
    assert message(outcome).startswith("on this draw the reference crashed with SIGSEGV; restrict its inputs")
    assert len(tasks) == 1


def test_message_ends_with_the_path_of_the_log() -> None:
    with_log = replace(crashed(), message="the measuring process crashed with SIGSEGV; the worker's log is /a/b.log")
    outcome, _ = settled({"reference": with_log, "anew": with_log})
    assert message(outcome).endswith("align=…); log: /a/b.log")
    ended = "the measuring process ended with exit code 3: a; b; its log is /a/b.log"
    outcome, _ = settled({"reference": reported(), "optimized": replace(crashed(), message=ended)}, align=16)
    assert message(outcome) == "the optimized side ended with exit code 3: a; b; log: /a/b.log"


def test_failure_of_a_repeated_draw_is_returned() -> None:
    outcome, _ = settled({"reference": reported(), "optimized": reported(), "again": reported("failed")})
    assert outcome == reported("failed")


def test_failure_outside_a_draw_is_returned_unchanged() -> None:
    outcome, tasks = settled({"reference": crashed(), "anew": crashed("")})
    assert outcome == crashed("")
    assert len(tasks) == 2


def test_all_misaligned_draws_are_left_out_with_one_of_them() -> None:
    pair = Pair(reference=abs, optimized=abs, inputs={"x": tensor("n")})
    aligned, left_out = parse_case("n=7;seed=3", "float32"), (DRAW,)
    assert is_left_out(pair, parse_case(DRAW, "float32"), left_out)
    assert is_left_out(pair, parse_case("n=7;x=offset/tiny;seed=3", "float32"), left_out)
    assert not is_left_out(pair, aligned, left_out)
    assert not is_left_out(pair, aligned, ())


def test_device_fault_is_no_subclass_of_exception() -> None:
    assert not issubclass(DeviceFault, Exception)
