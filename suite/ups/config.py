"""The configuration of ups: the sizes of its model, the weights of its losses, and the constants of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from suite.configuration import need


@dataclass(frozen=True, kw_only=True)
class UpsConfig:
    """The sizes and constants of ups; the defaults are the source's.

    `__post_init__` raises ValueError for an impossible value, with the field's name and the remedy.
    """

    # --- sizes
    tokens: int = 128
    """Latent tokens of a field."""
    latent_width: int = 128
    """Width of a latent token."""
    width: int = 384
    """Hidden width of the operator; a multiple of `heads`."""
    depth: int = 12
    """Transformer blocks of the operator."""
    heads: int = 8
    """Attention heads, 48 wide each at the default width, in the operator and in the decoders."""
    mlp_ratio: int = 4
    """Hidden width of a block's MLP, in multiples of `width`."""
    drop_path: float = 0.1
    """Probability of dropping a sublayer of the last block; it rises linearly from 0 in the first block."""
    decoder_width: int = 384
    """Hidden width of a decoder; a multiple of `heads`."""
    decoder_depth: int = 3
    """Cross-attention layers of a decoder."""

    # --- losses
    lambda_enc: float = 0.01
    """Weight of the error of the decoded field at the query points."""
    lambda_dec: float = 0.01
    """Weight of the error of the latents encoded again."""
    spectral: float = 0.05
    """Weight of the error of the amplitudes of the latents' Fourier series along the tokens."""
    boundary: float = 0.05
    """Weight of the error of the latent tokens at the domain's boundary."""
    inverse_loss_frequency: int = 1
    """Batches from one that has the inverse losses to the next."""
    num_queries: int = 2048
    """Grid points at which a decoded field is compared; all of them where a grid has fewer."""

    # --- optimizer
    learning_rate: float = 1.4e-3
    weight_decay: float = 0.03
    ema_decay: float = 0.999
    seed: int = 0
    """Of the first weights, the dropped sublayers and the query points."""

    def __post_init__(self) -> None:
        sizes = ("tokens", "latent_width", "width", "depth", "heads", "mlp_ratio", "decoder_width", "decoder_depth")
        for name in (*sizes, "inverse_loss_frequency", "num_queries"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("width", "decoder_width"):
            need(getattr(self, name) % self.heads == 0, name, getattr(self, name), f"use a multiple of {self.heads}")
        need(0 <= self.drop_path < 1, "drop_path", self.drop_path, "use 0 or more and less than 1")
        for name in ("lambda_enc", "lambda_dec", "spectral", "boundary", "weight_decay"):
            need(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "use 0 or more")
        need(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "use a number above 0")
        need(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "use 0 or more and less than 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")
