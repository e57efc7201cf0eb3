"""The gate's rule: the conditions of each verdict, with exact bounds. Its error rates are in test_gate_rates.py."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy  # its parts are imported where they are used
from builders import counting, entry, few, measurement, side, workload_id

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.baseline.priors import SuiteNoise, suite_noise
from perfsuite.gate import decision, estimates, planning, soundness, stages
from perfsuite.gate.decision import STAGES, Undecided, analyse, promises_only
from perfsuite.gate.estimates import NO_SHIFT, Speedup, Subject, margin_of
from perfsuite.records import Measurement, PromiseRecord, SideRecord, Status, Verdict
from perfsuite.statistics.hierarchical import DEFAULT_NOISE, IMPORT_BIAS, Estimate, Noise, Variance, fit_prior, noise_of

ID = workload_id(0)
TRUTH = math.log(20.0)
OFFSETS = (0.0, -0.001, 0.001)
"""Process shifts of a workload with medium noise."""
NOISE = Noise(process=Variance(value=0.001**2, dof=20.0), session=Variance(value=0.001**2, dof=20.0))
SUITE = SuiteNoise(ratio=NOISE, paired=NOISE)
REVISION = "the accepted revision 1a2b3c4"
SELECTED = 40
FINE = 10**6
"""Steps of the margin per unit, fine enough to show a difference of one degree of freedom."""


def process(slower: float = 0.0, *, ratio: float = TRUTH, **fields: Any) -> Measurement:
    """Return a process: the optimized side is slower than the accepted one by `slower`; `ratio` is its log-speedup."""
    return measurement(accepted=-slower, ratio=ratio, **fields)


def alone(m: Measurement) -> Measurement:
    """Return the same process without the reference."""
    return replace(
        m,
        log_ratios={k: v for k, v in m.log_ratios.items() if k != "reference"},
        sides={k: v for k, v in m.sides.items() if k != "reference"},
    )


def runs(slower: float = 0.0, count: int = 4, *, scale: float = 1.0, **fields: Any) -> tuple[Measurement, ...]:
    """Return processes that differ by OFFSETS times `scale`, also in the ratio to the reference."""
    return tuple(
        process(slower + scale * o, ratio=TRUTH - slower - scale * o, **fields)
        for o in (OFFSETS[i % 3] for i in range(count))
    )


def accepted(scale: float = 1.0, sessions: int = 1, **fields: Any) -> Entry:
    return entry([runs(count=5, scale=scale, **fields) for _ in range(sessions)])


ENTRY = accepted()


def subject(run: Sequence[Measurement], **fields: Any) -> Subject:
    return Subject(**{"id": ID, "runs": tuple(run), "entry": ENTRY, "against": REVISION, **fields})


def judge(
    run: Sequence[Measurement], *, suite: SuiteNoise = SUITE, selected: int = SELECTED, **fields: Any
) -> Verdict | Undecided:
    answers = analyse([subject(run, **fields)], suite, selected=selected)
    assert list(answers) == [ID]
    return answers[ID]


def verdict(answer: Verdict | Undecided | None, status: Status) -> Verdict:
    assert isinstance(answer, Verdict), answer
    assert answer.status is status, answer.message
    assert answer.message.startswith(f"{status} {answer.id}: ")
    assert answer.message == " ".join(answer.message.split())
    return answer


def opened(answer: Verdict | Undecided, processes: int = 1, *, reference: bool = False) -> str:
    assert isinstance(answer, Undecided), answer
    assert (answer.processes, answer.reference) == (processes, reference)
    assert answer.reason
    return answer.reason


def pooled(sessions: Sequence[Sequence[float]], prior: Variance) -> Variance:
    """Return the variance of a process mean, estimated from the prior and these sessions."""
    dof = prior.dof + sum(len(s) - 1 for s in sessions)
    squares = sum(float(np.sum((np.array(s) - np.mean(s)) ** 2)) for s in sessions)
    return Variance(value=(prior.dof * prior.value + squares) / dof, dof=dof)


def paired_error(known: Variance, count: int) -> tuple[float, float]:
    """Return (standard error, degrees of freedom) of a mean over this number of processes."""
    part = known.value / count
    total = part + IMPORT_BIAS**2
    return math.sqrt(total), total**2 / (part**2 / known.dof)


def resolvable(se: float, dof: float, selected: int = SELECTED, steps: int = 1000, least: float = 0.01) -> float:
    """Return the margin of an estimate with this error, by scipy's distributions."""
    needed = scipy.stats.t.isf(0.01 / 4 / selected, dof) + scipy.stats.t.ppf(0.95, dof)
    return max(least, math.ceil(steps * math.expm1(needed * se) - 1e-6) / steps)


def interval(value: float, se: float, dof: float) -> tuple[float, float]:
    half = scipy.stats.t.ppf(0.975, dof) * se
    return value - half, value + half


# --- stages ---------------------------------------------------------------------------------------------------------


def test_constants_of_the_rule_have_their_documented_values() -> None:
    assert STAGES == (1, 2, 3, 4, 6, 8, 12)
    assert (
        decision.RED_PROCESSES,
        estimates.ALPHA,
        stages.BETA,
        estimates.POWER,
        estimates.USUAL_PROCESSES,
    ) == (4, 0.01, 0.03, 0.95, 6)
    assert estimates.MARGIN_MIN == {"device": 0.01, "wall": 0.015}
    assert (estimates.MARGIN_USUAL, estimates.MARGIN_MOST, estimates.MARGIN_STEP) == (0.02, 0.10, 0.001)
    assert decision.RED_STAGES == (4, 6, 8, 12)
    assert tuple(stages.BETA_SHARES) == STAGES
    assert math.fsum(stages.BETA_SHARES.values()) == pytest.approx(1.0)
    assert (estimates.STORED_MARGIN_MAX, estimates.OWN_SECONDS_SD, estimates.OWN_SECONDS_MARGIN) == (
        0.04,
        0.01,
        0.10,
    )
    assert (2.0, math.log(1.2), 20.0) == (planning.FEW_FACTOR, planning.FEW_LEAST, soundness.RATIO_MAX)


@pytest.mark.parametrize("record", [Undecided, Speedup, Subject, SuiteNoise])
def test_records_are_frozen_named_and_slotted(record: type) -> None:
    fields = dataclasses.fields(record)
    made = record(**{f.name: 1.0 for f in fields})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, fields[0].name, 2.0)
    assert all(f.kw_only for f in fields)
    assert not hasattr(made, "__dict__")


def test_default_values_of_records() -> None:
    assert SuiteNoise() == SuiteNoise(ratio=DEFAULT_NOISE, paired=DEFAULT_NOISE)
    assert Subject(id="a") == Subject(id="a", runs=(), entry=None, promises=PromiseRecord(), margin=None, sampled=False)
    assert not Undecided(processes=1, reason="").reference
    speed = Speedup(now=Estimate(value=0.0, se=1.0, dof=1.0))
    assert (speed.promised, speed.holds, speed.broken, speed.full, speed.likely) == (0.0, True, False, 0, 1)


def test_workload_without_a_measurement_needs_a_first_process() -> None:
    assert opened(judge([])) == "nothing was measured"
    assert analyse([], SUITE, selected=0) == {}


@pytest.mark.parametrize(
    ("slower", "count", "likely"),
    [(0.007, 1, 1), (0.008, 1, 2), (0.0099, 1, 3), (0.05, 1, 3), (0.05, 2, 4), (0.05, 3, 3)],
)
def test_open_answer_estimates_how_many_processes_will_decide(slower: float, count: int, likely: int) -> None:
    answer = judge(runs(slower, count, scale=0.01), margin=0.01, sampled=True)
    assert isinstance(answer, Undecided)
    assert answer.likely == likely


def test_processes_ahead_are_limited_to_what_a_regression_needs() -> None:
    assert [max(stages.ahead(n), default=0) for n in (1, 2, 3, 4, 6, 8, 12)] == [3, 4, 3, 4, 2, 4, 0]


def test_doubtful_promise_estimates_how_many_processes_will_decide() -> None:
    for held in (15.5, 16.0):
        verdict(promised(first_few(runs(count=1)), held), Status.PASS)
    found = [promised(first_few(runs(count=1)), p) for p in (17.0, 19.0, 19.9, 20.5)]
    assert [a.likely for a in found if isinstance(a, Undecided)] == [1, 1, 1, decision.RED_PROCESSES - 1]
    assert speed_of(runs(count=1), 1.5).likely == 1


@pytest.mark.parametrize("count", range(1, 12))
def test_undecided_workload_is_measured_until_the_next_stage(count: int) -> None:
    run = runs(0.008, count, scale=6.0)
    reason = opened(judge(run, margin=0.01), next(n for n in STAGES if n > count) - count)
    assert reason == (
        "a slowdown of 1.0% is neither shown nor excluded yet" if count in STAGES else "between two stages"
    )


@pytest.mark.parametrize("count", [5, 7, 9, 10, 11])
def test_nothing_is_decided_between_two_stages(count: int) -> None:
    assert opened(judge(runs(0.2, count)), next(n for n in STAGES if n > count) - count) == "between two stages"


@pytest.mark.parametrize("count", [12, 13, 20])
def test_last_look_decides_whatever_processes_follow(count: int) -> None:
    verdict(judge(runs(0.0045, count, scale=12.0), margin=0.01), Status.NOISY)
    verdict(judge(runs(0.0, count)), Status.PASS)
    verdict(judge(runs(0.03, count)), Status.REGRESSED)


def test_selected_below_the_number_of_workloads_is_an_error() -> None:
    assert isinstance(judge(runs(), selected=1), Verdict)
    with pytest.raises(ValueError, match="selected=0, but 1 workloads are named"):
        judge(runs(), selected=0)


def test_each_workload_gets_its_own_answer_in_the_given_order() -> None:
    keys = [workload_id(i) for i in (3, 1, 2)]
    slower = dict(zip(keys, (0.0, 0.03, 0.0), strict=True))
    subjects = [subject([replace(m, id=k) for m in runs(slower[k])], id=k, entry=replace(ENTRY, id=k)) for k in keys]
    subjects.insert(1, subject([process(math.nan)]))
    answers = analyse(subjects, SUITE, selected=SELECTED)
    assert list(answers) == [keys[0], ID, *keys[1:]]
    found = [a.status for a in answers.values() if isinstance(a, Verdict)]
    assert found == [Status.PASS, Status.UNMEASURED, Status.REGRESSED, Status.PASS]


