"""Estimate the reference's own error in each output of a draw, from its errors on replicas of the draw."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from perfsuite.correctness import differences
from perfsuite.correctness.rule import K
from perfsuite.declare.pair import Pair


class ReferenceErrors:
    """The reference's error in one output, accumulated over the replicas."""

    def __init__(
        self, own: torch.Tensor, truth: torch.Tensor, period: float | None, *, eps: float, roundings: float, first: int
    ) -> None:
        """`roundings` is the number of roundings by which the inputs of a replica differ. `first` is 0 in float64,
        where the reference is its own truth, so that only the replicas show its error; otherwise 1."""
        self.truth, self.period, self.eps, self.roundings = truth, period, eps, roundings
        self.rms_t = differences.rms(truth)
        self.own = differences.difference(own, self.truth, period).abs()
        self.moved = torch.zeros_like(self.own)
        self.size_t = differences.finite_size(self.truth, differences.finite(self.truth))
        self.samples, self.moves = first, 0

    def add(self, r: torch.Tensor, t: torch.Tensor, scale: float) -> None:
        """Add a neighbour's reference `r` and truth `t`. `scale` is the magnitude of the inputs."""
        if r.shape != self.truth.shape or t.shape != self.truth.shape:
            return
        # hypot instead of sums of squares, because squares of float64's own errors would underflow.
        self.own = self.own.hypot(differences.difference(r, t, self.period))
        self.samples += 1
        moved = differences.difference(t, self.truth, self.period).abs()
        # A jump (a broken tie, a crossed threshold) is not the effect of rounding on a continuous function.
        jump = (self.size_t + (self.rms_t + scale)) * math.sqrt(K * self.eps)
        self.moved = self.moved.hypot(torch.where(moved <= jump, moved, 0.0))
        self.moves += 1

    def error(self) -> torch.Tensor:
        return self.own / math.sqrt(max(1, self.samples))

    def one_rounding(self) -> torch.Tensor:
        return self.moved / self.roundings / math.sqrt(max(1, self.moves))

    def ill_conditioned(self, share: float = 1.0) -> bool:
        """Return whether the output consists only of rounding errors, if its error is this share of the estimated
        one."""
        own = share * differences.rms(self.error())
        return own > 0 and K * own > math.sqrt(K * self.eps) * self.rms_t


def any_ill_conditioned(rounding: Collection[str], names: Collection[str]) -> bool:
    """Return whether any output, or every gradient, is ill-conditioned. A single gradient that is exactly zero, such as
    that of a bias before softmax, consists only of rounding errors."""
    gradients = {name for name in names if name.startswith("gradient of ")}
    return not gradients.issuperset(rounding) or (bool(gradients) and gradients.issubset(rounding))


def running_maximum(errors: dict[str, torch.Tensor], pair: Pair) -> dict[str, torch.Tensor]:
    """Return for a stateful pair the largest error of the reference up to each step; for others, the errors as they
    are."""
    if not pair.is_stateful:
        return errors
    largest: dict[str, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, error in errors.items():
        base = name.rpartition(" after ")[0]
        before = largest.get(base)
        if before is not None and before.shape == error.shape:
            error = torch.maximum(error, before)
        result[name] = largest[base] = error
    return result
