"""Data that the reports show: the record of a run, and texts and rows derived from it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfsuite.gate import exit_codes
from perfsuite.records import (
    OPTIMIZED,
    CodeChange,
    Excuse,
    Machine,
    Measurement,
    PromiseRecord,
    Status,
    Verdict,
)
from perfsuite.report import units, workload_rows
from perfsuite.report.workload_rows import MEASURED, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Correctness:
    """Outcome of the correctness items."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    skip_reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Item id → failure in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run: its machine, proofs, measurements and verdicts. Most mappings are keyed by workload id."""

    machine: Machine
    revision: str | None
    started: str
    """ISO 8601, with the offset from UTC."""
    seconds: float
    measurements: Mapping[str, tuple[Measurement, ...]] = dataclasses.field(default_factory=dict)
    """Measurements by workload, one for each process."""
    verdicts: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)
    promises: Mapping[str, PromiseRecord] = dataclasses.field(default_factory=dict)
    correctness: Correctness = Correctness()
    problems: tuple[str, ...] = ()
    """Problems of the run as a whole, a line each."""
    complete: bool = True
    """False for a run that was interrupted."""
    selected: int | None = None
    """Number of selected workloads, out of `collected`."""
    collected: int | None = None
    workloads: tuple[str, ...] = ()
    """Ids of the selected workloads."""
    skipped: tuple[str, ...] = ()
    """Selected workloads that are not for this machine and were never accepted on it."""
    shard: str = ""
    """"2/3" for the second of three parts; empty for a whole run."""
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the run by activity: "proofs" on all cores, "timing" one workload at a time."""
    proofs: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Seconds of each phase of a workload's proof."""
    dirty: bool = False
    """Whether tracked files differ from the revision."""
    changes: Mapping[str, CodeChange] = dataclasses.field(default_factory=dict)
    """Changes in the code of each red workload since it was accepted."""
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Standard deviation of a process's mean log-ratio between the accepted code and itself."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all workloads: the measured ones in the order of measurement, then those with only a verdict."""
        return tuple(dict.fromkeys([*self.measurements, *self.verdicts]))

    @property
    def partial(self) -> str | None:
        """Share that was selected, such as "3 of 27 workloads"; None if all were, or if that is not known."""
        if self.selected is None or self.collected is None or self.selected >= self.collected:
            return None
        return f"{self.selected} of {self.collected} workloads"


def rows(report: RunReport) -> tuple[Row, ...]:
    """Return a row for each workload, grouped by technique."""
    made = workload_rows.distinct(
        [workload_rows.row(i, report.measurements.get(i, ()), report.verdicts.get(i)) for i in report.ids]
    )
    order = {technique: n for n, technique in enumerate(dict.fromkeys(r.technique for r in made))}
    return tuple(sorted(made, key=lambda r: order[r.technique]))


def notes(report: RunReport) -> list[str]:
    """Return a line for each point that is worth knowing, although it makes nothing red: a speedup that is not as
    accepted because a side or the device changed, and what was left out."""
    passed = ((r, report.verdicts[r.id]) for r in rows(report) if r.status is Status.PASS and r.id in report.verdicts)
    changed = [f"{r.technique}[{r.workload}]: {reason(v.message, r)}" for r, v in passed if v.moved is not None]
    return [*changed, *left_out(report)]


def left_out(report: RunReport) -> list[str]:
    """Return a line for each reason why proofs were skipped, then one for each reason why rivals were not timed."""
    reasons = sorted(report.correctness.skip_reasons.items(), key=lambda item: -item[1])
    rivals: dict[str, list[str]] = {}
    for workload_id, (technique, workload) in workload_rows.names_of(report.ids).items():
        for rival, why in rivals_left_out(report.measurements.get(workload_id, ())).items():
            rivals.setdefault(why, []).append(f"rival {rival} of {technique}[{workload}]")
    return [f"{n} skipped: {reason}" for reason, n in reasons] + [
        f"{who[0] if len(who) == 1 else f'{len(who)} rivals'} left out: {why}"
        for why, who in sorted(rivals.items(), key=lambda item: -len(item[1]))
    ]


