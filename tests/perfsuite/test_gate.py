"""The gate's rule: each status where it is due, and simulated suites at the rates that the rule promises."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from builders import Suite, counting, entry, few, measurement, side, workload_id
from scipy import stats

from perfsuite import gate
from perfsuite.baseline import Entry
from perfsuite.gate import (
    Open,
    compare_look,
    first_look,
    margin,
    missing,
    promises_look,
    second_look,
    stored_look,
    suite_prior,
    too_noisy,
)
from perfsuite.records import Limit, Measurement, PromiseRecord, Status, Verdict
from perfsuite.statistics import DEFAULT_NOISE, IMPORT_BIAS, Estimate, Noise, Variance, fit_prior, noise_of

ID = workload_id(0)
TRUTH = math.log(20.0)
OFFSETS = (-0.001, 0.0, 0.001)
"""Process shifts: a workload of middling noise."""
NOISE = Noise(process=Variance(value=0.001**2, dof=20.0), session=Variance(value=0.001**2, dof=20.0))


def processes(slower: float = 0.0, scale: float = 1.0, count: int = 3, **fields: Any) -> list[Measurement]:
    """Processes whose optimized side is slower by `slower` (log), and whose spread is `scale` times the accepted."""
    shifts = [OFFSETS[i % 3] * scale for i in range(count)]
    return [measurement(ratio=TRUTH - slower + s, optimized_s=1e-4 * math.exp(slower), **fields) for s in shifts]


def again(
    slower: float = 0.0, scale: float = 1.0, ratio: float = TRUTH, count: int = 12, **fields: Any
) -> list[Measurement]:
    """The second look's processes: the current side slower than the accepted one by `slower` (log)."""
    shifts = [OFFSETS[i % 3] * scale for i in range(count)]
    return [measurement(accepted=-slower + s, ratio=ratio + s, **fields) for s in shifts]


def accepted(scale: float = 1.0, **fields: Any) -> Entry:
    return entry([processes(scale=scale, **fields) for _ in range(3)])


def look1(
    runs: Sequence[Measurement],
    *,
    made: Entry | None = None,
    promise: PromiseRecord | None = None,
    selected: int = 40,
    prior: Noise = NOISE,
) -> Verdict | Open:
    answers = first_look(
        {ID: made or accepted()}, {ID: runs}, {ID: promise or PromiseRecord()}, selected=selected, prior=prior
    )
    assert list(answers) == [ID]
    return answers[ID]


def opened(runs: Sequence[Measurement] | None = None, **fields: Any) -> Open:
    answer = look1(processes(0.01) if runs is None else runs, **fields)
    assert isinstance(answer, Open)
    assert answer.reason
    return answer


def verdict(answer: Verdict | Open, status: Status) -> Verdict:
    assert isinstance(answer, Verdict)
    assert answer.status is status, answer.message
    assert answer.message.startswith(f"{status} {answer.id}: ")
    assert "\n" not in answer.message
    return answer


def look2(item: Open, runs: Sequence[Measurement]) -> Verdict:
    return second_look({ID: item}, {ID: runs})[ID]


# --- the first look ------------------------------------------------------------------------------------------------


def test_unchanged_passes_with_its_figures() -> None:
    found = verdict(look1(processes()), Status.PASS)
    assert found.speedup == pytest.approx(20.0, rel=1e-3)
    assert found.accepted_speedup == pytest.approx(20.0, rel=1e-3)
    assert found.margin == 0.01
    assert found.slowdown == pytest.approx(0.0, abs=1e-5)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0 < found.high < 0.01
    assert (found.look, found.processes) == (1, 3)
    assert "a slowdown of 1.0% is excluded" in found.message


@pytest.mark.parametrize("slower", [0.01, 0.03, 0.5, 3.0])
def test_the_first_look_never_calls_a_regression(slower: float) -> None:
    answer = opened(processes(slower))
    assert answer.slowdown == pytest.approx(math.expm1(slower), rel=0.01)
    assert "1.0% is not excluded" in answer.reason


def test_faster_is_improved_and_asks_to_be_accepted() -> None:
    # The first look cannot tell a faster side from a reference that a neighbour slows.
    assert "seems faster" in opened(processes(-0.05)).reason
    found = verdict(look2(opened(processes(-0.05)), again(-0.05)), Status.IMPROVED)
    assert "4.9% faster" in found.message
    assert "perfsuite accept" in found.message
    # Faster by less than the margin is not news.
    verdict(look1(processes(-0.007)), Status.PASS)


@pytest.mark.parametrize(
    ("reference", "passes"), [(0.0, True), (0.0095, True), (-0.0095, True), (0.0105, False), (-0.0105, False)]
)
def test_a_reference_in_another_state_is_left_open(reference: float, passes: bool) -> None:
    """A neighbour that slows the reference alone hides as much of the optimized side's slowdown."""
    seconds = 20e-4 * math.exp(reference)
    answer = look1([dataclasses.replace(m, sides={**m.sides, "reference": side(seconds)}) for m in processes()])
    if passes:
        verdict(answer, Status.PASS)
    else:
        assert isinstance(answer, Open)
        assert "may hide a change" in answer.reason


def test_a_promise_that_held_when_accepted_is_not_broken_by_the_machine() -> None:
    """Only where the device itself is not what it was: a reference made faster breaks the promise."""

    def found(anchors: dict[str, float], slower: float = 0.0) -> Verdict:
        def late(m: Measurement) -> Measurement:
            sides = {"optimized": side(1.1e-4), "reference": side(2e-3)}
            return dataclasses.replace(m, sides=sides, anchors=anchors)

        item = opened([late(m) for m in processes(0.1)], made=at_seconds(0.0, 0.0), promise=PromiseRecord(speedup=19.5))
        assert "missed, which it was not when accepted" in item.reason
        return look2(item, [late(m) for m in again(slower, ratio=TRUTH - 0.1)])

    noisy = verdict(found({**STILL, "copy": 1.1e-4}), Status.NOISY)
    assert "short of the promised 19.5×" in noisy.message
    assert noisy.moved == "device"
    assert verdict(found(STILL), Status.BELOW_FLOOR).moved == "software"
    assert verdict(found({**STILL, "copy": 1.1e-4}, slower=0.1), Status.BELOW_FLOOR).moved is None


def test_a_promise_of_just_what_was_accepted_held() -> None:
    made = accepted()
    for factor, held in ((1.0, True), (1.0001, False)):
        promise = gate._speedup(processes(), NOISE, PromiseRecord(speedup=factor * made.speedup()))
        assert gate._held_when_accepted(promise, made) is held
    assert not gate._held_when_accepted(gate._speedup(processes(), NOISE, PromiseRecord()), made)


def test_a_spread_beyond_the_baseline_s_is_left_open() -> None:
    assert "spread far beyond" in opened(processes(scale=30.0)).reason
    assert opened(processes(scale=30.0)).spread


def test_a_suite_that_spreads_passes_nothing() -> None:
    keys = [workload_id(i) for i in range(40)]
    runs = {k: [dataclasses.replace(m, id=k) for m in processes(scale=2.7)] for k in keys}
    entries = {k: dataclasses.replace(accepted(), id=k) for k in keys}
    one = first_look(entries, {keys[0]: runs[keys[0]]}, {keys[0]: PromiseRecord()}, selected=40, prior=NOISE)
    verdict(one[keys[0]], Status.PASS)
    every = first_look(entries, runs, dict.fromkeys(keys, PromiseRecord()), selected=40, prior=NOISE)
    assert all(isinstance(a, Open) and a.spread for a in every.values())


def test_margin_grows_with_noise_in_steps_and_a_noisy_workload_is_named() -> None:
    quiet, loud = (margin(accepted(s), suite_prior({}), selected=40) for s in (0.5, 4.0))
    assert quiet == 0.01
    assert 0.01 < loud <= 0.02
    assert loud == round(loud, 3)
    assert margin(accepted(4.0), suite_prior({}), selected=400) > loud
    found = verdict(look1(processes(), made=accepted(15.0), prior=DEFAULT_NOISE), Status.NOISY)
    for words in ("too noisy", "2% is the most", "longer workload", "device clock"):
        assert words in found.message
    assert found.margin is not None
    assert found.margin > 0.02


