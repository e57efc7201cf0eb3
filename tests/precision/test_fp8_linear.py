import math

import pytest
import torch
from torch.nn import functional

from optimized.precision.fp8_linear import _rounded
from optimized.precision.fp8_linear import fp8_linear as optimized
from perfsuite import Cost, Pair, Workload, compiled, side, size, tensor
from reference.precision.fp8_linear import fp8_linear as reference
from reference.precision.fp8_linear import rounded
from suite.backends import fp8_reason

TOKENS = {"M": 131072, "dtype": "bfloat16", "device": "cuda", "host_syncs": 0}
"""Four sequences of 32,768 tokens, as in a step of eigenstate_lm."""


def available():
    return fp8_reason("cuda") if torch.cuda.is_available() else None


def flops(M, k, n, direction):
    return {"forward": 2, "backward": 4, "both": 6}[direction] * M * 16 * k * 16 * n


fp8_linear = Pair(
    reference=reference,
    optimized=side(optimized, available=available),
    inputs={"x": tensor("M", "16 * k"), "weight": tensor("16 * n", "16 * k"), "bias": tensor("16 * n")},
    sizes={"M": size(1, 65), "k": size(1, 9), "n": size(1, 9)},
    dtypes=("bfloat16",),
    rivals={
        "bfloat16": side(functional.linear, devices=("cuda",)),
        "compile": compiled(side(reference, devices=("cuda",))),
    },
    workloads=[
        Workload("expand", **TOKENS, k=64, n=256),
        Workload("expand_both", **TOKENS, k=64, n=256, direction="both"),
        Workload("contract_both", **TOKENS, k=256, n=64, direction="both"),
        Workload("cpu", M=64, k=4, n=4, dtype="bfloat16", direction="both", clock="wall", device="cpu"),
    ],
    # Shares may exceed 100%: they are relative to products in bfloat16.
    cost=Cost(flops=flops, precision="bfloat16"),
)


@pytest.mark.parametrize(
    "largest", [0.0, 1e-45, 1e-38, 0.1, 1.0, 1.75, 1.7500001, 256.0, 448.0, 449.0, 3e38, math.inf, math.nan]
)
def test_both_sides_round_a_row_alike(largest):
    row = torch.linspace(-0.9, 0.9, 31) * (largest if math.isfinite(largest) else 1.0)
    row[7] = largest
    found, scale = _rounded(row[None])
    expected = rounded(row[None])
    torch.testing.assert_close(found.float() * scale, expected, rtol=0, atol=0, equal_nan=True)
    assert scale.isnan().item() == (not math.isfinite(largest))
    if 1e-30 < largest < math.inf:
        assert 224 <= found.float().abs().max() <= 448
        assert (expected - row).abs().max() <= largest / 16


def test_weight_gradients_are_not_rounded_to_fp8():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((64, 32), (48, 32), (48,)))
    grad = torch.randn(64, 48).bfloat16()
    exact = torch.autograd.grad(functional.linear(x, weight, bias), (x, weight, bias), grad)
    for call in (reference, optimized):
        found = torch.autograd.grad(call(x, weight, bias), (x, weight, bias), grad)
        assert not torch.equal(found[0], exact[0])
        assert (found[0] - exact[0]).norm() < 0.06 * exact[0].norm()
        torch.testing.assert_close(found[1:], exact[1:])


def test_leading_dimensions_are_kept():
    x, weight, bias = torch.randn(2, 3, 16).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randn(32).bfloat16()
    assert optimized(x, weight, bias).shape == reference(x, weight, bias).shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        (torch.float32, (16, 16), "must be bfloat16, not torch.float32"),
        (torch.bfloat16, (16, 24), r"must be multiples of 16, not \[16, 24\]"),
        (torch.bfloat16, (8, 16), r"must be multiples of 16, not \[8, 16\]"),
    ],
)
def test_other_dtypes_and_sizes_are_refused(dtype, shape, says):
    x, weight, bias = torch.ones(2, shape[1]), torch.ones(shape), torch.ones(shape[0])
    with pytest.raises(ValueError, match=says):
        optimized(x.to(dtype), weight.to(dtype), bias.to(dtype))
