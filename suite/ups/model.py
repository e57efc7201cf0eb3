"""The model of ups: a transformer that steps latent tokens in time, and an encoder and decoder for each task.

The modules are plain PyTorch. The attention function and the function that calls a sublayer are parameters, so that a
technique can replace them. No module draws random numbers in its forward pass. Drop-path multipliers are an input, so
that compiled, recomputed and resumed runs drop the same sublayers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from suite.ups.config import UpsConfig

FREQUENCIES = (1, 2, 4, 8)
"""Frequencies of the Fourier features of coordinates and time steps, in periods per unit length."""
EPSILON = 1e-6
"""Epsilon of the RMS norm of queries and keys. PyTorch's default would depend on the dtype."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q, k, v), each [B, heads, tokens, head width] → attention output [B, heads, query tokens, head width]."""
Call = Callable[..., torch.Tensor]
"""(sublayer, *arguments) → the result of the sublayer."""


def fourier_features(points: torch.Tensor) -> torch.Tensor:
    """Return the sine and cosine of each coordinate at the four frequencies: [..., d] → [..., 8 d]."""
    scaled = torch.stack([2 * math.pi * frequency * points for frequency in FREQUENCIES], -1).flatten(-2)
    return torch.cat((scaled.sin(), scaled.cos()), -1)


def drop_path_rates(depth: int, last: float) -> list[float]:
    """Return the drop probability of each block, linear from 0 in the first block to `last` in the last one."""
    return [last * block / max(depth - 1, 1) for block in range(depth)]


