import math

import pytest
import torch
from scale import draws

from optimized.generation import fused_lora_nf4 as module
from optimized.generation.fused_lora import NARROW, TORCH
from optimized.generation.fused_lora_nf4 import (
    dequantised,
    fused_lora_nf4_narrow,
    fused_lora_nf4_torch,
    fused_lora_nf4_triton,
)
from optimized.generation.fused_lora_nf4 import fused_lora_nf4 as optimized
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, sampled, scalar, side, size, tensor
from reference.generation.fused_lora_nf4 import fused_lora_nf4 as reference
from suite.polychromic.nf4 import NF4, quantised


def arithmetic(tokens, blocks, outputs, rank, direction):
    """Count operations: the frozen product once per direction, the low-rank ones once forward and twice backward."""
    inputs = 64 * blocks
    frozen, low = 2 * tokens * inputs * outputs, 2 * tokens * rank * (inputs + outputs)
    return {"forward": frozen + low, "backward": frozen + 2 * low, "both": 2 * frozen + 3 * low}[direction]


def mask(generator, shape, dtype):
    """Draw a mask of half of the elements; each random number serves eight."""
    count = math.prod(shape)
    numbers = torch.randint(-(2**62), 2**62, (count // 8 + 1,), generator=generator)
    return (numbers.view(torch.uint8)[:count].view(shape) & 1).to(dtype)


HALF = {"rank": 16, "dtype": "bfloat16", "direction": "both", "device": "cuda", "scale": 2.0, "keep": 0.95}

fused_lora_nf4 = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "x": tensor("tokens", "64 * blocks"),
        "codes": tensor("outputs", "32 * blocks", dtype="uint8", values=integers(0, 256)),
        "absmax": tensor("outputs", "blocks", dtype="float32", values=floats(0, 2), differentiable=False),
        "a": tensor("rank", "64 * blocks", values=floats(-2, 2)),
        "b": tensor("outputs", "rank", values=floats(-2, 2)),
        "scale": scalar(floats(0.25, 4)),
        "kept": tensor("tokens", "64 * blocks", dtype="bool", values=sampled(mask)),
        "keep": scalar(floats(0.5, 1)),
    },
    sizes={"tokens": size(0, 24), "blocks": size(0, 2), "outputs": size(0, 24), "rank": size(1, 18)},
    max_examples=draws(cpu=7, otherwise=16),
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "product_kernel": side(fused_lora_nf4_triton, devices=("cuda",), available=triton_reason),
    },
    variants={
        "torch": fused_lora_nf4_torch,
        "narrow": side(fused_lora_nf4_narrow, available=triton_reason),
        "triton": side(fused_lora_nf4_triton, available=triton_reason),
    },
    workloads=[
        Workload("q_8192", tokens=8192, blocks=64, outputs=4096, **HALF),
        Workload("up_8192", tokens=8192, blocks=64, outputs=14336, **HALF),
        Workload("q_1024", tokens=1024, blocks=64, outputs=4096, **HALF),
        Workload(
            "cpu",
            tokens=128,
            blocks=1,
            outputs=96,
            rank=4,
            scale=2.0,
            keep=0.95,
            clock="wall",
            direction="both",
            device="cpu",
        ),
    ],
    cost=Cost(flops=arithmetic, precision="float32"),
)

FORMS = [TORCH, pytest.param(NARROW, marks=pytest.mark.interpreted)]


def drawn(outputs=5, inputs=128):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_is_rounded_to_the_nearest_value_of_its_block(form):
    weight = drawn()
    codes, absmax = quantised(weight)
    found = dequantised(form, torch.float32, codes, absmax)
    blocks = weight.view(5, 2, 64)
    assert torch.equal(absmax, blocks.abs().amax(2))
    choices = absmax[:, :, None, None] * torch.tensor(NF4)
    nearest = (blocks[..., None] - choices).abs().amin(3)
    torch.testing.assert_close((found.view(5, 2, 64) - blocks).abs(), nearest)


@pytest.mark.parametrize("form", FORMS)
def test_nf4_values_are_restored_exactly(form):
    weight = 3 * torch.tensor(NF4).repeat(2, 8)
    assert torch.equal(dequantised(form, torch.float32, *quantised(weight)), weight)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_of_two_weights_is_in_the_upper_bits(form):
    codes = torch.full((1, 32), 0xF0, dtype=torch.uint8)
    assert dequantised(form, torch.float32, codes, torch.tensor([[2.0]])).tolist() == [[2.0, -2.0] * 32]


def test_block_of_zeros_stays_zero():
    codes, absmax = quantised(torch.zeros(1, 64))
    assert absmax.tolist() == [[0.0]]
    assert not dequantised(TORCH, torch.float32, codes, absmax).any()


def test_rows_of_partial_blocks_raise_value_error():
    with pytest.raises(ValueError, match="100 inputs: NF4 takes multiples of 64"):
        quantised(torch.zeros(2, 100))


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [16, 128, 4096])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (3, 128), (4, 64)])
def test_kernel_matches_pytorch_at_program_edges(outputs, inputs, size, monkeypatch, fences):
    monkeypatch.setattr(module, "CODES", size)
    codes, absmax = quantised(drawn(outputs, inputs))
    expected = dequantised(TORCH, torch.float32, codes, absmax)
    assert torch.equal(dequantised(NARROW, torch.float32, codes, absmax), expected)
    assert fences.intact()


@pytest.mark.parametrize("call", [optimized, pytest.param(fused_lora_nf4_narrow, marks=pytest.mark.interpreted)])
def test_the_dequantised_weight_is_not_saved(call):
    saved = []
    codes, absmax = quantised(drawn())
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((7, 128), (3, 128), (5, 3)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(x, codes, absmax, a, b, 1.0, torch.ones(7, 128, dtype=torch.bool), 0.5)
    assert sorted(tuple(t.shape) for t in saved) == sorted(
        [(7, 128), (3, 128), (5, 3), (7, 3), (7, 16), (5, 64), (5, 2)]
    )
