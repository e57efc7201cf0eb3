"""Cosine distances of all pairs as a CUDA C++ extension (polychromic, technique 003.5).

Coalesced loads, tiles in shared memory, float32 arithmetic on the ordinary cores. Kept beside the Triton kernels,
which use the tensor cores, for machines without Triton and as their rival.
"""

import functools
import hashlib
import os
import shutil
import warnings
from pathlib import Path
from types import ModuleType

import torch

from optimized.diversity.pairwise_cosine import pairwise_cosine_vectorised

SOURCE = Path(__file__).with_suffix(".cu")
BINDING = SOURCE.with_name("pairwise_cosine_cuda_binding.cpp")


def pairwise_cosine_cuda(e: torch.Tensor) -> torch.Tensor:
    """`1 - cos(e_i, e_j)` of every two rows, [N, N] from [N, D].

    float32 on CUDA takes the extension, built at its first use; any other tensor the PyTorch form. Where the
    extension cannot be built, a warning says why, once, and the PyTorch form serves. No second derivative.

    Source: polychromic, technique 003.5.
    """
    if e.is_cuda and e.dtype == torch.float32 and (extension := _extension()) is not None:
        return _PairwiseCosineCuda.apply(e, extension)
    return pairwise_cosine_vectorised(e)


def available() -> str | None:
    """None if the extension can be built and run here, else why not and what to do about it."""
    if not torch.cuda.is_available():
        return "no CUDA device; run on a machine with an NVIDIA GPU and a CUDA build of PyTorch"
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return "nvcc was not found; install the CUDA toolkit and set CUDA_HOME"
    if shutil.which("ninja") is None:
        return "ninja was not found; pip install ninja"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler was found; install g++, or set CXX"
    return None


@functools.cache
def _extension() -> ModuleType | None:
    reason = available()
    if reason is None:
        try:
            return _build()
        # Whatever goes wrong in a compiler, a linker or a file system, the PyTorch form can serve.
        except (RuntimeError, OSError, ImportError) as error:
            reason = f"the build failed: {error}"
    warnings.warn(f"pairwise_cosine_cuda falls back to PyTorch: {reason}", RuntimeWarning, stacklevel=3)
    return None


def _build() -> ModuleType:
    from torch.utils import cpp_extension

    binding, kernels = BINDING.read_text(), SOURCE.read_text()
    # By contents: copies of this file elsewhere share one build, and another revision's never takes its place.
    digest = hashlib.sha256((binding + kernels).encode()).hexdigest()[:12]
    major, minor = torch.cuda.get_device_capability()
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    # For this device alone, unless the user has said otherwise.
    os.environ["TORCH_CUDA_ARCH_LIST"] = chosen or f"{major}.{minor}"
    try:
        return cpp_extension.load_inline(
            name=f"perfsuite_pairwise_cosine_{digest}",
            cpp_sources=[binding],
            cuda_sources=[kernels],
            no_implicit_headers=True,
            extra_cflags=["-O2"],
            extra_cuda_cflags=["-O3"],
        )
    finally:
        if chosen is None:
            del os.environ["TORCH_CUDA_ARCH_LIST"]


class _PairwiseCosineCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, extension):
        e = e.contiguous()
        distances, inverse = extension.forward(e)
        ctx.save_for_backward(e, inverse)
        ctx.extension = extension
        return distances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        e, inverse = ctx.saved_tensors
        return ctx.extension.backward(e, inverse, grad.contiguous()), None
