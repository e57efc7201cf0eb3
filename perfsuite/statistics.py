"""Estimates from block log-ratios, with hierarchical variances.

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
"""Default standard deviation of a process mean: the root mean square of those measured on GPUs (process .05 to .6%,
blocks .2 to .6%, 8 blocks averaged)."""
PROCESS_DOF = 4.0
"""Degrees of freedom of that default: measured τ² vary between workloads about as a χ² with 4 degrees does."""
SESSION_SD = 0.002
"""Default standard deviation of the session shift: the middle of the .1 to .3% measured on GPUs."""
SESSION_DOF = 6.0
"""Degrees of freedom of that default: .1 to .3% is the range of a χ² with 6 to 7 degrees."""
SESSION_SD_FLOOR = 0.0005
"""Lower bound for the session shift: a few quiet hours do not prove that all hours are quiet."""
PROCESS_SD_FLOOR = 0.0001
"""Lower bound for sample deviations in the prior's fit: a zero has no logarithm."""
PRIOR_WORKLOADS = 5
"""With fewer workloads the suite's distribution of variances cannot be estimated, and the defaults are used."""
PRIOR_DOF_MAX = 30.0
"""Upper bound for the prior's degrees of freedom: similar workloads do not prove that the next one is similar."""
IMPORT_BIAS = 0.0005
"""Standard deviation of the bias between two imports of one revision in one process: their code and buffers lie at
different addresses. Measured on an H200 in the calibration."""
SPREAD_P = 1e-3
"""Level of the F test that finds a workload noisier than when it was accepted."""
INFLATION_WORKLOADS = 8
"""Below this number of workloads the median of variance ratios is unreliable: each has one degree of freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """A variance (of log-ratios) and its degrees of freedom."""

    value: float
    dof: float

    def updated(self, value: float, dof: float) -> Variance:
        """Update this variance, as a prior, with a sample variance `value` that has `dof` degrees of freedom."""
        if dof <= 0:
            return self
        total = self.dof + dof
        return Variance(value=(self.dof * self.value + dof * value) / total, dof=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Variances of one workload, or of a suite (then a prior): of a process mean τ², and of a session shift ω²."""

    process: Variance
    session: Variance


DEFAULT_NOISE = Noise(
    process=Variance(value=PROCESS_SD**2, dof=PROCESS_DOF),
    session=Variance(value=SESSION_SD**2, dof=SESSION_DOF),
)
"""The prior where the suite cannot supply one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean of process means; its variance is `session`·ω² + `process`·τ² + `fixed`."""

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
    """A value, its standard error and degrees of freedom."""

    value: float
    se: float
    dof: float

    def lower(self, level: float) -> float:
        """Return the bound above which the truth lies with confidence `level`."""
        return self.value - t_quantile(level, self.dof) * self.se

    def upper(self, level: float) -> float:
        """Return the bound below which the truth lies with confidence `level`."""
        return self.value + t_quantile(level, self.dof) * self.se

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval with confidence `level`."""
        half = (1 + level) / 2
        return self.lower(half), self.upper(half)

    def p_above(self, bound: float) -> float:
        """Return the one-sided p: how often a truth of `bound` would give a value this high or higher."""
        return t_survival((self.value - bound) / self.se, self.dof)

    def p_below(self, bound: float) -> float:
        """Return the one-sided p: how often a truth of `bound` would give a value this low or lower."""
        return t_survival((bound - self.value) / self.se, self.dof)


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of two values or more."""
    mean = fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def within(sessions: Sessions) -> tuple[float, float]:
    """Return the pooled variance of process means within their sessions, and its degrees of freedom (0 if none)."""
    dof = sum(len(s) - 1 for s in sessions)
    if dof <= 0:
        return 0.0, 0.0
    return sum((len(s) - 1) * variance(s) for s in sessions if len(s) > 1) / dof, float(dof)


def between(sessions: Sessions, process: float) -> tuple[float, float]:
    """Return an estimate of ω² (unbiased: it may be negative) given τ², and its degrees of freedom (0 if one
    session)."""
    if len(sessions) < 2:
        return 0.0, 0.0
    shifts = variance([fmean(s) for s in sessions])
    return shifts - process * fmean(1 / len(s) for s in sessions), float(len(sessions) - 1)


