"""What the device can do at most, measured in the same process as the workloads held against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
REPEATS = 5

PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")


@cache
def copy_bytes_per_s(device: str) -> float:
    """Bytes read plus bytes written a second by a large copy: the best of a few."""
    kind = torch.device(device).type
    source = torch.ones(COPY_BYTES[kind] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), kind)
    return 2 * source.numel() * 4 / seconds


@cache
def matmul_flops_per_s(device: str, precision: str) -> float:
    """Operations a second of a large square matrix product on random data: the best of a few."""
    kind = torch.device(device).type
    n = MATMUL_SIZE[kind] // (2 if precision == "float64" else 1)
    dtype = {"tf32": torch.float32}.get(precision) or getattr(torch, precision)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        seconds = _best(lambda: torch.matmul(a, b), kind)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2 * n**3 / seconds


def _best(call: Callable[[], object], kind: str) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        if kind == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            began = perf_counter()
            call()
            times.append(perf_counter() - began)
    return min(times[1:])
