"""Convert outputs to float64, and compute their norms and differences. It takes few operations, because a proof
compares thousands of outputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from perfsuite.correctness.execution import Leaf

COMPARED_ON_CPU = 1 << 20
"""Most elements of an output that is compared on the CPU. An operation on this many takes about a millisecond there. On
a GPU that eleven other processes use, waiting for the GPU takes longer."""
SMALL_NORM, LARGE_NORM = 1e-120, 1e150
"""Between these norms, no scaling is needed before squaring in float64: the error by underflow is less than the
rounding error."""


def as_double(leaf: Leaf) -> torch.Tensor:
    """Return the leaf in float64, on the CPU if it is small, since on a GPU each of the many operations of a comparison
    has to wait."""
    if isinstance(leaf, torch.Tensor):
        leaf = _real(leaf.detach())
        return (leaf.cpu() if leaf.numel() <= COMPARED_ON_CPU else leaf).double()
    return torch.tensor(float(leaf or 0.0), dtype=torch.float64)


class Doubles:
    """Leaves by name, each converted by `as_double`. Small leaves on a GPU are copied to the CPU together, because each
    copy has to wait for the GPU."""

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        *,
        copied: Callable[[torch.Tensor], bool] = lambda leaf: leaf.is_cuda,
    ) -> None:
        self._leaves, self._copied = leaves, copied
        self._doubles: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._doubles is None:
            self._doubles = self._together()
        if name not in self._doubles:
            self._doubles[name] = as_double(self._leaves[name])
        return self._doubles[name]

    def _together(self) -> dict[str, torch.Tensor]:
        groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, leaf in self._leaves.items():
            if isinstance(leaf, torch.Tensor) and _is_ordinary(leaf) and self._copied(leaf):
                values = _real(leaf.detach())
                groups[values.device, values.dtype][name] = values
        found: dict[str, torch.Tensor] = {}
        for group in groups.values():
            counts = [values.numel() for values in group.values()]
            if len(group) > 1 and sum(counts) <= COMPARED_ON_CPU:
                parts = as_double(torch.cat([values.reshape(-1) for values in group.values()])).split(counts)
                found |= {n: part.view(v.shape) for (n, v), part in zip(group.items(), parts, strict=True)}
        return found


def _is_ordinary(leaf: torch.Tensor) -> bool:
    """Return whether the leaf can be copied together with others."""
    return (
        leaf.layout == torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
        and (leaf.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or leaf.is_complex())
    )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rms(leaf: Leaf) -> float:
    """Return the root mean square of the leaf's finite elements."""
    values = as_double(leaf)
    return rms_of(values, float(torch.linalg.vector_norm(values)))


def rms_of(tensor: torch.Tensor, norm: float) -> float:
    """Return the `rms` of a tensor with this 2-norm. Its elements are read only if the norm is not enough."""
    if SMALL_NORM < norm < LARGE_NORM:
        return norm / math.sqrt(_real(tensor.detach()).numel())
    values = as_double(tensor)
    if not values.any():
        return 0.0
    finite = values[values.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    # Scaled, since squares in float64 overflow above 1e154 and underflow below 1e-154.
    return largest * math.sqrt(float(((finite / largest) ** 2).mean())) if largest else 0.0


def norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return the 2-norm of each tensor in float64; NaN if an element is NaN. Synchronises with each device once."""
    found: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    every = list(tensors)
    for tensor in every:
        found[tensor.device].append(torch.linalg.vector_norm(_real(tensor.detach()), dtype=torch.float64))
    known = {device: iter(torch.stack(each).tolist()) for device, each in found.items()}
    return [next(known[tensor.device]) for tensor in every]


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all elements are finite. If their sum is not finite, each element is checked, since a sum of
    finite elements may overflow."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def finite(values: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of the finite elements; None if all are finite."""
    return None if is_finite(values) else values.isfinite()


def finite_size(values: torch.Tensor, are_finite: torch.Tensor | None) -> torch.Tensor:
    """Return the absolute values, with zero for each element that is not finite according to `finite`."""
    return values.abs() if are_finite is None else torch.where(are_finite, values, 0.0).abs()


def difference(a: torch.Tensor, b: torch.Tensor, period: float | None) -> torch.Tensor:
    """Return a − b, with zero where either is not finite; modulo the period, in [−period/2, period/2), if there is
    one."""
    delta = a - b
    if not is_finite(delta):
        delta = torch.where(a.isfinite() & b.isfinite(), delta, 0.0)
    return torch.remainder(delta + period / 2, period) - period / 2 if period else delta


def same_nonfinite(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the shapes are the same, and NaN and the infinities are in the same places."""
    if a.shape != b.shape:
        return False
    if math.isfinite(float((a - b).sum())):
        return True  # a difference is finite only if both are
    return bool(
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.isposinf(), b.isposinf())
        and torch.equal(a.isneginf(), b.isneginf())
    )