# --- PASS -----------------------------------------------------------------------------------------------------------


def test_unchanged_workload_passes_after_one_process() -> None:
    found = verdict(judge([process(0.001)]), Status.PASS)
    assert found.message == f"PASS {ID}: a slowdown of 1.0% is excluded"
    known = pooled(ENTRY.process_means("accepted"), NOISE.process)
    low, high = interval(0.001, *paired_error(known, 1))
    assert (found.slowdown, found.margin, found.processes) == (pytest.approx(math.expm1(0.001)), 0.01, 1)
    assert (found.low, found.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))
    assert (found.compared, found.moved) == (REVISION, None)
    assert found.accepted_speedup == pytest.approx(20.0, rel=1e-3)


def test_speedup_interval_of_a_verdict_includes_the_session_variance() -> None:
    found = verdict(judge(runs(count=3)), Status.PASS)
    noise = noise_of(ENTRY.process_means(), NOISE)
    process_noise = pooled([OFFSETS], noise.process)
    parts = process_noise.value / 3, noise.session.value
    dof = sum(parts) ** 2 / (parts[0] ** 2 / process_noise.dof + parts[1] ** 2 / noise.session.dof)
    low, high = interval(TRUTH, math.sqrt(sum(parts)), dof)
    assert found.speedup == pytest.approx(20.0)
    assert (found.speedup_low, found.speedup_high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    without = verdict(judge([alone(m) for m in runs(count=3)]), Status.PASS)
    assert (without.speedup, without.speedup_low, without.speedup_high) == (None, None, None)


def by_speed(
    change: float,
    se: float,
    *,
    count: int = 4,
    dof: float = 30.0,
    margin: float = 0.01,
    sampled: bool = False,
    **fields: Any,
) -> tuple[Status | None, str]:
    """Return the verdict by speed alone, for a relative slowdown with this standard error (of its logarithm)."""
    s = subject((process(math.log1p(change)),) * count, sampled=sampled, **fields)
    return decision._by_speed(s, Estimate(value=math.log1p(change), se=se, dof=dof), margin, SELECTED)


@pytest.mark.parametrize("count", [*STAGES, 20])
@pytest.mark.parametrize("dof", [3.0, 30.0])
def test_each_look_excludes_a_slowdown_at_its_share_of_beta(dof: float, count: int) -> None:
    limit = scipy.stats.t.isf(0.03 * {1: 0.4, 2: 0.2, 3: 0.1, 12: 0.15, 20: 0.15}.get(count, 0.05), dof)
    for factor, passes in ((1.001, True), (0.999, False)):
        se = (math.log1p(0.01) - math.log1p(0.002)) / (factor * limit)
        assert (by_speed(0.002, se, dof=dof, count=count)[0] is Status.PASS) is passes


def test_sampled_workload_passes_after_two_processes() -> None:
    assert by_speed(0.0, 1e-5, count=1)[0] is Status.PASS
    assert by_speed(0.0, 1e-5, count=1, sampled=True)[0] is None
    assert by_speed(0.0, 1e-5, count=2, sampled=True)[0] is Status.PASS
    opened(judge(runs(count=1), sampled=True))
    verdict(judge(runs(count=2), sampled=True), Status.PASS)


def test_same_code_passes_after_one_process_unless_slower_by_the_margin() -> None:
    for change, passes in ((0.0099, True), (0.0101, False)):
        assert by_speed(change, 0.1, count=1)[0] is None
        status, text = by_speed(change, 0.1, count=1, same_code=True)
        assert status is (Status.PASS if passes else None)
        assert not passes or text == f"it runs the code of {REVISION}; measured 1.0% slower than that"
    assert by_speed(0.0, 0.1, count=1, same_code=True, sampled=True)[0] is Status.PASS
    assert by_speed(-0.5, 1e-5, count=4, same_code=True)[0] is Status.PASS, "no improvement of the code"
    verdict(judge(runs(0.009, 1, scale=0.0), same_code=True), Status.PASS)
    opened(judge(runs(0.011, 1, scale=0.0), same_code=True))
    # The digests must have missed something that the workload runs.
    verdict(judge(runs(0.05, 4), same_code=True), Status.REGRESSED)


def test_same_code_is_not_noisy_because_of_one_disturbed_process() -> None:
    """The mean over processes is 1.9% slower; for other code the verdict would be NOISY after 12 processes."""
    measured = [0.18, 0.05, 0.0, 0.015, -0.01, 0.002] + [0.0] * 6
    made = [process(slower) for slower in measured]
    for count in (1, 2, 3, 4):
        assert isinstance(judge(made[:count], same_code=True), Undecided)
    passed = verdict(judge(made[:6], same_code=True), Status.PASS)
    assert passed.message.endswith("measured 0.9% slower than that")
    assert isinstance(judge(made[:8]), Undecided)
    verdict(judge(made), Status.NOISY)
    verdict(judge([process(0.02), process(-0.9)] * 6, same_code=True), Status.PASS)
    verdict(judge([process(0.02), process(0.9)] * 6, same_code=True), Status.NOISY)


def test_same_code_does_not_count_in_the_noise_of_the_run() -> None:
    """Unchanged code gets a second process only if the first was slow, so its variance is biased."""
    others = [subject(runs(count=2, scale=6.0), id=f"other{n}") for n in range(8)]
    judged = [subject([replace(m, id=s.id) for m in s.runs], id=s.id) for s in others]
    near = subject([replace(m, id="near") for m in runs(0.006, 1)], id="near")
    assert isinstance(analyse([*judged, near], SUITE, selected=SELECTED)["near"], Undecided)
    same = [replace(s, same_code=True) for s in judged]
    verdict(analyse([*same, near], SUITE, selected=SELECTED)["near"], Status.PASS)


# --- REGRESSED ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("slower", [0.02, 0.5])
def test_regression_needs_four_processes(slower: float, count: int) -> None:
    opened(judge(runs(slower, count)))
    verdict(judge(runs(slower, 4)), Status.REGRESSED)


def test_slower_optimized_side_is_regressed() -> None:
    found = verdict(judge([process(math.log(1.031) + o) for o in OFFSETS * 2]), Status.REGRESSED)
    known = pooled([*ENTRY.process_means("accepted"), OFFSETS * 2], NOISE.process)
    low, high = (math.expm1(x) for x in interval(math.log(1.031), *paired_error(known, 6)))
    assert found.message == (
        f"REGRESSED {ID}: the optimized side is 3.1% slower than {REVISION} "
        f"(95% interval {100 * low:.1f} to {high:.1%}, margin 1.0%)"
    )
    assert (found.moved, found.processes, found.compared) == ("optimized", 6, REVISION)
    assert (found.slowdown, found.low, found.high) == tuple(pytest.approx(x) for x in (0.031, low, high))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (0.00501, Status.REGRESSED),
        (0.00499, Status.PASS),
        (0.0, Status.PASS),
        (-0.00999, Status.PASS),
        (-0.01001, Status.IMPROVED),
    ],
)
def test_certain_change_is_red_above_half_the_margin_and_improved_beyond_it(change: float, status: Status) -> None:
    assert by_speed(change, 1e-6)[0] is status


def test_change_of_exactly_the_limit_counts() -> None:
    margin = 2 * math.expm1(math.log1p(0.005))
    assert by_speed(0.005, 1e-6, margin=margin)[0] is Status.REGRESSED
    margin = -math.expm1(math.log1p(-0.01))
    assert by_speed(-0.01, 1e-6, margin=margin)[0] is Status.IMPROVED


def test_change_is_significant_at_alpha_over_looks_and_workloads() -> None:
    limit = scipy.stats.t.isf(0.01 / 4 / SELECTED, 9.0)
    for factor, called in ((1.001, True), (0.999, False)):
        se = math.log1p(0.02) / (factor * limit)
        assert (by_speed(0.02, se, dof=9.0)[0] is Status.REGRESSED) is called
        se = -math.log1p(-0.02) / (factor * limit)
        assert (by_speed(-0.02, se, dof=9.0)[0] is Status.IMPROVED) is called


