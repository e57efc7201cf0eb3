"""Advantages of sets and of replies, by hand; `tests/losses/test_set_policy_loss.py` has what they are unbiased for."""

from __future__ import annotations

import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic.advantages import of_sets, without_own_reply


def test_a_set_is_compared_with_the_other_sets_of_its_prompt() -> None:
    diversity = torch.tensor([[0.5, 0.2, 0.3], [1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.5 - 0.25, 0.2 - 0.4, 0.3 - 0.35], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(of_sets(diversity), expected)


def test_a_given_baseline_is_each_prompt_s() -> None:
    diversity = torch.tensor([[0.5], [0.25]])
    assert of_sets(diversity, torch.tensor([0.25, 0.5])).tolist() == [[0.25], [-0.25]]
    assert of_sets(diversity, torch.tensor(0.25)).tolist() == [[0.25], [0.0]]


def test_one_set_needs_a_baseline() -> None:
    with pytest.raises(PerfsuiteError, match="one set a prompt"):
        of_sets(torch.ones(4, 1))


def test_a_reply_is_compared_with_the_set_without_it() -> None:
    """The distances between three replies are 1, 2 and 6: their mean is 3, and without a reply one distance is left."""
    distances = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 6.0], [2.0, 6.0, 0.0]])
    assert without_own_reply(distances[None]).tolist() == [[3.0 - 6.0, 3.0 - 2.0, 3.0 - 1.0]]


def test_a_reply_s_distance_from_itself_does_not_count() -> None:
    distances = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))
    distances = distances + distances.mT
    torch.testing.assert_close(without_own_reply(distances + 5 * torch.eye(4)), without_own_reply(distances))


def test_of_two_replies_none_can_be_left_out() -> None:
    with pytest.raises(PerfsuiteError, match="a set of 2"):
        without_own_reply(torch.zeros(1, 2, 2))
