"""How many processes time a workload, and how often they time the reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MACHINE, entry, measurement

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.gate import decision
from perfsuite.gate.decision import Undecided
from perfsuite.gate.planning import FEW_BLOCKS
from perfsuite.records import PromiseRecord, Status, Verdict, WorkloadProof
from perfsuite.revisions.revision import Tree
from perfsuite.session import lanes
from perfsuite.session.modes.accept import Accept
from perfsuite.session.modes.paired import Paired, sample_size
from perfsuite.session.tasks import Failure, Task
from perfsuite.session.worker_process import Lane

ID = "tests/test_a.py::a::speed[b]"


class Scripted(Paired):
    """Mode with one workload; `doubts` says after each process whether its promise is in doubt."""

    def __init__(self, accepted: Entry, doubts: Sequence[bool]) -> None:
        self.accepted, self.doubts = accepted, doubts
        self.trees, self.stored, self.full, self.runs, self.failures = {}, {}, set(), {}, {}
        self.same_code: set[str] = set()
        self.asked_for: list[int | None] = []
        self.on, self.likely, self.alone = "cpu", 1, False
        self.crowded: set[str] = set()
        self.one_sided: set[str] = set()
        self.seeds: dict[str, int] = {}

    @property
    def device(self) -> str:
        return self.on

    @property
    def workers(self) -> Any:
        return SimpleNamespace(close=lambda: None)

    @property
    def machine(self) -> Any:
        return MACHINE

    gpu_memory_bytes = 1 << 40

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {ID: self.accepted}

    def entry(self, id: str) -> Entry | None:
        return self.accepted

    def promises(self, id: str) -> PromiseRecord:
        return PromiseRecord(speedup=2.0)

    def _time_task(self, id: str, *, first: bool, number: int = 0) -> Task:
        return Task(id=id, reference=self.reference(id, first=first))

    def expected_s(self, task: Task) -> float:
        return 1.0

    def announce(self, *given: Any, **named: Any) -> None:
        pass

    def work(self, tasks: Sequence[Task], *, further: Any = None, **given: Any) -> Any:
        left = deque(tasks)
        while left:
            self.asked_for.append(left.popleft().reference)
            self.runs.setdefault(ID, []).append(measurement(accepted=0.0))
            yield ID, self.runs[ID][-1]
            left.extend(further(ID))

    def _analysed(self, ids: Collection[str], sample: Collection[str]) -> dict[str, Verdict | Undecided]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decision, "analyse", lambda s, suite, *, selected: {ID: self.answer()} if s else {})
            return super()._analysed(ids, sample)

    def _subject(self, id: str, *, sampled: bool) -> Any:
        return None

    def _sample(self, ids: Collection[str]) -> set[str]:
        return set()

    def _needed(self, ids: Collection[str]) -> dict[str, int]:
        return {}

    def _confirm(self, verdicts: Any) -> dict[str, Verdict]:
        return {}

    @property
    def items(self) -> Any:
        return {ID: None}

    @property
    def progress(self) -> Any:
        class Silent:
            def say(self, text: str) -> None:
                pass

            def add(self, tasks: int) -> None:
                pass

        return Silent()

    def answer(self) -> Verdict | Undecided:
        done = len(self.runs.get(ID, ()))
        if not done:
            return Undecided(processes=1, reason="nothing was measured")
        if done > len(self.doubts):
            return Verdict(id=ID, status=Status.PASS, message="")
        return Undecided(processes=1, reason="", reference=self.doubts[done - 1], likely=self.likely)


def with_reference_of(seconds: float) -> Entry:
    made = entry([measurement(accepted=0.0, ratio=1.0)] * 3)
    return replace(made, sides={n: replace(s, seconds=seconds) for n, s in made.sides.items()})


@pytest.mark.parametrize(("device", "processes"), [("cpu", 3), ("cuda", 4)])
def test_gpu_starts_two_further_processes_if_two_have_not_decided(device: str, processes: int) -> None:
    mode = Scripted(with_reference_of(0.1), [False, False])
    mode.on = device
    mode.decide([ID])
    assert len(mode.runs[ID]) == processes


@pytest.mark.parametrize("sampled", [True, False])
def test_both_processes_of_a_sampled_workload_are_requested_at_once(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first process times the reference."""
    mode, at_once = Scripted(with_reference_of(0.1), []), list[int | None]()
    do = mode._do
    monkeypatch.setattr(mode, "_sample", lambda ids: set(ids) if sampled else set())
    monkeypatch.setattr(
        mode, "_do", lambda tasks, further: (at_once.extend(t.reference for t in tasks), do(tasks, further))
    )
    mode.decide([ID])
    assert at_once == [FEW_BLOCKS, 0][: 1 + sampled]