def test_p_value_equal_to_its_level_is_significant(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, status in ((0.02, Status.REGRESSED), (-0.02, Status.IMPROVED)):
        error = Estimate(value=value, se=0.004, dof=9.0)
        p = min(error.p_above(0), error.p_below(0))
        for part, called in ((1.0, True), (0.999, False)):
            monkeypatch.setattr(decision, "ALPHA", part * p * 4)
            found = decision._by_speed(subject(runs()), error, 0.01, 1)[0]
            assert (found is status) is called


def test_certain_slowdown_below_half_the_margin_passes() -> None:
    verdict(judge(runs(0.0045, 12, scale=0.0), margin=0.01), Status.PASS)
    verdict(judge(runs(0.0055, 12, scale=0.0), margin=0.01), Status.REGRESSED)


def test_more_selected_workloads_need_more_significance() -> None:
    run = runs(0.006, 4, scale=3.0)
    verdict(judge(run, margin=0.008, selected=1), Status.REGRESSED)
    opened(judge(run, margin=0.008, selected=10**9), 2)


# --- IMPROVED and NOISY ---------------------------------------------------------------------------------------------


def test_faster_side_is_improved_and_advises_to_accept() -> None:
    found = verdict(judge(runs(-0.05)), Status.IMPROVED)
    assert "the optimized side is 4.9% faster than the accepted revision 1a2b3c4 (95% interval " in found.message
    assert found.message.endswith("margin 1.0%); run `perfsuite accept` to keep the gain")
    # A speed-up below the margin is a PASS.
    verdict(judge(runs(-0.008)), Status.PASS)


@pytest.mark.parametrize(("change", "word"), [(0.03, "slower"), (-0.03, "faster"), (0.0, "slower")])
def test_interval_in_the_message_has_the_direction_of_the_change(change: float, word: str) -> None:
    text = by_speed(change, 0.02, count=12, dof=25.0)[1]
    low, high = (100 * math.expm1(x) for x in interval(math.log1p(change), 0.02, 25.0))
    bounds = (-high, -low) if change < 0 else (low, high)
    assert (
        f" is not excluded, where 1.0% matters; the optimized side is {abs(change):.1%} {word} than {REVISION} "
        f"(95% interval {bounds[0]:.1f} to {bounds[1]:.1f}%, margin 1.0%); "
    ) in text


@pytest.mark.parametrize("se", [0.004, 0.02, 0.05, 0.2])
def test_noisy_message_advises_a_margin_that_this_run_would_pass(se: float) -> None:
    status, text = by_speed(0.004, se, count=12)
    assert status is Status.NOISY
    start, _, advised = text.rpartition("declare margin=")
    assert start.endswith("; measure on a quiet machine; if it is always as noisy, let smaller ones pass: ")
    bound = re.match(r"too noisy: after 12 processes a slowdown of up to ([\d.]+)% is not excluded", start)
    assert bound is not None
    assert float(bound[1]) / 100 <= float(advised) <= float(bound[1]) / 100 + 0.011
    assert by_speed(0.004, se, count=12, margin=float(advised))[0] is Status.PASS
    assert by_speed(0.004, se, count=12, margin=float(advised) - 0.01)[0] is Status.NOISY


def test_advised_margin_is_strictly_above_the_bound() -> None:
    upper = Estimate(value=0.0, se=1.0, dof=30.0).upper(1 - 0.03 * 0.15)
    text = by_speed(0.0, math.log1p(0.03) / upper, count=12)[1]
    assert text.endswith("declare margin=0.04")


def test_noisy_message_advises_no_margin_that_cannot_be_declared() -> None:
    assert by_speed(0.004, 0.3, count=12)[1].endswith("margin 1.0%); measure on a quiet machine")
    upper = Estimate(value=0.0, se=1.0, dof=30.0).upper(1 - 0.03 * 0.15)
    for size, advised in ((0.985, True), (0.995, False)):
        assert ("declare margin=0.99" in by_speed(0.0, math.log1p(size) / upper, count=12)[1]) is advised


# --- the margin -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "MARGIN_STEP", 1 / FINE)
    monkeypatch.setattr(estimates, "MARGIN_MIN", {"device": 0.0})


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("selected", [1, 40, 1000])
@pytest.mark.parametrize("scale", [0.5, 2.0, 9.0, 16.0])
def test_default_margin_is_what_the_processes_resolve(scale: float, selected: int) -> None:
    """The margin is the change that 6 processes resolve if at most 2%; else that of 12 processes, but at least 2%."""
    made = accepted(scale)
    known = pooled(made.process_means("accepted"), NOISE.process)

    def found_by(count: int) -> float:
        gained = Variance(value=known.value, dof=known.dof + count - 1)
        return resolvable(*paired_error(gained, count), selected, FINE, 0.0)

    expected = found_by(6) if found_by(6) <= 0.02 else max(0.02, found_by(12))
    assert margin_of(made, SUITE, selected=selected) == pytest.approx(expected, abs=2e-6)


def test_default_margin_grows_with_the_noise_from_1_to_10_percent() -> None:
    sizes = [
        estimates._default_margin(Variance(value=(2e-4 * i) ** 2, dof=20.0), SELECTED, 0.01) for i in range(1, 300)
    ]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (0.01, 0.10)
    assert all(s == round(s, 3) for s in sizes)
    assert 0.01 < next(s for s in sizes if s > 0.01) < 0.02
    # Some noise is resolved at 2% by twelve processes, but not by six.
    assert sizes.count(0.02) >= 3
    assert sizes.count(0.10) >= 10


def test_default_margin_is_rounded_up_to_a_tenth_of_a_percent() -> None:
    for needed, size in ((0.0149, 0.015), (0.0150, 0.015), (0.0151, 0.016), (0.004, 0.01)):
        per_se = scipy.stats.t.isf(0.01 / 4 / SELECTED, 9.0) + scipy.stats.t.ppf(0.95, 9.0)
        error = Estimate(value=1.0, se=math.log1p(needed) / per_se, dof=9.0)
        assert estimates._resolvable(error, SELECTED, 0.01) == size


def test_least_margin_depends_on_the_clock() -> None:
    quiet = SuiteNoise(paired=replace(NOISE, process=Variance(value=1e-12, dof=30.0)))
    for clock, least in (("device", 0.01), ("wall", 0.015)):
        run = [measurement(accepted=o / 100, clock=clock) for o in OFFSETS * 2]
        made = entry(run)
        assert margin_of(made, quiet, selected=SELECTED) == least
        for fields in ({"entry": made}, {"entry": None}, {"entry": made, "stored": "no git", "margin": None}):
            found = judge(run, suite=quiet, **fields)
            assert isinstance(found, Verdict)
            assert found.margin is not None
            assert found.margin == least or ("stored" in fields and found.margin > least)


def test_margin_is_finite_for_extreme_noise() -> None:
    assert estimates._resolvable(Estimate(value=0.0, se=1e6, dof=4.0), 10**6, 0.01) >= estimates.MARGIN_MOST
    assert margin_of(entry([process(o) for o in (-20.0, 20.0)]), SuiteNoise(), selected=10**9) == 0.10


def test_declared_margin_replaces_the_default() -> None:
    assert verdict(judge(runs(0.03), margin=0.1), Status.PASS).margin == 0.1
    assert verdict(judge(runs(0.03)), Status.REGRESSED).margin == 0.01
    stored = {"stored": "no git", "margin": 0.2}
    assert verdict(judge(runs(0.05), **stored), Status.PASS).margin == 0.2
    slow = replace(ENTRY, few=("reference",))
    assert verdict(judge(runs(0.05), **stored, entry=slow), Status.PASS).margin == 0.2


@pytest.mark.usefixtures("fine")
def test_margin_without_an_entry_follows_from_the_noise_of_this_run() -> None:
    run = runs(count=6, scale=1.5)
    found = verdict(judge(run, entry=None, against="the revision abcdef0"), Status.PASS)
    known = pooled([[1.5 * o for o in OFFSETS * 2]], NOISE.process)
    gained = Variance(value=known.value, dof=known.dof + 5)
    assert found.margin == pytest.approx(resolvable(*paired_error(gained, 6), steps=FINE, least=0.0), abs=2e-6)
    low, high = interval(0.0, *paired_error(known, 6))
    assert (found.low, found.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))
    assert (found.compared, found.accepted_speedup) == ("the revision abcdef0", None)


def test_two_revisions_are_compared_without_a_baseline() -> None:
    for slower, status in ((0.03, Status.REGRESSED), (0.0, Status.PASS), (-0.03, Status.IMPROVED)):
        verdict(judge([alone(m) for m in runs(slower)], entry=None), status)
    found = verdict(judge(runs(0.03), entry=None, against="the revision abcdef0"), Status.REGRESSED)
    assert "3.0% slower than the revision abcdef0 (95%" in found.message


# --- the noise ------------------------------------------------------------------------------------------------------


def width(answer: Verdict | Undecided) -> float:
    """Return the half-width of a verdict's interval."""
    assert isinstance(answer, Verdict), answer
    assert answer.low is not None
    assert answer.high is not None
    return (math.log1p(answer.high) - math.log1p(answer.low)) / 2


def half(known: Variance, count: int) -> float:
    return interval(0.0, *paired_error(known, count))[1]


def test_variance_is_pooled_over_acceptance_and_this_run() -> None:
    made, run = accepted(2.0), runs(count=4, scale=3.0)
    known = pooled([*made.process_means("accepted"), [3 * OFFSETS[i % 3] for i in range(4)]], NOISE.process)
    assert width(judge(run, entry=made, margin=0.1)) == pytest.approx(half(known, 4), abs=1e-7)


def test_entry_without_an_a_a_run_uses_the_noise_of_the_suite() -> None:
    made = entry([measurement(ratio=TRUTH + o) for o in OFFSETS])
    suite = replace(SUITE, paired=replace(NOISE, process=Variance(value=0.002**2, dof=7.0)))
    found = judge([process()], entry=made, suite=suite, margin=0.1)
    assert width(found) == pytest.approx(half(Variance(value=0.002**2, dof=7.0), 1))
    assert margin_of(made, suite, selected=SELECTED) == margin_of(
        replace(made, sessions=made.sessions[:0]), suite, selected=SELECTED
    )


def uneven(slower: float, blocks: int, spread: float = 0.002) -> Measurement:
    """Return a process with this number of blocks, which vary around a mean of exactly `slower`."""
    values = spread * np.resize([1.0, -1.0], blocks)
    return measurement(accepted=[-slower + v - float(np.mean(values)) for v in values])


@pytest.mark.parametrize("blocks", [3, 8, 16])
def test_accepted_variance_is_scaled_to_the_blocks_of_this_run(blocks: int) -> None:
    made = entry([uneven(o, 8) for o in OFFSETS])
    known = pooled(made.process_means("accepted"), NOISE.process)
    scaled = Variance(value=known.value * planning.scale(made, blocks), dof=known.dof)
    run = [uneven(0.0, blocks), uneven(0.0, blocks), uneven(0.0, 2 * blocks)]
    now = pooled([[0.0] * 3], scaled)
    assert width(judge(run, entry=made, margin=0.1)) == pytest.approx(half(now, 3), rel=1e-4)
    assert (scaled.value < known.value, scaled.value > known.value) == (blocks == 16, blocks == 3)


def known_of(expected: Variance, *processes: Sequence[float]) -> Variance:
    return estimates._known(expected, [measurement(accepted=blocks) for blocks in processes], "accepted")


@pytest.mark.parametrize("blocks", [1, 8])
def test_variance_of_a_much_noisier_workload_is_that_of_its_own_processes(blocks: int) -> None:
    expected = Variance(value=1e-6, dof=24.0)
    limit = math.sqrt(scipy.stats.f.isf(1e-3, 3, 24))
    for factor, grown in ((1.001, True), (0.999, False)):
        values = [v * 1e-3 * factor * limit / math.sqrt(5 / 3) for v in (0.0, 1.0, 2.0, 3.0)]
        own = Variance(value=float(np.var(values, ddof=1)), dof=3.0)
        found = known_of(expected, *([v] * blocks for v in values))
        wanted = own if grown else pooled([values], expected)
        assert (found.value, found.dof) == (pytest.approx(wanted.value), wanted.dof)
    assert known_of(expected, [0.5] * blocks) == expected


