import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimized.precision.cudnn_autotune import cudnn_autotune as optimized
from perfsuite import Pair, Workload, floats, integers, module, size, tensor
from reference.precision.cudnn_autotune import cudnn_autotune as reference
from suite.leak_cnn.trial import Network, near_a_threshold, on_network

cudnn_autotune = Pair(
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
    excuse=near_a_threshold,
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


def test_the_setting_holds_for_the_backward_too_and_is_put_back():
    before = torch.backends.cudnn.benchmark
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        optimized(*drawn())
    assert seen.of("convolution_backward") == [True] * 3
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        reference(*drawn())
    assert seen.of("convolution_backward") == [False] * 3
    assert torch.backends.cudnn.benchmark == before
