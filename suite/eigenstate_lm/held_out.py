"""Validation of eigenstate_lm on held-out sequences: the loss, the best weights and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Text
from suite.runtime.weights import check_weights, copies

MeanLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(inputs, labels), int64 [B, T] each → their mean cross-entropy in nats, without dropout; 0-d."""


class HeldOut:
    """Validates on the held-out sequences and keeps a copy of the best weights; does nothing without such sequences.

    weights  the trainer's own tensors, from which the best values are copied
    """

    def __init__(self, config: TrainConfig, text: Text, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.text = config, text
        self.is_on = len(text.validation) > 0 and config.validate_every > 0
        self._weights = weights
        self._best = copies(weights) if self.is_on else {}
        self.best_loss, self.best_step = 0.0, 0
        self.loss, self.step = 0.0, 0

    def is_due(self, step: int) -> bool:
        """Return whether a validation follows a step, counted from 1. One always follows the last step."""
        return self.is_on and (step % self.config.validate_every == 0 or step == self.config.steps)

    @torch.no_grad()
    def validate(self, step: int, sequences: Any, device: torch.device, loss: MeanLoss) -> None:
        """Compute the mean loss after a step; keep the weights if it is the smallest yet. Waits for the device."""
        self.loss, self.step = mean_loss(self.text, self.config.batch_size, sequences, device, loss), step
        if not self.best_step or self.loss < self.best_loss or math.isnan(self.best_loss):
            self.best_loss, self.best_step = self.loss, step
            torch._foreach_copy_(list(self._best.values()), list(self._weights.values()))

    def metrics(self) -> dict[str, float]:
        """Return validation_loss and, for a text, bits_per_byte of the last validation; empty before the first."""
        return measures(self.loss, self.text) if self.step else {}

    def stops(self) -> str | None:
        """Return why training should end now; None if it should go on."""
        patience = self.config.patience
        if not patience or self.step - self.best_step < patience * self.config.validate_every:
            return None
        return f"no held-out loss was less than that of step {self.best_step} in {patience} validations (patience)"

    def summary(self) -> str | None:
        """Return the last and the best validation in one line; None before the first validation."""
        if not self.step:
            return None
        bits = self.metrics().get("bits_per_byte")
        byte = f", {bits:.4f} bits a byte" if bits is not None else ""
        return f"held-out loss {self.loss:.4f}{byte}; the least was {self.best_loss:.4f}, after step {self.best_step}"

    def state(self) -> dict[str, Any]:
        """Return the checkpoint's state: the best weights, and the best and the last loss with their steps."""
        return {
            "weights": copies(self._best),
            "loss": self.best_loss,
            "step": self.best_step,
            "last": {"loss": self.loss, "step": self.step},
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state. None, from a run without held-out sequences, is ignored. ValueError if it is damaged."""
        if not self.is_on or not state or not state["weights"]:
            return
        whole(state, "step")
        whole(state["last"], "step")
        check_weights(self._best, state["weights"])
        with torch.no_grad():
            for name, weight in state["weights"].items():
                self._best[name].copy_(weight)
        self.best_loss, self.best_step = float(state["loss"]), state["step"]
        self.loss, self.step = float(state["last"]["loss"]), state["last"]["step"]


def best_of(state: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the weights with which a checkpoint is evaluated, and their step; neither is checked.

    They are the weights with the smallest held-out loss or, without a validation, the last ones.
    """
    best = state.get("best")
    chosen = best if isinstance(best, Mapping) and best.get("step") else {**state, "step": state.get("steps")}
    return chosen.get("weights"), chosen.get("step")


def mean_loss(text: Text, batch_size: int, sequences: Any, device: torch.device, loss: MeanLoss) -> float:
    """Return the mean loss of all held-out sequences, computed `batch_size` sequences at a time."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows in text.validation.split(batch_size):
        inputs, labels = (t.to(device) for t in sequences.batch(rows))
        total += len(rows) * loss(inputs, labels).double()
    return float(total) / len(text.validation)


def measures(loss: float, text: Text) -> dict[str, float]:
    """Return validation_loss and, if the tokens are not random, bits_per_byte, from a mean loss in nats."""
    found = {"validation_loss": loss}
    if text.validation_bytes:
        tokens = len(text.validation) * text.length
        found["bits_per_byte"] = loss / math.log(2) * tokens / text.validation_bytes
    return found
