"""Networks of other libraries that predict the same fields: an FNO and a U-Net for each task.

Their inputs are normalised fields instead of latents. For a time-dependent task, a network predicts the change from a
state to the next, as the operator does. For a steady task, it predicts the result itself.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from suite.ups.evaluation import nrmse
from suite.ups.task_fields import TaskFields

RATE = 1e-3
"""Initial learning rate of AdamW. It decays to 0 along half a cosine over the training time."""
BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained network, with the steps and the seconds of its training."""

    network: nn.Module
    steps: int
    seconds: float


def fno(dims: int) -> nn.Module:
    """Build the Fourier neural operator of the package neuraloperator, with the width that its examples use."""
    modes = {1: (64,), 2: (24, 24)}[dims]
    found: nn.Module = _imported("neuralop.models", "FNO", "neuraloperator")(
        n_modes=modes, in_channels=1, out_channels=1, hidden_channels=64
    )
    return found


def unet(dims: int) -> nn.Module:
    """Build the U-Net of the package MONAI with its default widths."""
    found: nn.Module = _imported("monai.networks.nets", "BasicUNet", "monai")(
        spatial_dims=dims, in_channels=1, out_channels=1
    )
    return found


RIVALS: Mapping[str, Callable[[int], nn.Module]] = {"FNO": fno, "U-Net": unet}
"""Name → function that builds a network [B, 1, *grid] → [B, 1, *grid] for a number of grid dimensions."""


def parameters(network: nn.Module) -> int:
    """Return the number of real parameters of a network. A complex parameter counts as two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in network.parameters())


def train(network: nn.Module, fields: TaskFields, seconds: float, device: torch.device, seed: int = 0) -> Trained:
    """Train a network in float32 for `seconds`, with the mean squared error as the loss.

    The examples are random steps of the training samples. All fields are kept on the device. The time includes any
    compilation in the first steps.
    """
    states = torch.stack([fields.read(sample) for sample in fields.train]).to(device)
    network = network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    generator = torch.Generator(device=device).manual_seed(seed)
    began, steps = time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + _cosine(spent / seconds))
        sample = torch.randint(len(states), (BATCH,), generator=generator, device=device)
        state = torch.randint(fields.states - 1, (BATCH,), generator=generator, device=device)
        found = step(network, fields, states[sample, state])
        loss = functional.mse_loss(found, states[sample, state + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 10 == 0:
            loss.item()  # wait for the device: otherwise the host would queue steps past the time limit
    return Trained(network=network.eval(), steps=steps, seconds=time.monotonic() - began)


def step(network: nn.Module, fields: TaskFields, state: torch.Tensor) -> torch.Tensor:
    """Predict the next states [B, *grid] from states [B, *grid], both normalised."""
    found: torch.Tensor = network(state.unsqueeze(1)).squeeze(1)
    return found if fields.task == "darcy2d" else state + found


@torch.no_grad()
def errors(network: nn.Module, fields: TaskFields, rollout: int, device: torch.device) -> list[float]:
    """Return the NRMSE over the validation samples at each step of a rollout, computed on denormalised fields."""
    states = torch.stack([fields.read(sample) for sample in fields.validation]).to(device)
    undo, found, state = fields.normalisations[1].undo, [], states[:, 0]
    for number in range(1, min(rollout, fields.states - 1) + 1):
        state = step(network, fields, state)
        target = undo(states[:, number])
        error = (undo(state) - target).square().mean(dtype=torch.float64)
        found.append(nrmse(float(error), float(target.square().mean(dtype=torch.float64))))
    return found


def _cosine(share: float) -> float:
    return float(torch.cos(torch.tensor(min(share, 1.0) * torch.pi)))


def _imported(module: str, name: str, package: str) -> Callable[..., nn.Module]:
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise PerfsuiteError(f"{name} needs the package {package}: pip install {package} ({error})") from None
    return found
