"""Compare peak memory, host syncs and kernel launches with the promises and with the accepted counts.

Counts are free of timing noise, so they can show a regression that the times do not show. Syncs and launches must not
rise at all. Peak memory may rise by MEMORY_SHARE or MEMORY_BYTES, whichever is more: the caching allocator rounds
blocks, and a library may choose another workspace.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.baseline.accepted_entries import Entry, is_cpu
from perfsuite.records import Measurement, PromiseRecord

NAMES = {"peak_bytes": "peak memory", "host_syncs": "host syncs", "launches": "kernel launches"}
MEMORY_SHARE = 0.02
MEMORY_BYTES = 1 << 20
"""Bytes by which peak memory may always rise. The caching allocator packs requests of up to 1 MiB into shared blocks; a
larger one has a block of its own."""


def broken(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return a message with the promised counts that are exceeded; empty if none are. One process above the promise is
    enough."""
    over = [
        f"{NAMES[name]} {shown(name, max(counted))} (promised: at most {shown(name, getattr(promises, name))})"
        for name in NAMES
        if getattr(promises, name) is not None
        and (counted := _counted(runs, name))
        and max(counted) > getattr(promises, name)
    ]
    return f"the optimized side breaks its promise: {', '.join(over)}; fix it, or change the promise" if over else ""


def more_than_accepted(runs: Sequence[Measurement], entry: Entry | None) -> str:
    """Return a message with the counts that exceed the accepted revision's in every process; empty if none do.

    The current side is compared with the accepted side if that ran in the same process, else with the stored count.
    """
    over = []
    for name in NAMES:
        pairs = [pair for m in runs if (pair := _pair(m, entry, name)) is not None]
        if pairs and all(now - before > _allowance(name, before) for now, before in pairs):
            now, before = min(pairs)
            over.append(f"{NAMES[name]} {shown(name, now)}, {shown(name, before)} when accepted")
    return f"the optimized side needs more: {'; '.join(over)}" if over else ""


def witnesses(runs: Sequence[Measurement], entry: Entry | None) -> int:
    """Return the number of processes that counted each count that can be compared with an accepted one: the least over
    the counts."""
    return min((n for name in NAMES if (n := sum(_pair(m, entry, name) is not None for m in runs))), default=len(runs))


def missing(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return a message with the promised counts that no process counted; empty if there are none, or on a CPU, where
    nothing can be counted."""
    names = _uncounted(runs, promises)
    return f"{', '.join(names)} promised, but no process counted them" if names and not is_cpu(runs[0].device) else ""


def uncounted(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return a note on promised counts that a CPU cannot count; empty if there are none."""
    names = _uncounted(runs, promises)
    return f"; {', '.join(names)} promised, but not countable on a CPU" if names else ""


def _uncounted(runs: Sequence[Measurement], promises: PromiseRecord) -> list[str]:
    return [NAMES[n] for n in NAMES if getattr(promises, n) is not None and not _counted(runs, n)]


def _counted(runs: Sequence[Measurement], name: str) -> list[int]:
    return [count for m in runs if (count := _of(m, "optimized", name)) is not None]


def _of(measurement: Measurement, side: str, name: str) -> int | None:
    record = measurement.sides.get(side)
    value: int | None = getattr(record, name) if record is not None else None
    return value


def _pair(measurement: Measurement, entry: Entry | None, name: str) -> tuple[int, int] | None:
    """Return (count now, count when accepted); None if either is not known."""
    now, before = _of(measurement, "optimized", name), _before(measurement, entry, name)
    return (now, before) if now is not None and before is not None else None


def _before(measurement: Measurement, entry: Entry | None, name: str) -> int | None:
    beside = _of(measurement, "accepted", name)
    if beside is not None or entry is None:
        return beside
    stored: int | None = getattr(entry.sides["optimized"], name)
    return stored


def _allowance(name: str, before: int) -> float:
    return max(MEMORY_SHARE * before, MEMORY_BYTES) if name == "peak_bytes" else 0


def shown(name: str, count: int) -> str:
    """Return a count as text, e.g. "1.5 MiB" of peak memory."""
    return f"{count / 2**20:.4g} MiB" if name == "peak_bytes" else str(count)
