"""Stages of the gate's rule: after how many processes it decides, and how much of its error it spends at each stage."""

from __future__ import annotations

LOOKS = (1, 2, 3, 4, 6, 8, 12)
"""Processes after which the rule decides. Most unchanged workloads are clear after one."""
RED_PROCESSES = 4
"""Fewest processes for REGRESSED. Fewer may share a cause outside the code: in simulation, one of eight runs twice as
noisy as accepted then reported unchanged suites as slower. IMPROVED needs as many: after one or two, 3% of the
calibration's unchanged suites had one."""
RED_LOOKS = tuple(n for n in LOOKS if n >= RED_PROCESSES)
BETA = 0.03
"""Rate at which a slowdown of the margin may pass. At 2% a gate on an H200 takes a sixth longer, and finds one more in
a hundred slowdowns of the margin."""
BETA_SHARES = {1: 0.4, 2: 0.2, 3: 0.1, 4: 0.05, 6: 0.05, 8: 0.05, 12: 0.15}
"""Shares of BETA that are spent at each of LOOKS. Most unchanged workloads can be decided after the first process, so
it has most."""


def beta(processes: int) -> float:
    """Return the rate at which a slowdown of the margin may pass after this many processes."""
    return BETA * BETA_SHARES.get(processes, BETA_SHARES[LOOKS[-1]])


def ahead(processes: int) -> dict[int, float]:
    """Return the next stages: number of further processes, at most RED_PROCESSES → the rate at which a slowdown may
    pass then."""
    return {n - processes: beta(n) for n in LOOKS if 0 < n - processes <= RED_PROCESSES}
