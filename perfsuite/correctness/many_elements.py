"""Check a call on more elements than 32-bit signed indices can address: an index that overflows accesses wrong memory.

The answer is compared with the reference's own, since there is no memory for a float64 truth. So only gross errors are
found, such as those of an overflow.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.specs import TensorSpec, elements, tensor_spec
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import case_line
from perfsuite.draws.tensor_values import dtype_of
from perfsuite.errors import in_one_line
from perfsuite.records import Case
from perfsuite.system.time_limit import CutOff, cut_off

ELEMENTS = 1 << 31
"""Smallest number of elements that a 32-bit signed integer cannot represent."""
MORE = 1 << 20
"""Number of elements beyond that, in which an overflow is detected."""
PERIOD = 10_007
"""Period of the values along the long dimension: a prime, so that an overflow does not access equal values."""
COPIES = 5
"""Factor on the inputs' bytes that must fit into the free memory: copies, outputs and intermediate results."""
LONGEST_S = 10.0
"""Time limit of a side's call in seconds. A side that exceeds it is not checked."""
GROSS = 0.02
"""Share of (value + RMS) above which an error is gross. Kernels that sum this many numbers in another order differ by
less."""
FEWEST = 64
"""Fewest elements that must be wrong, because a few may differ much if a sum of millions of terms cancels."""
CHUNK = 1 << 26


def check(probe: Probe) -> None:
    """Raise NotEquivalent if the optimized side is grossly wrong on more than 2³¹ elements.

    Nothing is tried if no size can be so large, or if the memory or the reference does not allow it.
    """
    pair = probe.pair
    found = long_case(pair, probe.case)
    if found is None or set(pair.consumes) or pair.changed:
        return
    case, symbol = found
    if not fits(pair, case, probe.device):
        return
    with _alone():
        try:
            _compare(probe, case, symbol)
        finally:
            gc.collect()
            if torch.device(probe.device).type == "cuda":
                torch.cuda.empty_cache()


def long_case(pair: Pair, case: Case) -> tuple[Case, str] | None:
    """Return (the draw with one size so large that a tensor has more than 2³¹ elements, the symbol of that size); None
    if no size can be so large."""
    tensors = [spec for spec in pair.inputs.values() if isinstance(spec, TensorSpec)]
    if len(tensors) < len(pair.inputs) and any(_holds_tensors(s) for s in pair.inputs.values()):
        return None
    largest = max(tensors, key=lambda spec: len(spec.dims), default=None)
    for dim in largest.dims if largest is not None else ():
        if not isinstance(dim, str) or dim not in pair.symbols or dim in pair.sizes:
            continue
        assert largest is not None
        beside = elements(largest, {**case.sizes, dim: 1})
        if not beside:
            continue
        sizes = {**case.sizes, dim: -(-(ELEMENTS + MORE) // beside)}
        if pair.allows(sizes):
            return replace(case, sizes=sizes, inputs={}), dim
    return None


def _holds_tensors(spec: Any) -> bool:
    return not isinstance(spec, TensorSpec) and tensor_spec(spec) is not None


def fits(pair: Pair, case: Case, device: str) -> bool:
    """Return whether the free memory is enough for this draw."""
    specs = [spec for spec in pair.inputs.values() if isinstance(spec, TensorSpec)]
    needed = sum(dtype_of(s.dtype or case.dtype).itemsize * elements(s, case.sizes) for s in specs)
    return COPIES * needed <= free_bytes(device)


def free_bytes(device: str) -> int:
    """Return the free memory of the device in bytes."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let only one of the user's processes at a time enter the block, since there is no memory for two."""
    path = os.path.join(tempfile.gettempdir(), f"perfsuite-many-elements-{os.getuid()}.lock")
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compare(probe: Probe, case: Case, symbol: str) -> None:
    try:
        values = _built(probe.pair, case, symbol, probe.device)
        expected = _called(probe, as_side(probe.pair.reference), values)
    except Exception:  # too little memory, or the reference does not support this size
        return
    if expected is None:
        return
    try:
        produced = _called(probe, probe.side, values)
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        raise probe.fault(f"raises {in_one_line(error)} on {_many(case)}") from None
    if produced is None:
        return
    for name, leaf in expected.items():
        got = produced.get(name)
        if isinstance(leaf, torch.Tensor) and isinstance(got, torch.Tensor) and leaf.shape == got.shape:
            wrong = _wrong(leaf, got)
            if wrong >= FEWEST:
                raise probe.fault(
                    f"is wrong on {_many(case)}: {wrong} elements of {name} are far from the reference's, as where an "
                    f"index of 32 bits overflows"
                )


def _many(case: Case) -> str:
    return f"more than {ELEMENTS} elements ({case_line(case)})"


def _built(pair: Pair, case: Case, symbol: str, device: str) -> dict[str, Any]:
    """Return the inputs of a draw of size PERIOD, repeated along the long dimension."""
    length = case.sizes[symbol]
    short = replace(case, sizes={**case.sizes, symbol: min(length, PERIOD)})
    values = make.build(pair, short, device)
    return {
        name: _repeated(values[name], spec, symbol, length) if isinstance(spec, TensorSpec) else values[name]
        for name, spec in pair.inputs.items()
    }


def _repeated(tensor: torch.Tensor, spec: TensorSpec, symbol: str, length: int) -> torch.Tensor:
    for at, dim in enumerate(spec.dims):
        if dim == symbol:
            index = torch.arange(length, device=tensor.device) % tensor.shape[at]
            tensor = tensor.index_select(at, index)
    return tensor


def _called(probe: Probe, side: Side, values: dict[str, Any]) -> Leaves | None:
    """Call the side and return its leaves; None if it takes too long."""
    with cut_off(LONGEST_S) as timer, torch.no_grad(), execution.quiet(side):
        try:
            leaves = execution.run(execution.callable_of(side), probe.pair, values, gradients=False, seed=0)
            if torch.device(probe.device).type == "cuda":
                torch.cuda.synchronize()
        except (CutOff, Exception):
            if not timer.up:
                raise
            return None
    return leaves


def _wrong(expected: torch.Tensor, got: torch.Tensor) -> int:
    """Return how many elements differ grossly; for integers, how many differ."""
    pairs = list(zip(expected.flatten().split(CHUNK), got.flatten().split(CHUNK), strict=True))
    if not (expected.is_floating_point() or expected.is_complex()):
        return sum(int((a != b).sum()) for a, b in pairs)
    square = sum(float(a.abs().double().nan_to_num(posinf=0.0).square().sum()) for a, _ in pairs)
    rms = math.sqrt(square / max(1, expected.numel()))

    def differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        grossly = (a - b).abs() > GROSS * (a.abs() + rms)
        return torch.where(a.isinf(), a != b, grossly | (a.isnan() != b.isnan()))

    return sum(int(differ(a, b).sum()) for a, b in pairs)
