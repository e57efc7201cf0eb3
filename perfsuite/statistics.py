"""From block log-ratios to estimates with an honest error.

The unit is a *process mean*: the mean over one process's blocks of log(time of the other side / time of the
optimized side). Blocks share what is fixed for the life of their process, so they are never the unit. Processes
share what is fixed for their session (a machine, an hour). A process mean is therefore

    truth + session shift (variance ω²) + process shift and block noise (variance τ²)

and a mean over several has variance A·ω² + B·τ², with A and B known from how many sessions and processes there are.
Few values say little about a variance: each workload's τ² and ω² are shrunk toward the suite's own distribution
(a scaled inverse χ² prior, as limma does for genes), and carry degrees of freedom to the t quantiles.

All values are natural logarithms: 0.01 is about 1%. Nothing here imports torch; scipy is imported when first needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

Sessions: TypeAlias = Sequence[Sequence[float]]
"""Process means, by session."""

PROCESS_SD = 0.0035
"""Default sd of a process mean: the root mean square over the sds met on GPUs (process .05 to .6%, blocks .2 to .6%
of which 8 are averaged)."""
PROCESS_DOF = 4.0
"""What that default is worth: the spread of τ² over the same range is that of a χ² with 4 degrees."""
SESSION_SD = 0.002
"""Default sd of the session shift: the middle of the .1 to .3% met on GPUs."""
SESSION_DOF = 6.0
"""What that default is worth: the spread of ω² over .1 to .3% is that of a χ² with 6 to 7 degrees."""
SESSION_SD_FLOOR = 0.0005
"""No suite is taken to have smaller session shifts: a few quiet hours do not prove that all are."""
PROCESS_SD_FLOOR = 0.0001
"""Smaller spreads of process means are a timer's resolution or luck; zero has no logarithm."""
PRIOR_WORKLOADS = 5
"""With fewer workloads the suite's distribution of variances cannot be estimated: the defaults stand."""
PRIOR_DOF_MAX = 30.0
"""Workloads that look alike in noise do not prove that the next one is: no prior is worth more than this."""
IMPORT_BIAS = 0.0005
"""Sd of the bias between two imports of one revision in one process: their code and buffers land at different
addresses. A quarter of the default session shift; half of it, if unmodelled, multiplies false alarms."""
SPREAD_P = 5e-4
"""Level of the variance check: at 100 workloads it calls an unchanged suite noisy once in twenty runs or less."""
SPREAD_SUITE = 2.25
"""The suite-wide check also wants the noise to be 1.5 times what was accepted: many workloads make a test see
inflation far too small to matter."""
SUITE_WORKLOADS = 10
"""Fewer share too much of what is not known of the suite's noise: with a least of 5, 9 of 300 second looks resampled
from a quiet H200 were called noisy, all of 6 to 9 workloads. Each workload's own check stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """A variance (of log-ratios) and the degrees of freedom that it is worth."""

    value: float
    dof: float

    def updated(self, value: float, dof: float) -> Variance:
        """This one as a prior, after seeing a sample variance `value` with `dof` degrees of freedom."""
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
        """The difference of two means from different sessions."""
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
        """The bound that the truth lies above, with confidence `level`."""
        return self.value - t_quantile(level, self.dof) * self.se

    def upper(self, level: float) -> float:
        """The bound that the truth lies below, with confidence `level`."""
        return self.value + t_quantile(level, self.dof) * self.se

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Two-sided interval with confidence `level`."""
        half = (1 + level) / 2
        return self.lower(half), self.upper(half)

    def p_above(self, bound: float) -> float:
        """One-sided p: how often a truth of `bound` would give a value this high or higher."""
        return t_survival((self.value - bound) / self.se, self.dof)

    def p_below(self, bound: float) -> float:
        """One-sided p: how often a truth of `bound` would give a value this low or lower."""
        return t_survival((bound - self.value) / self.se, self.dof)

    def widened(self, factor: float) -> Estimate:
        """The same with `factor` times the standard error."""
        return Estimate(value=self.value, se=self.se * factor, dof=self.dof)


def process_mean(blocks: Sequence[float]) -> float:
    """The unit: the mean of one process's block log-ratios. ValueError if there is none, or one is not finite."""
    if not blocks or not all(math.isfinite(b) for b in blocks):
        raise ValueError("a process has no finite block log-ratio")
    return fmean(blocks)


def variance(values: Sequence[float]) -> float:
    """Sample variance of two values or more."""
    mean = fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def within(sessions: Sessions) -> tuple[float, float]:
    """Pooled variance of process means within their sessions, and its degrees of freedom (0 if none)."""
    dof = sum(len(s) - 1 for s in sessions)
    if dof <= 0:
        return 0.0, 0.0
    return sum((len(s) - 1) * variance(s) for s in sessions if len(s) > 1) / dof, float(dof)