def rivals_left_out(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Return a workload's rivals that were not timed, each with its reason."""
    timed = {name for m in measurements for name in m.sides}
    return {rival: why for m in measurements for rival, why in m.skipped.items() if rival not in timed}


def counts(report: RunReport) -> dict[str, int]:
    """Return the number of workloads with each verdict, as `count` does."""
    return count(report.verdicts[i].status if i in report.verdicts else None for i in report.ids)


def count(statuses: Iterable[Status | None]) -> dict[str, int]:
    """Return the number of each verdict that occurs, in the order of `Status`; None counts as "measured"."""
    found = {status.value: 0 for status in Status} | {MEASURED: 0}
    for status in statuses:
        found[status.value if status else MEASURED] += 1
    return {name: n for name, n in found.items() if n}


def headline(report: RunReport) -> str:
    """Return the number of each verdict, the proofs and the selected share of the run, in one line."""
    parts = [f"{n} {name}" for name, n in counts(report).items()] or ["nothing measured"]
    c = report.correctness
    if c.passed or c.failed or c.skipped:
        parts.append(f"correctness: {c.passed} passed, {c.failed} failed, {c.skipped} skipped")
    if report.partial:
        parts.append(report.partial)
    return " · ".join(parts)


def sentence(report: RunReport) -> str:
    """Return the verdict of a run in one sentence."""
    code, every, red = exit_code(report), len(report.verdicts), len(not_green(report))
    shares = [f"{red} of {units.count(every, 'workload')} not green"] if red else []
    if report.correctness.failed:
        shares.append(f"{units.count(report.correctness.failed, 'proof')} failed")
    why = f" ({', '.join(shares)})" if shares else ""
    if code == exit_codes.CODE_AT_FAULT:
        return f"perfsuite is red: {_at_fault(report)}{why}."
    if code == exit_codes.ENDED_EARLY:
        return f"perfsuite is red: the run ended early{why}."
    if code == exit_codes.UNDECIDED:
        return f"perfsuite cannot decide: {_undecided(report)}{why}."
    if not every:
        return "perfsuite is green, but nothing was compared with a baseline."
    waived = len(excused(report))
    but = f", {waived} of them excused by a waiver" if waived else ""
    return f"perfsuite is green: {units.count(every, 'workload')}{but}."


def _at_fault(report: RunReport) -> str:
    """Return the first workload whose code is at fault, and why."""
    for row in rows(report):
        verdict = report.verdicts.get(row.id)
        if verdict is None or verdict.status.green:
            continue
        if verdict.status.blames_code or verdict.moved == OPTIMIZED:
            why = CLAUSE.split(reason(row.message, row), maxsplit=1)[0]
            return f"{row.technique}[{row.workload}]: {why}"
    return "the code is at fault"


CLAUSE = re.compile(r"; | \((?=95% interval)")
"""End of the first clause of a verdict's message."""


def reason(message: str, row: Row) -> str:
    """Return a verdict's message without the verdict and the workload's id at its start: reports show both anyway."""
    pair = row.technique.rpartition("/")[2]
    for known in (row.status.value if row.status else "", row.id, f"{pair}[{row.workload}]", f"{pair}: "):
        message = message.removeprefix(known).lstrip(" :") if known else message
    return message


def _limited(report: RunReport) -> str:
    """Return a clause that names what limited the clock of the workloads that are not green; empty if nothing did."""
    limits = {t for v in not_green(report) for m in report.measurements.get(v.id, ()) for t in m.condition.throttle}
    return f", with its clock limited by {', '.join(sorted(limits))}" if limits else ""


def _undecided(report: RunReport) -> str:
    """Return the reasons why a run cannot be decided, each once."""
    found = dict.fromkeys(
        CAUSES["device"] + _limited(report) if v.moved == "device" else why
        for v in not_green(report)
        if (why := UNDECIDED.get(v.status))
    )
    unknown = "the machine, the baseline or the measurement is at fault"
    return ", and ".join(found) or next(iter(report.problems), unknown)


UNDECIDED = {
    Status.NOISY: "the measurement is too noisy",
    Status.NO_BASELINE: "a baseline is missing",
    Status.WRONG_MACHINE: "the baseline is of another machine",
    Status.UNMEASURED: "not everything could be measured",
}
"""Verdict that blames no code → the reason in words."""

CAUSES = {
    "reference": "the reference moved, not the optimized side",
    "device": "the device was slower than when the figures were accepted",
    "software": "both sides moved, and the device did not: the software or the host differs",
}
"""`Verdict.moved`, other than the optimized side → the cause in words."""

MEANINGS = {
    Status.NOT_EQUIVALENT: "the optimized side gives wrong results",
    Status.NOT_PROVEN: "a proof of the pair failed, so the workload's times mean nothing",
    Status.NOT_TIMED: "the measured times cannot be trusted",
    Status.BELOW_FLOOR: "a promise is broken",
    Status.REGRESSED: "it takes more time, memory, syncs or launches than what was accepted",
    Status.NOISY: "the measurement is too noisy to decide",
    Status.NO_BASELINE: "there is nothing to compare it with",
    Status.WRONG_MACHINE: "the baseline is of another machine",
    Status.UNMEASURED: "there is no measurement",
}
"""Verdict that is not green → its meaning in words."""


def since_accepted(report: RunReport, workload_id: str) -> str:
    """Return a line that says what changed since a workload was accepted; empty if that is not known."""
    change = report.changes.get(workload_id)
    if change is None:
        return ""
    if change.other:
        return f"since it was accepted: {change.other}"
    if not change.files:
        return f"none of its files has changed since {change.since}"
    files, edited = _first(change.files), _first(change.uncommitted)
    edits = f"; edited and not committed: {edited}" if edited else ""
    if not change.commits:
        return f"{files} changed since {change.since}{edits}"
    others = f" and {len(change.commits) - 1} more since {change.since}" if len(change.commits) > 1 else ""
    revision, _, title = change.commits[0].partition(" ")
    return f"changed in {revision} “{title}”{others}: {files}{edits}"


def _first(files: Sequence[str]) -> str:
    """Return the first file and the number of others; empty if there is no file."""
    return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "") if files else ""


