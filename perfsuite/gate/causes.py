"""Find why a ratio differs from the accepted one: a side changed, or the device, or the software that both sides use.

The seconds of each side show which one changed. Three control kernels, which no change of a project can slow down, are
timed with every workload (control_kernels.py). They distinguish a slower device from a slower side. The gate does not
test them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.records import COPY, LAUNCH, MATMUL, REFERENCE, Measurement, complete
from perfsuite.statistics.blocks import process_mean

MOVED_LEAST = 0.02
"""Smallest log change of seconds that counts as a change. If the seconds of both sides change in the same direction by
more than this and by more than their ratio does, then the cause is something that they share. A control kernel that
changes by less has not changed."""
MOVED_SHARE = 0.5
"""Fraction of a side's change by which a control kernel must change in the same direction, so that the device is the
cause."""
_SHARED = {"device": "the device", "software": "not the device, but software that both sides use"}


def of_ratio(entry: Entry | None, runs: Sequence[Measurement], slower: float) -> tuple[str | None, str]:
    """Return (cause, explanation). The cause is "optimized", "reference", "device" or "software"; None if no entry.

    `slower` is the log slowdown of the ratio to the reference.
    """
    if entry is None:
        return None, ""
    shift = {side: _shift(entry, runs, side) for side in ("optimized", "reference")}
    controls = _control_shifts(entry, runs)
    optimized, reference = shift["optimized"], shift["reference"]
    if optimized * reference > 0 and min(abs(optimized), abs(reference)) > max(MOVED_LEAST, abs(slower)):
        with_control = not controls or _moved_with(controls, min(optimized, reference, key=abs))
        side = "device" if with_control else "software"
        word = "slower" if optimized > 0 else "faster"
        why = f"both sides' seconds are {word} ({change(optimized)} and {change(reference)})"
    else:
        side, other = ("reference", "optimized") if abs(reference) > abs(optimized) else ("optimized", "reference")
        why = f"against the stored times, the {side} side is {change(shift[side])}, "
        why += f"the {other} side {change(shift[other])}"
        if _moved_with(controls, shift[side]):
            side = "device"
    if side in _SHARED:
        why += f", so it is {_SHARED[side]}"
    return side, why + _listed(controls)


def of_speedup(entry: Entry | None, runs: Sequence[Measurement]) -> tuple[str | None, str]:
    """Return (cause, explanation) if the optimized code is as accepted, but its speedup over the reference is not.

    For processes without the accepted revision, return what `of_ratio` returns. At least one process must have timed
    the reference.
    """
    if entry is None:
        return None, ""
    timed, _ = complete((m for m in runs if m.log_ratios.get("reference")), REFERENCE)
    lost = math.log(entry.speedup()) - fmean(process_mean(m.log_ratios["reference"], m.clock) for m in timed)
    side, why = of_ratio(entry, timed, lost)
    if side != "optimized" or not all("accepted" in m.log_ratios for m in timed):
        return side, why
    if (slower := _beside_accepted(timed)) >= MOVED_SHARE * lost:
        return side, f"{why}; it is {change(slower)} than the accepted one beside it"
    # It is hardly slower than the accepted revision, so the cause is something that both revisions use.
    known = bool(_control_shifts(entry, timed))
    side = "software" if known else "device"
    beneath = _SHARED["software"] if known else "the device or its software"
    moved = change(_shift(entry, timed, "optimized"))
    return side, f"both revisions of the optimized side moved alike ({moved}), so it is {beneath}"


def of_seconds(entry: Entry | None, runs: Sequence[Measurement]) -> tuple[str | None, str]:
    """Return (cause, explanation) if the optimized side takes too many seconds, but is no slower than accepted.

    Return (None, "") if the seconds rose by no more than MOVED_LEAST.
    """
    moved = _shift(entry, runs, "optimized") if entry else 0.0
    if entry is None or moved <= math.log1p(MOVED_LEAST):
        return None, ""
    controls = _control_shifts(entry, runs)
    side = "optimized"
    if _moved_with(controls, moved):
        side = "device"
    elif all("accepted" in m.log_ratios for m in runs) and _beside_accepted(runs) < MOVED_SHARE * moved:
        # Both revisions changed alike.
        side = "software" if controls else "device"
    why = f"the optimized side is {change(moved)} than when accepted"
    return side, why + (f", because of {_SHARED[side]}" if side in _SHARED else "") + _listed(controls)


def _beside_accepted(runs: Sequence[Measurement]) -> float:
    """Return the log slowdown of the optimized side against the accepted one, timed in the same processes."""
    return -fmean(process_mean(m.log_ratios["accepted"], m.clock) for m in runs)


def reference_moved(entry: Entry | None, runs: Sequence[Measurement], most: float) -> str:
    """Return why a stored ratio proves nothing here: the reference's own seconds changed by more than `most`. Empty if
    they did not.

    A clock rate or another process that slows only the reference would hide a slowdown of the optimized side.
    """
    moved = _shift(entry, runs, "reference") if entry else 0.0
    if abs(moved) <= math.log1p(max(most, MOVED_LEAST)):
        return ""
    return f"the reference is {change(moved)} than when accepted, so the ratio to it may hide a slowdown"


def change(log: float, more: str = "slower", less: str = "faster") -> str:
    """Return a log-ratio in words, e.g. "3.0% slower"."""
    relative = math.expm1(log)
    return f"{relative:.1%} {more}" if relative >= 0 else f"{-relative:.1%} {less}"


def _shift(entry: Entry, runs: Sequence[Measurement], side: str) -> float:
    """Return the log change of a side's own seconds since it was accepted; 0 if they were not measured."""
    timed, _ = complete(runs, side)
    now = [math.log(median(m.sides[side].blocks_s)) for m in timed if m.sides[side].blocks_s]
    return fmean(now) - math.log(entry.sides[side].seconds) if now else 0.0


def _moved_with(controls: Mapping[str, float], shift: float) -> bool:
    """Return whether a control kernel changed together with a side that changed by `shift`."""
    least = max(MOVED_LEAST, MOVED_SHARE * abs(shift))
    return any(a * shift > 0 and abs(a) > least for a in controls.values())


def _control_shifts(entry: Entry, runs: Sequence[Measurement]) -> dict[str, float]:
    """Return the log change of each control kernel that is relevant to this workload; empty if none are known."""
    names = {"memory": [COPY], "compute": [MATMUL]}.get(entry.limit.by if entry.limit else "", [COPY, MATMUL])
    names += [LAUNCH] if entry.clock == "wall" else []
    accepted = entry.anchors()
    shifts = {}
    for name in names:
        now = [seconds for m in runs if (seconds := m.anchors.get(name, 0.0)) > 0]
        if now and name in accepted:
            shifts[name] = math.log(median(now)) - math.log(accepted[name])
    return shifts


def _listed(controls: Mapping[str, float]) -> str:
    changes = ", ".join(f"{name} {change(moved)}" for name, moved in controls.items())
    return f" (control kernels: {changes})" if changes else ""
