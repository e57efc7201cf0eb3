import torch

from optimized.memory.activation_checkpoint import activation_checkpoint as optimized
from perfsuite import Pair, Workload, compiled, side
from reference.memory.activation_checkpoint import activation_checkpoint as reference
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, drawn, near_a_threshold, off_thresholds, on_network

activation_checkpoint = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    adjust=off_thresholds,
    excuse=near_a_threshold,
    rivals={"compile": compiled(side(on_network(reference), devices=("cuda",)))},
    workloads=[
        Workload("batch5632_both", **TRAINING, direction="both", device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost(),
)


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
