"""Next-token logits from a KV cache, with a step that is replayed as a CUDA graph (polychromic, technique 003.4b)."""

from collections.abc import Callable

import torch

from optimized.cached_decoding import Caches
from suite.polychromic.llama import Llama


def kv_cache(model: Llama) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Build `step(prompts, lengths, replies)`, which returns logits [rows, tokens, vocabulary] for each reply.

    The logits at index t predict the token after the row's prompt and the first t tokens of its reply.

    The model processes the prompts of all rows once and keeps their keys and values. On a GPU, in float32 and bfloat16
    and for at most 64 rows, the step for one more token runs eight Triton kernels per layer, nine with adapters.
    Otherwise it runs PyTorch operations. On a GPU the step is replayed as a CUDA graph, because its launches take
    longer than its arithmetic.

    model    a model of Llama's architecture
    prompts  int64 [rows, longest prompt]; tokens past a row's length are ignored
    lengths  int64 [rows], from 1 to the longest prompt
    replies  int64 [rows, tokens]

    Source: polychromic, technique 003.4b.
    """
    return _with(model, None)


def kv_cache_triton(model: Llama) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """`kv_cache` with the Triton kernels."""
    return _with(model, True)


def _with(model, kernels):
    caches = Caches(kernels)

    @torch.no_grad()
    def step(prompts: torch.Tensor, lengths: torch.Tensor, replies: torch.Tensor) -> torch.Tensor:
        cache = caches.of(model, len(prompts), prompts.shape[1] + replies.shape[1])
        found = [cache.read(prompts, lengths)]
        for t in range(replies.shape[1] - 1):
            found.append(cache.next(replies[:, t], lengths + t))
        return torch.stack(found, 1) if replies.shape[1] else found[0][:, None][:, :0]

    return step
