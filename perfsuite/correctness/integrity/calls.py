"""Faults that show over several calls: nondeterminism, answers replayed from a cache, drift."""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any, TypeGuard

import torch

from perfsuite.correctness import equivalence, execution, forms, rule, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.memory import reference_keeps, unwritten
from perfsuite.correctness.integrity.probe import Probe, same_leaf
from perfsuite.declare.specs import Integers, Sampled, ScalarSpec, tensor_spec
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import other_number
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

REPEATS = 3
DRIFT_CALLS, DRIFT_EVERY = 40, 3
"""Number of repeated calls whose answers are checked for drift; this is done on one of DRIFT_EVERY draws."""
MOST_CALLS, DRIFT_S, DRIFT_WALL_S = 300, 0.05, {"cpu": 0.5, "cuda": 0.05}
"""The most calls on the first draw, and the limits after which no call beyond DRIFT_CALLS is made: seconds of CPU time
of this thread, and wall-clock seconds by device. On a CPU the wall-clock limit is longer, because other processes may
use the core."""
HELD_BYTES = 64 << 20
"""The most bytes of the answers of these calls that are kept."""
ODD_ANSWERS = 3
"""The most answers, among those that differ from the first one, that are compared with the truth."""
NEARBY = 2.0**-13
"""Relative distance by which inputs are moved, so small that they mostly stay equal when rounded to half precision."""
MOST_ALONE = 4
"""The most inputs that are changed one at a time on one draw."""


def unseen_inputs(probe: Probe) -> None:
    """Check that the side is right before the reference has computed the answer, so that it cannot find that answer in
    memory or in a caller's frame."""
    # A seed that no earlier draw had, since the answer to an earlier draw could still be in memory.
    fresh = probe.other_case(secrets.randbits(30))
    try:
        produced = probe.call(probe.drawn(fresh), fresh)
    except Exception:
        with contextlib.suppress(truths.Discard):
            probe.truth(fresh)  # an error of the reference is reported instead
        raise
    try:
        right = probe.is_right(produced, fresh)
    except truths.Discard:
        return
    if right or not probe.is_right_on(fresh):
        return  # also wrong with the answer in memory: the equivalence proof reports it
    known = probe.other_case(secrets.randbits(30))
    try:
        probe.truth(known)
    except truths.Discard:
        return
    if not probe.is_right_on(known):
        return  # its first answer to new values is wrong even if the right one is in memory
    raise unwritten(probe) or probe.fault(
        "is right only once the reference has answered: it finds the expected answer in memory (through gc, or a "
        "caller's frame) instead of computing it"
    )


def nondeterminism(probe: Probe) -> None:
    """Check that repeated calls on the same inputs all stay within the error budget of the truth."""
    try:
        probe.truth()
    except truths.Discard:
        return
    wrong: list[tuple[int, NotEquivalent]] = []
    for i in range(REPEATS):
        produced = probe.call(probe.drawn())
        try:
            probe.judge(produced)
        except NotEquivalent as error:
            wrong.append((i, error))
    if not wrong or len(wrong) == REPEATS:
        return  # always right, or always wrong, which the equivalence proof reports
    repeat, difference = wrong[0]
    if memory := unwritten(probe):
        raise memory
    if repeat and (drifted := probe.drifted(difference)):
        raise drifted
    raise probe.fault(
        f"is not deterministic within its budget: repeat {repeat + 1} of {REPEATS} on the same inputs: {difference}"
    )


def call_order(probe: Probe) -> None:
    """Check that answers stay right when calls alternate between two sets of inputs."""
    cases = (probe.case, probe.other_case())
    try:
        for case in cases:
            probe.truth(case)
    except truths.Discard:
        return
    for i in range(4):
        case = cases[i % 2]
        produced = probe.call(probe.drawn(case), case)
        try:
            probe.judge(produced, case)
        except NotEquivalent as error:
            fault = _by_order(probe, i, error, produced, cases)
            if fault is None:
                return  # the equivalence proof reports it
            raise fault from None


