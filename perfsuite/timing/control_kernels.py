"""Time the control kernels, which no change of a project can slow down. They are timed with every workload.

When the seconds of a side have changed since they were accepted, the control kernels distinguish a slower device from
a slower side. They are short, so that the device is still in the state in which the workload left it. The gate does not
test them. Their times are stored as `anchors`.
"""

from __future__ import annotations

from time import perf_counter

import torch

from perfsuite.records import COPY, LAUNCH, MATMUL
from perfsuite.timing.roofline import best_s

COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}
"""Bytes to copy, by kind of device. On a GPU this is several times the L2 cache."""
MATMUL_SIZE = {"cuda": 4096, "cpu": 384}
LAUNCHES = 200
"""Number of consecutive short calls: enough that the host's time for the calls dominates, not the timer's."""


def measure(device: str) -> dict[str, float]:
    """Return the seconds of each control kernel on this device: a copy, a matrix product, and one short call including
    the host's time."""
    kind = torch.device(device).type
    source = torch.ones(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    n, dtype = MATMUL_SIZE[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    a = torch.ones(n, n, dtype=dtype, device=device)
    product = torch.empty_like(a)
    return {
        COPY: best_s(lambda: target.copy_(source), kind),
        MATMUL: best_s(lambda: torch.matmul(a, a, out=product), kind),
        LAUNCH: min(_launch_s(source[:1], kind) for _ in range(3)),
    }


def _launch_s(one: torch.Tensor, kind: str) -> float:
    if kind == "cuda":
        torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(LAUNCHES):
        one.neg_()
    if kind == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - began) / LAUNCHES
