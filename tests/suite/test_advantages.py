"""Advantages of sets and replies on small examples; `tests/losses/test_set_policy_loss.py` tests unbiasedness."""

from __future__ import annotations

import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic.advantages import of_sets, without_own_reply


def test_baseline_of_a_set_is_the_mean_of_the_prompt_s_other_sets() -> None:
    diversity = torch.tensor([[0.5, 0.2, 0.3], [1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.5 - 0.25, 0.2 - 0.4, 0.3 - 0.35], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(of_sets(diversity), expected)


def test_a_given_baseline_applies_per_prompt_or_to_all_prompts() -> None:
    diversity = torch.tensor([[0.5], [0.25]])
    assert of_sets(diversity, torch.tensor([0.25, 0.5])).tolist() == [[0.25], [-0.25]]
    assert of_sets(diversity, torch.tensor(0.25)).tolist() == [[0.25], [0.0]]


def test_one_set_per_prompt_without_a_baseline_raises_error() -> None:
    with pytest.raises(PerfsuiteError, match="one set a prompt"):
        of_sets(torch.ones(4, 1))


def test_advantage_of_a_reply_is_set_diversity_minus_diversity_without_it() -> None:
    """The three distances, 1, 2 and 6, have mean 3. Without one reply a single distance remains."""
    distances = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 6.0], [2.0, 6.0, 0.0]])
    assert without_own_reply(distances[None]).tolist() == [[3.0 - 6.0, 3.0 - 2.0, 3.0 - 1.0]]


def test_diagonal_of_the_distances_is_ignored() -> None:
    distances = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))
    distances = distances + distances.mT
    torch.testing.assert_close(without_own_reply(distances + 5 * torch.eye(4)), without_own_reply(distances))


def test_without_own_reply_rejects_sets_of_two_replies() -> None:
    with pytest.raises(PerfsuiteError, match="a set of 2"):
        without_own_reply(torch.zeros(1, 2, 2))