def _by_order(
    probe: Probe, i: int, error: NotEquivalent, produced: Leaves, cases: tuple[Case, Case]
) -> NotEquivalent | None:
    """Return the fault of call `i` + 1, whose answer is wrong; None if it is wrong in any order of the calls."""
    case, other = cases[i % 2], cases[(i + 1) % 2]
    which = f"call {i + 1}, alternating between two inputs"
    again = probe.call(probe.drawn(other), other)
    if forms.same_values(probe.drawn(case), probe.drawn(other)):
        return None  # such as empty inputs
    if all(same_leaf(leaf, again.get(name)) for name, leaf in produced.items()) and _has_elements(produced):
        return unwritten(probe) or probe.fault(
            "gives one answer to different inputs: an earlier answer is replayed, or a graph was captured over "
            "stale pointers"
        )
    if not i or (i == 1 and _is_plainly_wrong(probe, case, other)):
        return None
    if probe.is_right(produced, other):
        return probe.fault(
            f"depends on the order of its calls: {which}, gives the answer to the other inputs: an earlier "
            f"answer is replayed, or a graph was captured over stale pointers"
        )
    if memory := unwritten(probe):
        return memory
    if drifted := probe.drifted(error):
        return drifted
    if probe.is_right_on(*cases, *cases):
        return probe.fault(
            f"drifts: right at first, wrong at {which}, and right when these calls are repeated: {error}"
        )
    return probe.fault(f"depends on the order of its calls: {which}: {error}")


def _is_plainly_wrong(probe: Probe, case: Case, right: Case) -> bool:
    """Return whether the side is wrong on `case` independently of earlier calls, and stays right on the case
    `right`."""
    again = probe.call(probe.drawn(case), case)
    if probe.is_right(again, case) or probe.is_right(again, right):
        return False
    return probe.is_right_on(right)


def _has_elements(leaves: Leaves) -> bool:
    return any(leaf.isfinite().any() for leaf in leaves.values() if isinstance(leaf, torch.Tensor))


def reused_memory(probe: Probe) -> None:
    """Check that the side computes a new answer for new values in the same tensors, and does not cache answers by
    address or identity."""
    other = probe.other_case()
    if probe.pair.is_stateful:
        return
    try:
        probe.truth()
        probe.truth(other)
    except truths.Discard:
        return
    values, later = probe.drawn(), probe.drawn(other)
    if not probe.is_right(probe.call(make.regrouped(values))):
        return  # already wrong in a plain call: the equivalence proof reports it
    # Kept alive: if the side empties a list, a later draw at their addresses would get the side's kept answer, too.
    tensors = dict(make.tensors_in(values))
    if list(tensors) != [path for path, _ in make.tensors_in(later)]:
        return  # both sides add tensors to a module or untie them; `undeclared_mutation` reports one that does so alone
    make.copy_values(values, later)
    produced = probe.call(values, other)
    try:
        probe.judge(produced, other)
    except NotEquivalent as error:
        if memory := unwritten(probe):
            raise memory from None
        if not probe.is_right_on(other):
            return  # already wrong there in a plain call
        stale = "the answer to the values before" if probe.is_right(produced) else f"a wrong answer: {error}"
        raise probe.fault(
            f"gives, for other values in the same tensors, {stale}; it keeps answers by address or identity"
        ) from None


