"""The network of eigenstate_lm."""

from __future__ import annotations

import pytest
import torch

from optimized.recurrence.eigenstate_scan import eigenstate_scan as fast_scan
from optimized.recurrence.fused_output_projection import fused_output_projection as fast_projection
from reference.recurrence.eigenstate_scan import eigenstate_scan
from reference.recurrence.fused_output_projection import fused_output_projection
from suite.eigenstate_lm.model import (
    Sizes,
    block_weights,
    driven,
    eigenvalues,
    fed,
    first_states,
    forward,
    make_weights,
    mixed,
    parameters,
    rotation,
    shapes,
)

TINY = Sizes(vocabulary=11, width=8, layers=2, eigenstates=4, cells=2)


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(TINY.vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def test_default_network_has_123_million_parameters() -> None:
    assert parameters(Sizes()) == 123_104_256


def test_initial_weights_have_the_given_shapes_and_depend_on_the_seed() -> None:
    weights = make_weights(0, TINY)
    assert {name: tuple(w.shape) for name, w in weights.items()} == shapes(TINY)
    again, other = make_weights(0, TINY), make_weights(1, TINY)
    assert all(torch.equal(w, again[name]) for name, w in weights.items())
    assert not torch.equal(weights["embedding"], other["embedding"])


def test_eigenvalues_start_below_0_545_and_stay_between_0_1_and_0_99() -> None:
    assert float(eigenvalues(make_weights(0, TINY)["0.decay"]).norm(dim=-1).max()) <= 0.1 + 0.89 * 0.5
    assert float(eigenvalues(torch.full((1, 4), 100.0)).norm(dim=-1).max()) == pytest.approx(0.99)
    assert float(eigenvalues(torch.full((1, 4), -100.0)).norm(dim=-1).min()) == pytest.approx(0.1)


def test_eigenvalue_angles_are_equally_spaced() -> None:
    turned = torch.view_as_complex(eigenvalues(torch.zeros(1, 4)))[0]
    torch.testing.assert_close(turned / turned.abs(), torch.tensor([1, 1j, -1, -1j]))


def test_rotation_differs_from_the_identity_by_a_norm_of_0_01() -> None:
    found = rotation(torch.randn(3, 5, 5)) - torch.eye(5)
    torch.testing.assert_close(found.flatten(1).norm(dim=1), torch.full((3,), 0.01), rtol=1e-4, atol=0.0)


def test_forward_in_parts_matches_the_whole_text() -> None:
    """Generation reads one token at a time; the result must be the same."""
    weights, text = make_weights(0, TINY), tokens()
    whole, last = forward(weights, text, first_states(TINY, 2), eigenstate_scan, fused_output_projection)
    states, parts = first_states(TINY, 2), []
    for part in (text[:, :7], *text[:, 7:].split(1, dim=1)):
        found, states = forward(weights, part, states, eigenstate_scan, fused_output_projection)
        parts.append(found)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(states, last)


def test_outputs_do_not_depend_on_later_tokens() -> None:
    weights, text = make_weights(0, TINY), tokens()
    other = text.clone()
    other[:, 10] = (text[:, 10] + 1) % TINY.vocabulary
    found = [
        forward(weights, t, first_states(TINY, 2), eigenstate_scan, fused_output_projection)[0] for t in (text, other)
    ]
    assert torch.equal(found[0][:, :10], found[1][:, :10])
    assert (found[0][:, 10:] != found[1][:, 10:]).any(-1).all()


def test_optimized_functions_give_the_same_network_output() -> None:
    weights, text = make_weights(0, TINY), tokens(length=150)
    known = forward(weights, text, first_states(TINY, 2), eigenstate_scan, fused_output_projection)
    for own, other in zip(
        forward(weights, text, first_states(TINY, 2), fast_scan, fast_projection), known, strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_dropout_is_applied_per_cell_to_their_mean_and_to_the_linear_layers() -> None:
    calls = []

    def drop(x: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return 0 * x

    weights, x = make_weights(0, TINY), torch.randn(1, 3, TINY.width)
    for layer in range(TINY.layers):
        own = block_weights(weights, layer)
        x = fed(own, mixed(own, x, driven(own, x), fused_output_projection, drop), drop)
    assert calls == [(1, 3, TINY.width)] * TINY.layers * (TINY.cells + 2)
