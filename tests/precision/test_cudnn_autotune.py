import torch

from optimized.precision.cudnn_autotune import cudnn_autotune as optimized
from perfsuite import Pair, Workload
from reference.precision.cudnn_autotune import cudnn_autotune as reference
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
        # None on a GPU: within one process cuDNN's cache hands both sides the plan that the first of them found.
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
)


def test_the_setting_holds_for_the_backward_too_and_is_put_back():
    before = torch.backends.cudnn.benchmark
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        optimized(*drawn())
    assert seen.of("convolution_backward") == [True] * 3
    with Seen(lambda args: torch.backends.cudnn.benchmark) as seen:
        reference(*drawn())
    assert seen.of("convolution_backward") == [False] * 3
    assert torch.backends.cudnn.benchmark == before
