import torch
from scale import draws

from optimized.memory.channels_last import channels_last as optimized
from perfsuite import Pair, Workload, compiled, side
from reference.memory.channels_last import channels_last as reference
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, near_a_threshold, off_thresholds, on_network

channels_last = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    max_examples=draws(cpu=12),
    adjust=off_thresholds,
    excuse=near_a_threshold,
    rivals={"compile": compiled(side(on_network(reference), devices=("cuda",)))},
    workloads=[
        Workload("batch5632_bfloat16", **TRAINING, dtype="bfloat16", device="cuda"),
        Workload("batch5632_both", **TRAINING, direction="both", device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    # The cost is that of the faster of the workloads' dtypes, which is the minimum for both.
    cost=training_cost("bfloat16"),
)


def test_convolutions_get_channels_last_tensors():
    def laid(args):
        of_four = [t for t in args[:2] if isinstance(t, torch.Tensor) and t.dim() == 4]
        return [t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in of_four]

    with Seen(laid) as default:
        reference(*drawn())
    with Seen(laid) as last:
        optimized(*drawn())
    assert default.of("convolution") == [[False, False]] * 3
    # With one channel, as in the segments and the first weights, both layouts are the same.
    assert last.of("convolution") == [[False, False], [True, True], [True, True]]


def test_gradients_are_contiguous_like_their_weights():
    weights, *batch = drawn()
    optimized(weights, *batch).backward()
    assert all(w.grad.is_contiguous() for w in weights.values())
