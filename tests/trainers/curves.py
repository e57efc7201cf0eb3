"""Comparison of loss curves with the float64 truth, by the rule that holds for all pairs."""

import torch

from perfsuite.correctness.equivalence import C, K

NEIGHBOURS = 3
"""Number of reference runs with perturbed initial weights; they show how far rounding alone moves the curve."""


def a_rounding_away(trainer, seed):
    """Return the trainer with each weight multiplied by 1 ± 2⁻²⁴ at random, one float32 rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trainer.weights.values():
            flips = torch.rand(weight.shape, generator=generator) < 0.5
            weight.mul_(torch.where(flips, 1 + 2**-24, 1 - 2**-24).to(weight.device))
    return trainer


def deviation_of(runs, truth):
    """Return the largest RMS deviation of the runs from the truth, up to each point."""
    return torch.stack([(run - truth) ** 2 for run in runs]).mean(0).sqrt().cummax(0).values


def first_points(known, points):
    """Return the first points of each of the curves."""
    return tuple(curve[:points] for curve in known)


def share_of_rule(found, truth, deviation, dtype):
    """Return the largest error of a curve as a fraction of the allowed error.

    The curve must be finite, since a maximum over NaN says nothing, and as long as the truth.
    """
    assert len(found) == len(truth) == len(deviation)
    assert found.isfinite().all()
    budget = K * deviation + C * torch.finfo(dtype).eps * (truth.abs() + truth.square().mean().sqrt())
    return float(((found - truth).abs() / budget).max())
