"""A workload from run to run: its change against the figures accepted then, and what else changed between runs."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from perfsuite.history.records import Accepted, Figures, Run
from perfsuite.records import Status
from perfsuite.report import units
from perfsuite.report.workload_rows import percentage

STACK = (
    ("power limit", "power_limit_w"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
    ("torch", "torch"),
    ("triton", "triton"),
    ("Python", "python"),
)
"""(label, field) of each property of a machine whose change is marked."""
WORKLOAD = ("clock", "direction", "dtype", "sizes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A workload in one run."""

    run: Run
    figures: Figures
    accepted: Accepted | None
    """The figures that were accepted on the device when the run began."""
    change: float | None
    """Relative change of the time against the accepted one (0.03 = 3% slower)."""
    stored: bool = False
    """Whether the change is against the stored figure, because the run did not time the accepted revision as well."""
    marks: tuple[str, ...] = ()
    """Changes since the previous run on the same device, and a change of device since the previous run on any."""

    @property
    def change_shown(self) -> str:
        """The change as text; "~" marks a change against the stored figure."""
        return units.MISSING if self.change is None else f"{'~' * self.stored}{percentage(self.change)}%"

    @property
    def speedup_shown(self) -> str:
        """The speedup as text; "≥" marks a lower bound."""
        speedup = self.figures.speedup
        return f"{'≥ ' * self.figures.least}{units.ratio(speedup.value)}" if speedup else units.MISSING


def points(series: Sequence[tuple[Run, Figures]], accepted: Mapping[str, Sequence[Accepted]]) -> list[Point]:
    """Return a point for each run of a workload.

    series    the runs, the oldest first
    accepted  the accepted figures over time by device, the oldest first
    """
    found: list[Point] = []
    last: dict[str, Point] = {}
    for run, figures in series:
        device = run.machine.device
        held = figures.baseline or _held(accepted.get(device, ()), run.when)
        # Without the accepted side's seconds, the slowdown is that of the ratio to the reference.
        change, stored = figures.slowdown if figures.accepted_s is not None else None, False
        if change is None and held is not None and figures.optimized_s is not None and _same_workload(figures):
            change, stored = figures.optimized_s / held.optimized_s - 1, True
        before = last.get(device)
        marks = _marks(before, run, figures, held) if before else []
        if found and found[-1].run.machine.device != device:
            marks.insert(0, f"device {found[-1].run.machine.device_name} → {run.machine.device_name}")
        point = Point(run=run, figures=figures, accepted=held, change=change, stored=stored, marks=tuple(marks))
        found.append(point)
        last[device] = point
    return found


def _same_workload(figures: Figures) -> bool:
    """Return whether the accepted figures are of the same workload on the same kind of machine."""
    return figures.verdict not in (Status.NO_BASELINE, Status.WRONG_MACHINE)


def _held(accepted: Sequence[Accepted], when: datetime) -> Accepted | None:
    """Return the figures that were accepted last at this time; None if nothing was."""
    count = bisect.bisect_right(accepted, when, key=lambda a: datetime.fromisoformat(a.date))
    return accepted[count - 1] if count else None


def _marks(before: Point, run: Run, figures: Figures, held: Accepted | None) -> list[str]:
    pairs = [(name, getattr(before.run.machine, field), getattr(run.machine, field)) for name, field in STACK]
    pairs.append(("host", before.run.host, run.host))
    if figures.clock and before.figures.clock:  # without figures, nothing is known about the workload
        pairs += [(name, getattr(before.figures, name), getattr(figures, name)) for name in WORKLOAD]
    marks = [f"{name} {_text(was)} → {_text(now)}" for name, was, now in pairs if was != now]
    was, now = before.accepted, held
    if was != now and (was is None or now is None or was.optimized_s != now.optimized_s):
        marks.append(f"accepted {' → '.join(units.seconds(a.optimized_s) for a in (was, now) if a)}")
    return marks


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={v}" for name, v in value.items()) or units.MISSING
    return units.MISSING if value is None or value == "" else str(value)