@pytest.mark.parametrize(
    ("device", "likely", "processes"), [("cpu", 3, 2), ("cuda", 1, 2), ("cuda", 3, 4), ("cuda", 99, 12)]
)
def test_gpu_starts_as_many_further_processes_as_will_probably_decide(device: str, likely: int, processes: int) -> None:
    mode = Scripted(with_reference_of(0.1), [False])
    mode.on, mode.likely = device, likely
    mode.decide([ID])
    assert len(mode.runs[ID]) == processes


class Early(Scripted):
    """Workloads a to e on a GPU: b takes longest, then c, and so on; a and e have no revision to compare with.

    On each of two GPUs one process prepares at a time.
    """

    def __init__(self) -> None:
        super().__init__(with_reference_of(0.1), [])
        self.trees = dict.fromkeys("bcd", Tree(revision="1", folder="", package="", top=""))
        self.proofs, self.on = {}, "cuda"
        self.given: list[tuple[dict[str, WorkloadProof | int | None], int]] = []
        self.delivered: list[str] = []
        self.dropped: list[str] = []
        self.free, self.twice = True, ""

    def expected_s(self, task: Task) -> float:
        return -ord(task.id)

    def timing_lanes(self, tasks: Sequence[Task]) -> list[Lane]:
        return [on("0"), on("1")]

    @property
    def machine(self) -> Any:
        return replace(MACHINE, cores=self.cores)

    cores = 2

    def prove_task_seed(self, id: str) -> int | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Early, "items", {id: SimpleNamespace(pair=SimpleNamespace(time_limit=1.0))})
            return self.prove_task(id).seed

    @property
    def workers(self) -> Any:
        return SimpleNamespace(
            begin_early=lambda tasks, lanes, most: self.given.append(
                ({t.id: t.seed if t.awaits_proof else t.proof for t in tasks}, most)
            ),
            deliver=lambda proof: self.delivered.append(proof.id),
            is_any_free=lambda lanes: self.free,
            end_early=self.dropped.extend,
            prepare=lambda *given: None,
        )

    def _needed(self, ids: Collection[str]) -> dict[str, int]:
        return dict.fromkeys(self.twice, 2)

    def _time_task(self, id: str, *, first: bool, number: int = 0) -> Task:
        return Task(id=id, proof=self.proofs.get(id), reference=self.reference(id, first=first))

    def begun(self, *busy: str) -> tuple[list[str], list[str], int]:
        """Return (workloads that prepare, those of them that await their proof, how many may prepare)."""
        for noted in (self.given, self.delivered, self.dropped):
            noted.clear()
        self._start_ahead("abcde", [on(device) for device in busy])
        ((first, most),) = self.given
        return list(first), [i for i, proof in first.items() if isinstance(proof, int)], most


def on(device: str) -> Lane:
    return Lane(environment={"CUDA_VISIBLE_DEVICES": device}, lock=f"lock {device}")