# --- what cannot be judged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([], "nothing was measured"),
        (processes()[:2], "2 of 3 processes"),
        ([*processes()[:2], measurement(workload_id(1))], f"measurement of {workload_id(1)}"),
        ([*processes()[:2], measurement(clock="wall")], "disagree on clock"),
        ([*processes()[:2], measurement(sizes={"n": 1})], "disagree on sizes"),
        ([*processes()[:2], measurement(log_ratios={})], "no sound ratio to the reference"),
        ([*processes()[:2], measurement(log_ratios={"reference": ()})], "no sound ratio"),
        ([*processes()[:2], measurement(log_ratios={"reference": (math.nan,)})], "no sound ratio"),
        ([*processes()[:2], measurement(log_ratios={"reference": (math.inf,)})], "no sound ratio"),
        ([*processes()[:2], measurement(log_ratios={"reference": (800.0,)})], "no sound ratio"),
        ([*processes()[:2], measurement(sides={})], "no time of the optimized side"),
    ],
)
def test_a_measurement_that_is_not_whole_is_unmeasured(runs: Sequence[Measurement], says: str) -> None:
    assert says in verdict(look1(runs), Status.UNMEASURED).message


def test_a_workload_without_a_run_is_unmeasured_and_one_without_a_promise_is_judged() -> None:
    answers = first_look({ID: accepted()}, {}, {ID: PromiseRecord()}, selected=1)
    verdict(answers[ID], Status.UNMEASURED)
    answers = first_look({ID: accepted()}, {ID: processes()}, {}, selected=1, prior=NOISE)
    verdict(answers[ID], Status.PASS)
    assert first_look({}, {}, {}, selected=0) == {}


def test_no_entry_and_a_changed_workload_have_no_baseline() -> None:
    answers = first_look({}, {ID: processes()}, {ID: PromiseRecord()}, selected=1)
    assert "perfsuite accept" in verdict(answers[ID], Status.NO_BASELINE).message
    for fields in ({"clock": "wall"}, {"sizes": {"n": 1}}, {"direction": "both"}, {"dtype": "float16"}):
        found = verdict(look1(processes(**fields)), Status.NO_BASELINE)
        assert f"changed since it was accepted: {next(iter(fields))}" in found.message
    verdict(look1(processes(device="nvidia-a100")), Status.WRONG_MACHINE)


def test_a_family_smaller_than_its_members_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="selected=0"):
        look1(processes(), selected=0)


def test_renamed_and_removed_pairs_are_listed_when_the_selection_is_whole() -> None:
    entries = {workload_id(i): accepted() for i in (2, 0, 1)}
    lines = missing(entries, [workload_id(1)], whole=True)
    assert [line.partition(": ")[0] for line in lines] == [workload_id(0), workload_id(2)]
    assert all("perfsuite accept" in line for line in lines)
    assert missing(entries, [workload_id(1)], whole=False) == []
    assert missing(entries, entries, whole=True) == []


# --- promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "promised"), [("peak_bytes", 1000), ("host_syncs", 0), ("launches", 2)])
def test_a_count_above_its_promise_in_one_process_is_below_the_floor(name: str, promised: int) -> None:
    promise = PromiseRecord(**{name: promised})
    fine = [counting(m, **{name: promised}) for m in processes()]
    verdict(look1(fine, promise=promise), Status.PASS)
    found = verdict(look1([*fine[:2], counting(fine[2], **{name: promised + 1})], promise=promise), Status.BELOW_FLOOR)
    assert f"{name} {promised + 1} (promised {promised})" in found.message
    verdict(look1([counting(m, **{name: None}) for m in fine], promise=promise), Status.UNMEASURED)
    # Counted in one process is counted.
    verdict(look1([fine[0], *(counting(m, **{name: None}) for m in fine[1:])], promise=promise), Status.PASS)


def test_counts_are_not_asked_of_a_cpu() -> None:
    runs = [counting(m, launches=None, host_syncs=None) for m in processes(device="cpu")]
    promise = PromiseRecord(launches=1, host_syncs=0)
    found = verdict(look1(runs, made=accepted(device="cpu"), promise=promise), Status.PASS)
    assert "host_syncs, launches promised, but not countable on a CPU" in found.message


def test_a_promised_speedup_holds_breaks_or_waits() -> None:
    verdict(look1(processes(), promise=PromiseRecord(speedup=19.0)), Status.PASS)
    found = verdict(look1(processes(), promise=PromiseRecord(speedup=21.0)), Status.BELOW_FLOOR)
    assert "below the promised 21×" in found.message
    assert "20× when accepted" in found.message
    for speedup in (19.95, 20.05):
        item = opened(processes(), promise=PromiseRecord(speedup=speedup))
        assert "within the noise" in item.reason
    verdict(look1(processes(), promise=PromiseRecord(speedup=0.5)), Status.PASS)


def test_a_promise_within_the_noise_is_settled_by_the_estimate() -> None:
    above = opened(processes(), promise=PromiseRecord(speedup=19.98))
    assert "promise less" in verdict(look2(above, again()), Status.NOISY).message
    below = opened(processes(), promise=PromiseRecord(speedup=20.02))
    assert "within the noise, but above the estimate" in verdict(look2(below, again()), Status.BELOW_FLOOR).message


def test_an_estimate_of_exactly_the_promise_is_not_below_it() -> None:
    runs = [measurement(ratio=s, reference_s=1e-4) for s in (-0.001, 0.0, 0.001)]
    found = promises_look({ID: runs}, {ID: PromiseRecord(speedup=1.0)}, selected=1)[ID]
    assert found.speedup == 1.0
    assert "promise less" in verdict(found, Status.NOISY).message


def test_a_regression_that_also_breaks_the_promise_is_below_the_floor() -> None:
    item = opened(processes(0.02), promise=PromiseRecord(speedup=19.5))
    found = verdict(look2(item, again(0.1, ratio=TRUTH - 0.1)), Status.BELOW_FLOOR)
    assert found.slowdown == pytest.approx(math.expm1(0.1), rel=0.01)


def test_promises_by_themselves() -> None:
    promises = {ID: PromiseRecord(speedup=15.0, host_syncs=0)}
    verdict(promises_look({ID: processes()[:1]}, promises, selected=1)[ID], Status.PASS)
    promises = {ID: PromiseRecord(speedup=19.99)}
    verdict(promises_look({ID: processes()}, promises, selected=1)[ID], Status.NOISY)
    promises = {ID: PromiseRecord(speedup=25.0)}
    verdict(promises_look({ID: processes()}, promises, selected=1)[ID], Status.BELOW_FLOOR)
    promises = {ID: PromiseRecord(launches=0)}
    verdict(promises_look({ID: processes()}, promises, selected=1)[ID], Status.BELOW_FLOOR)
    verdict(promises_look({}, promises, selected=1)[ID], Status.UNMEASURED)


def test_too_noisy_workloads_are_known_as_soon_as_they_are_accepted() -> None:
    def noisy(scale: float, **fields: Any) -> Entry:
        runs = [measurement(ratio=TRUTH + scale * s, accepted=scale * s, **fields) for s in OFFSETS]
        return entry([runs, runs])

    calm, loud = workload_id(1), workload_id(2)
    entries = {calm: noisy(1.0), loud: noisy(30.0)}
    found = too_noisy(entries, [calm, loud, "unknown"])
    assert len(found) == 1
    assert found[0].startswith(f"{loud}: too noisy to be gated: only a slowdown of ")
    assert found[0].endswith("or measure it longer (`perfsuite accept --more`)")
    assert too_noisy(entries, [calm]) == []
    # Judged by its own seconds, without the reference.
    assert too_noisy({loud: noisy(30.0, few=("reference",))}, [loud]) == []


# --- the second look -----------------------------------------------------------------------------------------------


def test_a_slower_optimized_side_is_regressed() -> None:
    found = verdict(look2(opened(processes(0.03)), again(math.log(1.031))), Status.REGRESSED)
    start = f"REGRESSED {ID}: the optimized side is 3.1% slower than the accepted revision 1a2b3c4 (95% interval "
    assert found.message.startswith(start)
    assert found.message.endswith("margin 1.0%)")
    assert found.moved == "optimized"
    assert found.slowdown == pytest.approx(0.031, rel=1e-3)
    assert (found.look, found.processes) == (2, 15)