def test_blocks_with_much_more_noise_raise_the_variance_after_one_process() -> None:
    """Otherwise one process with blocks that differ by 60% would exclude a slowdown of 1%."""
    opened(judge([uneven(0.0, 8, spread=0.3)]))
    expected = Variance(value=1e-6, dof=24.0)
    limit = math.sqrt(scipy.stats.f.isf(1e-3, 7, 24) * 8 * 7 / 8)
    for factor, grown in ((1.001, True), (0.999, False)):
        blocks = factor * limit * 1e-3 * np.resize([1.0, -1.0], 8)
        found = known_of(expected, blocks.tolist())
        value = float(np.var(blocks, ddof=1)) / 8 if grown else expected.value
        assert (found.value, found.dof) == (pytest.approx(value), 24.0)


def test_block_variance_is_pooled_within_processes() -> None:
    expected = Variance(value=1e-6, dof=24.0)
    first, second = [0.0, 0.02, 0.04], [0.03, 0.01]
    block = (8e-4 + 2e-4) / 3
    grown = Variance(value=block * (1 / 3 + 1 / 2) / 2, dof=24.0)
    assert scipy.stats.f.sf(grown.value / 1e-6, 3, 24) < 1e-3
    found, wanted = known_of(expected, first, second), pooled([[0.02, 0.02]], grown)
    assert (found.value, found.dof) == (pytest.approx(wanted.value), wanted.dof)


def test_much_noisier_workload_is_regressed_only_by_a_large_slowdown() -> None:
    opened(judge(runs(0.02, 4, scale=20.0)), 2)
    verdict(judge(runs(0.3, 12, scale=20.0)), Status.REGRESSED)
    assert "declare margin=" in verdict(judge(runs(0.0, 12, scale=20.0)), Status.NOISY).message


def crowd(count: int, scale: float, processes: int = 2, **fields: Any) -> list[Subject]:
    """Return unchanged workloads; two processes of each differ by `scale` times the accepted deviation."""
    keys = [workload_id(100 + i) for i in range(count)]
    shifts = [scale * 1e-3 * s for s in (-0.5, 0.5, 0.0, 0.0)[:processes]]
    return [
        subject(
            [replace(process(s, ratio=TRUTH + s), id=k) for s in shifts], id=k, entry=replace(ENTRY, id=k), **fields
        )
        for k in keys
    ]


def factor_of(scale: float) -> float:
    known = pooled(ENTRY.process_means("accepted"), NOISE.process)
    return max(1.0, (scale * 1e-3) ** 2 / 2 / known.value / scipy.stats.f.median(1, known.dof))


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_noisier_run_scales_all_variances(scale: float) -> None:
    answers = analyse([subject([process()], margin=0.1), *crowd(8, scale)], SUITE, selected=SELECTED)
    known = pooled(ENTRY.process_means("accepted"), NOISE.process)
    grown = Variance(value=factor_of(scale) * known.value, dof=known.dof)
    assert width(answers[ID]) == pytest.approx(half(grown, 1))
    assert (factor_of(4.0) > 3, factor_of(0.5)) == (True, 1.0)


def test_early_pass_is_withdrawn_if_the_run_turns_out_noisier() -> None:
    first = subject([process(0.003)])
    verdict(analyse([first], SUITE, selected=SELECTED)[ID], Status.PASS)
    verdict(analyse([first, *crowd(8, 1.0)], SUITE, selected=SELECTED)[ID], Status.PASS)
    verdict(analyse([first, *crowd(7, 6.0)], SUITE, selected=SELECTED)[ID], Status.PASS)
    verdict(analyse([first, *crowd(8, 6.0, processes=1)], SUITE, selected=SELECTED)[ID], Status.PASS)
    reason = opened(analyse([first, *crowd(8, 6.0)], SUITE, selected=SELECTED)[ID])
    assert reason == "a slowdown of 1.0% is neither shown nor excluded yet"


def test_noise_of_the_run_excludes_stored_figures_and_unsound_measurements() -> None:
    first = subject([process(0.003)])
    stored = crowd(8, 6.0, stored="no git")
    verdict(analyse([first, *stored], SUITE, selected=SELECTED)[ID], Status.PASS)
    unsound = [replace(s, runs=(*s.runs, process(math.nan))) for s in crowd(8, 6.0)]
    verdict(analyse([first, *unsound], SUITE, selected=SELECTED)[ID], Status.PASS)
    # A comparison with stored figures keeps its own noise.
    kept = subject(runs(count=1), stored="no git")
    alone_, among = (analyse([kept, *more], SUITE, selected=SELECTED)[ID] for more in ([], crowd(8, 6.0)))
    assert alone_ == among


def test_noise_of_the_suite_is_fitted_to_all_accepted_workloads() -> None:
    rng = np.random.default_rng(5)

    def made(number: int, *, interleaved: bool = True, **fields: Any) -> Entry:
        sd = 0.001 * (1 + number)
        run = [process(rng.normal(0, sd / 2), ratio=TRUTH + rng.normal(0, sd), **fields) for _ in range(5)]
        kept = run if interleaved else [replace(m, log_ratios={"reference": m.log_ratios["reference"]}) for m in run]
        return replace(entry(kept), id=workload_id(number))

    entries = {workload_id(i): made(i, interleaved=i % 3 > 0) for i in range(12)}
    slow = {workload_id(20): made(20, few=("reference",)), workload_id(21): made(21, few=("rival",))}
    found = suite_noise({**entries, **slow})
    known = [*entries.values(), slow[workload_id(21)]]
    assert found.ratio == fit_prior(e.process_means() for e in known)
    every = [*entries.values(), *slow.values()]
    assert found.paired == fit_prior(m for e in every if (m := e.process_means("accepted")))
    assert found.ratio != found.paired
    plain = {k: e for k, e in entries.items() if not e.process_means("accepted")}
    assert suite_noise(plain).paired == suite_noise(plain).ratio == fit_prior(e.process_means() for e in plain.values())
    assert suite_noise({}) == SuiteNoise()


def test_noise_of_a_clock_is_fitted_to_its_workloads_if_at_least_five() -> None:
    def made(number: int, clock: str, sd: float) -> Entry:
        return replace(entry([process(o * sd) for o in OFFSETS]), id=workload_id(number), clock=clock)

    device = {workload_id(i): made(i, "device", 0.1 + i / 100) for i in range(6)}
    wall = {workload_id(i): made(i, "wall", 10 + i) for i in range(6, 11)}
    found = suite_noise({**device, **wall})
    assert found.of("device") == replace(suite_noise(device), clocks={})
    assert found.of("wall") == replace(suite_noise(wall), clocks={})
    assert found.of("device").paired.process.value < found.paired.process.value < found.of("wall").paired.process.value
    few = suite_noise({**device, **dict(list(wall.items())[:4])})
    assert few.of("wall") == few
    quiet, loud = device[workload_id(0)], wall[workload_id(6)]
    margins = [margin_of(quiet, s, selected=SELECTED) for s in (found, replace(found, clocks={}))]
    assert margins[0] <= margins[1]
    assert estimates.expected_variance(subject((), entry=loud), found) == estimates.expected_variance(
        subject((), entry=loud), found.of("wall")
    )


def test_promise_is_compared_with_this_run_if_sessions_vary_widely() -> None:
    """If the reference differs by 40% between hosts, more processes would not reduce that error."""
    shifty = SuiteNoise(ratio=replace(NOISE, session=Variance(value=0.2**2, dof=3.0)), paired=NOISE)
    held = verdict(promised(runs(), 19.0, suite=shifty), Status.PASS)
    assert held.speedup_low < 19.0
    below = verdict(promised(runs(count=12), 22.0, suite=shifty), Status.BELOW_FLOOR)
    assert below.speedup_high > 22.0
    assert isinstance(promised(runs(), 22.0, suite=shifty), Undecided)  # the difference may be due to the session


# --- stored figures -------------------------------------------------------------------------------------------------


def stored(run: Sequence[Measurement], **fields: Any) -> Verdict | Undecided:
    return judge(
        [replace(m, log_ratios={"reference": m.log_ratios["reference"]}) for m in run], stored="no git", **fields
    )


def kept(
    slower: float = 0.0, count: int = 4, *, reference: float = 0.0, scale: float = 1.0, **fields: Any
) -> list[Measurement]:
    """Return processes without the accepted side; `slower` and `reference` are log-ratios of the sides' seconds."""
    return [
        measurement(
            ratio=TRUTH + reference - slower + scale * OFFSETS[i % 3],
            optimized_s=1e-4 * math.exp(slower),
            reference_s=20e-4 * math.exp(reference),
            **fields,
        )
        for i in range(count)
    ]


NOTE = "; compared with stored figures: no git"


def test_stored_figures_are_compared_if_the_accepted_revision_cannot_run() -> None:
    found = verdict(stored(kept(count=1)), Status.PASS)
    assert found.message.endswith(f"is excluded{NOTE}")
    assert found.compared == "stored figures"
    for count in (1, 2, 3):
        opened(stored(kept(0.06, count)))
    found = verdict(stored(kept(0.06)), Status.REGRESSED)
    assert "the optimized side is 6.2% slower than when accepted, by the stored figures (95% interval " in found.message
    assert found.message.endswith(
        f"; against the stored times, the optimized side is 6.2% slower, the reference side 0.0% slower{NOTE}"
    )
    assert (found.moved, found.processes) == ("optimized", 4)
    assert verdict(stored(kept(-0.06)), Status.IMPROVED).message.endswith(f"to keep the gain{NOTE}")
    found = verdict(stored(kept(0.02, 12, scale=30.0)), Status.NOISY)
    assert found.message.endswith(NOTE)


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("sessions", [1, 3])
def test_comparison_with_stored_figures_includes_errors_of_both_sessions(sessions: int) -> None:
    made, run = accepted(2.0, sessions), kept(0.001, 4, scale=2.0)
    found = verdict(stored(run, entry=made), Status.PASS)
    noise = noise_of(made.process_means(), NOISE)
    known = pooled([[2 * OFFSETS[i % 3] for i in range(4)]], noise.process)

    def error(count: int) -> tuple[float, float]:
        parts = known.value * (1 / (5 * sessions) + 1 / count), noise.session.value * (1 / sessions + 1)
        worth = parts[0] ** 2 / known.dof + parts[1] ** 2 / noise.session.dof
        return math.sqrt(sum(parts)), sum(parts) ** 2 / worth

    # OFFSETS do not average to 0, neither over the run nor over the baseline.
    value = 0.001 - 2 * (
        float(np.mean([OFFSETS[i % 3] for i in range(4)])) + float(np.mean([OFFSETS[i % 3] for i in range(5)]))
    )
    low, high = interval(value, *error(4))
    assert found.slowdown == pytest.approx(math.expm1(value), abs=2e-6)
    assert (found.low, found.high) == (
        pytest.approx(math.expm1(low), abs=2e-6),
        pytest.approx(math.expm1(high), abs=2e-6),
    )
    assert found.margin == pytest.approx(resolvable(*error(12), steps=FINE, least=0.0), abs=2e-6)
    assert found.margin > margin_of(made, SUITE, selected=SELECTED)


