"""`perfsuite accept`: measure on this machine and write the figures into its baseline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from perfsuite.baseline import accepted_entries, storage
from perfsuite.baseline.accepted_entries import Entry
from perfsuite.baseline.priors import suite_noise
from perfsuite.errors import BaselineError
from perfsuite.gate import decision, estimates
from perfsuite.records import Ran, Status, Verdict
from perfsuite.report import units
from perfsuite.revisions import digests, revision
from perfsuite.session import changed
from perfsuite.session.modes import references
from perfsuite.session.modes.base import failed
from perfsuite.session.modes.paired import Paired
from perfsuite.session.modes.whole import Whole
from perfsuite.session.progress import name_of
from perfsuite.session.resuming import Kept
from perfsuite.session.tasks import ALONE, Failure, Task
from perfsuite.session.worker_process import Lane

PROCESSES = 5
THOROUGH_PROCESSES = 1
"""Number of processes that also time rivals. More are not needed to rank a rival, and each process has to trace it
again."""


class Accept(Whole, Paired):
    """Acceptance. The code is compared with its own commit, HEAD (an A/A comparison). The gate uses its noise."""

    mode = history = "accept"

    def check(self) -> None:
        if self.items:
            self._state()
            storage.check_writable(self.baselines.path(1))

    def whole(self) -> None:
        if not self.items:
            self.refuse("nothing to accept: no timed item of a pair was selected; see `perfsuite list`")
            return
        before = self._state()
        self.baselines.load()  # a damaged file is reported before the minutes of measuring
        ids = self.measurable()
        if not ids:
            self.refuse(f"nothing to accept: none of {len(self.items)} selected workloads is for {self.machine.device}")
            return
        if self.more:
            ids = self._may_have_more(ids, before)
            if not ids:
                return  # self.problems says why, for each
        loadable = [before.revision] if before.revision and not before.dirty else []
        with revision.extracted(loadable, self.root, self.scratch / "revisions") as (trees, refused):
            self.trees = {i: tree for tree in trees.values() for i in ids}
            self.stored = {i: str(error) for error in refused.values() for i in ids}
            self._measure(ids, before)
        if self._state() != before:
            raise BaselineError(
                "the work tree changed while it was measured, so that the figures may be of other code; nothing was "
                "accepted: accept again, and leave the tree alone meanwhile"
            )
        self._write(ids, before)

    @property
    def more(self) -> bool:
        """Whether this run adds a session to the accepted figures. Rivals are then not timed again."""
        return self.arguments.get("more") == "yes"

    def _may_have_more(self, ids: Sequence[str], state: revision.State) -> list[str]:
        """Return the ids whose accepted figures are of the current code. For each of the others, add a problem that
        says why they are not."""
        if state.dirty or state.revision is None:
            why = dict.fromkeys(ids, "the current code is not committed")
        else:
            before = {i: e for i in ids if (e := self.entries.get(i)) and (e.dirty or e.revision != state.revision)}
            why = changed.other_code(before, revision.top_or(self.root), self.machine)
        why |= {i: "it has no accepted figures" for i in ids if i not in self.entries}
        self._leave_out({i: why[i] for i in ids if i in why})
        return [i for i in ids if i not in why]

    def _leave_out(self, why: Mapping[str, str]) -> None:
        self.problems += [f"not accepted: {i}: {text}; accept it without --more" for i, text in why.items()]

    def _state(self) -> revision.State:
        """Return git's state of the work tree. Raises BaselineError if its code could not be loaded again, unless that
        is allowed."""
        # The figures of another shard may not be committed yet.
        found = revision.state(self.root, ignored=self.baselines.folder)
        allowed = self.arguments.get("dirty") == "yes"
        if found.dirty and not allowed:
            raise BaselineError(
                "the work tree has uncommitted changes, so that the accepted code could not be loaded again; "
                "commit them, or accept with --allow-dirty"
            )
        if found.problem and not allowed:
            raise BaselineError(
                f"the accepted code could not be loaded again: {found.problem}; commit it to git, or accept with "
                "--allow-dirty and be gated by stored figures alone"
            )
        return found

    def _measure(self, ids: Sequence[str], state: revision.State) -> None:
        wanted = int(self.arguments.get("processes", PROCESSES))
        self._kept = Kept(self.scratch / "accept", state, self.machine, wanted, more=self.more)
        try:
            self._measure_with(self._kept, ids, wanted)
        finally:  # also after an interrupt
            if revision.quiet_state(self.root, ignored=self.baselines.folder) != state:
                self._kept.forget()  # the measurements may be of other code

    def _measure_with(self, kept: Kept, ids: Sequence[str], wanted: int) -> None:
        """Measure each workload in `wanted` processes, of which those in `kept` count."""
        self.runs = kept.load(ids)
        if self.runs:
            self.progress.say(f"resuming: {sum(map(len, self.runs.values()))} measurements of an interrupted run count")
        proven = self.prove(ids)  # also those that are resumed: a proof records what code ran
        for id in [i for i in proven if i in self.stored]:
            self.notes.append(f"{id}: the gate will compare it with stored figures: {self.stored[id]}")

        def further(id: str) -> list[Task]:
            return [self._accept_task(id)] if id not in self.failures and len(self.runs.get(id, ())) < wanted else []

        timed = [self._accept_task(i) for i in proven for _ in range(wanted - len(self.runs.get(i, ())))]
        self.announce(timed, after=[Task(id=i, kind=ALONE) for i in proven])
        for id, outcome in self.work([task for i in proven for task in further(i)], further=further):
            kept.add(id, outcome)
        for id, text in references.slowed(self, [i for i in proven if i not in self.failures], outside=True).items():
            self.keep(id, Failure(status=Status.NOT_TIMED, message=text))

    def _begin_early(self, ids: Collection[str], busy: Sequence[Lane]) -> None:
        """Do nothing: here proofs need the truth, and with it the memory in which other processes would prepare."""

    def _accept_task(self, id: str) -> Task:
        """Return the task that times a workload in its next process."""
        number = len(self.runs.get(id, ()))
        return Task(
            id=id,
            limit_s=self.items[id].pair.time_limit,
            accepted=self._tree(id),
            proof=self.proofs.get(id),
            thorough=number < THOROUGH_PROCESSES and not self.more,
        )

    def _write(self, ids: Sequence[str], state: revision.State) -> None:
        promises = {i: self.items[i].promises for i in ids}
        measured = {i: tuple(self.runs[i]) for i in ids if i in self.runs and i not in self.failures}
        self.verdicts = {i: failed(i, f) for i, f in self.failures.items()}
        looked = decision.promises_only(measured, promises, selected=max(1, len(self.items)))
        self.verdicts |= looked
        self.problems += [f"not accepted: {v.message}" for v in self.verdicts.values() if not v.status.green]
        entries = [
            accepted_entries.entry_from(
                measured[v.id],
                machine=self.machine,
                promises=promises[v.id],
                revision=state.revision,
                dirty=state.dirty,
                reason=self.arguments.get("reason", ""),
                accepted=datetime.now(UTC).isoformat(timespec="seconds"),
                ran=self._ran(v.id),
            )
            for v in looked.values()
            if v.status.green
        ]
        if self.more:
            why = {e.id: text for e in entries if (text := accepted_entries.why_not_more(self.entries.get(e.id), e))}
            self._leave_out(why)
            entries = [e for e in entries if e.id not in why]
        prune = self.arguments.get("prune") == "yes"
        drop = [i for i in self.entries if i not in self.known and self.in_scope(i)] if prune else []
        if not entries and not drop:
            self._kept.forget()
            return
        by_ranks: dict[int, list[Entry]] = {}
        for entry in entries:
            by_ranks.setdefault(self.ranks_of(entry.id), []).append(entry)
        after = self.baselines.update(by_ranks, more=self.more, drop=drop, note=self.notes.append)
        self.notes += self._margins(after, [e.id for e in entries])
        self.notes += slower_than_reference([looked[e.id] for e in entries])
        self._kept.forget()

    def _ran(self, id: str) -> Ran | None:
        found = self.proofs[id].ran if id in self.proofs else None
        if found is None:
            return None
        return replace(
            found,
            surroundings=digests.surroundings(),
            variables=digests.variables(),
            packages=tuple(digests.packages()),
            settings=digests.settings(self.config),
        )

    def _margins(self, accepted: Mapping[str, Entry], ids: Sequence[str]) -> list[str]:
        """Return a line for each workload for which the gate will find only a slowdown beyond the usual margin."""
        suite = suite_noise(accepted)
        sizes = {i: estimates.margin_of(accepted[i], suite, selected=len(accepted)) for i in sorted(ids)}
        return [
            f"{i}: only a slowdown of {size:.1%} or more will be found; declare margin={size:.3g} if that is enough, "
            "or reduce its noise: a longer workload, or the device clock in place of the wall clock"
            for i, size in sizes.items()
            if size > estimates.MARGIN_USUAL and self.margin(i) is None and "reference" not in accepted[i].few
        ]

    def finish(self, session: pytest.Session) -> None:
        if not self.complete:
            self.notes.append(
                "the baseline is unchanged; the same command, on the same commit and machine, resumes with what was "
                "measured"
            )

    def prove_task(self, id: str) -> Task:
        return replace(super().prove_task(id), note_ran=True, thorough=not self.more)

    def reference(self, id: str, *, first: bool) -> int | None:
        return None


def slower_than_reference(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line that lists the workloads whose optimized side is slower than the reference, if there are any."""
    slower = [
        f"{name_of(v.id)} ({units.ratio(v.speedup)})"
        for v in verdicts
        if v.speedup is not None and v.speedup_high is not None and v.speedup_high < 1
    ]
    return [f"accepted although the optimized side is slower than its reference: {', '.join(slower)}"] if slower else []
