"""Compare the form of an output (kind, shape, dtype, device and strides), and test whether tensors are identical."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfsuite.correctness.execution import Leaf
from perfsuite.draws import inputs as make
from perfsuite.draws.memory_layouts import overlaps
from perfsuite.errors import NotEquivalent


def judge_form(
    where: str,
    reference: Leaf,
    got: Leaf,
    *,
    dtype: torch.dtype | None,
    any_dtype: bool,
    marks: bool,
    strides: bool,
    plain: bool,
) -> None:
    """Raise NotEquivalent if `got` has another form than the reference's output.

    `dtype` is the declared dtype of a floating-point output. With `any_dtype`, the dtype is not compared. With `marks`,
    `got` must not have any of MARKS that the reference's output does not have. With `strides`, the classes of strides
    are compared too; they must be equal if the inputs are `plain`, which means contiguous.
    """
    if isinstance(reference, torch.Tensor) != isinstance(got, torch.Tensor):
        raise NotEquivalent(f"{where} is {kind(got)} where the reference has {kind(reference)}")
    if not isinstance(reference, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(got) is not type(reference):
            raise NotEquivalent(
                f"{where} is {kind(got)}, of type {_type(got)}, where the reference has a {_type(reference)}"
            )
        return
    forms: tuple[tuple[str, object, object], ...] = (
        ("shape", tuple(reference.shape), tuple(got.shape)),
        ("dtype", dtype if dtype and reference.is_floating_point() else reference.dtype, got.dtype),
        ("device", reference.device, got.device),
    )
    for what, expected, actual in forms:
        if expected != actual and not (what == "dtype" and any_dtype):
            raise NotEquivalent(f"{where} has {what} {actual} where the reference has {expected}")
    for what, is_so in MARKS.items():
        if marks and is_so(got) and not is_so(reference):
            raise NotEquivalent(f"{where} is {what}, which the reference's is not")
    if not strides or got.numel() <= 1:
        return
    found, expected = strides_class(got), strides_class(reference)
    # Operations may keep the layout of their inputs or not. Code that needs a certain layout makes one.
    weakest = expected if plain else max(expected, KEPT, key=STRIDES.index)
    if STRIDES.index(found) > STRIDES.index(weakest) or (plain and found != expected):
        raise NotEquivalent(
            f"{where} is {found} in memory where the reference is {expected} (strides {got.stride()}); "
            f'if its callers need not rely on that, declare strides="any"'
        )


MARKS: Mapping[str, Callable[[torch.Tensor], bool]] = {
    "an inference tensor": torch.Tensor.is_inference,
    "a view that negates its memory": torch.Tensor.is_neg,
    "a view that conjugates its memory": torch.Tensor.is_conj,
}
"""Properties of a tensor that its values do not show. Autograd refuses an inference tensor. A kernel that reads the
memory of such a view by its address gets other values."""
STRIDES = ("contiguous", "channels last", "permuted", "strided", "overlapping")
"""Classes of strides, from strongest to weakest. Later code may rely on the reference's class, but on no stronger
one."""
KEPT = "permuted"
"""Class of strides that the output of an elementwise operation may have if its inputs are not contiguous."""


def strides_class(tensor: torch.Tensor) -> str:
    """Return the class of the tensor's strides: one of STRIDES."""
    if tensor.is_contiguous():
        return "contiguous"
    if overlaps(tensor):
        return "overlapping"
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    order = sorted(range(tensor.ndim), key=lambda d: tensor.stride(d), reverse=True)
    return "permuted" if tensor.permute(order).is_contiguous() else "strided"


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every element, NaN being equal to NaN."""
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() or a.is_complex() else a == b
    return bool(same.all())


def same_values(one: Any, other: Any) -> bool:
    """Return whether all tensors in two nested values of the same structure are equal in every element."""
    return all(
        a.shape == b.shape and identical(a, b)
        for (_, a), (_, b) in zip(make.tensors_in(one), make.tensors_in(other), strict=True)
    )


def kind(leaf: Leaf) -> str:
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else f"{leaf!r}"


def unusual_kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that is not dense, so that its elements cannot be compared; empty for a dense
    tensor."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "meta"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch._").removeprefix("torch.")


def _type(leaf: Leaf) -> str:
    return type(leaf).__name__


def is_real(leaf: Leaf) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return isinstance(leaf, float)