def test_margin_of_stored_figures_is_limited_to_4_percent_or_the_default() -> None:
    shifty = SuiteNoise(ratio=replace(NOISE, session=Variance(value=0.01**2, dof=20.0)), paired=NOISE)
    assert verdict(stored(kept(count=12), suite=shifty), Status.NOISY).margin == 0.04
    loud = accepted(100.0)
    own = estimates._default_margin(noise_of(loud.process_means(), NOISE).process, SELECTED, 0.01)
    found = stored(kept(0.0, 12, scale=100.0), entry=loud)
    assert isinstance(found, Verdict)
    assert found.margin == own > 0.04
    # A workload that needs no wider margin has that of six processes.
    exact = SuiteNoise(ratio=replace(NOISE, session=Variance(value=1e-12, dof=20.0)), paired=NOISE)
    mild = accepted(14.0, sessions=3)
    own = estimates._default_margin(noise_of(mild.process_means(), exact.ratio).process, SELECTED, 0.01)
    assert verdict(stored(kept(0.0, 12, scale=0.1), entry=mild, suite=exact), Status.PASS).margin == own > 0.01


def test_lower_ratio_due_to_a_faster_reference_is_noisy() -> None:
    found = verdict(stored(kept(0.0, reference=-0.06)), Status.NOISY)
    assert found.message.endswith(
        "it is slower by the stored figures, but not because of the optimized side: against the "
        f"stored times, the reference side is 5.8% faster, the optimized side 0.0% slower{NOTE}"
    )
    assert found.moved == "reference"


@pytest.mark.parametrize(
    ("moved", "status"), [(0.019, Status.PASS), (-0.019, Status.PASS), (0.035, Status.NOISY), (-0.035, Status.NOISY)]
)
def test_moved_reference_may_hide_a_slowdown(moved: float, status: Status) -> None:
    found = verdict(stored(kept(moved, reference=moved)), status)
    assert ("may hide a slowdown" in found.message) is (status is Status.NOISY)
    assert found.message.endswith(NOTE)


def test_only_seconds_are_compared_if_the_reference_has_few_samples() -> None:
    made = entry([few(m) for m in kept(count=5)])

    def own(slower: float, **fields: Any) -> Verdict | Undecided:
        return stored([few(m) for m in kept(slower, scale=300.0, **fields)], entry=made)

    found = verdict(own(0.02), Status.PASS)
    assert found.margin == 0.10
    assert found.message == f"PASS {ID}: a slowdown of 10.0% is excluded{NOTE}"
    # A few samples of the reference are not enough to compare with.
    verdict(own(0.02, reference=0.5), Status.PASS)
    found = verdict(own(0.3, reference=-0.5), Status.REGRESSED)
    assert "35.0% slower than when accepted, by the stored figures" in found.message
    assert found.moved == "optimized"


def test_comparison_of_seconds_includes_the_session_variance() -> None:
    made = entry([few(m) for m in kept(count=5)])
    seconds = (1.00e-4, 1.02e-4, 1.10e-4)
    run = [few(measurement(optimized_s=s)) for s in seconds]
    found = stored(run, entry=made, margin=0.5)
    now = np.log(seconds)
    known = pooled([[math.log(1e-4)] * 5, now.tolist()], Variance(value=0.0035**2, dof=4.0))
    parts = known.value * (1 / 5 + 1 / 3), 0.01**2 * 2
    dof = sum(parts) ** 2 / (parts[0] ** 2 / known.dof + parts[1] ** 2 / 6.0)
    value = float(np.mean(now)) - math.log(1e-4)
    low, high = interval(value, math.sqrt(sum(parts)), dof)
    assert isinstance(found, Verdict)
    assert found.slowdown == pytest.approx(math.expm1(value))
    assert (found.low, found.high) == (pytest.approx(math.expm1(low)), pytest.approx(math.expm1(high)))


STILL = {"copy": 1e-4, "matmul": 2e-4, "launch": 3e-6}


def test_comparison_of_seconds_does_not_blame_the_code_for_a_slower_device() -> None:
    made = entry([few(m) for m in kept(count=5, anchors=STILL)])
    for copy, status, moved in ((1.0, Status.REGRESSED, "optimized"), (1.3, Status.NOISY, "device")):
        run = [few(m) for m in kept(0.3, anchors={**STILL, "copy": copy * 1e-4})]
        found = verdict(stored(run, entry=made), status)
        assert found.moved == moved
    assert (
        "not because of the optimized side: against the stored times, the optimized side is 35.0% slower"
        in found.message
    )


def test_stored_figures_without_an_entry_are_no_baseline() -> None:
    assert (
        "nothing is accepted; run `perfsuite accept`" in verdict(stored(kept(), entry=None), Status.NO_BASELINE).message
    )


# --- the promised speedup -------------------------------------------------------------------------------------------


def promised(run: Sequence[Measurement], speedup: float, **fields: Any) -> Verdict | Undecided:
    return judge(run, promises=PromiseRecord(speedup=speedup), **fields)


def first_few(run: Sequence[Measurement]) -> list[Measurement]:
    """Keep a few samples of the reference in the first process and none in the others, as the gate measures."""
    return [few(run[0]), *(alone(m) for m in run[1:])]


def speed_of(run: Sequence[Measurement], promise: float | None, **fields: Any) -> Speedup:
    count, prior = fields.pop("stages", 7), fields.pop("prior", NOISE)
    found = estimates.speedup_of(
        subject(run, promises=PromiseRecord(speedup=promise), **fields), prior, SELECTED, stages=count
    )
    assert found is not None
    return found


def test_promise_far_exceeded_holds_with_few_samples_of_one_process() -> None:
    verdict(promised(first_few(runs(count=1)), 15.0), Status.PASS)
    verdict(promised(first_few(runs(count=4)), 15.0), Status.PASS)


def test_doubtful_promise_requests_the_full_reference() -> None:
    reason = opened(promised(first_few(runs(count=1)), 19.0), reference=True)
    low, high = (math.exp(x) for x in speed_of(first_few(runs(count=1)), 19.0).now.interval())
    assert (
        reason == f"20× as fast as the reference (95% interval {low:.4g} to {high:.4g}): the promised 19× is in doubt"
    )
    # One process with the full number of samples is enough.
    verdict(promised([few(process()), process()], 19.0), Status.PASS)


def test_doubtful_promise_requests_the_reference_while_speed_is_undecided() -> None:
    slower = first_few(runs(0.008, count=1, scale=6.0))
    assert "neither shown nor excluded" in opened(promised(slower, 19.0, margin=0.01), reference=True)
    assert "neither shown nor excluded" in opened(promised(slower, 10.0, margin=0.01), reference=False)


def stopped(ratio: float, **fields: Any) -> Measurement:
    """Return a process whose reference was stopped; `ratio` is the log-ratio reached until then."""
    return few(process(ratio=ratio, at_least=("reference",), **fields))


def test_stopped_reference_can_keep_a_promise_but_never_break_one() -> None:
    long = replace(ENTRY, few=("reference",))
    shown = verdict(promised([stopped(math.log(100.0))], 10.0, entry=long), Status.PASS)
    assert (shown.speedup, shown.speedup_low, shown.speedup_high) == (pytest.approx(100.0), None, None)
    reason = opened(promised([stopped(math.log(2.0))], 10.0, entry=long), reference=True)
    assert reason == "at least 2× as fast as the reference: the promised 10× is in doubt"
    for count in (4, 12):
        run = [stopped(math.log(2.0)), *(alone(process()) for _ in range(count - 1))]
        assert speed_of(run, 10.0, entry=long).least
        assert not speed_of(run, 10.0, entry=long).broken
        opened(promised(run, 10.0, entry=long), reference=True)


def test_complete_reference_replaces_a_stopped_one() -> None:
    long = replace(ENTRY, few=("reference",))
    run = [stopped(math.log(2.0)), few(process(ratio=math.log(20.0)))]
    speed = speed_of(run, 10.0, entry=long)
    assert not speed.least
    assert math.exp(speed.now.value) == pytest.approx(20.0)
    assert not speed_of(run, None, entry=long).least
    assert speed_of(run[:1], None, entry=long).least
    assert "when accepted" not in verdict(promised([stopped(0.0)], 0.5, entry=ENTRY), Status.PASS).message


def test_few_samples_must_exceed_a_promise_by_a_fifth() -> None:
    quiet = SuiteNoise(
        ratio=Noise(process=Variance(value=1e-12, dof=30.0), session=Variance(value=1e-12, dof=30.0)), paired=NOISE
    )
    made = entry([measurement(accepted=o, ratio=TRUTH) for o in OFFSETS])
    run = [few(process())]
    for part, holds in ((1.001, True), (0.999, False)):
        answer = promised(run, 20.0 / 1.2 / part, entry=made, suite=quiet)
        assert isinstance(answer, Verdict) is holds
    # A reference cannot be fully sampled if it is always slow, or if nothing is accepted.
    for fields in ({"entry": replace(made, few=("reference",))}, {"entry": None}):
        verdict(promised(run, 19.9, suite=quiet, **fields), Status.PASS)
    verdict(promised([process()], 19.9, entry=made, suite=quiet), Status.PASS)


