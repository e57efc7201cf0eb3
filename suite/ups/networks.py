"""The networks that are trained: the operator, and an encoder and a decoder for each task."""

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
"""Name of the weight group of the encoders and decoders. Only batches with inverse losses train it."""
CODING = ("encoders", "decoders")
"""Submodules of `Networks` in the group CODERS."""


class Networks(nn.Module):
    """All networks that the operator stage trains.

    The encoders start as copies of the frozen encoders. The cached latents still come from the frozen encoders.
    """

    def __init__(self, config: UpsConfig, mixture: Mixture) -> None:
        super().__init__()
        with seeded_on_cpu(config.seed):
            self.operator = make_operator(config)
            self.decoders = nn.ModuleDict({t.task: make_decoder(config, len(t.fields.grid)) for t in mixture.tasks})
        self.encoders = nn.ModuleDict(
            {
                t.task: frozen_encoder(t.task, config.tokens, config.latent_width, config.seed).requires_grad_()
                for t in mixture.tasks
            }
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return name → parameter. Those of the operator come first, and their names begin with `operator.`."""
        return dict(self.named_parameters())

    def inverse_task(
        self, task: str, latents: torch.Tensor, field: torch.Tensor, queries: torch.Tensor, points: torch.Tensor
    ) -> InverseTask:
        """Return the inputs of the inverse losses for one task; shapes as in `InverseTask`."""
        return InverseTask(
            encode=self.encoders[task],
            decode=self.decoders[task],
            latents=latents,
            field=field,
            points=points,
            queries=queries,
        )

    def encoder(self, task: str) -> Encoder:
        """Return the encoder of a task."""
        return cast("Encoder", self.encoders[task])

    def decoder(self, task: str) -> Decoder:
        """Return the decoder of a task."""
        return cast("Decoder", self.decoders[task])


def grouped(weights: Iterable[str]) -> dict[str, list[str]]:
    """Return optimizer → names of its weights. Encoders and decoders share the optimizer CODERS."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        first = name.partition(".")[0]
        groups.setdefault(CODERS if first in CODING else first, []).append(name)
    return groups


def rate_of(group: str, config: UpsConfig) -> float:
    """Return the learning rate of a group's optimizer."""
    return config.learning_rate * (config.coder_rate if group == CODERS else 1.0)
