"""Shared logic of the gate, `accept` and `compare`: time two revisions of the optimized side, in one process after
another, until each workload is decided."""

from __future__ import annotations

import functools
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from perfsuite import faults
from perfsuite.baseline.accepted_entries import Entry, short
from perfsuite.baseline.priors import SuiteNoise, suite_noise
from perfsuite.errors import RevisionError
from perfsuite.gate import confirmation, decision, estimates, planning, stages
from perfsuite.gate.decision import Undecided
from perfsuite.gate.estimates import Subject
from perfsuite.records import Measurement, PromiseRecord, Status, Verdict
from perfsuite.report import units
from perfsuite.revisions import revision
from perfsuite.revisions.revision import Tree
from perfsuite.session import gpu_sharing, lanes
from perfsuite.session.modes.base import Mode, failed
from perfsuite.session.progress import name_of
from perfsuite.session.tasks import PROVE, Failure, Task
from perfsuite.session.worker_process import Lane
from perfsuite.statistics.hierarchical import INFLATION_WORKLOADS

SAMPLE_SHARE = 4
"""One workload in SAMPLE_SHARE always runs a second process, to show whether this run is noisier than at acceptance."""
MOST_PROCESSES = 2 * stages.STAGES[-1]
"""Upper limit on the processes of a workload. The rule normally decides earlier."""
AT_ONCE, MOST_AT_ONCE = 2, 6
"""On a GPU, at least AT_ONCE further processes are requested once two have not decided a workload, and up to
MOST_AT_ONCE if it takes long to prepare. They prepare at the same time, which usually saves more than an unnecessary
last process costs."""
SLOW_PROCESS_S = 5.0
"""A workload is slow to prepare if its last process took at least this many seconds. Then one process too few costs
more than one too many."""
EARLY_SHARE = 8
"""While all cores prove, one in EARLY_SHARE prepares workloads to be timed. Those that are timed first take longest."""
RAISES = "the accepted side raises"


