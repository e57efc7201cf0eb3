"""Compare one output of a side with the truth, by the rule in `rule.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from perfsuite.correctness import bias, differences
from perfsuite.correctness.differences import Doubles
from perfsuite.correctness.execution import Leaf
from perfsuite.correctness.forms import is_real, judge_form
from perfsuite.correctness.rule import MOVED_NORM, K, Norms, dtype_of_leaf, underflow
from perfsuite.correctness.tally import Tally
from perfsuite.correctness.truths import DERIVATIVES, Truth, period_of
from perfsuite.declare.pair import Pair
from perfsuite.declare.workload import TF32
from perfsuite.draws.tensor_values import dtype_of
from perfsuite.errors import NotEquivalent


def judge_output(
    pair: Pair,
    truth: Truth,
    name: str,
    got: Leaf,
    doubles: Doubles,
    side: str,
    tally: Tally | None,
    *,
    strict_strides: bool,
) -> None:
    """Raise NotEquivalent if the errors of this output of a side exceed their budget. Add the figures to `tally`.

    `doubles` are the side's outputs in float64.
    """
    reference = truth.reference[name]
    where = f"{pair.name}: {name} of the {side} side"
    if _is_unused_gradient(where, name, reference, got):
        return
    dtype = dtype_of(pair.output_dtype) if pair.output_dtype and name.startswith("output") else None
    judge_form(
        where,
        reference,
        got,
        dtype=dtype,
        any_dtype=truth.declared_precision,  # works in a lower precision, but still returns the inputs' dtype
        marks=strict_strides,
        strides=strict_strides and pair.strides != "any",
        plain=truth.plain,
    )
    if not is_real(reference):
        _judge_exactly(where, reference, got, _excuse(truth.excused, name, got), tally)
        return
    compared = _Compared(where, _expected(truth, name, dtype), doubles[name])
    compared.judge_nonfinite()
    if pair.signed_zeros:
        compared.judge_zeros()
    compared.excuse(tally)
    if tally is not None:
        tally.elements += compared.got.numel()
    if compared.is_empty():
        return
    compared.judge_errors(tally)
    if not truth.declared_precision:
        _judge_digits(where, reference, got)
    # Rounding errors add up over steps, and a product in TF32 truncates digits.
    if pair.is_stateful or pair.precision == TF32 or name in truth.rounding:
        return
    draw = compared.leaning(dtype_of_leaf(got))
    if draw is None:
        return
    if message := bias.alone(name, draw):
        raise NotEquivalent(f"{pair.name}, {side} side: {message}")
    if tally is not None:
        tally.biases.note(name, draw)


def _is_unused_gradient(where: str, name: str, reference: Leaf, got: Leaf) -> bool:
    """Return whether one gradient is None and the other zeros, which means the same: the input is unused.

    Raises NotEquivalent if only one of the two leaves is a tensor and this does not hold.
    """
    if reference is None and isinstance(got, torch.Tensor):
        tensor, message = got, f"{where} is a tensor where the reference has None"
    elif got is None and isinstance(reference, torch.Tensor):
        tensor, message = reference, f"{where} is None where the reference has a value"
        if name.startswith("gradient of "):
            message += (
                "; if nobody needs it, declare gradients=False, or tensor(…, differentiable=False) for this input"
            )
    else:
        return False
    if name.startswith("gradient of ") and not tensor.any():
        return True
    raise NotEquivalent(message)


class _Expected:
    """A real output of the truth in float64, and the error budget of each of its elements.

    It depends on the truth alone, so all answers to one draw are compared with the same object.
    """

    def __init__(self, truth: Truth, name: str, dtype: torch.dtype | None) -> None:
        self.is_rounding = name in truth.rounding
        self.is_derivative = name.startswith(DERIVATIVES)
        self.truth, self.reference = (of[name] for of in truth.doubles)
        self.own, self.moved = truth.errors[name], truth.moved[name]
        self.undefined = truth.undefined.get(name)
        mask = _excuse(truth.excused, name, truth.leaves[name])
        self.excusable = mask.to(self.truth.device) if mask is not None and mask.any() else None
        """Mask of the elements that the pair excuses; None if there are none."""
        self.period = period_of(truth.periods, name)
        self.eps = max(truth.eps, torch.finfo(dtype).eps) if dtype else truth.eps
        # If the terms of all elements cancel, exactly in the reference, then a rounding residue is no error.
        self.least = max(underflow(truth.reference[name]), K * self.eps * truth.terms.get(name, 0.0))

    @functools.cached_property
    def finite(self) -> torch.Tensor | None:
        """Mask of the finite elements; None if all are finite."""
        return differences.finite(self.truth)

    @functools.cached_property
    def size(self) -> torch.Tensor:
        """Absolute value of each element of the truth; 0 where it is not finite."""
        return differences.finite_size(self.truth, self.finite)

    @functools.cached_property
    def norms(self) -> Norms:
        """Norms over all finite elements."""
        return self.norms_of(self.truth, self.own, self.moved)

    @functools.cached_property
    def budget(self) -> torch.Tensor:
        """The error budget of each element."""
        return self.norms.of_elements(self.own, self.moved, self.size)

    @functools.cached_property
    def leans(self) -> torch.Tensor:
        """Mask of the elements whose errors are tested for a bias. Small elements are left out, because the error of
        one that is flushed to zero is its whole size."""
        large = self.size > self.least / self.eps
        return large if self.finite is None else large & self.finite

    @functools.cached_property
    def beside_errors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(Errors of the reference, their usual sizes, truth): a side's errors are compared with these."""
        of_reference = differences.difference(self.reference, self.truth, self.period)
        return of_reference, self.own.hypot(MOVED_NORM / K * self.moved), self.truth

    def norms_of(self, truth: torch.Tensor, own: torch.Tensor, moved: torch.Tensor) -> Norms:
        """Return the norms over some of the elements."""
        rms = differences.rms
        return Norms(eps=self.eps, truth=rms(truth), error=rms(own), moved=rms(moved), least=self.least)


