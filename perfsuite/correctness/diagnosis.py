"""Find the likely reason why two sides differ, by trials on the failing draw.

A message that says only "wrong at [3]" leaves it to the reader to find the cause. Each trial here changes one property
of the draw (values, layouts, sizes, precision) and checks whether the side is then right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import equivalence, forms, incoming_gradients, relations, side_calls, size_search, truths
from perfsuite.correctness.differences import Doubles
from perfsuite.correctness.execution import Leaves, only_tensors
from perfsuite.correctness.integrity.late_work import comes_late
from perfsuite.correctness.rule import NEAR
from perfsuite.correctness.value_regimes import only_for
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.declare.specs import EXPANDED, ConstantSpec, ScalarSpec, TensorSpec, elements
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import case_line
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case, InputCase
from perfsuite.state import process_state

PRECISIONS = {"float16 or TF32": 2.0**-10, "bfloat16": 2.0**-7}
"""Name → eps. If the error fits the budget of one of these precisions, the side is assumed to compute in it."""
MOST_EXCHANGED = 8
"""Most outputs, or inputs, among which exchanges of two are tried."""
TIED = 1e-3
"""Largest difference of two gradients that only choose different ones of several equal values, after the gradients of
equal values are added up; relative to the sum of all absolute values."""
FEWEST_ERRORS, LEAST_ROUNDED, LEAST_OF_A_SIGN = 16, 0.6, 0.15
"""Fewest errors, smallest share of the elements that have one, and smallest share of either sign, that count as
rounding. A factor that is wrong by 1% would fit the budget of bfloat16 too."""


def shown(pair: Pair, case: Case, home: Path | None = None) -> str:
    """Return the inputs of a draw as text; empty if there are too many elements, or if some inputs are neither tensors
    nor numbers. Never raises, because it only adds to a message."""
    tensors = [spec for spec in pair.inputs.values() if isinstance(spec, TensorSpec)]
    if not all(isinstance(spec, (TensorSpec, ScalarSpec)) for spec in pair.inputs.values()):
        return ""
    try:
        if not 0 < sum(elements(spec, case.sizes) for spec in tensors) <= MOST_SHOWN:
            return ""
        drawn = make.build(pair, case, "cpu", home=home)
        return ", ".join(f"{name}={_written(value)}" for name, value in drawn.items())
    except (Exception, SystemExit):
        return ""


def _written(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _written(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def explain(
    pair: Pair,
    side: Side,
    case: Case,
    device: str,
    *,
    gradients: bool = False,
    home: Path | None = None,
) -> str | None:
    """Return a clause that names the likely fault, or None. Never raises, because it only adds to a message."""
    try:
        return next(_causes(_Trial(pair, side, device, home), case, gradients), None)
    except (Exception, SystemExit):  # a trial may call the side with inputs that it does not support
        return None


def explained(
    error: NotEquivalent,
    pair: Pair,
    side: Side,
    device: str,
    *,
    gradients: bool = False,
    home: Path | None = None,
) -> NotEquivalent:
    """Return the error with its likely cause on a separate line, if one is found on its draw."""
    if error.case is None or error.names_its_cause:
        return error
    with process_state.kept():  # state that the side changes must not reach later proofs
        cause = explain(pair, side, error.case, device, gradients=gradients, home=home)
    return error if cause is None else NotEquivalent(f"{error}\nlikely cause: {cause}", error.case)


def unstable(group: BaseExceptionGroup[BaseException]) -> NotEquivalent | None:
    """Return the NotEquivalent in Hypothesis's exception group for a draw that failed once but not again; None if the
    group contains none."""
    first = next((e for e in group.exceptions if isinstance(e, NotEquivalent)), None)
    if first is None:
        return None
    message = f"{first}\nit does not always fail on the same draw: it depends on memory, order or time"
    return NotEquivalent(message, first.case)


class _Trial:
    def __init__(self, pair: Pair, side: Side, device: str, home: Path | None, kind: str | None = None) -> None:
        self.pair, self.side, self.device, self.home, self.kind = pair, side, device, home, kind
        self._truths: dict[tuple[str, bool], truths.Truth] = {}

    def how(self, case: Case, gradients: bool) -> dict[str, Any]:
        """Return how the sides are called: with incoming gradients as in their proof, or of this trial's kind."""
        call_side = side_calls.proof_call(case, gradients=gradients, kind=self.kind)
        return {"gradients": gradients, "call_side": call_side}

    def truth(self, case: Case, gradients: bool = False) -> truths.Truth:
        """Return the truth of a draw. It is computed once, because several causes are tried on the same draw."""
        key = case_line(case), gradients
        if key not in self._truths:
            how = self.how(case, gradients)
            self._truths[key] = truths.establish(self.pair, case, self.device, home=self.home, **how)
        return self._truths[key]

    def produce(self, case: Case, gradients: bool = False) -> Leaves:
        return side_calls.produce(self.pair, self.side, case, self.device, home=self.home, **self.how(case, gradients))

    def is_right(self, case: Case, gradients: bool = False) -> bool:
        try:
            equivalence.judge(self.pair, self.truth(case, gradients), self.produce(case, gradients))
        except (NotEquivalent, truths.Discard):
            return False
        except (Exception, SystemExit):
            return False
        return True

    def is_right_on(self, values: dict[str, Any], case: Case) -> bool:
        """Return whether the side is right on these inputs instead of drawn ones."""
        return self.with_inputs(values).is_right(case)

    def with_inputs(self, values: dict[str, Any]) -> _Trial:
        """Return the same trial with these inputs instead of drawn ones."""
        fixed = replace(self.pair, inputs={n: ConstantSpec(value=v) for n, v in values.items()})
        return _Trial(fixed, self.side, self.device, self.home)


