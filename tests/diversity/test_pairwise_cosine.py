import math
import shutil
import subprocess

import pytest
import torch

from optimized.diversity import pairwise_cosine_cuda as extension
from optimized.diversity.pairwise_cosine import pairwise_cosine as optimized
from optimized.diversity.pairwise_cosine import pairwise_cosine_triton, pairwise_cosine_vectorised
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, sampled, side, size, tensor
from reference.diversity.pairwise_cosine import pairwise_cosine as reference


def embeddings(generator, shape, dtype):
    """Rows of any common length, the first two at right angles, so that the distances are of the order of 1."""
    rows = torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.float64)
    if shape[0] > 1 and shape[1] > 1:
        first, second = rows[0], rows[1]
        rows[1] = second - first * (first @ second) / (first @ first)
    scale = 10.0 ** float(torch.randint(-6, 7, (), generator=generator))
    return rows * scale


def matrix_product(e):
    """The truth in float64: the broadcast does not fit where N is large."""
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp(min=1e-12)
    return 1 - unit @ unit.t()


def traffic(N, D, direction):
    forward = 4 * (N * D + N * N)
    backward = 4 * (2 * N * D + N * N)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def arithmetic(N, D, direction):
    # Half of the symmetric matrix forward; all of it backward.
    return N * N * D * {"forward": 1, "backward": 2, "both": 3}[direction]


pairwise_cosine = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        # One row expanded is N equal rows: then every distance is nothing but rounding.
        "e": tensor("N", "D", values=sampled(embeddings), layouts=("contiguous", "transposed", "strided", "offset"))
    },
    # In one dimension every distance is exactly 0 or 2, and its gradient nothing but rounding.
    sizes={"N": size(0, 70), "D": size(2, 390)},
    truth=matrix_product,
    rivals={
        "compile": compiled(side(matrix_product, devices=("cuda",))),
        "cuda": side(extension.pairwise_cosine_cuda, devices=("cuda",), available=extension.available),
    },
    variants={
        "triton": side(pairwise_cosine_triton, available=triton_reason),
        "cuda": side(extension.pairwise_cosine_cuda, devices=("cuda",), available=extension.available),
    },
    workloads=[
        Workload("n2", N=2, D=384, device="cuda", repeat=32, speedup=1.2, host_syncs=0, launches=1),
        Workload("n10", N=10, D=384, device="cuda", repeat=32, speedup=1.2, launches=1),
        Workload("n128", N=128, D=384, device="cuda", repeat=16, speedup=2.0, launches=1),
        # No room for the N x N x D of the broadcast, nor for a second matrix.
        Workload("n1024", N=1024, D=384, device="cuda", speedup=20.0, launches=1, peak_bytes=8 * 2**20),
        Workload("n1024_both", N=1024, D=384, direction="both", device="cuda", speedup=20.0),
        Workload("n2048_both", N=2048, D=384, direction="both", device="cuda", speedup=20.0),
        Workload("n8192", N=8192, D=384, device="cuda", speedup=20.0, peak_bytes=320 * 2**20),
        Workload("cpu", N=64, D=384, direction="both", clock="wall", device="cpu", speedup=2.0),
    ],
    cost=Cost(bytes=traffic, flops=arithmetic, precision="float32"),
)

SIDES = [reference, optimized, pairwise_cosine_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(pairwise_cosine_triton)


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    e = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [1.0, 1.0]])
    half = 1 - math.sqrt(0.5)
    expected = [[0, 1, 2, half], [1, 0, 1, half], [2, 1, 0, 2 - half], [half, half, 2 - half, 0]]
    torch.testing.assert_close(call(e), torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (3, 0), (3, 1)])
def test_edge_sizes(call, shape):
    e = torch.ones(shape, requires_grad=True)
    distances = call(e)
    expected = torch.zeros(shape[0], shape[0]) if shape[1] else torch.ones(shape[0], shape[0])
    torch.testing.assert_close(distances, expected, atol=2e-7, rtol=0)
    distances.sum().backward()
    torch.testing.assert_close(e.grad, torch.zeros(shape), atol=1e-6, rtol=0)


@pytest.mark.parametrize("call", SIDES)
def test_short_rows(call):
    e = torch.tensor([[0.0, 0.0], [3e-13, 4e-13], [1.0, 0.0]], requires_grad=True)
    distances = call(e)
    expected = [[1.0, 1.0, 1.0], [1.0, 0.75, 0.7], [1.0, 0.7, 0.0]]
    torch.testing.assert_close(distances, torch.tensor(expected))
    distances[0, 2].backward()
    # Where the length is clamped it is a constant.
    torch.testing.assert_close(e.grad[0], torch.tensor([-1e12, 0.0]))


@pytest.mark.parametrize("largest", [0, 1536])
@pytest.mark.parametrize("call", SIDES)
def test_a_short_row_s_distance_from_itself_has_a_gradient(call, largest, monkeypatch):
    # By the backward kernel and by the product that serves larger sizes: the others do not look at the limit.
    monkeypatch.setattr("optimized.diversity.pairwise_cosine.BACKWARD_KERNEL_MAX", largest)
    e = torch.tensor([[3e-13, 4e-13], [3.0, 4.0]], requires_grad=True)
    distances = call(e)
    (distances[0, 0] + distances[1, 1]).backward()
    torch.testing.assert_close(e.grad, torch.tensor([[-6e11, -8e11], [0.0, 0.0]]))


@pytest.mark.parametrize("call", SIDES[1:])
def test_not_finite_rows_stand_where_the_reference_has_them(call):
    e = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    e[0, 3], e[1, 2] = math.inf, math.nan
    e[2] *= 1e30  # its squares overflow: infinitely long, at distance 1 from all
    e[3] *= 1e-30
    torch.testing.assert_close(call(e), reference(e), equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found; install the CUDA toolkit")
def test_cuda_source_compiles(tmp_path):
    command = ["nvcc", "-arch=sm_90", "-cubin", "-o", str(tmp_path / "kernels.cubin"), str(extension.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_extension_says_why_it_is_not_there():
    reason = extension.available()
    if reason is None:
        pytest.skip("it is there: the pair proves it")
    assert ";" in reason  # the reason; the remedy
    e = torch.randn(4, 8)
    torch.testing.assert_close(extension.pairwise_cosine_cuda(e), pairwise_cosine_vectorised(e))


def test_a_failed_build_warns_and_falls_back(monkeypatch):
    def fail():
        raise RuntimeError("ninja: build stopped")

    monkeypatch.setattr(extension, "available", lambda: None)
    monkeypatch.setattr(extension, "_build", fail)
    extension._extension.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="falls back to PyTorch: the build failed: ninja"):
            assert extension._extension() is None
    finally:
        extension._extension.cache_clear()
