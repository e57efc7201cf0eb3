"""Dropout masks, which depend only on the seed and the step."""

from __future__ import annotations

import pytest
import torch

from suite.batching import STEP, WORD, mixed, signed
from suite.leak_cnn.dropout import LANES, STRIDE, dropout_counter, dropout_mask


def mask(seed: int = 0, step: int = 0, rows: int = 64, width: int = 2048, p: float = 0.25) -> torch.Tensor:
    found = dropout_mask(torch.tensor(dropout_counter(seed, step)), rows, width, p, torch.float32)
    assert found is not None
    return found


@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
def test_mask_drops_a_share_p_and_scales_the_rest(p: float) -> None:
    found = mask(p=p)
    assert found.shape == (64, 2048)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    dropped = (found == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=5 * (p * (1 - p) / found.numel()) ** 0.5)


def test_masks_of_neighbouring_rows_columns_and_steps_are_uncorrelated() -> None:
    """The correlation over 131,072 decisions is below five standard deviations."""
    kept = (mask() > 0).double() - 0.75
    others = {
        "the next row": kept.roll(1, 0),
        "the next column": kept.roll(1, 1),
        "the next lane": kept.roll(2048 // LANES, 1),
        "the next step": (mask(step=1) > 0).double() - 0.75,
        "another seed": (mask(seed=1) > 0).double() - 0.75,
    }
    for name, other in others.items():
        correlation = (kept * other).mean() / 0.1875 * kept.numel() ** 0.5
        assert correlation.abs() < 5, name


def test_mask_is_deterministic_and_depends_on_seed_and_step() -> None:
    assert torch.equal(mask(3, 7), mask(3, 7))
    assert not torch.equal(mask(3, 7), mask(3, 8))
    assert not torch.equal(mask(3, 7), mask(4, 7))


def test_counter_on_the_device_advances_as_on_the_host() -> None:
    counter = torch.tensor(dropout_counter(5, 0))
    for step in range(1, 200):
        counter.add_(STRIDE)
        assert counter.item() == dropout_counter(5, step)


def test_mask_is_computed_with_splitmix64() -> None:
    """The expected masks are computed with Python's integers, which do not overflow."""
    kept = mask(9, 4, rows=2, width=16) > 0
    start = dropout_counter(9, 4)
    assert start - dropout_counter(9, 3) in (STRIDE, STRIDE + (1 << 64), STRIDE - (1 << 64))
    assert signed(STEP) == STRIDE
    for row in range(2):
        for column in range(16):
            lane, word = divmod(column, 4)
            drawn = mixed(start + 4 * row + word & WORD) >> 16 * lane & 0xFFFF
            assert kept[row, column].item() == (drawn >= 16384)


def test_mask_is_none_for_p_0() -> None:
    assert dropout_mask(torch.tensor(1), 2, 8, 0.0, torch.float32) is None
