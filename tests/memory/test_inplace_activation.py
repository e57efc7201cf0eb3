from scale import draws

from optimized.memory.inplace_activation import inplace_activation as optimized
from perfsuite import Pair, Workload, compiled, side
from reference.memory.inplace_activation import inplace_activation as reference
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, near_a_threshold, off_thresholds, on_network

inplace_activation = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    max_examples=draws(cpu=12),
    adjust=off_thresholds,
    excuse=near_a_threshold,
    rivals={"compile": compiled(side(on_network(reference), devices=("cuda",)))},
    workloads=[
        Workload("batch5632", **TRAINING, device="cuda"),
        Workload("batch5632_both", **TRAINING, direction="both", device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost(),
)


def test_all_activations_are_applied_in_place():
    with Seen(lambda args: None) as beside:
        reference(*drawn())
    with Seen(lambda args: None) as inplace:
        optimized(*drawn())
    assert (len(beside.of("relu")), len(beside.of("relu_"))) == (4, 0)
    assert (len(inplace.of("relu")), len(inplace.of("relu_"))) == (0, 4)
