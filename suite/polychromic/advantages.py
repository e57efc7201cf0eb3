"""Advantages of sampled replies: the diversity of a set of replies minus a baseline.

Each baseline is independent of the reply to which it is applied, so the gradient of `losses/set_policy_loss` is
unbiased. `optimized.losses.set_policy_loss` contains the derivation.
"""

from __future__ import annotations

import torch

from perfsuite.errors import PerfsuiteError


def of_sets(diversity: torch.Tensor, baseline: torch.Tensor | None = None) -> torch.Tensor:
    """Return the advantage of each set, [prompts, sets].

    By default the baseline is the mean diversity of the prompt's other sets. With one set per prompt the caller must
    pass one, e.g. a running mean over earlier steps. A passed baseline replaces the default.

    diversity  [prompts, sets], diversity D of each set
    baseline   [prompts] or 0-d; it must not depend on the replies of this step

    PerfsuiteError if there is one set per prompt and no baseline.
    """
    if baseline is not None:
        return diversity - baseline[..., None]
    sets = diversity.shape[1]
    if sets < 2:
        raise PerfsuiteError(
            "one set a prompt has no other sets to be compared with; sample several, give a baseline, "
            "or use without_own_reply"
        )
    return (diversity - diversity.mean(1, keepdim=True)) * (sets / (sets - 1))


def without_own_reply(distances: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each reply, [..., n]: D(set) - D(set without reply i).

    distances  [..., n, n], symmetric: 1 - cos of each pair of replies in a set; n is 3 or more

    PerfsuiteError if n is less than 3.
    """
    n = distances.shape[-1]
    if n < 3:
        raise PerfsuiteError(f"a set of {n} has no pair of replies once one is left out; sample 3 or more a set")
    pairs = distances.triu(1)
    whole = pairs.sum((-2, -1))[..., None]
    rest = whole - pairs.sum(-1) - pairs.sum(-2)
    return whole / (n * (n - 1) / 2) - rest / ((n - 1) * (n - 2) / 2)
