"""What a wrong answer of a candidate looks like: one clause for the verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from perfsuite import equivalence
from perfsuite.diagnosis import PRECISIONS
from perfsuite.equivalence import NotEquivalent, Truth
from perfsuite.execution import Leaves
from perfsuite.pair import Pair
from perfsuite.relations import reaches, relation

MOST_KEPT = 4096
"""Digests of earlier answers."""


@dataclass(slots=True)
class Causes:
    """Knows the answers to earlier draws by their digests."""

    pair: Pair
    earlier: dict[bytes, bytes] = field(default_factory=dict)
    """Digest of an answer → that of the right one."""

    def note(self, truth: Truth, outputs: Sequence[torch.Tensor]) -> None:
        """Remember an answer."""
        if len(self.earlier) < MOST_KEPT:
            self.earlier[_digest(outputs)] = _digest(list(_tensors(truth.leaves)))

    def of(self, truth: Truth, outputs: Sequence[torch.Tensor]) -> str:
        """A clause that names the likely cause, with what separates it from the words before; or nothing."""
        right = _digest(list(_tensors(truth.leaves)))
        if self.earlier.get(_digest(outputs), right) != right:
            return "; it is the answer that it gave to other inputs"
        if all(bool((t == t.flatten()[0]).all()) for t in outputs if t.numel() > 1):
            return "; all elements are the same: it does not read its inputs"
        found = {relation(o, t) for o, t in zip(outputs, _tensors(truth.leaves), strict=True)}
        if len(found) == 1 and (words := found.pop()):
            return f"; {words}"
        return self._precision(truth, outputs)

    def _precision(self, truth: Truth, outputs: Sequence[torch.Tensor]) -> str:
        produced: Leaves = dict(zip(truth.reference, outputs, strict=True))
        for name, eps in PRECISIONS.items():
            try:
                if eps > 2 * truth.eps and any(
                    reaches(o, t, eps) for o, t in zip(outputs, _tensors(truth.leaves), strict=True)
                ):
                    equivalence.judge(self.pair, replace(truth, eps=eps), produced, strict_strides=False)
                    return f"; its error is that of {name}"
            except NotEquivalent:
                continue
        return ""


def _tensors(leaves: Leaves) -> list[torch.Tensor]:
    return [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return found.digest()
