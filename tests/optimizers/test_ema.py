import pytest
import torch

from optimized.optimizers.ema import ema as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, listof, side, size, stateful, tensor
from reference.optimizers.ema import ema as reference


def averaged_model(averages, decay=0.999):
    """Update the averages as PyTorch's AveragedModel does."""
    update = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    return lambda params: update(list(averages), list(params), 1) if averages else None


ema = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"averages": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    step_inputs={"params": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    mutates={"averages"},
    sizes={"count": size(0, 3), "rows": size(0, 49), "columns": size(0, 49)},
    rivals={
        "torch": stateful(averaged_model),
        "compile": compiled(stateful(side(reference, devices=("cuda",)))),
    },
    workloads=[
        # 21 M parameters, as many as the ups operator has.
        Workload("ups", count=96, rows=384, columns=576, device="cuda", speedup=3.0, host_syncs=0),
        Workload("cpu", count=8, rows=64, columns=64, clock="wall", device="cpu"),
    ],
    # The averages and the parameters are read, the averages written.
    cost=Cost(bytes=lambda count, rows, columns: 12 * count * rows * columns),
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_two_steps_match_hand_computation(call):
    averages = [torch.tensor([1.0, 2.0])]
    step = call(averages, decay=0.75)
    step([torch.tensor([5.0, 2.0])])
    step([torch.tensor([2.0, 6.0])])
    torch.testing.assert_close(averages[0], torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("call", [reference, optimized])
def test_averages_require_no_gradient(call):
    averages = [torch.zeros(3)]
    call(averages)([torch.nn.Parameter(torch.ones(3))])
    assert not averages[0].requires_grad


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_parameters_raises_value_error(call, count):
    averages = [torch.ones(2), torch.ones(2)]
    with pytest.raises(ValueError, match=r"zip|one for each"):
        call(averages)([torch.zeros(2)] * count)
    assert all(torch.equal(average, torch.ones(2)) for average in averages)


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_averages_may_be_wider_than_the_parameters(call, dtypes):
    of_averages, of_params = dtypes
    averages = [torch.tensor([1.0, 2.0], dtype=of_averages)]
    call(averages, decay=0.75)([torch.tensor([5.0, 2.0], dtype=of_params)])
    torch.testing.assert_close(averages[0], torch.tensor([2.0, 2.0], dtype=of_averages))
