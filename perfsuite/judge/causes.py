"""Find the likely cause of a candidate's wrong answer, for the message of its verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from perfsuite.correctness import diagnosis
from perfsuite.correctness.execution import Leaves, only_tensors
from perfsuite.correctness.tally import EXCUSED_SHARE
from perfsuite.correctness.truths import Truth
from perfsuite.declare.pair import Pair

JUMP, UNITS = 1e-3, 8
"""Smallest difference that rounding does not explain, relative to the largest element of an output, and as a multiple
of the dtype's eps."""
FEW = 2
"""Number of elements that count as few in an output of any size: where two values tie, two elements are exchanged."""
MOST_KEPT = 4096
"""Largest number of earlier answers whose digests are kept."""


@dataclass(slots=True)
class Causes:
    """Likely causes of wrong answers. It remembers the answers to earlier draws by their digests."""

    pair: Pair
    earlier: dict[bytes, bytes] = field(default_factory=dict)
    """Digest of a candidate's answer → digest of the truth for the same draw."""

    def note(self, truth: Truth, outputs: Sequence[torch.Tensor]) -> None:
        """Remember the candidate's answer to a draw."""
        if len(self.earlier) < MOST_KEPT:
            self.earlier[_digest(outputs)] = _digest(only_tensors(truth.leaves))

    def of(self, truth: Truth, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> str:
        """Return a clause that names the likely cause, starting with "; ", or an empty string if none is found.

        `inputs` is empty if the inputs are not known.
        """
        right = _digest(only_tensors(truth.leaves))
        if any(map(_has_numbers, outputs)) and self.earlier.get(_digest(outputs), right) != right:
            return "; it is the answer that it gave to other inputs"
        several = [t for t in outputs if t.numel() > 1]
        if several and all(map(_is_constant, several)) and not all(map(_is_constant, only_tensors(truth.leaves))):
            has_other_cause = (inputs and all(map(_is_constant, inputs))) or _may_underflow(truth, several)
            constant = "; all elements are the same"
            return constant if has_other_cause else f"{constant}: it does not read its inputs"
        produced: Leaves = dict(zip(truth.reference, outputs, strict=True))
        if words := diagnosis.related(truth, produced):
            return f"; {words}"
        name = diagnosis.precision_of(self.pair, truth, produced, strict_strides=False)
        allowed = " (--tf32 allows TF32)" if name and "TF32" in name and self.pair.precision is None else ""
        if name:
            size = "" if diagnosis.is_rounding(truth, produced) else "as large as "
            return f"; its error is {size}that of {name}{allowed}"
        both = zip(outputs, only_tensors(truth.reference), strict=True)
        return next(filter(None, (beside_steps(self.pair, got, expected) for got, expected in both)), "")


def beside_steps(pair: Pair, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a clause that names the remedy if only few elements of the output differ, by much more than rounding, as
    they do where several answers are right."""
    if pair.excuse is not None or got.numel() <= FEW or got.is_complex():
        return ""
    other = got != expected
    if got.is_floating_point():
        exact, least = expected.double(), max(JUMP, UNITS * torch.finfo(got.dtype).eps)
        other = (got.double() - exact).abs() > least * exact.abs().nan_to_num(0, 0, 0).max()
    if not 0 < int(other.sum()) <= max(FEW, EXCUSED_SHARE * got.numel()):
        return ""
    return (
        "; if these few elements have several right answers, as next to a step of round() or where values tie, let the "
        "reference define excuse()"
    )


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether an element is neither 0 nor infinite nor NaN, which an operation may return for many inputs."""
    return bool((tensor.isfinite() & (tensor != 0)).any())


def _is_constant(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.flatten()[0]).all())


def _may_underflow(truth: Truth, outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the outputs are 0 and the truth is so small that its terms may be 0 in half precision."""
    small = torch.finfo(torch.float16).tiny
    return not any(map(torch.any, outputs)) and all(bool((t.abs() < small).all()) for t in only_tensors(truth.leaves))


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        found.update(plain.view(-1).view(torch.uint8).cpu().numpy().data)
    return found.digest()