def _expected(truth: Truth, name: str, dtype: torch.dtype | None) -> _Expected:
    """Return the expected output. The truth caches it unless it is large, because one truth may be compared with tens
    of answers."""
    key = name, dtype
    found: _Expected = truth.expected.get(key) or _Expected(truth, name, dtype)
    if found.truth.numel() <= differences.COMPARED_ON_CPU:
        truth.expected[key] = found
    return found


class _Compared:
    """A real output in float64, with the expected output."""

    def __init__(self, where: str, by: _Expected, got: torch.Tensor) -> None:
        self.where, self.by, self.got = where, by, got
        if by.undefined is not None and by.undefined.shape == self.got.shape:
            self.got = torch.where(by.undefined.to(self.got.device), by.truth, self.got)
        self.excused: torch.Tensor | None = None
        """Mask of the elements that are not compared, because the pair excuses them."""

    @functools.cached_property
    def delta(self) -> torch.Tensor:
        return differences.difference(self.got, self.by.truth, self.by.period)

    @functools.cached_property
    def error(self) -> torch.Tensor:
        return self.delta.abs()

    @property
    def considered(self) -> torch.Tensor | None:
        """Mask of the elements that are compared; None if all are."""
        if self.excused is None:
            return self.by.finite
        return ~self.excused if self.by.finite is None else self.by.finite & ~self.excused

    def is_empty(self) -> bool:
        """Return whether there is no element to compare."""
        considered = self.considered
        return not self.got.numel() or (considered is not None and not considered.any())

    def judge_nonfinite(self) -> None:
        """Raise NotEquivalent if NaN or an infinity is in another place than in the truth."""
        o, t = self.got, self.by.truth
        if differences.same_nonfinite(o, t):
            return
        if self.by.is_derivative:  # the order of its factors decides between NaN and an infinity
            wrong = o.isfinite() != t.isfinite()
        else:
            wrong = (o.isnan() != t.isnan()) | (o.isinf() != t.isinf()) | (o.isinf() & t.isinf() & (o != t))
        if not wrong.any():
            return
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{self.where} is {_item(o, at):.9g}{_place(at)} where the truth is {_item(t, at):.9g}: "
            f"NaN and infinities must be in the same places ({int(wrong.sum())} of {o.numel()} elements)"
        )

    def judge_zeros(self) -> None:
        """Raise NotEquivalent if a zero has another sign than in both the truth and the reference's own answer."""
        got, truth, reference = self.got, self.by.truth, self.by.reference
        zero = (truth == 0) & (got == 0)
        wrong = zero & (truth.signbit() == reference.signbit()) & (truth.signbit() != got.signbit())
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            raise NotEquivalent(
                f"{self.where} is {_item(got, at)}{_place(at)} where the truth is {_item(truth, at)}: the sign of zero "
                f"counts, as signed_zeros=True says ({int(wrong.sum())} of {got.numel()} elements)"
            )

    def excuse(self, tally: Tally | None) -> None:
        """Leave out the elements that the pair excuses and whose errors exceed their budget."""
        if self.by.excusable is None:
            return
        beyond = self.by.excusable & self.by.truth.isfinite() & (self.error > self.by.budget)
        if beyond.any():
            self.excused = beyond
            _count_excused(tally, beyond, 0)

    def judge_errors(self, tally: Tally | None) -> None:
        """Raise NotEquivalent if the error of an element, or of the output as a whole, exceeds its budget."""
        by, considered, error = self.by, self.considered, self.error
        share, norms, truth = error / by.budget, by.norms, by.truth
        if considered is not None:
            share = torch.where(considered, share, 0.0)
            error, truth, own, moved = (x[considered] for x in (error, truth, by.own, by.moved))
            norms = by.norms_of(truth, own, moved)
        worst, norm, count = float(share.max()), differences.rms(error), error.numel()
        if norm > norms.budget(count):
            count = 1 if by.is_rounding else truth.unique().numel()
        beyond_norm = norm / norms.budget(count)
        if tally is not None:
            tally.worst = max(tally.worst, worst, beyond_norm)
        if worst > 1.0:
            at = _unravel(int(share.argmax()), share.shape)
            beyond = int((share > 1).sum())
            raise NotEquivalent(
                f"{self.where} is wrong{_place(at)}: {_item(self.got, at):.9g}, truth {_item(by.truth, at):.9g}, "
                f"reference {_item(by.reference, at):.9g}; error {_item(self.error, at):.3g} is {_times(worst)} times "
                f"its budget of {_item(by.budget, at):.3g} ({beyond} of {share.numel()} elements beyond budget)",
                excess=worst,
            )
        if beyond_norm > 1.0:
            raise NotEquivalent(
                f"{self.where} is inaccurate as a whole: its RMS error {norm:.3g} is {_times(beyond_norm)} times its "
                f"budget of {norm / beyond_norm:.3g} (the reference's own is {by.norms.error:.3g})",
                excess=beyond_norm,
            )

    def leaning(self, dtype: torch.dtype) -> bias.DrawBias | None:
        """Return the bias of the errors of an output in this dtype; None if there are too few elements."""
        leans = self.by.leans if self.excused is None else self.by.leans & ~self.excused
        kept = (self.delta, *self.by.beside_errors)
        if not leans.all():
            kept = (kept[0][leans], kept[1][leans], kept[2][leans], kept[3][leans])
        return bias.draw_of(*kept, eps=self.by.eps, dtype=dtype)


