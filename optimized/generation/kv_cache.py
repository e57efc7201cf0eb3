"""Every next token from the keys and values of those before it, by a replayed step (polychromic, technique 003.4b)."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from optimized.compilation.compiled_function import compile_quietly
from optimized.graphs.cuda_graph_step import CudaGraphStep
from suite.polychromic.llama import Llama, rotation

# The length of the cache is a multiple of so many tokens: few lengths need a graph of their own.
ROUNDED_TO = 128
# From so many parameters on, the step is compiled: of a smaller model the compilation takes longer than what it saves.
LEAST_COMPILED = 1 << 24


def kv_cache(model: Llama) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Build `step(prompts, lengths, replies)`, which returns logits [rows, tokens, vocabulary] for each reply.

    The logits at t are those of the token after the row's prompt and the first t tokens of its reply.

    The model reads a prompt once, all rows together, and keeps its keys and values. On a GPU the step for one more
    token is compiled and replayed as a CUDA graph; a small model's launches take more time than its arithmetic.

    model    of Llama's architecture
    prompts  int64 [rows, longest prompt]; what lies behind a row's length is ignored
    lengths  int64 [rows], from 1 to the longest prompt
    replies  int64 [rows, tokens]

    Source: polychromic, technique 003.4b.
    """
    caches: dict[tuple[int, int], Cache] = {}

    @torch.no_grad()
    def step(prompts: torch.Tensor, lengths: torch.Tensor, replies: torch.Tensor) -> torch.Tensor:
        rows, longest = prompts.shape
        size = -(-(longest + replies.shape[1]) // ROUNDED_TO) * ROUNDED_TO
        if (rows, size) not in caches:
            caches.clear()  # memory for one form at a time
            caches[rows, size] = Cache(model, rows, size)
        cache = caches[rows, size]
        found = [cache.read(prompts, lengths)]
        for t in range(replies.shape[1] - 1):
            found.append(cache.next(replies[:, t], lengths + t))
        return torch.stack(found, 1) if replies.shape[1] else found[0][:, None][:, :0]

    return step


class Cache:
    """Keys and values [rows, key heads, size, head width] of each layer, at the positions of their tokens."""

    def __init__(self, model: Llama, rows: int, size: int) -> None:
        self.model, shape = model, model.shape
        weight = model.lm_head.weight
        held = torch.zeros(
            shape.layers, 2, rows, shape.kv_heads, size, shape.head_width, dtype=weight.dtype, device=weight.device
        )
        self.layers = [(keys, values) for keys, values in held]
        self.rows = torch.arange(rows, device=weight.device)
        self.places = torch.arange(size, device=weight.device)
        large = weight.is_cuda and sum(p.numel() for p in model.parameters()) >= LEAST_COMPILED
        self.next = CudaGraphStep(compile_quietly(self._next) if large else self._next, device=weight.device)

    def read(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Keep the keys and values of prompts [rows, T]; return the logits after each, [rows, vocabulary]."""
        body = self.model.model
        x = body.embed_tokens(prompts)
        cos, sin = rotation(self.model.shape, self.places[: prompts.shape[1]], x.dtype)
        for block, (keys, values) in zip(body.layers, self.layers, strict=True):
            q, k, v = block.self_attn.heads(block.input_layernorm(x), cos, sin)
            keys[:, :, : prompts.shape[1]] = k
            values[:, :, : prompts.shape[1]] = v
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + block.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self._logits(x[self.rows, lengths - 1])

    def _next(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add a token to each row at its position, both [rows]; return the logits of the next, [rows, vocabulary]."""
        body, shape = self.model.model, self.model.shape
        x = body.embed_tokens(tokens)
        cos, sin = (part[:, None, None] for part in rotation(shape, positions, x.dtype))
        unseen = (self.places > positions[:, None])[:, None, None]
        for block, (keys, values) in zip(body.layers, self.layers, strict=True):
            q, k, v = block.self_attn.heads(block.input_layernorm(x)[:, None], cos, sin)
            keys[self.rows, :, positions] = k[:, :, 0]
            values[self.rows, :, positions] = v[:, :, 0]
            # [rows, key heads, query heads of each, head width]: all query heads of a key head are one product.
            q = q.reshape(len(x), shape.kv_heads, -1, shape.head_width)
            scores = (q @ keys.mT * shape.head_width**-0.5).masked_fill(unseen, -torch.inf)
            weights = torch.softmax(scores.float() if scores.dtype.itemsize == 2 else scores, -1).to(q.dtype)
            x = x + block.self_attn.o_proj((weights @ values).flatten(1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self._logits(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.model.model.norm(x), self.model.lm_head.weight)
