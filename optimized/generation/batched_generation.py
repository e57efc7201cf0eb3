"""Generation of all replies to all prompts in one batch, with a KV cache (polychromic, technique 003.4)."""

from collections.abc import Callable

import torch

from optimized.cached_decoding import Caches
from optimized.generation.parallel_sampling import parallel_sampling, parallel_sampling_triton
from suite.polychromic.llama import Llama

# Tokens between two checks whether all replies have ended. Each check makes the host wait for the device.
ASKED_EVERY = 16
_caches, _triton_caches = Caches(), Caches(kernels=True)


@torch.no_grad()
def batched_generation(
    model: Llama,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float = 0.9,
    top_p: float = 0.9,
    end: int = 0,
    sample: Callable[..., torch.Tensor] = parallel_sampling,
) -> torch.Tensor:
    """Draw replies to each prompt, int64 [prompts, replies, tokens]; all tokens after the first `end` are `end`.

    The model processes each prompt once, whatever the number of its replies. A reply that has ended stays in the batch:
    all rows share one read of the weights, so fewer rows would save little. The host waits for the device only at every
    16th token.

    model        a model of Llama's architecture
    prompts      int64 [prompts, longest]; tokens past a prompt's length are ignored
    lengths      int64 [prompts], from 1 to longest
    uniforms     [prompts, replies, tokens], in [0, 1): the random numbers with which `parallel_sampling` draws tokens
    temperature  above 0
    top_p        above 0, at most 1
    end          the token that ends a reply
    sample       one of the implementations of `parallel_sampling`

    Source: polychromic, technique 003.4.
    """
    return _with(_caches, model, prompts, lengths, uniforms, temperature, top_p, end, sample)


@torch.no_grad()
def batched_generation_triton(
    model: Llama,
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float = 0.9,
    top_p: float = 0.9,
    end: int = 0,
) -> torch.Tensor:
    """`batched_generation` with the Triton kernels."""
    sample = parallel_sampling_triton
    return _with(_triton_caches, model, prompts, lengths, uniforms, temperature, top_p, end, sample)


def _with(caches, model, prompts, lengths, uniforms, temperature, top_p, end, sample):
    count, replies, tokens = uniforms.shape
    drawn = torch.full((count * replies, tokens), end, dtype=torch.int64, device=prompts.device)
    if not drawn.numel():
        return drawn.view(uniforms.shape)
    cache = caches.of(model, count * replies, prompts.shape[1] + tokens)
    logits = cache.read(prompts, lengths, times=replies)
    positions = lengths.repeat_interleave(replies)
    uniforms = uniforms.reshape(count * replies, tokens).T.contiguous()
    ended = torch.zeros(len(drawn), dtype=torch.bool, device=prompts.device)
    options = (temperature, top_p, end, sample)
    token = _draw(logits, uniforms[0], ended, *options)
    drawn[:, 0] = token
    for t in range(1, tokens):
        if t % ASKED_EVERY == 0 and bool(ended.all()):
            break
        token = cache.next(token, positions + (t - 1), _draw, uniforms[t], ended, *options)
        drawn[:, t] = token
    return drawn.view(count, replies, tokens)


def _draw(logits, uniforms, ended, temperature, top_p, end, sample):
    """Return the next token of each row, and mark in `ended`, in place, the rows that end with it."""
    token = sample(logits, uniforms, temperature, top_p).masked_fill(ended, end)
    ended |= token == end
    return token