def test_few_samples_count_with_twice_the_error() -> None:
    full, less = speed_of(runs(), 19.0), speed_of([few(m) for m in runs()], 19.0)
    assert less.now == replace(full.now, se=2 * full.now.se)
    # Fully sampled processes replace those with few samples.
    mixed = speed_of([few(process(ratio=9.0)), *runs()], 19.0)
    assert (mixed.now, mixed.full) == (full.now, 4)
    assert (full.promised, speed_of(runs(), None).promised) == (19.0, 0.0)


def test_noise_of_an_always_slow_reference_is_the_accepted_one() -> None:
    """The accepted processes also have only a few samples."""
    made, run = entry([measurement(accepted=o, ratio=TRUTH + o) for o in OFFSETS]), [few(process())]
    slow = speed_of(run, 10.0, entry=replace(made, few=("reference",)))
    assert slow.now == speed_of(run, 10.0, entry=made).now
    assert slow.now.se != speed_of(run, 10.0, entry=None).now.se


@pytest.mark.parametrize(("stages", "count", "beta"), [(1, 4, 0.03), (7, 1, 0.012), (7, 2, 0.006), (7, 4, 0.0015)])
def test_promise_holds_at_beta_and_is_broken_at_alpha_over_looks_and_workloads(
    stages: int, count: int, beta: float
) -> None:
    run = runs(count=count)
    error = speed_of(run, None).now
    # Acceptance must hold for every session; a gate checks only this run.
    here = error if stages == 1 else speed_of(run, None, prior=replace(NOISE, session=NO_SHIFT)).now
    above = scipy.stats.t.isf(beta, here.dof) * here.se
    below = scipy.stats.t.isf(0.01 / stages / SELECTED, error.dof) * error.se
    for distance, holds, broken in (
        (1.001 * above, True, False),
        (0.999 * above, False, False),
        (-0.999 * below, False, False),
        (-1.001 * below, False, True),
    ):
        found = speed_of(run, math.exp(error.value - distance), stages=stages)
        assert (found.holds, found.broken) == (holds, broken)


def test_p_value_of_a_promise_equal_to_its_level_is_significant(monkeypatch: pytest.MonkeyPatch) -> None:
    error = speed_of(runs(), None).now
    for factor in (0.99, 1.01):
        promise = math.exp(error.value) * factor
        p = min(error.p_above(math.log(promise)), error.p_below(math.log(promise)))
        for part, called in ((1.0, True), (0.999, False)):
            monkeypatch.setattr(estimates, "ALPHA", part * p)
            monkeypatch.setattr(estimates, "BETA", part * p)
            found = estimates.speedup_of(subject(runs(), promises=PromiseRecord(speedup=promise)), NOISE, 1, stages=1)
            assert found is not None
            assert (found.holds, found.broken) == (called and factor < 1, called and factor > 1)


def test_broken_promise_needs_four_fully_sampled_processes() -> None:
    for count in (1, 2, 3):
        opened(promised(runs(count=count), 25.0), reference=True)
    opened(promised([few(process()), *runs(count=3)], 25.0), reference=True)
    found = verdict(promised(runs(count=4), 25.0), Status.BELOW_FLOOR)
    assert "); promised 25×, 20× when accepted" in found.message
    assert found.message.endswith("20× when accepted")
    assert found.moved is None


@pytest.mark.parametrize(("speedup", "status"), [(19.99, Status.NOISY), (20.03, Status.BELOW_FLOOR)])
def test_promise_within_the_noise_is_decided_by_the_estimate_after_12_processes(speedup: float, status: Status) -> None:
    for count in (4, 6, 8):
        opened(promised(runs(count=count), speedup), reference=True)
    found = verdict(promised(runs(count=12), speedup), status)
    within = "within the noise; promise less, or reduce the workload's noise"
    assert found.message.endswith(within) is (status is Status.NOISY)
    # Only fully sampled processes count, so the total may exceed twelve.
    begun = first_few(runs(count=4))
    for more in (2, 4, 8, 9, 11):
        opened(promised([*begun, *runs(count=more)], speedup), reference=True)
    verdict(promised([*begun, *runs(count=12)], speedup), status)


def test_estimate_equal_to_the_promise_keeps_it() -> None:
    run = [measurement(ratio=0.0, accepted=o) for o in OFFSETS * 4]
    found = verdict(promised(run, 1.0, entry=entry(run)), Status.NOISY)
    assert found.speedup == 1.0
    assert "within the noise" in found.message


def test_few_samples_are_used_if_the_full_reference_was_requested_in_vain() -> None:
    """The accepted reference was fast enough to repeat; now no number of processes would sample it fully."""
    slow = [few(m) for m in runs(count=12)]
    opened(promised(slow[:1], 19.0), reference=True)
    verdict(promised(slow[:2], 19.0), Status.PASS)
    for count in (2, 3):
        opened(promised(slow[:count], 25.0), reference=True)
    verdict(promised(slow[:4], 25.0), Status.BELOW_FLOOR)
    verdict(promised(slow, 19.99), Status.NOISY)


def test_promise_is_decided_after_24_processes_in_any_case() -> None:
    """This also holds if the requested reference was never timed."""
    run = [few(process()), *(alone(m) for m in runs(count=23))]
    opened(promised(run[:23], 25.0), reference=True)
    verdict(promised(run, 25.0), Status.BELOW_FLOOR)
    sometimes = [few(m) if i % 3 else m for i, m in enumerate(runs(count=24))]
    opened(promised(sometimes[:23], 19.99), reference=True)
    verdict(promised(sometimes, 19.99), Status.NOISY)


def test_promise_of_an_always_slow_reference_is_decided_with_few_samples() -> None:
    made = entry([few(m) for m in runs(count=5)])
    slow = [few(m) for m in runs(count=12)]
    verdict(promised(slow[:1], 19.0, entry=made, selected=1), Status.PASS)
    for count in (1, 2, 3):
        opened(promised(slow[:count], 25.0, entry=made), reference=True)
    found = verdict(promised(slow[:4], 25.0, entry=made), Status.BELOW_FLOOR)
    # The accepted speedup is equally imprecise, so no cause is derived from it.
    assert found.message.endswith("promised 25×, 20× when accepted")
    verdict(promised(slow, 19.99, entry=made), Status.NOISY)


def test_speedup_promise_without_a_timed_reference_is_unmeasured() -> None:
    found = verdict(promised([alone(m) for m in runs()], 15.0), Status.UNMEASURED)
    assert found.message.endswith("speedup promised, but no process timed the reference")
    verdict(judge([alone(m) for m in runs()], promises=PromiseRecord(launches=1)), Status.PASS)


def test_slowdown_is_reported_before_a_broken_promise() -> None:
    verdict(promised(runs(0.1, 4), 19.5), Status.REGRESSED)
    verdict(promised(runs(0.0065, 12, scale=6.0), 25.0, margin=0.01), Status.NOISY)


def slow_device(copy: float, **fields: Any) -> list[Measurement]:
    """Return processes in which both revisions are 10% slower than accepted, and the reference is unchanged."""
    return [
        process(o, ratio=TRUTH - 0.1, optimized_s=1.1e-4, reference_s=2e-3, anchors={**STILL, "copy": copy}, **fields)
        for o in OFFSETS * 4
    ]


def test_promise_that_held_when_accepted_is_not_broken_by_a_slower_device() -> None:
    made = accepted(anchors=STILL)
    found = verdict(promised(slow_device(1.1e-4), 19.5, entry=made), Status.NOISY)
    assert (
        "promised 19.5×, 20× when accepted; against the stored times, the optimized side is 10.0% slower"
        in found.message
    )
    assert found.moved == "device"
    found = verdict(promised(slow_device(1e-4), 19.5, entry=made), Status.BELOW_FLOOR)
    assert found.moved == "software"
    # A promise that did not hold when accepted has no cause.
    found = verdict(promised(slow_device(1.1e-4), 25.0, entry=made), Status.BELOW_FLOOR)
    assert (found.moved, found.message.endswith("when accepted")) == (None, True)
    # Few samples of the reference give no cause.
    slow = replace(made, few=("reference",))
    assert verdict(promised(slow_device(1.1e-4), 19.5, entry=slow), Status.BELOW_FLOOR).moved is None


def test_promise_equal_to_the_accepted_speedup_held_when_accepted() -> None:
    made = entry([measurement(accepted=o, ratio=0.5, anchors=STILL) for o in OFFSETS])
    run = [replace(m, log_ratios={**m.log_ratios, "reference": (0.4,) * 8}) for m in slow_device(1.1e-4)]
    run = [replace(m, sides={"optimized": side(1.1e-4), "reference": side(1e-4 * math.exp(0.5))}) for m in run]
    for factor, status in ((1.0, Status.NOISY), (1.0001, Status.BELOW_FLOOR)):
        verdict(promised(run, factor * made.speedup(), entry=made), status)


def test_broken_promise_with_stored_figures_names_the_side_that_moved() -> None:
    """The accepted revision was not timed, so the message does not mention both revisions."""
    run = kept(0.02, 12)
    found = verdict(stored(run, promises=PromiseRecord(speedup=19.9), margin=0.1), Status.BELOW_FLOOR)
    assert found.moved == "optimized"
    assert "both revisions" not in found.message


# --- the cause of a lost speedup ------------------------------------------------------------------------------------


def test_pass_reports_the_cause_of_a_lost_speedup() -> None:
    run = [process(o, ratio=TRUTH - 0.05, optimized_s=1e-4, reference_s=2e-3 * math.exp(-0.05)) for o in OFFSETS]
    found = verdict(judge(run), Status.PASS)
    assert found.moved == "reference"
    assert "a slowdown of 1.0% is excluded; 19.02× as fast as the reference (95% interval " in found.message
    assert "), 20× when accepted: against the stored times, the reference side is 4.9% faster" in found.message