def test_workloads_that_are_timed_first_prepare_while_proofs_run() -> None:
    mode = Early()
    assert mode.begun("0", "1") == (["b", "c"], ["b", "c"], 1), "d is not among the first"
    assert mode.given[0][0] == {i: mode.prove_task_seed(i) for i in "bc"}, "they draw the inputs that are proven"
    mode.proofs = {"b": WorkloadProof(id="b", seed=0)}
    assert mode.begun("0", "1") == (["b", "c"], ["c"], 1)
    assert mode.delivered == ["b"]
    mode.proofs = {i: WorkloadProof(id=i, seed=0) for i in "abcde"}
    assert mode.begun("0") == (["b", "c"], [], 1)
    assert mode.begun() == (["b", "c"], [], 2)
    mode._start_ahead([], [on("0")])
    assert len(mode.given) == 1
    for other in ({"unloaded": "why"}, {"same_launches": True}):
        mode.proofs["b"] = WorkloadProof(id="b", seed=0, **other)
        assert mode.begun() == (["c"], [], 2)
        assert "b" not in mode.delivered
        assert mode.dropped == ["b"]
    mode.failures["c"] = Failure(status=Status.UNMEASURED, message="")
    assert mode.begun() == ([], [], 2)
    assert mode.dropped == ["b", "c", "c"]
    mode.given.clear()
    mode.free = False
    mode._start_ahead("abcde", [])
    assert mode.given == []
    mode.on, mode.free = "cpu", True
    mode._start_ahead("abcde", [])
    assert mode.given == []


def test_both_processes_of_a_workload_that_needs_two_prepare_during_proofs() -> None:
    """Both processes prepare; only the first times the reference."""
    mode, tasks = Early(), list[Task]()
    mode.twice = "bd"
    noted = SimpleNamespace(
        **vars(mode.workers) | {"begin_early": lambda early, lanes, most: tasks.extend(early)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Early, "workers", noted)
        patch.setattr(mode, "timing_lanes", lambda tasks: [on("0"), on("1")] * 2)
        mode._start_ahead("abcde", [on("0"), on("1")])
    assert [(t.id, t.reference, t.awaits_proof) for t in tasks] == [
        ("b", FEW_BLOCKS, True),
        ("b", 0, True),
        ("c", FEW_BLOCKS, True),
        ("d", FEW_BLOCKS, True),
    ]
    assert tasks[0].seed == tasks[1].seed


@pytest.mark.parametrize(("workloads", "same", "sure"), [(8, "", 8), (9, "", 0), (9, "a", 8), (2, "ab", 0)])
def test_each_workload_runs_a_second_process_if_few_workloads_differ(workloads: int, same: str, sure: int) -> None:
    mode = Scripted(with_reference_of(0.1), [])
    mode.same_code = set(same)
    found = Paired._needed(mode, "abcdefghi"[:workloads])
    assert list(found.values()) == [2] * sure
    assert found.keys().isdisjoint(same)


@pytest.mark.parametrize(
    ("known", "took_s", "processes"),
    [("all", 4.9, 4), ("all", 5.0, 6), ("stored", 9.0, 2), ("nothing", 9.0, 2), ("on a CPU", 9.0, 2)],
)
def test_noisy_workloads_on_a_gpu_start_with_more_processes(
    tmp_path: Path, known: str, took_s: float, processes: int
) -> None:
    noisy = entry([measurement(accepted=a, ratio=1.0) for a in (-0.03, 0.0, 0.03)] * 2)

    class Few(Scripted):
        _needed = Paired._needed

        def entry(self, id: str) -> Entry | None:
            return None if known == "nothing" else noisy

        def margin(self, id: str) -> float:
            return 0.05

    mode = Few(noisy, [])
    mode.on = "cpu" if known == "on a CPU" else "cuda"
    mode.stored = {ID: "why"} if known == "stored" else {}
    mode.durations = lanes.Durations(tmp_path)
    mode.durations.note("time", ID, took_s)
    assert mode._needed([ID]) == {ID: processes}
    mode.decide([ID])
    assert len(mode.runs[ID]) == processes


@pytest.mark.parametrize(("cores", "busy", "most"), [(2, 2, 1), (16, 2, 2), (64, 2, 8), (2, 0, 2), (2, 1, 1)])
def test_number_of_workloads_that_prepare_depends_on_cores_and_busy_lanes(cores: int, busy: int, most: int) -> None:
    mode = Early()
    mode.cores = cores
    assert mode.begun(*"01"[:busy])[2] == most


@pytest.mark.parametrize(
    ("done", "likely", "further"),
    [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 1, 2), (3, 1, 3), (3, 3, 3), (4, 1, 2), (6, 2, 2)],
)
def test_requested_processes_complete_a_stage_of_the_rule(done: int, likely: int, further: int) -> None:
    """The rule may decide after 1, 2, 3, 4, 6, 8 or 12 processes, but not after five or seven."""
    mode = Scripted(with_reference_of(0.1), [])
    mode.on, mode.runs = "cuda", {ID: [measurement(accepted=0.0)] * done}
    assert mode._requested(ID, Undecided(processes=1, reason="", likely=likely)) == further
    assert done + further in decision.STAGES


