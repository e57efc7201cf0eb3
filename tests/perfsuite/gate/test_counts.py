"""Memory, host syncs and launches are compared with the promises and the accepted counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import counting, entry, measurement, side

from perfsuite.gate import counts
from perfsuite.records import Measurement, PromiseRecord

MIB = 1 << 20
PLAIN = measurement()
ENTRY = entry([PLAIN])
"""Entry with 1024 bytes, no host sync and one launch."""


def beside(m: Measurement, **accepted: int | None) -> Measurement:
    """Return the measurement with an interleaved accepted side that has these counts."""
    return replace(m, sides={**m.sides, "accepted": side(1e-4, **accepted)})


def test_allowances_have_their_documented_values() -> None:
    assert (counts.MEMORY_SHARE, counts.MEMORY_BYTES) == (0.02, MIB)
    assert list(counts.NAMES) == ["peak_bytes", "host_syncs", "launches"]


# --- promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host_syncs", "launches", "peak_bytes"])
def test_promise_is_broken_by_one_process_above_it(name: str) -> None:
    promise = PromiseRecord(**{name: 5})
    at = counting(PLAIN, **{name: 5})
    assert counts.broken([at, at], promise) == ""
    assert counts.broken([at, counting(PLAIN, **{name: 6}), at], promise)
    assert counts.broken([at, counting(PLAIN, **{name: 6})], PromiseRecord()) == ""


def test_promise_of_zero_is_enforced() -> None:
    promise = PromiseRecord(host_syncs=0)
    assert counts.broken([PLAIN], promise) == ""
    assert counts.broken([counting(PLAIN, host_syncs=1)], promise)


def test_message_names_every_broken_promise_with_the_largest_count() -> None:
    promise = PromiseRecord(host_syncs=0, launches=2, peak_bytes=3 * MIB // 2, speedup=2.0)
    run = [counting(PLAIN, host_syncs=n, launches=7 - n, peak_bytes=n * MIB) for n in (3, 2)]
    assert counts.broken(run, promise) == (
        "the optimized side breaks its promise: peak memory 3 MiB (promised: at most 1.5 MiB), "
        "host syncs 3 (promised: at most 0), kernel launches 5 (promised: at most 2); fix it, or change the promise"
    )


def test_promised_count_must_be_measured_by_at_least_one_process() -> None:
    promise = PromiseRecord(launches=1, host_syncs=0)
    none = counting(PLAIN, launches=None, host_syncs=None)
    assert counts.missing([none, none], promise) == (
        "host syncs, kernel launches promised, but no process counted them"
    )
    assert counts.missing([none, counting(none, launches=0)], promise) == (
        "host syncs promised, but no process counted them"
    )
    assert counts.missing([none, PLAIN], promise) == ""
    assert counts.missing([none], PromiseRecord(peak_bytes=1, speedup=2.0)) == ""
    assert counts.broken([none, PLAIN], promise) == ""
    gone = replace(PLAIN, sides={"reference": side(1.0)})
    assert counts.missing([gone], PromiseRecord(launches=1)) == "kernel launches promised, but no process counted them"


def test_message_notes_that_launches_cannot_be_counted_on_a_cpu() -> None:
    promise = PromiseRecord(launches=1, peak_bytes=1)
    for device in ("cpu", "cpu-xeon"):
        run = [counting(replace(PLAIN, device=device), launches=None)]
        assert counts.missing(run, promise) == ""
        assert counts.uncounted(run, promise) == "; kernel launches promised, but not countable on a CPU"
    assert counts.uncounted([PLAIN], promise) == ""


# --- more than accepted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host_syncs", "launches"])
def test_count_is_more_only_if_every_process_exceeds_the_stored_one(name: str) -> None:
    stored = getattr(ENTRY.sides["optimized"], name)
    more, same = counting(PLAIN, **{name: stored + 1}), counting(PLAIN, **{name: stored})
    assert counts.more_than_accepted([more, more], ENTRY)
    assert counts.more_than_accepted([more, same], ENTRY) == ""
    assert counts.more_than_accepted([same, more], ENTRY) == ""
    assert counts.more_than_accepted([more], None) == ""


@pytest.mark.parametrize(
    ("before", "most"),
    [(0, MIB), (10 * MIB, 11 * MIB), (50 * MIB, 51 * MIB), (100 * MIB, 102 * MIB), (1000, MIB + 1000)],
)
def test_memory_may_rise_by_2_percent_or_1_mib(before: int, most: int) -> None:
    for now, more in ((most, False), (most + 1, True)):
        run = [beside(counting(PLAIN, peak_bytes=now), peak_bytes=before)]
        assert bool(counts.more_than_accepted(run, ENTRY)) is more


def test_counts_of_the_interleaved_accepted_side_precede_stored_ones() -> None:
    two = counting(PLAIN, launches=2)
    assert counts.more_than_accepted([beside(two, launches=2)], ENTRY) == ""
    assert counts.more_than_accepted([beside(PLAIN, launches=0)], ENTRY)
    assert counts.more_than_accepted([beside(two, launches=1)], None)
    # If the interleaved side has no count, the stored one is used, if there is one.
    assert counts.more_than_accepted([beside(two, launches=None)], ENTRY)
    assert counts.more_than_accepted([beside(two, launches=None)], None) == ""


def test_missing_counts_are_not_compared() -> None:
    more, none = counting(PLAIN, launches=9), counting(PLAIN, launches=None)
    assert counts.more_than_accepted([none], ENTRY) == ""
    assert counts.more_than_accepted([none, more], ENTRY)
    uncounted = entry([none])
    assert counts.more_than_accepted([more], uncounted) == ""


def test_message_names_every_larger_count_with_its_accepted_value() -> None:
    run = [
        beside(counting(PLAIN, peak_bytes=n * MIB, host_syncs=n, launches=n), peak_bytes=MIB // 2, host_syncs=n - 1)
        for n in (4, 3)
    ]
    assert counts.more_than_accepted(run, ENTRY) == (
        "the optimized side needs more: peak memory 3 MiB, 0.5 MiB when accepted; host syncs 3, 2 when accepted; "
        "kernel launches 3, 1 when accepted"
    )


def test_process_without_a_count_is_no_second_witness() -> None:
    more, unknown = counting(PLAIN, launches=3), counting(PLAIN, launches=None)
    assert counts.witnesses([more, unknown], ENTRY) == 1
    assert counts.witnesses([more, more], ENTRY) == 2
    assert counts.witnesses([more, more], None) == 2
