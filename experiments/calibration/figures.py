"""The figures of a calibration, and the intervals of rates and standard deviations. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEVEL = 0.95
"""Level of every interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A share with its 95% interval; `of` is the number of trials, resampled or measured."""

    value: float
    low: float
    high: float
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A standard deviation with its 95% interval and degrees of freedom."""

    value: float
    low: float
    high: float
    dof: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Standard deviations of a log-ratio, by level of the design, and of a process mean, which is the gate's unit."""

    abba: float
    """Standard deviation between the ABBA rounds of a block."""
    block: float
    process: float
    session: float | None
    """Standard deviation between sessions; None if only one was recorded."""
    outliers: float
    """Share of ABBA rounds farther from their block's median than OUTLIER robust standard deviations."""
    unit: Deviation
    bias: float
    """Mean over sessions of their process means; for two imports of one code it should be 0."""
    bias_se: float
    processes: int
    sessions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """The gate's verdicts on one kind at one planted slowdown."""

    planted: float
    measured: float
    """Median of the planted slowdown over all recorded ABBA rounds. `error` is its standard error."""
    error: float
    regressed: Rate
    passed: Rate
    """PASS or IMPROVED."""
    noisy: Rate
    processes: float
    """Mean processes a workload."""
    seconds: float
    """Mean seconds a workload: timing both sides, without start, proof and warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Rate at which another tool fails one kind at one planted slowdown."""

    rule: str
    planted: float
    flagged: Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """All figures of one kind."""

    kind: str
    clock: str
    seconds: float
    """Seconds of a call of the optimized side."""
    processes: int
    to_reference: Components
    to_accepted: Components
    margin: float
    """Median margin over the simulated suites."""
    gate: tuple[Gated, ...]
    others: tuple[Compared, ...]
    coverage: Rate
    """Rate at which the 95% interval of the slowdown contains the true slowdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A required error rate of the whole suite, and the rate that was found."""

    what: str
    wanted: float
    found: Rate
    at_most: bool = False
    """`wanted` is an upper bound, not a lower one."""

    @property
    def met(self) -> bool:
        return self.found.value <= self.wanted if self.at_most else self.found.value >= self.wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds: medians over the recorded processes."""

    process: float
    start: float
    sampling: Mapping[str, float]
    """Kind → seconds of all its sides."""
    gate: Mapping[float, tuple[float, float]]
    """Planted slowdown → mean (rounds, seconds) of the whole simulated suite; seconds of starts and timing."""
    tools: Mapping[str, float]
    """Tool → seconds of one run through the kinds, without the start of its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One constant of the rule: its assumed value and what was measured."""

    name: str
    assumed: str
    measured: str
    reading: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Everything that the table and the plot show."""

    device: str
    device_name: str
    processes: int
    sessions: int
    suite: int
    """Workloads in the simulated suite."""
    suites: int
    """Simulated runs of unchanged suites."""
    kinds: tuple[KindResult, ...]
    targets: tuple[Target, ...]
    red: Rate
    """Share of unchanged suites with any red verdict."""
    improved: Rate
    """Share of unchanged suites with an IMPROVED verdict."""
    constants: tuple[Constant, ...]
    times: Times
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]


def clopper_pearson(count: float, of: float, level: float = LEVEL) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share; (0, 1) without trials. The count may be fractional."""
    if of <= 0:
        return 0.0, 1.0
    from scipy import special

    tail = (1 - level) / 2
    low = 0.0 if count <= 0 else float(special.betaincinv(count, of - count + 1, tail))
    high = 1.0 if count >= of else float(special.betaincinv(count + 1, of - count, 1 - tail))
    return low, high


def rate(count: float, of: int) -> Rate:
    """Return the share with Clopper and Pearson's interval."""
    low, high = clopper_pearson(count, of)
    return Rate(value=share(count, of), low=low, high=high, of=of)


def share(count: float, of: float) -> float:
    """Return the count as a share of the trials; 0 without trials."""
    return count / of if of else 0.0


def deviation(sd: float, dof: float) -> Deviation:
    """Return a standard deviation with the χ² interval of `dof` degrees of freedom."""
    from scipy import special

    tail = (1 - LEVEL) / 2
    low = sd * math.sqrt(dof / float(special.chdtri(dof, tail)))
    high = sd * math.sqrt(dof / float(special.chdtri(dof, 1 - tail)))
    return Deviation(value=sd, low=low, high=high, dof=dof)


def percent(value: float) -> str:
    """Return a share in per cent, with more decimals the smaller it is."""
    size = abs(100 * value)
    return f"{100 * value:.{0 if size >= 99.95 else 1 if size >= 1 or size < 5e-4 else 2 if size >= 0.1 else 3}f}%"
