import torch
from scale import draws

from optimized.memory.activation_checkpoint import activation_checkpoint as optimized
from optimized.memory.activation_checkpoint import activation_checkpoint_operator as optimized_operator
from perfsuite import Pair, Workload, compiled, side, size
from reference.memory.activation_checkpoint import activation_checkpoint as reference
from reference.memory.activation_checkpoint import activation_checkpoint_operator as reference_operator
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, drawn, near_a_threshold, off_thresholds, on_network
from suite.ups.trial import OPERATOR, STEP, operator, operator_cost

activation_checkpoint = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    max_examples=draws(cpu=12),
    adjust=off_thresholds,
    excuse=near_a_threshold,
    rivals={"compile": compiled(side(on_network(reference), devices=("cuda",)))},
    workloads=[
        Workload("batch5632_both", **TRAINING, direction="both", device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost(),
)

activation_checkpoint_operator = Pair(
    reference=reference_operator,
    optimized=optimized_operator,
    inputs=STEP,
    sizes={
        "B": size(1, 3),
        "T": size(2, 5),
        "L": size(2, 5),
        "heads": size(1, 2),
        "head_width": size(4, 5),
        "depth": size(1, 2),
    },
    max_examples=draws(cpu=7, otherwise=12),
    rivals={"compile": compiled(side(reference_operator, devices=("cuda",)))},
    workloads=[
        Workload("ups_both", **OPERATOR, direction="both", device="cuda"),
        Workload("cpu", B=2, T=8, L=8, heads=2, head_width=8, depth=2, clock="wall", direction="both", device="cpu"),
    ],
    cost=operator_cost(),
)


def kept_bytes(call, inputs):
    """Count the bytes that autograd saves in the forward for the backward, each storage once."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = call(*inputs)
    weights, *batch = inputs
    weights = dict(weights.named_parameters()) if isinstance(weights, torch.nn.Module) else weights
    own = {t.untyped_storage().data_ptr() for t in (*weights.values(), *batch)}
    assert made.requires_grad
    return sum(size for address, size in sizes.items() if address not in own)


def test_saved_bytes_are_less_than_a_fifth_of_the_reference_s():
    inputs = drawn()
    assert kept_bytes(optimized, inputs) < 0.2 * kept_bytes(reference, inputs)


def step(depth):
    torch.manual_seed(0)
    return operator(4, 2, 8, depth), torch.randn(2, 16, 4), torch.rand(2), torch.ones(depth, 2, 2)


def test_only_the_inputs_of_a_sublayer_are_saved():
    """Each saved input has 2 · 16 · 16 float32 values; the time embedding of 2 · 16 is shared."""
    kept = [kept_bytes(optimized_operator, step(depth)) for depth in (1, 2, 3)]
    assert kept[2] - kept[1] == kept[1] - kept[0] == 2 * (4 * 2 * 16 * 16)
    plain = [kept_bytes(reference_operator, step(depth)) for depth in (1, 2)]
    assert plain[1] - plain[0] > 10 * (kept[1] - kept[0])


def test_attention_and_mlp_are_recomputed_separately():
    model, *inputs = step(2)
    calls = []
    for number, block in enumerate(model.blocks):
        for layer, name in ((block.project, "attention"), (block.contract, "mlp")):
            layer.register_forward_hook(lambda *_, message=(number, name): calls.append(message))
    loss = optimized_operator(model, *inputs).sum()
    order = [(number, name) for number in (0, 1) for name in ("attention", "mlp")]
    assert calls == order
    loss.backward()
    assert calls[4:] == order[::-1]
