"""Check on a draw that the reference is a meaningful task: its answer must depend on its inputs, and must be neither
random nor rounded to half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import differences
from perfsuite.correctness.execution import Leaf, Leaves
from perfsuite.correctness.forms import is_real, same_values
from perfsuite.correctness.rule import TRUTH_EPS
from perfsuite.correctness.side_calls import run, upcast
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import PairError
from perfsuite.records import Case


@dataclass(frozen=True, slots=True)
class Task:
    """Findings about the reference on one draw, independent of the tested side."""

    answers_differ: bool | None = None
    """Whether the reference has another answer for other inputs; None if there are no other inputs."""
    roundings: bool = False
    """Whether the draw had enough values to check that the reference does not round."""
    fault: str = ""


def task_of(pair: Pair, case: Case, device: str, home: Path | None) -> Task:
    """Return the findings on a draw. Raises PairError if the reference is random or rounds to half precision."""
    side = as_side(pair.reference)

    def answer(drawn: dict[str, Any], i: Case) -> Leaves:
        step_inputs = upcast(lambda step: make.build_step(pair, i, device, step))
        return run(side, pair, make.upcast(drawn), i, False, step_inputs)

    case = replace(case, inputs={})  # ordinary values, because zeros would be equal in both draws
    drawn = make.build(pair, case, device, home=home)
    others = replace(case, seed=case.seed ^ 0x2545F49)
    other = make.build(pair, others, device, home=home)
    if same_values(drawn, other) and not pair.step_inputs:
        return Task()  # nothing was drawn: constant or recorded inputs, or empty ones
    here, again, there = answer(drawn, case), answer(drawn, case), answer(other, others)
    for name, leaf in here.items():
        if is_real(leaf) and is_random(differences.as_double(leaf), differences.as_double(again.get(name))):
            raise PairError(
                f"{pair.name}: {name} of the reference differs between two calls on the same inputs: let it take its "
                f"random numbers, or what they come from, as an input, e.g. generator()"
            )
    if not any(leaf.numel() if isinstance(leaf, torch.Tensor) else 1 for leaf in here.values()):
        return Task()
    looked = False
    if shows_roundings(pair):
        looked = _check_roundings(pair, drawn, other, here, answer)
    differ = any(_differs(leaf, there.get(name)) for name, leaf in here.items())
    return Task(answers_differ=differ, roundings=looked)


def shows_roundings(pair: Pair) -> bool:
    """Return whether the reference's roundings can be checked."""
    return pair.precision is None and pair.excuse is None and not pair.is_stateful


def draws_of(pair: Pair) -> int:
    """Return the maximum number of draws of a proof on which the reference is checked by `task_of`."""
    return TASK_DRAWS if shows_roundings(pair) else FEW_TASK_DRAWS


def is_random(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two answers in float64 differ by more than a different order of summation explains."""
    return a.shape != b.shape or differences.rms(differences.difference(a, b, None)) > RANDOM * differences.rms(a)


RANDOM = 1e-3
"""RMS difference, relative to the RMS of the answer, above which an answer counts as random. Atomic sums in float64
differ by much less."""


def _differs(a: Leaf, b: Leaf) -> bool:
    if not is_real(a) or not is_real(b):
        return not (torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b)
    x, y = differences.as_double(a), differences.as_double(b)
    if x.shape != y.shape or not differences.same_nonfinite(x, y):
        return True
    finite = x.isfinite()
    return bool(((x - y).abs()[finite] > TRUTH_EPS * (x.abs()[finite] + differences.rms(x))).any())


def _check_roundings(
    pair: Pair,
    drawn: dict[str, Any],
    other: dict[str, Any],
    here: Leaves,
    answer: Callable[[dict[str, Any], Case], Leaves],
) -> bool:
    """Check that the values of a reference in float64 change if its inputs change slightly. Values that are rounded
    internally do not.

    Returns whether there were enough values for the check. Raises PairError if they do not change. `other` are the
    inputs of another draw.
    """
    case = Case(dtype="float64", sizes={}, inputs={}, seed=0)
    near = answer(make.jitter(pair, make.upcast(drawn), 0, "roundings", BESIDE), case)
    looked = False
    for name, leaf in here.items():
        if not is_real(leaf) or not isinstance(leaf, torch.Tensor) or name.endswith("(in place)"):
            continue
        x, y = differences.as_double(leaf), differences.as_double(near[name])
        if x.shape != y.shape:
            continue
        some = x.isfinite() & (x != x.round())  # integers, such as counts, rightly do not change
        if x[some].unique().numel() < GENERIC:
            continue
        looked = True
        if float((x == y)[some].double().mean()) > UNMOVED:
            if not _depends_on_floats(name, drawn, other, here, lambda values: answer(values, case)):
                continue  # it depends only on integer inputs, which were not changed
            raise PairError(
                f"{pair.name}: {name} of the reference does not move when its float64 inputs do, by up to one part in "
                f"2^24: it is rounded to half precision inside; take out its casts, or declare precision=; if it is a "
                f"step function, as round() is, declare with excuse= which elements are next to a step"
            )
    return looked


def _depends_on_floats(
    name: str,
    drawn: dict[str, Any],
    other: dict[str, Any],
    here: Leaves,
    answer: Callable[[dict[str, Any]], Leaves],
) -> bool:
    """Return whether an output changes if only the floating-point inputs change."""
    theirs = {n: dict(make.tensors_in(value, n)) for n, value in other.items()}

    def exchanged(n: str, value: Any) -> Any:
        floating = bool(theirs[n]) and all(t.is_floating_point() for t in theirs[n].values())
        return other[n] if floating else value

    try:
        there = answer({n: exchanged(n, value) for n, value in drawn.items()})
    except Exception:  # inputs of two draws may not fit together
        return True
    return _differs(here[name], there.get(name))


TASK_DRAWS, FEW_TASK_DRAWS = 20, 4
"""Maximum number of draws on which the reference is checked: if its roundings can be checked (until one draw shows
them), and if not."""
BESIDE = 2.0**-24
"""Relative change of the neighbouring inputs. It is far above float64's own rounding, but only one in 8,000 values that
are rounded to half precision changes."""
UNMOVED = 0.95
GENERIC = 16
"""Minimum number of distinct values of an output that is checked. One with fewer may be a table of constants."""