def between(sessions: Sessions, process: float) -> tuple[float, float]:
    """Estimate of ω² (unbiased: it may be negative) given τ², and its degrees of freedom (0 if one session)."""
    if len(sessions) < 2:
        return 0.0, 0.0
    shifts = variance([fmean(s) for s in sessions])
    return shifts - process * fmean(1 / len(s) for s in sessions), float(len(sessions) - 1)


def fit_prior(suite: Iterable[Sessions]) -> Noise:
    """The suite's own distribution of noise, from each workload's process means by session.

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
    """y with trigamma(y) = x, by Newton's method on 1/trigamma, which is nearly linear."""
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
    """One workload's variances: its own, shrunk toward the suite's. Without several processes, the suite's."""
    process = prior.process.updated(*within(sessions))
    value, dof = between(sessions, process.value)
    return Noise(process=process, session=prior.session.updated(max(value, 0.0), dof))


def baseline_mean(sessions: Sessions, noise: Noise) -> Mean:
    """Mean over sessions, each weighted by what its number of processes makes it worth. ValueError if none."""
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
    """Mean of one run's process means, with the shift of its session as an error."""
    return Mean(value=fmean(values), session=1.0, process=1 / len(values))


def paired_mean(values: Sequence[float]) -> Mean:
    """Mean of process means of two imports interleaved: the session cancels, IMPORT_BIAS stays."""
    return Mean(value=fmean(values), session=0.0, process=1 / len(values), fixed=IMPORT_BIAS**2)


def estimate(mean: Mean, noise: Noise) -> Estimate:
    """The mean with its standard error; degrees of freedom by Satterthwaite's rule over the two variances."""
    session = mean.session * noise.session.value
    process = mean.process * noise.process.value
    total = session + process + mean.fixed
    worth = session**2 / noise.session.dof + process**2 / noise.process.dof
    return Estimate(value=mean.value, se=math.sqrt(total), dof=total**2 / worth if worth else math.inf)


def spread_p(values: Sequence[float], expected: Variance) -> float:
    """p of the F test that these process means spread no more than `expected`; 1 for fewer than two values.

    Where `expected` is exact (infinite degrees of freedom) it is the χ² test.
    """
    if len(values) < 2:
        return 1.0
    dof = len(values) - 1
    ratio = variance(values) / expected.value
    if math.isinf(expected.dof):
        return float(_special().chdtrc(dof, dof * ratio))
    return float(_special().fdtrc(dof, expected.dof, ratio))


def suite_spread(runs: Iterable[tuple[Sequence[float], Variance]]) -> bool:
    """Whether the whole run spreads far beyond what was accepted: what a neighbour or throttling does.

    Each workload's F test gives a χ² with as many degrees (by its p); their sum is tested at SPREAD_P, and the
    typical workload must have SPREAD_SUITE times its variance.
    """
    special = _special()
    total, dof, ratios = 0.0, 0, []
    for values, expected in runs:
        if len(values) > 1:
            p = max(spread_p(values, expected), 1e-15)
            total += float(special.chdtri(len(values) - 1, p))
            dof += len(values) - 1
            # Against the χ² median, so that a workload with the accepted noise gives 1 half of the time.
            usual = float(special.chdtri(len(values) - 1, 0.5)) / (len(values) - 1)
            ratios.append(variance(values) / expected.value / usual)
    if len(ratios) < SUITE_WORKLOADS:
        return False
    typical = sorted(ratios)[len(ratios) // 2]
    return float(special.chdtrc(dof, total)) < SPREAD_P and typical > SPREAD_SUITE


def holm(p_values: Mapping[str, float], alpha: float, family: int) -> set[str]:
    """The hypotheses rejected by Holm's step-down rule at `alpha`; `family` counts all, tested here or not."""
    rejected: set[str] = set()
    known = {key: p for key, p in p_values.items() if not math.isnan(p)}
    for rank, key in enumerate(sorted(known, key=lambda k: (known[k], k))):
        if known[key] > alpha / max(family - rank, 1):
            break
        rejected.add(key)
    return rejected


def t_quantile(level: float, dof: float) -> float:
    """The `level` quantile of Student's t; of the normal distribution where `dof` is infinite."""
    special = _special()
    return float(special.ndtri(level) if math.isinf(dof) else -special.stdtrit(dof, 1 - level))


def t_survival(t: float, dof: float) -> float:
    """P(T > t) for Student's t; for the normal distribution where `dof` is infinite."""
    special = _special()
    return float(special.ndtr(-t) if math.isinf(dof) else special.stdtr(dof, -t))


def _special() -> Any:
    from scipy import special

    return special
