"""Choose the memory layouts that a proof draws, and convert tensors to them."""

from __future__ import annotations

import torch

from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import EXPANDED, LAYOUTS, MIDDLE_EXPANDED, Integers, Sampled, TensorSpec


def layouts(pair: Pair, name: str, spec: TensorSpec) -> tuple[str, ...]:
    """Return the layouts that a proof draws for this input, or for the tensors in it."""
    allowed = spec.layouts or LAYOUTS
    written = name in pair.changed or pair.adjust is not None
    # An expanded tensor has several elements at one address. Writing to it is undefined, and values that depend on
    # each other could not keep their relation.
    apart = written or (isinstance(spec.values, Sampled) and spec.layouts is None)
    left_out = EXPANDED if apart else () if len(spec.dims) > 2 else (MIDDLE_EXPANDED,)
    return tuple(layout for layout in allowed if layout not in left_out) or ("contiguous",)


def expanded_dim(spec: TensorSpec, layout: str, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which a tensor is expanded; None if it is not, or if no such dimension has two
    elements.

    The dimension does not depend on the seed, so other values at the same sizes have the same layout. It is always the
    first if values depend on their row: a tensor that the pair's own function draws, or bounds by column.
    """
    if layout not in EXPANDED:
        return None
    last = len(shape) - 1
    together = isinstance(spec.values, Sampled) or (
        isinstance(spec.values, Integers) and isinstance(spec.values.high, tuple)
    )
    if layout == "expanded" or together:
        among = range(min(1, len(shape)))
    else:
        among = range(1, last) if layout == MIDDLE_EXPANDED else range(last, 0, -1)
    return next((dim for dim in among if shape[dim] > 1), None)


def with_layout(data: torch.Tensor, layout: str, align: int = 0) -> torch.Tensor:
    """Return the same values in another memory layout. With the layout "offset", data begins at a multiple of `align`
    bytes.

    The memory between the elements is poisoned, so that reading it is detected.
    """
    if layout == "transposed" and data.ndim >= 2:
        return data.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "permuted" and data.ndim >= 3:
        return data.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "channels last" and data.ndim >= 3:
        return data.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "slice" and data.ndim >= 3:
        dim = 1 + data.numel() % (data.ndim - 2)  # any except the first and the last
        shape = [n + (d == dim) for d, n in enumerate(data.shape)]
        view = _poisoned(data, tuple(shape)).narrow(dim, 0, data.shape[dim])
        view.copy_(data)
        return view
    if layout in ("rows", "slice", "permuted", "channels last") and data.ndim >= 2:
        view = _poisoned(data, (*data.shape[:-1], 3 * data.shape[-1]))[..., : data.shape[-1]]
        view.copy_(data)
        return view
    if layout in ("strided", "transposed", "rows", "slice", "permuted", "channels last") and data.ndim >= 1:
        wide = _poisoned(data, (*data.shape[:-1], 2 * data.shape[-1]))
        view = wide[..., ::2]
        view.copy_(data)
        return view
    if layout == "offset":
        skipped = max(1, align // data.element_size()) * (1 + data.numel() % 3)
        flat = _poisoned(data, (data.numel() + skipped,))
        view = flat[skipped:].view(data.shape)
        view.copy_(data)
        return view
    return data


def _poisoned(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    made = like.new_empty(shape)
    fill_poison(made)
    return made


def fill_poison(tensor: torch.Tensor) -> None:
    """Fill floating-point tensors with NaN, integer tensors with their largest value, and bool tensors with True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is expanded, so that several elements have the same address."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as one dimension, including the memory between its elements."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())
