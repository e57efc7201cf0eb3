"""Shared by all Triton paths: a guarded import, whether kernels can run here, and where to launch them.

Kernel modules import `jit`, `tl` and `triton` from here, so that a machine without Triton still imports them and
takes the PyTorch path. They must not use `from __future__ import annotations`: the interpreter then no longer
recognises `tl.constexpr`.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    # Triton's interpreter is wrong in bfloat16.
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    triton = None
    INTERPRETED = False
    # Enough for kernel modules to be imported: constants with a `.value`, annotations.
    tl = SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))

    def jit(kernel):
        return kernel


# The kernels here use 16-byte loads and TF32 tensor cores: Ampere or newer.
MIN_CAPABILITY = (8, 0)
HOPPER = (9, 0)


def triton_reason() -> str | None:
    """None if Triton kernels can run here (in the interpreter, too), else why not and what to do about it."""
    if triton is None:
        return "triton is not installed; pip install 'triton>=3.6,<3.8' (Linux only)"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CAPABILITY:
        need = ".".join(map(str, MIN_CAPABILITY))
        return f"the GPU's compute capability is below {need}; use a newer one, or the PyTorch path"
    return None


def use_triton(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the kernels serve these tensors: of one of the dtypes, on one GPU that can run them."""
    first = tensors[0]
    if triton is None or not first.is_cuda:
        return False
    if any(t.device != first.device or t.dtype not in dtypes for t in tensors):
        return False
    return torch.cuda.get_device_capability(first.device) >= MIN_CAPABILITY


def has_descriptors(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor can take descriptors of tensors, as on Hopper GPUs and newer ones.

    Off a GPU they can: kernels are interpreted there, or compiled ahead for Hopper.
    """
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= HOPPER


def launching(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Where to launch a kernel on the tensor: Triton takes the current device, not the arguments'.

    For a CPU tensor, that is in the interpreter, overflow is silent as it is on a device.
    """
    if not tensor.is_cuda:
        return np.errstate(all="ignore")
    if tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
