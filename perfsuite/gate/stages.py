"""Stages of the gate's rule: after how many processes it decides, and which part of the error rate each stage uses."""

from __future__ import annotations

STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Numbers of processes after which the rule decides. Most unchanged workloads are decided after one."""
RED_PROCESSES = 4
"""Fewest processes for REGRESSED. Fewer may share a cause outside the code: in simulation, one of eight runs with twice
the accepted noise then reported unchanged suites as slower. IMPROVED needs the same number: after one or two processes,
3% of the calibration's unchanged suites had one."""
RED_STAGES = tuple(n for n in STAGES if n >= RED_PROCESSES)
BETA = 0.03
"""Rate at which a slowdown of the size of the margin may pass. At 2%, a gate on an H200 takes a sixth longer, and finds
one more in a hundred such slowdowns."""
BETA_SHARES = {1: 0.4, 2: 0.2, 3: 0.1, 4: 0.05, 6: 0.05, 8: 0.05, 12: 0.15}
"""Share of BETA that is used at each of STAGES. The first has the largest, because most unchanged workloads can be
decided there."""


def beta(processes: int) -> float:
    """Return the rate at which a slowdown of the size of the margin may pass after this number of processes."""
    return BETA * BETA_SHARES.get(processes, BETA_SHARES[STAGES[-1]])


def ahead(processes: int) -> dict[int, float]:
    """Return the next stages: number of further processes, at most RED_PROCESSES → rate at which a slowdown may pass
    then."""
    return {n - processes: beta(n) for n in STAGES if 0 < n - processes <= RED_PROCESSES}