@pytest.mark.parametrize(("times", "reported"), [(1.19, False), (1.21, True)])
def test_pass_reports_a_speedup_that_is_larger_because_the_reference_is_slower(times: float, reported: bool) -> None:
    log = math.log(times)
    run = [process(o, ratio=TRUTH + log, optimized_s=1e-4, reference_s=2e-3 * times) for o in OFFSETS]
    found = verdict(judge(run), Status.PASS)
    assert (found.moved == "reference") is reported
    assert (
        "20× when accepted: against the stored times, the reference side is 21.0% slower" in found.message
    ) is reported
    faster = [process(o, ratio=TRUTH + log, optimized_s=1e-4 / times, reference_s=2e-3) for o in OFFSETS]
    assert verdict(judge(faster), Status.PASS).moved is None
    slower = [process(o, ratio=TRUTH - log, optimized_s=1e-4 * times, reference_s=2e-3) for o in OFFSETS]
    assert verdict(judge(slower), Status.PASS).moved not in (None, "reference")


def test_speedup_is_lost_beyond_the_larger_of_2_percent_and_the_margin() -> None:
    def moved(lost: float, **fields: Any) -> bool:
        run = [process(o, ratio=TRUTH - lost, optimized_s=1e-4) for o in OFFSETS * 4]
        return verdict(judge(run, entry=made, **fields), Status.PASS).moved is not None

    made = entry([process(o) for o in OFFSETS])
    assert (moved(math.log1p(0.0201)), moved(math.log1p(0.0199))) == (True, False)
    assert (moved(math.log1p(0.0501), margin=0.05), moved(math.log1p(0.0499), margin=0.05)) == (True, False)
    assert not moved(-0.05)


def test_speedup_with_few_samples_is_lost_beyond_a_fifth() -> None:
    def moved(lost: float, **fields: Any) -> bool:
        run = [few(process(ratio=TRUTH - lost, optimized_s=1e-4))]
        return verdict(judge(run, **{"entry": made, **fields}), Status.PASS).moved is not None

    made = entry([process(o) for o in OFFSETS])
    assert (moved(math.log(1.201)), moved(math.log(1.199))) == (True, False)
    # If the reference was too slow to repeat when accepted, the accepted speedup is imprecise.
    assert not moved(0.5, entry=replace(made, few=("reference",)))
    assert not moved(0.5, entry=None)


def test_speedup_within_its_error_is_not_lost() -> None:
    made = entry([process(o, ratio=TRUTH) for o in OFFSETS])
    run = [process(o, ratio=TRUTH - 0.05) for o in OFFSETS * 4]
    session = Variance(value=0.026**2, dof=1e9)
    for value, line in ((0.0247**2, True), (0.0253**2, False)):
        suite = replace(SUITE, ratio=replace(NOISE, session=replace(session, value=value)))
        assert (verdict(judge(run, entry=made, suite=suite), Status.PASS).moved is not None) is line


def test_untimed_reference_reports_no_lost_speedup() -> None:
    assert verdict(judge([alone(process())]), Status.PASS).moved is None


# --- counts ---------------------------------------------------------------------------------------------------------


def test_count_above_its_promise_is_below_floor_after_one_process() -> None:
    promise = PromiseRecord(host_syncs=0)
    verdict(judge(runs(count=1), promises=promise), Status.PASS)
    found = verdict(judge([counting(process(), host_syncs=1)], promises=promise), Status.BELOW_FLOOR)
    assert "the optimized side breaks its promise: host syncs 1 (promised: at most 0)" in found.message
    assert found.moved == "optimized"
    # One process of several is enough, and this precedes a slowdown.
    slow = [*runs(0.1, 3), counting(process(0.1), host_syncs=1)]
    verdict(judge(slow, promises=promise), Status.BELOW_FLOOR)


def test_count_above_the_accepted_one_is_regressed_after_two_processes() -> None:
    more = counting(process(), launches=2)
    reason = opened(judge([more]))
    assert reason == "the optimized side needs more: kernel launches 2, 1 when accepted; measured once more"
    found = verdict(judge([more, more]), Status.REGRESSED)
    assert found.message == f"REGRESSED {ID}: the optimized side needs more: kernel launches 2, 1 when accepted"
    assert found.moved == "optimized"
    verdict(judge([more, process()]), Status.PASS)


def test_counts_are_compared_with_the_interleaved_side_without_an_entry() -> None:
    def beside(now: int, before: int) -> Measurement:
        m = counting(process(), launches=now)
        return replace(m, sides={**m.sides, "accepted": side(1e-4, launches=before)})

    verdict(judge([beside(3, 2)] * 2, entry=None), Status.REGRESSED)
    # The accepted side's count on this machine is used, not the stored one.
    verdict(judge([beside(3, 3)] * 2), Status.PASS)
    verdict(judge([beside(1, 0)] * 2), Status.REGRESSED)


def test_a_promised_count_that_no_process_counted_is_unmeasured() -> None:
    promise = PromiseRecord(launches=1)
    uncounted = [counting(m, launches=None) for m in runs()]
    found = verdict(judge(uncounted, promises=promise), Status.UNMEASURED)
    assert found.message.endswith("kernel launches promised, but no process counted them")
    verdict(judge([*uncounted, process()][1:], promises=promise), Status.PASS)
    cpu = {"device": "cpu"}
    run = [counting(m, launches=None) for m in runs(**cpu)]
    verdict(judge(run, entry=accepted(**cpu), promises=promise), Status.PASS)


