import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized.precision import autocast_fp16 as half
from optimized.precision.autocast_fp16 import autocast_fp16 as optimized
from perfsuite import Pair, Workload, floats, integers, module, size, tensor
from reference.precision.autocast_fp16 import autocast_fp16 as reference
from suite.leak_cnn.trial import Network, on_network

autocast_fp16 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs={
        "network": module(Network),
        "segments": tensor("N", 1, "H", 1, values=floats(-3, 3), differentiable=False),
        "labels": tensor("N", dtype="int64", values=integers(0, 5)),
        "class_weights": tensor(5, values=floats(0.5, 2), differentiable=False),
    },
    sizes={
        "N": size(1, 9),
        "H": size(4, 33),
        "c1": size(1, 5),
        "c2": size(1, 5),
        "c3": size(1, 5),
        "h": size(1, 9),
    },
    precision="float16",
    gradients=False,
    workloads=[
        Workload("cpu", N=4, H=32, c1=32, c2=64, c3=128, h=256, clock="wall", device="cpu"),
    ],
)


def drawn():
    torch.manual_seed(0)
    network = Network(3, 4, 5, 6)
    weights = dict(network.named_parameters())
    return weights, torch.randn(6, 1, 32, 1), torch.tensor([0, 1, 2, 3, 4, 2]), torch.ones(5)


class Seen(TorchDispatchMode):
    """Notes something of each operation."""

    def __init__(self, note):
        super().__init__()
        self.note, self.seen = note, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.overloadpacket.__name__, self.note(args)))
        return func(*args, **(kwargs or {}))

    def of(self, name):
        return [noted for operation, noted in self.seen if operation == name]


def test_products_are_float16_and_what_is_returned_is_not():
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
    # Gradients of some 1e-9: float16 ends at 6e-8.
    for name, factor in {"classes": 1e-4, "leak": 1e-4, "hidden": 0.01}.items():
        weights[f"{name}.weight"].data.mul_(factor)
    expected = reference(weights, *batch)[1]["conv1.weight"]
    gradient = optimized(weights, *batch)[1]["conv1.weight"]
    assert expected.norm() > 0
    assert ((gradient - expected).norm() < 0.2 * expected.norm()) == (scale > 1)
