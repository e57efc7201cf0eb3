"""Measure the device's peak bandwidth and throughput, in the same process as the workloads that are compared with
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any

import torch

from perfsuite.declare.pair import Pair
from perfsuite.declare.workload import Workload
from perfsuite.errors import PairError
from perfsuite.records import Limit

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
REPEATS = 5

PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")


@cache
def copy_bytes_per_s(device: str) -> float:
    """Return the bytes read plus the bytes written per second by a large copy: the best of a few."""
    kind = torch.device(device).type
    source = torch.ones(COPY_BYTES[kind] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = best_s(lambda: target.copy_(source), kind)
    return 2 * source.numel() * 4 / seconds


@cache
def matmul_flops_per_s(device: str, precision: str) -> float:
    """Return the operations per second of a large square matrix product on random data: the best of a few.

    Raises PairError for a precision in which there is no such product.
    """
    if precision not in PRECISIONS:
        raise PairError(f"a cost's precision={precision!r} is not one of {', '.join(PRECISIONS)}")
    kind = torch.device(device).type
    # Products in float64 are slow on every device, and a CPU may emulate half precision.
    smaller = precision == "float64" or (kind == "cpu" and precision in ("bfloat16", "float16"))
    n = MATMUL_SIZE[kind] // (2 if smaller else 1)
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    with _float32_products("tf32" if precision == "tf32" else "ieee"):
        seconds = best_s(lambda: torch.matmul(a, b), kind)
    return 2 * n**3 / seconds


def limit(pair: Pair, workload: Workload, dtype: str, device: str) -> Limit | None:
    """Return the device's limit for a workload; None if the pair declares no cost."""
    if pair.cost is None:
        return None
    moved, operations = pair.cost.of(workload.sizes, workload.direction)
    bounds = []
    if moved:
        rate = copy_bytes_per_s(device)
        bounds.append((moved / rate, "memory", rate))
    if operations:
        precisions = {pair.cost.precision_in(dtype)}
        if device == "cpu":  # products in half precision may be much slower there than products of widened inputs
            precisions.add(pair.cost.precision)
        rate = max(matmul_flops_per_s(device, precision) for precision in precisions)
        bounds.append((operations / rate, "compute", rate))
    if not bounds:
        return None
    seconds, by, rate = max(bounds)
    return Limit(seconds=seconds, by=by, bytes=moved, flops=operations, ceiling=rate)


def forget() -> None:
    """Forget the ceilings, so that each is measured again when it is next needed."""
    copy_bytes_per_s.cache_clear()
    matmul_flops_per_s.cache_clear()


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    # Not allow_tf32: it cannot be read where a project has used this setting, and it cannot represent "medium".
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def best_s(call: Callable[[], object], kind: str) -> float:
    """Return the seconds of one call: the least of REPEATS after a warm-up call. `kind` is "cuda" or "cpu"."""
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
