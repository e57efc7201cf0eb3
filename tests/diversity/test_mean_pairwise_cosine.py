from types import SimpleNamespace

import pytest
import torch

from optimized.diversity.mean_pairwise_cosine import mean_pairwise_cosine as optimized
from optimized.diversity.mean_pairwise_cosine import mean_pairwise_cosine_torch, mean_pairwise_cosine_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, sampled, side, size, tensor
from reference.diversity.mean_pairwise_cosine import mean_pairwise_cosine as reference


def embeddings(generator, shape, dtype):
    """Draw rows of any common length, the first two orthogonal, so that the mean is of the order of 1."""
    rows = torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.float64)
    if shape[0] > 1 and shape[1] > 1:
        first, second = rows[0], rows[1]
        rows[1] = second - first * (first @ second) / (first @ first)
    return rows * 10.0 ** float(torch.randint(-6, 7, (), generator=generator))


def traffic(N, D, direction):
    return 4 * N * D * {"forward": 1, "backward": 2, "both": 3}[direction]


mean_pairwise_cosine = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "e": tensor("N", "D", values=sampled(embeddings), layouts=("contiguous", "transposed", "strided", "offset"))
    },
    sizes={"N": size(0, 70), "D": size(2, 390)},
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "compile_linear": compiled(side(mean_pairwise_cosine_torch, devices=("cuda",))),
    },
    variants={"triton": side(mean_pairwise_cosine_triton, available=triton_reason)},
    workloads=[
        Workload("n10", N=10, D=384, device="cuda", repeat=32, speedup=2.0, host_syncs=0, launches=1),
        Workload("n1024", N=1024, D=384, direction="both", device="cuda", repeat=4, speedup=20.0),
        Workload("cpu", N=64, D=384, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(bytes=traffic),
)


SIDES = [reference, optimized, mean_pairwise_cosine_torch]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(mean_pairwise_cosine_triton)


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    assert call(torch.tensor([[3.0, 0.0], [0.0, 2.0]])).item() == pytest.approx(1.0)
    assert call(torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])).item() == pytest.approx(4 / 3)
    assert call(torch.ones(5, 3)).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("call", SIDES)
def test_zero_rows_are_at_distance_one(call):
    e = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    assert call(e).item() == pytest.approx(5 / 6)


@pytest.mark.parametrize("call", [reference, optimized, mean_pairwise_cosine_torch])
def test_float16_rows_may_be_zero_or_long(call):
    # The length of the last row, 96000, is infinite in float16.
    e = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], 4 * [48000.0]], dtype=torch.float16)
    assert call(e).item() == pytest.approx(2 / 3, abs=1e-3)


@pytest.mark.parametrize("call", SIDES)
def test_rows_below_the_minimum_length_are_divided_by_it(call):
    e = torch.tensor([[5e-13, 0.0], [5e-13, 0.0], [2.0, 0.0]], requires_grad=True)
    mean = call(e)
    assert mean.item() == pytest.approx(1 - (0.25 + 0.5 + 0.5) / 3)
    mean.backward()
    # A short row is divided by a constant, so its gradient keeps the component along the row.
    assert e.grad[:, 0].tolist() == pytest.approx([-0.5e12, -0.5e12, 0.0], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("n", [0, 1])
def test_mean_of_no_pairs_is_nan_and_its_gradient_is_zero(call, n):
    e = torch.ones(n, 3, requires_grad=True)
    mean = call(e)
    assert mean.isnan()
    mean.backward()
    assert e.grad.tolist() == [[0.0, 0.0, 0.0]] * n


@pytest.mark.parametrize("call", SIDES)
def test_rows_without_columns_are_at_distance_one(call):
    e = torch.ones(3, 0, requires_grad=True)
    mean = call(e)
    assert mean.item() == 1.0
    mean.backward()
    assert e.grad.shape == (3, 0)


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((2, 1), "kernels"),
        ((3, 2), "kernels"),
        ((5000, 2048), "kernels"),
        ((2, 2049), "torch"),
        ((2, 0), "torch"),
        ((1, 3), "torch"),
        ((0, 3), "torch"),
    ],
)
@pytest.mark.parametrize("gpu", [True, False])
def test_kernels_are_used_on_a_gpu_for_two_or_more_rows_of_1_to_2048_columns(shape, path, gpu, monkeypatch):
    module = "optimized.diversity.mean_pairwise_cosine"
    monkeypatch.setattr(f"{module}.use_triton", lambda e: gpu)
    monkeypatch.setattr(f"{module}._MeanPairwiseCosine", SimpleNamespace(apply=lambda e: "kernels"))
    monkeypatch.setattr(f"{module}.mean_pairwise_cosine_torch", lambda e: "torch")
    assert mean_pairwise_cosine_triton(torch.empty(shape)) == path
    monkeypatch.setattr(f"{module}.mean_pairwise_cosine_triton", lambda e: "asked for kernels")
    assert optimized(torch.empty(shape)) == ("asked for kernels" if gpu and path == "kernels" else "torch")


@pytest.mark.interpreted
@pytest.mark.parametrize(("n", "width"), [(2, 1), (3, 5), (16, 8), (17, 3), (33, 16), (150, 31), (1070, 4)])
def test_the_kernels_write_within_their_outputs(n, width, fences):
    e = torch.randn(n, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mean_pairwise_cosine_triton(e).backward()
    assert fences.intact()


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    e = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (first,) = torch.autograd.grad(mean_pairwise_cosine_triton(e).square(), e, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("call", [reference, optimized, mean_pairwise_cosine_torch])
def test_many_similar_float16_rows_do_not_overflow(call):
    e = torch.ones(400, 8, dtype=torch.float16)
    e[:, 0] = torch.linspace(0.5, 1.5, 400)
    found = call(e)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), reference(e.double()), rtol=0.0, atol=2e-3)
