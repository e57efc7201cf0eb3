"""A causal language model with Llama's architecture and the parameter names of transformers' LlamaForCausalLM.

Shape letters: B rows, T tokens, H query heads, K key and value heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, silu


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the model. `tied`: the output projection shares the embedding's weight."""

    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    positions: int
    rope_theta: float = 10_000.0
    eps: float = 1e-5
    tied: bool = True


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 or the wider dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        scaled: torch.Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32; return other dtypes unchanged."""
    return x.float() if x.dtype.itemsize == 2 else x


def rotation(shape: Shape, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotary embedding, [..., D], for positions [...].

    The angles are computed in float32, as in transformers.
    """
    steps = torch.arange(0, shape.head_width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / shape.rope_theta ** (steps / shape.head_width))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (d, d + D/2) of the heads [B, heads, T, D] by the angle of its position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat each head `times` times: [B, K, T, D] → [B, K · times, T, D], copies of a head adjacent."""
    return x if times == 1 else x.repeat_interleave(times, 1)


class Attention(nn.Module):
    """Grouped-query attention with its projections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, outer = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, inner, bias=False)
        self.k_proj = nn.Linear(shape.width, outer, bias=False)
        self.v_proj = nn.Linear(shape.width, outer, bias=False)
        self.o_proj = nn.Linear(inner, shape.width, bias=False)

    def heads(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [B, H, T, D] and keys and values [B, K, T, D] of x [B, T, width].

        The rotary embedding is applied to queries and keys.
        """
        q, k, v = (
            project(x).unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x, cos, sin)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = repeated(k, groups), repeated(v, groups)
        scores = q @ k.mT * self.shape.head_width**-0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        weights = torch.softmax(widened(scores), -1).to(q.dtype)
        projected: torch.Tensor = self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        added: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added


class Body(nn.Module):
    """The embedding, blocks and final norm: the model without its output projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.eps)


def _called(block: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
    called: torch.Tensor = block(*arguments)
    return called


class Llama(nn.Module):
    """The language model: computes the logits of the next token at each position.

    Weights are initialised as in transformers: normal with standard deviation 0.02.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def hidden(self, tokens: torch.Tensor, run: Callable[..., torch.Tensor] = _called) -> torch.Tensor:
        """Compute the final hidden states [B, T, width] of tokens [B, T], with causal attention.

        `run` calls a block with its arguments, e.g. with activation checkpointing.
        """
        x = self.model.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotation(self.shape, positions, x.dtype)
        mask = positions[:, None] >= positions
        for block in self.model.layers:
            x = run(block, x, cos, sin, mask)
        normed: torch.Tensor = self.model.norm(x)
        return normed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V] for tokens [B, T]. Rows may be right-padded, since attention is causal."""
        return linear(self.hidden(tokens), self.lm_head.weight)