def _judge_exactly(where: str, reference: Leaf, got: Leaf, excuse: torch.Tensor | None, tally: Tally | None) -> None:
    if not isinstance(got, torch.Tensor) or not isinstance(reference, torch.Tensor):
        if got != reference:
            raise NotEquivalent(f"{where} is {got!r} instead of {reference!r}")
        return
    wrong = got != reference
    if excuse is not None:
        _count_excused(tally, wrong & excuse, got.numel())
        wrong = wrong & ~excuse
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{where} differs{_place(at)}: {got[tuple(at)].item()} instead of {reference[tuple(at)].item()} "
            f"(whole numbers and bools must be equal)"
        )


FEWEST_DIGITS, MOST_BY_CHANCE = 64, 0.5
"""Smallest number of different float16 values from which their precision can be detected, and the share of the
reference's values that fit bfloat16, below which a side whose values all fit does not do so by chance."""


def _judge_digits(where: str, reference: Leaf, got: Leaf) -> None:
    """Raise NotEquivalent if every float16 element is also a bfloat16 number, while most elements of the reference are
    not."""
    if not isinstance(got, torch.Tensor) or not isinstance(reference, torch.Tensor) or got.dtype != torch.float16:
        return
    values = _normal(got)
    if (values.bfloat16() != values).any() or values.unique().numel() < FEWEST_DIGITS:
        return
    usual = _normal(reference).unique()
    share = float((usual.bfloat16() == usual).double().mean())
    if usual.numel() >= FEWEST_DIGITS and share < MOST_BY_CHANCE:
        raise NotEquivalent(
            f"{where} has the digits of bfloat16: each of its elements is a number of that format, of the reference's "
            f'{share:.0%}; declare precision="bfloat16" if that is meant'
        )


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that are finite and not subnormal. Subnormal ones have few digits in any format."""
    return tensor.detach()[tensor.isfinite() & (tensor.abs() >= torch.finfo(tensor.dtype).tiny)]


def _excuse(excused: Any, name: str, leaf: Leaf) -> torch.Tensor | None:
    """Return the mask of `excused_elements` for the output's real elements."""
    elements = excused_elements(excused, name, leaf)
    if elements is None or not isinstance(leaf, torch.Tensor):
        return None
    return elements.unsqueeze(-1) if leaf.is_complex() else elements  # both parts of a complex number


def excused_elements(excused: Any, name: str, leaf: Leaf) -> torch.Tensor | None:
    """Return the mask of the elements of this output that the pair excuses; None if there is no mask of this shape. A
    mask of another shape is for another output."""
    mask = excused.get(name) if isinstance(excused, Mapping) else excused
    if mask is None or not isinstance(leaf, torch.Tensor):
        return None
    try:
        return torch.as_tensor(mask, device=leaf.device).expand(leaf.shape)
    except RuntimeError:
        return None


def _count_excused(tally: Tally | None, near: torch.Tensor, elements: int) -> None:
    if tally is not None:
        tally.excused += int(near.sum())
        tally.elements += elements


def _item(tensor: torch.Tensor, at: list[int]) -> float:
    return float(tensor[tuple(at)]) if at else float(tensor)


def _times(excess: float) -> str:
    """Return the number with three digits. A number a little above 1 is not rounded to 1."""
    return f"{excess:.3g}" if excess >= 1.005 else f"{max(excess, 1.001):.3f}"


def _place(at: list[int]) -> str:
    """Return the index of an element as text; empty for a scalar, which has none."""
    return f" at {at}" if at else ""


def _unravel(index: int, shape: tuple[int, ...] | torch.Size) -> list[int]:
    at: list[int] = []
    for size in reversed(shape):
        at.insert(0, index % size)
        index //= size
    return at
