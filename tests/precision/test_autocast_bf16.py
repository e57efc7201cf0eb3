import torch

from optimized.precision.autocast_bf16 import autocast_bf16 as optimized
from perfsuite import Pair, Workload, compiled, side
from reference.precision.autocast_bf16 import autocast_bf16 as reference
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import FEW, INPUTS, SIZES, Seen, drawn, on_network

autocast_bf16 = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs=INPUTS,
    sizes=SIZES,
    precision="bfloat16",
    rivals={"compile": compiled(side(on_network(optimized), devices=("cuda",)))},
    workloads=[
        Workload("batch5632_both", **TRAINING, direction="both", speedup=1.8, device="cuda"),
        Workload("cpu", **FEW, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost("bfloat16"),
)


def test_products_are_bfloat16_and_the_loss_is_not():
    with Seen(lambda args: [a.dtype for a in args if isinstance(a, torch.Tensor)]) as seen:
        loss = optimized(*drawn())
    assert seen.of("convolution") == [[torch.bfloat16] * 3] * 3
    assert {d for call in seen.of("addmm") for d in call} == {torch.bfloat16}
    assert loss.dtype is torch.float32
    assert {d for call in seen.of("_log_softmax") for d in call} == {torch.float32}
