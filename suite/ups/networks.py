"""The networks of a training: the operator, and an encoder and a decoder for each task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from suite.seeding import seeded_on_cpu
from suite.ups.batches import Mixture
from suite.ups.config import UpsConfig
from suite.ups.latents import frozen_encoder
from suite.ups.losses import InverseTask
from suite.ups.model import Decoder, Encoder, make_decoder, make_operator

CODERS = "coders"
"""Group of the encoders' and decoders' weights, which only batches with inverse losses train."""
CODING = ("encoders", "decoders")


class Networks(nn.Module):
    """All networks that are trained.

    The encoders start as copies of the frozen encoders. The cached latents remain those of the frozen encoders.
    """

    def __init__(self, config: UpsConfig, given: Mixture) -> None:
        super().__init__()
        with seeded_on_cpu(config.seed):
            self.operator = make_operator(config)
            self.decoders = nn.ModuleDict({t.task: make_decoder(config, len(t.fields.grid)) for t in given.tasks})
        self.encoders = nn.ModuleDict(
            {
                t.task: frozen_encoder(t.task, config.tokens, config.latent_width, config.seed).requires_grad_()
                for t in given.tasks
            }
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return name → parameter. The operator's come first, and their names begin with `operator.`."""
        return dict(self.named_parameters())

    def inverse_task(
        self, task: str, latents: torch.Tensor, field: torch.Tensor, queries: torch.Tensor, points: torch.Tensor
    ) -> InverseTask:
        """Return a task's part of a batch for the inverse losses; shapes as in `InverseTask`."""
        return InverseTask(
            encode=self.encoders[task],
            decode=self.decoders[task],
            latents=latents,
            field=field,
            points=points,
            queries=queries,
        )

    def encoder(self, task: str) -> Encoder:
        """Return a task's encoder."""
        return cast("Encoder", self.encoders[task])

    def decoder(self, task: str) -> Decoder:
        """Return a task's decoder."""
        return cast("Decoder", self.decoders[task])


def grouped(weights: Iterable[str]) -> dict[str, list[str]]:
    """Return optimizer → the names of its weights. Encoders and decoders share one optimizer, CODERS."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        first = name.partition(".")[0]
        groups.setdefault(CODERS if first in CODING else first, []).append(name)
    return groups


def rate_of(group: str, config: UpsConfig) -> float:
    """Return the learning rate of a group's optimizer."""
    return config.learning_rate * (config.coder_rate if group == CODERS else 1.0)
