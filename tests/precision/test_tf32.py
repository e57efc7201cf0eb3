import torch

from optimized.precision.tf32 import tf32 as optimized
from perfsuite import Pair, Workload, side
from reference.precision.tf32 import tf32 as reference
from suite.backends import tf32_products
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.step import training_loss, with_gradients
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, near_a_threshold, off_thresholds, on_network


def convolutions(*arguments):
    """Call with torch's defaults: only convolutions in TF32."""
    with tf32_products(allowed=False):
        torch.backends.cudnn.allow_tf32 = True  # restored at the end of the block
        return with_gradients(training_loss, *arguments)


tf32 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    adjust=off_thresholds,
    excuse=near_a_threshold,
    precision="float16",
    gradients=False,
    rivals={"convolutions": side(on_network(convolutions), devices=("cuda",))},
    workloads=[
        Workload("step5632", **TRAINING, speedup=1.8, device="cuda"),
        Workload("cpu", **FEW, clock="wall", device="cpu"),
    ],
    cost=training_cost("tf32", within=True),
)


def test_tf32_setting_covers_the_backward_pass_and_is_restored():
    before = (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
    with Seen(lambda args: (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())) as seen:
        optimized(*drawn())
    assert seen.of("convolution_backward") == [(True, "high")] * 3
    with Seen(lambda args: (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())) as seen:
        reference(*drawn())
    assert seen.of("convolution_backward") == [(False, "highest")] * 3
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before
