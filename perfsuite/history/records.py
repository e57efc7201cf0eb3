"""Records of the history: the figures of a run's report, without the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.codec import to_json
from perfsuite.records import Counts, Machine, Status
from perfsuite.report import model, units, workload_rows
from perfsuite.report.model import RunReport
from perfsuite.report.workload_rows import Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The accepted figures of a workload in a baseline."""

    date: str
    """ISO date-time of the latest session."""
    optimized_s: float
    speedup: float
    revision: str | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One workload in one run, with the figures of `report.workload_rows.row`."""

    verdict: Status | None = None
    clock: str = ""
    direction: str = ""
    dtype: str = ""
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimized_s: float | None = None
    reference_s: float | None = None
    accepted_s: float | None = None
    """Seconds of the accepted revision's optimized side, timed together with the current one."""
    slowdown: float | None = None
    """Slowdown relative to that side (0.03 = 3% slower). The next two fields are its 95% interval."""
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    speedup: Comparison | None = None
    least: bool = False
    """Whether the reference was stopped: its seconds and the speedup are lower bounds."""
    costs: Counts = dataclasses.field(default_factory=Counts)
    """Host syncs, launches and peak memory of a call of the optimized side."""
    baseline: Accepted | None = None
    """The figures in the run's baseline; None if the run read none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run. `workloads` is empty in the runs that the index returns."""

    kind: str
    """"run", "gate", "accept" or "pytest"."""
    started: str
    """ISO 8601, with the offset from UTC."""
    seconds: float
    machine: Machine
    host: str
    revision: str | None = None
    dirty: bool = False
    """Whether tracked files differed from the revision."""
    complete: bool = True
    """False for a run that was interrupted."""
    workloads: Mapping[str, Figures] = dataclasses.field(default_factory=dict)

    @property
    def when(self) -> datetime:
        """The start, in UTC."""
        return datetime.fromisoformat(self.started).astimezone(UTC)

    @property
    def date(self) -> str:
        """The start as the tables show it, in UTC."""
        return f"{self.when:%Y-%m-%d %H:%M}"

    @property
    def kind_shown(self) -> str:
        """The kind, and whether the run was interrupted."""
        return self.kind if self.complete else f"{self.kind}, interrupted"

    @property
    def revision_shown(self) -> str:
        """The abbreviated revision; a plus sign marks uncommitted changes."""
        return f"{self.revision[:7]}{'+' * self.dirty}" if self.revision else units.MISSING

    def counts(self) -> dict[str, int]:
        """Return the number of each verdict, as the run's report counts them."""
        return model.count(figures.verdict for figures in self.workloads.values())


def run_of(report: RunReport, *, kind: str, host: str, entries: Mapping[str, Entry]) -> Run:
    """Return the history's record of a run. `entries` are those of its baseline before the run."""
    return Run(
        kind=kind,
        started=report.started,
        seconds=report.seconds,
        machine=report.machine,
        host=host,
        revision=report.revision,
        dirty=report.dirty,
        complete=report.complete,
        workloads={row.id: _figures(report, row, entries.get(row.id)) for row in model.rows(report)},
    )


def _figures(report: RunReport, row: workload_rows.Row, entry: Entry | None) -> Figures:
    measurements = report.measurements.get(row.id, ())
    return Figures(
        verdict=row.status,
        clock=row.clock,
        direction=row.direction,
        dtype=row.dtype,
        sizes=measurements[0].sizes if measurements else {},
        optimized_s=row.optimized_s,
        reference_s=row.reference_s,
        accepted_s=row.before_s,
        slowdown=row.slowdown,
        slowdown_low=row.slowdown_low,
        slowdown_high=row.slowdown_high,
        speedup=row.speedup,
        least=row.least,
        costs=workload_rows.costs(measurements, "optimized"),
        baseline=accepted_of(entry) if entry else None,
    )


def accepted_of(entry: Entry) -> Accepted:
    """Return the history's record of an accepted workload."""
    return Accepted(
        date=entry.sessions[-1].date,
        optimized_s=entry.sides["optimized"].seconds,
        speedup=entry.speedup(),
        revision=entry.revision,
        reason=entry.reason,
    )


def compact(record: Any) -> dict[str, Any]:
    """Return a record as JSON values, without fields that equal their default. `from_json` reads it back."""
    defaults = {
        f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        for f in dataclasses.fields(record)
    }
    return {name: to_json(v) for name, default in defaults.items() if (v := getattr(record, name)) != default}
