"""Training and evaluation of the networks from other libraries that ups is compared with."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from perfsuite.errors import PerfsuiteError
from suite.ups import rivals
from suite.ups.task_fields import synthetic

CPU = torch.device("cpu")


@pytest.fixture
def advection():
    return synthetic("advection1d", samples=4, cells=16, frames=4, validation=0.25, seed=0)


@pytest.fixture
def darcy():
    return synthetic("darcy2d", samples=4, cells=8, frames=2, validation=0.25, seed=0)


class Zero(nn.Module):
    """Network that predicts 0."""

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(field)


def test_a_network_that_predicts_no_change_has_the_error_of_the_first_state(advection):
    (sample,) = advection.validation
    states = advection.normalisations[1].undo(advection.read(sample)).double()
    expected = [math.sqrt((states[0] - s).square().mean() / (s.square().mean() + 1e-8)) for s in states[1:3]]
    assert rivals.errors(Zero(), advection, 2, CPU) == pytest.approx(expected, rel=1e-5)
    assert len(rivals.errors(Zero(), advection, 10, CPU)) == 3


def test_advection_of_two_frames_has_time():
    two = synthetic("advection1d", samples=4, cells=16, frames=2, validation=0.25, seed=0)
    state = torch.randn(3, 16)
    assert torch.equal(rivals.step(Zero(), two, state), state)


def test_for_data_without_time_the_network_predicts_the_solution(darcy):
    (sample,) = darcy.validation
    undo = darcy.normalisations[1].undo
    target, mean = undo(darcy.read(sample)[1]).double(), undo(torch.zeros(8, 8)).double()
    expected = math.sqrt((mean - target).square().mean() / (target.square().mean() + 1e-8))
    assert rivals.errors(Zero(), darcy, 10, CPU) == pytest.approx([expected], rel=1e-5)


def test_training_lasts_the_given_time_and_lowers_the_error(advection, monkeypatch):
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(rivals.time, "monotonic", lambda: next(clock))
    torch.manual_seed(0)
    network = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
    before = rivals.errors(network, advection, 1, CPU)
    trained = rivals.train(network, advection, 150, CPU)
    assert trained.steps == 299
    assert rivals.errors(trained.network, advection, 1, CPU)[0] < 0.8 * before[0]


def test_complex_parameters_count_twice():
    network = nn.ParameterList([torch.zeros(3), torch.zeros(2, dtype=torch.complex64)])
    assert rivals.parameters(network) == 7


@pytest.mark.parametrize(("name", "package"), [("FNO", "neuraloperator"), ("U-Net", "monai")])
def test_a_missing_package_is_reported_with_its_install_command(monkeypatch, name, package):
    for module in ("neuralop", "neuralop.models", "monai", "monai.networks.nets"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(PerfsuiteError, match=f"needs the package {package}: pip install {package}"):
        rivals.RIVALS[name](1)