def test_what_a_verdict_of_the_second_look_says() -> None:
    """A green one has the speedup; one that is undecided has not, for it would look like a result."""
    item = opened(promise=PromiseRecord(launches=1))
    runs = [counting(m, launches=1) for m in again()]
    green = verdict(look2(item, runs), Status.PASS)
    assert f"{ID}: 19.96× (95% interval " in green.message
    assert "20× when accepted; a slowdown of 1.0% is excluded" in green.message
    noise = dataclasses.replace(NOISE, process=Variance(value=0.003**2, dof=8.0))
    unclear = dataclasses.replace(opened(), noise=noise, paired=noise, selected=10**6)
    assert "when accepted" not in verdict(look2(unclear, again(0.008, scale=5.0)), Status.NOISY).message


def test_a_slowdown_below_half_the_margin_is_none_however_certain() -> None:
    certain = [measurement(accepted=-0.0045) for _ in range(12)]
    verdict(look2(opened(), certain), Status.PASS)


def test_what_is_neither_shown_nor_excluded_is_noisy() -> None:
    noise = dataclasses.replace(NOISE, process=Variance(value=0.003**2, dof=8.0))
    item = dataclasses.replace(opened(), noise=noise, paired=noise, selected=10**6)
    found = verdict(look2(item, again(0.008, scale=5.0)), Status.NOISY)
    assert "neither a slowdown of 1.0% nor its absence is shown; measure again" in found.message


def test_a_spread_in_the_second_look_is_judged_by_itself() -> None:
    found = verdict(look2(opened(), again(0.02, scale=30.0)), Status.NOISY)
    assert "a neighbour or throttling" in found.message
    # As much beyond the spread as twelve values must be, at this level.
    values = [0.2 + 30.0 * s for s in OFFSETS * 4]
    t = np.mean(values) / math.sqrt(np.var(values, ddof=1) / 12 + IMPORT_BIAS**2)
    assert (stats.t.sf(t, 11) < 0.002 / 40) == (t > 5.0)
    found = verdict(look2(opened(), again(0.2, scale=30.0)), Status.REGRESSED if t > 5.6 else Status.NOISY)
    verdict(look2(opened(), again(0.2)), Status.REGRESSED)
    verdict(look2(opened(), again(scale=5.0)), Status.PASS)


def test_a_spread_in_the_first_look_lends_the_second_no_variance() -> None:
    item = opened([*processes(scale=30.0)[:2], measurement(ratio=TRUTH + 0.2)])
    assert item.spread
    verdict(look2(item, again()), Status.PASS)
    verdict(look2(item, again(0.02)), Status.REGRESSED)


def test_a_faster_reference_is_not_the_optimized_side_s_fault() -> None:
    runs = [measurement(ratio=TRUTH - 0.05, optimized_s=1e-4) for _ in range(3)]
    item = opened(runs)
    later = [measurement(ratio=TRUTH - 0.05, optimized_s=1e-4, accepted=s) for s in OFFSETS * 4]
    found = verdict(look2(item, later), Status.PASS)
    assert found.moved == "reference"
    assert "its ratio to the reference is 5.1% lower than when accepted" in found.message
    assert "the reference is 4.9% faster" in found.message


def test_a_device_that_slowed_only_the_optimized_kind_of_work_is_called_the_device() -> None:
    later = [measurement(ratio=TRUTH - 0.05, optimized_s=1.05e-4, accepted=s, reference_s=20e-4) for s in OFFSETS * 4]
    item = opened([measurement(ratio=TRUTH - 0.05, optimized_s=1.05e-4, reference_s=20e-4) for _ in range(3)])
    found = verdict(look2(item, later), Status.PASS)
    assert found.moved == "device"


def test_a_moved_ratio_is_told_of_a_green_verdict_and_a_reference_sampled_in_full() -> None:
    def look(scale: float, change: Callable[[Measurement], Measurement]) -> Verdict:
        made = entry([[change(m) for m in processes()] for _ in range(3)])
        item = opened([change(measurement(ratio=TRUTH - 0.05 + s)) for s in OFFSETS], made=made)
        return look2(item, [change(measurement(ratio=TRUTH - 0.05, accepted=scale * s)) for s in OFFSETS * 4])

    assert verdict(look(1.0, _same), Status.PASS).moved == "reference"
    assert verdict(look(30.0, _same), Status.NOISY).moved is None
    assert verdict(look(1.0, few), Status.PASS).moved is None


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([], "nothing was measured"),
        (again()[:11], "11 of 12 processes"),
        (processes(count=12), "no sound ratio to the accepted side"),
        ([*again()[:11], measurement(accepted=math.nan)], "no sound ratio to the accepted"),
    ],
)
def test_a_second_look_that_is_not_whole_is_unmeasured(runs: Sequence[Measurement], says: str) -> None:
    assert says in verdict(look2(opened(), runs), Status.UNMEASURED).message


def test_counts_of_the_second_look_are_held_too() -> None:
    item = opened(promise=PromiseRecord(host_syncs=0))
    runs = again()
    verdict(look2(item, runs), Status.PASS)
    verdict(look2(item, [*runs[:11], counting(runs[11], host_syncs=1)]), Status.BELOW_FLOOR)


def test_a_changed_size_in_the_second_look_is_no_baseline() -> None:
    verdict(look2(opened(), again(sizes={"n": 1})), Status.NO_BASELINE)


# --- without the accepted revision ---------------------------------------------------------------------------------


def stored(item: Open, runs: Sequence[Measurement]) -> Verdict:
    found = stored_look({ID: item}, {ID: runs}, reason="shallow clone:\nfetch it")[ID]
    assert found.message.endswith("for the accepted revision was not loaded: shallow clone: fetch it")
    return found


def test_stored_look() -> None:
    verdict(stored(opened(), processes(count=12)), Status.PASS)
    found = verdict(stored(opened(), processes(0.05, count=12)), Status.REGRESSED)
    assert "5.1% slower than when accepted, relative to the reference" in found.message
    assert found.moved == "optimized"
    assert (found.look, found.processes) == (2, 12)
    assert found.margin is not None
    assert found.margin >= 0.01
    answers = stored_look({ID: opened()}, {ID: processes(count=11)}, reason="no git")
    verdict(answers[ID], Status.UNMEASURED)
    verdict(stored(opened(), processes(0.1, scale=30.0, count=12)), Status.NOISY)


def test_stored_look_tells_a_faster_reference() -> None:
    runs = [measurement(ratio=TRUTH - 0.05 + s, optimized_s=1e-4) for s in OFFSETS * 4]
    found = verdict(stored(opened(), runs), Status.NOISY)
    assert found.moved == "reference"
    assert "its ratio to the reference is 5.1% lower than when accepted, but not for the optimized side alone" in (
        found.message
    )


@pytest.mark.parametrize(("moved", "status"), [(0.019, Status.PASS), (-0.019, Status.PASS), (0.03, Status.NOISY)])
def test_stored_look_passes_nothing_where_the_machine_is_another(moved: float, status: Status) -> None:
    runs = [
        measurement(ratio=TRUTH + s, optimized_s=1e-4 * math.exp(moved), reference_s=20e-4 * math.exp(moved))
        for s in OFFSETS * 4
    ]
    assert ("may hide a change" in verdict(stored(opened(), runs), status).message) == (status is Status.NOISY)


def test_stored_look_has_a_wider_margin_and_a_limit_to_it() -> None:
    one = entry(processes(scale=2.0))
    calm = opened(processes(0.01), made=one, prior=DEFAULT_NOISE)
    found = verdict(stored(calm, processes(0.0, count=12)), Status.PASS)
    assert found.margin is not None
    assert 0.02 < found.margin <= 0.04
    loud = dataclasses.replace(calm, noise=Noise(process=NOISE.process, session=Variance(value=0.006**2, dof=6.0)))
    assert "accept more sessions" in verdict(stored(loud, processes(0.0, count=12)), Status.NOISY).message


# --- a reference sampled few times ---------------------------------------------------------------------------------


def test_few_is_left_to_the_second_look_and_judged_by_the_accepted_side() -> None:
    made = entry([[few(m) for m in processes()] for _ in range(3)])
    item = opened([few(m) for m in processes()], made=made)
    assert "sampled few times" in item.reason
    alone = [dataclasses.replace(m, log_ratios={"accepted": m.log_ratios["accepted"]}) for m in again()]
    verdict(look2(item, alone), Status.PASS)
    slow = [dataclasses.replace(m, log_ratios={"accepted": m.log_ratios["accepted"]}) for m in again(0.02)]
    verdict(look2(item, slow), Status.REGRESSED)


