"""Count host syncs and kernel launches of one call, from the profiler's record of CUDA runtime calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from perfsuite.errors import MachineError

COUNTED_S = 1.0
"""Seconds of a call above which a side is not counted, unless it is the optimized side. For a loop over 32768 steps
with half a million launches, the profiler had not finished after four minutes."""
SESSIONS = 3
"""Most sessions of the profiler, until one has captured everything."""
LAUNCHES = frozenset(
    {
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaLaunchCooperativeKernel",
        "cudaGraphLaunch",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuLaunchCooperativeKernel",
        "cuGraphLaunch",
    }
)
SYNCS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cudaMemset",
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
    }
)


def detach_after_profiling() -> None:
    """Make the profiler remove its hooks when it stops. Call this before a process profiles for the first time.

    Otherwise the hooks slow every later CUDA call: by 0.8 us of a 7 us .item() on an H200.
    """
    os.environ.setdefault("TEARDOWN_CUPTI", "1")


def count_calls(
    sides: Mapping[str, tuple[Callable[[], None], Callable[[], object]]],
    any_of_ranks: Callable[[bool], bool] = bool,
) -> dict[str, tuple[int, int]]:
    """Return name → (host syncs, kernel launches) of one call, for sides given as (reset, call). All must be warmed up.

    The profiler sometimes captures nothing. So a sentinel with a known launch and a known sync runs in the same
    session. If the profiler missed the sentinel or a call, everything is counted again, in up to `SESSIONS` sessions.
    Raises MachineError after that.

    any_of_ranks  returns whether a flag is true in any of the processes that call the sides together, so that all of
                  them count again
    """
    for _ in range(SESSIONS):
        counts, problem = _session(sides)
        if not any_of_ranks(bool(problem)):
            return counts
    raise MachineError(problem or "the profiler of another rank captured no CUDA runtime calls")


def _session(
    sides: Mapping[str, tuple[Callable[[], None], Callable[[], object]]],
) -> tuple[dict[str, tuple[int, int]], str]:
    """Count in one session. Return (counts, what went wrong or an empty string)."""
    detach_after_profiling()
    probe = torch.zeros(1, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for name, (reset, call) in sides.items():
            reset()
            torch.cuda.synchronize()
            with torch.profiler.record_function(f"perfsuite::{name}"):
                call()
            torch.cuda.synchronize()
        with torch.profiler.record_function("perfsuite::@sentinel"):
            (probe + 1).item()
        torch.cuda.synchronize()
    events = profile.events() or []
    ranges = {
        e.name.removeprefix("perfsuite::"): (e.time_range.start, e.time_range.end)
        for e in events
        if e.name.startswith("perfsuite::") and e.device_type.name == "CPU"
    }
    marks = sorted((e.time_range.start, e.name) for e in events if e.name in LAUNCHES or e.name in SYNCS)
    counts: dict[str, tuple[int, int]] = {}
    for name in (*sides, "@sentinel"):
        if name not in ranges:
            return {}, f"the profiler lost the call of {name!r}; host syncs and launches cannot be counted"
        low, high = ranges[name]
        inside = [mark for start, mark in marks if low <= start <= high]
        counts[name] = (sum(m in SYNCS for m in inside), sum(m in LAUNCHES for m in inside))
    syncs, launches = counts.pop("@sentinel")
    if syncs < 1 or launches < 1:
        return (
            {},
            "the profiler captured no CUDA runtime calls; run without another profiler, and see `perfsuite doctor`",
        )
    return counts, ""
