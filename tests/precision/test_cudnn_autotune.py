from contextlib import ExitStack

import torch

from optimized.precision.cudnn_autotune import cudnn_autotune as optimized
from perfsuite import Pair, Workload
from reference.precision.cudnn_autotune import cudnn_autotune as reference
from suite.backends import tf32_products
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, near_a_threshold, off_thresholds, on_network

cudnn_autotune = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    adjust=off_thresholds,
    excuse=near_a_threshold,
    gradients=False,
    workloads=[
        # None on a GPU: within one process cuDNN's cache gives both sides the plan that the first one found.
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
)


def in_bfloat16(call, tf32):
    """Call under autocast, where TF32 changes only the key under which a convolution's plan is cached."""

    def given(*arguments):
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(arguments[1].device.type, torch.bfloat16))
            if arguments[1].is_cuda:
                stack.enter_context(tf32_products(allowed=tf32))
            return call(*arguments)

    return given


# The two settings give each side its own plan.
cudnn_autotune_bf16 = Pair(
    reference=on_network(in_bfloat16(reference, tf32=False)),
    optimized=on_network(in_bfloat16(optimized, tf32=True)),
    inputs=INPUTS,
    sizes=SIZES,
    precision="bfloat16",
    gradients=False,
    workloads=[
        Workload("step5632", **TRAINING, device="cuda"),
        Workload("cpu_bfloat16", **FEW, clock="wall", device="cpu"),
    ],
    cost=training_cost("bfloat16", within=True),
)


def test_benchmark_setting_covers_the_backward_pass_and_is_restored():
    before = torch.backends.cudnn.benchmark
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        optimized(*drawn())
    assert seen.of("convolution_backward") == [True] * 3
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        reference(*drawn())
    assert seen.of("convolution_backward") == [False] * 3
    assert torch.backends.cudnn.benchmark == before
