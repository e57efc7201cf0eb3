"""Check for faults that only occur while a side is timed: replayed answers, deferred or hidden work, impossible times.

Most functions raise NotTimed with a message that names the fault, or return data that `block_checks` needs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from perfsuite.correctness.execution import Leaves, flatten
from perfsuite.correctness.integrity.late_work import late, late_message
from perfsuite.correctness.integrity.outputs import not_plain
from perfsuite.errors import MachineError, NoisyError, NotTimed
from perfsuite.records import Limit
from perfsuite.system import host
from perfsuite.timing.clocks import CpuClock, CudaClock

FRESH_RATIO = 1.5
"""Factor by which a call on new values may take longer than the same call again. Both use the same caches."""
FRESH_EXTRA_S = {"device": 3e-6, "wall": 20e-6}
"""Seconds that such a call may take in addition, by clock. A replay that saves less is not worthwhile."""
BURST = 4.0
"""Multiple of the typical call's work above which a call is a burst."""
BURST_SHARE = 0.4
"""Share of all work from which bursts are a fault, because the typical call is then not representative."""
BURST_CALLS = 32
CPU_BURST_S = 20e-6
"""On a CPU, a burst takes more than this number of seconds longer than the typical call. The machine's own
interruptions, such as timers or page faults, take up to about 15 µs."""
QUIET_SHARE = 0.98
"""Smallest share of uninterrupted calls at which single calls are compared. On a busy machine, a pool of threads waits
for the thread that is not running, and any call may take a hundred times longer."""
UNSEEN_SHARE = 0.1
UNSEEN_S = 15e-6
"""Seconds after a call's last event within which the device must be idle, in addition to UNSEEN_SHARE of the call's
time. Otherwise work is running that the timer does not include."""
UNSEEN_CALLS = 3
UNSEEN_CALLS_MOST = 24
UNSEEN_PAUSE_S = 0.003
"""Pause in seconds that is longer than the time slice of one process on the device."""
FLOOR_SHARE = 0.85
"""Share of the limit below which a time is impossible. The ceilings are measured too, and a chip may boost."""
FLOOR_ATTEMPTS = 3
OTHERS_CORES = 0.15
"""Number of cores that other processes may use. More use lowers the ceiling that is measured."""
LOWERED = 100.0
"""Factor by which other processes cannot lower the measured ceiling. A time that is impossible even at a ceiling this
many times higher is not due to them."""
CPU_CACHE_BYTES = 1 << 29
PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of cuCtxGetLimit."""


def positive(seconds: float, name: str) -> float:
    """Return the time. Raises MachineError if it is not positive and finite, since every mean would be meaningless."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise MachineError(f"a call of the {name} side took {seconds:g} s: the clock cannot be trusted")
    return seconds


def is_quiet(work: Sequence[float], calls: int) -> bool:
    """Return whether few enough calls were interrupted that the times of single calls can be compared."""
    return len(work) >= QUIET_SHARE * calls


def replays(times: Sequence[tuple[float, float]], kind: str) -> bool:
    """Return whether calls on new values take much longer than the same calls again. `times` has (first call, second
    call)."""
    if len(times) < 4:
        return False
    fresh, again = (statistics.median(t) for t in zip(*times, strict=True))
    slower = sum(a > b for a, b in times)
    return fresh > FRESH_RATIO * again + FRESH_EXTRA_S[kind] and slower >= len(times) - len(times) // 8


def replayed(times: Sequence[tuple[float, float]], kind: str, where: str) -> None:
    """Raise NotTimed if the second calls replay the answers of the first ones. `times` is as for `replays`."""
    if replays(times, kind):
        fresh, again = (statistics.median(t) for t in zip(*times, strict=True))
        raise NotTimed(
            f"{where} takes {fresh * 1e6:.3g} µs on values that it has not seen and {again * 1e6:.3g} µs on the same "
            f"again: it replays earlier answers, which no training step would ask for"
        )


def bursts(
    work: Sequence[float],
    where: str,
    beside: Callable[[float], Sequence[float]] = lambda typical: (),
    remedy: str = "",
    least_s: float = 0.0,
) -> None:
    """Raise NotTimed if a few calls do a large part of all work. `work` has the times of the timed calls in order:
    device time, or CPU time of uninterrupted calls.

    `beside` returns the times of calls that do equal work on the same machine, of about `typical` seconds each. If
    these have bursts too, another process on the device is the cause. A burst takes more than `least_s` longer than the
    typical call.
    """
    if len(work) < BURST_CALLS:
        return
    long, share = _long(work, least_s)
    if share >= BURST_SHARE and burst_share(beside(statistics.median(work)), least_s) < BURST_SHARE / 2:
        raise NotTimed(
            f"{where} does {share:.0%} of its work in {len(long)} of {len(work)} calls: some calls do the work of the "
            f"others (or tune and compile while they are timed), so that a typical call's time is not what one pays"
            f"{remedy}"
        )


def burst_share(work: Sequence[float], least_s: float = 0.0) -> float:
    """Return the bursts' share of the work of these calls."""
    return _long(work, least_s)[1]


