import pytest
import torch
from scale import draws

from optimized.losses.query_sampling import query_sampling as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, module, side, size, tensor
from reference.losses.query_sampling import query_sampling as reference
from suite.ups.losses import query_indices
from suite.ups.trial import BATCH, HEADS, LATENTS, LAYERS, LINE, PLANE, plane_decoder

BOUNDED = floats(-2, 2)


def macs(T, L, heads, head_width, layers, points):
    """Count the multiply-adds of a decoded example: at its points, and for keys and values of the latent tokens."""
    width = heads * head_width
    at_points = 16 * width + layers * (2 * width**2 + 2 * T * width) + width**2 + width
    return points * at_points + layers * T * L * 2 * width


def arithmetic(B, T, L, heads, head_width, layers, Q, direction):
    forward = 2 * B * macs(T, L, heads, head_width, layers, Q)
    return {"forward": 1, "backward": 2, "both": 3}[direction] * forward


query_sampling = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "decode": module(plane_decoder),
        "latents": tensor("B", "T", "L", values=BOUNDED),
        "field": tensor("B", "rows", "columns", 1, values=BOUNDED),
        "points": tensor("rows", "columns", 2, values=floats(0, 1), differentiable=False),
        "queries": tensor("Q", dtype="int64", values=integers(0, "rows * columns")),
    },
    max_examples=draws(cpu=7, otherwise=12),
    sizes={
        "B": size(1, 3),
        "T": size(2, 5),  # attention to one token has gradients of 0, or rounding errors
        "L": size(1, 5),
        "rows": size(1, 5),
        "columns": size(1, 5),
        "Q": size(1, 12),
        "heads": size(1, 2),
        "head_width": size(4, 5),
        "layers": size(1, 2),
    },
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    workloads=[
        # The reference decodes 16 times as many points.
        Workload(
            "darcy2d",
            **LATENTS,
            **HEADS,
            layers=LAYERS,
            B=BATCH // 2,
            rows=PLANE,
            columns=PLANE,
            Q=1024,
            direction="both",
            device="cuda",
            speedup=4.0,
        ),
        # This grid has only 1024 points, so 2048 queries would decode no more.
        Workload(
            "advection1d",
            **LATENTS,
            **HEADS,
            layers=LAYERS,
            B=BATCH,
            rows=LINE,
            columns=1,
            Q=1024,
            direction="both",
            device="cuda",
        ),
        Workload(
            "cpu",
            B=2,
            T=8,
            L=8,
            rows=16,
            columns=16,
            Q=32,
            heads=2,
            head_width=8,
            layers=3,
            clock="wall",
            direction="both",
            device="cpu",
        ),
    ],
    cost=Cost(flops=arithmetic),
)


def field_as_tokens(latents, points):
    """Decode to the latents' first value times the coordinate of each point."""
    return latents[:, :1, :1] * points


@pytest.mark.parametrize("call", [reference, optimized])
def test_error_at_two_points_matches_hand_computation(call):
    latents = torch.tensor([[[1.0]], [[2.0]]])
    points = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    field = torch.tensor([[0.0, 1.0, 7.0, 3.0], [1.0, 1.0, 1.0, 1.0]])[..., None]
    # At points 1 and 2: errors of 0 and 2 - 7 in the first example, 2 - 1 and 4 - 1 in the second.
    error = call(field_as_tokens, latents, field, points, torch.tensor([1, 2]))
    assert error.item() == (0 + 25 + 1 + 9) / 4


@pytest.mark.parametrize("call", [reference, optimized])
def test_more_queries_than_grid_points_change_nothing(call):
    torch.manual_seed(0)
    decode = plane_decoder(3, 2, 2, 3)
    latents, field, points = torch.randn(2, 4, 3), torch.randn(2, 6, 4, 1), torch.rand(6, 4, 2)
    chosen = {n: query_indices(24, n, torch.Generator().manual_seed(n)) for n in (24, 48)}
    assert torch.equal(chosen[24], chosen[48])
    errors = [call(decode, latents, field, points, chosen[n]) for n in (24, 48)]
    whole = decode(latents, points.flatten(0, 1)).reshape(field.shape)
    assert torch.equal(*errors)
    torch.testing.assert_close(errors[0], (whole - field).square().mean())


def test_query_indices_are_distinct_and_determined_by_the_generator():
    drawn = [query_indices(100, 40, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(drawn[0].unique()) == 40
    assert set(drawn[0].tolist()) <= set(range(100))


def test_only_the_query_points_are_decoded():
    seen = []

    def decode(latents, points):
        seen.append(points.tolist())
        return field_as_tokens(latents, points)

    points = torch.arange(5.0)[:, None]
    optimized(decode, torch.ones(1, 1, 1), torch.ones(1, 5, 1), points, torch.tensor([4, 0]))
    assert seen == [[[4.0], [0.0]]]
