"""Promised throughputs: declaration, measurement and verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from builders import measurement, workload_id
from test_decision import ID, accepted, judge, opened, process, runs, verdict

import perfsuite
from perfsuite import Cost, Pair, PairError, Workload, tensor
from perfsuite.codec import from_json, to_json
from perfsuite.gate import throughput
from perfsuite.gate.decision import promises_only
from perfsuite.records import Measurement, PromiseRecord, Status

DEVICE = "nvidia-h200"
TOKENS: dict[str, Any] = {"items": 100.0, "unit": "tokens"}
"""A call takes 1e-4 s, so that this is a million tokens a second."""


def promised(rate: float, device: str = DEVICE) -> PromiseRecord:
    return PromiseRecord(throughput={device: rate})


def slowed(log: float, count: int = 4, **fields: Any) -> tuple[Measurement, ...]:
    """Return processes in which the accepted side, and with it the device, is slower by `log` as well."""
    return tuple(
        process(optimized_s=1e-4 * math.exp(log + shift), **TOKENS, **fields)
        for shift in (0.0, 1e-3, -1e-3, 0.0)[:count]
    )


# --- the declaration ------------------------------------------------------------------------------------------------


def same(x: Any) -> Any:
    return x


def pair(**fields: Any) -> Pair:
    return Pair(**{"name": "p", "reference": same, "optimized": lambda x: x, "inputs": {"x": tensor("n")}, **fields})


@pytest.mark.parametrize("cost", [None, Cost(bytes=lambda n: 8 * n)])
def test_a_promised_throughput_needs_the_items_of_a_call(cost: Cost | None) -> None:
    declared = pair(cost=cost, workloads=[Workload("w", n=8, throughput={DEVICE: 1e3})])
    with pytest.raises(PairError, match=r"workload 'w': a throughput is promised, but .* give cost=Cost\(items="):
        declared.validate()


@pytest.mark.parametrize(
    "wrong", [1e3, {DEVICE: 0.0}, {DEVICE: math.nan}, {DEVICE: math.inf}, {DEVICE: "640e3"}, {"NVIDIA H200": 1.0}]
)
def test_a_throughput_is_declared_by_device(wrong: Any) -> None:
    with pytest.raises(
        PairError, match=r"workload 'w': throughput=.* must have items a second by device, as the baselines' files"
    ):
        Workload("w", n=8, throughput=wrong)


def test_items_follow_from_the_sizes_and_the_direction() -> None:
    assert Cost(items=lambda n, direction: n * (2 if direction == "both" else 1)).items_of({"n": 8}, "both") == 16
    assert Cost().items_of({"n": 8}, "both") == 0


@pytest.mark.parametrize("items", [-1.0, math.inf, math.nan])
def test_an_invalid_number_of_items_is_rejected(items: float) -> None:
    with pytest.raises(PairError, match=r"cost=Cost\(items=…\) gives (-1|inf|nan) items at \{'n': 8\}"):
        Cost(items=lambda n: items).items_of({"n": 8}, "forward")


def test_a_workload_is_unmeasured_if_its_processes_disagree_on_items() -> None:
    found = judge([*runs(count=1, **TOKENS), *runs(count=1, items=50.0, unit="tokens")])
    assert "its processes disagree on items: 100.0, 50.0" in verdict(found, Status.UNMEASURED).message


def test_a_measurement_contains_the_throughput() -> None:
    cost = Cost(items=lambda n: 3 * n, unit="tokens")
    declared = pair(cost=cost, workloads=[Workload("w", n=8, clock="wall", throughput={"x": 1.0})])
    (found,) = perfsuite.measure(declared, device="cpu")
    assert (found.items, found.unit) == (24.0, "tokens")
    assert found.throughput == 24 / statistics.median(found.sides["optimized"].blocks_s)
    assert from_json(Measurement, to_json(found)) == found


def test_a_promised_throughput_survives_json() -> None:
    known = Workload("w", n=8, throughput={DEVICE: 640e3}).promises
    assert from_json(PromiseRecord, to_json(known)) == known
    assert from_json(PromiseRecord, {"speedup": 2.0}).throughput == {}


# --- the gate -------------------------------------------------------------------------------------------------------


def test_a_promise_that_is_reached_changes_no_verdict() -> None:
    answer = verdict(judge(runs(**TOKENS), promises=promised(0.98e6)), Status.PASS)
    assert answer == judge(runs(**TOKENS))


def test_a_promise_for_another_device_is_not_checked() -> None:
    verdict(judge(runs(**TOKENS), promises=promised(9e9, "nvidia-h100-80gb-hbm3")), Status.PASS)


def test_a_missed_promise_is_decided_after_four_processes() -> None:
    for count in (1, 2, 3):
        reason = opened(judge(runs(count=count, **TOKENS), promises=promised(1.2e6)))
        assert "the promised 1,200,000 tokens/s are in doubt" in reason
    answer = verdict(judge(runs(**TOKENS), promises=promised(1.2e6)), Status.BELOW_FLOOR)
    assert "999,700 tokens/s (95% interval" in answer.message or "1,000,000 tokens/s (95% interval" in answer.message
    assert "; promised 1,200,000 tokens/s" in answer.message


def test_a_miss_that_a_session_shift_may_explain_is_noisy() -> None:
    answer = verdict(judge(runs(**TOKENS), promises=promised(1.01e6)), Status.NOISY)
    assert "sessions differ by as much" in answer.message


STILL = {"copy": 1e-3, "matmul": 1e-3, "launch": 1e-5}


@pytest.mark.parametrize(
    ("anchors", "status", "moved"),
    [
        (STILL, Status.BELOW_FLOOR, "software"),
        ({name: 1.2 * seconds for name, seconds in STILL.items()}, Status.NOISY, "device"),
        ({}, Status.NOISY, "device"),
    ],
)
def test_a_miss_is_attributed_to_the_software_or_to_the_device(
    anchors: dict[str, float], status: Status, moved: str
) -> None:
    answer = judge(slowed(0.2, anchors=anchors), promises=promised(1e6), entry=accepted(anchors=STILL))
    answer = verdict(answer, status)
    assert answer.moved == moved
    assert "the optimized side is 22.1% slower than when accepted" in answer.message


def test_a_miss_without_an_accepted_entry_has_no_cause() -> None:
    answer = verdict(judge(slowed(0.2), promises=promised(1e6), entry=None), Status.BELOW_FLOOR)
    assert answer.moved is None


@pytest.mark.parametrize("log", [0.0, 0.2])
def test_a_promise_that_never_held_is_not_blamed_on_the_device(log: float) -> None:
    slower = {name: math.exp(log) * seconds for name, seconds in STILL.items()}
    found = judge(slowed(log, anchors=slower), promises=promised(2e6), entry=accepted(anchors=STILL))
    answer = verdict(found, Status.BELOW_FLOOR)
    assert answer.moved is None
    assert "when accepted" not in answer.message


def test_promised_devices_without_a_baseline_are_named_with_the_nearest_name() -> None:
    promises = [promised(1.0, name) for name in ("nvidia-h20", "nvidia-h200", "nvidia-h20", "amd-mi300x")]
    first, second = throughput.unknown_devices(promises, {"nvidia-h200", "cpu-amd-epyc"})
    assert first == "throughput={'amd-mi300x': …}: that is not this device, and it has no baseline here"
    assert second.endswith(
        "'nvidia-h20': …}: that is not this device, and it has no baseline here; is nvidia-h200 meant?"
    )
    assert throughput.unknown_devices([PromiseRecord()], set()) == []


def test_a_promise_without_counted_items_is_unmeasured() -> None:
    answer = verdict(judge(runs(), promises=promised(1.0)), Status.UNMEASURED)
    assert "throughput promised, but no process counted what a call processes" in answer.message


def test_a_regression_takes_precedence_over_a_missed_promise() -> None:
    slow = tuple(replace(m, items=100.0) for m in runs(0.3, count=4))
    verdict(judge(slow, promises=promised(1e6)), Status.REGRESSED)


@pytest.mark.parametrize(("rate", "status"), [(0.98e6, Status.PASS), (1e6, Status.PASS), (1.02e6, Status.NOISY)])
def test_the_estimate_decides_near_the_promise(rate: float, status: Status) -> None:
    verdict(judge(slowed(0.0), promises=promised(rate)), status)


@pytest.mark.parametrize("slow", [0.0, 0.02])
def test_a_row_that_stays_undecided_names_the_promises_that_are_missed(slow: float) -> None:
    both = PromiseRecord(speedup=60.0, throughput={DEVICE: 2e6})
    noisy = runs(slow, count=12, scale=40.0, **TOKENS)
    answer = verdict(judge(noisy, promises=both), Status.NOISY)
    assert answer.message.count("; not shown either: ") == 2
    assert ", promised 60×" in answer.message
    assert ", promised 2,000,000 tokens/s" in answer.message
    assert "not shown" not in verdict(judge(noisy), Status.NOISY).message


def test_a_miss_is_named_where_stored_figures_leave_the_speed_undecided() -> None:
    entry = accepted(anchors=STILL)
    slower = {name: 1.2 * seconds for name, seconds in STILL.items()}
    run = tuple(replace(m, anchors=slower) for m in runs(0.2, optimized_s=1.2e-4, **TOKENS))
    answer = judge(run, promises=promised(2e6), entry=entry, stored="it was accepted outside git")
    assert "; not shown either: " in verdict(answer, Status.NOISY).message


# --- before acceptance, and in a plain run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "status"),
    [(0.95e6, Status.PASS), (0.999e6, Status.NOISY), (1.01e6, Status.NOISY), (2e6, Status.BELOW_FLOOR)],
)
def test_a_new_promise_needs_a_margin_for_other_sessions(rate: float, status: Status) -> None:
    verdict(promises_only({ID: runs(**TOKENS)}, {ID: promised(rate)}, selected=40)[ID], status)


def test_a_missed_speedup_is_not_hidden_by_a_throughput_in_doubt() -> None:
    both = PromiseRecord(speedup=60.0, throughput={DEVICE: 0.999e6})
    answer = verdict(promises_only({ID: runs(**TOKENS)}, {ID: both}, selected=40)[ID], Status.BELOW_FLOOR)
    assert "promised 60×" in answer.message
    both = PromiseRecord(speedup=19.99, throughput={DEVICE: 2e6})
    answer = verdict(promises_only({ID: runs(**TOKENS)}, {ID: both}, selected=40)[ID], Status.BELOW_FLOOR)
    assert "promised 2,000,000 tokens/s" in answer.message


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "text"),
    [(640_213.0, "640,200 a/s"), (12.3456, "12.35 a/s"), (999.96, "1,000 a/s"), (1.5e9, "1,500,000,000 a/s")],
)
def test_a_throughput_is_shown_with_four_digits(rate: float, text: str) -> None:
    assert throughput.shown(rate, "a") == text


def test_throughput_of_several_processes_is_the_geometric_mean() -> None:
    found = [measurement(workload_id(0), optimized_s=s, items=1.0) for s in (1.0, 2.0, 4.0)]
    assert throughput.of(found) == pytest.approx(0.5)
    assert throughput.of([measurement()]) is None
