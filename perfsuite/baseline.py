"""`baselines/<device>.json`: what was accepted, in pytest-benchmark's own schema.

A workload is two benchmark records, `<id>@reference` and `<id>@optimized`. The block seconds are the records' data, as
pytest-benchmark keeps them; the rest of our `Entry` is `extra_info["perfsuite"]` of the optimized one. Beside it lies a
digest of both records as they are written, and the header has its own. The digests reveal an edit by hand, even of a
figure that only pytest-benchmark reads. Entries are sorted by id and a record that did not change is written back as it
was: accepting one workload changes that workload's lines only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

from perfsuite.blocks import process_mean
from perfsuite.errors import BaselineError, PerfsuiteError, printable
from perfsuite.folders import SCRATCH, own_folder
from perfsuite.records import (
    OPTIMIZED,
    REFERENCE,
    Limit,
    Machine,
    Measurement,
    ProcessGroup,
    PromiseRecord,
    Ran,
    from_json,
    to_json,
)

SCHEMA = 2
"""Version of the file format. In version 2 the digests cover everything that is written; those of version 1 left out
pytest-benchmark's own fields."""
SIDES = (REFERENCE, OPTIMIZED)
LOG_RATIO_DECIMALS = 6
"""A log-ratio is kept to a millionth: a hundredth of the smallest noise seen."""
SECONDS_DIGITS = 6
"""Significant digits of times and rates, for the same reason."""
LOCK_SECONDS = 60.0
"""Seconds after which a lock counts as stuck: an acceptance writes in well under a second."""
POWER_WATTS = 1.0
"""Watts by which two power limits may differ: NVML gives them in milliwatts, and a smaller difference is rounding."""
RESTORE = "restore it from git, or record it anew with `perfsuite accept`"
ANEW = "move it away and record a baseline with `perfsuite accept`"
INTEGER_MAX = 2**63
"""Integers in a file are smaller than this. No count comes near it, and a larger one would overflow as a float."""
TOLD = 160
"""Characters of a name or value from a damaged file that a message shows; such a text can be of any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process: block log-ratios by other side (see `Measurement`), and median seconds a call by side."""

    log_ratios: Mapping[str, tuple[float, ...]]
    seconds: Mapping[str, float]
    anchors: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the anchor kernels beside this workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Processes of one machine and hour, with the stack that they ran on."""

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
    """One side over all processes: median seconds a call, and the largest counts seen."""

    seconds: float
    """Median seconds of a call, on the workload's clock."""
    peak_bytes: int | None
    host_syncs: int | None
    launches: int | None
    device_s: float | None = None
    """Seconds on the device clock, also where the promise is on the wall clock. The limit is compared with these."""


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
    """Whether the tree had changes that `revision` does not hold."""
    reason: str
    accepted: str
    """ISO date-time."""
    promises: PromiseRecord
    sides: Mapping[str, SideSummary]
    limit: Limit | None
    few: tuple[str, ...]
    """Sides sampled a few times only."""
    sessions: tuple[Session, ...]
    blocks_s: Mapping[str, tuple[float, ...]]
    """Seconds a call in each block of "reference" and "optimized", over all sessions."""
    ran: Ran | None = None
    """Digests of the code and data that the optimized side ran; None where they were not recorded."""
    group: ProcessGroup | None = None
    """Processes that called the sides together, as recorded in the first measurement; None for one process."""

    def process_means(self, other: str = "reference") -> list[list[float]]:
        """Return the process means of the log-ratio to `other`, by session; sessions without it are left out."""
        means = [
            [process_mean(p.log_ratios[other], self.clock) for p in s.processes if other in p.log_ratios]
            for s in self.sessions
        ]
        return [m for m in means if m]

    def seconds_of(self, side: str) -> list[float]:
        """Return the seconds of a call of the side, of each process that timed it."""
        return [p.seconds[side] for s in self.sessions for p in s.processes if side in p.seconds]

    def anchors(self) -> dict[str, float]:
        """Return the seconds of each anchor kernel: the median over all processes that know it."""
        known = [p.anchors for s in self.sessions for p in s.processes]
        return {name: median(a[name] for a in known if name in a) for name in sorted({n for a in known for n in a})}

    def peak_bytes(self) -> int | None:
        """Return the bytes of the most memory that a side's call took; None where no side's is known."""
        return max((s.peak_bytes for s in self.sides.values() if s.peak_bytes is not None), default=None)

    def speedup(self, other: str = "reference") -> float:
        """Time of `other` over time of `optimized`: the geometric mean over sessions."""
        return math.exp(fmean(fmean(m) for m in self.process_means(other)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """All that is accepted on one device."""

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

    Raises BaselineError where there is nothing to accept: no measurement, one without blocks or with a value that is
    not finite, or measurements of different workloads.
    """
    if not measurements:
        raise BaselineError("nothing was measured, so that there is nothing to accept; measure first")
    first = measurements[0]
    for m in measurements:
        _check_measurement(m, first)
    session = Session(
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
        sessions=(session,),
        blocks_s={side: tuple(b for m in measurements for b in m.sides[side].blocks_s) for side in SIDES},
        ran=ran,
        group=first.group,
    )
    return _rounded(entry)


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


def _rounded(entry: Entry) -> Entry:
    """Return the entry as a file gives it back: with rounded floats and JSON's own types. Idempotent."""
    data = to_json(entry)
    for session in data["sessions"]:
        for process in session["processes"]:
            process["log_ratios"] = {
                k: [round(float(x), LOG_RATIO_DECIMALS) for x in v] for k, v in process["log_ratios"].items()
            }
            for name in ("seconds", "anchors"):
                process[name] = {k: _digits(v) for k, v in process[name].items()}
    for side in data["sides"].values():
        side["seconds"] = _digits(side["seconds"])
        side["device_s"] = None if side["device_s"] is None else _digits(side["device_s"])
    data["blocks_s"] = {k: [_digits(x) for x in v] for k, v in data["blocks_s"].items()}
    if data["limit"]:
        data["limit"] = {k: v if isinstance(v, str) else _digits(v) for k, v in data["limit"].items()}
    return from_json(Entry, json.loads(json.dumps(data)))


def _digits(value: float) -> float:
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

    An entry replaces the one of its id. With `more`, its sessions are added to the existing ones instead. Raises
    BaselineError where `more` is given and the entries differ in code, sizes, clock, direction or dtype, or one of the
    trees was not clean, and where the baseline is of another machine.
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
    """Return why the sessions of `new` cannot be added to what is accepted; empty if they can."""
    if old is None:
        return "no accepted entry to add a session to"
    if new.revision is None or (old.revision != new.revision and not _same_code(old, new)):
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
        sessions=(*old.sessions, *new.sessions),
        promises=new.promises,
        ran=new.ran,
        limit=new.limit or old.limit,
        few=tuple(sorted({*old.few, *new.few})),
        blocks_s={side: (*old.blocks_s[side], *new.blocks_s[side]) for side in SIDES},
    )
    return _rounded(replace(both, sides={k: _joined(both, old, new, k) for k in sorted({*old.sides, *new.sides})}))


def _same_code(old: Entry, new: Entry) -> bool:
    """Return whether the workload ran the same sources in both revisions, and read no data that differ.

    Either may have noted more data than the other: a process notes what it opened for any of its workloads.
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
        # Through JSON, as the accepted one went: a tuple comes back as a list.
        before, after = getattr(entry, name), json.loads(json.dumps(to_json(getattr(now, name))))
        if before != after:
            return f"{name} {'were' if name == 'sizes' else 'was'} {before!r}, now {after!r}"
    return None


def describe_changes(old: Baseline | None, new: Baseline) -> list[str]:
    """Return a line for each workload that says what an acceptance changed, sorted by id."""
    before = old.entries if old else {}
    lines = []
    for key in sorted({*before, *new.entries}):
        lines.append(f"{key}: {_change(before.get(key), new.entries.get(key))}")
    return lines


def _change(old: Entry | None, new: Entry | None) -> str:
    if new is None:
        return "removed"
    now = new.speedup()
    if old is None:
        return f"added at {now:.3g}×"
    if old == new:
        return f"unchanged at {now:.3g}×"
    line = f"changed from {old.speedup():.3g}× to {now:.3g}× ({now / old.speedup() - 1:+.1%})"
    added = len(new.sessions) - len(old.sessions)
    if added > 0 and new.sessions[: len(old.sessions)] == old.sessions:
        line += f", {added} session{'s' if added > 1 else ''} more: {len(new.sessions)} in all"
    promised = changes_in_promises(old.promises, new.promises)
    return f"{line}, {promised}" if promised else line


def changes_in_promises(old: PromiseRecord, new: PromiseRecord) -> str:
    """Return the promises that differ, e.g. "promised speedup 20.0 → 18.0"; empty if none does."""
    names = ("speedup", "peak_bytes", "host_syncs", "launches")
    return ", ".join(
        f"promised {n} {getattr(old, n)} → {getattr(new, n)}" for n in names if getattr(old, n) != getattr(new, n)
    )


def short(revision: str | None) -> str:
    """Return a revision in the short form that is shown."""
    return revision[:7] if revision else "(unknown)"


def is_cpu(device: str) -> bool:
    """Return whether a device's slug is a CPU's."""
    return device == "cpu" or device.startswith("cpu-")


def compare_machines(accepted: Machine, here: Machine) -> tuple[list[str], list[str]]:
    """Return (errors, notes): differences that make a comparison with the baseline meaningless, and those that are only
    reported.

    Errors: another device (slug or name), another power limit; on a CPU, another CPU model or number of cores. A power
    limit that was known when accepted and cannot be read here is an error too. Notes: the number of devices (each
    workload is timed on one), torch, triton, CUDA, driver, Python, the platform; on a GPU also the CPU and its cores.
    They may move both sides alike, and the gate interleaves two revisions on the same stack.
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


# --- the file ------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Baseline:
    """Return the baseline in a file. Raises BaselineError, in one line with the remedy, where the file is damaged or is
    not a baseline of perfsuite."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BaselineError(
            f"{path}: there is no baseline for this device; record one with `perfsuite accept`"
        ) from None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: not text (byte {error.start}); {RESTORE}") from None
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    try:
        return parse(text)
    except PerfsuiteError as error:
        raise BaselineError(f"{path}: {_one_line(str(error))}") from None
    except RecursionError:
        # json's C parser allows deeper nesting than the code that reads its result.
        raise BaselineError(f"{path}: not valid JSON (nested too deeply); {RESTORE}") from None


def parse(text: str) -> Baseline:
    """Return the baseline in a file's text. Raises PerfsuiteError in one line, without the file's name, where it is
    damaged or is not a baseline of perfsuite."""
    if not text.strip():
        raise BaselineError(f"the file is empty; {RESTORE}")
    try:
        data = json.loads(
            text,
            parse_constant=_not_finite,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_without_duplicates,
        )
    except json.JSONDecodeError as error:
        ends = text.rstrip()
        # For a file that ends inside a string, the error is at the beginning of the string, not at the end of the file.
        what = "cut short or damaged" if error.pos >= len(ends) - 1 or not ends.endswith("}") else "not valid JSON"
        raise BaselineError(f"{what} at line {error.lineno}, column {error.colno}; {RESTORE}") from None
    except ValueError as error:
        raise BaselineError(f"not valid JSON ({_short(error)}); {RESTORE}") from None
    if not isinstance(data, dict):
        raise BaselineError(f"holds a {type(data).__name__}, not a table; {RESTORE}")
    ours = data.get("perfsuite")
    if not isinstance(ours, dict):
        whose = "a pytest-benchmark file that perfsuite did not write" if "benchmarks" in data else "not a baseline"
        raise BaselineError(f"{whose}; {ANEW}")
    schema = ours.get("schema")
    if type(schema) is not int or schema < 1:
        raise BaselineError(f"schema {_short(repr(schema))} is unknown; {RESTORE}")
    if schema > SCHEMA:
        raise BaselineError(f"schema {schema} is newer than this perfsuite knows ({SCHEMA}); upgrade perfsuite")
    if schema < SCHEMA:
        raise BaselineError(f"schema {schema} is older than this perfsuite's ({SCHEMA}); {ANEW}")
    try:
        machine = from_json(Machine, ours.get("machine"))
    except PerfsuiteError as error:
        raise BaselineError(f"{_short(error)}; {RESTORE}") from None
    if ours.get("digest") != _header_digest(data):
        raise BaselineError(f"the header was edited by hand (its digest does not match); {RESTORE}")
    return Baseline(machine=machine, entries=_parse_entries(data.get("benchmarks")))


def _parse_entries(benchmarks: Any) -> dict[str, Entry]:
    if not isinstance(benchmarks, list):
        raise BaselineError(f"has no list of benchmarks; {RESTORE}")
    records: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    for number, record in enumerate(benchmarks, 1):
        name = record.get("fullname") if isinstance(record, dict) else None
        key, _, side = name.rpartition("@") if isinstance(name, str) else ("", "", "")
        if not key or side not in records:
            raise BaselineError(f"benchmark {number} is not a side of a workload ({_short(repr(name))}); {RESTORE}")
        if key in records[side]:
            raise BaselineError(
                f"{_short(key)} appears twice; remove one of the two records by `git checkout` or accept it again"
            )
        records[side][key] = record
    for key in sorted(set(records["reference"]) ^ set(records["optimized"])):
        raise BaselineError(f"{_short(key)} has one of its two records only; {RESTORE}")
    entries = {}
    for key in sorted(records["optimized"]):
        try:
            entries[key] = _parse_entry(key, {side: records[side][key] for side in SIDES})
        except PerfsuiteError as error:
            raise BaselineError(f"{_short(key)}: {_short(error)}; {RESTORE}") from None
    return entries


def _parse_entry(key: str, records: Mapping[str, Any]) -> Entry:
    info = records["optimized"].get("extra_info")
    data = info.get("perfsuite") if isinstance(info, dict) else None
    if not isinstance(info, dict) or not isinstance(data, dict):
        raise BaselineError("the optimized record has no perfsuite entry")
    entry = _entry_in(records, data)
    if entry.id != key:
        raise BaselineError(f"holds the entry of {entry.id!r}")
    _check_entry(entry)
    if info.get("digest") != _digest(records):
        raise BaselineError("was edited by hand (its digest does not match)")
    return entry


def _entry_in(records: Mapping[str, Any], data: Mapping[str, Any]) -> Entry:
    blocks = {}
    for side, record in records.items():
        stats = record.get("stats")
        blocks[side] = stats.get("data") if isinstance(stats, dict) else None
    return from_json(Entry, {**data, "blocks_s": blocks})


def _check_entry(entry: Entry) -> None:
    if not entry.sessions or not all(s.processes for s in entry.sessions):
        raise BaselineError("has a session without processes, or none")
    for process in (p for s in entry.sessions for p in s.processes):
        if "reference" not in process.log_ratios:
            raise BaselineError("has a process without log_ratios to the reference")
        for other, values in process.log_ratios.items():
            if not values:
                raise BaselineError(f"log_ratios to {other} are empty")
        for side in SIDES:
            if not process.seconds.get(side, 0) > 0:
                raise BaselineError(f"has a process without seconds of the {side} side")
        if not all(s > 0 for s in process.anchors.values()):
            raise BaselineError("has an anchor kernel's time that is not above 0")
    for side in SIDES:
        if side not in entry.sides or not entry.blocks_s.get(side):
            raise BaselineError(f"has no summary or no block seconds of the {side} side")
        if not all(s > 0 for s in (entry.sides[side].seconds, *entry.blocks_s[side])):
            raise BaselineError(f"has a time of the {side} side that is not above 0")
    try:
        datetime.fromisoformat(entry.accepted)
    except ValueError:
        raise BaselineError(f"accepted is {entry.accepted!r}, not a date") from None


def update(
    path: str | os.PathLike[str], change: Callable[[Baseline | None], Baseline]
) -> tuple[Baseline | None, Baseline]:
    """Read, change and write a baseline under its lock. Return (old, new). `change` gets None where there is no file.

    The new file replaces the old one whole, or not at all. Raises BaselineError as `load` and `save` do. An error that
    `change` raises is passed on and leaves the file as it was.
    """
    path = Path(path)
    with _locked(path):
        old = load(path) if path.exists() else None
        new = change(old)
        _write(path, new)
    return old, new


def save(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write the baseline, whole or not at all, under its lock. Raises BaselineError if the folder cannot be written."""
    path = Path(path)
    with _locked(path):
        _write(path, baseline)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    # Beside the file: a temporary folder may be another one for another process.
    place = path.resolve()
    lock = FileLock(place.parent / SCRATCH / f"{place.name}.lock", mode=0o666)
    try:
        own_folder(Path(lock.lock_file).parent)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise BaselineError(
            f"{path}: another process has been writing it for {LOCK_SECONDS:.0f} s; end it, then accept again"
        ) from None
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be written ({error.filename}: {error.strerror or error}); make the folder writable, and "
            "accept again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, baseline: Baseline) -> None:
    path = path.resolve()
    temporary: str | None = None
    try:
        text = _render(baseline, _raw_records(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            stale.unlink()  # left by a writer that was killed; the lock says that none is at work
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        # A reason from a command line may hold bytes that are no text: JSON has the same escape for them.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed: make the folder writable, "
            "with space on it, and accept again"
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _raw_records(path: Path) -> dict[str, Any]:
    """Return the raw content of the file: the date of its header and, by entry, the records whose digest matches. Empty
    if the file is damaged."""
    try:
        data = json.loads(path.read_bytes())
        if data["perfsuite"]["digest"] != _header_digest(data):
            return {}
        pairs: dict[str, dict[str, Any]] = {}
        for record in data["benchmarks"]:
            key, _, side = record["fullname"].rpartition("@")
            pairs.setdefault(key, {})[side] = record
        infos = {key: pair["optimized"]["extra_info"] for key, pair in pairs.items()}
        sound = [(infos[k]["perfsuite"], pair) for k, pair in pairs.items() if infos[k]["digest"] == _digest(pair)]
        return {"datetime": data["datetime"], "records": {_canonical(_entry_in(p, own)): p for own, p in sound}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, PerfsuiteError):
        return {}


def _render(baseline: Baseline, old: Mapping[str, Any]) -> str:
    entries = [_rounded(baseline.entries[key]) for key in sorted(baseline.entries)]
    records = []
    for entry in entries:
        pair = old.get("records", {}).get(_canonical(entry)) or _records(entry)
        records += [pair[side] for side in SIDES]
    machine = baseline.machine
    header: dict[str, Any] = {
        "perfsuite": {"schema": SCHEMA, "machine": to_json(machine)},
        "machine_info": {
            "node": machine.device,
            "machine": machine.platform,
            "system": machine.platform.split("-")[0],
            "python_implementation": "CPython",
            "python_version": machine.python,
            "device": machine.device_name,
            "cpu": {"brand_raw": machine.cpu, "count": machine.cores},
        },
        # Each workload was accepted at its own revision and date: they are in its extra_info.
        "commit_info": {"id": "unversioned", "time": None, "dirty": False, "branch": None, "project": "perfsuite"},
        # The date of the file's first writing: a date that changed with each acceptance would conflict in every merge.
        "datetime": old.get("datetime") or min((e.accepted for e in entries), default="1970-01-01T00:00:00+00:00"),
        "version": _benchmark_version(),
    }
    header["perfsuite"]["digest"] = _header_digest(header)
    return _layout({**header, "benchmarks": records}, "") + "\n"


def _benchmark_version() -> str:
    import pytest_benchmark

    return str(pytest_benchmark.__version__)


def _records(entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the entry's two records, with their digest in the optimized one."""
    from pytest_benchmark import stats as theirs

    data = to_json(entry)
    del data["blocks_s"]
    records: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        stats: Any = theirs.Stats()  # type: ignore[no-untyped-call]  # pytest-benchmark has no types
        for seconds in entry.blocks_s[side]:
            stats.update(seconds)
        figures = {k: _digits(v) if isinstance(v, float) else v for k, v in stats.as_dict().items()}
        records[side] = {
            "name": f"{entry.id.partition('::')[2] or entry.id}@{side}",
            "fullname": f"{entry.id}@{side}",
            "group": entry.id,
            "params": None,
            "param": None,
            "options": {"clock": entry.clock, "direction": entry.direction, "dtype": entry.dtype},
            "extra_info": {"perfsuite": data} if side == "optimized" else {},
            "stats": {**figures, "iterations": 1, "data": list(entry.blocks_s[side])},
        }
    records["optimized"]["extra_info"]["digest"] = _digest(records)
    return records


def _digest(records: Mapping[str, Any]) -> str:
    """Return the digest of a workload's two records: of every field but the digest itself."""
    optimized = records["optimized"]
    info = {k: v for k, v in optimized["extra_info"].items() if k != "digest"}
    return _hashed({**records, "optimized": {**optimized, "extra_info": info}})


def _header_digest(data: Mapping[str, Any]) -> str:
    """Return the digest of a file's header: of every field but the digest itself and the benchmarks, which have their
    own."""
    header = {k: v for k, v in data.items() if k != "benchmarks"}
    return _hashed({**header, "perfsuite": {k: v for k, v in data["perfsuite"].items() if k != "digest"}})


def _hashed(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _layout(value: Any, indent: str) -> str:
    """Return JSON with each field of a table on a line of its own and a list of numbers on one line, so that a diff
    reads well."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        fields = (f"{inner}{json.dumps(str(k))}: {_layout(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        return "[\n" + ",\n".join(inner + _layout(v, inner) for v in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _not_finite(token: str) -> float:
    raise ValueError(f"{token} is not a number")


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{_short(token, 20)} is out of range")
    return value


def _whole(token: str) -> int:
    # Python refuses to parse integers of some thousands of digits, with a message about Python itself.
    if len(token) > 20 or abs(int(token)) >= INTEGER_MAX:
        raise ValueError(f"{_short(token, 20)} is out of range")
    return int(token)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(k for k, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"field {_short(repr(twice))} appears twice")
    return table


def _short(value: object, most: int = TOLD) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _one_line(text: str) -> str:
    """Return text from a damaged file in a form that a terminal can show: without line breaks, escapes or halves of
    characters."""
    return printable(" ".join(text.split()))
