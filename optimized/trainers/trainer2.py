"""The optimized trainer of trainer2, with a switch for each technique.

Its windows equal those of `reference/trainers/trainer2.py`, up to rounding. A step changes only tensors with fixed
addresses, so it is one function without arguments that a CUDA graph can replay. With the default switches the host
never waits for the device. A window's report is copied to pinned memory and read once the copy has arrived.

Source: trainer2.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from optimized.compilation.compiled_function import compile_if_possible
from optimized.geometry.rotor_cache import RotorCache
from optimized.geometry.velocity_accumulation import VelocitySum
from optimized.graphs.cuda_graph_step import cuda_graph_step
from suite.backends import cudnn_benchmark
from suite.techniques import implementation
from suite.trainer2.config import FIELD_CHANNELS, TrainConfig
from suite.trainer2.model import make_field, make_weights
from suite.trainer2.state import restore, state_of

CHANNELS = math.prod(FIELD_CHANNELS)
REPORTED = ("loss", "curvature", "speed", "loss_delta")
AHEAD = 16
"""Report buffers allocated in advance; a further one is allocated if more reports are in transit."""


class Trainer:
    """The optimized trainer. Its checkpoints are interchangeable with the reference trainer's.

    With `static_shapes` all batches must have the first one's shape; otherwise ValueError.
    """

    def __init__(self, config: TrainConfig, vocabulary: int, device: torch.device | str) -> None:
        self.config, self.device = config, torch.device(device)
        self.weights = {k: w.to(self.device) for k, w in make_weights(config, vocabulary).items()}
        self._low = self._half_weights()
        first = make_field(config).to(self.device)
        n = config.coordinates
        self.field, self.momentum, self.rest = first.clone(), torch.zeros_like(first), first
        self._kept = torch.empty_like(first), torch.empty_like(first)
        self.metric = torch.ones(n, device=self.device)
        self.theta = torch.zeros(config.rotor_k, device=self.device)
        self.memory_coordinates = torch.zeros(config.memory_slots, n, device=self.device)
        self.memory_states = torch.zeros(config.memory_slots, config.width, device=self.device)
        self.memory_filled = torch.zeros(config.memory_slots, dtype=torch.bool, device=self.device)
        self.written = self.windows = 0
        self._choose(n)
        self.index = self._rotor_index(n, config.rotor_k).to(self.device)
        self._turned = RotorCache(self.theta, self.memory_coordinates) if config.rotor_cache else None
        self._shape: tuple[int, int] | None = None
        self.reported = torch.zeros(len(REPORTED), device=self.device)
        """Loss, curvature, speed and loss_delta of the last window, on the device."""
        self._reports = _Reports(self.device, batched=config.metric_batching)
        self._cleaned = self._cleanup(self._both_windows)

    def _choose(self, n: int) -> None:
        """Choose the implementation of each technique: optimized if its switch is on, otherwise the reference."""
        config = self.config

        def of(module: str, function: str, on: bool) -> Callable[..., Any]:
            return implementation(module, function, optimized=on)

        self._retrieval = of("geometry.retrieval", "retrieval", config.retrieval)
        self._lior_and_speed = of("geometry.lior_and_speed", "lior_and_speed", config.lior_and_speed)
        self._rotor_apply = of("geometry.rotor_apply", "rotor_apply", config.rotor_cache)
        self._rotor_index = of("geometry.rotor_apply", "rotor_index", False)
        self._rotor_update = of("geometry.rotor_update", "rotor_update", config.rotor_update)
        self._metric_update = of("geometry.metric_update", "metric_update", config.metric_update)
        self._cleanup = of("memory.adaptive_cleanup", "adaptive_cleanup", config.adaptive_cleanup)
        self._metric_batching = of("synchronization.metric_batching", "metric_batching", config.metric_batching)
        self._forward, self._push_field = _compiled() if config.compiled_function else (_forward, _leapfrog)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Run both windows and the update on `batch` (input_ids int64 [B, T], attention_mask [B, T])."""
        with torch.no_grad(), cudnn_benchmark(on=self.config.cudnn_benchmark):
            self._cleaned(batch)

    def metrics(self) -> Mapping[str, float] | None:
        """Return the last report that has arrived, without waiting; None before the first.

        It has loss, curvature, speed, loss_delta, and "window", the number of its window from 1.
        """
        return self._reports.latest()

    def last_metrics(self) -> Mapping[str, float] | None:
        """Wait for the last window's report; return its metrics."""
        return self._reports.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the weights and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        for name, weight in self._half_weights().items():
            self._low[name].copy_(weight)
        if self._turned is not None:
            self._turned.write(torch.arange(self.config.memory_slots, device=self.device), self.memory_coordinates)
            self._turned.set_theta(self.theta)

    # --- a window

    def _both_windows(self, batch: Mapping[str, torch.Tensor]) -> None:
        config, n = self.config, self.config.coordinates
        self._take(batch)
        self._kept[0].copy_(self.field)
        self._kept[1].copy_(self.momentum)
        self.nudge.zero_()
        free = self._window().clone()
        target = _masked_mean(self._embedded[:, 1:, :n], self._mask[:, 1:])
        self.nudge.copy_(config.nudge_scale * (target - self.query))
        self.field.copy_(self._kept[0])
        self.momentum.copy_(self._kept[1])
        nudged = self._window()

        loss_delta = nudged[0] - free[0]
        summed = self._summed if self._velocities is None else self._velocities.value()
        velocity = summed.mean(0) / config.window
        self._metric_update(self.metric, self._rotor_apply(self.theta, velocity), loss_delta, config.eta)
        self._rotor_update(self.theta, velocity, self.index, loss_delta, config.eta)
        self._remember()
        self.windows += 1
        self.reported.copy_(torch.cat((free, loss_delta.view(1))))
        self._reports.send(self.reported, self.windows)

    def _window(self) -> torch.Tensor:
        """Run a window of steps; return the means of lior, R_sc and speed over its steps and the batch, [3]."""
        self.sums.zero_()
        self._summed.zero_()
        if self._velocities is not None:
            self._velocities.reset()
        every = self.config.step_progress_every
        for step in range(1, self.config.window + 1):
            self._step()
            if every and step % every == 0:
                lior, curvature, speed = self._metric_batching(*self.sums.unbind(), step)
                print(f"step {step}: lior {lior:.4f}, R_sc {curvature:.4f}, speed {speed:.4f}")
        return self.sums / self.config.window

    def _take(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Copy the batch into the buffers that a step reads. ValueError if `static_shapes` forbids its shape."""
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        shape = (tokens.shape[0], tokens.shape[1])
        if self._shape is None or (shape != self._shape and not self.config.static_shapes):
            self._allocate(*shape)
        elif shape != self._shape:
            raise ValueError(
                f"static_shapes=True: a batch of shape {list(shape)} after one of {list(self._shape)}; drop the "
                "remainder, or set static_shapes: false"
            )
        self._tokens.copy_(self._staged(tokens), non_blocking=True)
        self._mask.copy_(self._staged(mask), non_blocking=True)
        self._filled.copy_(self._mask > 0)
        # The embeddings are the same in all steps of both windows.
        torch.index_select(
            self.weights["embedding"], 0, self._tokens.view(-1), out=self._embedded.view(-1, self.config.width)
        )

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin a host tensor, so that its copy is asynchronous: one from pageable memory waits for all queued work."""
        pageable = self.device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned()
        return tensor.pin_memory() if pageable else tensor

    def _allocate(self, B: int, T: int) -> None:
        self._shape = (B, T)
        n, D, on = self.config.coordinates, self.config.width, {"device": self.device}
        self._tokens = torch.zeros(B, T, dtype=torch.int64, **on)
        self._mask = torch.zeros(B, T, **on)
        self._filled = torch.zeros(B, T, dtype=torch.bool, **on)
        self._embedded = torch.zeros(B, T, D, **on)
        self.nudge, self.query, self._summed = (torch.zeros(B, n, **on) for _ in range(3))
        self._velocities = VelocitySum(self._summed) if self.config.velocity_accumulation else None
        self.state = torch.zeros(B, D, **on)
        self.sums = torch.zeros(3, **on)
        if self.config.use_cudagraphs:
            self._step = cuda_graph_step(self._one_step, warmup=self.config.warmup_steps, device=self.device)
        else:
            self._step = self._one_step

    def _one_step(self) -> None:
        config, n = self.config, self.config.coordinates
        field, momentum, rest = (torch.view_as_real(t) for t in (self.field, self.momentum, self.rest))
        output, pooled, curvature = self._forward(
            self.weights, self._low, config.heads, config.blocks, self._embedded, self._mask, field
        )
        torch.add(pooled[:, :n], self.nudge, out=self.query)
        self.state.copy_(pooled)
        if self._velocities is not None:
            self._velocities.add(self.query)
        else:
            self._summed.copy_(self._summed.detach() + self.query.detach())
        turned = self._rotor_apply(self.theta, self.query)
        if self._turned is not None:
            memory = self._turned.rotated()
        else:
            memory = self._rotor_apply(self.theta, self.memory_coordinates)
        retrieved = self._retrieval(
            turned,
            curvature,
            self._rotor_apply(self.theta, output[..., :n]),
            output,
            self._filled,
            memory,
            self.memory_states,
            self.memory_filled,
            None,
            self.metric,
            config.beta,
            config.eps,
        )
        lior, speed = self._lior_and_speed(turned, curvature, None, self.metric, config.eps)
        self.sums.add_(torch.stack((lior, curvature, speed)).mean(1))
        constants = config.kappa, config.diffusion, config.gamma, config.dt
        moved, pushed = self._push_field(field, momentum, rest, retrieved, *constants)
        field.copy_(moved)
        momentum.copy_(pushed)

    def _half_weights(self) -> dict[str, torch.Tensor]:
        """Return the blocks' linear weights and biases in the precision of the forward pass."""
        dtype = torch.bfloat16 if self.config.autocast_bf16 else torch.float32
        own = (name for name in self.weights if name.split(".")[-1] != "embedding" and name[0].isdigit())
        return {name: self.weights[name].to(dtype) for name in own if "norm" not in name}

    def _remember(self) -> None:
        """Write one slot per item into the memory, a ring buffer."""
        slots = (torch.arange(self.query.shape[0], device=self.device) + self.written) % self.config.memory_slots
        self.memory_coordinates.index_copy_(0, slots, self.query)
        self.memory_states.index_copy_(0, slots, self.state)
        self.memory_filled.index_fill_(0, slots, True)
        if self._turned is not None:
            self._turned.write(slots, self.query)
            self._turned.set_theta(self.theta)
        self.written = (self.written + self.query.shape[0]) % self.config.memory_slots


class _Reports:
    """Reports in transit from the device to the host, each with a buffer and an event that marks its arrival.

    The host may run as many windows ahead as fit into the device's queue.

    batched  False: read each value of a report at once, which waits for the device
    """

    def __init__(self, device: torch.device, *, batched: bool) -> None:
        self._cuda, self._batched = device.type == "cuda", batched
        self._free = [self._buffer() for _ in range(AHEAD)]
        self._sent: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._latest: dict[str, float] | None = None

    def send(self, reported: torch.Tensor, window: int) -> None:
        if not self._batched:
            self._latest = _named([t.item() for t in reported], window)
            return
        buffer = self._free.pop() if self._free else self._buffer()
        buffer.copy_(reported, non_blocking=self._cuda)
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        self._sent.append((window, buffer, event))

    def latest(self) -> dict[str, float] | None:
        """Return the last report that has arrived; None before the first. Never waits."""
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            window, buffer, _ = self._sent.popleft()
            self._latest = _named(buffer.tolist(), window)
            self._free.append(buffer)
        return self._latest

    def wait(self) -> dict[str, float] | None:
        if self._sent and self._sent[-1][2] is not None:
            self._sent[-1][2].synchronize()
        return self.latest()

    def _buffer(self) -> torch.Tensor:
        return torch.zeros(len(REPORTED), pin_memory=self._cuda)


def _named(values: list[float], window: int) -> dict[str, float]:
    return {**dict(zip(REPORTED, values, strict=True)), "window": window}


@functools.cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile (forward pass, field step) once for all trainers, since they depend only on their arguments."""
    forward = compile_if_possible(_forward, "trainer2's forward pass", dynamic=False)
    return forward, compile_if_possible(_leapfrog, "trainer2's field", dynamic=False)


def _forward(
    weights: Mapping[str, torch.Tensor],
    low: Mapping[str, torch.Tensor],
    heads: int,
    blocks: int,
    embedded: torch.Tensor,
    mask: torch.Tensor,
    field: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the model's output [B, T, D], its masked mean [B, D], and the field's curvature [B].

    low    the linear layers' weights and biases in the precision of their products
    field  as pairs of real numbers, [lattice, lattice, 16, 16, 2]
    """
    B, T, D = embedded.shape
    magnitude = torch.hypot(field[..., 0], field[..., 1])
    density = magnitude.mean((0, 1)).flatten()
    x = embedded + weights["condition"] @ density

    def linear(h: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(h.to(low[name].dtype), low[name], low[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (D,), weights[name], weights[f"{name}.bias"])

    for i in range(blocks):
        q, k, v = linear(norm(x, f"{i}.norm1"), f"{i}.qkv").view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(a.transpose(1, 2).reshape(B, T, D), f"{i}.project")
        x = x + linear(functional.gelu(linear(norm(x, f"{i}.norm2"), f"{i}.expand")), f"{i}.contract")
    output = norm(x, "norm")
    return output, _masked_mean(output, mask), magnitude.mean().expand(B)


def _leapfrog(
    field: torch.Tensor,
    momentum: torch.Tensor,
    rest: torch.Tensor,
    retrieved: torch.Tensor,
    kappa: float,
    diffusion: float,
    gamma: float,
    dt: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (field, momentum) after a leapfrog step driven by `retrieved` [B, D].

    Complex tensors are given and returned as pairs of real numbers.
    """
    # The source is real, so it drives the real parts only.
    source = gamma * retrieved.mean(0)[:CHANNELS].view(FIELD_CHANNELS)
    source = torch.stack((source, torch.zeros_like(source)), -1)

    def force(t: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(t, (0, 0, 0, 0, 0, 0, 1, 1, 1, 1))
        neighbours = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return -kappa * (t - rest) + diffusion * (neighbours - 4 * t) + source

    momentum = momentum + dt / 2 * force(field)
    field = field + dt * momentum
    return field, momentum + dt / 2 * force(field)


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the mean over the tokens [B, T, ...] that `mask` [B, T] keeps; 0 if it keeps none."""
    kept = mask.unsqueeze(-1)
    return (values * kept).sum(1) / kept.sum(1).clamp(min=1)
