"""`perfsuite compare --python`: time the optimized sides in this environment and in another, in turns."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from perfsuite.gate import exit_codes
from perfsuite.gate.counts import NAMES, shown
from perfsuite.records import OPTIMIZED, Measurement, Status, WorkloadProof
from perfsuite.report import terminal, units
from perfsuite.report.files import write
from perfsuite.session.environments import collection, interpreter, report, results, rule
from perfsuite.session.environments.interpreter import Interpreter
from perfsuite.session.environments.report import Comparison
from perfsuite.session.environments.rule import Change, Compared
from perfsuite.session.modes.whole import Whole
from perfsuite.session.tasks import NEVER_REACHED, PROVE, Failure, Outcome, Task
from perfsuite.session.worker_pool import Workers, pytest_arguments
from perfsuite.session.worker_process import Lane
from perfsuite.system.folders import socket_folder
from perfsuite.timing import alternation


class _StoppedError(Exception):
    """Ends the processes of one environment because those of the other have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Environment:
    """One of the two environments, with what starts its processes."""

    lane: Lane
    workers: Workers
    where: str
    """"here" or "there"."""


class Environments(Whole):
    """Comparison of two environments. The first is the one that runs pytest."""

    mode = "environments"
    found: Comparison | None = None

    def whole(self) -> None:
        began = monotonic()
        ids = self._comparable()
        if not ids:
            self.refuse("nothing to compare: no timed item of a pair for this machine was selected")
            return
        there = interpreter.describe(self.arguments["python"], self.root)
        here = interpreter.here(self.root)
        interpreter.check(here, there)
        lane = self.timing_lanes(())[0]
        both = (
            _Environment(lane=lane, workers=self.workers, where="here"),
            _Environment(
                lane=replace(lane, python=there.path),
                workers=replace(self.workers, progress=lambda lane, id: None, _waiting=[]),
                where="there",
            ),
        )
        failed = self._not_collected(ids, there)
        proofs, unproven = self._proven([i for i in ids if i not in failed], both)
        failed |= unproven
        left = [i for i in ids if i not in failed]
        timed: dict[str, list[tuple[Measurement, Measurement]]] = {i: [] for i in left}
        for number in range(int(self.arguments["processes"])):
            todo = [i for i in left if i not in failed]
            for id, outcome in self._timed(todo, both, proofs, number).items() if todo else ():
                if isinstance(outcome, Compared):
                    failed[id] = outcome
                else:
                    timed[id].append(outcome)
        measured = _compared({i: t for i, t in timed.items() if i not in failed}, len(ids))
        workloads = {**failed, **_with_notes(measured, *proofs)}
        self.found = Comparison(
            device=self.machine.device_name,
            here=here,
            there=there,
            workloads=tuple(workloads[i] for i in ids),
            seconds=monotonic() - began,
        )
        self.written["json"] = write(Path(self.arguments["file"]), report.document(self.found))

    def _comparable(self) -> list[str]:
        ids = self.measurable()
        several = [i for i in ids if self.ranks_of(i) > 1]
        if several:
            self.notes.append(f"{units.count(len(several), 'workload')} of several processes: not compared")
        return [i for i in ids if i not in several]

    def _not_collected(self, ids: Sequence[str], there: Interpreter) -> dict[str, Compared]:
        """Return the results of workloads whose modules the other environment cannot import. Such a module would end a
        process that collects it together with others."""
        module = {i: i.partition("::")[0] for i in ids}
        why = collection.failures(there, dict.fromkeys(module.values()), pytest_arguments(self.config), self.root)
        return {
            i: Compared(id=i, change=Change.UNTIMED, message=f"there, {module[i]} cannot be imported: {why[module[i]]}")
            for i in ids
            if module[i] in why
        }

    def _proven(
        self, ids: Sequence[str], both: Sequence[_Environment]
    ) -> tuple[list[dict[str, WorkloadProof]], dict[str, Compared]]:
        """Prove the workloads in each environment, which also compiles their code there.

        Return (the proofs of each environment, the results of workloads that are not proven in both).
        """
        outcomes: list[dict[str, Outcome]] = []
        seeds = {i: secrets.randbits(31) for i in ids}  # equal in both: the time of some workloads depends on values
        for one in both:
            tasks = [
                Task(
                    id=i,
                    kind=PROVE,
                    limit_s=self._limit_s(i),
                    seed=seeds[i],
                    reference=0,
                    thorough=False,
                    summarise=True,
                )
                for i in ids
            ]
            lanes = [replace(lane, forked=False, python=one.lane.python) for lane in self.lanes_for(tasks, True)]
            self.progress.expect(f"{units.count(len(tasks), 'proof')} {one.where}", len(tasks))
            outcomes.append(_outcomes(one.workers, tasks, lanes))
        self.progress.done()
        proofs = [{i: o for i, o in found.items() if isinstance(o, WorkloadProof)} for found in outcomes]
        failed = {i: _unproven(i, *(found[i] for found in outcomes)) for i in ids if not all(i in p for p in proofs)}
        return proofs, failed | _differing(*({i: p for i, p in found.items() if i not in failed} for found in proofs))

    def _timed(
        self,
        ids: Sequence[str],
        both: Sequence[_Environment],
        proofs: Sequence[Mapping[str, WorkloadProof]],
        number: int,
    ) -> dict[str, tuple[Measurement, Measurement] | Compared]:
        """Time these workloads in one further pair of processes."""
        self.progress.expect(f"{units.count(len(ids), 'workload')} in turns, pair {number + 1}", len(ids))
        with socket_folder() as folder:
            places = {id: f"{folder}/{n}" for n, id in enumerate(ids)}

            def tasks(side: int) -> list[Task]:
                return [
                    Task(
                        id=i,
                        limit_s=self._limit_s(i),
                        proof=proofs[side][i],
                        reference=0,
                        thorough=False,
                        new_values=number == 0,
                        alternates=places[i],
                        second=(side + number) % 2 == 1,
                    )
                    for i in ids
                ]

            def abandon(id: str, outcome: Outcome) -> None:
                if isinstance(outcome, Failure):
                    alternation.abandon(places[id])

            def ended(id: str, outcome: Outcome) -> None:
                abandon(id, outcome)
                if outcome is not NEVER_REACHED:  # NEVER_REACHED: the run was interrupted
                    self.progress.ended(id, "failed" if isinstance(outcome, Failure) else "timed")

            stop = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                here, there = both
                other = pool.submit(_outcomes, there.workers, tasks(1), [there.lane], abandon, stop)
                try:
                    first = _outcomes(here.workers, tasks(0), [here.lane], ended, stop)
                except BaseException:
                    stop.set()
                    raise
                second = other.result()
        return {i: _together(i, first[i], second[i]) for i in ids}

    def _limit_s(self, id: str) -> float:
        return self.items[id].pair.time_limit

    def exit_code(self) -> int:
        if self.found is None:
            return super().exit_code()
        if self.found.of(Change.SLOWER, Change.UNEQUAL):
            return exit_codes.CODE_AT_FAULT
        return exit_codes.UNDECIDED if self.found.of(Change.UNTIMED) else exit_codes.GREEN

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        out = terminal.console(terminalreporter._tw._file)
        terminalreporter.section("perfsuite", sep="=")
        if self.found is not None:
            report.show(self.found, out)
        elif not self.problems:
            terminalreporter.write_line("✗ the run ended before all was compared: no file is written", red=True)
        for line in (*self.problems, *self.notes, *(f"{form}: {path}" for form, path in self.written.items())):
            terminalreporter.write_line(line)