def drop_path_scales(rates: Sequence[float], batch: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw the drop-path multipliers of all sublayers, float32 [depth, 2, batch] on the CPU: 0 or 1 / (1 - rate)."""
    kept = 1 - torch.tensor(rates, dtype=torch.float64)[:, None, None]
    drawn = torch.rand(len(rates), 2, batch, generator=generator, dtype=torch.float64)
    return ((drawn < kept) / kept).float()


def call_plainly(sublayer: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """Call a sublayer directly."""
    return sublayer(*arguments)


class Block(nn.Module):
    """A pre-LN transformer block: attention with RMS-normalized queries and keys, then a GELU MLP.

    The embedding of the time step is added to the normalized tokens before both sublayers.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.query_norm = nn.RMSNorm(width // heads, EPSILON)
        self.key_norm = nn.RMSNorm(width // heads, EPSILON)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, mlp_ratio * width)
        self.contract = nn.Linear(mlp_ratio * width, width)

    def attend(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        scale: torch.Tensor | None = None,
        attention: Attention = functional.scaled_dot_product_attention,
    ) -> torch.Tensor:
        """Apply the attention sublayer with its residual: x [B, T, D], time [B, D], scale [B] → [B, T, D]."""
        q, k, v = split_heads(self.qkv(self.norm1(x) + time[:, None]), 3 * self.heads).chunk(3, 1)
        mixed = attention(normalized(q, self.query_norm), normalized(k, self.key_norm), v)
        return x + scaled(self.project(join_heads(mixed)), scale)

    def feed(self, x: torch.Tensor, time: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the MLP sublayer with its residual; shapes as for `attend`."""
        wide = functional.gelu(self.expand(self.norm2(x) + time[:, None]))
        return x + scaled(self.contract(wide), scale)


class Operator(nn.Module):
    """The latent operator: (latent tokens, time step) → latent tokens after that step.

    It has 21,445,120 parameters at the default sizes.
    """

    def __init__(
        self, latent_width: int = 128, width: int = 384, depth: int = 12, heads: int = 8, mlp_ratio: int = 4
    ) -> None:
        super().__init__()
        self.take = nn.Linear(latent_width, width)
        self.time1 = nn.Linear(1 + 2 * len(FREQUENCIES), latent_width)
        self.time2 = nn.Linear(latent_width, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.give = nn.Linear(width, latent_width)

    def embed_time(self, dt: torch.Tensor) -> torch.Tensor:
        """Embed the time steps with a two-layer MLP on dt and its Fourier features: [B] → [B, D]."""
        features = torch.cat((dt[:, None], fourier_features(dt[:, None])), -1)
        embedded: torch.Tensor = self.time2(functional.gelu(self.time1(features)))
        return embedded

    def forward(
        self,
        latents: torch.Tensor,
        dt: torch.Tensor,
        scales: torch.Tensor | None = None,
        attention: Attention = functional.scaled_dot_product_attention,
        call: Call = call_plainly,
    ) -> torch.Tensor:
        """Return the latents after `dt`, [B, T, latent width].

        latents    [B, T, latent width]
        dt         [B]
        scales     [depth, 2, B], as returned by `drop_path_scales`; None drops nothing
        attention  attention function of each block, on [B, heads, T, head width]
        call       function that calls each sublayer
        """
        x, time = self.enter(latents, dt)
        return self.leave(latents, self.through(x, time, scales, 0, len(self.blocks), attention, call))

    def enter(self, latents: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of the first block: tokens [B, T, D] and embedded time steps [B, D]."""
        return self.take(latents), self.embed_time(dt)

    def through(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        scales: torch.Tensor | None,
        first: int,
        end: int,
        attention: Attention,
        call: Call,
    ) -> torch.Tensor:
        """Apply the blocks from `first` to `end` - 1 and return the tokens; other arguments as for `forward`."""
        for number in range(first, end):
            block = self.blocks[number]
            at_attention, at_mlp = (None, None) if scales is None else scales[number]
            x = call(block.attend, x, time, at_attention, attention)
            x = call(block.feed, x, time, at_mlp)
        return x

    def leave(self, latents: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the latents after dt, computed from the latents before it and the tokens after all blocks."""
        stepped: torch.Tensor = latents + self.give(self.norm(x))
        return stepped


class Encoder(nn.Module):
    """The grid encoder of a task: a linear layer on each point, then the mean over the points of each token.

    The features of a point are the channels of the field and the Fourier features of its coordinates: 9 features for
    one channel on a line.

    tokens  number of tokens along each dimension of the grid, e.g. (128,) or (16, 8)
    """

    def __init__(self, tokens: Sequence[int], channels: int = 1, latent_width: int = 128) -> None:
        super().__init__()
        self.tokens = tuple(tokens)
        self.embed = nn.Linear(channels + 2 * len(FREQUENCIES) * len(self.tokens), latent_width)

    def forward(self, field: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Encode fields [B, *grid, C] at points [*grid, d] → latents [B, tokens, latent width].

        ValueError if a dimension of the grid is not a multiple of its number of tokens.
        """
        grid = points.shape[:-1]
        if len(grid) != len(self.tokens) or any(n % t for n, t in zip(grid, self.tokens, strict=True)):
            raise ValueError(f"a grid of {tuple(grid)} does not divide into tokens of {self.tokens}")
        position = fourier_features(points).expand(len(field), *grid, -1)
        x: torch.Tensor = self.embed(torch.cat((field, position), -1))
        for axis, count in enumerate(self.tokens, start=1):
            x = x.unflatten(axis, (count, -1)).mean(axis + 1)
        return x.flatten(1, -2)


class CrossAttention(nn.Module):
    """A pre-LN layer in which query points attend to latent tokens."""

    def __init__(self, width: int, latent_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(latent_width, 2 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Apply the layer: x [B, Q, D], latents [B, T, latent width] → [B, Q, D]."""
        q = split_heads(self.query(self.norm(x)), self.heads)
        k, v = split_heads(self.key_value(latents), 2 * self.heads).chunk(2, 1)
        attended: torch.Tensor = x + self.project(join_heads(functional.scaled_dot_product_attention(q, k, v)))
        return attended


class Decoder(nn.Module):
    """The decoder of a task: computes the field at arbitrary points, each independently of the others.

    dims  number of coordinates of a point
    """

    def __init__(
        self,
        dims: int,
        channels: int = 1,
        latent_width: int = 128,
        width: int = 384,
        depth: int = 3,
        heads: int = 8,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(2 * len(FREQUENCIES) * dims, width)
        self.layers = nn.ModuleList(CrossAttention(width, latent_width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.values = nn.Linear(width, channels)

    def forward(self, latents: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Decode latents [B, T, latent width] at points [Q, d] → field values [B, Q, C]."""
        x = self.embed(fourier_features(points)).expand(len(latents), -1, -1)
        for layer in self.layers:
            x = layer(x, latents)
        values: torch.Tensor = self.values(functional.gelu(self.hidden(self.norm(x))))
        return values


def make_operator(config: UpsConfig) -> Operator:
    """Build the operator of a configuration. As in `torch.nn`, the global generator draws the initial weights."""
    return Operator(config.latent_width, config.width, config.depth, config.heads, config.mlp_ratio)


def make_decoder(config: UpsConfig, dims: int, channels: int = 1) -> Decoder:
    """Build the decoder of a task. Its initial weights are drawn as in `make_operator`."""
    return Decoder(dims, channels, config.latent_width, config.decoder_width, config.decoder_depth, config.heads)


def make_encoder(config: UpsConfig, tokens: Sequence[int], channels: int = 1) -> Encoder:
    """Build the encoder of a task. Its initial weights are drawn as in `make_operator`.

    tokens  number of tokens along each dimension

    ValueError if the product of `tokens` is not `config.tokens`.
    """
    if math.prod(tokens) != config.tokens:
        raise ValueError(
            f"tokens {tuple(tokens)} are {math.prod(tokens)} in all; the configuration has {config.tokens}"
        )
    return Encoder(tokens, channels, config.latent_width)


def parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Split the heads: [B, T, heads · d] → [B, heads, T, d]."""
    split: torch.Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """Join the heads: [B, heads, T, d] → [B, T, heads · d]."""
    return x.transpose(1, 2).flatten(2)


def normalized(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """Apply a norm in the dtype of x. The weight is cast, because under autocast the fused kernel needs one dtype."""
    assert norm.weight is not None
    return functional.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Multiply each sample of x [B, T, D] by its entry in scale [B]; for None, return x unchanged."""
    return x if scale is None else x * scale[:, None, None]
