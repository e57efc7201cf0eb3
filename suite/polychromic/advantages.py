"""Advantages of sampled replies: how much more diverse their set is than a baseline.

Every baseline here is independent of the reply whose advantage it is part of, so that the gradient of
`losses/set_policy_loss` is unbiased; the derivation is in `optimized.losses.set_policy_loss`.
"""

from __future__ import annotations

import torch

from perfsuite.errors import PerfsuiteError


def of_sets(diversity: torch.Tensor, baseline: torch.Tensor | None = None) -> torch.Tensor:
    """Return the advantage of each set, [prompts, sets].

    The baseline is the mean of the prompt's other sets. With one set per prompt it must be given, e.g. a running mean
    over earlier steps. A given baseline is used with several sets, too.

    diversity  [prompts, sets], D of each set
    baseline   [prompts] or 0-d; it must not depend on the replies of this step

    PerfsuiteError for one set per prompt without a baseline.
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
    """Return the advantage of each reply over its own set without it, [..., n]: D(set) - D(set without reply i).

    distances  [..., n, n], 1 - cos of each pair of replies of a set, symmetric; n is 3 or more

    PerfsuiteError for fewer replies.
    """
    n = distances.shape[-1]
    if n < 3:
        raise PerfsuiteError(f"a set of {n} has no pair of replies once one is left out; sample 3 or more a set")
    pairs = distances.triu(1)
    whole = pairs.sum((-2, -1))[..., None]
    rest = whole - pairs.sum(-1) - pairs.sum(-2)
    return whole / (n * (n - 1) / 2) - rest / ((n - 1) * (n - 2) / 2)
