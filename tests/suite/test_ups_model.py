"""The model, the losses and the configuration of ups."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from suite.ups.config import UpsConfig
from suite.ups.losses import boundary_error, boundary_tokens, spectral_error, ups_loss
from suite.ups.model import (
    Decoder,
    Encoder,
    Operator,
    drop_path_rates,
    drop_path_scales,
    fourier_features,
    make_decoder,
    make_encoder,
    make_operator,
    parameters,
)


def small(depth: int = 2) -> tuple[Operator, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Operator(6, 8, depth, 2), torch.randn(3, 5, 6), torch.rand(3)


def test_operator_has_21_4_million_parameters() -> None:
    with torch.device("meta"):
        assert parameters(make_operator(UpsConfig())) == 21_445_120


def test_encoder_has_9_input_features_and_decoder_three_layers() -> None:
    encoder, decoder = make_encoder(UpsConfig(), (128,)), make_decoder(UpsConfig(), dims=1)
    assert encoder.embed.weight.shape == (128, 9)
    assert len(decoder.layers) == 3
    latents = encoder(torch.randn(2, 1024, 1), torch.linspace(0, 1, 1025)[:-1, None])
    assert latents.shape == (2, 128, 128)
    assert decoder(latents, torch.rand(7, 1)).shape == (2, 7, 1)


def test_encoder_pools_a_2d_field_to_tokens_of_both_dimensions() -> None:
    encoder = make_encoder(UpsConfig(), (16, 8), channels=2)
    assert encoder(torch.randn(1, 32, 16, 2), torch.rand(32, 16, 2)).shape == (1, 128, 128)
    with pytest.raises(ValueError, match=r"tokens \(16, 16\) are 256 in all; the configuration has 128"):
        make_encoder(UpsConfig(), (16, 16))


def test_fourier_features_match_values_computed_by_hand() -> None:
    found = fourier_features(torch.tensor([[0.125]], dtype=torch.float64))
    half = math.sqrt(0.5)
    torch.testing.assert_close(found, torch.tensor([[half, 1, 0, 0, half, 0, -1, 1]], dtype=torch.float64))
    assert fourier_features(torch.zeros(4, 5, 2)).shape == (4, 5, 16)


def test_a_token_is_the_mean_of_its_points() -> None:
    encoder = Encoder((2, 1), channels=1, latent_width=1)
    with torch.no_grad():
        encoder.embed.weight.zero_()[0, 0] = 1
        encoder.embed.bias.zero_()
    field = torch.tensor([[1.0, 3.0], [5.0, 7.0], [0.0, 0.0], [2.0, 6.0]])[None, :, :, None]
    assert encoder(field, torch.rand(4, 2, 2)).tolist() == [[[4.0], [2.0]]]


@pytest.mark.parametrize("grid", [(3, 2), (4,)])
def test_a_grid_that_does_not_divide_into_tokens_raises_error(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not divide into tokens of \(2, 1\)"):
        Encoder((2, 1))(torch.zeros(1, *grid, 1), torch.zeros(*grid, len(grid)))


def test_a_point_is_decoded_independently_of_the_others() -> None:
    torch.manual_seed(0)
    decoder, latents, points = Decoder(2, 3, 6, 8, 3, 2), torch.randn(2, 5, 6), torch.rand(7, 2)
    whole = decoder(latents, points)
    assert whole.shape == (2, 7, 3)
    torch.testing.assert_close(decoder(latents, points[2:4]), whole[:, 2:4])


def test_operator_adds_its_step_to_the_latents() -> None:
    operator, latents, dt = small()
    with torch.no_grad():
        operator.give.weight.zero_()
        operator.give.bias.fill_(0.25)
    torch.testing.assert_close(operator(latents, dt), latents + 0.25)


def test_time_step_affects_only_its_own_sample() -> None:
    operator, latents, dt = small()
    other = operator(latents, dt + torch.tensor([0.0, 0.1, 0.0]))
    moved = (other - operator(latents, dt)).abs().amax((1, 2))
    assert moved[1] > 1e-4
    assert moved[[0, 2]].max() < 1e-6


def test_operator_is_equivariant_to_permutations_of_tokens() -> None:
    operator, latents, dt = small()
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(operator(latents[:, order], dt), operator(latents, dt)[:, order])


def test_queries_and_keys_have_a_mean_square_of_one() -> None:
    operator, latents, dt = small(depth=1)
    seen = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend([q, k, v])
        return functional.scaled_dot_product_attention(q, k, v)

    operator(latents, dt, attention=attention)
    assert [t.shape for t in seen] == [(3, 2, 5, 4)] * 3
    for normalized in seen[:2]:
        torch.testing.assert_close(normalized.square().mean(-1), torch.ones(3, 2, 5), atol=1e-3, rtol=0)


def test_a_dropped_sublayer_adds_nothing_to_its_sample() -> None:
    operator, latents, dt = small()
    whole, none = operator(latents, dt), operator(latents, dt, torch.zeros(2, 2, 3))
    torch.testing.assert_close(none, latents + operator.give(operator.norm(operator.take(latents))))
    torch.testing.assert_close(operator(latents, dt, torch.ones(2, 2, 3)), whole)
    scales = torch.ones(2, 2, 3)
    scales[:, :, 1] = 0
    mixed = operator(latents, dt, scales)
    torch.testing.assert_close(mixed[1], none[1])
    torch.testing.assert_close(mixed[[0, 2]], whole[[0, 2]])
    scales = torch.ones(2, 2, 3)
    scales[1, 0] = 0
    x, time = operator.take(latents), operator.embed_time(dt)
    x = operator.blocks[0].feed(operator.blocks[0].attend(x, time), time)
    x = operator.blocks[1].feed(x, time)
    torch.testing.assert_close(operator(latents, dt, scales), latents + operator.give(operator.norm(x)))


def test_every_parameter_of_the_operator_has_a_gradient() -> None:
    operator, latents, dt = small()
    operator(latents, dt).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in operator.parameters())


def test_operator_runs_in_float64() -> None:
    operator, latents, dt = small()
    stepped = operator(latents, dt, torch.ones(2, 2, 3))
    exact = operator.double()(latents.double(), dt.double(), torch.ones(2, 2, 3))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(stepped.double(), exact, atol=1e-5, rtol=0)


def test_drop_path_rates_rise_linearly_and_scales_have_mean_one() -> None:
    assert drop_path_rates(12, 0.11) == pytest.approx([0.01 * block for block in range(12)])
    assert drop_path_rates(1, 0.1) == [0.0]
    drawn = [drop_path_scales([0.0, 0.25], 20000, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (2, 2, 20000)
    assert drawn[0][0].eq(1).all()
    assert drawn[0][1].unique().tolist() == pytest.approx([0, 4 / 3])
    assert drawn[0][1].mean().item() == pytest.approx(1, abs=0.02)


def test_spectral_error_ignores_a_shift_along_the_tokens() -> None:
    target = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert spectral_error(target.roll(3, 1), target).item() < 1e-20
    # A constant of 1 over 8 tokens has an amplitude of 8 / sqrt(8) at frequency 0, one of five.
    assert spectral_error(torch.ones(1, 8, 1), torch.zeros(1, 8, 1)).item() == pytest.approx(8 / 5)


def test_loss_has_no_minimum_at_the_wrong_sign() -> None:
    """A signal and its negative have the same amplitudes, so other terms must outweigh the spectral error."""
    config, target = UpsConfig(), torch.ones(1, 128, 1, dtype=torch.float64)
    none = torch.zeros((), dtype=torch.float64)
    losses = [
        ups_loss(config, scale * target, target, boundary_tokens((128,)), (none, none)).item()
        for scale in torch.linspace(-2, 1, 31, dtype=torch.float64)
    ]
    assert losses == sorted(losses, reverse=True)


def test_boundary_tokens_are_at_an_end_of_a_dimension() -> None:
    assert boundary_tokens((4,)).tolist() == [True, False, False, True]
    assert boundary_tokens((3, 4)).view(3, 4).tolist() == [[True] * 4, [True, False, False, True], [True] * 4]
    predicted = torch.tensor([1.0, 5.0, 5.0, 3.0])[None, :, None]
    assert boundary_error(predicted, torch.zeros(1, 4, 1), boundary_tokens((4,))).item() == (1 + 9) / 2


def test_ups_loss_is_the_weighted_sum_of_its_terms() -> None:
    config = UpsConfig(lambda_enc=0.5, lambda_dec=0.25, spectral=2.0, boundary=4.0)
    predicted, target = torch.ones(1, 8, 1), torch.zeros(1, 8, 1)
    total = ups_loss(config, predicted, target, boundary_tokens((8,)), (torch.tensor(3.0), torch.tensor(8.0)))
    assert total.item() == pytest.approx(1 + 0.5 * 3 + 0.25 * 8 + 2 * 8 / 5 + 4 * 1)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("depth", 0, "use 1 or more"),
        ("num_queries", 0, "use 1 or more"),
        ("inverse_loss_frequency", 0, "use 1 or more"),
        ("width", 380, "use a multiple of heads=8"),
        ("decoder_width", 12, "use a multiple of heads=8"),
        ("drop_path", 1.0, "use 0 or more and less than 1"),
        ("lambda_dec", -0.1, "use 0 or more"),
        ("spectral", math.inf, "use 0 or more"),
        ("learning_rate", 0.0, "use a number above 0"),
        ("coder_rate", 0.0, "use a number above 0"),
        ("ema_decay", 1.0, "use 0 or more and less than 1"),
        ("seed", -1, "use 0 to"),
    ],
)
def test_an_invalid_field_is_reported_with_its_remedy(field: str, value: float, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}={value}: {remedy}"):
        UpsConfig(**{field: value})  # type: ignore[arg-type]
