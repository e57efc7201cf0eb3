"""The reference trainer of eigenstate_lm, a recurrent language model of eigenstates; plain and eager.

A step encodes its sequences, runs the recurrence over them token by token, computes the logits of every token, and
applies AdamW to the clipped gradients of the mean cross-entropy.

The source leaves some choices open. This trainer makes them as follows:

* Every sequence begins with zero states, because each epoch has a new order of the sequences.
* A step is one batch of batch_size x accumulation sequences.
* Both trainers share the function that draws the initial weights. The network is implemented in this file.
* A step with non-finite gradients changes no weight and no moment, as with `GradScaler`, in every precision.

Source: eigenstate_lm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from reference.losses.chunked_cross_entropy import chunked_cross_entropy
from reference.optimizers.clip_grad_norm import clip_grad_norm
from reference.optimizers.gradient_accumulation import gradient_accumulation
from reference.optimizers.one_cycle import one_cycle
from reference.recurrence.eigenstate_scan import eigenstate_scan
from reference.recurrence.fused_output_projection import fused_output_projection
from reference.synchronization.sync_free_scaler_step import ScalerStep
from suite.backends import tf32_products
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Text, next_rows
from suite.eigenstate_lm.held_out import HeldOut
from suite.eigenstate_lm.memory import naming_the_remedy
from suite.eigenstate_lm.model import make_weights
from suite.eigenstate_lm.report import Report, Throughput
from suite.eigenstate_lm.state import restore, state_of
from suite.runtime.reports import Reports
from suite.stepping import WaitsForReports

Scan: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Trainer(WaitsForReports):
    """The reference trainer. `train_window` runs one step; `metrics` returns its metrics.

    text   the sequences, as `suite.eigenstate_lm.data.load` opens them
    dtype  working precision: float32, or float64 for the ground truth
    scan   the recurrence: token by token, or an equivalent function for sequences that are too long for that
    """

    window_name = "step"

    def __init__(
        self,
        config: TrainConfig,
        text: Text,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        scan: Scan = eigenstate_scan,
    ) -> None:
        self.config, self.text, self.device, self.dtype = config, text, torch.device(device), dtype
        self.scan = scan
        self.sequences = text.encoded()
        with naming_the_remedy(config, text.vocabulary, self.device, plain=True):
            first = make_weights(config.seed, config.sizes(text.vocabulary))
            self.weights = {name: w.to(self.device, dtype).requires_grad_() for name, w in first.items()}
        self.lr = torch.zeros((), device=self.device, dtype=dtype)
        # `train_window` clips the gradients, so the optimizer must not clip them again.
        self.optimizer = ScalerStep(
            list(self.weights.values()),
            self.lr,
            weight_decay=config.weight_decay,
            max_norm=float("inf"),
            scaling=config.scaling,
        )
        self.steps = 0
        self.held_out = HeldOut(config, text, self.weights)
        # The reference trainer never uses TF32.
        self.throughput = Throughput(dataclasses.replace(config, tf32=False), text.vocabulary, self.device)
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one step on the next sequences, as determined by the number of steps made.

        `batch["step"]`, if given, must be that number, counted from 0; otherwise ValueError.
        """
        config, rows = self.config, next_rows(self.config, self.text, self.steps, batch)
        with (
            naming_the_remedy(config, self.text.vocabulary, self.device, plain=True),
            tf32_products(allowed=False),
        ):
            inputs, labels = (t.to(self.device) for t in self.sequences.batch(rows))
            leaves, scale = list(self.weights.values()), self.optimizer.scale.clone()
            loss, grads = gradient_accumulation(self._loss, leaves, (inputs, labels), config.batch_size)
            with torch.no_grad():
                norm = clip_grad_norm([g.div_(scale) for g in grads], config.clip)
                count = min(self.steps, config.steps - 1)  # after the schedule's end, keep its last rate
                self.lr.copy_(one_cycle(torch.tensor([count]), config.steps, config.learning_rate)[0])
                self.optimizer([g.mul_(scale) for g in grads])
            self.steps += 1
        found = Report(
            step=self.steps, loss=float(loss / scale), rate=float(self.lr), norm=float(norm), scale=float(scale)
        )
        self._reports.send(torch.zeros(0, device=self.device), lambda _: found)
        if self.held_out.is_due(self.steps):
            self.held_out.validate(self.steps, self.sequences, self.device, self.held_out_loss)

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of the last step and of the last validation; None before the first step."""
        found = super().metrics()
        return None if found is None else {**found, **self.held_out.metrics()}

    def stops(self) -> str | None:
        """Return why training should end now; None if it should go on."""
        return self.held_out.stops()

    @torch.no_grad()
    def held_out_loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of sequences [B, T] without dropout, 0-d."""
        with tf32_products(allowed=False):
            return self._mean_loss(self.weights, inputs, labels, lambda x: x)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the configuration and the tokenizer."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]

    def _loss(self, leaves: Sequence[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of sequences [B, T], times the loss scale, 0-d."""
        weights = dict(zip(self.weights, leaves, strict=True))
        return self._mean_loss(weights, inputs, labels, self._drop) * self.optimizer.scale

    def _mean_loss(
        self,
        weights: Mapping[str, torch.Tensor],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        drop: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        config = self.config
        low = torch.float16 if config.autocast_fp16 else torch.bfloat16
        with torch.autocast(self.device.type, low, enabled=config.autocast_fp16 or config.autocast_bf16):
            hidden = _hidden(weights, inputs, config.layers, drop, self.scan)
            loss = chunked_cross_entropy(hidden.flatten(0, 1), weights["embedding"], labels.flatten())
        return loss.to(self.dtype)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.config.dropout)


def _hidden(
    weights: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    layers: int,
    drop: Callable[..., torch.Tensor],
    scan: Scan,
) -> torch.Tensor:
    """Compute the head's input [B, T, D] for tokens [B, T].

    A block has a mixer along time and two linear layers, each followed by a residual sum and a layer norm.
    """
    x = functional.embedding(tokens, weights["embedding"])
    for number in range(layers):
        own = {name.partition(".")[2]: w for name, w in weights.items() if name.startswith(f"{number}.")}
        x = _normed(own, "norm1", x + drop(_mixed(own, x, drop, scan)))
        wide = functional.gelu(functional.linear(x, own["expand"], own["expand.bias"]), approximate="tanh")
        x = _normed(own, "norm2", x + drop(functional.linear(wide, own["contract"], own["contract.bias"])))
    return x


def _mixed(
    own: Mapping[str, torch.Tensor], x: torch.Tensor, drop: Callable[..., torch.Tensor], scan: Scan
) -> torch.Tensor:
    """Compute the mean of a block's cells, each the projection of its eigenstates, [B, T, D].

    Each cell has K eigenstates. At each token they are multiplied by λ, and the projected input is added. One scan
    computes all cells. Their real parts are rotated slightly and projected, cell by cell.
    """
    cells, count = own["decay"].shape
    phase = torch.arange(count, dtype=own["decay"].dtype, device=x.device) * (2 * math.pi / count)
    size = 0.1 + 0.89 * own["decay"].sigmoid()  # |λ| is between 0.1 and 0.99
    eigenvalues = torch.stack((size * phase.cos(), size * phase.sin()), -1).flatten(0, 1)
    before = torch.zeros(len(x), cells * count, 2, dtype=own["decay"].dtype, device=x.device)
    real, _ = scan(functional.linear(x, own["drive"].flatten(0, 1)), eigenvalues, before)
    said = []
    for part, mixing, out in zip(real.split(count, dim=-1), own["rotation"], own["out"], strict=True):
        identity = torch.eye(count, dtype=mixing.dtype, device=mixing.device)
        rotated = identity + 0.01 * mixing / torch.linalg.matrix_norm(mixing)
        said.append(drop(fused_output_projection(part, rotated, out)))
    return torch.stack(said).mean(0) if cells > 1 else said[0]


def _normed(own: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], own[name], own[f"{name}.bias"])
