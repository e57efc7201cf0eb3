import pytest
import torch

from optimized.geometry.velocity_accumulation import VelocitySum
from optimized.geometry.velocity_accumulation import velocity_accumulation as optimized
from perfsuite import Cost, Pair, Workload, compiled, side, size, stateful, tensor
from reference.geometry.velocity_accumulation import velocity_accumulation as reference

velocity_accumulation = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"start": tensor("B", "n")},
    step_inputs={"velocities": tensor("W", "B", "n")},
    sizes={"W": size(0, 9)},
    rivals={"compile": compiled(stateful(side(reference, devices=("cuda",))))},
    workloads=[
        # The seed claims less than 1%: no speedup is promised.
        Workload("window64", B=64, n=8, W=64, device="cuda", host_syncs=0),
        Workload("rows256k", B=2**18, n=8, W=16, device="cuda"),
        Workload("cpu", B=64, n=8, W=64, clock="wall", device="cpu"),
    ],
    cost=Cost(bytes=lambda B, n, W: 4 * B * n * (W + 1)),
)

SIDES = [reference, optimized]


def naive(start):
    """Accumulate in place into the start, so that the caller's own tensor is the sum."""
    accumulated = start

    def window(velocities):
        for velocity in velocities:
            accumulated.add_(velocity)
        return accumulated

    return window


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    window = call(torch.tensor([[1.0, 2.0]]))
    assert window(torch.tensor([[[1.0, 1.0]], [[0.5, -2.0]]])).tolist() == [[2.5, 1.0]]
    assert window(torch.tensor([[[1.0, 1.0]]])).tolist() == [[3.5, 2.0]]
    assert window(torch.empty(0, 1, 2)).tolist() == [[3.5, 2.0]]


@pytest.mark.parametrize("call", SIDES)
def test_later_steps_change_neither_the_start_nor_a_returned_sum(call):
    # Claim C9. The sum starts with the first velocity; later steps must not change that tensor, nor a returned sum.
    first = torch.ones(2, 3)
    window = call(first)
    once = window(torch.ones(4, 2, 3))
    window(torch.ones(1, 2, 3))
    assert once.tolist() == [[5.0] * 3] * 2
    assert first.tolist() == [[1.0] * 3] * 2


def test_naive_accumulation_overwrites_the_start_and_a_returned_sum():
    first = torch.ones(2, 3)
    window = naive(first)
    once = window(torch.ones(4, 2, 3))
    window(torch.ones(1, 2, 3))
    # The caller's first velocity is overwritten, and so is the sum returned earlier.
    assert first.tolist() == [[6.0] * 3] * 2
    assert once.tolist() == [[6.0] * 3] * 2


@pytest.mark.parametrize("call", SIDES)
def test_changing_a_returned_sum_does_not_change_the_accumulator(call):
    start = torch.zeros(1, 2)
    window = call(start)
    for _ in range(2):  # also if nothing is added
        window(torch.empty(0, 1, 2)).fill_(7.0)
    assert window(torch.ones(1, 1, 2)).tolist() == [[1.0, 1.0]]
    assert not start.any()


@pytest.mark.parametrize("call", SIDES)
def test_returned_sum_requires_no_gradient(call):
    window = call(torch.ones(1, 2, requires_grad=True))
    # A graph over all steps would keep all of them alive.
    assert not window(torch.ones(3, 1, 2, requires_grad=True)).requires_grad


def test_add_reuses_the_memory_of_the_sum():
    accumulated = VelocitySum(torch.zeros(2, 3))
    place = accumulated._sum.data_ptr()
    for _ in range(3):
        accumulated.add(torch.ones(2, 3))
    assert accumulated._sum.data_ptr() == place
    assert accumulated.value().data_ptr() != place
