"""Next-token logits, each computed from the whole sequence before it (polychromic, technique 003.4b)."""

from collections.abc import Callable

import torch


def kv_cache(model: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Build `step(prompts, lengths, replies)`, which returns logits [rows, tokens, vocabulary] for each reply.

    The logits at index t predict the token after the row's prompt and the first t tokens of its reply.

    model    a causal language model: tokens [rows, length] → logits [rows, length, vocabulary]
    prompts  int64 [rows, longest prompt]; tokens past a row's length are ignored
    lengths  int64 [rows], from 1 to the longest prompt
    replies  int64 [rows, tokens]

    Source: polychromic, technique 003.4b.
    """

    @torch.no_grad()
    def step(prompts: torch.Tensor, lengths: torch.Tensor, replies: torch.Tensor) -> torch.Tensor:
        rows, longest = prompts.shape
        both = torch.cat((prompts, replies), 1)
        found = []
        for t in range(replies.shape[1]):
            at = torch.arange(longest + t, device=prompts.device).expand(rows, -1)
            # Replies follow their prompts without a gap. The model is causal, so tokens after the reply have no effect.
            behind = at >= lengths[:, None]
            at = torch.where(behind, at - lengths[:, None] + longest, at).clamp(max=both.shape[1] - 1)
            logits = model(both.gather(1, at))
            found.append(logits[torch.arange(rows, device=prompts.device), lengths + t - 1])
        return torch.stack(found, 1)

    return step