def test_few_must_hold_its_promise_with_twice_the_error() -> None:
    runs, made = processes(), accepted()
    promise = PromiseRecord(speedup=19.9)
    full = verdict(look1(runs, made=made, promise=promise, selected=1), Status.PASS)
    item = opened([few(m) for m in runs], made=made, promise=promise, selected=1)
    found = look2(item, again())
    verdict(found, Status.NOISY)
    assert full.processes < found.processes


def test_few_without_the_accepted_revision_is_held_by_its_own_seconds() -> None:
    made = entry([[few(m) for m in processes()] for _ in range(3)])
    item = opened([few(m) for m in processes()], made=made)
    verdict(stored(item, [few(m) for m in processes(0.03, count=12)]), Status.PASS)
    found = verdict(stored(item, [few(m) for m in processes(0.3, count=12)]), Status.REGRESSED)
    assert "by its own seconds" in found.message
    assert found.margin == 0.10


# --- two revisions without a baseline ------------------------------------------------------------------------------


def test_compare() -> None:
    keys = [workload_id(i) for i in range(8)]
    runs = {k: [dataclasses.replace(m, id=k) for m in again()] for k in keys}
    runs[keys[1]] = [dataclasses.replace(m, id=keys[1]) for m in again(0.03)]
    runs[keys[2]] = [dataclasses.replace(m, id=keys[2]) for m in again(-0.03)]
    runs[keys[3]] = runs[keys[3]][:3]
    runs[keys[4]] = [dataclasses.replace(m, id=keys[4]) for m in again(scale=20.0)]
    answers = compare_look(runs, revision="abcdef0123")
    assert [answers[k].status for k in keys[:5]] == [
        Status.PASS,
        Status.REGRESSED,
        Status.IMPROVED,
        Status.UNMEASURED,
        Status.NOISY,
    ]
    assert "3.0% slower than the revision abcdef0 " in answers[keys[1]].message
    assert all(v.message.startswith(f"{v.status} {v.id}: ") for v in answers.values())
    with pytest.raises(ValueError, match="selected=3"):
        compare_look(runs, revision="abc", selected=3)


def test_no_status_but_those_of_speed_is_green_by_accident() -> None:
    """Random damage to a run never turns it green where the sound run is red."""
    rng = np.random.default_rng(4)
    damages: list[Callable[[Measurement], Measurement]] = [
        lambda m: dataclasses.replace(m, log_ratios={}),
        lambda m: dataclasses.replace(m, log_ratios={"reference": (math.nan,) * 8}),
        lambda m: dataclasses.replace(m, sides={}),
        lambda m: dataclasses.replace(m, id="x"),
        lambda m: counting(m, peak_bytes=10**9),
        lambda m: dataclasses.replace(m, dtype="float16"),
    ]
    for _ in range(100):
        runs = processes(0.0)
        index = rng.integers(3)
        runs[index] = damages[rng.integers(len(damages))](runs[index])
        answer = look1(runs, promise=PromiseRecord(peak_bytes=2048))
        assert isinstance(answer, Verdict)
        assert not answer.status.green


# --- exact figures -------------------------------------------------------------------------------------------------


def test_the_limits_are_the_documented_ones() -> None:
    assert (gate.POWER, gate.STORED_MARGIN_MAX, gate.MARGIN_STEP, gate.FEW_FACTOR) == (0.95, 0.04, 0.001, 2.0)
    assert (gate.OWN_SECONDS_SD, gate.OWN_SECONDS_MARGIN, gate.MOVED_DEVICE, gate.RATIO_MAX) == (0.01, 0.10, 0.02, 20.0)
    assert gate.COUNTS == ("peak_bytes", "host_syncs", "launches")


@pytest.mark.parametrize("record", [Open, gate._Promise, gate._Paired])
def test_records_are_frozen_named_and_slotted(record: type) -> None:
    fields = dataclasses.fields(record)
    made = record(**{f.name: 1.0 for f in fields})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, fields[0].name, 2.0)
    assert all(f.kw_only for f in fields)
    assert not hasattr(made, "__dict__")


def test_stages_are_frozen_and_slotted() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gate.STAGES[0].processes = 2  # type: ignore[misc]
    assert not hasattr(gate.STAGES[0], "__dict__")


def resolvable(
    variance: float, dof: float, selected: int, steps: int = 1000, *, alpha: float = 0.005, least: float = 0.01
) -> float:
    """The margin of an estimate with this variance, by scipy's distributions, in so many steps of a whole."""
    needed = stats.t.isf(alpha / selected, dof) + stats.t.ppf(0.95, dof)
    return max(least, math.ceil(steps * math.expm1(needed * math.sqrt(variance)) - 1e-6) / steps)


FINE = 10**6
"""Steps of the margin in which a degree of freedom more or less shows."""


def pooled(sessions: Sequence[Sequence[float]], prior: Variance) -> Variance:
    """What is known of a process mean's variance after these sessions."""
    dof = prior.dof + sum(len(s) - 1 for s in sessions)
    squares = sum(float(np.sum((np.array(s) - np.mean(s)) ** 2)) for s in sessions)
    return Variance(value=(prior.dof * prior.value + squares) / dof, dof=dof)