def partial_keys(probe: Probe) -> None:
    """Check that inputs which differ from earlier ones in one element, in their order or in their last digits only get
    their own answer. A side that caches answers by a part of the values or by their sum fails."""
    if probe.pair.is_stateful:
        return
    if not probe.answers_rightly():
        return  # already wrong in a plain call: the equivalence proof reports it
    names = _changeable(probe)
    step = -(-len(names) // MOST_ALONE) or 1
    alone = names[probe.case.seed % step :: step] if len(names) > 1 else []
    answers: list[Leaves] = []
    numbers = {name for name, spec in probe.pair.inputs.items() if isinstance(spec, ScalarSpec)}
    rng = random.Random(probe.case.seed)
    for what, values in (
        ("one element of them", _changed(probe, names, _last_changed)),
        ("one element of them", _changed(probe, names, functools.partial(_one_changed, rng))),
        ("their order", _changed(probe, names, _rolled)),
        *((name, _changed(probe, (name,), _rolled)) for name in alone),
        *_nearby(probe, names),
        *_other_numbers(probe, rng),
        *_other_elements(probe),
    ):
        error = _error_on(probe, values, answers)
        if error is None:
            continue
        if memory := unwritten(probe):
            raise memory from None
        *earlier, produced = answers
        earlier.append(probe.call(probe.drawn()))
        if not probe.is_right(earlier[-1]):
            return  # wrong on the unchanged inputs, too
        if not any(_repeats(produced, answer) for answer in earlier):
            raise error
        if what in numbers and _ignores(probe, what, values[what]):
            raise probe.fault(f"gives the same answer whatever {what} is: {error}")
        raise probe.fault(
            f"gives a wrong answer where its inputs differ from earlier ones in {what} alone: it keeps answers "
            f"by a part of the values, or by their sum: {error}"
        )


def _changeable(probe: Probe) -> list[str]:
    """Return the inputs whose elements may be reordered: not those whose values the pair's own function makes, and not
    integers that are bounded by column."""
    specs = {name: tensor_spec(spec) for name, spec in probe.pair.inputs.items()}
    own = {n for n, s in specs.items() if s is None or isinstance(s.values, Sampled)}
    by_column = {
        n for n, s in specs.items() if s and isinstance(s.values, Integers) and isinstance(s.values.high, tuple)
    }
    return [n for n in specs if n not in own | by_column]


def _changed(probe: Probe, names: Collection[str], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return the draw's inputs, with `change` applied to every tensor of those in `names`."""
    return {n: make.map_tensors(v, change) if n in names else v for n, v in probe.drawn().items()}


def _nearby(probe: Probe, names: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the draw's inputs, with those in `names` moved by the relative distance NEARBY, if the pair computes in
    float32 or float64."""
    full = probe.case.dtype in ("float32", "float64") and probe.pair.precision is None
    if full:
        values = probe.drawn()
        moved = make.jitter(probe.pair, values, probe.case.seed, "nearby", NEARBY)
        yield "their last digits", {n: moved[n] if n in names else v for n, v in values.items()}


def _other_numbers(probe: Probe, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, the draw's inputs with another value of this input) for each input that is a number."""
    for name, spec in probe.pair.inputs.items():
        if isinstance(spec, ScalarSpec):
            values = probe.drawn()
            value = other_number(spec, values[name], probe.case.sizes, rng)
            if value != values[name]:
                yield name, values | {name: value}


def _ignores(probe: Probe, name: str, value: Any) -> bool:
    """Return whether the side is also wrong with this value of the number on other inputs, with which it was never
    called before."""
    other = replace(probe, case=probe.other_case(1), known={}, right={})
    return _error_on(other, other.drawn() | {name: value}, []) is not None


def _other_elements(probe: Probe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, the draw's inputs with another value of this input) for each input that is a tensor of one
    element."""
    other = probe.drawn(probe.other_case())
    for name, value in other.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and name not in probe.pair.changed:
            values = probe.drawn()
            if not forms.identical(value, values[name]):
                yield name, values | {name: value}


def _repeats(produced: Leaves, earlier: Leaves) -> bool:
    """Return whether an output is identical to the one of the same name in the earlier answer."""
    tensors = [(n, leaf) for n, leaf in produced.items() if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return any(same_leaf(leaf, earlier.get(n)) for n, leaf in tensors if n.startswith("output"))


def _error_on(probe: Probe, values: dict[str, Any], answers: list[Leaves]) -> NotEquivalent | None:
    """Return the error of the side's answer to these values; None if the answer is right or cannot be compared.

    The answer is added to `answers`. An answer that repeats none of the earlier ones and is nearly right counts as
    right: deciding it would take many calls of a slow reference, and the equivalence proof does that on its own draws.
    """
    pair, produced, error = probe.pair, None, None
    for replicas in (None, rule.NONE, rule.REPLICAS):
        try:
            if replicas is None:
                truth = _nearly_true(probe, values)
            else:
                given = make.clone(values)
                truth = truths.establish(
                    pair, probe.case, probe.device, gradients=False, replicas=replicas, drawn=given
                )
            if truth is None or truth.ill_conditioned:
                error = None
                continue
            if produced is None:
                produced = probe.call(make.clone(values))
                answers.append(execution.copies_of(produced))
        except NotEquivalent:
            raise
        except Exception:  # the reference does not accept inputs changed in this way
            return None
        try:
            equivalence.judge(pair, truth, produced, name=probe.name)
        except NotEquivalent as wrong:
            error = wrong
        else:
            return None
        repeated = any(_repeats(produced, answer) for answer in answers[:-1])
        if replicas is not None and error.excess <= rule.NEAR and not repeated:
            return None
    return error


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf)


def _nearly_true(probe: Probe, values: dict[str, Any]) -> truths.Truth | None:
    """Return the reference's own answer to these values as the truth, with the reference's errors on the draw. This
    takes half the time of a real truth.

    Return None if an output is ill-conditioned on the draw, because the reference's answer may then be far from the
    truth, or if the outputs have other shapes than on the draw.
    """
    known = probe.truth()
    if known.rounding or known.ill_conditioned:
        return None
    own = truths.of_reference(probe.pair, probe.case, probe.device, make.clone(values))
    if any(_shape(leaf) != _shape(known.reference.get(name)) for name, leaf in own.items()):
        return None
    return replace(known, leaves=own, reference=own, excused=None)


def _last_changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last element set to the value of the first, so that it stays within the bounds of the
    values."""
    if tensor.is_complex() or tensor.numel() < 2:
        return tensor
    changed = tensor.detach().clone()
    changed[(-1,) * changed.dim()] = tensor.detach()[(0,) * tensor.dim()]
    return changed


def _one_changed(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with one random element set to the value of another random element."""
    if tensor.is_complex() or tensor.numel() < 2:
        return tensor
    changed = tensor.detach().clone()
    at, other = (tuple(rng.randrange(n) for n in tensor.shape) for _ in range(2))
    changed[at] = tensor.detach()[other]
    return changed


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex() or tensor.numel() < 2:
        return tensor
    return tensor.detach().roll(1)


def drift(probe: Probe) -> None:
    """Check that the answers of many calls stay right, and that each keeps memory of its own while the caller holds
    it."""
    if probe.pair.is_stateful or (probe.number or 0) % DRIFT_EVERY:
        return  # a state is meant to change; the steps of its proof are compared
    if not probe.answers_rightly():
        return  # wrong from the start: the equivalence proof reports it
    held: list[Leaves] = []
    calls, room, ends = 0, HELD_BYTES, thread_time() + DRIFT_S
    wall_ends = perf_counter() + DRIFT_WALL_S[torch.device(probe.device).type]
    most = DRIFT_CALLS if probe.number else MOST_CALLS
    while calls < DRIFT_CALLS or (calls < most and thread_time() < ends and perf_counter() < wall_ends):
        produced = probe.call(probe.drawn())
        calls += 1
        room -= sum(leaf.untyped_storage().nbytes() for leaf in produced.values() if isinstance(leaf, torch.Tensor))
        if room >= 0:
            held.append(produced)
    again = dict.fromkeys(_handed_out_again(held))
    if name := next((n for n in again if not reference_keeps(probe, n, probe.other_case())), ""):
        raise probe.fault(
            f"returns {name} in the memory of an earlier call's outputs, which the caller still has: it hands out "
            f"private buffers in turn; return a copy"
        )
    for call, answer in (*_odd(held), (calls, produced)):
        try:
            probe.judge(answer)
        except NotEquivalent as error:
            if memory := unwritten(probe):
                raise memory from None
            raise probe.fault(f"drifts: right at first, after {call} calls it is not: {error}") from None


def _handed_out_again(held: Sequence[Leaves]) -> Iterator[str]:
    """Yield the names of outputs that share memory with those of an earlier call, with repetitions. All outputs in
    `held` are alive."""
    taken = set[int]()
    for leaves in held:
        of_call = {
            leaf.untyped_storage().data_ptr(): name
            for name, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor) and leaf.numel()
        }
        yield from (of_call[memory] for memory in of_call.keys() & taken)
        taken |= of_call.keys()


def _odd(held: Sequence[Leaves]) -> list[tuple[int, Leaves]]:
    """Return (number of the call, its answer) for the first few answers that differ in any bit from that of the first
    call."""
    odd = set[int]()
    for name, first in held[0].items() if held else ():
        if not isinstance(first, torch.Tensor) or not first.numel():
            continue
        alike = {i: leaf.detach() for i, leaves in enumerate(held) if _is_alike(leaf := leaves.get(name), first)}
        raw = torch.stack(list(alike.values())).reshape(len(alike), -1).view(torch.uint8)
        differs = (raw != raw[0]).any(1).tolist()
        odd |= {i for i, other in zip(alike, differs, strict=True) if other} | set(range(len(held))) - alike.keys()
    return [(i + 1, held[i]) for i in sorted(odd)[:ODD_ANSWERS]]


def _is_alike(leaf: execution.Leaf, first: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype) == (first.shape, first.dtype)