@pytest.mark.parametrize(("warm_up_s", "further"), [(0.0, 2), (1.5, 2), (2.1, 4), (5.1, 6), (99.0, 6)])
def test_workloads_that_prepare_for_long_request_more_processes_at_once(warm_up_s: float, further: int) -> None:
    """Timing takes a second, so several processes can be timed while one prepares."""
    mode, last = Scripted(with_reference_of(0.1), []), measurement(accepted=0.0)
    last = replace(last, seconds=1.0 + warm_up_s, phases={"warm-up": warm_up_s, "timing": 0.9, "waiting": 50.0})
    mode.on, mode.runs = "cuda", {ID: [measurement(accepted=0.0), last]}
    assert mode._requested(ID, Undecided(processes=1, reason="")) == further
    mode.runs = {ID: [last]}
    assert mode._requested(ID, Undecided(processes=1, reason="")) == 1, "two decide most workloads"


def test_requested_processes_are_limited_by_the_memory_peak() -> None:
    mode = Scripted(with_reference_of(0.1), [])
    mode.on, mode.runs = "cuda", {ID: [measurement(accepted=0.0)]}
    peak = mode.accepted.peak_bytes()
    assert peak
    for beside in (1, 2, 3):
        mode.gpu_memory_bytes = int(beside * 2.01 * peak / 0.875)
        assert mode._requested(ID, Undecided(processes=1, reason="", likely=3)) == beside
    mode.runs = {ID: [measurement(accepted=0.0)] * 3}
    mode.gpu_memory_bytes = int(2 * 2.01 * peak / 0.875)
    assert mode._requested(ID, Undecided(processes=1, reason="", likely=3)) == 1, "five are no stage"
    mode.accepted = replace(mode.accepted, sides={})
    assert mode._requested(ID, Undecided(processes=1, reason="", likely=3)) == 1


def test_without_a_baseline_two_further_processes_are_requested() -> None:
    class Unknown(Scripted):
        @property
        def entries(self) -> Mapping[str, Entry]:
            return {}

    mode = Unknown(with_reference_of(0.1), [])
    mode.on, mode.runs = "cuda", {ID: [measurement(accepted=0.0)] * 2}
    assert mode._requested(ID, Undecided(processes=1, reason="", likely=4)) == 2