def _outcomes(
    workers: Workers,
    tasks: Sequence[Task],
    lanes: Sequence[Lane],
    ended: Callable[[str, Outcome], None] = lambda id, outcome: None,
    stop: threading.Event | None = None,
) -> dict[str, Outcome]:
    """Do the tasks and return their outcomes, NEVER_REACHED for a task that has none. Call `ended` with each."""
    found: dict[str, Outcome] = {}

    def check(busy: Sequence[Lane]) -> None:
        if stop is not None and stop.is_set():
            raise _StoppedError

    try:
        with closing(workers.run(tasks, lanes, check)) as outcomes:
            for id, outcome in outcomes:
                found[id] = outcome
                ended(id, outcome)
    finally:
        for task in tasks:
            if task.id not in found:
                found[task.id] = NEVER_REACHED
                ended(task.id, NEVER_REACHED)
    return found


def _failed(id: str, outcome: Outcome, where: str) -> Compared:
    """Return the result of a workload that failed in one environment."""
    failure = outcome if isinstance(outcome, Failure) else NEVER_REACHED
    change = Change.UNEQUAL if failure.status is Status.NOT_EQUIVALENT else Change.UNTIMED
    return Compared(id=id, change=change, message=f"{where}, {failure.message}")


def _unproven(id: str, here: Outcome, there: Outcome) -> Compared:
    """Return the result of a workload that is not proven in both environments."""
    sides = {"here": here, "there": there}
    failed = [_failed(id, outcome, where) for where, outcome in sides.items() if not isinstance(outcome, WorkloadProof)]
    messages = [one.message for one in failed]
    if len(failed) < len(sides):
        messages.append(f"{next(w for w, o in sides.items() if isinstance(o, WorkloadProof))} it is proven")
    worst = next((one for one in failed if one.change is Change.UNEQUAL), failed[0])
    return replace(worst, message="; ".join(messages))


