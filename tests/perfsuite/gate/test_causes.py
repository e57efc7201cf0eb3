"""The cause of a change is named: a side, the device, or software that both sides use."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from builders import entry, measurement, side

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.gate import causes
from perfsuite.gate.causes import change, of_ratio, of_speedup, reference_moved
from perfsuite.records import Limit, Measurement

TRUTH = math.log(20.0)
STILL = {"copy": 1e-4, "matmul": 2e-4, "launch": 3e-6}
ENTRY = entry([measurement(optimized_s=1e-4, reference_s=2e-3, anchors=STILL)] * 3)
BARE = entry([measurement(optimized_s=1e-4, reference_s=2e-3)] * 3)
"""Entry without times of control kernels."""


def run(
    optimized: float, reference: float, anchors: dict[str, float] | None = None, **fields: Any
) -> list[Measurement]:
    """Return four processes in which the sides, and the control kernels if given, are slower by these logarithms."""
    if anchors is not None:
        fields["anchors"] = {name: seconds * math.exp(anchors.get(name, 0.0)) for name, seconds in STILL.items()}
    one = measurement(
        optimized_s=1e-4 * math.exp(optimized),
        reference_s=2e-3 * math.exp(reference),
        ratio=TRUTH + reference - optimized,
        **fields,
    )
    return [one] * 4


def test_the_limits_are_the_documented_ones() -> None:
    assert (causes.MOVED_LEAST, causes.MOVED_SHARE) == (0.02, 0.5)


def test_change_is_formatted_with_its_direction() -> None:
    assert change(math.log(1.03)) == "3.0% slower"
    assert change(math.log(0.97)) == "3.0% faster"
    assert change(0.0) == "0.0% slower"
    assert change(math.log(0.5), "lower", "higher") == "50.0% higher"
    assert change(math.log(2.0), "lower", "higher") == "100.0% lower"


@pytest.mark.parametrize(
    ("optimized", "reference", "moved", "says"),
    [
        (
            0.05,
            0.01,
            "optimized",
            "against the stored times, the optimized side is 5.1% slower, the reference side 1.0% slower",
        ),
        (
            0.01,
            -0.05,
            "reference",
            "against the stored times, the reference side is 4.9% faster, the optimized side 1.0% slower",
        ),
        (
            0.05,
            -0.04,
            "optimized",
            "against the stored times, the optimized side is 5.1% slower, the reference side 3.9% faster",
        ),
        (
            -0.04,
            0.05,
            "reference",
            "against the stored times, the reference side is 5.1% slower, the optimized side 3.9% faster",
        ),
        (0.05, 0.04, "device", "both sides' seconds are slower (5.1% slower and 4.1% slower), so it is the device"),
        (-0.05, -0.04, "device", "both sides' seconds are faster (4.9% faster and 3.9% faster), so it is the device"),
        # Both sides moved together, but by no more than MOVED_LEAST, or than their ratio.
        (
            0.03,
            0.0199,
            "optimized",
            "against the stored times, the optimized side is 3.0% slower, the reference side 2.0% slower",
        ),
        (0.03, 0.0201, "device", "both sides' seconds are slower"),
        (
            0.20,
            0.09,
            "optimized",
            "against the stored times, the optimized side is 22.1% slower, the reference side 9.4% slower",
        ),
        (0.20, 0.11, "device", "both sides' seconds are slower"),
        (
            0.09,
            0.20,
            "reference",
            "against the stored times, the reference side is 22.1% slower, the optimized side 9.4% slower",
        ),
        (
            -0.09,
            -0.20,
            "reference",
            "against the stored times, the reference side is 18.1% faster, the optimized side 8.6% faster",
        ),
    ],
)
def test_cause_is_the_side_that_moved_more_or_the_device_if_both_did(
    optimized: float, reference: float, moved: str, says: str
) -> None:
    side_, why = of_ratio(BARE, run(optimized, reference), optimized - reference)
    assert (side_, why.startswith(says)) == (moved, True), why
    assert "control kernel" not in why


@pytest.mark.parametrize(
    ("optimized", "reference", "anchors", "moved", "says"),
    [
        (0.05, 0.0, {}, "optimized", "is 5.1% slower, the reference side 0.0% slower (control kernels: copy"),
        (0.0, -0.05, {}, "reference", "is 4.9% faster, the optimized side 0.0% slower (control kernels: copy"),
        (0.05, 0.0, {"copy": 0.05}, "device", "so it is the device (control kernels: copy 5.1% slower"),
        (0.05, 0.0, {"matmul": 0.05}, "device", "the device (control kernels: copy 0.0% slower, matmul 5.1% slower)"),
        (0.0, -0.05, {"copy": -0.03}, "device", "the device (control kernels: copy 3.0% faster, matmul 0.0% slower)"),
        (0.05, 0.04, {"matmul": 0.05}, "device", "4.1% slower), so it is the device (control kernels: copy"),
        (0.05, 0.04, {}, "software", "is not the device, but software that both sides use (control kernels: copy 0.0%"),
        (-0.05, -0.04, {"copy": 0.05}, "software", "), so it is not the device, but software that both sides use"),
        # The control kernel moved in the other direction, less than MOVED_SHARE as far, or by no more than MOVED_LEAST.
        (0.05, 0.0, {"copy": -0.05}, "optimized", "the optimized"),
        (0.05, 0.0, {"copy": 0.0249}, "optimized", "the optimized"),
        (0.05, 0.0, {"copy": 0.0251}, "device", "the device"),
        (0.03, 0.0, {"copy": 0.0199}, "optimized", "the optimized"),
        (0.03, 0.0, {"copy": 0.0201}, "device", "the device"),
        # If both sides moved, MOVED_SHARE of the smaller change is enough.
        (0.10, 0.06, {"copy": 0.0301}, "device", "the device"),
        (0.06, 0.10, {"copy": 0.0299}, "software", "software"),
        # Launches do not affect times of the device clock.
        (0.05, 0.0, {"launch": 0.05}, "optimized", "the optimized"),
    ],
)  # fmt: skip
def test_control_kernels_distinguish_the_device_from_a_side(
    optimized: float, reference: float, anchors: dict[str, float], moved: str, says: str
) -> None:
    found, why = of_ratio(ENTRY, run(optimized, reference, anchors), optimized - reference)
    assert (found, says in why) == (moved, True), why


def test_sides_that_moved_in_opposite_directions_do_not_blame_the_device() -> None:
    assert of_ratio(BARE, run(0.05, -0.04), 0.0)[0] == "optimized"
    assert of_ratio(BARE, run(0.05, 0.04), 0.0)[0] == "device"


def test_device_is_not_blamed_if_the_sides_did_not_move() -> None:
    found, why = of_ratio(ENTRY, run(0.0, 0.0, {"copy": 0.05}), 0.0)
    assert found == "optimized"
    assert why == (
        "against the stored times, the optimized side is 0.0% slower, the reference side 0.0% slower "
        "(control kernels: copy 5.1% slower, matmul 0.0% slower)"
    )


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
def test_only_control_kernels_relevant_to_the_clock_and_limit_are_listed(
    clock: str, by: str | None, names: list[str]
) -> None:
    limit = Limit(seconds=1e-5, by=by, bytes=1.0, flops=1.0, ceiling=1.0) if by else None
    made = replace(ENTRY, clock=clock, limit=limit)
    listed = of_ratio(made, run(0.0, 0.0, {}), 0.0)[1]
    assert [name for name in STILL if f"{name} 0.0% slower" in listed] == names


def test_control_kernels_are_compared_by_their_median_over_processes() -> None:
    processes = [measurement(anchors={"copy": 1e-4 * f}) for f in (1.2, 1.1, 9.0)]
    assert "(control kernels: copy 20.0% slower)" in of_ratio(ENTRY, [*processes, measurement()], 0.0)[1]
    for nothing in ({}, {"copy": 0.0}, {"copy": -1.0}, {"copy": math.nan}):
        assert "control kernel" not in of_ratio(ENTRY, [measurement(anchors=nothing)], 0.0)[1]
    assert "control kernel" not in of_ratio(BARE, run(0.0, 0.0, {}), 0.0)[1]


def test_change_of_a_side_is_the_mean_over_processes_of_the_median_block() -> None:
    def process(*seconds: float) -> Measurement:
        m = measurement(reference_s=2e-3)
        return replace(m, sides={**m.sides, "optimized": replace(side(1.0), blocks_s=seconds)})

    run_ = [process(1e-4, 1e-4, 9e-4), process(4e-4, 4e-4, 4e-4)]
    assert "the optimized side is 100.0% slower" in of_ratio(ENTRY, run_, 0.5)[1]


def test_side_without_times_counts_as_unchanged() -> None:
    for sides in (
        {"optimized": side(1.1e-4)},
        {"optimized": side(1.1e-4), "reference": replace(side(1.0), blocks_s=())},
    ):
        found, why = of_ratio(ENTRY, [measurement(sides=sides)], 0.1)
        assert (found, "the reference side 0.0% slower" in why) == ("optimized", True)


def test_without_an_entry_no_cause_is_given() -> None:
    assert of_ratio(None, run(0.1, 0.0), 0.1) == (None, "")
    assert of_speedup(None, run(0.1, 0.0)) == (None, "")
    assert reference_moved(None, run(0.0, 9.0), 0.0) == ""


# --- a lost speedup -------------------------------------------------------------------------------------------------


def test_optimized_side_is_not_the_cause_if_the_accepted_revision_moved_alike() -> None:
    found, why = of_speedup(ENTRY, run(0.05, 0.0, {}, accepted=0.0))
    assert (found, why) == (
        "software",
        "both revisions of the optimized side moved alike (5.1% slower), so it is not the device, but software that "
        "both sides use",
    )
    found, why = of_speedup(BARE, run(0.05, 0.0, accepted=0.0))
    assert (found, why) == (
        "device",
        "both revisions of the optimized side moved alike (5.1% slower), so it is the device or its software",
    )


def test_of_speedup_equals_of_ratio_for_causes_other_than_the_optimized_side() -> None:
    for optimized, reference, anchors, moved in (
        (0.0, -0.05, {}, "reference"),
        (0.05, 0.0, {"copy": 0.05}, "device"),
        (0.10, 0.06, {}, "software"),
    ):
        processes = run(optimized, reference, anchors, accepted=0.0)
        found = of_speedup(ENTRY, processes)
        assert found == of_ratio(ENTRY, processes, optimized - reference)
        assert found[0] == moved


def test_optimized_side_may_be_the_cause_if_the_accepted_revision_was_not_timed() -> None:
    processes = run(0.05, 0.0, {})
    assert of_speedup(ENTRY, processes) == of_ratio(ENTRY, processes, 0.05)
    assert of_speedup(ENTRY, processes)[0] == "optimized"
    beside = run(0.05, 0.0, {}, accepted=0.0)
    assert of_speedup(ENTRY, [beside[0], *processes])[0] == "optimized"


def test_only_processes_that_timed_the_reference_count_for_the_speedup() -> None:
    timed = run(0.0, -0.05, {}, accepted=0.0)
    other = [replace(m, log_ratios={"accepted": (0.0,)}) for m in run(0.5, 0.0, {"copy": 0.5}, accepted=0.0)]
    assert of_speedup(ENTRY, [*other, *timed, *other]) == of_speedup(ENTRY, timed)
    assert of_speedup(ENTRY, [replace(m, log_ratios={**m.log_ratios, "reference": ()}) for m in other] + timed) == (
        of_speedup(ENTRY, timed)
    )


def test_stopped_call_of_the_reference_does_not_count_beside_complete_ones() -> None:
    """Its seconds are a lower bound."""
    (stopped, *_) = run(0.5, -2.0, {}, at_least=("reference",), few=("reference",))
    whole = run(0.5, 0.0, {})
    assert of_speedup(ENTRY, [stopped, *whole]) == of_speedup(ENTRY, whole)
    assert of_speedup(ENTRY, whole)[0] == "optimized"
    assert reference_moved(ENTRY, [stopped, *whole], 0.02) == ""


def test_loss_is_the_accepted_speedup_over_the_mean_of_this_run() -> None:
    """If both sides are slower by more than the loss, the cause is something that they share."""

    def lost(log: float) -> str | None:
        processes = [replace(m, log_ratios={"reference": (TRUTH - 2 * log, TRUTH)}) for m in run(0.0501, 0.05, {})]
        return of_speedup(ENTRY, processes)[0]

    assert (lost(0.049), lost(0.051)) == ("software", "optimized")


# --- a reference that moved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(("most", "limit"), [(0.05, 0.05), (0.01, 0.02), (0.02, 0.02)])
def test_reference_has_moved_beyond_the_larger_of_the_margin_and_2_percent(
    most: float, limit: float, direction: int
) -> None:
    for part, moved in ((0.999, False), (1.001, True)):
        log = direction * part * math.log1p(limit)
        text = reference_moved(ENTRY, run(0.0, log), most)
        expected = f"the reference is {change(log)} than when accepted, so the ratio to it may hide a slowdown"
        assert text == (expected if moved else "")


def test_reference_moved_is_empty_without_a_change_or_a_reference_time() -> None:
    made: Entry = ENTRY
    assert reference_moved(made, run(0.5, 0.0), 0.01) == ""
    assert reference_moved(made, [measurement(sides={"optimized": side(1.0)})], 0.01) == ""
