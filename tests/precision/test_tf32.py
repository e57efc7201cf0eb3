import torch

from optimized.precision.tf32 import tf32 as optimized
from perfsuite import Pair, Workload
from reference.precision.tf32 import tf32 as reference
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, near_a_threshold, off_thresholds, on_network

tf32 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    adjust=off_thresholds,
    excuse=near_a_threshold,
    precision="float16",
    gradients=False,
    workloads=[
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
)


def test_the_setting_holds_for_the_backward_too_and_is_put_back():
    before = (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
    with Seen(lambda args: (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())) as seen:
        optimized(*drawn())
    assert seen.of("convolution_backward") == [(True, "high")] * 3
    with Seen(lambda args: (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())) as seen:
        reference(*drawn())
    assert seen.of("convolution_backward") == [(False, "highest")] * 3
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before
