import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimized.kernels import triton_reason
from optimized.losses import chunked_cross_entropy as module
from optimized.losses.chunked_cross_entropy import chunked_cross_entropy as optimized
from optimized.losses.chunked_cross_entropy import chunked_cross_entropy_torch, chunked_cross_entropy_triton
from perfsuite import Cost, Pair, Workload, compiled, integers, side, size, tensor
from reference.losses.chunked_cross_entropy import chunked_cross_entropy as reference


def in_threes(hidden, weight, labels):
    return chunked_cross_entropy_torch(hidden, weight, labels, rows=3)


def kernel_in_threes(hidden, weight, labels):
    return chunked_cross_entropy_triton(hidden, weight, labels, rows=3)


def liger():
    """Return why Liger's loss is unavailable, or None."""
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError as error:
        return f"liger-kernel cannot be imported ({error}); pip install liger-kernel"
    return None


def by_liger(hidden, weight, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def traffic(N, D, V, direction):
    once = 4 * (N * D + V * D) + 8 * N
    return {"forward": once, "backward": 2 * once, "both": 3 * once}[direction]


# An eighth of a batch of 4 x 32768 tokens: as much as fits the reference in float64.
ROWS = {"N": 16384, "D": 1024, "V": 50257, "direction": "both"}

chunked_cross_entropy = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "hidden": tensor("N", "D"),
        "weight": tensor("V", "D"),
        "labels": tensor("N", dtype="int64", values=integers(0, 5)),
    },
    sizes={"N": size(1, 20), "D": size(1, 20), "V": size(5, 30)},
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "liger": side(by_liger, devices=("cuda",), available=liger),
    },
    variants={"in_threes": in_threes, "triton": side(chunked_cross_entropy_triton, available=triton_reason)},
    workloads=[
        # The reference holds 9.9 GB, in bfloat16 4.9 GB.
        Workload("rows16k", **ROWS, peak_bytes=2400 << 20, host_syncs=0, device="cuda"),
        # As eigenstate_lm trains. The reference's products are slow if the number of columns is odd.
        Workload("rows16k_bfloat16", **ROWS, dtype="bfloat16", speedup=4, peak_bytes=1300 << 20, device="cuda"),
        Workload("cpu", N=256, D=32, V=500, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(
        bytes=traffic,
        flops=lambda N, D, V, direction: 2 * N * D * V * {"forward": 1, "backward": 2, "both": 3}[direction],
        precision="tf32",
    ),
)


SIDES = [optimized, in_threes, pytest.param(kernel_in_threes, marks=pytest.mark.interpreted)]


def drawn(N=7, D=4, V=11):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((N, D), (V, D)))
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def differentiated(call, hidden, weight, labels):
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    loss = call(*leaves, labels)
    return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]


@pytest.mark.parametrize("call", [reference, *SIDES])
def test_loss_of_equal_logits_is_the_log_of_the_vocabulary_size(call):
    loss = call(torch.zeros(4, 2), torch.randn(8, 2), torch.tensor([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(2.0794415)


@pytest.mark.parametrize("call", SIDES)
def test_label_of_minus_100_is_ignored(call):
    hidden, weight, labels = drawn()
    labels[[0, 4, 5]] = -100
    for own, other in zip(
        differentiated(call, hidden, weight, labels), differentiated(reference, hidden, weight, labels), strict=True
    ):
        torch.testing.assert_close(own, other)
    assert not differentiated(call, hidden, weight, labels)[1][[0, 4, 5]].any()


@pytest.mark.parametrize("call", [reference, *SIDES])
def test_loss_is_nan_if_all_labels_are_ignored(call):
    hidden, weight, labels = drawn()
    assert call(hidden, weight, torch.full_like(labels, -100)).isnan()


def test_logits_of_all_rows_are_never_allocated_at_once():
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor))])
            return found

    hidden, weight, labels = drawn(N=60, D=2, V=50)
    hidden.requires_grad_()
    with Sizes():
        optimized(hidden, weight, labels, rows=4).backward()
    assert largest == 4 * 50