def test_a_one_sided_proof_is_repeated_if_the_accepted_side_raises() -> None:
    """The workload is proven again even if the sample has removed it from `same_code`."""
    mode = Scripted(with_reference_of(0.1), [])
    again: list[list[str]] = []
    mode.one_sided, mode.proofs = {ID}, {ID: WorkloadProof(id=ID, seed=0)}
    mode.failures = {ID: Failure(status=Status.UNMEASURED, message="the accepted side raises RuntimeError: twice")}
    mode.prove = lambda ids: (again.append(list(ids)), list(ids))[1]  # type: ignore[method-assign]
    mode._do = lambda tasks, further=None: None  # type: ignore[method-assign]
    mode._time({ID: Undecided(processes=1, reason="")}, set())
    assert again == [[ID]]
    assert (mode.one_sided, mode.failures, mode.proofs) == (set(), {}, {})
    mode.same_code = {ID, "other"}
    mode.without_revision(ID, "why")
    assert mode.same_code == {"other"}


class Crowded(Scripted):
    """Mode in which processes with these numbers lack memory if others run beside them."""

    def __init__(self, doubts: Sequence[bool], lacking: Collection[int]) -> None:
        super().__init__(with_reference_of(0.1), doubts)
        self.on, self.lacking, self.tried = "cuda", lacking, list[bool]()

    def work(self, tasks: Sequence[Task], *, further: Any = None, **given: Any) -> Any:
        left = deque(tasks)
        while left:
            left.popleft()
            self.tried.append(self.alone)
            if len(self.tried) in self.lacking and not self.alone:
                self.failures[ID] = Failure(
                    status=Status.UNMEASURED, message="the accepted side runs out of device memory"
                )
            else:
                self.runs.setdefault(ID, []).append(measurement(accepted=0.0))
            yield ID, None
            left.extend(further(ID) if further else ())


@pytest.mark.parametrize(
    ("doubts", "lacking", "alone"),
    [
        ([], {1}, [False, True]),
        ([False], {1, 2, 3}, [False, True, True]),
        ([False, False, False], {2}, [False, False, True, True, True]),
    ],
)
def test_a_workload_that_runs_out_of_memory_beside_others_then_runs_alone(
    doubts: list[bool], lacking: set[int], alone: list[bool]
) -> None:
    mode = Crowded(doubts, lacking)
    assert mode.decide([ID])[ID].status is Status.PASS
    assert mode.tried == alone


class AtOnce(Crowded):
    """Mode with a sampled workload whose first two processes fail as given in `failing`."""

    def __init__(self, failing: Mapping[int, Failure]) -> None:
        super().__init__([], ())
        self.failing, self.first = failing, list[bool]()

    def _sample(self, ids: Collection[str]) -> set[str]:
        return set(ids)

    def _time_task(self, id: str, *, first: bool, number: int = 0) -> Task:
        return Task(id=id, new_values=first)

    def work(self, tasks: Sequence[Task], *, further: Any = None, **given: Any) -> Any:
        left = deque(tasks)
        while left:
            self.first.append(left.popleft().new_values)
            self.keep(ID, self.failing.get(len(self.first)) or measurement(accepted=0.0))
            yield ID, None
            left.extend(further(ID) if further else ())

    def prove(self, ids: Collection[str]) -> list[str]:
        return list(ids)


CROWDED = Failure(status=Status.UNMEASURED, message="the optimized side runs out of device memory")
OWN_WORDS = Failure(status=Status.UNMEASURED, message="out of memory: 2 sequences need about 65 GiB; lower batch_size")
RAISES = Failure(status=Status.UNMEASURED, message="the accepted side raises RuntimeError: twice")
WRONG = Failure(status=Status.NOT_EQUIVALENT, message="wrong")


@pytest.mark.parametrize(
    ("failing", "first"),
    [
        ({}, [True, False]),
        ({1: CROWDED}, [True, False, True]),
        ({2: CROWDED}, [True, False, True]),
        ({1: CROWDED, 2: CROWDED}, [True, False, True]),
        ({1: OWN_WORDS}, [True, False, True]),
        ({1: RAISES}, [True, False, True]),
    ],
)
def test_the_first_process_is_repeated_if_one_of_two_at_once_fails(
    failing: Mapping[int, Failure], first: list[bool]
) -> None:
    """Only the first process times the reference and calls on new values."""
    mode = AtOnce(failing)
    mode.one_sided, mode.proofs = {ID}, {ID: WorkloadProof(id=ID, seed=0)}
    assert mode.decide([ID])[ID].status is Status.PASS
    assert mode.first == first
    assert len(mode.runs[ID]) == 2 - bool(failing)


