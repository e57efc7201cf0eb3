"""Loss curves held against the truth, by the rule of all pairs."""

import torch

from perfsuite.equivalence import C, K

NEIGHBOURS = 3
"""Runs of the reference whose first weights lie a rounding away: how far rounding alone takes its curve."""


def a_rounding_away(trainer, seed):
    """The trainer, each of its weights moved up or down by a rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trainer.weights.values():
            flips = torch.rand(weight.shape, generator=generator) < 0.5
            weight.mul_(torch.where(flips, 1 + 2**-24, 1 - 2**-24).to(weight.device))
    return trainer


def deviation_of(runs, truth):
    """The largest deviation of runs from the truth, in RMS over them, up to each point."""
    return torch.stack([(run - truth) ** 2 for run in runs]).mean(0).sqrt().cummax(0).values


def share_of_rule(found, truth, deviation, dtype):
    """The largest error of a curve, as a share of what the rule allows; it may end before the truth does."""
    truth, deviation = truth[: len(found)], deviation[: len(found)]
    budget = K * deviation + C * torch.finfo(dtype).eps * (truth.abs() + truth.square().mean().sqrt())
    return float(((found - truth).abs() / budget).max())
