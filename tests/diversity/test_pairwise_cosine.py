import contextlib
import math
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from scale import FULLY, draws
from torch.utils import cpp_extension

from optimized.diversity import pairwise_cosine_cuda as extension
from optimized.diversity.pairwise_cosine import _choose, _tile, pairwise_cosine_triton, pairwise_cosine_vectorised
from optimized.diversity.pairwise_cosine import pairwise_cosine as optimized
from optimized.kernels import jit, tl, triton_reason
from perfsuite import Cost, Pair, Workload, compiled, sampled, side, size, tensor
from reference.diversity.pairwise_cosine import pairwise_cosine as reference


def embeddings(generator, shape, dtype):
    """Draw rows of any common length, the first two orthogonal, so that the distances are of the order of 1."""
    rows = torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.float64)
    if shape[0] > 1 and shape[1] > 1:
        first, second = rows[0], rows[1]
        rows[1] = second - first * (first @ second) / (first @ first)
    scale = 10.0 ** float(torch.randint(-6, 7, (), generator=generator))
    return rows * scale


def matrix_product(e):
    """Compute the truth in float64; the broadcast does not fit into memory for large N."""
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp(min=1e-12)
    return 1 - unit @ unit.t()


def traffic(N, D, direction):
    forward = 4 * (N * D + N * N)
    backward = 4 * (2 * N * D + N * N)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def arithmetic(N, D, direction):
    # The forward computes half of the symmetric matrix, the backward all of it.
    return N * N * D * {"forward": 1, "backward": 2, "both": 3}[direction]


pairwise_cosine = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        # An expanded row is N equal rows, whose distances are only rounding errors.
        "e": tensor("N", "D", values=sampled(embeddings), layouts=("contiguous", "transposed", "strided", "offset"))
    },
    # In one dimension every distance is exactly 0 or 2, and its gradient is only rounding errors.
    sizes={"N": size(0, 70), "D": size(2, 390)},
    max_examples=draws(cpu=7),
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
        # The limit leaves no room for the broadcast's N x N x D, nor for a second matrix.
        Workload("n1024", N=1024, D=384, device="cuda", speedup=20.0, launches=1, peak_bytes=8 * 2**20),
        Workload("n1024_both", N=1024, D=384, direction="both", device="cuda", speedup=20.0),
        Workload("n2048_both", N=2048, D=384, direction="both", device="cuda", speedup=20.0),
        Workload("n8192", N=8192, D=384, device="cuda", speedup=20.0, peak_bytes=320 * 2**20),
        Workload("cpu", N=64, D=384, direction="both", clock="wall", device="cpu"),
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
def test_edge_sizes_give_constant_distances_and_zero_gradients(call, shape):
    e = torch.ones(shape, requires_grad=True)
    distances = call(e)
    expected = torch.zeros(shape[0], shape[0]) if shape[1] else torch.ones(shape[0], shape[0])
    torch.testing.assert_close(distances, expected, atol=2e-7, rtol=0)
    distances.sum().backward()
    torch.testing.assert_close(e.grad, torch.zeros(shape), atol=1e-6, rtol=0)


@pytest.mark.parametrize("call", SIDES)
def test_rows_below_the_minimum_length_are_divided_by_it(call):
    e = torch.tensor([[0.0, 0.0], [3e-13, 4e-13], [1.0, 0.0]], requires_grad=True)
    distances = call(e)
    expected = [[1.0, 1.0, 1.0], [1.0, 0.75, 0.7], [1.0, 0.7, 0.0]]
    torch.testing.assert_close(distances, torch.tensor(expected))
    distances[0, 2].backward()
    # A clamped length is a constant in the gradient.
    torch.testing.assert_close(e.grad[0], torch.tensor([-1e12, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", [reference, optimized])
def test_rows_of_half_precision_may_be_zero_or_long(call, dtype):
    # The length of the last row, 96000, is infinite in float16.
    e = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], 4 * [48000.0]], dtype=dtype, requires_grad=True)
    distances = call(e)
    expected = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=dtype)
    assert torch.equal(distances, expected)
    distances[1:, 1:].sum().backward()
    assert e.grad.isfinite().all()


