"""Common code of all Triton paths: a guarded import, checks whether kernels can run, and the launch context.

Kernel modules import `jit`, `tl` and `triton` from here. A machine without Triton can then still import them, and uses
the PyTorch path. They must not use `from __future__ import annotations`: with it, the interpreter does not recognise
`tl.constexpr`.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # Triton's interpreter computes wrong results in bfloat16.
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    triton = None
    INTERPRETED = False
    # All that the import of kernel modules needs: constants with a `.value`, and annotations.
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))

    def jit(kernel):
        return kernel


# Ampere: the kernels use 16-byte loads and TF32 tensor cores.
MIN_CAPABILITY = (8, 0)
HOPPER = (9, 0)


def triton_reason() -> str | None:
    """Return None if Triton kernels can run here, also in the interpreter; else the reason and a remedy."""
    if triton is None:
        return "triton is not installed; pip install 'triton>=3.6,<3.8' (Linux only)"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CAPABILITY:
        need = ".".join(map(str, MIN_CAPABILITY))
        return f"the GPU's compute capability is below {need}; use a newer one, or the PyTorch path"
    return None


def use_triton(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Return whether kernels can run on these tensors: each has one of the dtypes, and all are on one capable GPU."""
    first = tensors[0]
    if triton is None or not first.is_cuda:
        return False
    if any(t.device != first.device or t.dtype not in dtypes for t in tensors):
        return False
    return torch.cuda.get_device_capability(first.device) >= MIN_CAPABILITY


def has_descriptors(tensor: torch.Tensor) -> bool:
    """Return whether kernels on this tensor can use tensor descriptors, as on Hopper GPUs and newer.

    True for a CPU tensor: its kernels are interpreted, or compiled ahead of time for Hopper.
    """
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= HOPPER


def launching(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return the context in which to launch a kernel on the tensor.

    It makes the tensor's device the current one, because Triton launches on the current device. For a CPU tensor, which
    runs in the interpreter, it silences NumPy's floating-point warnings, such as those of overflow.
    """
    if not tensor.is_cuda:
        return np.errstate(all="ignore")
    if tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
