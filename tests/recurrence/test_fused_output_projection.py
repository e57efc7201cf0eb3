import torch

from optimized.recurrence.fused_output_projection import fused_output_projection as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, tensor
from reference.recurrence.fused_output_projection import fused_output_projection as reference
from suite.leak_cnn.trial import Seen


def traffic(N, K, D, direction):
    forward = 4 * (N * K + K * K + D * K + N * D)
    backward = 4 * (2 * (N * K + K * K + D * K) + N * D)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


fused_output_projection = Pair(
    reference=reference,
    optimized=optimized,
    # Another order of the products adds other infinities, which may give NaN. The product of the two small factors must
    # not underflow: a huge state would magnify the loss.
    inputs={
        "states": tensor("N", "K", values=floats(nonfinite=False)),
        # A rotation has full rank. If its elements are equal along a dimension, one order of the products sums equal
        # terms, whose rounding errors add up, and the other order does not.
        "rotation": tensor("K", "K", values=floats(-1, 1), layouts=("contiguous", "transposed", "strided", "offset")),
        "weight": tensor("D", "K", values=floats(-10, 10)),
    },
    sizes={"N": size(0, 40), "K": size(1, 24), "D": size(1, 40)},
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    workloads=[
        Workload("small_32k", N=4 * 32768, K=128, D=1024, direction="both", speedup=1.05, device="cuda"),
        Workload("cpu", N=4096, K=32, D=64, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(
        bytes=traffic,
        flops=lambda N, K, D, direction: 2 * N * K * D * {"forward": 1, "backward": 2, "both": 3}[direction],
        precision="tf32",
    ),
)


def test_states_may_have_any_leading_dimensions():
    states, rotation, weight = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(5, 4)
    torch.testing.assert_close(optimized(states, rotation, weight), reference(states, rotation, weight))


def test_only_one_product_has_as_many_rows_as_there_are_states():
    with Seen(lambda args: len(args[0])) as seen:
        optimized(torch.randn(100, 4), torch.randn(4, 4), torch.randn(5, 4))
    assert sorted(seen.of("mm")) == [4, 100]