def fit_prior(suite: Iterable[Sessions]) -> Noise:
    """Return the suite's own distribution of noise, from each workload's process means by session.

    τ²: scaled inverse χ², by the moments of the log variances (Smyth 2004), where at least PRIOR_WORKLOADS have a
    sample variance; otherwise the default. ω²: pooled over the workloads with several sessions, and with the default
    as SESSION_DOF further degrees.
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
    """Return one workload's variances: its own, shrunk toward the suite's. Without several processes, return the
    suite's."""
    process = prior.process.updated(*within(sessions))
    value, dof = between(sessions, process.value)
    return Noise(process=process, session=prior.session.updated(max(value, 0.0), dof))


def baseline_mean(sessions: Sessions, noise: Noise) -> Mean:
    """Return the mean over sessions, each weighted by what its number of processes makes it worth. Raises ValueError if
    there is none."""
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
    """Return the mean of one run's process means, with the shift of its session as an error."""
    return Mean(value=fmean(values), session=1.0, process=1 / len(values))


def paired_mean(values: Sequence[float]) -> Mean:
    """Return the mean of process means of two imports interleaved: the session cancels, IMPORT_BIAS stays."""
    return Mean(value=fmean(values), session=0.0, process=1 / len(values), fixed=IMPORT_BIAS**2)


def estimate(mean: Mean, noise: Noise) -> Estimate:
    """Return the mean with its standard error; degrees of freedom by Satterthwaite's rule over the two variances."""
    session = mean.session * noise.session.value
    process = mean.process * noise.process.value
    total = session + process + mean.fixed
    worth = session**2 / noise.session.dof + process**2 / noise.process.dof
    return Estimate(value=mean.value, se=math.sqrt(total), dof=total**2 / worth if worth else math.inf)


def spread_p(value: float, dof: float, expected: Variance) -> float:
    """Return the p-value of the F test that a sample variance exceeds `expected` by chance; 1 without degrees of
    freedom."""
    return float(_special().fdtrc(dof, expected.dof, value / expected.value)) if dof > 0 else 1.0


def inflation(runs: Iterable[tuple[Sequence[float], Variance]]) -> float:
    """Return this run's variance as a multiple of the accepted one, over the whole suite; at least 1.

    Each workload gives the variance of its first two process means over the expected one, which follows an
    F distribution with (1, dof) degrees of freedom. The median of these ratios over the median of that distribution
    is the factor. Below INFLATION_WORKLOADS workloads it is unreliable and 1 is returned.
    """
    special = _special()
    ratios = [
        variance(values[:2]) / expected.value / float(special.fdtri(1, expected.dof, 0.5))
        for values, expected in runs
        if len(values) > 1
    ]
    return max(1.0, median(ratios)) if len(ratios) >= INFLATION_WORKLOADS else 1.0


def inflation_of_few(blocks: Iterable[tuple[Variance, Variance]]) -> float:
    """Return the same factor for a run of few workloads, from their blocks; at least 1.

    blocks  of each workload (variance of a block in this run, the same when it was accepted)

    Blocks have many degrees of freedom, so that they show a noisy run where few processes do not. The processes are
    taken to vary more by the same factor. It is the (lower) median over the workloads, if an F test finds it.
    """
    known = sorted(blocks, key=lambda pair: pair[0].value / pair[1].value)
    if not known:
        return 1.0
    now, before = known[(len(known) - 1) // 2]
    return max(1.0, now.value / before.value) if spread_p(now.value, now.dof, before) < SPREAD_P else 1.0


def t_quantile(level: float, dof: float) -> float:
    """Return the `level` quantile of Student's t; of the normal distribution where `dof` is infinite."""
    special = _special()
    return float(special.ndtri(level) if math.isinf(dof) else -special.stdtrit(dof, 1 - level))


def t_survival(t: float, dof: float) -> float:
    """Return P(T > t) for Student's t; for the normal distribution where `dof` is infinite."""
    special = _special()
    return float(special.ndtr(-t) if math.isinf(dof) else special.stdtr(dof, -t))


def _special() -> Any:
    from scipy import special

    return special