@pytest.mark.parametrize("wrong", [1, 2])
@pytest.mark.parametrize("other", [CROWDED, RAISES])
def test_a_wrong_result_is_not_hidden_by_another_failure(wrong: int, other: Failure) -> None:
    mode = AtOnce({wrong: WRONG, 3 - wrong: other})
    mode.one_sided = {ID}
    assert mode.decide([ID])[ID].status is Status.NOT_EQUIVALENT
    assert mode.first == [True, False]


def test_accept_starts_no_timing_during_proofs() -> None:
    """The first process of a workload also times rivals, which only its own task lists."""
    mode: Any = SimpleNamespace(workers=None)
    assert Accept._begin_early(mode, [ID], []) is None


@pytest.mark.parametrize(
    ("promised", "seconds", "run", "asked"),
    [
        (2.0, 0.1, False, [FEW_BLOCKS, 0]),
        (3.0, 0.1, False, [None, None]),  # in doubt: the accepted speedup is e
        (3.0, 0.1, True, [FEW_BLOCKS, 0]),  # the rule says what further processes need
        (3.0, 5.0, False, [1, 1]),
        (None, 5.0, False, [0, 0]),
    ],
)
def test_first_processes_time_the_reference_in_full_if_its_promise_is_in_doubt(
    promised: float | None, seconds: float, run: bool, asked: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = Scripted(with_reference_of(seconds), [])
    monkeypatch.setattr(mode, "promises", lambda id: PromiseRecord(speedup=promised))
    monkeypatch.setattr(Scripted, "items", {ID: SimpleNamespace(pair=SimpleNamespace(time_limit=1.0))})
    monkeypatch.setattr(Scripted, "blocks", lambda self, id: None)
    monkeypatch.setattr(Scripted, "_is_slow_to_prepare", lambda self, id: False)
    mode.proofs = {}
    mode.runs = {ID: [measurement(accepted=0.0)]} if run else {}
    assert [Paired._time_task(mode, ID, first=first).reference for first in (True, False)] == asked
    assert Paired._time_task(mode, ID, first=False, number=6).reference == 0
    if promised:
        assert mode.prove_task(ID).reference == (FEW_BLOCKS if seconds < 1 else 1)


@pytest.mark.parametrize(("workloads", "sampled"), [(0, 0), (1, 1), (7, 7), (8, 8), (30, 8), (33, 9), (70, 18)])
def test_sample_size_is_a_quarter_of_the_workloads_and_at_least_eight(workloads: int, sampled: int) -> None:
    assert sample_size(workloads) == sampled


@pytest.mark.parametrize(
    ("seconds", "doubts", "asked"),
    [
        (0.1, [True, False], [FEW_BLOCKS, None, 0]),
        (0.1, [False, True], [FEW_BLOCKS, 0, None]),
        (5.0, [True, True, False], [1, 1, 1, 0]),  # a long reference is called once per process
        # The rule does not decide after five processes, so the sixth continues as the fifth did.
        (0.1, [False, False, False, True, False], [FEW_BLOCKS, 0, 0, 0, None, None]),
    ],
)
def test_the_reference_is_timed_again_while_its_promise_is_in_doubt(
    seconds: float, doubts: list[bool], asked: list[int | None]
) -> None:
    mode = Scripted(with_reference_of(seconds), doubts)
    verdicts = mode.decide([ID])
    assert mode.asked_for == asked
    assert verdicts[ID].status is Status.PASS
