"""Compare peak memory, host syncs and kernel launches with the promises and with what was accepted.

They do not depend on noise, so that they are a second witness beside the clock. Syncs and launches must not rise at
all. Peak memory may rise by MEMORY_SHARE or MEMORY_BYTES, whichever is more: the caching allocator rounds blocks, and a
library may choose another workspace.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.baseline import Entry, is_cpu
from perfsuite.records import Measurement, PromiseRecord

NAMES = {"peak_bytes": "peak memory", "host_syncs": "host syncs", "launches": "kernel launches"}
MEMORY_SHARE = 0.02
MEMORY_BYTES = 1 << 20
"""The caching allocator packs requests of up to 1 MiB into shared blocks; a larger one is a tensor by itself."""


def broken(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return in words which promised counts are exceeded; empty where none is. One process above the promise is
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
    """Return in words which counts exceed the accepted revision's in every process; empty where none does.

    The current side is compared with the accepted side where that ran in the same process, else with the stored count.
    """
    over = []
    for name in NAMES:
        pairs = [pair for m in runs if (pair := _pair(m, entry, name)) is not None]
        if pairs and all(now - before > _allowance(name, before) for now, before in pairs):
            now, before = min(pairs)
            over.append(f"{NAMES[name]} {shown(name, now)}, {shown(name, before)} when accepted")
    return f"the optimized side needs more: {'; '.join(over)}" if over else ""


def witnesses(runs: Sequence[Measurement], entry: Entry | None) -> int:
    """Return the number of processes that counted whatever can be compared with what was accepted."""
    return min((n for name in NAMES if (n := sum(_pair(m, entry, name) is not None for m in runs))), default=len(runs))


def missing(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return in words which promised counts no process counted; empty on a CPU, where there is nothing to count
    with."""
    names = _uncounted(runs, promises)
    return f"{', '.join(names)} promised, but no process counted them" if names and not is_cpu(runs[0].device) else ""


def uncounted(runs: Sequence[Measurement], promises: PromiseRecord) -> str:
    """Return a note on promised counts that a CPU cannot count; empty where there are none."""
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
    """Return (count now, count when accepted); None where either is not known."""
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