@pytest.mark.parametrize("largest", [0, 1536])
@pytest.mark.parametrize("call", SIDES)
def test_self_distance_of_a_short_row_has_a_gradient(call, largest, monkeypatch):
    # The limit chooses the backward kernel or the product for larger sizes; the other sides ignore it.
    monkeypatch.setattr("optimized.diversity.pairwise_cosine.BACKWARD_KERNEL_MAX", largest)
    e = torch.tensor([[3e-13, 4e-13], [3.0, 4.0]], requires_grad=True)
    distances = call(e)
    (distances[0, 0] + distances[1, 1]).backward()
    torch.testing.assert_close(e.grad, torch.tensor([[-6e11, -8e11], [0.0, 0.0]]))


@pytest.mark.parametrize("call", SIDES[1:])
def test_nonfinite_rows_give_the_same_distances_as_the_reference(call):
    # There are more rows than in a tile: in most tiles only the rows of one side are not finite.
    e = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    e[0, 3], e[1, 2] = math.inf, math.nan
    # Rows that are not finite directly after rows whose squares overflow.
    e[5] *= 1e30
    e[6, 0] = math.inf
    e[7] *= 1e30
    e[8, 0] = math.nan
    e[2] *= 1e30  # its squares overflow: its length is infinite, its distance from all others 1
    e[3] *= 1e-30
    torch.testing.assert_close(call(e), reference(e), equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found; install the CUDA toolkit")
def test_cuda_source_compiles(tmp_path):
    command = ["nvcc", "-arch=sm_90", "-cubin", "-o", str(tmp_path / "kernels.cubin"), str(extension.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_available_says_why_the_extension_is_missing():
    reason = extension.available()
    if reason is None:
        pytest.skip("it is there: the pair proves it")
    assert ";" in reason  # the reason; the remedy
    e = torch.randn(4, 8)
    torch.testing.assert_close(extension.pairwise_cosine_cuda(e), pairwise_cosine_vectorised(e))


class OnGpu(torch.Tensor):
    """Tensor that claims to be on a GPU, so that the choice of path is tested without one."""

    is_cuda = True


def counted(monkeypatch, built):
    """Make `_extension` return `built`; return a list that grows by one with each call."""
    asked = []
    monkeypatch.setattr(extension, "_extension", lambda: asked.append(None) or built)
    return asked


def test_extension_is_used_only_for_float32_on_a_gpu(monkeypatch):
    e = torch.randn(4, 8)
    expected = pairwise_cosine_vectorised(e)
    built = SimpleNamespace(forward=lambda e: (torch.full((4, 4), 7.0), torch.ones(4)))
    asked = counted(monkeypatch, built)
    torch.testing.assert_close(extension.pairwise_cosine_cuda(e), expected)
    extension.pairwise_cosine_cuda(e.double().as_subclass(OnGpu))
    assert not asked
    assert (extension.pairwise_cosine_cuda(e.as_subclass(OnGpu)) == 7).all()
    assert len(asked) == 1


def test_missing_extension_falls_back_to_pytorch(monkeypatch):
    asked = counted(monkeypatch, None)
    e = torch.randn(4, 8)
    distances = extension.pairwise_cosine_cuda(e.as_subclass(OnGpu)).as_subclass(torch.Tensor)
    torch.testing.assert_close(distances, pairwise_cosine_vectorised(e))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", None),
        ("gpu", "no CUDA device;"),
        ("toolkit", "nvcc was not found;"),
        ("bin/nvcc", "nvcc was not found;"),
        ("bin/ninja", "ninja was not found;"),
        ("bin/c++", "no C++ compiler was found;"),
    ],
)
def test_available_names_the_missing_device_or_tool(missing, message, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja", "c++"):
        if missing != f"bin/{name}":
            program = tmp_path / "bin" / name
            program.touch(mode=0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: missing != "gpu")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None if missing == "toolkit" else str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    reason = extension.available()
    assert reason is None if message is None else reason.startswith(message)


@pytest.fixture
def forgetful():
    """Clear the cached extension before and after the test."""
    extension._extension.cache_clear()
    yield
    extension._extension.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError])
