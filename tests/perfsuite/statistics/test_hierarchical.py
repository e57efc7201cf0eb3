"""Estimates have the coverage that they claim; priors fit the values that they were drawn from."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import scipy  # its parts are imported where they are used

from perfsuite.statistics import hierarchical as module
from perfsuite.statistics.hierarchical import (
    DEFAULT_NOISE,
    IMPORT_BIAS,
    PRIOR_DOF_MAX,
    SESSION_SD,
    SESSION_SD_FLOOR,
    Estimate,
    Mean,
    Noise,
    Variance,
    baseline_mean,
    between,
    estimate,
    fit_prior,
    inflation,
    inflation_of_few,
    noise_of,
    paired_mean,
    run_mean,
    spread_p,
    t_quantile,
    t_survival,
    within,
)


def draw(rng: np.random.Generator, process: float, session: float, sessions: int, count: int) -> list[list[float]]:
    return [(rng.normal(0, session) + rng.normal(0, process, count)).tolist() for _ in range(sessions)]


@pytest.mark.parametrize("dof", [2.0, 7.3, 40.0, math.inf])
@pytest.mark.parametrize("level", [0.5, 0.95, 1 - 5e-5])
def test_quantiles_are_those_of_student_s_t_distribution(dof: float, level: float) -> None:
    expected = scipy.stats.norm.ppf(level) if math.isinf(dof) else scipy.stats.t.ppf(level, dof)
    assert t_quantile(level, dof) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert t_survival(t_quantile(level, dof), dof) == pytest.approx(1 - level, rel=1e-6)


def test_variance_within_and_between_sessions() -> None:
    sessions = [[1.0, 3.0], [5.0, 7.0], [4.0]]
    assert within(sessions) == (2.0, 2.0)
    value, dof = between(sessions, 2.0)
    assert dof == 2.0
    assert value == pytest.approx(np.var([2, 6, 4], ddof=1) - 2.0 * (1 / 2 + 1 / 2 + 1) / 3)
    assert within([[1.0]]) == (0.0, 0.0)
    assert between([[1.0, 2.0]], 1.0) == (0.0, 0.0)


def test_prior_recovers_the_distribution_it_was_drawn_from() -> None:
    rng = np.random.default_rng(7)
    dof, value = 6.0, 0.003**2
    suite = []
    for _ in range(600):
        sd = math.sqrt(dof * value / rng.chisquare(dof))
        suite.append(draw(rng, sd, 0.001, 3, 3))
    prior = fit_prior(suite)
    assert prior.process.value == pytest.approx(value, rel=0.1)
    assert prior.process.dof == pytest.approx(dof, rel=0.3)
    assert math.sqrt(prior.session.value) == pytest.approx(0.001, rel=0.2)


def test_equal_noise_gives_a_strong_prior_and_a_mixed_suite_a_weak_one() -> None:
    rng = np.random.default_rng(8)
    equal = fit_prior(draw(rng, 0.003, 0, 1, 5) for _ in range(200))
    mixed = fit_prior(draw(rng, 0.0005 * 12 ** rng.random(), 0, 1, 5) for _ in range(200))
    assert mixed.process.dof < 6 < equal.process.dof <= PRIOR_DOF_MAX


def test_few_workloads_fall_back_on_the_default() -> None:
    rng = np.random.default_rng(9)
    suite = [draw(rng, 0.05, 0, 1, 5) for _ in range(4)]
    assert fit_prior(suite).process == DEFAULT_NOISE.process
    assert fit_prior([]) == DEFAULT_NOISE
    # One process each: nothing to estimate a variance from, however many workloads there are.
    assert fit_prior([[[0.1]]] * 50).process == DEFAULT_NOISE.process
    # Five workloads without variance neither fail nor give a variance of zero.
    exact = fit_prior([[[0.1, 0.1, 0.1]]] * 5)
    assert exact.process.value > 0
    assert exact.process.dof <= PRIOR_DOF_MAX


def test_session_variance_is_shrunk_and_never_below_its_floor() -> None:
    quiet = fit_prior([[[0.0, 0.002], [0.0, 0.002], [0.0, 0.002]]] * 200)
    assert quiet.session.value == SESSION_SD_FLOOR**2
    loud = noise_of([[0.0] * 3, [0.05] * 3], DEFAULT_NOISE)
    assert SESSION_SD**2 < loud.session.value < 0.05**2 / 2
    assert loud.session.dof == DEFAULT_NOISE.session.dof + 1
    assert noise_of([[0.0] * 3], DEFAULT_NOISE).session == DEFAULT_NOISE.session


def test_a_single_process_takes_the_suite_s_noise() -> None:
    assert noise_of([[0.1]], DEFAULT_NOISE) == DEFAULT_NOISE
    error = estimate(baseline_mean([[0.1]], DEFAULT_NOISE), DEFAULT_NOISE)
    assert error.se == pytest.approx(math.hypot(0.0035, 0.002))
    with pytest.raises(ValueError, match="no process"):
        baseline_mean([], DEFAULT_NOISE)


def test_sessions_are_weighted_by_their_inverse_variance() -> None:
    noise = Noise(process=Variance(value=4.0, dof=10), session=Variance(value=1.0, dof=10))
    mean = baseline_mean([[0.0], [1.0] * 4], noise)  # variances 5 and 2
    assert mean.value == pytest.approx(5 / 7)
    error = estimate(mean, noise)
    assert error.se**2 == pytest.approx(1 / (1 / 5 + 1 / 2))
    # A constant baseline has the same mean whatever the weights.
    assert baseline_mean([[2.0], [2.0] * 7], noise).value == pytest.approx(2.0)


def test_degrees_of_freedom_follow_satterthwaite() -> None:
    noise = Noise(process=Variance(value=1.0, dof=4), session=Variance(value=1.0, dof=12))
    assert estimate(Mean(value=0.0, session=1.0, process=0.0), noise).dof == pytest.approx(12)
    both = estimate(run_mean([0.0]), noise)
    assert 4 < both.dof <= 16
    assert both.dof == pytest.approx(4 / (1 / 4 + 1 / 12))
    quiet = Noise(process=Variance(value=0.0, dof=4), session=Variance(value=0.0, dof=4))
    paired = estimate(paired_mean([0.0, 0.0]), quiet)
    assert paired.se == pytest.approx(IMPORT_BIAS)
    assert math.isinf(paired.dof)


def test_intervals_have_the_claimed_coverage() -> None:
    """95% intervals of differences between run and baseline, with unknown, shrunk noise, hold 0 in 95% of trials."""
    rng = np.random.default_rng(10)
    inside = total = 0
    for _ in range(20):
        sds = [(0.001 * 4 ** rng.random(), rng.uniform(0.001, 0.003)) for _ in range(60)]
        suite = [draw(rng, p, s, 3, 3) for p, s in sds]
        prior = fit_prior(suite)
        for sessions, (p, s) in zip(suite, sds, strict=True):
            noise = noise_of(sessions, prior)
            (now,) = draw(rng, p, s, 1, 3)
            low, high = estimate(baseline_mean(sessions, noise).minus(run_mean(now)), noise).interval()
            inside += low <= 0 <= high
            total += 1
    assert inside / total == pytest.approx(0.95, abs=0.02)


def test_bounds_and_p_values_agree() -> None:
    error = Estimate(value=0.02, se=0.004, dof=9.0)
    assert error.p_above(error.lower(0.99)) == pytest.approx(0.01)
    assert error.p_below(error.upper(0.98)) == pytest.approx(0.02)
    assert error.p_above(0.0) + error.p_below(0.0) == pytest.approx(1.0)
    assert error.interval(0.9) == pytest.approx((error.lower(0.95), error.upper(0.95)))


def test_spread_p_is_the_p_value_of_an_f_test() -> None:
    expected = Variance(value=1e-4, dof=8)
    for dof in (1, 2, 7.5):
        for ratio in (0.3, 1.0, 9.0):
            assert spread_p(ratio * 1e-4, dof, expected) == pytest.approx(scipy.stats.f.sf(ratio, dof, 8))
    assert spread_p(1.0, 0.0, expected) == 1.0


def test_importing_the_gate_imports_no_large_library() -> None:
    large = "('torch', 'scipy', 'numpy', 'pytest')"
    code = f"import sys, perfsuite.gate.decision; print([m for m in {large} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# --- exact values ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones() -> None:
    assert (module.PROCESS_SD, module.PROCESS_DOF, module.PROCESS_SD_FLOOR) == (0.0035, 4.0, 0.0001)
    assert (SESSION_SD, module.SESSION_DOF, SESSION_SD_FLOOR, IMPORT_BIAS) == (0.002, 6.0, 0.0005, 0.0005)
    assert (module.PRIOR_WORKLOADS, PRIOR_DOF_MAX) == (5, 30.0)
    assert (module.SPREAD_P, module.INFLATION_WORKLOADS) == (1e-3, 8)
    assert DEFAULT_NOISE.process == Variance(value=0.0035**2, dof=4.0)
    assert DEFAULT_NOISE.session == Variance(value=0.002**2, dof=6.0)


@pytest.mark.parametrize("record", [Variance, Noise, Mean, Estimate])
def test_records_are_frozen_named_and_slotted(record: type) -> None:
    made = record(**{f.name: 1.0 for f in dataclasses.fields(record)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(record)[0].name, 2.0)
    assert all(f.kw_only for f in dataclasses.fields(record))
    assert not hasattr(made, "__dict__")


def test_a_variance_is_updated_by_its_degrees_of_freedom() -> None:
    known = Variance(value=2.0, dof=4.0)
    assert known.updated(7.0, 1.0) == Variance(value=3.0, dof=5.0)
    assert known.updated(0.0, 4.0) == Variance(value=1.0, dof=8.0)
    # Without degrees of freedom the value is ignored.
    assert known.updated(math.nan, 0.0) == known


def test_means_and_their_difference() -> None:
    run = run_mean([1.0, 2.0, 6.0])
    assert run == Mean(value=3.0, session=1.0, process=1 / 3, fixed=0.0)
    paired = paired_mean([1.0, 3.0])
    assert paired == Mean(value=2.0, session=0.0, process=1 / 2, fixed=IMPORT_BIAS**2)
    both = Mean(value=7.0, session=0.5, process=0.25, fixed=0.125).minus(
        Mean(value=3.0, session=0.25, process=0.5, fixed=1.0)
    )
    assert both == Mean(value=4.0, session=0.75, process=0.75, fixed=1.125)
    with pytest.raises(ValueError, match="no process"):
        baseline_mean([[], []], DEFAULT_NOISE)
    # A session without processes has no weight.
    assert baseline_mean([[], [1.0, 3.0]], DEFAULT_NOISE) == Mean(value=2.0, session=1.0, process=0.5)


def test_an_estimate_adds_all_three_variances() -> None:
    noise = Noise(process=Variance(value=8.0, dof=5.0), session=Variance(value=3.0, dof=7.0))
    found = estimate(Mean(value=-1.0, session=0.5, process=0.25, fixed=0.75), noise)
    assert (found.value, found.se) == (-1.0, pytest.approx(math.sqrt(1.5 + 2.0 + 0.75)))
    assert found.dof == pytest.approx((1.5 + 2.0 + 0.75) ** 2 / (1.5**2 / 7.0 + 2.0**2 / 5.0))
    assert found.interval() == (found.lower(0.975), found.upper(0.975))
    assert found.lower(0.975) == pytest.approx(-1.0 - scipy.stats.t.ppf(0.975, found.dof) * found.se)
    assert found.upper(0.9) == pytest.approx(-1.0 + scipy.stats.t.ppf(0.9, found.dof) * found.se)


def test_noise_of_a_workload_is_pooled_with_the_prior() -> None:
    prior = Noise(process=Variance(value=3.0, dof=4.0), session=Variance(value=5.0, dof=6.0))
    # Within: (2 + 8 + 0) / 4; between: means 2, 12, 4 have the variance 28, of which the processes explain a part.
    found = noise_of([[1.0, 3.0], [10.0, 12.0, 14.0], [4.0, 4.0]], prior)
    process = (4 * 3.0 + (2 + 8 + 0)) / 8
    assert found.process == Variance(value=pytest.approx(process), dof=8.0)
    own = 28.0 - process * (1 / 2 + 1 / 3 + 1 / 2) / 3
    assert found.session == Variance(value=pytest.approx((6 * 5.0 + 2 * own) / 8), dof=8.0)
    # Sessions that differ less than their processes suggest: the shift is 0, not negative.
    agreeing = noise_of([[0.0, 8.0], [0.0, 8.0]], prior)
    assert agreeing.session == Variance(value=pytest.approx(6 * 5.0 / 7), dof=7.0)


def fitted(suite: list[list[list[float]]]) -> Noise:
    """Fit Smyth's moments and the pooled session shift independently; bisection solves for the degrees of freedom."""
    pairs = [(stats_within(s), sum(len(p) - 1 for p in s)) for s in suite]
    known = [(max(v, 1e-8), d) for v, d in pairs if d > 0]
    process = Variance(value=0.0035**2, dof=4.0)
    if len(known) >= 5:
        logs = np.array([math.log(v) - scipy.special.digamma(d / 2) + math.log(d / 2) for v, d in known])
        excess = np.var(logs, ddof=1) - np.mean([scipy.special.polygamma(1, d / 2) for _, d in known])
        dof = 30.0
        if excess > 0:
            half = scipy.optimize.brentq(
                lambda y: scipy.special.polygamma(1, y) - excess, 1e-4, 1e8, xtol=1e-12, rtol=1e-14
            )
            dof = min(30.0, 2 * half)
        value = math.exp(np.mean(logs) + scipy.special.digamma(dof / 2) - math.log(dof / 2))
        process = Variance(value=max(value, 1e-8), dof=dof)
    shifts = [(0.002**2, 6.0)]
    for sessions, (v, d) in zip(suite, pairs, strict=True):
        own = (process.dof * process.value + d * v) / (process.dof + d)
        if len(sessions) > 1:
            means = np.var([np.mean(s) for s in sessions], ddof=1)
            shifts.append((means - own * np.mean([1 / len(s) for s in sessions]), len(sessions) - 1.0))
    pooled = sum(v * d for v, d in shifts) / sum(d for _, d in shifts)
    return Noise(process=process, session=Variance(value=max(pooled, 0.0005**2), dof=6.0))


