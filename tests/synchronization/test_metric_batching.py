import pytest
import torch

from optimized.synchronization.metric_batching import metric_batching as optimized
from optimized.synchronization.metric_batching import metric_batching_stacked
from perfsuite import Cost, Pair, Workload, compiled, integers, scalar, side, tensor
from reference.synchronization.metric_batching import metric_batching as reference

metric_batching = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "lior_acc": tensor(),
        "R_acc": tensor(),
        "speed_acc": tensor(),
        "steps": scalar(integers(1, 1000)),
    },
    gradients=False,
    rivals={"stacked": metric_batching_stacked, "compile": compiled(side(reference, devices=("cuda",)))},
    variants={"stacked": metric_batching_stacked},
    workloads=[
        Workload("window64", steps=64, clock="wall", device="cuda", host_syncs=1, launches=0),
        Workload("cpu", steps=64, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda: 12),
)


@pytest.mark.parametrize("call", [reference, optimized, metric_batching_stacked])
def test_known_values(call):
    assert call(torch.tensor(6.0), torch.tensor(3.0), torch.tensor(-1.5), 3) == (2.0, 1.0, -0.5)


@pytest.mark.parametrize("call", [reference, optimized, metric_batching_stacked])
def test_zero_steps_raise_zero_division_error(call):
    with pytest.raises(ZeroDivisionError):
        call(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), 0)