def test_a_failed_build_warns_once_and_falls_back(error, forgetful, monkeypatch):
    tries = []

    def fail():
        tries.append(None)
        raise error("ninja: build stopped")

    monkeypatch.setattr(extension, "available", lambda: None)
    monkeypatch.setattr(extension, "_build", fail)
    e = torch.randn(4, 8).as_subclass(OnGpu)
    with pytest.warns(RuntimeWarning, match="falls back to PyTorch: the build failed: ninja") as message:
        first, second = extension.pairwise_cosine_cuda(e), extension.pairwise_cosine_cuda(e)
    # The warning names the caller's file, not ours.
    assert [w.filename for w in message] == [__file__]
    assert len(tries) == 1
    assert torch.equal(first, second)


def test_built_extension_is_cached(forgetful, monkeypatch):
    built = SimpleNamespace()
    monkeypatch.setattr(extension, "available", lambda: None)
    monkeypatch.setattr(extension, "_build", lambda: built)
    assert extension._extension() is built
    monkeypatch.setattr(extension, "_build", lambda: SimpleNamespace())
    assert extension._extension() is built


def test_unavailable_extension_is_not_built(forgetful, monkeypatch):
    monkeypatch.setattr(extension, "available", lambda: "no CUDA device; run elsewhere")
    monkeypatch.setattr(extension, "_build", lambda: pytest.fail("built"))
    with pytest.warns(RuntimeWarning, match="falls back to PyTorch: no CUDA device"):
        assert extension._extension() is None


@pytest.mark.parametrize("chosen", [None, "8.0;9.0"])
@pytest.mark.parametrize("fails", [False, True])
def test_build_targets_this_gpu_unless_the_user_sets_an_arch_list(chosen, fails, monkeypatch):
    seen = {}

    def load(**options):
        seen.update(options, arch=os.environ["TORCH_CUDA_ARCH_LIST"])
        if fails:
            raise RuntimeError("build stopped")
        return extension

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cpp_extension, "load_inline", load)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    with pytest.raises(RuntimeError, match="build stopped") if fails else contextlib.nullcontext():
        extension._build()
    assert seen["arch"] == (chosen or "9.0")
    assert "PYBIND11_MODULE" in seen["cpp_sources"][0]
    assert "__global__" in seen["cuda_sources"][0]
    # The variable has its old value.
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == chosen


def test_build_name_depends_on_the_contents_of_the_sources(tmp_path, monkeypatch):
    def name():
        monkeypatch.setattr(cpp_extension, "load_inline", lambda **options: options["name"])
        return extension._build()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    here = name()
    for attribute in ("SOURCE", "BINDING"):
        copy = tmp_path / getattr(extension, attribute).name
        copy.write_bytes(getattr(extension, attribute).read_bytes())
        monkeypatch.setattr(extension, attribute, copy)
    assert name() == here
    names = {here}
    for attribute in ("SOURCE", "BINDING"):
        copy = getattr(extension, attribute)
        copy.write_text(copy.read_text() + "// another revision")
        names.add(name())
    assert len(names) == 3


def test_gradient_of_the_extension_comes_from_its_backward_function(monkeypatch):
    # The extension's two functions, written in PyTorch operations.
    def forward(e):
        assert e.is_contiguous()
        length = torch.linalg.vector_norm(e, dim=-1).clamp(min=1e-12)
        return pairwise_cosine_vectorised(e), 1 / length

    def backward(e, inverse, grad):
        assert grad.is_contiguous()
        with torch.enable_grad():
            e = e.detach().requires_grad_()
            return torch.autograd.grad(pairwise_cosine_vectorised(e), e, grad)[0]

    built = SimpleNamespace(forward=forward, backward=backward)
    e = torch.randn(8, 5).t().requires_grad_()
    weights = torch.randn(5, 5).t()
    (extension._PairwiseCosineCuda.apply(e, built) * weights).sum().backward()
    expected = e.detach().clone().requires_grad_()
    (pairwise_cosine_vectorised(expected) * weights).sum().backward()
    torch.testing.assert_close(e.grad, expected.grad)


