"""The comparison of loss curves with the truth."""

import math

import pytest
import torch
from curves import share_of_rule

TRUTH = torch.linspace(3, 1, 6, dtype=torch.float64)
DEVIATION = torch.full_like(TRUTH, 1e-6)


def test_curve_within_the_deviation_is_accepted_and_one_point_beyond_is_not():
    found = TRUTH + DEVIATION
    assert share_of_rule(found, TRUTH, DEVIATION, torch.float32) <= 1
    found[4] += 0.1
    assert share_of_rule(found, TRUTH, DEVIATION, torch.float32) > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_curve_with_a_nonfinite_point_is_rejected(value):
    found = TRUTH.clone()
    found[-1] = value
    with pytest.raises(AssertionError):
        share_of_rule(found, TRUTH, DEVIATION, torch.float32)


def test_curve_that_is_too_short_is_rejected():
    with pytest.raises(AssertionError):
        share_of_rule(TRUTH[:-1], TRUTH, DEVIATION, torch.float32)
