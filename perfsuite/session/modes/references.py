"""Time references where no optimized side has run, and optimized sides where no test is running."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pytest

from perfsuite.declare.sides import as_side, module_of
from perfsuite.records import Alone, Measurement
from perfsuite.report import units
from perfsuite.revisions import digests, revision
from perfsuite.session import slowed_reference
from perfsuite.session.modes.paired import Paired
from perfsuite.session.tasks import ALONE, Failure, Outcome, Task
from perfsuite.session.worker_process import Lane, devices_of
from perfsuite.system import import_stubs


def slowed(run: Paired, ids: Collection[str], *, sparse: bool = False, outside: bool = False) -> dict[str, str]:
    """Return workload → message, for workloads whose optimized side slows the reference. With `outside`, include those
    whose optimized side is slower where no test is running.

    If a reference cannot be timed alone, add a note to the run. With `sparse`, also check references that were timed in
    only a few blocks.
    """
    found: dict[str, list[Alone]] = {
        i: [] for i in ids if slowed_reference.beside_s(run.runs.get(i, ()), sparse=sparse) is not None
    }

    again: dict[str, list[Measurement]] = {i: [] for i in found}
    """Further measurements of the suspected workloads, together with the optimized side."""

    def why(id: str) -> str:
        runs, times = [*run.runs[id], *again[id]], found[id]
        if slowed_reference.is_slowed(runs, times, sparse=sparse):
            return slowed_reference.message(runs, times, sparse=sparse)
        return slowed_reference.outside_message(runs, times) if slowed_reference.is_slower_outside(runs, times) else ""

    for attempt in range(slowed_reference.TRIES):
        tasks = [_task(run, i, outside) for i in found if attempt == 0 or why(i)]
        if tasks and not attempt:
            count = units.count(len(tasks), "reference")
            run.progress.say(f"{count} timed alone, to see whether an optimized side slows one")
        for id, outcome in _done(run, tasks, absent=True):
            if isinstance(outcome, Alone):
                found[id].append(outcome)
            elif isinstance(outcome, Failure):
                run.notes.append(f"{id}: its reference was not timed alone: {outcome.message}")
        beside = [
            _beside(run, i, outside) for i in found if found[i] and attempt + 1 < slowed_reference.TRIES and why(i)
        ]
        for id, outcome in _done(run, beside):
            if isinstance(outcome, Measurement):
                again[id].append(outcome)
    return {i: text for i, times in found.items() if len(times) == slowed_reference.TRIES and (text := why(i))}


def _beside(run: Paired, id: str, outside: bool) -> Task:
    """Return the task that times both sides once more, the reference in all blocks; with `outside`, also on the other
    clock."""
    return Task(id=id, limit_s=run.items[id].pair.time_limit, proof=run.proofs.get(id), thorough=outside)


def _task(run: Paired, id: str, outside: bool) -> Task:
    item, clock = run.items[id], run.runs[id][0].clock
    proof, limit_s = run.proofs.get(id), item.pair.time_limit
    return Task(id=id, kind=ALONE, limit_s=limit_s, proof=proof, clock=clock, outside=outside)


def _done(run: Paired, tasks: Sequence[Task], *, absent: bool = False) -> Iterator[tuple[str, Outcome]]:
    """Do the tasks and yield their outcomes, which the run does not keep. With `absent`, no optimized side can run."""
    for part in run.parts(tasks):
        lanes = run.lanes_for(part)
        yield from run.workers.run(part, _without_optimized(run, devices_of(lanes)) if absent else lanes)


def _without_optimized(run: Paired, lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Return these lanes, for processes in which no file runs that only an optimized side needs."""
    pairs = {item.pair.name: item for item in run.known.values()}.values()
    sides = [(module_of(as_side(i.pair.optimized)), module_of(as_side(i.pair.reference))) for i in pairs]
    modules = [m.obj for i in pairs if (m := i.getparent(pytest.Module)) is not None]
    files = digests.only_optimized(sides, modules, revision.top_or(run.root))
    variables = {import_stubs.ABSENT: os.pathsep.join(map(str, files))} if files else {}
    return [replace(lane, environment={**lane.environment, **variables}) for lane in lanes]
