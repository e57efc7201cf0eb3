"""ups: a neural operator on latents of PDE fields, plain and eager (source: ups).

A step passes `accumulation` micro-batches of both tasks through the operator, computes the inverse losses of every one
and takes those of the schedule, and steps Muon on the matrices and AdamW on the rest, tensor by tensor.

What the source leaves open is decided here:

* A weight that no loss of a step reaches is left as it is: the encoders and decoders have an optimizer of their own,
  which makes a step only where a micro-batch had the inverse losses.
* Batches are counted by micro-batches, in the schedule of the inverse losses as in the order of the examples.
* The learning rate is constant.
* In float16 a step whose gradients are not finite changes nothing but the scale, as `GradScaler` has it.
* Several ranks train by `DistributedDataParallel`, which averages the gradients of each micro-batch over them.

Source: ups, technique 002.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference.losses.inverse_losses import inverse_losses
from reference.losses.query_sampling import query_sampling
from reference.optimizers.clip_grad_norm import clip_grad_norm
from reference.optimizers.ema import ema
from reference.optimizers.hybrid_muon_adamw import hybrid_muon_adamw
from suite.runtime.reports import Reports
from suite.stepping import Throughput, WaitsForReports, check_step
from suite.ups.batches import Feed, Maker, MicroBatch, Mixture
from suite.ups.config import TrainConfig
from suite.ups.losses import mixed_loss
from suite.ups.networks import CODERS, grouped, rate_of
from suite.ups.report import Report
from suite.ups.scaler import LossScale
from suite.ups.stages import draw, networks_of
from suite.ups.state import restore, state_of
from suite.ups.step import autocast, note_what_is_ignored, sent


class Trainer(WaitsForReports):
    """The reference trainer. `train_window` makes a step; `metrics` gives what it reported.

    given  the data, as `suite.ups.batches.load` opens them
    dtype  working precision: float32, or float64 for the truth

    ValueError where a batch does not divide into the tasks' shares.
    """

    window_name = "step"

    def __init__(
        self, config: TrainConfig, given: Mixture, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.given, self.device, self.dtype = config, given, torch.device(device), dtype
        note_what_is_ignored(config, given)
        self.maker = Maker(given=given, config=config, every=True)
        self.feed = Feed(self.maker)
        parts = networks_of(config, self.maker, self.device, dtype)
        self.networks, self.refiner, self.weights = parts.networks, parts.refiner, parts.weights
        self.shards = None
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.points = {t.task: t.fields.points.to(self.device, dtype) for t in given.tasks}
        self.boundaries = {t.task: t.at_boundary.to(self.device) for t in given.tasks}
        low = torch.bfloat16 if config.muon_in_bfloat16 else torch.float32
        self.groups = grouped(self.weights)
        self.optimizers = {
            name: hybrid_muon_adamw([self.weights[n] for n in names], rate_of(name, config), config.weight_decay, low)
            for name, names in self.groups.items()
        }
        self.average = ema(list(self.averages.values()), config.ema_decay)
        self.scale = LossScale(float16=config.precision == "fp16")
        self.steps = 0
        self.throughput = Throughput(config.batch_size * config.accumulation * given.ranks, self.device)
        self.parallel = self._in_parallel()
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """A step on the examples that come next, by the number of steps made.

        `batch["step"]` may say that number, from 0; ValueError where it is another.
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
        """All that training has changed."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. ValueError where a shape, or the stage, is another."""
        restore(self, state)

    def _in_parallel(self) -> nn.Module:
        """Make the module that computes a micro-batch's loss; with several ranks it also averages the gradients."""
        whole = _Loss(self.networks if self.refiner is None else self.refiner, self._loss)
        if self.given.ranks == 1:
            return whole
        every = all(map(self.config.has_inverse, range(self.config.inverse_loss_frequency)))
        return DistributedDataParallel(
            whole,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            # Without inverse losses the encoders and decoders have no gradients.
            find_unused_parameters=self.refiner is None and not every,
        )

    def _of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of a loss over the ranks."""
        if self.given.ranks > 1:
            dist.all_reduce(loss)
        return loss / self.given.ranks

    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch, 0-d."""
        config = self.config
        parts = [sent(part, self.device, self.dtype) for part in micro.parts]
        before, after, dt = (torch.cat([getattr(p, name) for p in parts]) for name in ("before", "after", "dt"))
        if self.refiner is not None:
            with autocast(config, self.device):
                return self.refiner.loss(before, after, dt, draw(self.maker, micro.number, before), self.averages)
        tasks = [self.networks.inverse_task(p.task, p.coded, p.field, p.queries, self.points[p.task]) for p in parts]
        with autocast(config, self.device):
            predicted = self.networks.operator(before, dt, micro.scales.to(self.device, self.dtype))
            inverse = inverse_losses(tasks, micro.number, config.inverse_loss_frequency, query_sampling)
        sizes = [(len(part.before), self.boundaries[part.task]) for part in parts]
        return mixed_loss(config, predicted.to(self.dtype), after, sizes, inverse)

    @torch.no_grad()
    def _optimize(self, *, inverse: bool) -> float | None:
        """Step the weights that have gradients, and their averages; the gradients' norm, where they are clipped."""
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
    """The loss as a module, whose parameters are those of the networks."""

    def __init__(self, networks: nn.Module, loss: Callable[[MicroBatch], torch.Tensor]) -> None:
        super().__init__()
        self.networks, self._loss = networks, loss

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        return self._loss(micro)
