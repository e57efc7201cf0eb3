"""Context managers for torch's global settings, and what a device supports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch

from perfsuite.correctness.convolutions import changed
from perfsuite.errors import PerfsuiteError


@contextmanager
def tf32_products(*, allowed: bool) -> Iterator[None]:
    """Set whether float32 matrix products and convolutions may use TF32 (10-bit mantissa) on tensor cores.

    The newer settings, `fp32_precision` of each operator, are set too, since they decide if both kinds were used. The
    older ones are set where PyTorch can read them, so that code within the block can; a newer setting that contradicts
    an older one makes it unreadable.
    """
    backends: Any = torch.backends
    operators = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    with ExitStack() as stack:
        for operator in operators:
            stack.callback(setattr, operator, "fp32_precision", operator.fp32_precision)
        # An older setting overwrites newer ones, so it is restored before them, and set before them.
        with suppress(RuntimeError):
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high" if allowed else "highest")
        with suppress(RuntimeError):
            stack.enter_context(changed(backends.cudnn, "allow_tf32", allowed))
        for operator in operators:
            operator.fp32_precision = "tf32" if allowed else "ieee"
        yield


def deterministic_convolutions() -> AbstractContextManager[None]:
    """Restrict cuDNN to algorithms with a fixed summation order, so that every run gives the same bits."""
    return changed(torch.backends.cudnn, "deterministic", True)


def cudnn_benchmark(*, on: bool) -> AbstractContextManager[None]:
    """Set whether cuDNN times its algorithms at the first call of each shape and then uses the fastest."""
    return changed(torch.backends.cudnn, "benchmark", on)


FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores."""


def fp8_reason(device: torch.device | str) -> str | None:
    """Return why FP8 products cannot run on a device; None if they can. A CPU computes them in other precisions."""
    device = torch.device(device)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return None
    return (
        f"{torch.cuda.get_device_name(device)} has no FP8 tensor cores; GPUs of compute capability 8.9 and above have"
    )


def need_fp8(device: torch.device | str) -> None:
    """Raise PerfsuiteError, with the remedy, if FP8 products cannot run on a device."""
    if reason := fp8_reason(device):
        raise PerfsuiteError(f"fp8_linear: {reason}; switch it off")
