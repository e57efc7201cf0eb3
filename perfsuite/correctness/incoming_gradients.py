"""Draw the incoming gradients of a side's outputs: several kinds, and equal for every side on one draw."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from perfsuite.draws.tensor_values import DRAW_ON_DEVICE, dtype_of, generator_for
from perfsuite.records import Case


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with other strides than a contiguous tensor has."""
    if tensor.ndim == 1:
        return torch.stack([tensor, tensor], 1)[:, 0]
    order = list(range(tensor.ndim))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as a slice of a wider tensor, as the backward pass of a concatenation returns them. With
    four dimensions return them in channels-last format, as the backward pass of a convolution does."""
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] if tensor.ndim else tensor


LARGE, TINY = 2.0**16, 2.0**-40
PLAIN, EXPANDED, SOME_OUTPUTS, SHARED = "plain", "expanded", "of some outputs alone", "shared"
KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    PLAIN: lambda g: g,
    EXPANDED: lambda g: g.flatten()[:1].reshape([1] * g.ndim).expand_as(g) if g.numel() else g,
    "transposed": _transposed,
    "sliced": _sliced,
    "zero": torch.zeros_like,
    "partly zero": lambda g: g.where(g.real > 0, 0.0),
    "large": lambda g: g * LARGE,
    "tiny": lambda g: g * TINY,
    SOME_OUTPUTS: lambda g: g,
    SHARED: lambda g: g,
}
"""Kind of incoming gradients → function that makes one of this kind from a plain one. In training, a sum causes an
expanded gradient, a transposed output a transposed one, a concatenation a slice, loss scaling a large one, and a mean
over many elements a tiny one. The sum of two outputs gives both the same tensor, and an unused output gets none."""
SIZES = {"large": LARGE, "tiny": TINY}
"""Typical magnitude of the gradients of a kind, if it is not 1."""

DRAWN = (PLAIN, *KINDS)
"""Kinds of incoming gradients as they are drawn; plain ones are twice as frequent."""
NEEDS_ORDINARY = ("zero", "partly zero", "large", "tiny", SOME_OUTPUTS)
"""Kinds that are drawn only with ORDINARY values: zero times infinity is NaN, which a kernel need not reproduce."""
ORDINARY = ("normal", "sorted", "repeated")
"""Regimes of values at which zero or large incoming gradients give finite gradients, and tiny ones nonzero
gradients."""


def size_of(kind: str, elements: int) -> float:
    """Return the typical magnitude of a sum over outputs of this many elements, each multiplied by its incoming
    gradient of this kind, relative to one with plain gradients.

    Plain gradients have random signs, so that a sum of n terms is about √n terms large. Expanded gradients are equal,
    so that it can be n terms large.
    """
    return math.sqrt(max(1, elements)) if kind == EXPANDED else SIZES.get(kind, 1.0)


def are_ordinary(case: Case) -> bool:
    """Return whether all values of a draw are ordinary."""
    return all(how.regime in ORDINARY for how in case.inputs.values())


def kind_of(case: Case) -> str:
    """Return the kind of incoming gradients with which the gradients of a draw are proven. It depends on the draw's
    seed."""
    kind = DRAWN[case.seed % len(DRAWN)]
    if kind in NEEDS_ORDINARY and not are_ordinary(case):
        return PLAIN
    return PLAIN if kind in SIZES and case.dtype == "float16" else kind


def in_turn(cases: Iterable[Case]) -> Iterator[Case]:
    """Yield the same draws with seeds that cycle through the kinds, separately among the draws of ordinary values
    without an empty dimension, and among the others."""
    numbers = {True: itertools.count(), False: itertools.count()}
    for case in cases:
        ordinary = are_ordinary(case) and 0 not in case.sizes.values()
        place = next(numbers[ordinary]) % len(DRAWN)
        yield replace(case, seed=case.seed - case.seed % len(DRAWN) + place)


def drawn(
    outputs: Mapping[str, Any], seed: int, dtype: str | None = None, *, kind: str = PLAIN
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (differentiable outputs, incoming gradients of this kind), the same on every side for one seed.

    The gradients are rounded to `dtype`, which is the declared dtype of the optimized side's outputs.
    """
    real = list(real_of(outputs).items())
    if kind == SOME_OUTPUTS and len(real) > 1:  # by position: sides may differ in which outputs need gradients
        random_ = random.Random(seed)
        chosen = random_.sample(range(len(real)), random_.randint(1, len(real) - 1))
        real = [real[place] for place in sorted(chosen)]
    kept = {n: o for n, o in real if o.requires_grad}
    return list(kept.values()), for_outputs(kept, seed, dtype, kind=kind)


def real_of(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the outputs that can have a gradient: tensors of real or complex numbers. They are sorted by name, since
    sides may return the keys of a dictionary in different orders."""
    tensors = {name: o for name, o in sorted(outputs.items()) if isinstance(o, torch.Tensor)}
    return {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}


def for_outputs(
    outputs: Mapping[str, torch.Tensor], seed: int, dtype: str | None = None, *, kind: str = PLAIN
) -> list[torch.Tensor]:
    """Return an incoming gradient of this kind for each of the outputs."""
    weights: list[torch.Tensor] = []
    for name, output in outputs.items():
        large = output.numel() > DRAW_ON_DEVICE
        source = output.device.type if large else "cpu"
        draw = functools.partial(_normal, output.shape, generator_for(seed, f"incoming {name}", source), dtype)
        values = torch.complex(draw(), draw()) if output.is_complex() else draw()
        made = KINDS[kind](values.to(device=output.device, dtype=output.dtype))
        alike = (w for w in weights if (w.shape, w.dtype, w.device) == (made.shape, made.dtype, made.device))
        weights.append(next(alike, made) if kind == SHARED else made)
    return weights


def _normal(shape: torch.Size, generator: torch.Generator, dtype: str | None) -> torch.Tensor:
    """Return normal values in float32, rounded to `dtype`."""
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return values if dtype is None else values.to(dtype_of(dtype)).float()