def test_what_only_all_stages_find_has_the_largest_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(scale: float) -> float:
        return margin(accepted(scale), NOISE, selected=40)

    sizes = [size(scale) for scale in range(4, 40)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.02 < sizes[-1]
    # Six processes alone would be too few for all of these.
    assert sizes.count(0.02) >= 6
    # Beyond it is what the last stage finds at its own level, which no other has here.
    monkeypatch.setattr(gate, "STAGES", (*gate.STAGES[:2], dataclasses.replace(gate.STAGES[2], alpha=1e-4)))
    for scale in (28.0, 39.0):
        known = pooled(accepted(scale).process_means(), NOISE.process)
        total, dof = known.value / 12 + IMPORT_BIAS**2, known.dof + 2 + 11
        worth = (known.value / 12) ** 2 / dof
        assert size(scale) == pytest.approx(resolvable(total, total**2 / worth, 40, alpha=1e-4))
        assert size(scale) > 0.02


@pytest.mark.parametrize("selected", [1, 40, 1000])
@pytest.mark.parametrize("scale", [0.5, 3.0, 5.0])
def test_the_margin_is_what_the_second_look_resolves(
    scale: float, selected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MARGIN_STEP", 1 / FINE)
    monkeypatch.setattr(gate, "MARGIN_MIN", 0.0)

    def resolved(known: Variance, gained: int) -> float:
        worth = (known.value / 6) ** 2 / (known.dof + gained)
        total = known.value / 6 + IMPORT_BIAS**2
        return resolvable(total, total**2 / worth, selected, FINE, alpha=0.004, least=0.0)

    made = accepted(scale)
    known = pooled(made.process_means(), NOISE.process)
    assert margin(made, NOISE, selected=selected) == pytest.approx(resolved(known, 7), abs=2e-6)
    # Measured at acceptance: its noise counts, and the first look's processes add nothing to it.
    twin = entry([[measurement(accepted=s * scale / 2, ratio=TRUTH + s * scale) for s in OFFSETS * 4]] * 2)
    assert margin(twin, NOISE, selected=selected) == pytest.approx(
        resolved(pooled(twin.process_means(), NOISE.process), 7), abs=2e-6
    )
    known = pooled(twin.process_means("accepted"), DEFAULT_NOISE.process)
    assert margin(twin, NOISE, selected=selected, twins=DEFAULT_NOISE) == pytest.approx(resolved(known, 5), abs=2e-6)


def test_the_noise_of_two_imports_is_that_measured_at_acceptance() -> None:
    def twin(number: int) -> Entry:
        made = entry([[measurement(accepted=s * (1 + number), ratio=TRUTH + 4 * s) for s in OFFSETS]] * 2)
        return dataclasses.replace(made, id=workload_id(number))

    assert gate.twin_prior({}) is None
    assert gate.twin_prior({ID: accepted()}) is None
    entries = {workload_id(i): twin(i) for i in range(10)}
    twins = gate.twin_prior({"other": accepted(), **entries})
    assert twins == fit_prior(e.process_means("accepted") for e in entries.values())
    item = first_look(entries, {ID: processes(0.01)}, {ID: PromiseRecord()}, selected=40, prior=NOISE)[ID]
    assert isinstance(item, Open)
    assert (item.twin, item.paired) == (True, noise_of(entries[ID].process_means("accepted"), twins))
    assert item.noise == noise_of(entries[ID].process_means(), NOISE)
    item = opened()
    assert (item.twin, item.paired) == (False, item.noise)


def test_the_stored_look_s_margin_has_the_session_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MARGIN_STEP", 1 / FINE)
    item = opened(processes(0.01, count=3), made=accepted(8.0))
    means = item.entry.process_means()
    process, session = pooled(means, NOISE.process), item.noise.session
    total_process, total_session = process.value * (1 / 9 + 1 / 12), session.value * (1 / 3 + 1)
    worth = total_process**2 / (process.dof + 11) + total_session**2 / session.dof
    total = total_process + total_session
    expected = resolvable(total, total**2 / worth, 40, FINE)
    assert expected > max(0.01, item.margin)
    assert gate._stored_margin(item, 12) == pytest.approx(expected, abs=2e-6)
    assert gate._stored_margin(dataclasses.replace(item, margin=0.5), 12) == 0.5


def test_the_first_look_s_figures() -> None:
    found = look1(processes(0.001), promise=PromiseRecord(speedup=15.0))
    assert isinstance(found, Verdict)
    known = pooled([*accepted().process_means(), list(OFFSETS)], NOISE.process)
    session = opened().noise.session
    # Relative to the mean of three sessions; the speedup has this session's shift and nothing else.
    for low, high, centre, sessions, shares, log in (
        (found.low, found.high, 0.001, 1 / 3 + 1, 1 / 9 + 1 / 3, math.log1p),
        (found.speedup_low, found.speedup_high, TRUTH - 0.001, 1.0, 1 / 3, math.log),
    ):
        parts = (shares * known.value, sessions * session.value)
        dof = sum(parts) ** 2 / (parts[0] ** 2 / known.dof + parts[1] ** 2 / session.dof)
        half = stats.t.ppf(0.975, dof) * math.sqrt(sum(parts))
        assert low is not None
        assert high is not None
        assert (log(low), log(high)) == (pytest.approx(centre - half, abs=2e-6), pytest.approx(centre + half, abs=2e-6))
    assert found.message == (
        f"PASS {ID}: {found.speedup:.4g}× (95% interval {found.speedup_low:.4g} to {found.speedup_high:.4g}) "
        "the reference, 20× when accepted; a slowdown of 1.0% is excluded"
    )


@pytest.mark.parametrize("log", [0.03, -0.03])
def test_what_is_said_of_a_speed(log: float) -> None:
    error = Estimate(value=log, se=0.001, dof=30.0)
    status, text = gate._speed(error, 0.01, 0.005 / 40, 0.02, "the accepted one")
    low, high = sorted(abs(100 * math.expm1(log + s * stats.t.ppf(0.975, 30) * 0.001)) for s in (-1, 1))
    word, change = ("slower", 3.0) if log > 0 else ("faster", 3.0)
    start = f"the optimized side is {change:.1f}% {word} than the accepted one "
    assert text.startswith(f"{start}(95% interval {low:.1f} to {high:.1f}%, margin 1.0%)")
    assert status is (Status.REGRESSED if log > 0 else Status.IMPROVED)


@pytest.mark.parametrize(
    ("change", "se", "status"),
    [
        (0.00501, 1e-5, Status.REGRESSED),
        (0.00499, 1e-5, Status.PASS),
        (-0.01001, 1e-5, Status.IMPROVED),
        (-0.00999, 1e-5, Status.PASS),
        (0.0, 1e-5, Status.PASS),
        (0.0, 0.01, Status.NOISY),
    ],
)
def test_the_least_change_that_is_called(change: float, se: float, status: Status) -> None:
    assert gate._speed(Estimate(value=math.log1p(change), se=se, dof=30.0), 0.01, 0.005 / 40, 0.02, "x")[0] is status


@pytest.mark.parametrize("sign", [1, -1])
def test_the_certainty_that_a_change_is_called_with(sign: int) -> None:
    limit = stats.t.isf(0.005 / 40, 9.0)
    for factor, called in ((1.01, True), (0.99, False)):
        error = Estimate(value=sign * 0.02, se=0.02 / (factor * limit), dof=9.0)
        status = gate._speed(error, 0.01, 0.005 / 40, 0.02, "x")[0]
        assert (status in (Status.REGRESSED, Status.IMPROVED)) is called


@pytest.mark.parametrize("value", [0.02, -0.02])
def test_a_p_at_its_level_is_enough(value: float) -> None:
    error = Estimate(value=value, se=0.006, dof=9.0)
    level = min(error.p_above(0), error.p_below(0))
    for part, called in ((1.0, True), (0.999, False)):
        status = gate._speed(error, 0.01, level * part, 0.02, "x")[0]
        assert (status in (Status.REGRESSED, Status.IMPROVED)) is called


@pytest.mark.parametrize("beta", [0.01, 0.02])
def test_the_certainty_that_a_slowdown_is_excluded_with(beta: float) -> None:
    limit = stats.t.isf(beta, 9.0)
    for factor, status in ((1.01, Status.PASS), (0.99, Status.NOISY)):
        error = Estimate(value=0.001, se=(math.log1p(0.01) - 0.001) / (factor * limit), dof=9.0)
        assert gate._speed(error, 0.01, 0.005 / 40, beta, "x")[0] is status


def test_looks_and_processes_are_numbered() -> None:
    promise = {ID: PromiseRecord(launches=0)}
    assert verdict(look1(processes(), promise=promise[ID]), Status.BELOW_FLOOR).look == 1
    assert verdict(look1(processes(), promise=promise[ID]), Status.BELOW_FLOOR).moved == "optimized"
    item = dataclasses.replace(opened(), promises=promise[ID])
    assert verdict(look2(item, again()), Status.BELOW_FLOOR).look == 2
    assert promises_look({ID: processes()}, promise, selected=1)[ID].look == 0
    found = promises_look({ID: processes(count=2)}, {}, selected=1, processes=2)[ID]
    assert (verdict(found, Status.PASS).processes, found.look) == (2, 0)
    verdict(promises_look({ID: processes(count=1)}, {}, selected=1, processes=2)[ID], Status.UNMEASURED)
    assert verdict(look2(opened(), []), Status.UNMEASURED).look == 2


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("name", ["device", "direction", "dtype"])
def test_processes_that_disagree_are_unmeasured(name: str, place: int) -> None:
    runs = processes()
    first = getattr(runs[0], name)
    runs[place] = measurement(**{name: "other"})
    found = verdict(look1(runs), Status.UNMEASURED)
    assert found.message.endswith(f"its processes disagree on {name}: {first!r}, 'other'")


@pytest.mark.parametrize("seconds", [0.0, -1e-6, math.inf, math.nan])
@pytest.mark.parametrize("name", ["optimized", "reference"])
def test_times_that_are_none_are_unmeasured(name: str, seconds: float) -> None:
    sound = processes()
    broken = dataclasses.replace(sound[2], sides={**sound[2].sides, name: side(seconds)})
    assert f"no time of the {name} side" in verdict(look1([*sound[:2], broken]), Status.UNMEASURED).message
    # The second look may leave the reference out.
    runs = again()
    runs[5] = dataclasses.replace(runs[5], sides={**runs[5].sides, name: side(seconds)})
    verdict(look2(opened(), runs), Status.UNMEASURED if name == "optimized" else Status.PASS)


def test_the_largest_ratio_that_is_believed() -> None:
    for ratio in (20.0, -20.0):
        assert gate._unusable(ID, (measurement(ratio=ratio),), 1, "reference") is None
    for ratio in (20.1, -20.1):
        assert gate._unusable(ID, (measurement(ratio=ratio, reference_s=1.0),), 1, "reference") is not None
    # A ratio to the reference need not be there beside the accepted one, but what is there must be sound.
    broken = [*again()[:11], measurement(accepted=0.0, ratio=21.0)]
    assert "ratio to the reference side" in verdict(look2(opened(), broken), Status.UNMEASURED).message


@pytest.mark.parametrize(
    ("optimized", "reference", "moved", "says"),
    [
        (0.05, 0.01, "optimized", "the optimized is 5.1% slower, the reference 1.0% slower"),
        (0.01, -0.05, "reference", "the reference is 4.9% faster, the optimized 1.0% slower"),
        (0.05, 0.04, "device", "both sides' seconds are slower (5.1% slower and 4.1% slower): the device"),
        (-0.05, -0.04, "device", "both sides' seconds are faster (4.9% faster and 3.9% faster): the device"),
        (0.05, -0.04, "optimized", "the optimized is 5.1% slower, the reference 3.9% faster"),
        (-0.04, 0.05, "reference", "the reference is 5.1% slower, the optimized 3.9% faster"),
        # Together, but by no more than a device's usual change, or than the ratio's own.
        (0.03, 0.019, "optimized", "the optimized is 3.0% slower"),
        (0.03, 0.021, "device", "the device"),
        (0.2, 0.05, "optimized", "the optimized is 22.1% slower"),
        (0.05, 0.2, "reference", "the reference is 22.1% slower"),
    ],
)
def test_which_side_moved(optimized: float, reference: float, moved: str, says: str) -> None:
    item = opened([measurement(optimized_s=1e-4, reference_s=2e-3) for _ in range(3)], made=at_seconds(0.0, 0.0))
    run = [measurement(optimized_s=1e-4 * math.exp(optimized), reference_s=2e-3 * math.exp(reference))] * 3
    found, why = gate._moved(item, run, optimized - reference)
    assert found == moved
    assert says in why


STILL = {"copy": 1e-4, "matmul": 2e-4, "launch": 3e-6}


@pytest.mark.parametrize(
    ("optimized", "reference", "anchor", "moved", "says"),
    [
        (0.05, 0.0, {}, "optimized", "the optimized is 5.1% slower, the reference 0.0%"),
        (0.0, -0.05, {}, "reference", "the reference is 4.9% faster, the optimized 0.0%"),
        (0.05, 0.0, {"copy": 0.05}, "device", ": the device (anchor kernels: copy 5.1% slower, matmul 0.0%"),
        (0.0, -0.05, {"copy": -0.03}, "device", "the device (anchor kernels: copy 3.0% faster"),
        (0.05, 0.04, {"matmul": 0.05}, "device", "both sides' seconds are slower (5.1% slower and 4.1% slower): the"),
        (0.05, 0.04, {}, "software", "not the device, but software that both use (anchor kernels: copy 0.0%"),
        # Another way, less than half as far, or by no more than a device's usual change: it has not moved the side.
        (0.05, 0.0, {"copy": -0.05}, "optimized", "the optimized"),
        (0.05, 0.0, {"copy": 0.024}, "optimized", "the optimized"),
        (0.05, 0.0, {"copy": 0.026}, "device", "the device"),
        (0.03, 0.0, {"copy": 0.019}, "optimized", "the optimized"),
        # The host's launches say nothing of a time on the device clock.
        (0.05, 0.0, {"launch": 0.05}, "optimized", "the optimized"),
    ],
)
def test_anchor_kernels_tell_the_device_from_a_side(
    optimized: float, reference: float, anchor: dict[str, float], moved: str, says: str
) -> None:
    item = opened([measurement(optimized_s=1e-4, reference_s=2e-3) for _ in range(3)], made=at_seconds(0.0, 0.0))
    now = {name: seconds * math.exp(anchor.get(name, 0.0)) for name, seconds in STILL.items()}
    run = [measurement(optimized_s=1e-4 * math.exp(optimized), reference_s=2e-3 * math.exp(reference), anchors=now)] * 3
    found, why = gate._moved(item, run, optimized - reference)
    assert found == moved
    assert says in why


@pytest.mark.parametrize(
    ("clock", "by", "names"),
    [
        ("device", None, ["copy", "matmul"]),
        ("device", "memory", ["copy"]),
        ("device", "compute", ["matmul"]),
        ("wall", "memory", ["copy", "launch"]),
        ("wall", None, ["copy", "matmul", "launch"]),
    ],
)
def test_which_anchor_kernels_say_something_of_a_workload(clock: str, by: str | None, names: list[str]) -> None:
    limit = Limit(seconds=1e-5, by=by, bytes=1.0, flops=1.0, ceiling=1.0) if by else None
    item = opened(made=at_seconds(0.0, 0.0))
    item = dataclasses.replace(item, entry=dataclasses.replace(item.entry, clock=clock, limit=limit))
    run = [measurement(anchors=STILL)] * 3
    assert list(gate._anchor_shifts(item, run)) == names
    assert gate._anchor_shifts(item, processes()) == {}
    unknown = entry([[measurement(ratio=TRUTH)] * 3] * 3)
    assert gate._anchor_shifts(dataclasses.replace(item, entry=unknown), run) == {}


def test_beside_its_own_accepted_revision_the_optimized_side_is_not_what_moved() -> None:
    def told(**fields: Any) -> tuple[str | None, str]:
        runs = [measurement(ratio=TRUTH - 0.05 + s, optimized_s=1.05e-4, reference_s=2e-3, **fields) for s in OFFSETS]
        return gate._ratio_moved(opened(made=at_seconds(0.0, 0.0)), runs)

    side, why = told(anchors=STILL)
    assert (side, "both revisions moved alike: not the device, but software" in why) == ("software", True)
    side, why = told()
    assert (side, "both revisions moved alike: the device or its software" in why) == ("device", True)


def at_seconds(optimized: float, reference: float) -> Entry:
    one = measurement(
        optimized_s=1e-4 * math.exp(optimized),
        reference_s=2e-3 * math.exp(reference),
        ratio=TRUTH + 0.01,
        anchors=STILL,
    )
    return entry([[one] * 3] * 3)


def test_a_side_without_seconds_is_taken_to_have_stayed() -> None:
    item = opened(made=at_seconds(0.0, 0.0))
    alone = [dataclasses.replace(m, sides={"optimized": side(1.1e-4)}) for m in processes()]
    assert gate._moved(item, alone, 0.1)[0] == "optimized"


def test_a_side_that_stayed_was_not_moved_by_the_device() -> None:
    item = opened(made=at_seconds(0.0, 0.0))
    run = [measurement(optimized_s=1e-4, reference_s=2e-3, anchors={**STILL, "copy": 1.05e-4})]
    side, why = gate._moved(item, run, 0.0)
    assert side == "optimized"
    assert "is 0.0% slower, the reference 0.0% slower (anchor kernels: copy 5.0% slower, matmul 0.0%" in why


def test_own_seconds_are_estimated_with_the_session_s_shift() -> None:
    item = opened(made=accepted())
    run = [measurement(optimized_s=s) for s in (1.00e-4, 1.02e-4, 1.10e-4)]
    found = gate._own_seconds(item, run)
    now = np.log([1.00e-4, 1.02e-4, 1.10e-4])
    known = pooled([*[[math.log(1e-4)] * 3] * 3, now.tolist()], Variance(value=0.0035**2, dof=4.0))
    parts = (known.value * (1 / 9 + 1 / 3), 0.01**2 * (1 / 3 + 1))
    assert found.value == pytest.approx(np.mean(now) - math.log(1e-4))
    assert found.se == pytest.approx(math.sqrt(sum(parts)))
    assert found.dof == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / known.dof + parts[1] ** 2 / 6.0))