@pytest.mark.parametrize("call", SIDES)
def test_autocast_gives_float32_results_close_to_the_reference(call):
    hidden, weight, labels = drawn(N=40)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiated(call, hidden, weight, labels)
        known = differentiated(reference, hidden, weight, labels)
    assert [t.dtype for t in found] == [torch.float32] * 3
    for own, other in zip(found, known, strict=True):
        assert float((own - other).norm() / other.norm()) < 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loss_has_the_dtype_of_its_inputs(dtype):
    hidden, weight, labels = drawn(N=40)
    found = [call(hidden.to(dtype), weight.to(dtype), labels) for call in (optimized, reference)]
    assert [loss.dtype for loss in found] == [dtype] * 2
    assert float((found[0] - found[1]).abs() / found[1]) <= torch.finfo(dtype).eps


def test_gradients_near_the_smallest_float16_numbers_are_not_lost():
    """With 2¹⁸ rows, a row has 2⁻¹⁸ of the gradient: only a few times the smallest positive float16 number."""
    hidden, weight, labels = drawn(N=8)
    hidden, labels = hidden.repeat(2**15, 1), labels.repeat(2**15)
    found = []
    for dtype, call in ((torch.float16, optimized), (torch.float64, reference)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        found.append(torch.autograd.grad(2.0**12 * call(*leaves, labels), leaves))
    for own, truth in zip(*found, strict=True):
        assert float((own.double() - truth).norm() / truth.norm()) < 2**-8


@pytest.mark.parametrize("call", SIDES)
def test_gradient_sum_over_rows_may_exceed_the_float16_range(call):
    """The sum is 81,920: 4096 rows of 20. The interpreter runs a program for each row, so it gets 64 rows of 1280."""
    rows, value = (64, 1280.0) if call is kernel_in_threes else (4096, 20.0)
    hidden = torch.full((rows, 1), value, dtype=torch.float16)
    weight, labels = torch.tensor([[0.0], [5.0]], dtype=torch.float16), torch.zeros(rows, dtype=torch.int64)
    weight.requires_grad_()
    (found,) = torch.autograd.grad(call(hidden, weight, labels).float(), weight)
    assert found.flatten().tolist() == pytest.approx([-value, value], rel=1e-3)


def test_no_gradient_is_computed_under_no_grad(monkeypatch):
    monkeypatch.setattr(module, "_widened_product", None)
    hidden, weight, labels = drawn()
    weight.requires_grad_()
    with torch.no_grad():
        assert not optimized(hidden, weight, labels).requires_grad


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("label", [-1, -99])
def test_negative_label_other_than_minus_100_gives_nan(call, label):
    hidden, weight, labels = drawn()
    labels[2] = label
    assert call(hidden, weight, labels).isnan()


@pytest.mark.interpreted
@pytest.mark.parametrize("label", [11, 60, 10**6])
def test_kernel_returns_nan_for_a_label_beyond_the_vocabulary(label):
    hidden, weight, labels = drawn()
    labels[2] = label
    assert chunked_cross_entropy_triton(hidden, weight, labels).isnan()


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_hidden_or_weight_can_be_requested_alone(which):
    hidden, weight, labels = drawn()
    wanted = (hidden, weight)[which].requires_grad_()
    optimized(hidden, weight, labels).backward()
    assert wanted.grad is not None
    assert (hidden, weight)[1 - which].grad is None


def test_zero_rows_per_chunk_raise_value_error():
    with pytest.raises(ValueError, match="rows=0: at least one row"):
        optimized(*drawn(), rows=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("V", [1, 4, 11, 12])
def test_kernel_processes_a_row_in_blocks(V, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    hidden, weight, labels = drawn(V=V)
    labels[3] = -100
    for own, other in zip(
        differentiated(kernel_in_threes, hidden, weight, labels),
        differentiated(reference, hidden, weight, labels),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.interpreted
def test_logits_of_minus_infinity_are_ignored(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    hidden, labels = torch.ones(1, 1), torch.tensor([2])
    weight = torch.tensor([[-torch.inf], [-torch.inf], [1.0], [1.0]])
    assert chunked_cross_entropy_triton(hidden, weight, labels).item() == pytest.approx(0.6931472)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([0])
    assert optimized(hidden, weight, labels).item() == 0.0
    assert optimized(-hidden, weight, labels).item() == pytest.approx(2e4)
