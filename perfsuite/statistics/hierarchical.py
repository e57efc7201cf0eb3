"""Compute estimates from block log-ratios, with hierarchical variances.

The unit of observation is a *process mean*: the mean over one process's blocks of log(time of the other side / time of
the optimized side), trimmed on the wall clock (blocks.py). Blocks of one process share a bias (code and buffer
placement), so they are not independent units. Processes of one session (one machine, about an hour) share a further
bias. A process mean is therefore

    true log-ratio + session shift (variance ω²) + process shift and block noise (variance τ²).

A mean over several processes has variance A·ω² + B·τ², where A and B follow from the number of sessions and processes.
A variance estimated from a few values is unreliable. Each workload's τ² and ω² are therefore shrunk toward the suite's
distribution (a scaled inverse χ² prior, as in limma), and carry degrees of freedom to the t quantiles.

All values are natural logarithms: 0.01 is about 1%. Nothing here imports torch; scipy is imported on first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeAlias

Sessions: TypeAlias = Sequence[Sequence[float]]
"""Process means, by session."""

PROCESS_SD = 0.0035
"""Default standard deviation of a process mean: the root mean square of measurements on GPUs (process 0.05% to 0.6%,
blocks 0.2% to 0.6%, averaged over 8 blocks)."""
PROCESS_DOF = 4.0
"""Degrees of freedom of PROCESS_SD: measured τ² vary between workloads about as a χ² with 4 degrees of freedom."""
SESSION_SD = 0.002
"""Default standard deviation of the session shift: the middle of the 0.1% to 0.3% that were measured on GPUs."""
SESSION_DOF = 6.0
"""Degrees of freedom of SESSION_SD: 0.1% to 0.3% is the range of a χ² with 6 to 7 degrees of freedom."""
SESSION_SD_FLOOR = 0.0005
"""Lower bound for the session shift, because a few quiet hours do not prove that all hours are quiet."""
PROCESS_SD_FLOOR = 0.0001
"""Lower bound for sample deviations in the prior's fit, because zero has no logarithm."""
PRIOR_WORKLOADS = 5
"""Fewest workloads from which the suite's distribution of variances is estimated. With fewer, the defaults are used."""
PRIOR_DOF_MAX = 30.0
"""Upper bound for the prior's degrees of freedom, because similar workloads do not prove that the next one is
similar."""
IMPORT_BIAS = 0.0005
"""Standard deviation of the bias between two imports of one revision in one process, whose code and buffers are at
different addresses. Measured on an H200 in the calibration."""
SPREAD_P = 1e-3
"""Level of the F test that detects a workload that is noisier than when it was accepted."""
INFLATION_WORKLOADS = 8
"""Fewest workloads for the median of variance ratios. With fewer it is unreliable, since each ratio has one degree of
freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """A variance (of log-ratios) and its degrees of freedom."""

    value: float
    dof: float

    def updated(self, value: float, dof: float) -> Variance:
        """Return the posterior of this variance, as a prior, given a sample variance `value` with `dof` degrees of
        freedom."""
        if dof <= 0:
            return self
        total = self.dof + dof
        return Variance(value=(self.dof * self.value + dof * value) / total, dof=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Variances of one workload, or of a suite (as a prior): τ² of a process mean, and ω² of a session shift."""

    process: Variance
    session: Variance