def test_a_run_that_spreads_has_its_own_noise_and_no_other() -> None:
    item = opened()
    for spread in (False, True):
        for values in ([0.0, 0.1, 0.2], [0.0, 1e-5, 2e-5], [0.0, 0.1], [0.3]):
            found = gate._run_noise(dataclasses.replace(item, spread=spread), values)
            own = Variance(value=float(np.var(values, ddof=1)) if len(values) > 1 else 0.0, dof=len(values) - 1.0)
            widest = Variance(value=max(own.value, item.noise.process.value), dof=own.dof)
            expected = widest if spread and own.dof else pooled([values], item.noise.process)
            assert found.process == Variance(value=pytest.approx(expected.value), dof=expected.dof)
            assert found.session == item.noise.session


@pytest.mark.parametrize(
    ("fields", "lends"), [({}, True), ({"spread": True}, False), ({"twin": True}, False), ({"few": True}, False)]
)
def test_what_the_first_look_lends_the_second(fields: dict[str, bool], lends: bool) -> None:
    """Its processes tell the noise of two revisions, unless that was measured, or they tell nothing of it."""
    item = opened(processes(0.01, scale=2.0))
    if fields.pop("few", False):
        item = dataclasses.replace(item, runs=tuple(few(m) for m in item.runs))
    item = dataclasses.replace(item, **fields)
    found = look2(item, again(0.03))
    known = pooled([[s * 2 for s in OFFSETS]], item.paired.process) if lends else item.paired.process
    own = [OFFSETS[i % 3] for i in range(12)]
    alone = Variance(value=max(float(np.var(own, ddof=1)), known.value), dof=11.0)
    known = alone if item.spread else pooled([own], known)
    total = known.value / 12 + IMPORT_BIAS**2
    half = stats.t.ppf(0.975, total**2 / ((known.value / 12) ** 2 / known.dof)) * math.sqrt(total)
    assert found.low is not None
    assert found.high is not None
    assert math.log1p(found.low) == pytest.approx(0.03 - half, abs=1e-6)
    assert math.log1p(found.high) == pytest.approx(0.03 + half, abs=1e-6)


