import torch

from optimized.memory.activation_checkpoint import activation_checkpoint as optimized
from perfsuite import Pair, Workload, floats, integers, module, size, tensor
from reference.memory.activation_checkpoint import activation_checkpoint as reference
from suite.leak_cnn.trial import Network, near_a_threshold, on_network

activation_checkpoint = Pair(
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
    workloads=[
        Workload("cpu", N=4, H=32, c1=32, c2=64, c3=128, h=256, clock="wall", direction="both", device="cpu"),
    ],
)


def drawn():
    torch.manual_seed(0)
    network = Network(3, 4, 5, 6)
    weights = dict(network.named_parameters())
    return weights, torch.randn(6, 1, 32, 1), torch.tensor([0, 1, 2, 3, 4, 2]), torch.ones(5)


def kept_bytes(call):
    """Of what autograd keeps from the forward for the backward, each storage once."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights, *batch = drawn()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call(weights, *batch)
    own = {t.untyped_storage().data_ptr() for t in (*weights.values(), *batch)}
    assert loss.requires_grad
    return sum(size for address, size in sizes.items() if address not in own)


def test_of_the_convolutions_only_the_result_is_kept():
    assert kept_bytes(optimized) < 0.2 * kept_bytes(reference)