class Paired(Mode):
    """Base class of the runs that compare two revisions.

    `trees` has the revision with which each workload is compared, and `stored` the reason why it cannot be loaded for
    the others.
    """

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.trees: dict[str, Tree] = {}
        self.stored: dict[str, str] = {}
        self.same_code: set[str] = set()
        """Workloads whose current side provably runs the other revision's code."""
        self.full: set[str] = set()
        """Workloads whose promise is in doubt, so that the next process times the reference in more blocks."""
        self.seeds: dict[str, int] = {}
        """The seed of each workload's inputs: the proof and the processes that time it draw the same ones."""
        self.one_sided: set[str] = set()
        """Workloads that were proven without the other side, because both have the same code."""
        self.crowded: set[str] = set()
        """Workloads that ran out of device memory while other processes held some."""
        self.alone = False
        """Whether only one process prepares at a time."""

    @functools.cached_property
    def suite(self) -> SuiteNoise:
        """Noise of all accepted workloads."""
        return suite_noise(self.entries)

    def prove(self, ids: Collection[str]) -> list[str]:
        """Prove both sides of each workload on all cores, which also compiles their code. Return the ids not failed."""
        with gpu_sharing.proving(lane.lock for lane in self.timing_lanes(())):
            self._prove(ids, ahead=list(ids))
            unloaded = [i for i in ids if i in self.proofs and self.proofs[i].unloaded]
            for id in unloaded:
                self.without_revision(id, self.proofs.pop(id).unloaded)
            # Prove these in processes that have not imported the other revision: it may have changed what the current
            # side calls.
            self._prove([i for i in unloaded if i not in self.failures])
        return [i for i in ids if i not in self.failures]

    def _prove(self, ids: Collection[str], ahead: Sequence[str] = ()) -> None:
        """Prove these workloads. Meanwhile, start processes that will time those of `ahead`."""
        if not ids:
            return
        tasks = [self.prove_task(i) for i in ids]
        self.announce(tasks, proving=True)
        for _ in self.work(tasks, everywhere=True, ahead=ahead):
            _ = self.suite  # imports scipy, which takes half a second, while other proofs run
        crowded = [t for t in tasks if self._lacks_memory(t.id)]
        if not crowded:
            return
        self.workers.close()  # they hold memory
        for task in crowded:  # there was too little while others held some
            del self.failures[task.id]
        for _ in self.work(crowded):
            pass

    def _start_ahead(self, ids: Sequence[str], busy: Sequence[Lane]) -> None:
        super()._start_ahead(ids, busy)
        if ids and self.device == "cuda":
            self._begin_early(ids, busy)

    def _begin_early(self, ids: Collection[str], busy: Sequence[Lane]) -> None:
        """Let the workloads that are timed first prepare while proofs run. They get their proofs as these end.

        The number that prepare at the same time is the number of lanes without a `busy` process that proves, but at
        least one for each EARLY_SHARE cores. Those that have prepared wait, and others follow.
        """
        needed = self._needed(ids)
        timed = [Task(id=i, accepted=self._tree(i)) for i in ids if self._tree(i) for _ in range(needed.get(i, 1))]
        planned, chosen = self._planned(timed, everywhere=False)
        for proof in self.proofs.values():
            if self._is_proven(proof.id):
                self.workers.deliver(proof)
        self.workers.end_early([i for i in (*self.proofs, *self.failures) if not self._is_proven(i)])
        if self.workers.is_any_free(chosen):
            first = Counter(task.id for task in planned[: len(chosen)] if self._may_begin(task.id))
            most = max(1, self.machine.cores // EARLY_SHARE, len(chosen) - len(busy))
            early = [task for id, processes in first.items() for task in self._time_tasks(id, processes)]
            self.workers.begin_early([self._awaiting(task) for task in early], chosen, most)

    def _is_proven(self, id: str) -> bool:
        proof = self.proofs.get(id)
        return proof is not None and not proof.unloaded and not proof.same_launches and id not in self.failures

    def _may_begin(self, id: str) -> bool:
        """Return whether the workload is proven or, while its proof has not ended, is accepted."""
        if id in self.proofs or id in self.failures:
            return self._is_proven(id)
        return self.entry(id) is not None

    def _awaiting(self, task: Task) -> Task:
        return task if task.proof else replace(task, seed=self._seed(task.id), awaits_proof=True)

    def _seed(self, id: str) -> int:
        return self.seeds.setdefault(id, secrets.randbits(31))

    def without_revision(self, id: str, reason: str) -> None:
        """Note that the workload cannot be timed beside the other revision, for this reason."""
        self.stored[id] = reason
        self.same_code.discard(id)

    def prove_task(self, id: str) -> Task:
        """Return the task that proves a workload and prepares what the first process needs."""
        entry, promised = self.entry(id), self.promises(id).speedup
        same_code = tuple(entry.ran.sources) if id in self.same_code and entry and entry.ran else ()
        self.one_sided |= {id} if same_code else set()
        return Task(
            id=id,
            kind=PROVE,
            limit_s=self.items[id].pair.time_limit,
            accepted=self._tree(id),
            same_code=same_code,
            seed=self._seed(id),
            reference=self.reference(id, first=True),
            slow=entry is not None and planning.is_slow(entry),
            enough_s=planning.enough_s(entry, promised) if entry and id not in self.stored else 0.0,
            thorough=False,
        )

    def reference(self, id: str, *, first: bool) -> int | None:
        """Return the number of blocks in which the reference is timed; None for all.

        These are all blocks if no other revision is loaded, more if the promise is in doubt, otherwise few or none.
        """
        entry = self.entry(id)
        if id in self.stored:
            return None
        if id in self.full:
            return planning.more_reference_blocks(entry) if entry else None
        if not first:
            return 0
        return planning.reference_blocks(entry, self.promises(id).speedup) if entry else planning.FEW_BLOCKS

    def blocks(self, id: str) -> int | None:
        """Return the number of blocks of a process; None for the usual number."""
        entry = self.entry(id)
        if entry is None or id in self.stored:
            return None
        return planning.blocks_of(entry, self._margin(id, entry))

    def _margin(self, id: str, entry: Entry) -> float:
        return self.margin(id) or estimates.margin_of(entry, self.suite, selected=max(1, len(self.items)))

    def decide(self, ids: Collection[str]) -> dict[str, Verdict]:
        """Time the workloads, one process after another, until the rule has decided each. Return their verdicts."""
        needed = self._needed(ids)
        sample = self._sample(ids)
        needed |= dict.fromkeys(sample - needed.keys(), 2)
        left = {i: Undecided(processes=needed.get(i, 1), reason="nothing was measured") for i in ids}
        verdicts: dict[str, Verdict] = {}
        opened: dict[str, Undecided] = {}
        while left:
            self._time(left, sample)
            answers = self._analysed([i for i in ids if i not in self.failures], sample)
            verdicts = {i: a for i, a in answers.items() if isinstance(a, Verdict)}
            # A verdict may be withdrawn because others, measured later, show that the run is noisy.
            opened = {i: a for i, a in answers.items() if isinstance(a, Undecided)}
            left = {i: a for i, a in opened.items() if len(self.runs.get(i, ())) < MOST_PROCESSES}
            self.progress.say(_round(verdicts.values(), opened))
        verdicts |= {i: self.undecided(i, answer) for i, answer in opened.items()}
        verdicts |= self._confirm(verdicts)
        return verdicts | {i: failed(i, self.failures[i]) for i in ids if i in self.failures}

    def _analysed(self, ids: Collection[str], sample: Collection[str]) -> dict[str, Verdict | Undecided]:
        """Return the rule's answer for each of these workloads, from the processes measured so far."""
        subjects = [self._subject(i, sampled=i in sample) for i in ids]
        answers = decision.analyse(subjects, self.suite, selected=max(1, len(self.items)))
        for id, answer in answers.items():
            if isinstance(answer, Undecided) and answer.reference:
                self.full.add(id)
            elif len(self.runs.get(id, ())) in stages.STAGES:
                self.full.discard(id)
        return answers

    def _time(self, left: Mapping[str, Undecided], sample: Collection[str]) -> None:
        """Time each workload in as many processes as its answer asks for, then in those that the rule requests."""
        due = {id: answer.processes for id, answer in left.items()}

        def further(id: str) -> list[Task]:
            due[id] -= 1
            if due[id] or id in self.failures:
                return []
            # Only workloads with two processes or more show how noisy this run is.
            several = [i for i, runs in self.runs.items() if len(runs) > 1 and i not in self.failures]
            answer = self._analysed({*several, id}, sample)[id]
            if not isinstance(answer, Undecided) or len(self.runs[id]) >= MOST_PROCESSES:
                return []
            due[id] = self._requested(id, answer)
            tasks = self._time_tasks(id, due[id])
            self.progress.add(len(tasks))
            return tasks

        apart = self.crowded.intersection(left)
        several = {i for i, a in left.items() if i not in self.runs and a.processes > 1}
        self._do([t for i, a in left.items() if i not in apart for t in self._time_tasks(i, a.processes)], further)
        raised = [i for i in self.one_sided.intersection(left) if self._has_failed(i, RAISES)]
        self.crowded |= {i for i in left if self._lacks_memory(i)}
        for id in several.intersection(self.failures):
            self.runs.pop(id, None)  # the process that failed may be the first one, which measures more
        self._prove_again(raised)
        if apart := self.crowded.intersection(left):
            for id in apart:
                self.failures.pop(id, None)
            self.workers.close()  # some may have begun to prepare while others were proven again
            self.alone = True
            self._do([task for i in apart for task in self._time_tasks(i, 1)])
            self.alone = False

    def _prove_again(self, ids: Collection[str]) -> None:
        """Prove again the workloads whose accepted side raises. Their first proof left that side out, so it did not
        check whether two imports of the code can run in one process."""
        self.same_code.difference_update(ids)
        self.one_sided.difference_update(ids)
        for id in ids:
            del self.failures[id], self.proofs[id]
        if ids:
            self.prove(ids)

    def _lacks_memory(self, id: str) -> bool:
        return id in self.failures and faults.says_out_of_memory(self.failures[id].message)

    def _has_failed(self, id: str, why: str) -> bool:
        return id in self.failures and why in self.failures[id].message

    def _requested(self, id: str, answer: Undecided) -> int:
        """Return how many further processes of an undecided workload are started. On a GPU, it is as many as will
        probably be needed."""
        if self.device != "cuda":
            return answer.processes
        done = len(self.runs[id])
        wanted = max(answer.processes, answer.likely, _at_once(self.runs[id][-1]) if done > 1 else 1)
        wanted = next((n for n in stages.STAGES if n >= done + wanted), MOST_PROCESSES) - done
        entry = self.entries.get(id)
        if entry is None:
            return min(wanted, max(answer.processes, AT_ONCE))
        beside = self._together([entry.peak_bytes()] * wanted) * max(1, self.machine.count)
        fitting = [n - done for n in (*stages.STAGES, MOST_PROCESSES) if 0 < n - done <= min(wanted, beside)]
        return max(answer.processes, *fitting, 0)

    def _do(self, tasks: Sequence[Task], further: Callable[[str], Sequence[Task]] | None = None) -> None:
        """Announce the timing tasks and do them."""
        self.announce(tasks)
        for _ in self.work(tasks, further=further):
            pass

    def _confirm(self, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
        """Return the verdicts on small slowdowns, after timing the current code against a second import of itself."""
        small = [i for i, v in verdicts.items() if confirmation.is_needed(v, self.runs[i], self.entry(i))]
        if not small:
            return {}
        self.progress.say(f"{units.count(len(small), 'small slowdown')}: is the current code as fast as its own copy?")
        measured, self.runs = self.runs, {}
        try:
            with revision.extracted([revision.snapshot(self.root)], self.root, self.scratch / "revisions") as (
                trees,
                _,
            ):
                for tree in trees.values():
                    again = [replace(self._time_task(i, first=True), accepted=tree, reference=0) for i in small]
                    self._do([task for task in again for _ in range(stages.RED_PROCESSES)])
            twice = self.runs
        except RevisionError:  # the verdicts stay as they are
            return {}
        finally:
            self.runs = measured
            for id in small:
                self.failures.pop(id, None)
        return {
            i: confirmation.confirmed(verdicts[i], runs)
            for i, runs in twice.items()
            if len(runs) == stages.RED_PROCESSES
        }

    def timing_lanes(self, tasks: Sequence[Task]) -> list[Lane]:
        """Return the lanes for timing. On a GPU, several processes prepare at the same time, as many as fit into
        its memory by their accepted peaks."""
        if self.device != "cuda" or self.alone:
            return super().timing_lanes(tasks)
        entries = [self.entries.get(task.id) for task in tasks]
        beside = self._together([e.peak_bytes() if e else None for e in entries])
        return lanes.for_timing(self.machine, self.workers.folder, beside)

    def _together(self, peaks: Collection[int | None]) -> int:
        return lanes.together(self.gpu_memory_bytes, peaks, self.machine.cores // max(1, self.machine.count))

    def _sample(self, ids: Collection[str]) -> set[str]:
        """Draw the sample at random from the workloads whose code differs.

        If these are too few to show how noisy this run is, workloads with the accepted code are added, and treated as
        if their code differed.
        """
        others = [i for i in ids if i not in self.same_code]
        sample = self._drawn(others, sample_size(len(others)))
        if not others:
            return sample
        same = self._drawn(self.same_code.intersection(ids), INFLATION_WORKLOADS - len(sample))
        self.same_code -= same
        return sample | same

    def _needed(self, ids: Collection[str]) -> dict[str, int]:
        """Return the number of processes that each workload runs before the rule first decides, where this is certain.

        It is certain for the workloads whose code differs, if they are few enough that the sample contains all of them.
        """
        others = [i for i in ids if i not in self.same_code]
        return {i: self._first_processes(i) for i in others} if sample_size(len(others)) == len(others) else {}

    def _first_processes(self, id: str) -> int:
        entry = self.entry(id)
        if entry is None or id in self.stored or self.device != "cuda":
            return 2
        return planning.first_processes(
            entry,
            self._margin(id, entry),
            self.suite.of(entry.clock).paired,
            slow_to_prepare=self._is_slow_to_prepare(id),
        )

    def _is_slow_to_prepare(self, id: str) -> bool:
        return self.durations.of(Task(id=id)) >= SLOW_PROCESS_S

    def _drawn(self, ids: Collection[str], size: int) -> set[str]:
        """Return `size` of the ids at random, or all if there are no more. If there are many, draw from the half that
        takes the least time."""
        cheap = sorted(ids, key=lambda i: self.expected_s(Task(id=i)))[: max(size, math.ceil(len(ids) / 2))]
        return set(random.SystemRandom().sample(cheap, max(0, min(size, len(cheap)))))

    def _time_tasks(self, id: str, processes: int) -> list[Task]:
        """Return the tasks of the next processes of a workload. Only its first process times calls on new values, and
        samples the reference if that is enough."""
        first = id not in self.runs
        return [self._time_task(id, first=first and n == 0, number=n) for n in range(processes)]

    def _time_task(self, id: str, *, first: bool, number: int = 0) -> Task:
        """Return the task of one process. `number` is its index among those that begin together."""
        reference, entry = self.reference(id, first=first), self.entry(id)
        if reference is not None and entry and id not in self.runs and number < self._doubtful_processes(id, entry):
            reference = planning.more_reference_blocks(entry)
        return Task(
            id=id,
            limit_s=self.items[id].pair.time_limit,
            accepted=self._tree(id),
            proof=self.proofs.get(id),
            reference=reference,
            blocks=self.blocks(id),
            thorough=False,
            new_values=first,
        )

    def _doubtful_processes(self, id: str, entry: Entry) -> int:
        """Return how many processes have to time the reference in more blocks, because few samples would leave the
        promise in doubt."""
        noise, slow = self.suite.of(entry.clock).ratio, self._is_slow_to_prepare(id)
        promised, first = self.promises(id).speedup, self._first_processes(id)
        return planning.doubtful_processes(entry, promised, noise, first=first, slow_to_prepare=slow)

    def _tree(self, id: str) -> Tree | None:
        """Return the tree of the other revision, or None if the workload is not timed against one."""
        return None if id in self.stored else self.trees.get(id)

    def _subject(self, id: str, *, sampled: bool) -> Subject:
        tree = self.trees.get(id)
        return Subject(
            id=id,
            runs=tuple(self.runs.get(id, ())),
            entry=self.entry(id),
            promises=self.promises(id),
            margin=self.margin(id),
            against=f"{self.words} {short(tree.revision)}" if tree else "",
            stored=self.stored.get(id, ""),
            sampled=sampled,
            same_code=id in self.same_code and id not in self.stored,
        )

    words = "the revision"

    def entry(self, id: str) -> Entry | None:
        """Return the accepted entry of the workload, if it matters to this mode."""
        return None

    def promises(self, id: str) -> PromiseRecord:
        """Return the promises that this mode checks."""
        return PromiseRecord()

    def undecided(self, id: str, answer: Undecided) -> Verdict:
        """Return the verdict on a workload that the rule has not decided after MOST_PROCESSES processes."""
        return failed(
            id, Failure(status=Status.NOISY, message=f"not decided after {MOST_PROCESSES} processes: {answer.reason}")
        )

    def unmeasured(self, id: str, reason: str) -> Verdict:
        """Return the verdict on a workload that was not measured."""
        return failed(id, Failure(status=Status.UNMEASURED, message=reason))


def sample_size(workloads: int) -> int:
    """Return how many of this many workloads always run a second process.

    It is a quarter of them, but at least INFLATION_WORKLOADS (or all if there are fewer), because the estimate of the
    run's noise needs that number.
    """
    return max(math.ceil(workloads / SAMPLE_SHARE), min(workloads, INFLATION_WORKLOADS))


def _at_once(last: Measurement) -> int:
    """Return the fewest further processes to request: as many as can be timed while one prepares."""
    prepared = last.phases.get("warm-up", 0.0)
    alone = last.seconds - prepared
    return max(AT_ONCE, min(MOST_AT_ONCE, math.ceil(prepared / alone))) if alone > 0 else AT_ONCE


def _round(verdicts: Iterable[Verdict], opened: Mapping[str, Undecided]) -> str:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    decided = ", ".join(f"{n} {status}" for status, n in counts.items()) or "nothing decided"
    if not opened:
        return f"{decided}; all decided"
    first, reason = next((i, a.reason) for i, a in opened.items())
    return f"{decided}; {len(opened)} go on, e.g. {name_of(first)}: {reason}"