def test_a_margin_at_its_limit_is_still_one() -> None:
    for size, status in ((0.02, Status.PASS), (0.021, Status.NOISY)):
        item = dataclasses.replace(opened(), margin=size, runs=tuple(processes()))
        held = gate._promises({ID: item}, {ID: item.runs}, 40)[ID]
        verdict(gate._decide_first(item, held), status)
    for size, status in ((0.04, Status.PASS), (0.041, Status.NOISY)):
        verdict(stored(dataclasses.replace(opened(), margin=size), processes(count=12)), status)


def test_a_ratio_that_moved_is_told_where_it_is_certain_and_large() -> None:
    def told(log: float, **fields: Any) -> str | None:
        runs = [measurement(ratio=TRUTH - log + s, optimized_s=1e-4) for s in OFFSETS]
        return gate._ratio_moved(dataclasses.replace(opened(), **fields), runs)[0]

    assert told(0.05) == told(-0.05) == "reference"
    # Less than half the margin, however certain.
    assert told(0.05, margin=0.11) is None
    assert told(0.05, margin=0.10) == "reference"
    # Large, but within the noise of sessions: a 99% interval, not a 90% one.
    noise = dataclasses.replace(NOISE, session=Variance(value=0.021**2, dof=1e6))
    assert told(0.05, noise=noise) is None
    assert told(-0.05, noise=noise) is None
    assert told(0.07, noise=noise) == "reference"


def test_a_comparison_s_margin_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = compare_look({ID: again()}, revision="abc")[ID].margin
    for limit, status in ((size, Status.PASS), (size - 1e-6, Status.NOISY)):
        monkeypatch.setattr(gate, "MARGIN_MAX", limit)
        verdict(compare_look({ID: again()}, revision="abc")[ID], status)


def test_a_suite_that_spreads_in_a_later_look_is_judged_by_its_own_noise() -> None:
    keys = [workload_id(i) for i in range(40)]
    items = {k: dataclasses.replace(opened(), id=k, entry=dataclasses.replace(opened().entry, id=k)) for k in keys}

    def looks(scale: float, chosen: Sequence[str], slower: float = 0.0) -> tuple[Verdict, Verdict]:
        some = {k: items[k] for k in chosen}
        runs = {k: [dataclasses.replace(m, id=k) for m in again(slower, scale=scale)] for k in chosen}
        paired, kept = second_look(some, runs), stored_look(some, runs, reason="no git")
        assert len({v.status for v in paired.values()}) == len({v.status for v in kept.values()}) == 1
        return paired[keys[0]], kept[keys[0]]

    def width(found: Verdict) -> float:
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    calm = looks(1.0, keys)
    alone = looks(1.75, keys[:1])
    every = looks(1.75, keys)
    assert [v.status for v in (*calm, *alone)] == [Status.PASS] * 4
    # Two revisions interleaved tell by themselves how far they err; against what is stored nothing does.
    assert [v.status for v in every] == [Status.PASS, Status.NOISY]
    assert width(every[0]) > width(alone[0]) > width(calm[0])
    assert looks(1.75, keys, 0.03)[0].status is Status.REGRESSED
    assert "a neighbour or throttling" in verdict(looks(100.0, keys)[0], Status.NOISY).message
    # The ratio to a reference that is sampled few times tells nothing of the machine.
    runs = {k: [few(dataclasses.replace(m, id=k)) for m in processes(scale=9.0, count=12)] for k in keys}
    some = {k: dataclasses.replace(i, runs=tuple(few(m) for m in i.runs)) for k, i in items.items()}
    assert {v.status for v in stored_look(some, runs, reason="no git").values()} == {Status.PASS}


def test_only_what_is_promised_is_asked_for() -> None:
    runs = [counting(m, launches=None, host_syncs=None) for m in processes(device="cpu")]
    said = "; launches promised, but not countable on a CPU"
    assert gate._uncounted(runs, PromiseRecord(launches=1, peak_bytes=2048)) == said
    assert gate._uncounted(runs, PromiseRecord(peak_bytes=2048)) == ""


@pytest.mark.parametrize(("stored_few", "run_few"), [(False, False), (True, False), (False, True), (True, True)])
def test_few_on_either_side_is_few(stored_few: bool, run_few: bool) -> None:
    item = opened()
    entry_few = dataclasses.replace(item.entry, few=("reference",) if stored_few else ("rival",))
    runs = (*item.runs[:2], few(item.runs[2])) if run_few else item.runs
    assert dataclasses.replace(item, entry=entry_few, runs=runs).few is (stored_few or run_few)


def test_no_change_is_no_gain() -> None:
    assert (gate._change(0.0), gate._change(0.0, "lower", "higher")) == ("0.0% slower", "0.0% lower")
    text = gate._speed(Estimate(value=0.0, se=0.1, dof=math.inf), 0.01, 0.005, 0.01, "before")[1]
    assert text.startswith("the optimized side is 0.0% slower than before (95% interval -17.8 to 21.7%, margin 1.0%)")


def test_few_samples_double_the_error_of_a_promise() -> None:
    full, doubled = (
        gate._speedup([change(m) for m in processes()], NOISE, PromiseRecord(speedup=19.0)) for change in (_same, few)
    )
    assert doubled.speedup.se == 2 * full.speedup.se
    assert doubled.speedup.value == full.speedup.value == pytest.approx(TRUTH)
    assert full.bound == math.log(19.0)
    assert (full.promised, gate._speedup(processes(), NOISE, PromiseRecord()).promised) == ("19×", "")
    low, high = full.speedup.interval()
    assert full.measured == f"20× (95% interval {math.exp(low):.4g} to {math.exp(high):.4g})"


def _same(m: Measurement) -> Measurement:
    return m


def test_promises_are_a_family() -> None:
    """Held or broken at ALPHA by Holm's rule over all that is selected; what promises nothing holds."""
    limit = stats.norm.isf(0.005 / 10)

    def promise(distance: float) -> gate._Promise:
        return gate._Promise(speedup=Estimate(value=3.0, se=0.1, dof=math.inf), bound=3.0 + 0.1 * distance)

    speeds = {
        "holds": promise(-1.01 * limit),
        "waits": promise(-0.9 * limit),
        "open": promise(0.0),
        "breaks": promise(1.01 * limit),
        "none": dataclasses.replace(promise(0.0), bound=None),
    }
    found = {k: (p.holds, p.broken) for k, p in gate._judged(speeds, 10).items()}
    assert found == {
        "holds": (True, False),
        "waits": (False, False),
        "open": (False, False),
        "breaks": (False, True),
        "none": (True, False),
    }


