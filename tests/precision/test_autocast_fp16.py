import pytest
import torch

from optimized.precision import autocast_fp16 as half
from optimized.precision.autocast_fp16 import autocast_fp16 as optimized
from optimized.precision.tf32 import tf32
from perfsuite import Pair, Workload, side
from reference.precision.autocast_fp16 import autocast_fp16 as reference
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, on_network

autocast_fp16 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    precision="float16",
    gradients=False,
    # TF32 has the same 11 bits, with the range of float32.
    rivals={"tf32": side(on_network(tf32), devices=("cuda",))},
    workloads=[
        Workload("step5632", **TRAINING, speedup=1.8, device="cuda"),
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
    cost=training_cost("float16", within=True),
)


def test_products_are_float16_and_the_results_are_float32():
    with Seen(lambda args: [a.dtype for a in args if isinstance(a, torch.Tensor)]) as seen:
        loss, gradients = optimized(*drawn())
    assert seen.of("convolution") == [[torch.float16] * 3] * 3
    assert {d for call in seen.of("addmm") for d in call} == {torch.float16}
    assert {d for call in seen.of("_log_softmax") for d in call} == {torch.float32}
    assert {t.dtype for t in (loss, *gradients.values())} == {torch.float32}


@pytest.mark.parametrize("scale", [half.SCALE, 1.0])
def test_small_gradients_are_lost_unless_scaled(scale, monkeypatch):
    monkeypatch.setattr(half, "SCALE", scale)
    weights, *batch = drawn()
    # Gradients of about 1e-9; the smallest positive float16 number is 6e-8.
    for name, factor in {"classes": 1e-4, "leak": 1e-4, "hidden": 0.01}.items():
        weights[f"{name}.weight"].data.mul_(factor)
    expected = reference(weights, *batch)[1]["conv1.weight"]
    gradient = optimized(weights, *batch)[1]["conv1.weight"]
    assert expected.norm() > 0
    assert ((gradient - expected).norm() < 0.2 * expected.norm()) == (scale > 1)


def test_scale_does_not_change_the_gradients(monkeypatch):
    found = optimized(*drawn())[1]
    monkeypatch.setattr(half, "SCALE", 2048.0)
    other = optimized(*drawn())[1]
    assert all(torch.equal(gradient, other[name]) for name, gradient in found.items())
