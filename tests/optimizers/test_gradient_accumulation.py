import pytest
import torch
from torch.nn import functional

from optimized.optimizers.gradient_accumulation import gradient_accumulation as optimized
from perfsuite import Pair, Workload, compiled, floats, integers, scalar, side, size, tensor
from reference.optimizers.gradient_accumulation import gradient_accumulation as reference


def loss(weights, x, y):
    """Compute the loss of a network with one hidden layer; it is smooth, so that rounding redirects no gradient."""
    first, second = weights
    return functional.mse_loss(torch.tanh(x @ first) @ second, y)


def on_network(call):
    def given(first, second, x, y, rows):
        weights = [w.detach().clone().requires_grad_() for w in (first, second)]
        return call(loss, weights, (x, y), rows)

    return given


gradient_accumulation = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs={
        "first": tensor("D", "H", values=floats(-1, 1)),
        "second": tensor("H", "O", values=floats(-1, 1)),
        "x": tensor("N", "D", values=floats(-2, 2)),
        "y": tensor("N", "O", values=floats(-2, 2)),
        "rows": scalar(integers(1, 9)),
    },
    gradients=False,
    sizes={"N": size(1, 20), "D": size(1, 8), "H": size(1, 8), "O": size(1, 4)},
    rivals={"compile": compiled(side(on_network(reference), devices=("cuda",)))},
    workloads=[
        Workload("rows16k", N=16384, D=1024, H=4096, O=1024, rows=4096, peak_bytes=340 << 20, device="cuda"),
        Workload("cpu", N=512, D=32, H=64, O=8, rows=128, clock="wall", device="cpu"),
    ],
)


def drawn(N):
    torch.manual_seed(0)
    weights = [torch.randn(4, 5, requires_grad=True), torch.randn(5, 2, requires_grad=True)]
    return weights, (torch.randn(N, 4), torch.randn(N, 2))


def kept_bytes(call, rows):
    """Return the most bytes that one forward saves for its backward, besides weights and batch."""
    sizes, most = {}, 0
    weights, batch = drawn(64)
    known = {t.untyped_storage().data_ptr() for t in (*weights, *batch)}

    def pack(tensor):
        nonlocal most
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        most = max(most, sum(sizes.values()))
        return tensor

    def counted(*given):
        sizes.clear()
        return loss(*given)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(counted, weights, batch, rows)
    return most


def test_forward_saves_only_the_activations_of_one_micro_batch():
    assert kept_bytes(optimized, 8) == kept_bytes(reference, 8) / 8


def test_short_last_micro_batch_is_weighted_by_its_rows():
    weights, batch = drawn(7)
    torch.testing.assert_close(optimized(loss, weights, batch, 3), reference(loss, weights, batch, 3))


@pytest.mark.parametrize(("N", "rows", "says"), [(4, 0, "rows=0"), (0, 2, "no rows")])
def test_zero_rows_raise_value_error(N, rows, says):
    with pytest.raises(ValueError, match=says):
        optimized(loss, *drawn(N), rows)
