"""The device clock and the wall clock, on a GPU and on a CPU.

*device*: the time of the kernels alone. A spinning kernel blocks the stream while the host enqueues the timed calls, so
that launch latency is hidden. Each call is between two events. The spin ends by itself, so a call that synchronises
cannot deadlock behind it. It would only make the sample invalid, and the caller does not use this clock for such calls.
*wall*: the time from the call to synchronised completion, for which a user waits.

The timers are bound when this module is first imported, before any user code runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from time import perf_counter_ns, process_time_ns
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, and mypy knows no other

from perfsuite.errors import MachineError
from perfsuite.timing.peers import ALONE, Peers

# A stream holds about 1024 pending launches. Beyond that the host waits, and launch latency is no longer hidden.
QUEUE_DEPTH = 800
SPIN_MARGIN = 1.25
SPIN_EXTRA_S = 50e-6
ATTEMPTS = 3
WAITS_WITHIN = 0.25
"""Calls are taken to wait for the spin if, from one attempt to the next, the time to enqueue grows by as much as the
spin, within this relative difference."""
FLUSH_L2_MULTIPLE = 2


def middle(times: Sequence[float]) -> float:
    """Return the mean of the middle half of the times. Like the median it ignores interrupted calls, but its resolution
    is finer than the timer's."""
    ordered = sorted(times)
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def interruptions() -> int:
    """Return the number of involuntary context switches of this process; 0 on Windows."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def usage() -> tuple[int, int]:
    """Return (number of interruptions, CPU time in nanoseconds) of this process so far."""
    return interruptions(), process_time_ns()


def worked(before: tuple[int, int], took_ns: int) -> list[float]:
    """Return a list with the seconds of CPU time since `usage` returned `before`, at most `took_ns`; an empty list if
    the process was interrupted."""
    switches, busy = usage()
    # The smaller of the two, because idle threads of a pool keep spinning.
    return [min(busy - before[1], took_ns) * 1e-9] if switches == before[0] else []


EVEN_ELEMENTS, EVEN_CALLS, EVEN_MOST = 64, 16, 1000
"""Elements of the tensor that `CpuClock.even_work` adds, calls that measure how long one addition takes, and most
additions a call."""


class CpuClock:
    """Clock of a CPU: `perf_counter` around each call. It serves as both clocks."""

    kinds = ("wall",)
    waiting: frozenset[str] = frozenset()
    """Always empty: a CPU has no queue for which a call could wait."""

    def __init__(self, peers: Peers = ALONE) -> None:
        self.peers = peers
        self._now = perf_counter_ns
        """The timer, bound before any side runs, so that a side that replaces the timer during a call has no effect."""
        self.work: list[float] = []
        """Seconds of each call of the last sample: the smaller of wall time and CPU time. Interrupted calls are left
        out."""

    def sample(
        self,
        kind: str,
        reset: Callable[[], None],
        call: Callable[[], object],
        calls: int,
        launches: int,
        key: str = "",
    ) -> float:
        """Return the seconds a call, over `calls` calls."""
        times: list[int] = []
        work: list[float] = []
        for _ in range(calls):
            reset()
            self.peers.meet()
            before = usage()
            start = self._now()
            call()
            times.append(self._now() - start)
            work += worked(before, times[-1])
        self.work = self.peers.work(work, calls)
        return middle(self.peers.slowest(times)) * 1e-9

    def even_work(self, seconds: float, calls: int) -> list[float]:
        """Return the seconds of each of `calls` calls that add small tensors for about `seconds`. All do equal work, so
        differences between them are noise."""
        x = torch.ones(EVEN_ELEMENTS)

        def add(times: int) -> None:
            for _ in range(times):
                torch.add(x, x)

        once = self.sample("wall", lambda: None, lambda: add(1), EVEN_CALLS, 1)
        times = max(1, min(EVEN_MOST, round(seconds / once))) if once > 0 else 1
        self.sample("wall", lambda: None, lambda: add(times), calls, 1)
        return self.work

    def synchronize(self) -> None:
        """Do nothing: nothing is asynchronous on a CPU."""


class CudaClock:
    """Clock of a GPU: CUDA events for the device clock, `perf_counter` and synchronisation for the wall clock.

    Before each timed call, reading a buffer of twice the L2 size evicts the contents of L2. Reading leaves clean lines.
    Writing would leave dirty ones, which the timed kernel would have to write back.
    """

    kinds = ("device", "wall")

    def __init__(self, peers: Peers = ALONE) -> None:
        self.peers = peers
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        l2_bytes = int(getattr(properties, "L2_cache_size", 64 << 20)) or (64 << 20)
        self._flush = torch.zeros(FLUSH_L2_MULTIPLE * l2_bytes // 4, dtype=torch.float32, device="cuda")
        self._now = perf_counter_ns
        self._event: Callable[..., Any] = torch.cuda.Event
        self._spin: Callable[[int], None] = getattr(torch.cuda, "_sleep")  # noqa: B009 - private, and untyped
        self._sync = torch.cuda.synchronize
        self._enqueue_s: dict[str, float] = {}
        self._cycles_per_s = self._calibrate()
        self.unhidden = 0
        """Number of samples whose launch latency could not be hidden."""
        self.waiting: set[str] = set()
        """Keys of the sides whose calls wait for the device: the longer the spin, the longer these calls took."""
        self.work: list[float] = []
        """Seconds of each call of the last sample: on the device clock device time, on the wall clock as in
        `CpuClock.work`."""

    def _calibrate(self) -> float:
        cycles = 5_000_000
        rates: list[float] = []
        for _ in range(3):
            start, end = self._event(enable_timing=True), self._event(enable_timing=True)
            start.record()
            self._spin(cycles)
            end.record()
            self._sync()
            elapsed_s = start.elapsed_time(end) * 1e-3
            rates.append(cycles / elapsed_s if elapsed_s > 0 else math.inf)
        rate = max(rates)
        if not math.isfinite(rate) or rate <= 0:
            raise MachineError("the device's events measure no time; its clock cannot be trusted")
        return rate

    def flush(self) -> None:
        """Evict the inputs and the data of earlier calls from L2."""
        self._flush.amax()

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._sync()

    def sample(
        self,
        kind: str,
        reset: Callable[[], None],
        call: Callable[[], object],
        calls: int,
        launches: int,
        key: str = "",
    ) -> float:
        """Return the seconds a call, over `calls` calls, on the clock `kind`.

        `launches` is the number of kernel launches of one call. `key` names the side, and its time to enqueue is
        remembered under it.
        """
        if kind == "wall":
            return self._wall(reset, call, calls)
        return self._device(reset, call, calls, launches, key)

    def _wall(self, reset: Callable[[], None], call: Callable[[], object], calls: int) -> float:
        times: list[int] = []
        work: list[float] = []
        for _ in range(calls):
            reset()
            self.flush()
            self._sync()
            self.peers.meet()
            before = usage()
            start = self._now()
            call()
            self._sync()
            times.append(self._now() - start)
            work += worked(before, times[-1])
        self.work = self.peers.work(work, calls)
        return middle(self.peers.slowest(times)) * 1e-9

    def after_last_event(self, reset: Callable[[], None], call: Callable[[], object]) -> float:
        """Return the seconds from the completion of an event recorded after the call until the whole device is idle."""
        end = self._event()
        reset()
        self._sync()
        call()
        end.record()
        end.synchronize()
        start = self._now()
        self._sync()
        return self.peers.slowest([(self._now() - start) * 1e-9])[0]

    def _device(
        self, reset: Callable[[], None], call: Callable[[], object], calls: int, launches: int, key: str
    ) -> float:
        hide = launches <= QUEUE_DEPTH and key not in self.waiting
        tried: list[tuple[float, float]] = []
        for attempt in range(ATTEMPTS):
            starts = [self._event(enable_timing=True) for _ in range(calls)]
            ends = [self._event(enable_timing=True) for _ in range(calls)]
            gate = self._event()
            self._sync()
            spin_s = self._enqueue_s.get(key, 1e-3) * SPIN_MARGIN * 2**attempt + SPIN_EXTRA_S
            if hide:
                self._spin(int(spin_s * self._cycles_per_s))
            gate.record()
            began = self._now()
            for start, end in zip(starts, ends, strict=True):
                reset()
                self.flush()
                self.peers.line_up()
                start.record()
                call()
                end.record()
            took = (self._now() - began) * 1e-9
            hidden = self.peers.all(hide and not gate.query())
            (took,) = self.peers.slowest([took])
            self._sync()
            self._enqueue_s[key] = max(took, 0.8 * self._enqueue_s.get(key, 0.0))
            tried.append((spin_s, took))
            if hidden or not hide:
                break
        if hide and not hidden and _waits(tried):
            self.waiting.add(key)
        self.unhidden += not hidden
        self.work = self.peers.slowest([s.elapsed_time(e) * 1e-3 for s, e in zip(starts, ends, strict=True)])
        return middle(self.work)

    def even_work(self, seconds: float, calls: int) -> list[float]:
        """Return the device seconds of each of `calls` kernels that spin for `seconds`. All do equal work, so
        differences between them are noise."""
        cycles = max(1, int(seconds * self._cycles_per_s))
        self._device(lambda: None, lambda: self._spin(cycles), min(calls, self.calls_within_queue(calls, 1)), 1, "even")
        return self.work

    def host_s(self, key: str) -> float:
        """Return the host seconds to enqueue the side's last sample on the device clock; 0 before the first sample."""
        return self._enqueue_s.get(key, 0.0)

    @staticmethod
    def calls_within_queue(calls: int, launches: int) -> int:
        """Return how many calls fit in the stream's queue with their resets, flushes and events; at most `calls`."""
        return max(1, min(calls, QUEUE_DEPTH // (launches + 8)))


def _waits(tried: Sequence[tuple[float, float]]) -> bool:
    """Return whether calls wait for the spin, given (seconds of the spin, seconds to enqueue) of each attempt."""
    for (spin, took), (longer, took_then) in itertools.pairwise(tried):
        if took < spin or abs((took_then - took) / (longer - spin) - 1) > WAITS_WITHIN:
            return False
    return len(tried) == ATTEMPTS


def clock_for(device: str, peers: Peers = ALONE) -> CpuClock | CudaClock:
    """Return the clock of the device. With several processes, it returns the time of the slowest one in all of them."""
    return CudaClock(peers) if torch.device(device).type == "cuda" else CpuClock(peers)
