"""The set policy gradient's loss in plain operations (polychromic, its objective made differentiable)."""

import torch
from torch.nn import functional


def set_policy_loss(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return minus the mean over sets of the sum over a set's replies of advantage times log p(reply), 0-d.

    The loss is in float32, and in float64 for float64. Its gradient is an estimate of the gradient of minus the
    expected diversity; `optimized.losses.set_policy_loss` has the derivation.

    logits      [sets · n, length, vocabulary]; the logits at position t predict `tokens[:, t]`
    tokens      [sets · n, length] int64, below the vocabulary size, also where the mask is False
    mask        [sets · n, length] bool, True where the token was sampled, including the end-of-text token
    advantages  [sets, n], one for each reply; constants without a gradient. Reply i of set s is row s · n + i

    ValueError if the shape of `advantages` is not [sets, n] with sets · n rows.

    Source: polychromic, seed 003, objective L = CE - lambda * D.
    """
    if advantages.dim() != 2 or advantages.numel() != len(logits):
        raise ValueError(f"advantages of shape {list(advantages.shape)} for {len(logits)} replies: give [sets, n]")
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = functional.log_softmax(logits, -1, dtype=wide).gather(-1, tokens[..., None]).squeeze(-1)
    of_replies = torch.where(mask, log_p, 0.0).sum(-1).reshape(advantages.shape)
    return -(advantages.detach().to(wide) * of_replies).sum(-1).mean()
