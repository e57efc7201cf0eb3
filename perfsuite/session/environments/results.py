"""Compare the float64 truths of a workload that two environments computed. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfsuite.records import INPUT

NOT_COMPARED = "the environments draw other values from the same seed: results are not compared"
OF_SUMS = 1e-9
"""Largest relative difference of two sums of the same float64 values in another order."""

Summaries = Mapping[str, tuple[float, ...]]


def are_inputs_equal(here: Summaries, there: Summaries) -> bool:
    """Return whether both environments drew the same inputs."""
    one, other = ({n: s for n, s in both.items() if n.startswith(INPUT)} for both in (here, there))
    return one.keys() == other.keys() and not any(_of_output(name, one[name], other[name]) for name in one)


def difference(here: Summaries, there: Summaries) -> str:
    """Return how the truths of equal inputs differ by more than rounding in the working precision; empty if they do
    not."""
    one, other = ({n: s for n, s in both.items() if not n.startswith(INPUT)} for both in (here, there))
    if one.keys() != other.keys():
        return f"it returns {', '.join(one)} here and {', '.join(other)} there"
    return next((words for name in one if (words := _of_output(name, one[name], other[name]))), "")


def _of_output(name: str, here: Sequence[float], there: Sequence[float]) -> str:
    (count, nonfinite, explained, *sums), (count_, nonfinite_, explained_, *sums_) = here, there
    if count != count_:
        return f"{name} has {count:.0f} elements here and {count_:.0f} there"
    if nonfinite != nonfinite_:
        return f"{name} has {nonfinite:.0f} NaN or infinite elements here and {nonfinite_:.0f} there"
    by_order = OF_SUMS * max(map(abs, (*sums, *sums_)))
    most = max(explained, explained_, by_order)
    rms = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(sums, sums_, strict=True)) / len(sums))
    return f"{name} differs by {rms:.2g} (RMS), of which rounding explains {most:.2g}" if rms > most else ""
