"""Cache the reference's results on a pair's draws for later proofs, so that each side is compared with the same truth.

The proofs of one pair draw the same cases (`perfsuite.session.proof_item`), and computing a truth takes many runs of
the reference. A truth is stored as bytes, so no side can change it, and each proof gets its own tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from pathlib import Path

import torch

from perfsuite.correctness.equivalence import ReferenceResults
from perfsuite.correctness.reference_task import Task
from perfsuite.correctness.reused_sizes import ReusedSizes
from perfsuite.correctness.side_calls import InputsFactory
from perfsuite.correctness.truths import Discard, Truth, TruthFunction
from perfsuite.declare.pair import Pair
from perfsuite.draws.cases import case_line
from perfsuite.records import Case

MOST_BYTES = 256 << 20
"""Most bytes of the cached truths of one pair. Further truths are computed again when they are needed."""


class CachedReferenceResults(ReferenceResults):
    """Results of one pair's draws, cached."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._truths: dict[tuple[str, ...], bytes | None] = {}
        """Truths by draw, as bytes; None for a draw that is discarded."""
        self._tasks: dict[tuple[str, ...], Task] = {}
        self.sizes = ReusedSizes()

    def truths(
        self,
        pair: Pair,
        case: Case,
        device: str,
        *,
        gradients: bool,
        home: Path | None,
        drawn: InputsFactory | None = None,
    ) -> TruthFunction:
        """Return the truths of the draw, from the cache if an earlier proof of another side computed them. Truths are
        cached only for a pair with variants."""
        established = super().truths(pair, case, device, gradients=gradients, home=home, drawn=drawn)

        @functools.cache
        def known(replicas: int) -> Truth:
            key = (*_key(case, device), str(gradients), str(replicas))
            if key in self._truths:
                kept = self._truths[key]
                if kept is None:
                    raise Discard
                return _read(kept)
            try:
                truth = established(replicas)
            except Discard:
                self._truths[key] = None
                raise
            written = _written(truth) if pair.variants else b""
            if 0 < len(written) <= self._left:
                self._left -= len(written)
                self._truths[key] = written
            return truth

        return known

    def task(self, pair: Pair, case: Case, device: str, *, home: Path | None) -> Task:
        """Return what the draw shows about the reference, from the cache if an earlier proof computed it."""
        key = _key(case, device)
        if key not in self._tasks:
            self._tasks[key] = super().task(pair, case, device, home=home)
        return self._tasks[key]


def _key(case: Case, device: str) -> tuple[str, ...]:
    return device, case.dtype, case_line(case)


def _written(truth: Truth) -> bytes:
    """Return the truth as bytes; empty if an output cannot be serialised, such as a tensor of some subclass."""
    stream = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(
            {field.name: getattr(truth, field.name) for field in dataclasses.fields(Truth) if field.init}, stream
        )
        return stream.getvalue()
    return b""


def _read(written: bytes) -> Truth:
    return Truth(**torch.load(io.BytesIO(written), weights_only=False))


_latest: list[tuple[Pair, CachedReferenceResults]] = []


def cached_results(pair: Pair) -> CachedReferenceResults:
    """Return the cached results of this pair's draws. Those of the previous pair are dropped, since its proofs are
    done."""
    if not _latest or _latest[0][0] is not pair:
        _latest[:] = [(pair, CachedReferenceResults())]
    return _latest[0][1]