def _differing(here: Mapping[str, WorkloadProof], there: Mapping[str, WorkloadProof]) -> dict[str, Compared]:
    """Return the results of workloads whose references compute other values in the other environment."""
    found = {}
    for id, proof in here.items():
        one, other = proof.summaries, there[id].summaries
        if results.are_inputs_equal(one, other) and (words := results.difference(one, other)):
            text = f"in float64 the reference computes other values there: {words}"
            found[id] = Compared(id=id, change=Change.UNEQUAL, message=text)
    return found


def _with_notes(
    measured: Mapping[str, Compared], here: Mapping[str, WorkloadProof], there: Mapping[str, WorkloadProof]
) -> dict[str, Compared]:
    """Return the results with a line for each workload whose inputs the environments draw differently."""
    return {
        i: one
        if results.are_inputs_equal(here[i].summaries, there[i].summaries)
        else replace(one, costs=(*one.costs, results.NOT_COMPARED))
        for i, one in measured.items()
    }


def _together(id: str, here: Outcome, there: Outcome) -> tuple[Measurement, Measurement] | Compared:
    """Return both measurements of a workload, or a result that says why they are missing."""
    if isinstance(here, Measurement) and isinstance(there, Measurement):
        if here.clock == there.clock:
            return here, there
        text = f"it is timed by the {here.clock} clock here and by the {there.clock} clock there"
        return Compared(id=id, change=Change.UNTIMED, message=text)
    sides = {"here": here, "there": there}
    failures = {where: o for where, o in sides.items() if not isinstance(o, Measurement)}
    # If one process ends, the other one only reports that.
    own = {w: o for w, o in failures.items() if not (isinstance(o, Failure) and alternation.ENDED in o.message)}
    where, outcome = next(iter((own or failures).items()))
    return _failed(id, outcome, where)


def _compared(timed: Mapping[str, Sequence[tuple[Measurement, Measurement]]], workloads: int) -> dict[str, Compared]:
    """Return the change of each workload, from its pairs of processes."""
    clocks = {i: pairs[0][0].clock for i, pairs in timed.items()}
    means = {i: [rule.pair_mean(_blocks(a), _blocks(b), a.clock) for a, b in pairs] for i, pairs in timed.items()}
    found = {}
    for id, one in rule.estimates(means, clocks).items():
        change, interval = rule.change_of(one, workloads)
        seconds = [median(s for m in side for s in _blocks(m)) for side in zip(*timed[id], strict=True)]
        found[id] = Compared(
            id=id,
            change=change,
            clock=clocks[id],
            seconds=(seconds[0], seconds[1]),
            ratio=math.exp(one.value),
            interval=interval,
            means=tuple(map(math.exp, means[id])),
            costs=_costs(timed[id]),
        )
    return found


def _blocks(measurement: Measurement) -> tuple[float, ...]:
    return measurement.sides[OPTIMIZED].blocks_s


def _costs(pairs: Sequence[tuple[Measurement, Measurement]]) -> tuple[str, ...]:
    """Return a line for each count of a call that is larger in the same environment in every pair of processes."""
    found = []
    for name, noun in NAMES.items():
        counted = [tuple(getattr(m.sides[OPTIMIZED], name) for m in pair) for pair in pairs]
        if None in itertools.chain(*counted):
            continue
        if all(a < b for a, b in counted) or all(a > b for a, b in counted):
            before, after = counted[0]
            found.append(f"{noun} {shown(name, before)} here, {shown(name, after)} there")
    return tuple(found)