def test_the_figures_of_a_comparison() -> None:
    runs = {ID: again(0.03, count=6)}
    found = verdict(compare_look(runs, revision="abcdef0123")[ID], Status.REGRESSED)
    prior = DEFAULT_NOISE.process
    known = pooled([[-0.03 + OFFSETS[i % 3] for i in range(6)]], prior)
    total = known.value / 6 + IMPORT_BIAS**2
    dof = total**2 / ((known.value / 6) ** 2 / known.dof)
    half = stats.t.ppf(0.975, dof) * math.sqrt(total)
    assert (found.look, found.processes, found.moved) == (2, 6, "optimized")
    assert found.slowdown == pytest.approx(math.expm1(0.03))
    assert (found.low, found.high) == (pytest.approx(math.expm1(0.03 - half)), pytest.approx(math.expm1(0.03 + half)))
    assert found.margin == pytest.approx(resolvable(total, dof, 1))
    wide = compare_look(runs, revision="abc", selected=10**6)[ID]
    assert wide.margin == pytest.approx(resolvable(total, dof, 10**6))
    assert verdict(compare_look({ID: again()}, revision="abc")[ID], Status.PASS).moved is None
    noisy = [measurement(accepted=s * 18) for s in OFFSETS * 2]
    told = verdict(compare_look({ID: noisy}, revision="abcdef0123")[ID], Status.NOISY).message
    assert "too noisy to be gated" in told
    assert told.endswith("; compared with the revision abcdef0")
    assert compare_look({}, revision="abc") == {}
    verdict(compare_look({ID: again(count=4)}, revision="abc", processes=4)[ID], Status.PASS)


# --- halfway through the second look -------------------------------------------------------------------------------


def interim(item: Open, runs: Sequence[Measurement]) -> Verdict | None:
    found = second_look({ID: item}, {ID: runs}, stage=0)
    assert set(found) <= {ID}
    return found.get(ID)


def test_what_is_clear_halfway_is_decided_there() -> None:
    for slower, status in ((0.0, Status.PASS), (math.log(1.031), Status.REGRESSED), (-0.05, Status.IMPROVED)):
        item = opened(processes(0.03))
        found = interim(item, again(slower, count=3))
        assert found is not None
        whole = second_look({ID: item}, {ID: again(slower)})[ID]
        assert found.status is whole.status is status
        assert (found.look, found.processes) == (2, 6)
        assert found.slowdown == pytest.approx(math.expm1(slower), abs=1e-9)


def test_what_is_in_doubt_halfway_waits_for_the_end() -> None:
    noise = dataclasses.replace(NOISE, process=Variance(value=0.003**2, dof=8.0))
    unclear = dataclasses.replace(opened(), noise=noise, paired=noise, selected=10**6)
    assert interim(unclear, again(0.008, scale=3.0, count=3)) is None
    # A neighbour spreads the processes: three tell too little of how far.
    assert interim(opened(), again(0.2, scale=30.0, count=3)) is None
    # A promise that the interval holds to neither side, or that is broken.
    for speedup in (20.0, 25.0):
        item = dataclasses.replace(opened(), promises=PromiseRecord(speedup=speedup))
        assert interim(item, again(count=3)) is None
    assert interim(opened(), [measurement(accepted=float("nan"))] * 3) is None


@pytest.mark.parametrize("first", [again(0.2, scale=30.0, count=3), again(count=2)])
def test_halfway_one_workload_holds_no_other_back(first: Sequence[Measurement]) -> None:
    """One that spreads, or was not measured, before one that is clear."""
    other = workload_id(1)
    items = {ID: opened(), other: dataclasses.replace(opened(), id=other)}
    runs = {ID: first, other: [dataclasses.replace(m, id=other) for m in again(count=3)]}
    found = second_look(items, runs, stage=0)
    assert {key: v.status for key, v in found.items()} == {other: Status.PASS}


@pytest.mark.parametrize("sign", [1, -1])
def test_halfway_spends_a_part_of_the_error(sign: int) -> None:
    """Certain enough for the whole look's level, and not for the part of it that is spent here."""
    item = opened()
    values = [sign * 0.03 + s for s in OFFSETS]

    def at(se: float) -> Verdict | None:
        process = Variance(value=3 * (se**2 - IMPORT_BIAS**2), dof=1e9)
        noise = dataclasses.replace(item.noise, process=process)
        runs = [measurement(accepted=-v) for v in values]
        return interim(dataclasses.replace(item, noise=noise, paired=noise, twin=True), runs)

    for factor, called in ((1.02, True), (0.98, False)):
        limit = stats.norm.isf(0.001 / item.selected)
        found = at(0.03 / (limit * factor))
        assert (found is not None and found.status in (Status.REGRESSED, Status.IMPROVED)) is called


# --- the rates -----------------------------------------------------------------------------------------------------


def gated(suite: Suite, slower: float, scale: float = 1.0) -> tuple[Counter[Status], int, int]:
    """One run of a suite through the looks → (statuses, workloads that need the second, and those that need all)."""
    promises = dict.fromkeys(suite.noises, PromiseRecord())
    first = first_look(suite.entries, suite.run(slower, scale=scale), promises, selected=len(promises))
    left = {k: a for k, a in first.items() if isinstance(a, Open)}
    runs = suite.again(list(left), slower, scale)
    second: dict[str, Verdict] = {}
    reached = [0, 0, 0]
    for number, stage in enumerate(gate.STAGES):
        now = {k: a for k, a in left.items() if k not in second}
        reached[number] = len(now)
        second |= second_look(now, {k: runs[k][: stage.processes] for k in now}, stage=number)
    final = {**{k: a for k, a in first.items() if isinstance(a, Verdict)}, **second}
    assert set(final) == set(promises)
    return Counter(v.status for v in final.values()), reached[0], reached[1]


@pytest.mark.parametrize(("sessions", "per_session", "open_share"), [(4, 3, 0.35), (1, 5, 0.55)])
def test_simulated_rates(sessions: int, per_session: int, open_share: float) -> None:
    """Mixed noise, 40 workloads: no false alarm to speak of, 2% caught, 1% mostly."""
    rng = np.random.default_rng(2026 + sessions)
    unchanged: Counter[Status] = Counter()
    alarms = left = whole = 0
    caught: Mapping[float, Counter[Status]] = {0.01: Counter(), 0.02: Counter(), 0.03: Counter()}
    suites, workloads, slowed = 60, 40, 8
    for number in range(suites):
        suite = Suite.make(rng, workloads=workloads, sessions=sessions, per_session=per_session)
        statuses, count, last = gated(suite, 0.0)
        unchanged += statuses
        alarms += statuses[Status.REGRESSED] > 0
        left += count
        whole += last
        if number < slowed:
            for slowdown, found in caught.items():
                found += gated(suite, math.log1p(slowdown))[0]
    assert alarms <= 1
    assert unchanged[Status.NOISY] / (suites * workloads) < 0.012
    assert left / (suites * workloads) < open_share
    # Half of the second look's processes are enough for most.
    assert whole < 0.3 * left
    rates = {slowdown: found[Status.REGRESSED] / (slowed * workloads) for slowdown, found in caught.items()}
    assert rates[0.01] > 0.8
    assert rates[0.02] > 0.97
    assert rates[0.03] > 0.97
    assert caught[0.02][Status.PASS] + caught[0.03][Status.PASS] <= 2


def test_simulated_worst_noise_and_a_noisy_neighbour() -> None:
    rng = np.random.default_rng(77)
    alarms = 0
    slow: Counter[Status] = Counter()
    doubled: Counter[Status] = Counter()
    for _ in range(10):
        suite = Suite.make(rng, workloads=40, sessions=1, per_session=5, pessimistic=True)
        alarms += gated(suite, 0.0)[0][Status.REGRESSED]
        slow += gated(suite, math.log1p(0.02))[0]
        doubled += gated(suite, 0.0, scale=2.0)[0]
    assert alarms == 0
    assert slow[Status.REGRESSED] > 0.95 * 400
    assert doubled[Status.REGRESSED] == 0
    assert doubled[Status.IMPROVED] == 0


def test_the_rule_s_constants_are_the_specification_s() -> None:
    assert (gate.ALPHA, gate.BETA_FIRST, gate.BETA_SECOND) == (0.005, 0.01, 0.02)
    assert [s.processes for s in gate.STAGES] == [3, 6, 12]
    assert [s.alpha for s in gate.STAGES] == [0.001, 0.002, 0.002]
    assert math.isclose(sum(s.alpha for s in gate.STAGES), gate.ALPHA)
    assert math.isclose(sum(s.beta for s in gate.STAGES), gate.BETA_SECOND)
    assert (gate.FIRST_PROCESSES, gate.SECOND_PROCESSES, gate.STORED_PROCESSES) == (3, 6, 12)
    assert (gate.MARGIN_MIN, gate.MARGIN_MAX) == (0.01, 0.02)
