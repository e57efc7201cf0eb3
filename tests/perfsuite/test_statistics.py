"""Estimates have the coverage they claim; priors fit what they were drawn from."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from perfsuite.statistics import (
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
    holm,
    noise_of,
    paired_mean,
    process_mean,
    run_mean,
    spread_p,
    suite_spread,
    t_quantile,
    t_survival,
    within,
)


def draw(rng: np.random.Generator, process: float, session: float, sessions: int, count: int) -> list[list[float]]:
    return [(rng.normal(0, session) + rng.normal(0, process, count)).tolist() for _ in range(sessions)]


@pytest.mark.parametrize("dof", [2.0, 7.3, 40.0, math.inf])
@pytest.mark.parametrize("level", [0.5, 0.95, 1 - 5e-5])
def test_quantiles_are_student_s(dof: float, level: float) -> None:
    expected = stats.norm.ppf(level) if math.isinf(dof) else stats.t.ppf(level, dof)
    assert t_quantile(level, dof) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert t_survival(t_quantile(level, dof), dof) == pytest.approx(1 - level, rel=1e-6)


def test_process_mean_refuses_what_has_no_mean() -> None:
    assert process_mean([0.01, 0.03]) == pytest.approx(0.02)
    for blocks in ([], [math.nan], [0.1, math.inf]):
        with pytest.raises(ValueError, match="finite"):
            process_mean(blocks)


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
    # Five that agree to the last digit neither fail nor claim perfection.
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


def test_unequal_sessions_are_weighted_by_their_worth() -> None:
    noise = Noise(process=Variance(value=4.0, dof=10), session=Variance(value=1.0, dof=10))
    mean = baseline_mean([[0.0], [1.0] * 4], noise)  # variances 5 and 2
    assert mean.value == pytest.approx(5 / 7)
    error = estimate(mean, noise)
    assert error.se**2 == pytest.approx(1 / (1 / 5 + 1 / 2))
    # A constant baseline has the same mean whatever the weights.
    assert baseline_mean([[2.0], [2.0] * 7], noise).value == pytest.approx(2.0)


def test_satterthwaite_lies_between_the_parts() -> None:
    noise = Noise(process=Variance(value=1.0, dof=4), session=Variance(value=1.0, dof=12))
    assert estimate(Mean(value=0.0, session=1.0, process=0.0), noise).dof == pytest.approx(12)
    both = estimate(run_mean([0.0]), noise)
    assert 4 < both.dof <= 16
    assert both.dof == pytest.approx(4 / (1 / 4 + 1 / 12))
    quiet = Noise(process=Variance(value=0.0, dof=4), session=Variance(value=0.0, dof=4))
    paired = estimate(paired_mean([0.0, 0.0]), quiet)
    assert paired.se == pytest.approx(IMPORT_BIAS)
    assert math.isinf(paired.dof)


def test_intervals_cover_what_they_claim() -> None:
    """Differences of a run and a baseline, noise unknown and shrunk: 95% intervals hold 0 in 95% of trials."""
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


def test_bounds_and_p_agree() -> None:
    error = Estimate(value=0.02, se=0.004, dof=9.0)
    assert error.p_above(error.lower(0.99)) == pytest.approx(0.01)
    assert error.p_below(error.upper(0.98)) == pytest.approx(0.02)
    assert error.p_above(0.0) + error.p_below(0.0) == pytest.approx(1.0)
    assert error.interval(0.9) == pytest.approx((error.lower(0.95), error.upper(0.95)))


def test_spread_is_an_f_test_and_a_chi_square_one_where_the_variance_is_known() -> None:
    values = [0.0, 0.01, 0.03]
    variance = np.var(values, ddof=1)
    assert spread_p(values, Variance(value=1e-4, dof=8)) == pytest.approx(stats.f.sf(variance / 1e-4, 2, 8))
    assert spread_p(values, Variance(value=1e-4, dof=math.inf)) == pytest.approx(stats.chi2.sf(2 * variance / 1e-4, 2))
    assert spread_p([0.5], Variance(value=1e-4, dof=8)) == 1.0


def test_suite_spread_sees_a_neighbour_and_not_an_outlier() -> None:
    rng = np.random.default_rng(11)
    expected = Variance(value=1e-6, dof=12.0)

    def runs(scale: float, workloads: int = 40) -> list[tuple[list[float], Variance]]:
        return [(rng.normal(0, 1e-3 * scale, 3).tolist(), expected) for _ in range(workloads)]

    assert not any(suite_spread(runs(1.0)) for _ in range(50))
    assert all(suite_spread(runs(3.0)) for _ in range(50))
    # A tenth more noise is visible in many workloads, and does not matter.
    assert not any(suite_spread(runs(1.1, 2000)) for _ in range(3))
    assert not suite_spread([*runs(1.0), ([0.0, 1.0, 2.0], expected)])
    assert not suite_spread(runs(9.0, 4))
    assert not suite_spread([])


def test_holm_steps_down_within_a_fixed_family() -> None:
    p = {"a": 0.0001, "b": 0.0013, "c": 0.004, "d": 0.0045}
    assert holm(p, 0.005, 4) == {"a", "b"}  # .005/4, /3, then .004 > /2
    assert holm(p, 0.005, 100) == set()
    assert holm({**p, "a": 0.00004}, 0.005, 100) == {"a"}
    assert holm({}, 0.005, 1) == set()
    assert holm({"a": math.nan, "b": 0.001}, 0.005, 2) == {"b"}


def test_importing_the_gate_is_light() -> None:
    code = "import sys, perfsuite.gate; print([m for m in ('torch', 'scipy', 'numpy', 'pytest') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