@pytest.mark.interpreted
@pytest.mark.parametrize("largest", [0, 1536])
@pytest.mark.parametrize(
    ("n", "width"), [(1, 1), (3, 5), (16, 32), (17, 33), (40, 7), (130, 3), pytest.param(300, 9, marks=FULLY)]
)
def test_the_kernels_write_within_their_outputs(n, width, largest, fences, monkeypatch):
    monkeypatch.setattr("optimized.diversity.pairwise_cosine.BACKWARD_KERNEL_MAX", largest)
    e = torch.randn(n, width, generator=torch.Generator().manual_seed(0), requires_grad=True)
    pairwise_cosine_triton(e).square().sum().backward()
    assert fences.intact()


@pytest.mark.interpreted
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("largest", [0, 1536])
@pytest.mark.parametrize(("n", "width"), [(40, 7), (7, 40), (70, 33), (3, 600), (2, 2)])
def test_both_backward_paths_match_the_float64_gradient(n, width, largest, transposed, monkeypatch):
    monkeypatch.setattr("optimized.diversity.pairwise_cosine.BACKWARD_KERNEL_MAX", largest)
    generator = torch.Generator().manual_seed(0)
    # NaN follows the ends: it reveals a read beyond them, even with a weight of 0.
    e = torch.cat([torch.randn(n, width, generator=generator), torch.full((1, width), math.nan)])[:n]
    e[0] *= 1e-15  # shorter than the minimum length
    # Not symmetric, so that the gradients of a distance and of its mirror image differ.
    weights = torch.full((n + 1, n + 1), math.nan)[:n, :n].copy_(torch.randn(n, n, generator=generator))
    weights = weights.t() if transposed else weights
    got = torch.autograd.grad(pairwise_cosine_triton(e.requires_grad_()), e, weights)[0]
    exact = e.detach().double().requires_grad_()
    expected = torch.autograd.grad(pairwise_cosine_vectorised(exact), exact, weights.double())[0].float()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5 * expected[0].abs().max().item())
    torch.testing.assert_close(got[1:], expected[1:], rtol=1e-5, atol=1e-5)


@jit
def _tiles_kernel(number_ptr, row_ptr, column_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row, column = _tile(tl.load(number_ptr + at))
    tl.store(row_ptr + at, row)
    tl.store(column_ptr + at, column)


@pytest.mark.interpreted
def test_tiles_are_counted_column_by_column():
    # The first and the last tile of each column; at large numbers float32 rounds up to the neighbour.
    size = 2**14
    column = torch.arange(size, dtype=torch.int32)
    first = column * (column + 1) // 2
    for number, expected in ((first, 0 * column), (first + column, column)):
        rows, columns = torch.empty_like(number), torch.empty_like(number)
        _tiles_kernel[(1,)](number, rows, columns, SIZE=size)
        assert torch.equal(columns, column)
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("gpu", [True, False])
def test_kernels_are_used_on_a_gpu(gpu, monkeypatch):
    module = "optimized.diversity.pairwise_cosine"
    monkeypatch.setattr(f"{module}.use_triton", lambda e: gpu)
    monkeypatch.setattr(f"{module}.pairwise_cosine_triton", lambda e: "kernels")
    monkeypatch.setattr(f"{module}.pairwise_cosine_vectorised", lambda e: "vectorised")
    assert optimized(torch.empty(3, 2)) == ("kernels" if gpu else "vectorised")


@pytest.mark.parametrize(("n", "row"), [(0, "a"), (4, "a"), (5, "b"), (8, "b"), (9, "c"), (10**9, "c")])
def test_choose_returns_the_first_row_that_is_large_enough(n, row):
    assert _choose(((4, row, 1), (8, row, 2), (None, row, 3)), n) == (row, " abc".index(row))


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    e = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (first,) = torch.autograd.grad(pairwise_cosine_triton(e).square().sum(), e, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_the_extension_refuses_a_second_derivative():
    built = SimpleNamespace(forward=lambda e: (e @ e.t(), e[:, 0]), backward=lambda e, inverse, grad: grad @ e)
    e = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    distances = extension._PairwiseCosineCuda.apply(e, built)
    (first,) = torch.autograd.grad(distances.square().sum(), e, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
