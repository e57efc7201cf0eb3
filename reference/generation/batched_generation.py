"""Generation of one reply after another, each token from the whole sequence before it (polychromic, 003.4)."""

from collections.abc import Callable

import torch

from reference.generation.parallel_sampling import parallel_sampling


def batched_generation(
    model: Callable[[torch.Tensor], torch.Tensor],
    prompts: torch.Tensor,
    lengths: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float = 0.9,
    top_p: float = 0.9,
    end: int = 0,
) -> torch.Tensor:
    """Draw replies to each prompt, int64 [prompts, replies, tokens]; all tokens after the first `end` are `end`.

    model        a causal language model: tokens [rows, length] → logits [rows, length, vocabulary]
    prompts      int64 [prompts, longest]; tokens past a prompt's length are ignored
    lengths      int64 [prompts], from 1 to longest
    uniforms     [prompts, replies, tokens], in [0, 1): the random numbers with which `parallel_sampling` draws tokens
    temperature  above 0
    top_p        above 0, at most 1
    end          the token that ends a reply

    Source: polychromic, technique 003.4.
    """
    tokens = torch.full(uniforms.shape, end, dtype=torch.int64, device=prompts.device)
    for prompt, length, own, numbers in zip(prompts, lengths.tolist(), tokens, uniforms, strict=True):
        for reply, uniform in zip(own, numbers, strict=True):
            sequence = prompt[:length]
            for t in range(len(reply)):
                logits = model(sequence[None])[:, -1]
                token = parallel_sampling(logits, uniform[t : t + 1], temperature, top_p)
                reply[t] = token[0]
                if token.item() == end:
                    break
                sequence = torch.cat((sequence, token))
    return tokens