def stats_within(sessions: list[list[float]]) -> float:
    dof = sum(len(s) - 1 for s in sessions)
    return sum(float(np.sum((np.array(s) - np.mean(s)) ** 2)) for s in sessions) / dof if dof else 0.0


@pytest.mark.parametrize("workloads", [4, 5, 12])
@pytest.mark.parametrize("spread", [1.0, 3.0, 30.0])
def test_the_prior_equals_an_independent_fit_of_smyth_s_moments(workloads: int, spread: float) -> None:
    rng = np.random.default_rng(workloads)
    for _ in range(10):
        suite = []
        for _ in range(workloads):
            sd = 0.001 * spread ** rng.random()
            sizes = rng.integers(1, 5, rng.integers(1, 4))
            suite.append([(rng.normal(0, 0.003) + rng.normal(0, sd, n)).tolist() for n in sizes])
        found, expected = fit_prior([*suite, []]), fitted(suite)
        for part in ("process", "session"):
            assert getattr(found, part).value == pytest.approx(getattr(expected, part).value, rel=1e-9)
            assert getattr(found, part).dof == pytest.approx(getattr(expected, part).dof, rel=1e-8)


def test_workloads_without_variance_give_the_strongest_prior() -> None:
    suite = [[[0.1, 0.1, 0.1]]] * 5
    exact = fit_prior(suite).process
    assert exact.dof == PRIOR_DOF_MAX
    assert exact.value == pytest.approx(fitted(suite).process.value)


