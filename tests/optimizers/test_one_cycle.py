import pytest
import torch

from optimized.optimizers import one_cycle as module
from optimized.optimizers.one_cycle import one_cycle as optimized
from perfsuite import Pair, Workload, compiled, floats, integers, scalar, side, size, tensor
from reference.optimizers.one_cycle import one_cycle as reference

one_cycle = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "steps": tensor("N", dtype="int64", values=integers(0, 11)),
        "total_steps": scalar(integers(11, 60)),
        "max_lr": scalar(floats(1e-4, 1)),
    },
    gradients=False,
    sizes={"N": size(0, 20)},
    rivals={"compile": compiled(side(optimized, devices=("cuda",)))},
    workloads=[
        Workload(
            "steps1000",
            N=1000,
            total_steps=1000,
            max_lr=3e-4,
            clock="wall",
            speedup=5,
            host_syncs=0,
            launches=1,
            device="cuda",
        ),
        Workload("cpu", N=1000, total_steps=1000, max_lr=3e-4, clock="wall", device="cpu"),
    ],
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_rate_rises_over_the_first_tenth_and_then_falls(call):
    rates = call(torch.arange(100), 100, 1.0).tolist()
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[9] == max(rates) == 1.0
    assert rates[99] == pytest.approx(1 / 25 / 1e4)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("total", [11, 100, 999])
def test_rate_of_every_step_matches_the_reference(total):
    steps = torch.arange(total)
    torch.testing.assert_close(optimized(steps, total, 3e-4), reference(steps, total, 3e-4), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("call", [reference, optimized])
def test_too_few_total_steps_raise_value_error(call):
    with pytest.raises(ValueError, match="total_steps=10: "):
        call(torch.arange(3), 10, 1.0)


def test_table_of_rates_is_computed_once():
    module._table.cache_clear()
    for _ in range(3):
        optimized(torch.arange(3), 20, 1.0)
    assert module._table.cache_info().misses == 1
