"""The reference trainer of ups, a neural operator on latents of PDE fields; plain and eager.

A step passes `accumulation` micro-batches, each with examples of all tasks, through the operator. It computes the
inverse losses of every micro-batch and uses those that the schedule names. Then it applies Muon to the matrices and
AdamW to the other weights, tensor by tensor.

The source leaves some choices open. This trainer makes them as follows:

* A weight that no loss of a step reaches is not changed: the encoders and decoders have their own optimizer, which runs
  only if a micro-batch of the step had the inverse losses.
* The schedule of the inverse losses and the order of the examples both count micro-batches.
* The learning rate is constant.
* In float16 a step with non-finite gradients changes only the loss scale, as with `GradScaler`.
* Both trainers share the functions that draw the initial weights, and the networks of the later stages, which the
  source only names. The operator, the encoders, the decoders and the losses are implemented in this file.
* Several ranks train with `DistributedDataParallel`, which averages the gradients of each micro-batch over the ranks.

Source: ups, technique 002.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from reference.losses.inverse_losses import inverse_losses
from reference.losses.query_sampling import query_sampling
from reference.optimizers.clip_grad_norm import clip_grad_norm
from reference.optimizers.ema import ema
from reference.optimizers.hybrid_muon_adamw import hybrid_muon_adamw
from suite.runtime.reports import Reports
from suite.stepping import Throughput, WaitsForReports, check_step
from suite.ups.batches import Feed, Maker, MicroBatch, Mixture, TaskPart
from suite.ups.config import TrainConfig
from suite.ups.losses import InverseTask
from suite.ups.networks import CODERS, grouped, rate_of
from suite.ups.report import Report
from suite.ups.scaler import LossScale
from suite.ups.stages import draw, networks_of
from suite.ups.state import restore, state_of
from suite.ups.step import autocast, note_what_is_ignored, sent

Weights = Mapping[str, torch.Tensor]


class Trainer(WaitsForReports):
    """The reference trainer. `train_window` runs one step; `metrics` returns its metrics.

    mixture  the data, as `suite.ups.batches.load` opens them
    dtype    working precision: float32, or float64 for the ground truth

    ValueError if a batch does not divide into the tasks' shares.
    """

    window_name = "step"

    def __init__(
        self, config: TrainConfig, mixture: Mixture, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.mixture, self.device, self.dtype = config, mixture, torch.device(device), dtype
        note_what_is_ignored(config, mixture)
        self.maker = Maker(mixture=mixture, config=config, every=True)
        self.feed = Feed(self.maker)
        parts = networks_of(config, self.maker, self.device, dtype)
        self.networks, self.refiner, self.weights = parts.networks, parts.refiner, parts.weights
        self.shards = None
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.points = {t.task: t.fields.points.to(self.device, dtype) for t in mixture.tasks}
        self.boundaries = {t.task: t.at_boundary.to(self.device) for t in mixture.tasks}
        low = torch.bfloat16 if config.muon_in_bfloat16 else torch.float32
        self.groups = grouped(self.weights)
        self.optimizers = {
            name: hybrid_muon_adamw([self.weights[n] for n in names], rate_of(name, config), config.weight_decay, low)
            for name, names in self.groups.items()
        }
        self.average = ema(list(self.averages.values()), config.ema_decay)
        self.scale = LossScale(float16=config.precision == "fp16")
        self.steps = 0
        self.throughput = Throughput(config.batch_size * config.accumulation * mixture.ranks, self.device)
        self.parallel = self._in_parallel()
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one step on the next examples, as determined by the number of steps made.

        `batch["step"]`, if given, must be that number, counted from 0; otherwise ValueError.
        """
        config = self.config
        check_step(batch, self.steps)
        for weight in self.weights.values():
            weight.grad = None
        scale, total = self.scale.value, 0.0
        numbers = range(self.steps * config.accumulation, (self.steps + 1) * config.accumulation)
        for number in numbers:
            with torch.enable_grad():
                loss = self.parallel(self.feed.batch(number)) / config.accumulation
                (loss * scale).backward()
            total += self._of_all_ranks(loss.detach()).item()
        norm = self._optimize(inverse=any(map(config.has_inverse, numbers)))
        self.steps += 1
        found = Report(step=self.steps, loss=total, norm=norm, scale=scale)
        self._reports.send(torch.zeros(0, device=self.device), lambda _: found)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape or the stage differs."""
        restore(self, state)

    def _in_parallel(self) -> nn.Module:
        """Build the module that computes a micro-batch's loss. With several ranks it also averages the gradients."""
        whole = _Loss(self.networks if self.refiner is None else self.refiner, self._loss)
        if self.mixture.ranks == 1:
            return whole
        every = all(map(self.config.has_inverse, range(self.config.inverse_loss_frequency)))
        return DistributedDataParallel(
            whole,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            # In a micro-batch without inverse losses, the encoders and decoders get no gradients.
            find_unused_parameters=self.refiner is None and not every,
        )

    def _of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Compute the mean of a loss over the ranks."""
        if self.mixture.ranks > 1:
            dist.all_reduce(loss)
        return loss / self.mixture.ranks

    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        """Compute the loss of a micro-batch, 0-d."""
        config = self.config
        parts = [sent(part, self.device, self.dtype) for part in micro.parts]
        before, after, dt = (torch.cat([getattr(p, name) for p in parts]) for name in ("before", "after", "dt"))
        if self.refiner is not None:
            with autocast(config, self.device):
                return self.refiner.loss(before, after, dt, draw(self.maker, micro.number, before), self.averages)
        tasks = [self._inverse_task(part) for part in parts]
        with autocast(config, self.device):
            scales = micro.scales.to(self.device, self.dtype)
            predicted = _stepped(self.weights, config.heads, before, dt, scales)
            inverse = inverse_losses(tasks, micro.number, config.inverse_loss_frequency, query_sampling)
        total = config.lambda_enc * inverse[0] + config.lambda_dec * inverse[1]
        sizes = [len(part.before) for part in parts]
        every = zip(parts, predicted.to(self.dtype).split(sizes), after.split(sizes), strict=True)
        for part, found, wanted in every:
            share = len(part.before) / len(before)
            total = total + share * _error(config, found, wanted, self.boundaries[part.task])
        return total

    def _inverse_task(self, part: TaskPart) -> InverseTask:
        """Return the inputs of the inverse losses for a task's examples."""
        task, heads = part.task, self.config.heads
        tokens = self.networks.encoder(task).tokens
        return InverseTask(
            encode=lambda field, points: _encoded(self.weights, task, tokens, field, points),
            decode=lambda latents, points: _decoded(self.weights, task, heads, latents, points),
            latents=part.coded,
            field=part.field,
            points=self.points[task],
            queries=part.queries,
        )

    @torch.no_grad()
    def _optimize(self, *, inverse: bool) -> float | None:
        """Update the weights that have gradients, and all averages; return the gradients' norm, None if not clipped.

        In float16, non-finite gradients update only the loss scale, and the norm is None.
        """
        groups = {group: names for group, names in self.groups.items() if group != CODERS or inverse}
        found = ((name, self.weights[name].grad) for names in groups.values() for name in names)
        grads = {name: grad for name, grad in found if grad is not None}
        finite, norm = self.scale.undo(list(grads.values())), None
        if finite:
            if self.config.grad_clip is not None:
                norm = float(clip_grad_norm(list(grads.values()), self.config.grad_clip))
            for group, names in groups.items():
                self.optimizers[group]([grads[n] for n in names])
            self.average(list(self.weights.values()))
        self.scale.update(finite=finite)
        return norm