def test_one_noisy_workload_among_silent_ones_does_not_lower_the_floor() -> None:
    # The few degrees of freedom of such a mixture pull its value below the smallest variance.
    silent, loud = [[0.1] * 41], [[-0.1, 0.1] * 20]
    assert fit_prior([*[silent] * 9, loud]).process.value == module.PROCESS_SD_FLOOR**2


@pytest.mark.parametrize("x", [1e-9, 1e-6, 1e-3, 0.1, 0.9, 1.0, 1.7, 10.0, 300.0, 1e5, 1e7, 1e9])
def test_trigamma_is_inverted(x: float) -> None:
    rel = 1e-9 if 1e-6 < x < 1e7 else 1e-6  # elsewhere only the leading term is used
    assert scipy.special.polygamma(1, module._trigamma_inverse(x)) == pytest.approx(x, rel=rel)


# --- noise of a whole run --------------------------------------------------------------------------------------------


def run_of(
    rng: np.random.Generator, scale: float, workloads: int, dof: float = 12.0
) -> list[tuple[list[float], Variance]]:
    """Return the first processes of these workloads, with `scale` times the accepted standard deviation."""
    made = []
    for _ in range(workloads):
        true = 1e-6 * dof / rng.chisquare(dof)
        made.append((rng.normal(0, scale * math.sqrt(true), 3).tolist(), Variance(value=1e-6, dof=dof)))
    return made