def machine_line(machine: Machine) -> str:
    """Return a one-line description of the machine."""
    device = f"{machine.count} × {machine.device_name}" if machine.count > 1 else machine.device_name
    parts = [device]
    if machine.power_limit_w is not None:
        parts.append(f"{machine.power_limit_w:.0f} W")
    for name, value in (("driver", machine.driver), ("CUDA", machine.cuda), ("torch", machine.torch)):
        if value:
            parts.append(f"{name} {value}")
    if machine.triton:
        parts.append(f"triton {machine.triton}")
    parts.append(f"Python {machine.python}")
    if machine.cpu != machine.device_name:
        parts.append(machine.cpu)
    parts.append(units.count(machine.cores, "core"))
    return ", ".join(parts)


def not_green(report: RunReport) -> tuple[Verdict, ...]:
    """Return the verdicts that are not green, in the order of the rows."""
    every = [report.verdicts[r.id] for r in rows(report) if r.id in report.verdicts]
    return tuple(v for v in every if not v.status.green)


def exit_code(report: RunReport) -> int:
    """Return the exit code of a run with this report."""
    wrong = bool(report.correctness.failed)
    return exit_codes.of(report.verdicts.values(), report.problems, early=not report.complete, wrong=wrong)


OUTCOMES = {
    exit_codes.GREEN: "green",
    exit_codes.CODE_AT_FAULT: "red: the code is at fault",
    exit_codes.ENDED_EARLY: "red: it ended early",
    exit_codes.UNDECIDED: "undecided: the machine, the baseline or the measurement is at fault",
}
"""Exit code → outcome of the run in words."""


def findings(report: RunReport) -> list[str]:
    """Return a line for each reason why the run is not green. Reasons that concern the whole run come first."""
    lines = list(report.problems)
    if not report.complete:
        lines.append("interrupted: this report holds what was measured until then")
    lines += [f"{item}: {why}" for item, why in report.correctness.failures.items()]
    for v in not_green(report):
        since = since_accepted(report, v.id)
        lines.append(f"{v.status}: {v.message.removeprefix(f'{v.status} ')}{f' ({since})' if since else ''}")
    return lines


def excused(report: RunReport) -> tuple[tuple[Row, Excuse], ...]:
    """Return each workload that a waiver covers, with the waiver."""
    waivers = ((r, report.verdicts[r.id].excuse) for r in rows(report) if r.id in report.verdicts)
    return tuple((r, excuse) for r, excuse in waivers if excuse is not None)


def without_waivers(report: RunReport) -> str:
    """Return a line with the outcome that the run would have without its waivers; empty if no waiver applies."""
    found = {r.id: excuse for r, excuse in excused(report)}
    if not found:
        return ""
    bare = {i: replace(v, status=found[i].status) if i in found else v for i, v in report.verdicts.items()}
    code = exit_code(replace(report, verdicts=bare))
    return f"{units.count(len(found), 'workload')} excused; without the waivers this run is {OUTCOMES[code]}"