# --- unusable measurements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (replace(process(), id="x"), "holds a measurement of x"),
        (process(clock="wall"), "its processes disagree on clock: 'device', 'wall'"),
        (process(device="x"), "its processes disagree on device: 'nvidia-h200', 'x'"),
        (process(direction="both"), "its processes disagree on direction: 'forward', 'both'"),
        (process(dtype="float16"), "its processes disagree on dtype: 'float32', 'float16'"),
        (process(sizes={"n": 1}), "its processes disagree on sizes: {'n': 4096}, {'n': 1}"),
        (measurement(), "a process gave no sound ratio to the accepted side"),
        (measurement(accepted=()), "no sound ratio to the accepted side"),
        (process(math.nan), "no sound ratio to the accepted side"),
        (process(-math.inf), "no sound ratio to the accepted side"),
        (process(20.1), "no sound ratio to the accepted side"),
        (process(-20.1), "no sound ratio to the accepted side"),
        (measurement(accepted=(0.0, 21.0)), "no sound ratio to the accepted side"),
        (process(ratio=20.1, reference_s=1.0), "no sound ratio to the reference side"),
        (process(ratio=math.nan, reference_s=1.0), "no sound ratio to the reference side"),
        (process(sides={"reference": side(1.0)}), "a process gave no time of the optimized side"),
        (process(sides={"optimized": side(1.0)}), "a process gave no time of the reference side"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_unsound_measurement_is_unmeasured(bad: Measurement, says: str, place: int) -> None:
    run = [*runs(count=2)]
    run.insert(place, bad)
    found = verdict(judge(run), Status.UNMEASURED)
    # The first process is the one that the others are compared with.
    assert says in found.message or (place == 0 and "disagree on" in says and "disagree on" in found.message)
    assert found.moved is None


@pytest.mark.parametrize("seconds", [0.0, -1e-6, math.inf, math.nan])
@pytest.mark.parametrize("name", ["optimized", "reference"])
def test_time_that_is_not_positive_and_finite_is_unmeasured(name: str, seconds: float) -> None:
    for broken in (side(seconds), replace(side(1.0), blocks_s=(1.0, seconds)), replace(side(1.0), blocks_s=())):
        m = process()
        run = [*runs(count=2), replace(m, sides={**m.sides, name: broken})]
        assert f"no time of the {name} side" in verdict(judge(run), Status.UNMEASURED).message
        assert f"no time of the {name} side" in verdict(stored(run), Status.UNMEASURED).message


def test_largest_allowed_ratio_is_sound() -> None:
    for ratio in (20.0, -20.0):
        verdict(judge([process(ratio=ratio)]), Status.PASS)
        opened(judge([process(ratio)]))
        beyond = math.copysign(20.1, ratio)
        for unsound in (process(ratio=beyond), process(beyond)):
            assert "no sound ratio" in verdict(judge([unsound]), Status.UNMEASURED).message


def test_stored_figures_need_the_reference_in_every_process() -> None:
    run = [*kept(count=2), alone(process())]
    assert "no sound ratio to the reference side" in verdict(judge(run, stored="no git"), Status.UNMEASURED).message
    gone = [*kept(count=2), replace(kept(count=1)[0], sides={"optimized": side(1e-4)})]
    assert "no time of the reference side" in verdict(judge(gone, stored="no git"), Status.UNMEASURED).message


@pytest.mark.parametrize(
    "fields", [{"clock": "wall"}, {"sizes": {"n": 1}}, {"direction": "both"}, {"dtype": "float16"}]
)
def test_changed_workload_has_no_baseline(fields: Mapping[str, Any]) -> None:
    found = verdict(judge(runs(**fields)), Status.NO_BASELINE)
    assert f": changed since it was accepted: {next(iter(fields))} " in found.message
    assert found.message.endswith("; run `perfsuite accept` for it")
    verdict(judge(runs(**fields), entry=None), Status.PASS)


def test_baseline_of_another_device_is_wrong_machine() -> None:
    found = verdict(judge(runs(device="nvidia-a100")), Status.WRONG_MACHINE)
    assert "device was 'nvidia-h200', now 'nvidia-a100'" in found.message


def test_invalid_times_of_control_kernels_are_ignored() -> None:
    for seconds in (0.0, -1.0, math.nan):
        run = [process(o, ratio=TRUTH - 0.05, anchors={"copy": seconds}) for o in OFFSETS]
        verdict(judge(run, entry=accepted(anchors=STILL)), Status.PASS)


# --- promises without a baseline ------------------------------------------------------------------------------------


def alone_with(run: Sequence[Measurement], selected: int = 1, **promised: Any) -> Verdict:
    found = promises_only({ID: tuple(run)}, {ID: PromiseRecord(**promised)}, selected=selected)
    assert list(found) == [ID]
    return found[ID]


def test_promises_only_decides_from_one_process() -> None:
    run = [measurement()]
    found = verdict(alone_with(run, speedup=15.0, host_syncs=0), Status.PASS)
    assert found.message.startswith(f"PASS {ID}: 20× as fast as the reference (95% interval ")
    assert re.search(r": 20× as fast as the reference \(95% interval [\d.]+ to [\d.]+\)$", found.message)
    assert (found.processes, found.compared, found.margin, found.slowdown) == (1, "", None, None)
    verdict(alone_with(run), Status.PASS)
    verdict(alone_with(run, speedup=19.99), Status.NOISY)
    verdict(alone_with(run, speedup=20.01), Status.BELOW_FLOOR)
    found = verdict(alone_with(run, speedup=25.0), Status.BELOW_FLOOR)
    assert re.search(r"20× as fast as the reference \(95% interval [\d.]+ to [\d.]+\); promised 25×$", found.message)
    found = verdict(alone_with(run, launches=0), Status.BELOW_FLOOR)
    assert "kernel launches 1 (promised: at most 0)" in found.message
    assert (found.moved, found.speedup) == ("optimized", pytest.approx(20.0))


@pytest.mark.parametrize("selected", [1, 1000])
def test_promises_only_shows_a_promise_at_beta_in_one_stage(selected: int) -> None:
    run = kept(count=5)
    prior = fit_prior([[[m.log_ratios["reference"][0] for m in run]]])
    found = estimates.speedup_of(subject(run, entry=None), prior, 1, stages=1)
    assert found is not None
    least = found.now.lower(1 - 0.03)
    for promise, status in ((math.exp(least) * 0.9999, Status.PASS), (math.exp(least) * 1.0001, Status.NOISY)):
        verdict(alone_with(run, selected=selected, speedup=promise), status)


def test_promises_only_fits_the_noise_to_all_workloads() -> None:
    def crowd_of(scale: float) -> dict[str, tuple[Measurement, ...]]:
        return {
            workload_id(i): tuple(replace(m, id=workload_id(i)) for m in kept(count=3, scale=scale))
            for i in range(1, 12)
        }

    one = {ID: (measurement(),)}
    promise = {ID: PromiseRecord(speedup=19.0)}
    verdict(promises_only({**one, **crowd_of(1.0)}, promise, selected=12)[ID], Status.PASS)
    verdict(promises_only({**one, **crowd_of(30.0)}, promise, selected=12)[ID], Status.NOISY)
    # An unsound measurement is excluded from the noise.
    broken = {k: (*r, measurement(k, ratio=math.nan)) for k, r in crowd_of(30.0).items()}
    answers = promises_only(
        {**one, **crowd_of(1.0), **{k + "x": r for k, r in broken.items()}, "none": ()}, promise, selected=99
    )
    verdict(answers[ID], Status.PASS)
    assert verdict(answers["none"], Status.UNMEASURED).message.endswith("nothing was measured")
    assert sum(a.status is Status.UNMEASURED for a in answers.values()) == 12


def test_promises_only_needs_sound_measurements() -> None:
    assert "no sound ratio to the reference" in verdict(alone_with([alone(process())]), Status.UNMEASURED).message
    assert (
        "disagree on clock"
        in verdict(alone_with([measurement(), measurement(clock="wall")]), Status.UNMEASURED).message
    )
    uncounted = [counting(measurement(), launches=None)]
    verdict(alone_with(uncounted, launches=1), Status.UNMEASURED)
    cpu = [replace(m, device="cpu") for m in uncounted]
    assert verdict(alone_with(cpu, launches=1), Status.PASS).message.endswith(
        "); kernel launches promised, but not countable on a CPU"
    )


def test_promises_only_doubles_the_error_of_few_samples() -> None:
    bound = speed_of([measurement()], None, entry=None).now
    assert bound.se > 0
    slow, quick = alone_with([few(measurement())], speedup=15.0), alone_with([measurement()], speedup=15.0)
    assert slow.speedup_low is not None
    assert quick.speedup_low is not None
    assert math.log(20 / slow.speedup_low) == pytest.approx(2 * math.log(20 / quick.speedup_low))


# --- random measurements --------------------------------------------------------------------------------------------


def odd(rng: random.Random) -> Measurement:
    """Return a process with random values, including those of damaged measurements, of the right types."""

    def blocks(centre: float) -> tuple[float, ...]:
        centre += rng.choice([0.0, 0.005, 0.01, -0.02, 0.3, -19.0, 19.0]) * rng.random()
        return tuple(centre + rng.gauss(0, spread) for _ in range(rng.choice([1, 3, 8, 16])))

    def record(base: float) -> SideRecord:
        seconds = rng.choice([base * math.exp(rng.gauss(0, spread)) for _ in range(50)] + [0.0, math.nan, math.inf])
        counts = {"peak_bytes": (None, 1024, 10**7), "host_syncs": (None, 0, 1), "launches": (None, 1, 2)}
        return replace(side(seconds), **{name: rng.choice(values) for name, values in counts.items()})

    spread = rng.choice([0.0, 1e-9, 1e-4, 1e-3, 1e-2, 0.1])
    ratios = {"accepted": blocks(0.0), "reference": blocks(TRUTH / 3)}
    sides = {"optimized": record(1e-4), "reference": record(2e-3), "accepted": record(1e-4)}
    missing = rng.choice([(), (), (), ("reference",), ("reference",), ("accepted",), ("optimized",)])
    return measurement(
        log_ratios={k: v for k, v in ratios.items() if k not in missing or rng.random() < 0.05},
        sides={k: v for k, v in sides.items() if k not in missing},
        anchors={k: v * rng.choice([1.0, 1.0, 1.1, 0.0]) for k, v in STILL.items() if rng.random() < 0.8},
        few=("reference",) if rng.random() < 0.4 else (),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_measurements_end_in_a_verdict_within_24_processes(seed: int) -> None:
    rng = random.Random(seed)
    entries = [None, ENTRY, accepted(5.0, anchors=STILL), entry([few(m) for m in runs(count=3)]), entry(kept(count=2))]
    found: Counter[Status] = Counter()
    for _ in range(60):
        pool = [odd(rng) for _ in range(rng.choice([1, 1, 3]))]
        s = subject(
            (),
            entry=rng.choice(entries),
            promises=PromiseRecord(
                speedup=rng.choice([None, 0.5, 2.7, 19.9, math.inf]),
                launches=rng.choice([None, 1, 2]),
                peak_bytes=rng.choice([None, None, 2048]),
                throughput=rng.choice([{}, {}, {"nvidia-h200": 1e4}, {"nvidia-h200": 1e6}, {"nvidia-h100": 1e9}]),
            ),
            margin=rng.choice([None, None, 0.001, 0.05, 0.99]),
            stored=rng.choice(["", "", "no git"]),
            sampled=rng.random() < 0.3,
            same_code=rng.random() < 0.3,
        )
        answer: Verdict | Undecided = Undecided(processes=1, reason="")
        while isinstance(answer, Undecided):
            assert len(s.runs) < 24
            s = replace(s, runs=(*s.runs, rng.choice(pool)))
            answer = analyse([s], SUITE, selected=rng.choice([1, 70, 10**6]))[ID]
        found[answer.status] += 1
        assert answer.message
        if answer.status.green:
            assert answer.margin is not None
            assert answer.slowdown is not None
            assert answer.slowdown < answer.margin
            assert s.promises.speedup is None or (answer.speedup or 0.0) >= s.promises.speedup
        promises_only({ID: s.runs}, {ID: s.promises}, selected=1)
    assert len(found) >= 4


def test_damaged_measurement_is_never_green() -> None:
    rng = np.random.default_rng(4)
    damages: list[Callable[[Measurement], Measurement]] = [
        lambda m: replace(m, log_ratios={}),
        lambda m: replace(m, log_ratios={"accepted": (math.nan,) * 8}),
        lambda m: replace(m, sides={}),
        lambda m: replace(m, id="x"),
        lambda m: counting(m, peak_bytes=10**9),
        lambda m: replace(m, dtype="float16"),
    ]
    for damage in damages:
        run = list(runs(count=3))
        index = int(rng.integers(3))
        run[index] = damage(run[index])
        answer = judge(run, promises=PromiseRecord(peak_bytes=2048))
        assert isinstance(answer, Verdict)
        assert not answer.status.green


# --- further cases --------------------------------------------------------------------------------------------------


def test_promise_missed_because_of_slower_code_is_not_blamed_on_the_device() -> None:
    """It is slower than the interleaved accepted code, within its margin, and therefore misses its promise."""
    slower = tuple(
        process(0.045 + shift, ratio=TRUTH - 0.045 - shift, optimized_s=1e-4 * math.exp(0.045 + shift))
        for shift in 6 * (0.0, 0.001)
    )
    answer = verdict(judge(slower, promises=PromiseRecord(speedup=19.5), margin=0.1), Status.BELOW_FLOOR)
    assert answer.moved == "optimized"
    assert "slower than the accepted one beside it" in answer.message


def test_processes_beyond_12_do_not_change_the_slowdown() -> None:
    run = runs(count=12)
    later = tuple(replace(m, log_ratios={**m.log_ratios, "accepted": (-1.0,) * 8}) for m in runs(count=5))
    assert verdict(judge(run), Status.PASS).slowdown == verdict(judge([*run, *later]), Status.PASS).slowdown


def test_noise_factor_uses_blocks_if_few_workloads_have_changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "inflation_of_few", lambda blocks: 7.0)
    subjects = [subject(runs(count=2), same_code=n > 5) for n in range(14)]
    expected = {ID: NOISE.process}
    assert estimates.noise_factor(subjects, expected) == 7.0
    assert estimates.noise_factor([replace(s, same_code=False) for s in subjects], expected) < 2.0


def test_paired_noise_of_a_clock_with_too_few_workloads_is_that_of_all() -> None:
    def workloads(clock: str, number: int, scale: float) -> list[Entry]:
        made = []
        for n in range(number):
            key = workload_id(1000 * (clock == "wall") + n)
            made.append(entry([[replace(m, id=key, clock=clock) for m in runs(count=5, scale=scale)]]))
        return made

    device, wall = workloads("device", 8, 20.0), workloads("wall", 5, 1.0)
    lone = wall[0].sessions[0]
    without = replace(
        lone, processes=tuple(replace(p, log_ratios={"reference": p.log_ratios["reference"]}) for p in lone.processes)
    )
    wall[0] = replace(wall[0], sessions=(without,))
    suite = suite_noise({e.id: e for e in [*device, *wall]})
    assert suite.of("wall").paired == suite.paired
    assert suite.of("wall").ratio != suite.ratio