@pytest.mark.parametrize(("scale", "dof"), [(2.0, 12.0), (2.0, 4.0), (5.0, 12.0)])
def test_inflation_is_the_ratio_of_the_run_s_variance_to_the_accepted_one(scale: float, dof: float) -> None:
    rng = np.random.default_rng(11)
    assert inflation(run_of(rng, scale, 20000, dof)) == pytest.approx(scale**2, rel=0.06)


def test_inflation_is_about_1_for_equal_noise_and_1_for_less_noise() -> None:
    rng = np.random.default_rng(12)
    assert inflation(run_of(rng, 1.0, 20000)) < 1.06
    assert inflation(run_of(rng, 0.5, 100)) == 1.0


def test_one_workload_that_varies_does_not_inflate_the_others() -> None:
    quiet = [([0.0, 0.001], Variance(value=1e-6, dof=12.0))] * 10
    assert inflation([*quiet, ([0.0, 9.0], Variance(value=1e-6, dof=12.0))]) == inflation(quiet)


def of_ratio(ratio: float, dof: float = 8.0) -> tuple[list[float], Variance]:
    """Return two values whose variance is exactly `ratio` times the expected one."""
    return [0.0, math.sqrt(2 * ratio * 3.0)], Variance(value=3.0, dof=dof)


