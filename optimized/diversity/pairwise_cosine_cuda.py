"""Cosine distances of all pairs of rows as a CUDA C++ extension (polychromic, technique 003.5).

It uses coalesced loads, tiles in shared memory and float32 arithmetic on the CUDA cores. It is an alternative to
the Triton kernels, which use the tensor cores, for machines without Triton, and a rival in their benchmark.
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
    """Return `1 - cos(e_i, e_j)` for all pairs of rows of e [N, D], [N, N].

    float32 on CUDA uses the extension, which is built at its first use and has no second derivative. Any other tensor
    uses PyTorch operations. If the extension cannot be built, one warning says why, and PyTorch operations are used.

    Source: polychromic, technique 003.5.
    """
    if e.is_cuda and e.dtype == torch.float32 and (extension := _extension()) is not None:
        return _PairwiseCosineCuda.apply(e, extension)
    return pairwise_cosine_vectorised(e)


def available() -> str | None:
    """Return None if the extension can be built and run here, else why not and what to do about it."""
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
        # Any failure of the compiler, the linker or the file system falls back to PyTorch.
        except (RuntimeError, OSError, ImportError) as error:
            reason = f"the build failed: {error}"
    warnings.warn(f"pairwise_cosine_cuda falls back to PyTorch: {reason}", RuntimeWarning, stacklevel=3)
    return None


def _build() -> ModuleType:
    from torch.utils import cpp_extension

    binding, kernels = BINDING.read_text(), SOURCE.read_text()
    # The name has a digest of the sources: equal copies elsewhere share one build, and other revisions have their own.
    digest = hashlib.sha256((binding + kernels).encode()).hexdigest()[:12]
    major, minor = torch.cuda.get_device_capability()
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    # Compile for this device only, unless the user has set the variable.
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
