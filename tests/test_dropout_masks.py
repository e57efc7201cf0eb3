import pytest
import torch

from optimized.dropout_masks import kept_bits, kept_bits_triton, packed, packed_triton, unpacked
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, scalar, side, size, tensor
from suite.polychromic.lora import kept, places_of, starts_of


def reference(starts, places, inputs, rate):
    return kept(starts[0], places, len(inputs), rate)


def by(call):
    def called(starts, places, inputs, rate):
        return unpacked(call(starts[0], places, len(inputs), rate), len(inputs)).bool()

    return called


dropout_masks = Pair(
    reference=reference,
    optimized=by(kept_bits),
    inputs={
        "starts": tensor("adapters", dtype="int64", values=integers(-(2**62), 2**62)),
        "places": tensor("tokens", dtype="int64", values=integers(0, 2**40)),
        "inputs": tensor("inputs", dtype="int64", values=integers(0, 1)),
        "rate": scalar(floats(0, 0.9)),
    },
    sizes={"adapters": size(1, 3), "tokens": size(1, 9), "inputs": size(1, 1100)},
    gradients=False,
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    workloads=[
        Workload("llama8b", adapters=1, tokens=1024, inputs=14336, rate=0.1, device="cuda"),
        Workload("cpu", adapters=1, tokens=64, inputs=576, rate=0.1, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda tokens, inputs, **_: tokens * (inputs / 8 + 8)),
    variants={"triton": side(by(kept_bits_triton), available=triton_reason)},
)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_dropped_share_equals_the_rate(rate):
    mask = unpacked(kept_bits(starts_of(0, 0, 1)[0], places_of(0, (64, 64)).flatten(), 256, rate), 256)
    assert mask.double().mean() == pytest.approx(1 - rate, abs=1e-3)
    assert mask.dtype == torch.uint8


@pytest.mark.interpreted
@pytest.mark.parametrize("inputs", [0, 1, 7, 8, 9, 20, 1100])
def test_pytorch_and_triton_pack_the_same_bits(inputs):
    mask = torch.rand(3, inputs, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = packed(mask)
    assert bits.shape == (3, -(-inputs // 8))
    assert torch.equal(packed_triton(mask), bits)
    assert torch.equal(unpacked(bits, inputs), mask.to(torch.uint8))


def test_first_column_is_the_least_significant_bit():
    assert packed(torch.tensor([[True, False, False, True, False, False, False, False, True]])).tolist() == [[9, 1]]
