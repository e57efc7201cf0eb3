"""A trainer whose windows take microseconds, registered as "toy"; as a script it runs `perfsuite train`.

A bigram model without autograd, with noise from every random generator that a checkpoint must restore. Its
metrics are one window late, like those of a real trainer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from suite.trainers import Entry, register


@dataclass(frozen=True, kw_only=True)
class Model:
    scale: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Config:
    eta_update: float = 0.1
    use_cudagraphs: bool = True
    nan_at: int | None = None
    sleep: float = 0.0
    seed: int = 0
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        if self.eta_update <= 0:
            raise ValueError("eta_update must be positive")


class Trainer:
    """Bigram model: a table of scores for each pair of consecutive tokens."""

    def __init__(self, config: Config, vocabulary: int, device: torch.device) -> None:
        self.config = config
        self.scores = torch.randn(vocabulary, vocabulary, device=device) * config.model.scale
        self.windows = 0
        self.losses: list[torch.Tensor] = []

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        if self.config.sleep:
            time.sleep(self.config.sleep)
        ids = batch["input_ids"].to(self.scores.device)
        before, after = ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)
        chances = self.scores[before].softmax(-1)
        loss = -chances.gather(1, after[:, None]).log().mean()
        pull = torch.nn.functional.one_hot(after, self.scores.shape[1]) - chances
        self.scores.index_add_(0, before, pull, alpha=self.config.eta_update)
        self.scores += 1e-3 * (torch.randn_like(self.scores) + random.random() + float(numpy.random.rand()))
        self.windows += 1
        self.losses = [*self.losses[-1:], loss * float("nan") if self.windows == self.config.nan_at else loss]

    def metrics(self) -> dict[str, float] | None:
        return {"loss": float(self.losses[0])} if len(self.losses) == 2 else None

    def state_dict(self) -> dict[str, Any]:
        return {"scores": self.scores, "windows": self.windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scores.copy_(state["scores"])
        self.windows = state["windows"]


register("toy", Entry(config=Config, reference=Trainer, optimized=Trainer))

if __name__ == "__main__":
    from suite.commands.train import train

    train(prog_name="perfsuite train")
