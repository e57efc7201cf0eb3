"""Planning: how many blocks and processes of each workload are timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from builders import entry, measurement

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.gate import planning
from perfsuite.gate.planning import (
    blocks_of,
    doubtful_processes,
    enough_s,
    first_processes,
    further,
    is_ample,
    is_slow,
    more_reference_blocks,
    noise_parts,
    reference_blocks,
    scale,
)
from perfsuite.statistics.hierarchical import Estimate, Noise, Variance

PAIR = [-1.0, 1.0]


def accepted(*processes: Sequence[float], sessions: int = 1) -> Entry:
    """Return an entry whose processes have these block log-ratios to the accepted side."""
    return entry([[measurement(accepted=p) for p in processes]] * sessions)


def of_parts(block: float, shift: float, blocks: int = 8) -> Entry:
    """Return an entry with exactly these variances of a block and of the process shift."""
    row = np.resize(PAIR, blocks) * math.sqrt(block * (blocks - 1) / blocks)
    apart = math.sqrt((shift + block / blocks) / 2)
    return accepted(*(list(row + apart * sign) for sign in PAIR))


def with_reference(seconds: float, ratio: float = math.log(20.0)) -> Entry:
    return entry([measurement(reference_s=seconds, ratio=ratio)])


def test_the_limits_are_the_documented_ones() -> None:
    assert (planning.LONG_S, planning.SLOW_PROOF_S, planning.AMPLE, planning.FEW_BLOCKS) == (1.0, 0.02, 10.0, 3)
    assert (planning.LEAST_BLOCKS, planning.MOST_BLOCKS) == (4, 24)
    assert planning.TARGET_SHARE == 0.35
    assert (planning.LEAST_LONG_BLOCKS, planning.LONG_BLOCK_S, planning.CALLS) == (2, 0.5, 12)


# --- the parts of the noise -----------------------------------------------------------------------------------------


def test_variance_is_split_into_block_variance_and_process_shift() -> None:
    processes = [[0.0, 1.0, 2.0], [3.0, 5.0], [9.0, 10.0]]
    block = (2 * 1.0 + 2.0 + 0.5) / 4
    shift = np.var([1.0, 4.0, 9.5], ddof=1) - block / ((3 + 2 + 2) / 3)
    assert noise_parts(accepted(*processes)) == (pytest.approx(block), pytest.approx(shift))


def test_noise_parts_use_the_processes_of_all_sessions() -> None:
    assert noise_parts(accepted([0.0, 1.0], sessions=2)) == (pytest.approx(0.5), 0.0)
    assert noise_parts(accepted([0.0, 1.0], [9.0, 10.0], sessions=2)) == (pytest.approx(0.5), pytest.approx(27 - 0.25))


def test_a_process_of_one_block_affects_only_the_shift() -> None:
    block, shift = noise_parts(accepted([0.0, 2.0], [5.0]))
    assert (block, shift) == (pytest.approx(2.0), pytest.approx(8.0 - 2.0 / 1.5))


def test_shift_is_zero_if_processes_vary_less_than_their_blocks() -> None:
    assert noise_parts(accepted([-1.0, 1.0], [1.0, -1.0])) == (2.0, 0.0)


def test_noise_parts_are_zero_without_several_processes_and_blocks() -> None:
    assert noise_parts(accepted([0.0, 1.0])) == (0.0, 0.0)
    assert noise_parts(accepted([0.0], [1.0])) == (0.0, 0.0)
    assert noise_parts(entry([measurement()] * 3)) == (0.0, 0.0)
    (session,) = (made := accepted([0.0, 1.0], [2.0, 3.0])).sessions
    (first, second) = session.processes
    plain = replace(second, log_ratios={"reference": (1.0, 2.0)})
    assert noise_parts(replace(made, sessions=(replace(session, processes=(first, plain)),))) == (0.0, 0.0)


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [3, 4.5, 8, 16])
def test_the_variance_of_a_process_mean_scales_with_its_blocks(blocks: float) -> None:
    made = of_parts(block=4e-6, shift=1e-6)
    assert noise_parts(made) == (pytest.approx(4e-6, rel=1e-3), pytest.approx(1e-6, rel=1e-2))
    assert scale(made, blocks) == pytest.approx((1 + 4 / blocks) / (1 + 4 / 8), rel=1e-2)


def test_scale_is_relative_to_the_mean_number_of_accepted_blocks() -> None:
    made = accepted([0.0, 2.0, 0.0, 2.0], [-3.0, 5.0])
    block, shift = noise_parts(made)
    assert scale(made, 3) == pytest.approx(1.0)
    assert scale(made, 6) == pytest.approx((shift + block / 6) / (shift + block / 3))


def test_without_block_noise_more_blocks_change_nothing() -> None:
    for made in (accepted([0.0, 0.0], [1.0, 1.0]), accepted([0.0, 1.0]), entry([measurement()] * 3)):
        assert scale(made, 3) == 1.0
        assert blocks_of(made, 0.01) is None


@pytest.mark.parametrize(
    ("share_of_target", "shift_share", "blocks"),
    [
        # Variances of a block and of the shift, as shares of the target variance.
        (4.5, 0.0, 5),
        (4.9, 0.0, 5),
        (5.1, 0.0, 6),
        (1.9, 0.5, 4),
        (2.1, 0.5, 5),
        (5.1, 0.5, 11),
        (0.1, 0.0, 4),
        (60.0, 0.0, 24),
        # The shift alone exceeds the target, so the blocks add half of its variance.
        (5.9, 2.0, 6),
        (6.1, 2.0, 7),
        (6.1, 1.0, 13),
    ],
)
def test_blocks_of_a_process_meet_the_target_variance(share_of_target: float, shift_share: float, blocks: int) -> None:
    target = (planning.TARGET_SHARE * 0.05) ** 2
    assert blocks_of(of_parts(share_of_target * target, shift_share * target, blocks=16), 0.05) == blocks


def test_two_long_blocks_are_enough_if_the_noise_is_small() -> None:
    target = (planning.TARGET_SHARE * 0.05) ** 2
    for seconds, least in ((0.5 / 12 - 1e-4, 4), (0.5 / 12 + 1e-4, 2)):
        for share, blocks in ((0.1, least), (2.9, max(3, least)), (60.0, 24)):
            made = of_parts(share * target, 0.0, blocks=16)
            slow = replace(made, sides={n: replace(s, seconds=seconds) for n, s in made.sides.items()})
            assert blocks_of(slow, 0.05) == blocks


# --- the reference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sd", "processes"), [(0.0, 2), (0.0196, 2), (0.0197, 3), (0.0225, 3), (0.0226, 4), (1.0, 4)])
def test_number_of_first_processes_grows_with_the_noise(sd: float, processes: int) -> None:
    """The number of processes follows from the noise.

    With known noise, error rates of 0.6%, 0.3% and 0.15% are 2.51, 2.75 and 2.97 standard errors. One more must fit
    within log(1.05), which holds up to standard deviations of 0.01965, 0.02255 and 0.02459.
    """
    made = entry([measurement(accepted=0.0)])  # one process: its noise is the prior's
    prior = Noise(process=Variance(value=sd**2, dof=math.inf), session=Variance(value=1.0, dof=math.inf))
    assert first_processes(made, 0.05, prior, slow_to_prepare=False) == processes


@pytest.mark.parametrize(
    ("sd", "processes"), [(0.0125, 2), (0.0126, 3), (0.0147, 3), (0.0148, 4), (0.0163, 4), (0.0164, 6), (1.0, 6)]
)
def test_workloads_that_are_slow_to_prepare_start_with_more_processes(sd: float, processes: int) -> None:
    """Three more standard errors fit within log(1.05) up to standard deviations of 0.01252, 0.01470 and 0.01635."""
    made = entry([measurement(accepted=0.0)])
    prior = Noise(process=Variance(value=sd**2, dof=math.inf), session=Variance(value=1.0, dof=math.inf))
    assert first_processes(made, 0.05, prior, slow_to_prepare=True) == processes


def test_a_reference_above_20_ms_is_slow() -> None:
    assert not is_slow(with_reference(0.02))
    assert is_slow(with_reference(0.0201))


def test_a_promise_is_ample_if_the_speedup_exceeds_it_ten_times() -> None:
    made = with_reference(0.1, ratio=0.0)
    assert made.speedup() == 1.0
    assert is_ample(made, 0.1)
    assert not is_ample(made, 0.1001)
    assert not is_ample(made, None)


def test_enough_s_of_a_long_reference_exceeds_its_promise_ten_times() -> None:
    long = with_reference(1.1)  # the optimized side takes 0.1 ms
    assert enough_s(long, 1.5) == pytest.approx(10 * 1.5 * 1e-4)
    assert enough_s(long, 15.0) == 0.0, "twenty times as fast is not ten times that"
    assert enough_s(long, None) == 0.0
    assert enough_s(with_reference(1.0), 1.5) == 0.0


def test_the_reference_is_timed_in_as_few_blocks_as_its_promise_allows() -> None:
    assert reference_blocks(with_reference(1.0), None) == 3
    assert reference_blocks(with_reference(1.0), 15.0) == 3
    long = with_reference(1.1)
    assert reference_blocks(long, None) == 0
    assert reference_blocks(long, 15.0) == 1
    assert reference_blocks(long, 1.5) == 0
    assert more_reference_blocks(with_reference(1.0)) is None
    assert more_reference_blocks(long) == 1


@pytest.mark.parametrize(
    ("promised", "sd", "slow", "processes"),
    [
        (None, 9.0, True, 0),
        (1.0, 0.0, False, 0),
        (2 / 1.19, 0.0, False, 1),  # exceeded by less than a fifth
        (2 / 1.21, 0.0, True, 0),
        # Twice 2.25 standard deviations of a process are beyond 0.5.
        (2 / math.exp(0.5), 0.105, False, 0),
        (2 / math.exp(0.5), 0.115, False, 1),
        (2 / math.exp(1.0), 0.105, True, 0),
        (2 / math.exp(1.0), 0.115, True, 1),
        # The error is 2.5 / √2 for the mean of two processes, and 2.75 / √3 for the mean of three.
        (2 / math.exp(0.5), 0.25, False, 2),
        (2 / math.exp(0.5), 0.3, False, 3),
        (2 / math.exp(1.0), 0.3, True, 3),
        (2 / math.exp(0.5), 9.0, False, 6),
        (2.1, 0.0, False, 6),  # not reached when it was accepted
    ],
)
def test_doubtful_processes_grow_with_the_noise_and_a_closer_promise(
    promised: float | None, sd: float, slow: bool, processes: int
) -> None:
    made = entry([measurement(ratio=math.log(2))])  # one process: its noise is the prior's
    prior = Noise(process=Variance(value=sd**2, dof=math.inf), session=Variance(value=1.0, dof=math.inf))
    assert doubtful_processes(made, promised, prior, first=1, slow_to_prepare=slow) == processes


def test_doubtful_processes_use_the_level_of_the_first_decision() -> None:
    # Twice 2.25 standard deviations of a process after one process, 2.75 after three, 2.97 after four or more.
    made = entry([measurement(ratio=math.log(2))])
    prior = Noise(process=Variance(value=0.105**2, dof=math.inf), session=Variance(value=1.0, dof=math.inf))
    promised = 2 / math.exp(0.5)
    found = [doubtful_processes(made, promised, prior, first=n, slow_to_prepare=False) for n in (1, 3, 4, 6)]
    assert found == [0, 1, 1, 1]


# --- how many further processes -------------------------------------------------------------------------------------

SAME_LEVEL = dict.fromkeys((1, 2, 3, 5), 0.025)


@pytest.mark.parametrize(
    ("gap", "done", "more"),
    # 1.96 standard errors of the mean of all processes
    [
        (2.0, 0, 1),
        (1.9, 0, 2),
        (1.4, 0, 2),
        (1.2, 0, 3),
        (1.1, 0, 5),
        (0.5, 0, 5),
        (-3.0, 0, 5),
        (1.2, 1, 2),
        (1.2, 2, 1),
    ],
)
def test_further_is_the_number_of_processes_that_will_probably_decide(gap: float, done: int, more: int) -> None:
    assert further(Estimate(value=3.0 + gap, se=1.0, dof=math.inf), 3.0, done, SAME_LEVEL) == more
    assert further(Estimate(value=2 * gap, se=2.0, dof=math.inf), 0.0, done, SAME_LEVEL) == more


def test_further_uses_the_degrees_of_freedom_and_the_level_of_each_number() -> None:
    one = Estimate(value=4.29, se=1.0, dof=1.0)
    assert further(one, 0.0, 0, SAME_LEVEL) == 2, "the quantile of 2 degrees is 4.30, of 3 degrees 3.18"
    assert further(replace(one, value=4.31), 0.0, 0, SAME_LEVEL) == 1
    assert further(one, 0.0, 0, {1: 0.05, 2: 0.025}) == 1
    assert further(one, 0.0, 0, {}) == 1
