import pytest
import torch

from optimized.dropout_masks import kept_inputs, kept_inputs_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, scalar, side, size, tensor
from suite.polychromic.lora import kept, places_of, starts_of


def reference(starts, places, inputs, rate):
    return kept(starts[0], places, len(inputs), rate)


def by(call):
    def called(starts, places, inputs, rate):
        return call(starts[0], places, len(inputs), rate).bool()

    return called


dropout_masks = Pair(
    reference=reference,
    optimized=by(kept_inputs),
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
    cost=Cost(bytes=lambda tokens, inputs, **_: tokens * (inputs + 8)),
    variants={"triton": side(by(kept_inputs_triton), available=triton_reason)},
)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_as_many_are_dropped_as_the_rate_says(rate):
    mask = kept_inputs(starts_of(0, 0, 1)[0], places_of(0, (64, 64)).flatten(), 256, rate)
    assert mask.double().mean() == pytest.approx(1 - rate, abs=1e-3)
    assert mask.dtype == torch.uint8
