"""The reference trainer of trainer2, a contrastive geometry trainer without autograd; plain and eager.

A frozen causal transformer, conditioned on a field, computes the coordinates of each item. In a free window of steps
the field evolves, and the trainer measures lior: the length of the query in a learned metric times the field's
curvature. A nudged window starts from the same field, with the query moved toward the next tokens. The difference of
lior between the two windows updates the metric and the rotor.

The source leaves some choices open, and some of it is wrong. This trainer does the following:

* The rotor returns a rotated copy. In the source it rotated its input in place, so the mean velocity "in the original
  frame" was already rotated. Here retrieval, lior and speed use the rotated query; the velocity is the unrotated one.
* The memory is written once for both windows, after the update, from the nudged window's last step. The source wrote it
  twice.
* The nudge is computed from the free window's last query and is constant during the nudged window. The update uses the
  nudged window's mean velocity, and the field continues from that window's end.
* The next tokens are those within the item: the last token has none.

Source: trainer2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from reference.geometry.lior_and_speed import lior_and_speed
from reference.geometry.metric_update import metric_update
from reference.geometry.retrieval import retrieval
from reference.geometry.rotor_apply import rotor_apply, rotor_index
from reference.geometry.rotor_update import rotor_update
from reference.synchronization.metric_batching import metric_batching
from suite.trainer2.config import FIELD_CHANNELS, TrainConfig
from suite.trainer2.model import make_field, make_weights
from suite.trainer2.state import restore, state_of

CLEANUP_EVERY = 10
"""Calls of `train_window` from one `torch.cuda.empty_cache()` to the next."""


class Trainer:
    """The reference trainer. `train_window` runs a free and a nudged window; `metrics` returns their metrics.

    dtype  working precision: float32, or float64 for the ground truth
    """

    def __init__(
        self, config: TrainConfig, vocabulary: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.weights = {k: w.to(self.device, dtype) for k, w in make_weights(config, vocabulary).items()}
        first = make_field(config).to(self.device, dtype.to_complex())
        n, real = config.coordinates, {"device": self.device, "dtype": dtype}
        self.field, self.momentum, self.rest = first.clone(), torch.zeros_like(first), first
        self.metric = torch.ones(n, **real)
        self.theta = torch.zeros(config.rotor_k, **real)
        self.index = rotor_index(n, config.rotor_k).to(self.device)
        self.memory_coordinates = torch.zeros(config.memory_slots, n, **real)
        self.memory_states = torch.zeros(config.memory_slots, config.width, **real)
        self.memory_filled = torch.zeros(config.memory_slots, dtype=torch.bool, device=self.device)
        self.written = self.windows = 0
        self.reported: dict[str, float] | None = None

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Run both windows and the update on `batch` (input_ids int64 [B, T], attention_mask [B, T])."""
        config = self.config
        tokens = batch["input_ids"].to(self.device)
        mask = batch["attention_mask"].to(self.device, self.dtype)
        before = self.field.clone(), self.momentum.clone()
        nothing = torch.zeros(tokens.shape[0], config.coordinates, device=self.device, dtype=self.dtype)
        free = self._window(tokens, mask, nothing)
        target = self._next_embedding(tokens, mask)[:, : config.coordinates]
        nudge = config.nudge_scale * (target - free["query"])
        self.field, self.momentum = before
        nudged = self._window(tokens, mask, nudge)

        loss_delta = nudged["lior"] - free["lior"]
        velocity = nudged["velocity"]
        metric_update(self.metric, rotor_apply(self.theta, velocity), loss_delta, config.eta)
        rotor_update(self.theta, velocity, self.index, loss_delta, config.eta)
        self._remember(nudged["query"], nudged["state"])
        self.windows += 1
        if self.windows % CLEANUP_EVERY == 0:
            torch.cuda.empty_cache()
        lior, curvature, speed = metric_batching(free["lior"], free["curvature"], free["speed"], 1)
        self.reported = {"loss": lior, "curvature": curvature, "speed": speed, "loss_delta": loss_delta.item()}

    def metrics(self) -> Mapping[str, float] | None:
        """Return loss (the free window's mean lior), curvature, speed and loss_delta; None before the first window."""
        return self.reported

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the weights and the configuration."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)

    @torch.no_grad()
    def coordinates(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the items' coordinates under the current field, rotated by the rotor as for retrieval, [B, n].

        tokens  int64 [B, T]
        mask    [B, T], 0 for padding
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast_bf16):
            output = self._forward(tokens.to(self.device)).to(self.dtype)
        query = _masked_mean(output[..., : self.config.coordinates], mask.to(self.device, self.dtype))
        return rotor_apply(self.theta, query)

    # --- a window

    def _window(self, tokens: torch.Tensor, mask: torch.Tensor, nudge: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run a window of steps; return means over its steps and the batch, and the last step's query and state.

        The means are those of lior, curvature and speed, 0-d, and of the velocity, [n].
        """
        config = self.config
        zero = torch.zeros((), device=self.device, dtype=self.dtype)
        lior_acc, curvature_acc, speed_acc = zero, zero, zero
        velocity_acc = torch.zeros_like(nudge)
        for step in range(1, config.window + 1):
            lior, curvature, speed, query, output = self._step(tokens, mask, nudge)
            lior_acc = lior_acc.detach() + lior.mean().detach()
            curvature_acc = curvature_acc.detach() + curvature.mean().detach()
            speed_acc = speed_acc.detach() + speed.mean().detach()
            velocity_acc = velocity_acc.detach() + query.detach()
            if config.step_progress_every and step % config.step_progress_every == 0:
                lior_now, curvature_now, speed_now = metric_batching(lior_acc, curvature_acc, speed_acc, step)
                print(f"step {step}: lior {lior_now:.4f}, R_sc {curvature_now:.4f}, speed {speed_now:.4f}")
        return {
            "lior": lior_acc / config.window,
            "curvature": curvature_acc / config.window,
            "speed": speed_acc / config.window,
            "velocity": velocity_acc.mean(0) / config.window,
            "query": query,
            "state": _masked_mean(output, mask),
        }

    def _step(self, tokens: torch.Tensor, mask: torch.Tensor, nudge: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run a step, which moves the field; return lior, curvature and speed, [B] each, the query [B, n] and the
        model's output [B, T, D]."""
        config, n = self.config, self.config.coordinates
        curvature = self.field.abs().mean().expand(tokens.shape[0])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.autocast_bf16):
            output = self._forward(tokens).to(self.dtype)
        coordinates = output[..., :n]
        query = _masked_mean(coordinates, mask) + nudge
        turned = rotor_apply(self.theta, query)
        retrieved = retrieval(
            turned,
            curvature,
            rotor_apply(self.theta, coordinates),
            output,
            mask.bool(),
            rotor_apply(self.theta, self.memory_coordinates),
            self.memory_states,
            self.memory_filled,
            None,
            self.metric,
            config.beta,
            config.eps,
        )
        lior, speed = lior_and_speed(turned, curvature, None, self.metric, config.eps)
        self._move_field(retrieved)
        return lior, curvature, speed, query, output

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Apply the model's causal blocks, [B, T, D]. The projected density of the field is added to each embedding.

        Padding is at the end of an item, where causal attention hides it from all tokens before it.
        """
        w, (B, T) = self.weights, tokens.shape
        D, heads = self.config.width, self.config.heads
        density = self.field.abs().mean((0, 1)).flatten()
        x = w["embedding"][tokens] + w["condition"] @ density
        for i in range(self.config.blocks):
            h = functional.layer_norm(x, (D,), w[f"{i}.norm1"], w[f"{i}.norm1.bias"])
            qkv = functional.linear(h, w[f"{i}.qkv"], w[f"{i}.qkv.bias"])
            q, k, v = qkv.view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            a = a.transpose(1, 2).reshape(B, T, D)
            x = x + functional.linear(a, w[f"{i}.project"], w[f"{i}.project.bias"])
            h = functional.layer_norm(x, (D,), w[f"{i}.norm2"], w[f"{i}.norm2.bias"])
            h = functional.gelu(functional.linear(h, w[f"{i}.expand"], w[f"{i}.expand.bias"]))
            x = x + functional.linear(h, w[f"{i}.contract"], w[f"{i}.contract.bias"])
        return functional.layer_norm(x, (D,), w["norm"], w["norm.bias"])

    def _move_field(self, retrieved: torch.Tensor) -> None:
        """Move the field by a leapfrog step, driven by `retrieved` [B, D]."""
        source = retrieved.mean(0)[: FIELD_CHANNELS[0] * FIELD_CHANNELS[1]].view(FIELD_CHANNELS)
        half = self.config.dt / 2
        self.momentum = self.momentum + half * self._force(source)
        self.field = self.field + self.config.dt * self.momentum
        self.momentum = self.momentum + half * self._force(source)

    def _force(self, source: torch.Tensor) -> torch.Tensor:
        config = self.config
        # Zero outside the lattice, which is the first two axes; functional.pad lists the last axes first.
        padded = functional.pad(self.field, (0, 0, 0, 0, 1, 1, 1, 1))
        neighbours = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        laplacian = neighbours - 4 * self.field
        return -config.kappa * (self.field - self.rest) + config.diffusion * laplacian + config.gamma * source

    def _next_embedding(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the mean embedding of all tokens except the first, [B, D]."""
        return _masked_mean(self.weights["embedding"][tokens[:, 1:]], mask[:, 1:])

    def _remember(self, query: torch.Tensor, state: torch.Tensor) -> None:
        """Write one slot per item into the memory, a ring buffer."""
        slots = (torch.arange(query.shape[0], device=self.device) + self.written) % self.config.memory_slots
        self.memory_coordinates[slots] = query
        self.memory_states[slots] = state
        self.memory_filled[slots] = True
        self.written = (self.written + query.shape[0]) % self.config.memory_slots


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the mean over the tokens [B, T, ...] that `mask` [B, T] keeps; 0 if it keeps none."""
    kept = mask.unsqueeze(-1)
    return (values * kept).sum(1) / kept.sum(1).clamp(min=1)
