"""The optimized trainer of ups, with a switch for each technique.

Its steps equal those of `reference/trainers/ups.py`, up to rounding. With the default switches no step waits for the
device, except in float16. A step's report is read once it has arrived.

Source: ups, technique 002.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from optimized.compilation.compiled_function import compile_if_possible
from optimized.compilation.fullgraph_model import fullgraph_coder, fullgraph_operator, step_operator
from optimized.flat_gradients import Boundary, FlatGradients
from optimized.graphs.cuda_graph_step import WARMUP, cuda_graph_step
from optimized.kernels import triton_reason
from optimized.memory.cpu_offload_optimizer import offloaded_hybrid
from optimized.operator_calls import early, parts
from optimized.over_ranks import clip_over_ranks
from optimized.sharded_gradients import ShardedGradients
from optimized.sharded_hybrid import ShardedHybrid
from optimized.shards import Shards
from optimized.shared_hybrid import SharedHybrid
from suite.runtime.reports import Reports
from suite.stepping import QueuesReports, Throughput, check_step
from suite.techniques import implementation
from suite.ups.batches import Feed, Maker, MicroBatch, Mixture, TaskPart
from suite.ups.config import TrainConfig
from suite.ups.losses import InverseTask, mixed_loss
from suite.ups.networks import CODERS, grouped, rate_of
from suite.ups.report import Report
from suite.ups.resident import Resident
from suite.ups.scaler import LossScale
from suite.ups.stages import draw, networks_of
from suite.ups.state import restore, state_of
from suite.ups.step import autocast, is_sharded, is_shared, note_what_is_ignored, sent

AHEAD = 2
"""Steps that may be queued or running on the device when the host starts the next one."""
GRAPHS = 16
"""CUDA graphs that are kept. Each pattern of micro-batches with inverse losses needs its own."""


class Trainer(QueuesReports):
    """The optimized trainer. Its checkpoints are interchangeable with the reference trainer's.

    mixture  the data, as `suite.ups.batches.load` opens them

    ValueError if a batch does not divide into the tasks' shares.
    """

    window_name = "step"

    def __init__(self, config: TrainConfig, mixture: Mixture, device: torch.device | str) -> None:
        self.config, self.mixture, self.device = config, mixture, torch.device(device)
        note_what_is_ignored(config, mixture)
        self._choose()
        self.maker = Maker(mixture=mixture, config=config, every=not config.inverse_losses)
        self.source = Resident(self.maker, self.device) if config.resident_latents else Feed(self.maker)
        own = networks_of(config, self.maker, self.device)
        self.networks, self.refiner, self.weights = own.networks, own.refiner, own.weights
        self.groups = grouped(self.weights)
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.shards = Shards(mixture.rank, mixture.ranks) if is_sharded(config, mixture) else None
        self.gradients = self._gradients()
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.points = {t.task: t.fields.points.to(self.device) for t in mixture.tasks}
        self.boundaries = {t.task: t.at_boundary.to(self.device) for t in mixture.tasks}
        self.optimizers = {name: self._optimizer_of(name) for name in self.groups}
        self.average = self._averaged()
        self.scale = LossScale(float16=config.precision == "fp16")
        self.steps = 0
        self._replayed = self._step
        if self._is_captured():
            self._replayed = cuda_graph_step(self._step, graphs=GRAPHS, device=self.device)
        self.throughput = Throughput(config.batch_size * config.accumulation * mixture.ranks, self.device)
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    @property
    def settles(self) -> int:
        """Number of steps after which each form of a step has been compiled and, if it is captured, captured."""
        forms = self.config.schedule_period
        return forms * (WARMUP + 1) if self._is_captured() else forms

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one step on the next examples, as determined by the number of steps made.

        `batch["step"]`, if given, must be that number, counted from 0; otherwise ValueError.
        """
        check_step(batch, self.steps)
        accumulation, scale = self.config.accumulation, self.scale.value
        numbers = range(self.steps * accumulation, (self.steps + 1) * accumulation)
        self.gradients.reset()
        found = self._replayed([self._given(self.source.batch(number)) for number in numbers])
        self.steps += 1
        step = self.steps

        def read(values: torch.Tensor) -> Report:
            loss, *norm = values.tolist()
            return Report(step=step, loss=loss, norm=norm[0] if norm else None, scale=scale)

        self._reports.send(found, read)
        self._reports.wait(AHEAD)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape or the stage differs."""
        restore(self, state)

    def _choose(self) -> None:
        """Choose the implementation of each technique: optimized if its switch is on, otherwise the reference."""
        config = self.config

        def of(module: str, function: str, on: bool) -> Callable[..., Any]:
            return implementation(module, function, optimized=on)

        self._inverse = of("losses.inverse_losses", "inverse_losses", config.inverse_losses)
        self._at_queries: Callable[..., torch.Tensor] | None = None
        if not (config.inverse_losses and config.query_sampling):  # with both on, the grid is decoded only once
            self._at_queries = of("losses.query_sampling", "query_sampling", config.query_sampling)
        self._clip = of("optimizers.clip_grad_norm", "clip_grad_norm", config.fused_clip)
        self._ema = of("optimizers.ema", "ema", config.fused_optimizers)
        self._optimizer: Callable[..., Any] = offloaded_hybrid
        if not config.cpu_offload_optimizer:
            self._optimizer = of("optimizers.hybrid_muon_adamw", "hybrid_muon_adamw", config.fused_optimizers)
        made = functools.partial(parts, again=config.activation_checkpoint, flex=config.flex_attention)
        self._uncompiled = made(compiled=False).whole
        self._operator = self._uncompiled
        self._parts = made(compiled=config.compile and self.device.type == "cuda")
        if config.compile and self._is_captured():  # a replay has no launch cost, and sublayers compile faster
            self._operator = self._parts.whole
        elif config.compile and not is_sharded(config, self.mixture):
            graphs = config.compile_mode == "reduce-overhead"
            self._operator = functools.partial(fullgraph_operator, step=self._uncompiled, graphs=graphs)

    def _has_parts(self) -> bool:
        """Return whether the operator is called in two parts, so that gradients are reduced during its backward."""
        config, several = self.config, self.mixture.ranks > 1 and not is_sharded(self.config, self.mixture)
        # With torch.compile's own CUDA graphs, the operator is replayed as a whole.
        graphs = config.compile and config.compile_mode == "reduce-overhead" and not self._is_captured()
        return several and config.stage == "operator" and (self.device.type == "cpu" or not graphs)

    def _is_captured(self) -> bool:
        """Return whether a step is captured as one CUDA graph, which requires that the host has no part in it."""
        config = self.config
        fused = config.fused_optimizers and (config.fused_clip or config.grad_clip is None)
        by_host = config.precision == "fp16" or config.cpu_offload_optimizer or is_sharded(config, self.mixture)
        possible = self.device.type == "cuda" and triton_reason() is None and not by_host
        return config.cuda_graphs and fused and possible

    def _given(self, micro: MicroBatch) -> dict[str, Any]:
        """Return a micro-batch as tensors on the device, with its counts and whether it has the inverse losses."""
        parts: list[TaskPart] = [sent(part, self.device) for part in micro.parts]
        found: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in ("before", "after", "dt")
        }
        found["inverse"] = self.config.has_inverse(micro.number)
        found["counts"] = tuple(len(part.before) for part in parts)
        if self.refiner is not None:
            return found | dict(zip(("level", "noise"), draw(self.maker, micro.number, found["before"]), strict=True))
        scales = micro.scales if self.device.type == "cpu" else micro.scales.pin_memory()
        found["scales"] = scales.to(self.device, non_blocking=True)
        return found | {
            "coded": [part.coded for part in parts],
            "fields": [part.field for part in parts],
            "queries": [part.queries for part in parts],
        }

    def _step(self, given: list[dict[str, Any]]) -> torch.Tensor:
        """Train one step on micro-batches; return [loss] or, if gradients are clipped, [loss, gradient norm]."""
        total = torch.zeros((), device=self.device)
        of_each = [[name for name in self.groups if name != CODERS or micro["inverse"]] for micro in given]
        for place, (micro, names) in enumerate(zip(given, of_each, strict=True)):
            later = {name for others in of_each[place + 1 :] for name in others}
            total += self._pass(micro, names, set(names) - later)
        trained = [name for name in self.groups if any(name in names for names in of_each)]
        for name in trained:
            self.gradients.begin(name, total)
        norm = self._optimize(trained)
        loss = self.gradients.number(trained[0])
        return torch.stack([loss] if norm is None else [loss, norm])

    def _pass(self, micro: dict[str, Any], names: list[str], last: set[str]) -> torch.Tensor:
        """Add a micro-batch's gradients of the groups `names` to the step's; return its share of the loss, 0-d.

        last  groups for which it is the step's last micro-batch
        """
        scale = self.scale.value
        with torch.enable_grad():
            loss, boundary = self._loss(micro)
            loss = loss / self.config.accumulation
            scaled = loss if scale == 1 else loss * scale
            if isinstance(self.gradients, FlatGradients):
                self.gradients.backward(scaled, names, last, boundary)
            else:
                self.gradients.backward(scaled, names, last)
        return loss.detach()

    def _loss(self, micro: dict[str, Any]) -> tuple[torch.Tensor, Boundary | None]:
        """Compute a micro-batch's loss, 0-d, and the boundary of the operator's two parts, None if it is whole."""
        config, before, after, dt = self.config, micro["before"], micro["after"], micro["dt"]
        if self.refiner is not None:
            with autocast(config, self.device):
                return self.refiner.loss(before, after, dt, (micro["level"], micro["noise"]), self.averages), None
        boundary = None
        with autocast(config, self.device):
            if self._has_parts():
                boundary = Boundary.after(self._parts.first(self.networks.operator, before, dt, micro["scales"]))
                predicted = self._parts.second(self.networks.operator, before, *boundary.leaves, micro["scales"])
            else:
                predicted = self._operator(self.networks.operator, before, dt, micro["scales"])
            if config.inverse_losses and not micro["inverse"]:
                inverse = (before.new_zeros(()), before.new_zeros(()))
            else:
                # A constant number: a graph is captured for batches with and without these losses, not for each number.
                number = 0 if micro["inverse"] else 1
                inverse = self._inverse(self._tasks(micro), number, config.inverse_loss_frequency, self._at_queries)
        tasks = [task.task for task in self.mixture.tasks]
        sizes = [(count, self.boundaries[task]) for count, task in zip(micro["counts"], tasks, strict=True)]
        return mixed_loss(config, predicted.float(), after, sizes, inverse), boundary

    def _tasks(self, micro: dict[str, Any]) -> list[InverseTask]:
        """Return the inputs of the inverse losses, one for each task."""
        names = [task.task for task in self.mixture.tasks]
        given = zip(names, micro["coded"], micro["fields"], micro["queries"], strict=True)
        tasks = [
            self.networks.inverse_task(task, latents, field, queries, self.points[task])
            for task, latents, field, queries in given
        ]
        if not self.config.compile or self.shards is not None:
            return tasks
        compiled = functools.partial(functools.partial, fullgraph_coder)
        return [dataclasses.replace(t, encode=compiled(t.encode), decode=compiled(t.decode)) for t in tasks]

    @torch.no_grad()
    def _optimize(self, trained: list[str]) -> torch.Tensor | None:
        """Update the weights of these groups, and all averages; return the gradients' norm, None if not clipped.

        In float16, non-finite gradients update only the loss scale, and the norm is None.
        """
        finite, norm = True, None
        if self.scale.active or self.config.grad_clip is not None:  # both need all gradients
            grads = [g for name in trained for g in self.gradients.finished(name)]
            finite = self.gradients.agreed(finite=self.scale.undo(grads))
            if finite and self.config.grad_clip is not None:
                norm = self._clip(grads, self.config.grad_clip)
        if finite:
            for name in trained:
                self.optimizers[name](self.gradients.finished(name))
            self.average()
        self.scale.update(finite=finite)
        return norm

    def _gradients(self) -> FlatGradients | ShardedGradients:
        """Build the buffers that sum the gradients. With sharding, replace the weights by this rank's parts."""
        clip = functools.partial(clip_over_ranks, like=next(iter(self.weights.values())))
        if self.shards is None:
            groups = {name: [self.weights[n] for n in names] for name, names in self.groups.items()}
            first = early(self.weights, self.config.depth) if self._has_parts() else []
            owner = None
            if is_shared(self.config, self.mixture):
                owner, self._clip = self.mixture.rank, clip
            return FlatGradients(groups, self.mixture.ranks, [self.weights[name] for name in first], owner)
        operator = self.networks.operator
        # FSDP2 calls `forward` after it has gathered the parameters and before it frees them.
        operator.forward = self._forward(operator.forward)  # type: ignore[method-assign]  # replaces it for this instance alone
        coders = [*self.networks.decoders.values(), *self.networks.encoders.values()]
        gradients = ShardedGradients({"operator": [operator], CODERS: coders}, self.shards)
        parts = {name: gradients.weights(name) for name in self.groups}
        self.weights = {n: part for name in self.groups for n, part in zip(self.groups[name], parts[name], strict=True)}
        self._operator, self._clip = step_operator, clip
        return gradients

    def _forward(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the sharded operator's forward, compiled with `compile` on a GPU."""

        def forward(latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return self._uncompiled(plain, latents, dt, scales)

        if not self.config.compile or self.device.type == "cpu":
            return forward
        return compile_if_possible(forward, "the sharded operator", quiet_calls=True, dynamic=False)

    def _averaged(self) -> Callable[[], None]:
        """Build the function that updates the averages of all weights; it is called after the optimizers."""
        gradients, every = self.gradients, list(self.weights)
        own, buckets = every, []
        if isinstance(gradients, FlatGradients):
            own = [names[i] for group, names in self.groups.items() for i in gradients.owned(group)]
            buckets = gradients.buckets
        parts = (own, [name for name in every if name not in set(own)])
        steps = [self._ema([self.averages[name] for name in part], self.config.ema_decay) for part in parts]
        weights = [[self.weights[name] for name in part] for part in parts]

        def average() -> None:
            steps[0](weights[0])  # meanwhile the other ranks' weights arrive
            for bucket in buckets:
                bucket.receive()
            steps[1](weights[1])

        return average

    def _optimizer_of(self, group: str) -> Any:
        """Build the optimizer of a group of weights."""
        config, names = self.config, self.groups[group]
        weights, rates = [self.weights[n] for n in names], (rate_of(group, config), config.weight_decay)
        low = torch.bfloat16 if config.muon_in_bfloat16 else torch.float32
        if isinstance(self.gradients, FlatGradients):
            if self.gradients.owner is None:
                return self._optimizer(weights, *rates, low)
            make = functools.partial(self._optimizer, lr=rates[0], weight_decay=rates[1], dtype=low)
            return SharedHybrid(weights, self.gradients, group, make)
        assert self.shards is not None
        shapes = [self.shapes[n] for n in names]
        return ShardedHybrid(weights, shapes, self.shards, *rates, low, offload=config.cpu_offload_optimizer)