DEFAULT_NOISE = Noise(
    process=Variance(value=PROCESS_SD**2, dof=PROCESS_DOF),
    session=Variance(value=SESSION_SD**2, dof=SESSION_DOF),
)
"""Prior that is used if none can be fitted to the suite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean of process means. Its variance is `session`·ω² + `process`·τ² + `fixed`."""

    value: float
    session: float
    process: float
    fixed: float = 0.0

    def minus(self, other: Mean) -> Mean:
        """Return the difference of two means from different sessions."""
        return Mean(
            value=self.value - other.value,
            session=self.session + other.session,
            process=self.process + other.process,
            fixed=self.fixed + other.fixed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value with its standard error and degrees of freedom."""

    value: float
    se: float
    dof: float

    def lower(self, level: float) -> float:
        """Return the lower bound of the truth with confidence `level`."""
        return self.value - t_quantile(level, self.dof) * self.se

    def upper(self, level: float) -> float:
        """Return the upper bound of the truth with confidence `level`."""
        return self.value + t_quantile(level, self.dof) * self.se

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval with confidence `level`."""
        half = (1 + level) / 2
        return self.lower(half), self.upper(half)

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value: the probability that a truth of `bound` gives a value this high or higher."""
        return t_survival((self.value - bound) / self.se, self.dof)

    def p_below(self, bound: float) -> float:
        """Return the one-sided p-value: the probability that a truth of `bound` gives a value this low or lower."""
        return t_survival((bound - self.value) / self.se, self.dof)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of two or more values."""
    mean = fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def within(sessions: Sessions) -> tuple[float, float]:
    """Return the pooled variance of process means within their sessions, and its degrees of freedom (0 if none)."""
    dof = sum(len(s) - 1 for s in sessions)
    if dof <= 0:
        return 0.0, 0.0
    return sum((len(s) - 1) * variance(s) for s in sessions if len(s) > 1) / dof, float(dof)


def between(sessions: Sessions, process: float) -> tuple[float, float]:
    """Return an unbiased estimate of ω² given τ², which may be negative, and its degrees of freedom (0 if there is only
    one session)."""
    if len(sessions) < 2:
        return 0.0, 0.0
    shifts = variance([fmean(s) for s in sessions])
    return shifts - process * fmean(1 / len(s) for s in sessions), float(len(sessions) - 1)


def fit_prior(suite: Iterable[Sessions]) -> Noise:
    """Return the suite's own distribution of noise, from each workload's process means by session.

    τ²: scaled inverse χ², by the moments of the log variances (Smyth 2004), if at least PRIOR_WORKLOADS workloads have
    a sample variance; otherwise the default. ω²: pooled over the workloads with several sessions, and the default with
    SESSION_DOF degrees of freedom.
    """
    workloads = [s for s in suite if s]
    process = _fit_process([within(s) for s in workloads])
    total, dof = SESSION_DOF * SESSION_SD**2, SESSION_DOF
    for sessions in workloads:
        own = process.updated(*within(sessions))
        value, degrees = between(sessions, own.value)
        total += degrees * value
        dof += degrees
    return Noise(process=process, session=Variance(value=max(total / dof, SESSION_SD_FLOOR**2), dof=SESSION_DOF))


def _fit_process(samples: Sequence[tuple[float, float]]) -> Variance:
    known = [(max(value, PROCESS_SD_FLOOR**2), dof) for value, dof in samples if dof > 0]
    if len(known) < PRIOR_WORKLOADS:
        return DEFAULT_NOISE.process
    special = _special()
    logs = [math.log(v) - float(special.psi(d / 2)) + math.log(d / 2) for v, d in known]
    excess = variance(logs) - fmean(float(special.polygamma(1, d / 2)) for _, d in known)
    dof = min(2 * _trigamma_inverse(excess), PRIOR_DOF_MAX) if excess > 0 else PRIOR_DOF_MAX
    value = math.exp(fmean(logs) + float(special.psi(dof / 2)) - math.log(dof / 2))
    return Variance(value=max(value, PROCESS_SD_FLOOR**2), dof=dof)


def _trigamma_inverse(x: float) -> float:
    """Return y with trigamma(y) = x, by Newton's method on 1/trigamma, which is nearly linear."""
    special = _special()
    if x > 1e7:
        return 1 / math.sqrt(x)
    if x < 1e-6:
        return 1 / x
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(special.polygamma(1, y))
        step = value * (1 - value / x) / float(special.polygamma(2, y))
        y += step
        if abs(step) < 1e-9 * y:
            break
    return y


def noise_of(sessions: Sessions, prior: Noise) -> Noise:
    """Return one workload's variances, shrunk toward the suite's. If it has no session of several processes, return the
    suite's τ²."""
    process = prior.process.updated(*within(sessions))
    value, dof = between(sessions, process.value)
    return Noise(process=process, session=prior.session.updated(max(value, 0.0), dof))


def baseline_mean(sessions: Sessions, noise: Noise) -> Mean:
    """Return the mean over sessions, weighted by the inverse variances of their means. Raises ValueError if there is no
    process."""
    weights = [1 / (noise.session.value + noise.process.value / len(s)) for s in sessions if s]
    total = sum(weights)
    if not total:
        raise ValueError("no process to take the mean of")
    shares = [w / total for w in weights]
    full = [s for s in sessions if s]
    return Mean(
        value=sum(v * fmean(s) for v, s in zip(shares, full, strict=True)),
        session=sum(v * v for v in shares),
        process=sum(v * v / len(s) for v, s in zip(shares, full, strict=True)),
    )


def run_mean(values: Sequence[float]) -> Mean:
    """Return the mean of one run's process means. Its error includes the shift of the session."""
    return Mean(value=fmean(values), session=1.0, process=1 / len(values))


def paired_mean(values: Sequence[float]) -> Mean:
    """Return the mean of process means of two interleaved imports. The session shift cancels, IMPORT_BIAS remains."""
    return Mean(value=fmean(values), session=0.0, process=1 / len(values), fixed=IMPORT_BIAS**2)


def estimate(mean: Mean, noise: Noise) -> Estimate:
    """Return the mean with its standard error, and degrees of freedom by Satterthwaite's rule for two variances."""
    session = mean.session * noise.session.value
    process = mean.process * noise.process.value
    total = session + process + mean.fixed
    worth = session**2 / noise.session.dof + process**2 / noise.process.dof
    return Estimate(value=mean.value, se=math.sqrt(total), dof=total**2 / worth if worth else math.inf)


def spread_p(value: float, dof: float, expected: Variance) -> float:
    """Return the p-value of the F test whether a sample variance exceeds `expected`; 1 without degrees of freedom."""
    return float(_special().fdtrc(dof, expected.dof, value / expected.value)) if dof > 0 else 1.0


def inflation(runs: Iterable[tuple[Sequence[float], Variance]]) -> float:
    """Return this run's variance as a multiple of the accepted one, over the whole suite; at least 1.

    For each workload, the ratio of the variance of its first two process means to the expected variance follows an
    F distribution with (1, dof) degrees of freedom. The result is the median over the workloads of this ratio divided
    by the median of its distribution. With fewer than INFLATION_WORKLOADS workloads it is unreliable, and the result
    is 1.
    """
    special = _special()
    ratios = [
        variance(values[:2]) / expected.value / float(special.fdtri(1, expected.dof, 0.5))
        for values, expected in runs
        if len(values) > 1
    ]
    return max(1.0, median(ratios)) if len(ratios) >= INFLATION_WORKLOADS else 1.0


def inflation_of_few(blocks: Iterable[tuple[Variance, Variance]]) -> float:
    """Return the same factor as `inflation` for a run of few workloads, from their blocks; at least 1.

    blocks  (variance of a block in this run, variance when accepted) for each workload

    Blocks have many degrees of freedom, so they reveal a noisy run even with few processes. The variance of process
    means is assumed to be larger by the same factor. It is the (lower) median over the workloads, if an F test is
    significant.
    """
    known = sorted(blocks, key=lambda pair: pair[0].value / pair[1].value)
    if not known:
        return 1.0
    now, before = known[(len(known) - 1) // 2]
    return max(1.0, now.value / before.value) if spread_p(now.value, now.dof, before) < SPREAD_P else 1.0


def t_quantile(level: float, dof: float) -> float:
    """Return the `level` quantile of Student's t, or of the normal distribution if `dof` is infinite."""
    special = _special()
    return float(special.ndtri(level) if math.isinf(dof) else -special.stdtrit(dof, 1 - level))


def t_survival(t: float, dof: float) -> float:
    """Return P(T > t) for Student's t, or for the normal distribution if `dof` is infinite."""
    special = _special()
    return float(special.ndtr(-t) if math.isinf(dof) else special.stdtr(dof, -t))


def _special() -> Any:
    from scipy import special

    return special