def _long(work: Sequence[float], least_s: float) -> tuple[list[float], float]:
    """Return (bursts among these calls, their share of all work)."""
    if not work or sum(work) <= 0:
        return [], 0.0
    typical = statistics.median(work)
    long = [w for w in work if w > max(BURST * typical, typical + least_s)]
    return long, sum(long) / sum(work)


def hidden(unseen_s: float, seconds: float, where: str) -> None:
    """Raise NotTimed if the device continues to work after the call: `unseen_s` seconds after the call's last event,
    where the timer measured `seconds`."""
    if unseen_s > UNSEEN_S + UNSEEN_SHARE * seconds:
        raise NotTimed(
            f"{where} keeps the device busy for {unseen_s * 1e6:.3g} µs after the timer has stopped at "
            f"{seconds * 1e6:.3g} µs: work on a side stream that the call does not wait for"
        )


def unseen_seconds(clock: CpuClock | CudaClock, reset: Callable[[], None], call: Callable[[], object]) -> float:
    """Return the seconds of device work that events on the current stream do not include, minus those of a single
    kernel.

    The result is the least of a few calls, or of many if that is large. Time slices of another process on the device
    delay single calls, but not all of several calls with pauses between them.
    """
    if isinstance(clock, CpuClock):
        return 0.0
    known = unseen = math.inf
    for attempt in range(1, UNSEEN_CALLS_MOST + 1):
        known = min(known, clock.after_last_event(lambda: None, clock.flush))
        unseen = min(unseen, clock.after_last_event(reset, call))
        if attempt >= UNSEEN_CALLS:
            if unseen - known <= UNSEEN_S:
                break
            time.sleep(UNSEEN_PAUSE_S)
    return max(0.0, unseen - known)


def plain(returned: object, where: str) -> None:
    """Raise NotTimed if a timed call returned tensors that are not plain, since these may defer the work until they are
    read."""
    for name, leaf in flatten(returned):
        fault = not_plain(name, leaf)
        if fault is not None:
            raise NotTimed(f"{where} {fault}")


def settled(leaves: Leaves, where: str) -> None:
    """Raise NotTimed if the outputs of a call still change."""
    changed = late(leaves)
    if changed is not None:
        raise NotTimed(f"{where} {late_message(changed)}")


def floor(
    limit: Limit, again: Callable[[], Limit | None], seconds: Callable[[], float], device: str, where: str
) -> Limit:
    """Raise NotTimed if the time is less than the device needs for the least work, so that the side cannot have done
    it. Return the lowest limit that was found.

    Before the side is blamed, `again` and `seconds` measure the limit and the time again, because the device may have
    been busy when its ceiling was measured. Raises NoisyError if other processes still use the CPU, and may have
    lowered its ceiling by this much.
    """
    best, took = limit, seconds()
    others = 0.0
    for attempt in range(FLOOR_ATTEMPTS):
        if took >= FLOOR_SHARE * least_seconds(best, device):
            return best
        with host.used_elsewhere() as used:
            anew = again()
            took = max(took, seconds())
        best = anew if anew is not None and anew.seconds < best.seconds else best
        others = max(others, used()) if attempt else used()
    least = least_seconds(best, device)
    if took >= FLOOR_SHARE * least:
        return best
    busy = torch.device(device).type == "cpu" and others > OTHERS_CORES
    if busy and took >= FLOOR_SHARE * least / LOWERED:
        raise NoisyError(
            "other processes use this CPU, so that its limit cannot be measured; measure again on an idle machine"
        )
    of = f"{best.bytes:.3g} bytes" if best.by == "memory" else f"{best.flops:.3g} operations"
    raise NotTimed(
        f"{where} takes {took * 1e6:.3g} µs, and this device needs {least * 1e6:.3g} µs for the {of} that cost= "
        f"names: it does not do the work, or cost= overstates it"
    )


def least_seconds(limit: Limit, device: str) -> float:
    """Return the seconds that the device needs for the least work. Data that fit in the cache need not come from
    memory."""
    if limit.by != "memory":
        return limit.seconds
    cache = CPU_CACHE_BYTES
    if torch.device(device).type == "cuda":
        cache = 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    return max(0.0, limit.bytes - cache) / limit.ceiling


def persisting_l2_bytes() -> int | None:
    """Return the bytes of L2 that are reserved for persisting lines; None if there is no CUDA driver."""
    driver = _driver() if torch.cuda.is_available() else None
    if driver is None:
        return None
    torch.cuda.synchronize()  # creates this thread's context if there is none, which the driver needs for the query
    found = ctypes.c_size_t()
    return int(found.value) if driver.cuCtxGetLimit(ctypes.byref(found), PERSISTING_L2) == 0 else None


def keeps_l2(before: int | None, where: str) -> None:
    """Raise NotTimed if a side has reserved L2 for lines that the flush between calls cannot evict. `before` are the
    bytes that were reserved before any side ran."""
    after = persisting_l2_bytes()
    driver = _driver()
    if after is None or before is None or after <= before or driver is None:
        return
    driver.cuCtxResetPersistingL2Cache()
    driver.cuCtxSetLimit(PERSISTING_L2, ctypes.c_size_t(before))
    raise NotTimed(
        f"{where} sets {after} bytes of L2 aside for persisting lines: its inputs would stay in the cache between "
        f"timed calls, as in no training step"
    )


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