def test_inflation_is_the_median_ratio_over_the_median_of_the_f_distribution() -> None:
    runs = [of_ratio(r, dof) for r, dof in [(1, 4), (2, 8), (3, 8), (4, 8), (50, 8), (60, 4), (70, 8), (80, 2)]]
    scaled = sorted(
        np.var(values, ddof=1) / expected.value / scipy.stats.f.median(1, expected.dof) for values, expected in runs
    )
    assert inflation(runs) == pytest.approx((scaled[3] + scaled[4]) / 2)


def test_inflation_needs_eight_workloads_with_two_processes() -> None:
    loud = of_ratio(40.0)
    single = ([1.0], Variance(value=1.0, dof=8.0))
    assert inflation([loud] * 8) == pytest.approx(40.0 / scipy.stats.f.median(1, 8))
    assert inflation([loud] * 7) == 1.0
    assert inflation([*[loud] * 7, single]) == 1.0
    assert inflation([]) == 1.0


def test_inflation_uses_only_the_first_two_processes() -> None:
    """Further processes belong to workloads that were still undecided: their variance is a biased sample."""
    values, expected = of_ratio(40.0)
    assert inflation([([*values, 1e3], expected)] * 8) == inflation([(values, expected)] * 8)


def test_blocks_of_few_workloads_show_a_noisy_run() -> None:
    before = Variance(value=1e-6, dof=35.0)

    def blocks(*ratios: float, dof: float = 14.0) -> float:
        return inflation_of_few((Variance(value=r * before.value, dof=dof), before) for r in ratios)

    limit = scipy.stats.f.isf(1e-3, 14, 35)
    assert blocks(1.001 * limit) == pytest.approx(1.001 * limit)
    assert blocks(0.999 * limit) == 1.0
    assert blocks(0.1) == blocks() == 1.0
    assert blocks(100.0, 400.0, 900.0) == 400.0
    assert blocks(100.0, 400.0) == 100.0
    assert blocks(1.0, 900.0) == 1.0  # one of two is noisy by itself
    assert blocks(100.0, dof=1.0) > 1.0
    assert blocks(5.0, dof=1.0) == 1.0