def _causes(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    """Yield the clauses that hold, the most specific first."""
    if _is_late(trial, case, gradients):
        yield "it is right a little later: a background thread or a stream that nobody waits for still writes it"
    if trial.is_right(case, gradients):
        yield "it is right when it is called again on the same draw: it depends on memory, order or time"
        return
    lost = _truth_is_not_finite(trial, case, gradients)
    if gradients and lost and not _truth_is_not_finite(trial, case, False):
        yield (
            "the reference's own gradient is NaN or infinite on this draw: write the reference so that it is finite "
            "there, as sqrt(x + eps), or declare bounds with values="
        )
    if gradients:
        yield from _incoming(trial, case)
        yield from _ties(trial, case)
    yield from _layouts(trial, case, gradients)
    yield from _regimes(trial, case, gradients)
    if gradients and trial.is_right(case):
        of_gradient = "the forward is right, the gradient is not"
        of_outputs = "its outputs are right when the call returns, and its backward pass writes to them"
        yield of_gradient if _outputs_stay_right(trial, case) else of_outputs
    if lost:
        yield (
            "the truth itself is NaN or infinite on this draw: write the reference so that it is finite there, declare "
            "bounds with values=, or give the same from the optimized side"
        )
        return
    yield from _exchanged(trial, case, gradients)
    if not _is_right_on_others(trial, case, gradients):
        yield from _options(trial, case, gradients)
        yield from size_search.causes(trial.pair, case, lambda draw: trial.is_right(draw, gradients))
    if not gradients and not trial.pair.is_stateful:
        yield from _values(trial, _contiguous(case))
        yield from _unread(trial, case)
    yield from _related(trial, case, gradients)
    if not trial.pair.is_stateful:  # if states differ a little at first, any formula may be the cause
        yield from _precision(trial, case, gradients)


MOST_SHOWN = 8
"""Most elements of a draw's inputs that a message shows."""
OTHERS = 3
"""Number of other draws of the same sizes that are tried before a failure is attributed to the sizes."""


def _is_right_on_others(trial: _Trial, case: Case, gradients: bool) -> bool:
    """Return whether the side is right on other values of the same sizes."""
    others = (replace(case, seed=case.seed ^ (0x4D1C6E3 * number)) for number in range(1, OTHERS + 1))
    return any(trial.is_right(other, gradients) for other in others)


def _outputs_stay_right(trial: _Trial, case: Case) -> bool:
    """Return whether the outputs are right after a backward pass."""
    truth, produced = trial.truth(case, True), trial.produce(case, True)
    gradients = [name for name in truth.reference if name.startswith("gradient of ")]
    outputs = {name: leaf for name, leaf in produced.items() if name not in gradients}
    return _agrees(trial.pair, truth.without(gradients), outputs)


def _layouts(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    plain = _contiguous(case)
    if plain != case and trial.is_right(plain, gradients):
        if not gradients and (equal := _wrong_for_equal(trial, case)):
            yield f"it is right for other values, and wrong where values of {equal} are equal along a dimension"
        laid = sorted({f"{how.layout} {n}" for n, how in case.inputs.items() if how.layout != "contiguous"})
        yield f"it is right where the inputs are contiguous, and wrong for {' and '.join(laid)}"


def _contiguous(case: Case) -> Case:
    """Return the draw with all inputs contiguous."""
    return replace(case, inputs={n: replace(how, layout="contiguous") for n, how in case.inputs.items()})


def _regimes(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    usual = replace(case, inputs={n: InputCase(layout=how.layout) for n, how in case.inputs.items()})
    if usual != case and trial.is_right(usual, gradients):
        special = {how.regime for how in case.inputs.values()}
        infinite = "nonfinite" not in special and _side_is_not_finite(trial, case, gradients)
        yield only_for(special, infinite=infinite)


def _incoming(trial: _Trial, case: Case) -> Iterator[str]:
    kind = incoming_gradients.kind_of(case)
    plain = _Trial(trial.pair, trial.side, trial.device, trial.home, incoming_gradients.PLAIN)
    if kind != incoming_gradients.PLAIN and plain.is_right(case, True):
        what = "a gradient" if kind == incoming_gradients.SOME_OUTPUTS else f"{kind} ones"
        yield f"the gradient is right for plain incoming gradients, and wrong for {what}{_WHENCE.get(kind, '')}"


_WHENCE = {
    "expanded": ", as of a sum",
    "transposed": ", which are not contiguous",
    "large": ", as where a loss is scaled",
    "tiny": ", as where a loss is a mean over many elements",
    "sliced": ", as behind a concatenation",
    incoming_gradients.SOME_OUTPUTS: f" {incoming_gradients.SOME_OUTPUTS}",
}


def _ties(trial: _Trial, case: Case) -> Iterator[str]:
    """Yield a clause if a gradient goes to another one of several equal values."""
    truth, produced = trial.truth(case, True), trial.produce(case, True)
    drawn = make.build(trial.pair, case, trial.device, home=trial.home)
    moved = []
    for path, value in ((p, t.detach()) for name in drawn for p, t in make.tensors_in(drawn[name], name)):
        name = f"gradient of {path}"
        got, leaf = produced.get(name), truth.leaves.get(name)
        if not isinstance(got, torch.Tensor) or not isinstance(leaf, torch.Tensor) or got.shape != leaf.shape:
            continue
        size = float(leaf.double().abs().sum())
        if float((got.double() - leaf.double()).abs().sum()) <= TIED * size:
            continue
        values, which = value.unique(return_inverse=True)
        off = values.new_zeros(len(values), dtype=torch.float64)
        off.index_add_(0, which.flatten(), (got.double() - leaf.double()).flatten())
        if len(values) == value.numel() or not float(off.abs().sum()) <= TIED * size:
            return
        moved.append(path)
    if moved:
        yield (
            f"the gradient goes to another one of several equal values of {' and '.join(moved)} than the reference's: "
            f"choose the same one, as the first of them"
        )


def _wrong_for_equal(trial: _Trial, case: Case) -> str:
    """Return the names of the expanded inputs if the side is wrong for their values in contiguous memory, too: not the
    layout is then the cause, but the equal values along a dimension. Empty otherwise."""
    expanded = [name for name, how in sorted(case.inputs.items()) if how.layout in EXPANDED]
    if not expanded or trial.pair.is_stateful:
        return ""
    drawn = make.build(trial.pair, case, trial.device, home=trial.home)
    values = make.map_tensors(drawn, lambda t: t.detach().clone(memory_format=torch.contiguous_format))
    return "" if trial.is_right_on(values, case) else " and ".join(expanded)


def _exchanged(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    """Yield a clause if two outputs, or two inputs, are exchanged."""
    truth, produced = trial.truth(case, gradients), trial.produce(case, gradients)
    for a, b in _alike(produced):
        if _agrees(trial.pair, truth, {**produced, a: produced[b], b: produced[a]}):
            yield f"{a} and {b} are exchanged"
            return
    if gradients or trial.pair.is_stateful:
        return
    drawn = make.build(trial.pair, case, trial.device, home=trial.home)
    for a, b in _alike(drawn):
        if _agrees(trial.pair, truth, trial.with_inputs({**drawn, a: drawn[b], b: drawn[a]}).produce(case)):
            yield f"it is right with {a} and {b} exchanged: a side is called with the inputs by position"
            return


def _alike(named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two tensors that have the same shape and dtype and differ, among the first
    MOST_EXCHANGED tensors."""
    tensors = [(name, t) for name, t in named.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    for (a, one), (b, other) in itertools.combinations(tensors[:MOST_EXCHANGED], 2):
        if one.shape == other.shape and one.dtype == other.dtype and not forms.identical(one, other):
            yield a, b


def _agrees(pair: Pair, truth: truths.Truth, produced: Leaves, *, strict_strides: bool = False) -> bool:
    try:
        equivalence.judge(pair, truth, produced, strict_strides=strict_strides)
    except NotEquivalent:
        return False
    return True


def _truth_is_not_finite(trial: _Trial, case: Case, gradients: bool) -> bool:
    """Return whether the truth is not finite at a place where the side's answer is finite."""
    return any(bool((got.isfinite() & ~leaf.isfinite()).any()) for got, leaf in _floats(trial, case, gradients))


def _side_is_not_finite(trial: _Trial, case: Case, gradients: bool) -> bool:
    """Return whether the side's answer is not finite at a place where the truth is finite."""
    return any(bool((~got.isfinite() & leaf.isfinite()).any()) for got, leaf in _floats(trial, case, gradients))


def _floats(trial: _Trial, case: Case, gradients: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (the side's answer, truth) for each output of floating-point numbers that has the right shape."""
    both = _both(trial.truth(case, gradients), trial.produce(case, gradients))
    yield from ((got, leaf) for got, leaf in both if got.is_floating_point() and got.shape == leaf.shape)


def _is_late(trial: _Trial, case: Case, gradients: bool) -> bool:
    truth, produced = trial.truth(case, gradients), trial.produce(case, gradients)
    if _agrees(trial.pair, truth, produced, strict_strides=True):
        return False
    where = (trial.pair, trial.side, case, trial.device, truth)
    return comes_late(*where, home=trial.home, **trial.how(case, gradients))


def _unread(trial: _Trial, case: Case) -> Iterator[str]:
    """Yield a clause if the side's outputs are 0, or the same, for different inputs."""
    here, truth = trial.produce(case), trial.truth(case).leaves
    other = replace(case, seed=case.seed ^ 0x1F3D5B7)
    there = trial.produce(other)
    larger, larger_other = (trial.produce(size_search.larger(trial.pair, drawn)) for drawn in (case, other))
    tensors = [leaf for leaf in only_tensors(here) if leaf.numel()]
    if tensors and not any(map(_has_nonzero, (here, there, larger))) and _has_nonzero(truth):
        yield "it returns nothing but zeros"
    # An answer that is constant at sizes of 1, such as a sum of no terms, may depend on the inputs at others.
    stays = any(bool(t.isfinite().any()) for t in tensors) and all(
        _same(leaf, again.get(n))
        for first, again in ((here, there), (larger, larger_other))
        for n, leaf in first.items()
    )
    if stays and not all(_same(leaf, trial.truth(other).leaves.get(n)) for n, leaf in truth.items()):
        yield (
            "it gives the same answer to other inputs: it does not read them (a constant, a replayed answer, or "
            "inputs made again from a guessed seed)"
        )


def _has_nonzero(leaves: Leaves) -> bool:
    return any(bool(t.any()) for t in only_tensors(leaves))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and forms.identical(a, b)
    return bool(a == b)


def _options(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    """Yield a clause if the side is right with every other value of an option that has a list of values."""
    for name, spec in {**trial.pair.inputs, **trial.pair.step_inputs}.items():
        if not isinstance(spec, ScalarSpec) or not isinstance(spec.values, tuple) or name not in case.sizes:
            continue
        others = {value: {**case.sizes, name: value} for value in spec.values if value != case.sizes[name]}
        allowed = {value: sizes for value, sizes in others.items() if trial.pair.allows(sizes)}
        if allowed and all(trial.is_right(replace(case, sizes=sizes), gradients) for sizes in allowed.values()):
            right = " or ".join(f"{name}={value}" for value in allowed)
            yield f"it is right with {right}, and wrong with {name}={case.sizes[name]}"
            return


VALUES_DRAWS, SELDOM = 9, 0.5
"""Number of draws that are tried, and largest share of draws of other values on which the side may be right by chance.
For instance, a given one of three values is the largest in one draw of three."""
_TAMED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "non-negative": torch.abs,
    "small": lambda t: t / max(1.0, float(t.abs().max())) * 0.1 if t.numel() else t,
    "sorted": lambda t: t.sort(-1).values if t.ndim else t,
}


def _values(trial: _Trial, case: Case) -> Iterator[str]:
    larger = size_search.larger(trial.pair, case)
    if larger != case and trial.is_right(larger):
        return  # the larger draw has values of every kind, so values are not the cause
    # Several draws, because a few values may be sorted by chance.
    seeds = (case.seed ^ (0x2B5C9A1 * number) for number in range(VALUES_DRAWS))
    every = [make.build(trial.pair, replace(case, seed=seed), trial.device, home=trial.home) for seed in seeds]
    for what, tame in _TAMED.items():

        def change(t: torch.Tensor, tame: Callable[[torch.Tensor], torch.Tensor] = tame) -> torch.Tensor:
            return tame(t.detach()).clone() if t.is_floating_point() else t

        tamed = [make.map_tensors(drawn, change) for drawn in every]
        if not all(trial.is_right_on(values, case) for values in tamed):
            continue
        # If the side is seldom wrong for other values, these are not the cause.
        others = [drawn for drawn, values in zip(every, tamed, strict=True) if not forms.same_values(drawn, values)]
        if sum(trial.is_right_on(drawn, case) for drawn in others) <= SELDOM * len(others):
            yield f"it is right for {what} values only"
        return


def _related(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    words = related(trial.truth(case, gradients), trial.produce(case, gradients))
    if words is not None:
        yield words


def related(truth: truths.Truth, produced: Leaves) -> str | None:
    """Return the relation between answer and truth that holds for every output, in words; None if there is none."""
    found = {relations.relation(got, leaf) for got, leaf in _both(truth, produced)}
    return found.pop() if len(found) == 1 else None


def precision_of(pair: Pair, truth: truths.Truth, produced: Leaves, *, strict_strides: bool = True) -> str | None:
    """Return the name of the lower precision whose rounding explains the error; None if there is none.

    If there are too few different errors to decide, return the names of all that explain them.
    """
    return " or ".join(_precisions(pair, truth, produced, strict_strides=strict_strides)) or None


def _precisions(pair: Pair, truth: truths.Truth, produced: Leaves, *, strict_strides: bool = True) -> list[str]:
    both = list(_both(truth, produced))
    found: list[str] = []
    for name, eps in PRECISIONS.items():
        if eps <= 2 * truth.eps or not any(relations.reaches(got, leaf, eps) for got, leaf in both):
            continue
        if _agrees(pair, replace(truth, eps=eps), produced, strict_strides=strict_strides):
            found.append(name)
            if not all(relations.has_few_errors(got, leaf, eps) for got, leaf in both):
                break
    return found


def _both(truth: truths.Truth, produced: Leaves) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for name, leaf in truth.leaves.items():
        got = produced.get(name)
        if isinstance(got, torch.Tensor) and isinstance(leaf, torch.Tensor):
            yield got, leaf


def _precision(trial: _Trial, case: Case, gradients: bool) -> Iterator[str]:
    larger = size_search.filling_a_tile(trial.pair, case)
    first = _precisions(trial.pair, trial.truth(case, gradients), trial.produce(case, gradients))
    truth, produced = trial.truth(larger, gradients), trial.produce(larger, gradients)
    names = [name for name in _precisions(trial.pair, truth, produced) if name in first]
    if names and is_rounding(truth, produced):
        yield f"its error is that of {' or '.join(names)}: declare precision= if that is meant"


def is_rounding(truth: truths.Truth, produced: Leaves) -> bool:
    """Return whether most elements have errors, some towards zero and some away from it, as for rounding errors.

    The errors of a wrong factor all have the same one of these directions, even if the values have both signs.
    """
    names = [name for name, leaf in truth.leaves.items() if isinstance(leaf, torch.Tensor) and name in truth.errors]
    outputs = [name for name in names if not name.startswith(truths.DERIVATIVES)]
    # One wrong output may make all gradients wrong, so outputs decide, except for a loss, which is a single number.
    if sum(truth.doubles[0][name].numel() for name in outputs) >= FEWEST_ERRORS:
        names = outputs
    got = Doubles(produced)
    every = torch.cat([_errors_away(truth, name, got[name]) for name in names])
    wrong = every[every != 0]
    if wrong.numel() < max(FEWEST_ERRORS, LEAST_ROUNDED * every.numel()):
        return False
    return LEAST_OF_A_SIGN <= float((wrong > 0).double().mean()) <= 1 - LEAST_OF_A_SIGN


def _errors_away(truth: truths.Truth, name: str, got: torch.Tensor) -> torch.Tensor:
    """Return the errors of the elements of an output that are not 0, as a vector: positive if away from zero, and 0 if
    they are usual in the working precision."""
    right: torch.Tensor = truth.doubles[0][name].flatten()
    away = (got.flatten().to(right) - right) * right.sign()
    usual = (NEAR * truth.errors[name].flatten()).maximum(truth.eps * right.abs())
    return torch.where(away.abs() > usual, away, 0.0)[away.isfinite() & (right != 0)]
