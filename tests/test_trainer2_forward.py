"""The variants of trainer2's forward pass that an experiment times compute the same function."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from experiments.trainer2_forward import __main__ as experiment
from suite.trainer2.config import TrainConfig

CONFIG = TrainConfig(batch_size=2, sequence_length=5, blocks=2, lattice=2)
NAMES = list(experiment.Problem(CONFIG, "cpu").variants())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_as_accurate_as_the_present_forward_pass(name: str) -> None:
    problem = experiment.Problem(CONFIG, "cpu")
    problem.mask[1, 3:] = 0
    truth = problem.truth()
    with torch.no_grad():
        plain, found = (call(problem.field) for call in (problem.present, problem.variants()[name]))
    assert (found[0] - truth).abs().max() <= 2 * (plain[0] - truth).abs().max()
    assert (found[1] - plain[1]).abs().max() <= 2 * (plain[0] - truth).abs().max()


def test_products_are_added_to_the_residual_stream_in_bfloat16() -> None:
    problem = experiment.Problem(dataclasses.replace(CONFIG, autocast_bf16=True), "cpu")
    truth = problem.truth()
    with torch.no_grad():
        plain, found = (problem.variants()[name](problem.field)[0] for name in ("present", "residual"))
    assert (found - truth).square().mean() <= 1.1 * (plain - truth).square().mean()