class _Loss(nn.Module):
    """Wraps the loss as a module with the networks' parameters, as DistributedDataParallel needs it."""

    def __init__(self, networks: nn.Module, loss: Callable[[MicroBatch], torch.Tensor]) -> None:
        super().__init__()
        self.networks, self._loss = networks, loss

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        return self._loss(micro)


# --- the networks as functions of their weights: operator, encoder and decoder of a task


def _stepped(
    weights: Weights, heads: int, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Apply the operator: latents [B, T, C] → latents [B, T, C] after a time of dt [B].

    scales  [depth, 2, B], by which the output of each block's attention and MLP is multiplied
    """
    time = _linear(weights, "operator.time1", torch.cat((dt[:, None], _features(dt[:, None])), -1))
    time = _linear(weights, "operator.time2", functional.gelu(time))[:, None]
    x = _linear(weights, "operator.take", latents)
    for number, (at_attention, at_mlp) in enumerate(scales[..., None, None]):
        block = f"operator.blocks.{number}"
        given = _linear(weights, f"{block}.qkv", _normed(weights, f"{block}.norm1", x) + time)
        q, k, v = _split(given, 3 * heads).chunk(3, 1)
        q, k = (
            functional.rms_norm(y, y.shape[-1:], weights[f"{block}.{name}_norm.weight"].to(y.dtype), 1e-6)
            for name, y in (("query", q), ("key", k))
        )
        attended = _joined(functional.scaled_dot_product_attention(q, k, v))
        x = x + _linear(weights, f"{block}.project", attended) * at_attention
        wide = _linear(weights, f"{block}.expand", _normed(weights, f"{block}.norm2", x) + time)
        x = x + _linear(weights, f"{block}.contract", functional.gelu(wide)) * at_mlp
    return latents + _linear(weights, "operator.give", _normed(weights, "operator.norm", x))


def _encoded(
    weights: Weights, task: str, tokens: Sequence[int], field: torch.Tensor, points: torch.Tensor
) -> torch.Tensor:
    """Encode a field [B, *grid, channels] at points [*grid, d] as latents [B, T, C], means over each token's points."""
    grid = points.shape[:-1]
    position = _features(points).expand(len(field), *grid, -1)
    x = _linear(weights, f"encoders.{task}.embed", torch.cat((field, position), -1))
    for axis, count in enumerate(tokens, start=1):
        x = x.unflatten(axis, (count, -1)).mean(axis + 1)
    return x.flatten(1, -2)


def _decoded(weights: Weights, task: str, heads: int, latents: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Decode latents [B, T, C] to values [B, Q, channels] at points [Q, d].

    Points attend to the latents and not to each other.
    """
    own = f"decoders.{task}"
    x = _linear(weights, f"{own}.embed", _features(points)).expand(len(latents), -1, -1)
    for number in range(sum(name.startswith(f"{own}.layers.") and name.endswith("query.bias") for name in weights)):
        layer = f"{own}.layers.{number}"
        q = _split(_linear(weights, f"{layer}.query", _normed(weights, f"{layer}.norm", x)), heads)
        k, v = _split(_linear(weights, f"{layer}.key_value", latents), 2 * heads).chunk(2, 1)
        x = x + _linear(weights, f"{layer}.project", _joined(functional.scaled_dot_product_attention(q, k, v)))
    hidden = functional.gelu(_linear(weights, f"{own}.hidden", _normed(weights, f"{own}.norm", x)))
    return _linear(weights, f"{own}.values", hidden)


def _features(points: torch.Tensor) -> torch.Tensor:
    """Compute sine and cosine of each coordinate, at 1, 2, 4 and 8 periods per unit: [..., d] → [..., 8 d]."""
    angles = torch.stack([2 * math.pi * periods * points for periods in (1, 2, 4, 8)], -1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), -1)


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _normed(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Split the heads: [B, T, heads · d] → [B, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    """Merge the heads: [B, heads, T, d] → [B, T, heads · d]."""
    return x.transpose(1, 2).flatten(2)


def _error(
    config: TrainConfig, predicted: torch.Tensor, target: torch.Tensor, at_boundary: torch.Tensor
) -> torch.Tensor:
    """Compute the error of latents [B, T, C], 0-d.

    It is the mean squared error of the latents, plus the weighted errors of their Fourier amplitudes along the tokens
    and of the tokens at the boundary.
    """
    found, wanted = (
        torch.linalg.vector_norm(torch.view_as_real(torch.fft.rfft(z, dim=1, norm="ortho")), dim=-1)
        for z in (predicted, target)
    )
    return (
        functional.mse_loss(predicted, target)
        + config.spectral * functional.mse_loss(found, wanted)
        + config.boundary * functional.mse_loss(predicted[:, at_boundary], target[:, at_boundary])
    )
