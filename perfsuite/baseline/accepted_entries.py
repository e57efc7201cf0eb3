"""Accepted figures: the `Entry` of a workload, with its sessions of measurements, and all entries of a device."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from perfsuite.codec import from_json, to_json
from perfsuite.errors import BaselineError
from perfsuite.records import (
    OPTIMIZED,
    REFERENCE,
    Limit,
    Machine,
    Measurement,
    ProcessGroup,
    PromiseRecord,
    Ran,
)
from perfsuite.statistics.blocks import process_mean

SIDES = (REFERENCE, OPTIMIZED)
LOG_RATIO_DECIMALS = 6
"""Decimals of a stored log-ratio. One millionth is a hundredth of the smallest noise seen."""
SECONDS_DIGITS = 6
"""Significant digits of times and rates, for the same reason."""
POWER_WATTS = 1.0
"""Watts by which two power limits may differ. NVML reports them in milliwatts, and a smaller difference is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process: block log-ratios by other side (see `Measurement`), and median seconds a call by side."""

    log_ratios: Mapping[str, tuple[float, ...]]
    seconds: Mapping[str, float]
    anchors: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the control kernels, timed with this workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Processes of one acceptance on one machine, with the software versions that they ran on."""

    date: str
    """ISO date-time."""
    driver: str | None
    cuda: str | None
    torch: str | None
    triton: str | None
    python: str
    processes: tuple[Process, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SideSummary:
    """Summary of one side over all processes: median seconds a call, and the largest counts."""

    seconds: float
    """Median seconds of a call, on the workload's clock."""
    peak_bytes: int | None
    host_syncs: int | None
    launches: int | None
    device_s: float | None = None
    """Seconds on the device clock, also where the promise is on the wall clock. They are compared with the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One accepted workload."""

    id: str
    pair: str
    workload: str
    device: str
    clock: str
    direction: str
    dtype: str
    sizes: Mapping[str, Any]
    revision: str | None
    dirty: bool
    """Whether the working tree had changes that `revision` does not contain."""
    reason: str
    accepted: str
    """ISO date-time."""
    promises: PromiseRecord
    sides: Mapping[str, SideSummary]
    limit: Limit | None
    few: tuple[str, ...]
    """Sides that were sampled only a few times."""
    sessions: tuple[Session, ...]
    blocks_s: Mapping[str, tuple[float, ...]]
    """Seconds a call in each block of "reference" and "optimized", over all sessions."""
    ran: Ran | None = None
    """Digests of the code and data that the optimized side used; None if they were not recorded."""
    group: ProcessGroup | None = None
    """Processes that called the sides together, as recorded in the first measurement; None for one process."""

    def process_means(self, other: str = "reference") -> list[list[float]]:
        """Return the process means of the log-ratio to `other`, one list per session. Sessions without it are left
        out."""
        means = [
            [process_mean(p.log_ratios[other], self.clock) for p in s.processes if other in p.log_ratios]
            for s in self.sessions
        ]
        return [m for m in means if m]

    def seconds_of(self, side: str) -> list[float]:
        """Return the seconds of a call of the side, for each process that timed it."""
        return [p.seconds[side] for s in self.sessions for p in s.processes if side in p.seconds]

    def anchors(self) -> dict[str, float]:
        """Return the seconds of each control kernel: the median over all processes that timed it."""
        known = [p.anchors for s in self.sessions for p in s.processes]
        return {name: median(a[name] for a in known if name in a) for name in sorted({n for a in known for n in a})}

    def peak_bytes(self) -> int | None:
        """Return the largest peak memory of a call of any side, in bytes; None if no side's is known."""
        return max((s.peak_bytes for s in self.sides.values() if s.peak_bytes is not None), default=None)

    def speedup(self, other: str = "reference") -> float:
        """Return the time of `other` divided by the time of `optimized`: the geometric mean over sessions."""
        return math.exp(fmean(fmean(m) for m in self.process_means(other)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """All accepted entries of one device for one number of processes: one file."""

    machine: Machine
    entries: Mapping[str, Entry] = field(default_factory=dict)


def entry_from(
    measurements: Sequence[Measurement],
    *,
    machine: Machine,
    promises: PromiseRecord,
    revision: str | None,
    dirty: bool,
    reason: str,
    accepted: str,
    ran: Ran | None = None,
) -> Entry:
    """Return the entry of one session: its processes' measurements of one workload. `accepted` is an ISO date-time.

    Raises BaselineError if there is no measurement, if one has no blocks or a value that is not finite, or if the
    measurements are of different workloads.
    """
    if not measurements:
        raise BaselineError("nothing was measured, so that there is nothing to accept; measure first")
    first = measurements[0]
    for m in measurements:
        _check_measurement(m, first)
    entry = Entry(
        id=first.id,
        pair=first.pair,
        workload=first.workload,
        device=first.device,
        clock=first.clock,
        direction=first.direction,
        dtype=first.dtype,
        sizes=first.sizes,
        revision=revision,
        dirty=dirty,
        reason=reason,
        accepted=accepted,
        promises=promises,
        sides={
            name: _summary([m for m in measurements if name in m.sides and m.sides[name].blocks_s], name)
            for name in sorted({k for m in measurements for k, s in m.sides.items() if s.blocks_s})
        },
        limit=next((m.limit for m in measurements if m.limit is not None), None),
        few=tuple(sorted({name for m in measurements for name in m.few})),
        sessions=(_session(measurements, machine, accepted),),
        blocks_s={side: tuple(b for m in measurements for b in m.sides[side].blocks_s) for side in SIDES},
        ran=ran,
        group=first.group,
    )
    return rounded(entry)


def _session(measurements: Sequence[Measurement], machine: Machine, accepted: str) -> Session:
    return Session(
        date=accepted,
        driver=machine.driver,
        cuda=machine.cuda,
        torch=machine.torch,
        triton=machine.triton,
        python=machine.python,
        processes=tuple(
            Process(
                log_ratios=m.log_ratios,
                seconds={k: median(s.blocks_s) for k, s in m.sides.items() if s.blocks_s},
                anchors=m.anchors,
            )
            for m in measurements
        ),
    )


def _check_measurement(m: Measurement, first: Measurement) -> None:
    for name in ("id", "device", "clock", "direction", "dtype", "sizes"):
        if getattr(m, name) != getattr(first, name):
            raise BaselineError(
                f"{first.id}: one process measured {name} {getattr(first, name)!r}, another {getattr(m, name)!r}; "
                "measure again"
            )
    if "reference" not in m.log_ratios:
        raise BaselineError(f"{m.id}: a process has no ratio to the reference; measure again")
    for side in SIDES:
        if side not in m.sides or not m.sides[side].blocks_s:
            raise BaselineError(f"{m.id}: a process has no time of the {side} side; measure again")
    times = [s.blocks_s for s in m.sides.values() if s.blocks_s]
    if not all(v and all(math.isfinite(x) for x in v) for v in (*m.log_ratios.values(), *times)):
        raise BaselineError(f"{m.id}: a process has an empty or non-finite series of times; measure again")
    if not all(x > 0 for v in times for x in v):
        raise BaselineError(f"{m.id}: a process has a time that is not above 0; measure again")


def _summary(measurements: Sequence[Measurement], name: str) -> SideSummary:
    sides = [m.sides[name] for m in measurements]

    def most(count: str) -> int | None:
        return max((c for c in (getattr(s, count) for s in sides) if c is not None), default=None)

    return SideSummary(
        seconds=median(median(s.blocks_s) for s in sides),
        peak_bytes=most("peak_bytes"),
        host_syncs=most("host_syncs"),
        launches=most("launches"),
        device_s=median(device) if (device := [s.device_s for s in sides if s.device_s is not None]) else None,
    )


def rounded(entry: Entry) -> Entry:
    """Return the entry as it is read back from a file: with rounded floats and JSON types. Idempotent."""
    data = to_json(entry)
    for session in data["sessions"]:
        for process in session["processes"]:
            process["log_ratios"] = {
                k: [round(float(x), LOG_RATIO_DECIMALS) for x in v] for k, v in process["log_ratios"].items()
            }
            for name in ("seconds", "anchors"):
                process[name] = {k: significant(v) for k, v in process[name].items()}
    for side in data["sides"].values():
        side["seconds"] = significant(side["seconds"])
        side["device_s"] = None if side["device_s"] is None else significant(side["device_s"])
    data["blocks_s"] = {k: [significant(x) for x in v] for k, v in data["blocks_s"].items()}
    if data["limit"]:
        data["limit"] = {k: v if isinstance(v, str) else significant(v) for k, v in data["limit"].items()}
    return from_json(Entry, json.loads(json.dumps(data)))


def significant(value: float) -> float:
    return float(f"{value:.{SECONDS_DIGITS}g}")


# --- changes -------------------------------------------------------------------------------------------------------


def merge(
    old: Baseline | None,
    new: Sequence[Entry],
    *,
    machine: Machine,
    more: bool = False,
    drop: Collection[str] = (),
) -> Baseline:
    """Return the baseline after accepting `new` on `machine`, without the ids in `drop`.

    An entry replaces the one with the same id. With `more`, its sessions are added to the existing ones instead. Raises
    BaselineError if the baseline is of another machine, and with `more` also if `why_not_more` returns a reason.
    """
    if old is not None:
        errors, _ = compare_machines(old.machine, machine)
        if errors:
            raise BaselineError(f"nothing accepted: {errors[0]}")
    entries = dict(old.entries) if old else {}
    for entry in new:
        entries[entry.id] = _with_sessions(entries.get(entry.id), entry) if more else entry
    for key in drop:
        entries.pop(key, None)
    return Baseline(machine=machine, entries=dict(sorted(entries.items())))


def why_not_more(old: Entry | None, new: Entry) -> str:
    """Return why the sessions of `new` cannot be added to the accepted entry; empty if they can."""
    if old is None:
        return "no accepted entry to add a session to"
    if new.revision is None:
        return "the current code has no revision: it is outside git"
    if old.revision != new.revision and not _same_code(old, new):
        return f"accepted at revision {short(old.revision)}, now at {short(new.revision)}, with other code"
    if old.dirty or new.dirty:
        return "the tree has uncommitted changes, or had when accepted"
    return changes_since(old, new) or ""


def _with_sessions(old: Entry | None, new: Entry) -> Entry:
    why = why_not_more(old, new)
    if old is None or why:
        raise BaselineError(f"{new.id}: {why}; accept it without --more")
    both = replace(
        old,
        reason=old.reason if f"; {new.reason};" in f"; {old.reason};" else f"{old.reason}; {new.reason}",
        accepted=max(old.accepted, new.accepted),
        sessions=(*old.sessions, *new.sessions),
        promises=new.promises,
        ran=new.ran,
        limit=new.limit or old.limit,
        few=tuple(sorted({*old.few, *new.few})),
        blocks_s={side: (*old.blocks_s[side], *new.blocks_s[side]) for side in SIDES},
    )
    return rounded(replace(both, sides={k: _joined(both, old, new, k) for k in sorted({*old.sides, *new.sides})}))


def _same_code(old: Entry, new: Entry) -> bool:
    """Return whether the workload ran the same sources in both revisions, and read no data that differ.

    One entry may list more data files than the other, because a process lists the files that it opened for any of its
    workloads.
    """
    if old.revision is None or old.ran is None or new.ran is None or old.ran.unknown or new.ran.unknown:
        return False
    same_data = all(old.ran.data.get(path, digest) == digest for path, digest in new.ran.data.items())
    return old.ran.sources == new.ran.sources and same_data


def _joined(both: Entry, old: Entry, new: Entry, name: str) -> SideSummary:
    parts = [e.sides[name] for e in (old, new) if name in e.sides]

    def most(count: str) -> int | None:
        return max((c for c in (getattr(s, count) for s in parts) if c is not None), default=None)

    return SideSummary(
        seconds=median(p.seconds[name] for s in both.sessions for p in s.processes if name in p.seconds),
        peak_bytes=most("peak_bytes"),
        host_syncs=most("host_syncs"),
        launches=most("launches"),
        device_s=median(device) if (device := [p.device_s for p in parts if p.device_s is not None]) else None,
    )


def changes_since(entry: Entry, now: Entry | Measurement) -> str | None:
    """Return how the workload itself differs from the accepted one, e.g. "sizes were {'n': 8}, now {'n': 16}"; or
    None."""
    for name in ("device", "clock", "direction", "dtype", "sizes"):
        # Converted through JSON, since tuples have become lists in the accepted entry.
        before, after = getattr(entry, name), json.loads(json.dumps(to_json(getattr(now, name))))
        if before != after:
            return f"{name} {'were' if name == 'sizes' else 'was'} {before!r}, now {after!r}"
    return None


def describe_changes(old: Baseline | None, new: Baseline) -> list[str]:
    """Return a line for each workload that an acceptance changed, sorted by id, and a last one that counts the rest."""
    before = old.entries if old else {}
    changed = [key for key in sorted({*before, *new.entries}) if before.get(key) != new.entries.get(key)]
    lines = [f"{key}: {_change(before.get(key), new.entries.get(key))}" for key in changed]
    rest = len({*before, *new.entries}) - len(changed)
    return [*lines, f"{rest} workload{'s' if rest > 1 else ''} unchanged"] if rest else lines


def _change(old: Entry | None, new: Entry | None) -> str:
    if new is None:
        return "removed"
    now = new.speedup()
    if old is None:
        return f"added at {now:.3g}×"
    line = f"changed from {old.speedup():.3g}× to {now:.3g}× ({now / old.speedup() - 1:+.1%})"
    added = len(new.sessions) - len(old.sessions)
    if added > 0 and new.sessions[: len(old.sessions)] == old.sessions:
        line += f", {added} session{'s' if added > 1 else ''} more: {len(new.sessions)} in all"
    promised = changes_in_promises(old.promises, new.promises)
    return f"{line}, {promised}" if promised else line


def changes_in_promises(old: PromiseRecord, new: PromiseRecord) -> str:
    """Return the promises that differ, e.g. "promised speedup 20.0 → 18.0"; empty if none do."""
    names = ("speedup", "throughput", "peak_bytes", "host_syncs", "launches")
    return ", ".join(
        f"promised {n} {getattr(old, n)} → {getattr(new, n)}" for n in names if getattr(old, n) != getattr(new, n)
    )


def short(revision: str | None) -> str:
    """Return a revision in the short form for display."""
    return revision[:7] if revision else "(unknown)"


def is_cpu(device: str) -> bool:
    """Return whether a device slug is that of a CPU."""
    return device == "cpu" or device.startswith("cpu-")


def compare_machines(accepted: Machine, here: Machine) -> tuple[list[str], list[str]]:
    """Return (errors, notes): differences that make a comparison with the baseline meaningless, and those that are only
    reported.

    Errors: another device (slug or name), another power limit; on a CPU, another CPU model or number of cores. A power
    limit that was known when accepted and cannot be read here is an error too. Notes: the number of devices (each
    workload is timed on one), torch, triton, CUDA, driver, Python, the platform; on a GPU also the CPU and its cores.
    A difference of the second kind may affect both sides equally, and the gate times both revisions on the same
    software.
    """
    cpu = is_cpu(accepted.device) or is_cpu(here.device)
    strict = ["device", "device_name", *(["cpu", "cores"] if cpu else [])]
    loose = ["count", "torch", "triton", "cuda", "driver", "python", "platform", *([] if cpu else ["cpu", "cores"])]
    names = {"device_name": "device name", "count": "number of devices", "cpu": "CPU", "cores": "CPU cores"}

    def line(name: str) -> str:
        was, now = getattr(accepted, name), getattr(here, name)
        return f"{names.get(name, name)} was {was} when accepted, is {now} here"

    errors = [line(n) for n in strict if getattr(accepted, n) != getattr(here, n)]
    was, now = accepted.power_limit_w, here.power_limit_w
    if was is not None and (now is None or abs(was - now) > POWER_WATTS):
        errors.append(f"power limit was {was:g} W when accepted, is {'unknown' if now is None else f'{now:g} W'} here")
    notes = [line(n) for n in loose if getattr(accepted, n) != getattr(here, n)]
    if was is None and now is not None:
        notes.append(f"power limit was unknown when accepted, is {now:g} W here")
    remedy = "compare on the machine that was accepted, or record a baseline for this one with `perfsuite accept`"
    return [f"{e}; {remedy}" for e in errors], notes
