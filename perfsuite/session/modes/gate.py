"""`pytest -m perf --benchmark-compare`, `perfsuite gate`: compare every workload with what was accepted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from perfsuite.baseline import accepted_entries, waivers
from perfsuite.baseline.accepted_entries import Entry
from perfsuite.errors import PerfsuiteError
from perfsuite.gate.planning import FEW_BLOCKS
from perfsuite.records import ACCEPTED, REFERENCE, CodeChange, PromiseRecord, Status, Verdict
from perfsuite.report import RunReport, units
from perfsuite.revisions import digests, revision
from perfsuite.session import changed, code_changes, slowed_reference
from perfsuite.session.modes import references
from perfsuite.session.modes.base import failed
from perfsuite.session.modes.paired import Paired
from perfsuite.session.tasks import Failure, Task
from perfsuite.session.timed_item import Result, SpeedItem
from perfsuite.statistics import hierarchical

SHOWN = 3
AS_ACCEPTED = (Status.PASS, Status.IMPROVED)


class Gate(Paired):
    """The gate. All workloads are measured when the first item runs; then each item gets its verdict."""

    mode = history = "gate"
    words = "the accepted revision"

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.wrong_machine: list[str] = []
        self.waivers: tuple[waivers.Waiver, ...] = ()
        self.found = changed.Found()
        self.changes: dict[str, CodeChange | None] = {}
        """Red workload → difference of its code from what was accepted; None where that is not known."""
        self.partial = bool(self.config.option.perfsuite_partial) or self.shard is not None

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        super().collected(every, selected)
        try:
            self.baselines.load()
            known = {*self.known, *self.entries}
            path, partial = self.baselines.folder / "waivers.toml", self.config.option.perfsuite_partial
            self.waivers = waivers.load(
                path, today=date.today(), known_ids=known, in_scope=lambda id: not partial or self.in_scope(id)
            )
        except PerfsuiteError as error:
            self.problems.append(str(error))  # for the report, which is still written
            raise pytest.UsageError(str(error)) from None
        self.wrong_machine, notes = self.baselines.compared()
        self.notes += notes
        if not self.baselines.files and (others := sorted(p.stem for p in self.baselines.folder.glob("*.json"))):
            self.notes.append(f"no baseline for {self.machine.device}; there are: {', '.join(others)}")
        self.problems += self._missing()
        if not self.items and self.shard is not None:
            self.problems.append(f"nothing was measured: shard {self.shard} has no workload; make fewer shards")
        elif not self.items:
            self.problems.append("nothing was measured: no timed item of a pair was selected; see `perfsuite list`")

    def _missing(self) -> list[str]:
        """Return a message for each module with accepted workloads that cannot be collected, one for each accepted
        workload that was renamed or removed, and one for those that are left out without --partial."""
        unselected = [i for i in self.entries if i not in self.items]
        gone = [i for i in unselected if i not in self.known and self.in_scope(i)]
        left_out = [] if self.partial else [i for i in unselected if i not in gone]
        texts = []
        for place, error in self.broken.items():
            lost = [i for i in gone if i.startswith((f"{place}::", f"{place}/"))]
            if lost:
                texts.append(f"{place}: {units.count(len(lost), 'accepted workload')} not measured: {error}")
                gone = [i for i in gone if i not in lost]
        texts += [
            f"{i}: in the baseline but not collected; if it was renamed or removed, run `perfsuite accept --prune "
            f"--reason …`"
            for i in sorted(gone)
        ]
        if left_out:
            shown = ", ".join(sorted(left_out)[:SHOWN]) + (", …" if len(left_out) > SHOWN else "")
            option = "--partial" if self.config.option.perfsuite_mode else "--perfsuite-partial"
            texts.append(
                f"{len(left_out)} of {len(self.entries)} accepted workloads are not selected ({shown}): a gate judges "
                f"all of them; give {option} to judge a part"
            )
        return texts

    def judge(self, item: SpeedItem) -> Result:
        if not self.verdicts:
            try:
                with self.turn():
                    verdicts = self._judge_all()
            except PerfsuiteError as error:
                verdicts = {i: self.unmeasured(i, str(error)) for i in self.items}
            except Exception as error:  # a fault of perfsuite's own: the traceback is shown once
                text = f"perfsuite failed with {type(error).__name__}: {error}; report this with the traceback"
                self.verdicts = {i: self.unmeasured(i, text) for i in self.items}
                raise
            self.verdicts = waivers.apply(verdicts, self.waivers)
        verdict = self.verdicts[item.nodeid]
        return self.judged(item.nodeid, red=not verdict.status.green)

    def _judge_all(self) -> dict[str, Verdict]:
        if self.wrong_machine:
            text = self.wrong_machine[0]
            return {
                i: Verdict(id=i, status=Status.WRONG_MACHINE, message=f"WRONG_MACHINE {i}: {text}") for i in self.items
            }
        ids = self.measurable()
        accepted = [i for i in ids if i in self.entries]
        unknown = [i for i in ids if i not in self.entries]
        verdicts = self.unchanged(accepted)
        accepted = [i for i in accepted if i not in verdicts]
        wanted = self._revisions(accepted)
        with revision.extracted(wanted.values(), self.root, self.scratch / "revisions") as (trees, refused):
            self.stored |= {i: str(refused[rev]) for i, rev in wanted.items() if rev in refused}
            self.trees = {i: trees[rev] for i, rev in wanted.items() if rev in trees}
            self.same_code = self._with_same_code(accepted)
            proven = set(self.prove([*accepted, *unknown]))
            verdicts |= self._launch_the_same([i for i in accepted if i in proven])
            proven -= verdicts.keys()
            accepted = [i for i in accepted if i not in verdicts]
            verdicts |= {i: failed(i, self.failures[i]) for i in (*accepted, *unknown) if i not in proven}
            verdicts |= self.decide([i for i in accepted if i in proven])
            verdicts |= self._without_baseline([i for i in unknown if i in proven])
        verdicts |= self._slowed_references([i for i in accepted if verdicts[i].status.green])
        for id in self.items:
            if id not in verdicts and id in self.entries:
                reason = self.inapplicable(self.items[id]) or "it was not measured"
                verdicts[id] = self.unmeasured(id, f"it is in the baseline, but {reason}")
        return verdicts

    def _slowed_references(self, ids: Collection[str]) -> dict[str, Verdict]:
        """Return NOT_TIMED for each workload whose reference became slower since it was accepted, but only in a process
        with the optimized side."""
        accepted = {i: self.entries[i].seconds_of(REFERENCE) for i in ids}
        moved = [i for i, seconds in accepted.items() if slowed_reference.has_moved(self.runs.get(i, ()), seconds)]
        why = references.slowed(self, moved, sparse=True)
        return {i: failed(i, Failure(status=Status.NOT_TIMED, message=text)) for i, text in why.items()}

    def unchanged(self, ids: Sequence[str]) -> dict[str, Verdict]:
        """Return an UNCHANGED verdict for each workload whose code and data are as accepted; none without --changed."""
        if not self.config.option.perfsuite_changed:
            return {}
        self.found = changed.unchanged(
            {i: self.entries[i] for i in ids},
            revision.top_or(self.root),
            self.machine,
            settings=digests.settings(self.config),
        )
        self.progress.say(changed.summary(self.found))
        return self._unchanged(self.found.unchanged)

    def _with_same_code(self, ids: Sequence[str]) -> set[str]:
        """Return the workloads whose code equals the accepted code, whatever the versions of libraries.

        Entries in which the accepted code was not compared with itself are left out: for them it is not certain that
        each side ran the code of its own tree.
        """
        entries = {i: e for i in ids if i in self.trees and (e := self.entries[i]).process_means("accepted")}
        # `--changed` has already found that the sources of some differ.
        undecided = {i: e for i, e in entries.items() if i not in self.found.sources}
        same = set(undecided) - set(changed.other_code(undecided, revision.top_or(self.root), self.machine))
        if entries:
            of_all = f"{len(same)} of {units.count(len(ids), 'workload')}"
            first = ": one process each at first" if same else ""
            self.progress.say(f"{of_all} unchanged since acceptance{first}")
        return same

    def _unchanged(self, ids: Collection[str]) -> dict[str, Verdict]:
        return {i: changed.verdict(i, self.entries[i], self.found.unchanged[i]) for i in ids}

    def prove_task(self, id: str) -> Task:
        """Return the task that proves a workload. If only sources differ and the device clock decides, the task
        first traces whether the device gets the same work."""
        task, sources = super().prove_task(id), self.found.sources.get(id)
        return replace(task, launched=changed.launched(self.entries[id]), changed=tuple(sources)) if sources else task

    def without_revision(self, id: str, reason: str) -> None:
        super().without_revision(id, reason)
        self.found.sources.pop(id, None)  # it was traced already

    def _launch_the_same(self, ids: Collection[str]) -> dict[str, Verdict]:
        """Return UNCHANGED for each workload whose trace has shown that it launches what was accepted."""
        same = [i for i in ids if self.proofs[i].same_launches]
        for id in same:
            what = f"{self.found.changed.pop(id)} changed, but what it launches is the same, bit for bit"
            self.found.unchanged[id] = what
            del self.proofs[id]
        if same:
            self.progress.say(changed.summary(self.found))
        return self._unchanged(same)

    def _revisions(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the revision at which each workload was accepted. If it cannot be loaded, put the reason in `stored`
        instead."""
        wanted: dict[str, str] = {}
        for id in ids:
            entry = self.entries[id]
            if entry.revision is None:
                self.stored[id] = "it was accepted outside git"
            elif entry.dirty:
                self.stored[id] = (
                    f"it was accepted with uncommitted changes on {accepted_entries.short(entry.revision)}"
                )
            else:
                wanted[id] = entry.revision
        return wanted

    def _without_baseline(self, ids: Sequence[str]) -> dict[str, Verdict]:
        """Run one process for each workload, to show its figures. Without a baseline, its verdict is red anyway."""
        tasks = [
            Task(
                id=i, limit_s=self.items[i].pair.time_limit, proof=self.proofs[i], reference=FEW_BLOCKS, thorough=False
            )
            for i in ids
        ]
        for _ in self.work(tasks):
            pass
        texts = {i: self._lacking(i, self.baselines.path(self.ranks_of(i))) for i in ids}
        return {i: Verdict(id=i, status=Status.NO_BASELINE, message=f"NO_BASELINE {i}: {texts[i]}") for i in ids}

    def _lacking(self, id: str, path: Path) -> str:
        where = path.relative_to(self.root) if self.root in path.parents else path
        what = f"it is not in {where}" if path.exists() else f"there is no {where}"
        pair, folder = id.split("::")[1], self.config.option.perfsuite_baselines
        there = f" --baselines {shlex.quote(folder)}" if folder else ""
        return f"{what}; accept it with `perfsuite accept -k {pair}{there} --reason …`"

    def entry(self, id: str) -> Entry | None:
        return self.entries.get(id)

    def promises(self, id: str) -> PromiseRecord:
        return self.items[id].promises

    def report(self) -> RunReport:
        judged = {
            i: self.entries[i]
            for i, v in self.verdicts.items()
            if i in self.entries and v.status is not Status.UNCHANGED
        }
        if missing := {i: e for i, e in judged.items() if i not in self.changes}:
            others = [i for i in missing if self.verdicts[i].status not in AS_ACCEPTED]
            settings = digests.settings(self.config)
            found = code_changes.since_accepted(missing, revision.top_or(self.root), self.machine, others, settings)
            self.changes |= {i: found.get(i) for i in missing}
        changes = {i: change for i, change in self.changes.items() if change is not None}
        return replace(super().report(), changes=changes, noise=self._noise())

    def _noise(self) -> dict[str, float]:
        """Return, for each measured workload, the standard deviation of a process's mean log-ratio when the accepted
        code was compared with itself."""
        found = {}
        for id in self.runs.keys() & self.entries.keys():
            means = self.entries[id].process_means(ACCEPTED)
            if means:
                prior = self.suite.of(self.entries[id].clock).paired
                found[id] = math.sqrt(hierarchical.noise_of(means, prior).process.value)
        return found

    def finish(self, session: pytest.Session) -> None:
        unasked = [i for i, item in self.items.items() if i not in self.asked and not self.inapplicable(item)]
        if not self.complete or self.problems:
            return
        if unasked:
            self.early = True
            self.problems.append(
                f"the run ended early: {len(unasked)} of {len(self.items)} workloads were not judged, e.g. {unasked[0]}"
            )
        elif not self.verdicts:
            self.early = not self.items
            reason = next(filter(None, map(self.inapplicable, self.items.values())), "pytest ran no item")
            self.problems.append(f"nothing was measured: none of {len(self.items)} selected workloads; {reason}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        super().pytest_terminal_summary(terminalreporter)
        from perfsuite.report import annotations

        if not annotations.wanted():
            return
        try:
            shown = self.report()
        except PerfsuiteError:  # the summary has said why there is no report
            return
        for line in annotations.lines(shown):
            terminalreporter.write_line(line)
