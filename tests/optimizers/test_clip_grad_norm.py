import pytest
import torch

from optimized.optimizers.clip_grad_norm import clip_grad_norm as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, listof, scalar, side, size, tensor
from reference.optimizers.clip_grad_norm import clip_grad_norm as reference


def torch_s_own(grads, max_norm):
    """Clip with PyTorch's own utility."""
    parameters = [torch.empty_like(g) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


clip_grad_norm = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "grads": listof("count", tensor("rows", "columns", values=floats(-4, 4), differentiable=False)),
        "max_norm": scalar(floats(0.1, 50)),
    },
    mutates={"grads"},
    gradients=False,
    sizes={"count": size(1, 4), "rows": size(0, 20), "columns": size(0, 20)},
    rivals={"torch": torch_s_own, "compile": compiled(side(optimized, devices=("cuda",)))},
    workloads=[
        Workload(
            "small_32k",
            count=117,
            rows=1024,
            columns=1024,
            max_norm=1,
            clock="wall",
            speedup=4,
            host_syncs=0,
            device="cuda",
        ),
        Workload("cpu", count=16, rows=64, columns=64, max_norm=1, clock="wall", device="cpu"),
    ],
    # The gradients are read for the norm, then read and written to be scaled.
    cost=Cost(bytes=lambda count, rows, columns: 12 * count * rows * columns),
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_known_values(call):
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert call(grads, 10.0).item() == 5.0
    assert [g.tolist() for g in grads] == [[3.0, 0.0], [[4.0]]]
    assert call(grads, 0.5).item() == 5.0
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), torch.tensor([0.3, 0.0, 0.4]))


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_spreads_to_all_gradients_and_infinity_becomes_nan_alone(call, wrong):
    grads = [torch.tensor([wrong]), torch.tensor([4.0])]
    total = call(grads, 1.0)
    assert str(total.item()) == str(abs(wrong))
    assert grads[0].isnan()
    assert grads[1].isnan() if wrong != wrong else grads[1].item() == 0.0


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("max_norm", [1.0, 0.01])
def test_float16_gradients_are_clipped_even_if_their_joint_norm_overflows(call, max_norm):
    grads = [torch.full((4,), 30000.0, dtype=torch.float16) for _ in range(2)]
    assert call(grads, max_norm).item() == float("inf")
    for grad in grads:
        expected = torch.full((4,), max_norm / 8**0.5, dtype=torch.float16)
        torch.testing.assert_close(grad, expected)
