"""The stages after the operator stage: a diffusion model of the operator's residual, and its distillation to one step.

The diffusion stage models the residual r = (z₁ − ẑ₁) / s of the frozen operator, where s is the RMS of z₁ − ẑ₁ over the
first micro-batch. At noise level t from 0 to 1, x_t = cos(πt/2) r + sin(πt/2) ε with ε ~ N(0, 1). From x_t, ẑ₁ and t,
the denoiser predicts v = cos(πt/2) ε − sin(πt/2) r (Salimans and Ho, 2022). Hence r = cos(πt/2) x_t − sin(πt/2) v.

The consistency stage distils that model, the teacher, into a student (Song et al., Consistency Models, 2023). The
student is trained on a grid of noise levels. At each level, its r must match a target from the level below: the teacher
makes a DDIM step to that level, and the student with averaged weights predicts r there. After the distillation, a
prediction needs only one step, from t = 1.

The source names these stages but does not define them.

Source: ups, technique 002 (stages).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from suite.configuration import known
from suite.finding import checkpoint_of
from suite.naming import shown
from suite.runtime import Checkpoint
from suite.runtime.weights import check_weights
from suite.seeding import seeded_on_cpu
from suite.ups.batches import Maker, MicroBatch, Mixture
from suite.ups.config import TrainConfig
from suite.ups.model import Block, Operator
from suite.ups.networks import Networks

DEPTH = 4
"""Number of blocks in a denoiser."""
LEVELS = 16
"""Number of noise levels in the distillation, and of DDIM steps in a prediction of the diffusion stage."""
BEFORE = {"diffusion": "operator", "consistency": "diffusion"}
"""Stage → the previous stage, whose checkpoint it starts from."""
NOISE_STREAM = -1000
"""Random stream of a micro-batch that the noise is drawn from."""


class Denoiser(Operator):
    """A network of four blocks that predicts v from noisy residuals, the operator's prediction and the noise level."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config.latent_width, config.width, DEPTH, config.heads, config.mlp_ratio)
        self.take = nn.Linear(2 * config.latent_width, config.width)

    def forward(self, noisy: torch.Tensor, predicted: torch.Tensor, level: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # other inputs
        """Predict v: noisy, predicted [B, T, latent width], level [B] → v [B, T, latent width]."""
        x, time = self.take(torch.cat((noisy, predicted), -1)), self.embed_time(level)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block.feed(block.attend(x, time), time)
        v: torch.Tensor = self.give(self.norm(x))
        return v


class Refiner(nn.Module):
    """The networks of a stage after the operator stage. Only the denoiser is trained."""

    def __init__(self, config: TrainConfig, mixture: Mixture, *, begin: bool = True) -> None:
        """Build the networks, and load the averaged weights from the previous stage's checkpoint, `config.init`.

        begin  whether to load these weights; if False, the caller must set all weights

        PerfsuiteError if the checkpoint is from another stage or does not fit.
        """
        super().__init__()
        self.stage = config.stage
        self.frozen = Networks(config, mixture).requires_grad_(False)
        with seeded_on_cpu(config.seed):
            self.denoiser = Denoiser(config)
        self.teacher = Denoiser(config).requires_grad_(False) if config.stage == "consistency" else None
        self.register_buffer("residual_scale", torch.ones(()))
        self.residual_scale: torch.Tensor
        if begin:
            self._begin(config)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return name → parameter of the denoiser. The names begin with `denoiser.`."""
        return {f"denoiser.{name}": p for name, p in self.denoiser.named_parameters()}

    def kept(self) -> dict[str, torch.Tensor]:
        """Return name → tensor that is not trained: operator, encoders, decoders, teacher and residual scale."""
        own = self.weights()
        return {name: tensor for name, tensor in self.state_dict(keep_vars=True).items() if name not in own}

    @torch.no_grad()
    def measure(self, micro: MicroBatch) -> None:
        """Set the residual scale s from the first micro-batch of the training.

        Only the diffusion stage sets it. The consistency stage keeps the scale that was loaded.
        """
        like = self.residual_scale
        before, after, dt = (_joined(micro, name).to(like) for name in ("before", "after", "dt"))
        if self.stage == "diffusion":
            self.residual_scale.copy_((after - self.frozen.operator(before, dt)).square().mean().sqrt())

    def loss(
        self,
        before: torch.Tensor,
        after: torch.Tensor,
        dt: torch.Tensor,
        drawn: tuple[torch.Tensor, torch.Tensor],
        averages: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the loss of the stage, 0-d.

        before, after  [B, T, latent width]
        dt             [B]
        drawn          noise level [B] and noise [B, T, latent width], as drawn by `draw`
        averages       moving averages of the denoiser's weights, with the names that `weights` returns
        """
        level, noise = drawn
        with torch.no_grad():
            predicted = self.frozen.operator(before, dt)
            residual = (after - predicted) / self.residual_scale
        alpha, sigma = schedule(level)
        noisy = alpha * residual + sigma * noise
        v = self.denoiser(noisy, predicted, level)
        if self.teacher is None:
            return functional.mse_loss(v.to(noise.dtype), alpha * noise - sigma * residual)
        below = level - 1 / LEVELS
        own = {name.removeprefix("denoiser."): average for name, average in averages.items()}
        with torch.no_grad():
            stepped = ddim(noisy, self.teacher(noisy, predicted, level), level, below)
            target = cleaned(stepped, functional_call(self.denoiser, own, (stepped, predicted, below)), below)
        return functional.mse_loss(cleaned(noisy, v, level), target)

    @torch.no_grad()
    def refine(self, predicted: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Add a sampled residual to the operator's prediction.

        Sampling makes 16 DDIM steps in the diffusion stage and one in the consistency stage.

        predicted, noise  [B, T, latent width]
        """
        x, steps = noise, 1 if self.stage == "consistency" else LEVELS
        for number in range(steps, 0, -1):
            level = torch.full((len(x),), number / steps, dtype=x.dtype, device=x.device)
            x = ddim(x, self.denoiser(x, predicted, level), level, level - 1 / steps)
        return predicted + self.residual_scale * x

    def _begin(self, config: TrainConfig) -> None:
        assert config.init is not None
        file, found, before = opened(Path(config.init))
        wanted = BEFORE[config.stage]
        if before.stage != wanted:
            raise PerfsuiteError(
                f"init: {shown(file)} is of the stage {before.stage}, and {config.stage} starts from {wanted}; "
                "name another"
            )
        try:
            if wanted == "operator":
                take(self.frozen.weights(), found.trainer["averages"])
            else:
                kept = {name: t for name, t in self.kept().items() if not name.startswith("teacher.")}
                take(kept, found.trainer["kept"])
                for network in (self.denoiser, self.teacher):
                    assert network is not None
                    own = {f"denoiser.{name}": p for name, p in network.named_parameters()}
                    take(own, found.trainer["averages"])
        except (KeyError, ValueError) as error:
            raise PerfsuiteError(f"init: {shown(file)} does not fit: {error}; name the run before this one") from None


def schedule(level: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos(πt/2) and sin(πt/2) for noise levels t: [B] → [B, 1, 1] each."""
    angle = level[:, None, None] * (math.pi / 2)
    return angle.cos(), angle.sin()


def cleaned(noisy: torch.Tensor, v: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Return the residual r = cos(πt/2) x_t − sin(πt/2) v."""
    alpha, sigma = schedule(level)
    return alpha * noisy - sigma * v


def ddim(noisy: torch.Tensor, v: torch.Tensor, level: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Make a deterministic DDIM step from `level` to the lower noise level `below` (Song, Meng and Ermon, 2021)."""
    alpha, sigma = schedule(level)
    next_alpha, next_sigma = schedule(below)
    return next_alpha * (alpha * noisy - sigma * v) + next_sigma * (sigma * noisy + alpha * v)


def draw(maker: Maker, number: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (noise levels [B], noise with the shape, dtype and device of `like`) for micro-batch `number`.

    The result depends only on the seed and the micro-batch.
    """
    generator = maker.generator(number, NOISE_STREAM)
    if maker.config.stage == "consistency":
        level = torch.randint(1, LEVELS + 1, (len(like),), generator=generator) / LEVELS
    else:
        level = torch.rand(len(like), generator=generator)
    return level.to(like), torch.randn(like.shape, generator=generator).to(like)


def opened(path: Path) -> tuple[Path, Checkpoint, TrainConfig]:
    """Return (file, checkpoint, configuration) of a checkpoint of ups. In a folder, use the last checkpoint."""
    file, found = checkpoint_of(str(path), "ups")
    given = found.trainer.get("config")
    fields = known(TrainConfig, given) if isinstance(given, Mapping) else {}
    if not fields:
        raise PerfsuiteError(f"{shown(file)} is damaged: it has no configuration; name another")
    try:
        return file, found, TrainConfig(**fields)
    except (TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(file)} is damaged: {error}; name another") from None


@torch.no_grad()
def take(own: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Copy the tensors `saved` into `own`. ValueError if one is missing or has another shape."""
    check_weights(own, saved)
    for name, weight in saved.items():
        own[name].copy_(weight)


@dataclass(frozen=True)
class Parts:
    """The networks of a stage, in the same form for all stages."""

    networks: Networks
    refiner: Refiner | None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Name → parameter that the stage trains."""
        return self.networks.weights() if self.refiner is None else self.refiner.weights()


def networks_of(config: TrainConfig, maker: Maker, device: torch.device, dtype: torch.dtype = torch.float32) -> Parts:
    """Build the networks of a stage. After the operator stage, load the weights of the previous stage."""
    if config.stage == "operator":
        return Parts(Networks(config, maker.mixture).to(device, dtype), None)
    refiner = Refiner(config, maker.mixture).to(device, dtype)
    refiner.measure(maker.first())
    return Parts(refiner.frozen, refiner)


def _joined(micro: MicroBatch, name: str) -> torch.Tensor:
    return torch.cat([getattr(part, name) for part in micro.parts])
