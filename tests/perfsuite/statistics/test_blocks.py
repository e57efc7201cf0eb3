"""Mean and variance of the block log-ratios of a process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy  # its parts are imported where they are used

from perfsuite.statistics.blocks import block_variance, process_mean
from perfsuite.statistics.hierarchical import within

CLOCKS = ["device", "wall"]


@pytest.mark.parametrize("clock", CLOCKS)
def test_process_mean_refuses_empty_and_non_finite_blocks(clock: str) -> None:
    assert process_mean([0.03, 0.01], clock) == pytest.approx(0.02)
    for blocks in ([], [math.nan], [0.1, math.inf]):
        with pytest.raises(ValueError, match="finite"):
            process_mean(blocks, clock)


def test_process_mean_on_the_wall_clock_trims_the_outer_quarters() -> None:
    blocks = [0.5, 0.01, 0.02, -0.4, 0.03, 0.04, 0.0, 0.01]
    assert process_mean(blocks, "device") == pytest.approx(sum(blocks) / 8)
    assert process_mean(blocks, "wall") == pytest.approx((0.01 + 0.01 + 0.02 + 0.03) / 4)
    assert process_mean(blocks[:3], "wall") == pytest.approx(0.53 / 3), "of three blocks none is left out"


def test_block_variance_on_the_device_clock_is_the_pooled_variance() -> None:
    processes = [[0.1, 0.3, 0.2], [0.5, 0.4], [0.7]]
    assert block_variance(processes, "device") == (pytest.approx(within(processes)[0]), 3.0)
    assert block_variance([[0.7]], "device") == (0.0, 0.0)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("count", [8, 24])
@pytest.mark.parametrize("tails", [3.0, math.inf])
def test_block_variance_over_block_count_is_the_variance_of_the_process_mean(
    clock: str, count: int, tails: float
) -> None:
    rng = np.random.default_rng(1)
    every = rng.normal(size=(1500, count)) if math.isinf(tails) else rng.standard_t(tails, size=(1500, count))
    drawn = every.tolist()
    found, dof = block_variance(drawn, clock)
    means = np.var([process_mean(blocks, clock) for blocks in drawn], ddof=1)
    assert found / count == pytest.approx(means, rel=0.2)
    assert dof == 1500 * (count - 2 * int(count * (0.25 if clock == "wall" else 0)) - 1)


def test_block_variance_on_the_wall_clock_ignores_one_outlier_in_eight() -> None:
    rng = np.random.default_rng(2)
    quiet = rng.normal(0, 0.01, size=(500, 16))
    struck = quiet.copy()
    struck[:, ::8] += rng.exponential(0.5, size=(500, 2))

    def variance(clock: str) -> float:
        return block_variance(struck.tolist(), clock)[0] / block_variance(quiet.tolist(), clock)[0]

    assert variance("device") > 100
    assert variance("wall") < 2


def test_process_mean_on_the_wall_clock_equals_scipy_trim_mean() -> None:
    blocks = np.random.default_rng(3).normal(size=22).tolist()
    assert process_mean(blocks, "wall") == pytest.approx(float(scipy.stats.trim_mean(blocks, 0.25)))
