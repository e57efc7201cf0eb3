"""Call a side in another way than the equivalence proof does, and compare its outputs with the truth."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from perfsuite.correctness import equivalence, execution, incoming_gradients, side_calls, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.rule import NONE
from perfsuite.correctness.side_calls import CallSide
from perfsuite.correctness.truths import Discard, Truth, TruthFunction
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.specs import ListSpec, Size, Spec, TensorSpec, elements, symbols
from perfsuite.errors import NotEquivalent, first_line
from perfsuite.records import Case

Result = TypeVar("Result")
SELDOM = (37, 43, 47, 53, 59, 61)
"""Sizes that are rare among the draws of a proof."""
SELDOM_ELEMENTS = 1 << 15
"""The most elements that all tensor inputs together may have at these sizes."""
UNEVEN = "where the tensors in its lists differ in size"


def hold(
    probe: Probe,
    call_side: CallSide,
    words: str,
    *,
    known: TruthFunction | None = None,
    eps: float | None = None,
    refusable: bool = False,
    reference_may_refuse: bool = False,
    reference_first: bool = False,
) -> None:
    """Call the side in this way and compare its outputs with the truth, which is `known`. Without it, the truth is that
    of a plain call, or that of the reference called in this way if `eps` is given or its outputs have other names.

    By default the side is called first. Only if it is wrong or raises is the reference called in this way, because that
    could do harm where the reference does not support it. If the reference raises, the side is not compared.

    reference_first       call the reference first: its outputs in this way may differ from those of a plain call
    refusable             the side may raise
    reference_may_refuse  compare the side with `known` even if the reference raises, but not if the reference is wrong
                          in this way; implies `reference_first`
    eps                   precision in this way, where it is lower; without `known` it implies `reference_first`
    """
    attempt = _Attempt(probe, call_side)
    reference_first |= reference_may_refuse or (known is None and eps is not None)
    if not reference_first and attempt.is_right(known or functools.partial(probe.truth, None)):
        return
    try:
        known = _known_in(probe, call_side, known, eps=eps, reference_may_refuse=reference_may_refuse)
        if known is None:
            return
        known(NONE)
    except Discard:
        return
    except Exception:  # the reference does not support it
        return
    try:
        produced = attempt.answer()
    except NotEquivalent:
        raise
    except Exception as error:
        if refusable:
            return
        raise probe.fault(f"raises {error_name(error)} {words}, where the reference does not") from None
    judge(probe, known, produced, words)


def _known_in(
    probe: Probe, call_side: CallSide, known: TruthFunction | None, *, eps: float | None, reference_may_refuse: bool
) -> TruthFunction | None:
    """Return the truth of a call in this way, after a call of the reference; None if the reference itself is not right
    there. Raise what the reference raises, except if it may refuse."""
    try:
        expected = call_in(probe, as_side(probe.pair.reference), call_side)
    except Exception:
        if not reference_may_refuse:
            raise
    else:
        if reference_may_refuse and known is not None and not _is_right(probe, known, expected):
            return None
    if known is not None:
        return known
    if eps is None and _is_plain(probe, expected):
        return functools.partial(probe.truth, None)
    return truths.by_replicas(
        probe.pair, probe.case, probe.device, gradients=False, home=probe.home, eps=eps, call_side=call_side
    )


class _Attempt:
    """One call of the side in this way. The side is called when its answer is first requested."""

    def __init__(self, probe: Probe, call_side: CallSide) -> None:
        self.probe, self.call_side = probe, call_side
        self._answer: Leaves | Exception | None = None

    def answer(self) -> Leaves:
        """Return the side's answer, or raise the side's error."""
        if self._answer is None:
            try:
                self._answer = call_in(self.probe, self.probe.side, self.call_side)
            except Exception as error:
                self._answer = error
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def is_right(self, known: TruthFunction) -> bool:
        """Return whether the answer is right; False if the side raises, or the truth cannot be established."""
        try:
            return _is_right(self.probe, known, self.answer())
        except Exception:
            return False


def hold_anew(
    probe: Probe,
    call_side: CallSide,
    words: str,
    *,
    eps: float | None = None,
    refusable: bool = False,
    reference_may_refuse: bool = False,
) -> None:
    """Call `hold` with a truth that is established by calling the reference in this way, because a plain call gives
    something else."""
    known = truths.by_replicas(
        probe.pair, probe.case, probe.device, gradients=False, home=probe.home, eps=eps, call_side=call_side
    )
    hold(probe, call_side, words, known=known, refusable=refusable, reference_may_refuse=reference_may_refuse)


def judge(probe: Probe, known: TruthFunction, produced: Leaves, words: str) -> None:
    try:
        equivalence.hold(probe.pair, known, produced, name=probe.name, strict_strides=False)
    except NotEquivalent as error:
        raise probe.fault(f"is wrong {words}: {str(error).removeprefix(f'{probe.pair.name}: ')}") from None


def _is_right(probe: Probe, known: TruthFunction, produced: Leaves) -> bool:
    try:
        equivalence.hold(probe.pair, known, produced, name=probe.name, strict_strides=False)
    except NotEquivalent:
        return False
    return True


def _is_plain(probe: Probe, expected: Leaves) -> bool:
    """Return whether these outputs have the same names as those of a plain call."""
    return sorted(expected) == sorted(probe.truth().reference)


def call_in(probe: Probe, side: Side, call_side: CallSide) -> Leaves:
    return side_calls.produce(
        probe.pair,
        side,
        probe.case,
        probe.device,
        gradients=False,
        home=probe.home,
        call_side=call_side,
        drawn=probe.drawn(),
    )


def plainly(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
    with torch.no_grad():
        return detached(execution.with_changed(pair, values, call(*values.values())))


def where_only(
    call: Callable[..., Any],
    pair: Pair,
    values: dict[str, Any],
    seed: int,
    *,
    only: Collection[str],
    differentiate: bool = False,
) -> Leaves:
    """Call with grad mode on, where only the inputs `only` need a gradient. Return the leaves, with the gradients of
    these inputs if `differentiate` is set, and otherwise with a True entry for each output that needs a gradient."""
    marked = execution.require_gradients(pair, values)
    for path, tensor in marked.items():
        tensor.requires_grad_(path in only)
    with torch.enable_grad():
        leaves = execution.with_changed(pair, values, call(*values.values()))
    if not differentiate:
        needing = {n: isinstance(t, torch.Tensor) and t.requires_grad for n, t in leaves.items()}
        return detached(leaves) | {f"{n} needs a gradient": True for n, needs in needing.items() if needs}
    outputs, weights = incoming_gradients.drawn(leaves, seed, pair.output_dtype)
    return gradients_of(leaves, outputs, {path: marked[path] for path in only}, weights)


def graph_of(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Any:
    """Call with gradients. Return (leaves, outputs that need a gradient, path → input that needs a gradient, incoming
    gradients)."""
    marked = execution.require_gradients(pair, values)
    with torch.enable_grad():
        leaves = execution.with_changed(pair, values, call(*values.values()))
    outputs, weights = incoming_gradients.drawn(leaves, seed, pair.output_dtype)
    return leaves, outputs, marked, weights


def gradients_of(
    leaves: Leaves, outputs: list[torch.Tensor], marked: Mapping[str, torch.Tensor], weights: list[torch.Tensor]
) -> Leaves:
    """Run the backward pass. Return the leaves and the gradients of the `marked` inputs; the arguments are the result
    of `graph_of`."""
    given = list(marked.values())
    found = torch.autograd.grad(outputs, given, weights, allow_unused=True) if outputs else [None] * len(given)
    return detached(leaves) | {f"gradient of {path}": g for path, g in zip(marked, found, strict=True)}


def differentiable(probe: Probe) -> list[str]:
    """Return the paths of the inputs whose gradients are compared."""
    if not probe.pair.gradients or probe.pair.is_stateful:
        return []
    return list(execution.require_gradients(probe.pair, probe.drawn()))


def truth_with_gradients(probe: Probe, left_out: set[str], replicas: int) -> Truth:
    """Return the truth of a plain call and of its gradients, without the leaves named in `left_out`."""
    return probe.truth(replicas=replicas, gradients=True).without(left_out)


def gradients_are_right(probe: Probe) -> bool:
    """Return whether a plain call has the right gradients on the draw; True if the pair compares none, or if their
    truth cannot be established."""
    if not differentiable(probe):
        return True
    known = functools.partial(truth_with_gradients, probe, set())
    try:
        known(NONE)
    except Exception:  # Discard among others
        return True
    try:
        produced = side_calls.produce(
            probe.pair, probe.side, probe.case, probe.device, gradients=True, home=probe.home, drawn=probe.drawn()
        )
    except Exception:
        return False
    return _is_right(probe, known, produced)


def detached(leaves: Leaves) -> Leaves:
    return {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in leaves.items()}


def in_threads(jobs: list[Callable[[], Result]]) -> list[Result]:
    """Run each job in a thread of its own and return the results. Raises the first error, but a BrokenBarrierError
    only if there is no other error, because another error is what broke the barrier."""
    found: list[Any] = [RuntimeError("the thread did not end")] * len(jobs)

    def work(number: int) -> None:
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # torch warns if a product is a thread's first use of CUDA
            found[number] = jobs[number]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in found if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return found


def error_name(error: BaseException) -> str:
    line = first_line(error)
    return f"{type(error).__name__} ({line})" if line else type(error).__name__


def on(probe: Probe, case: Case) -> Probe:
    """Return a probe of the same side on another draw."""
    return replace(probe, case=case, known={}, inputs={}, right={})


def at_seldom_sizes(probe: Probe) -> Probe:
    """Return the probe at sizes that are rare among draws, so that no earlier call had them, as far as the pair allows
    such sizes.

    The sizes are the same in every run, so that code compiled for them is found in the cache.
    """
    pair, case, sizes = probe.pair, probe.case, dict(probe.case.sizes)
    for number, symbol in enumerate(sorted(pair.symbols)):
        size = pair.size_of(symbol) or Size()
        if symbol not in pair.sizes:
            size = replace(size, high=max(SELDOM))
        found = [n for n in SELDOM if size.allows(n)]
        if not found:
            continue
        tried = sizes | {symbol: found[number % len(found)]}
        asked = sum(elements(s, tried) for s in pair.inputs.values() if isinstance(s, TensorSpec))
        if asked <= SELDOM_ELEMENTS and pair.allows(tried):
            sizes = tried
    return on(probe, replace(case, sizes=sizes))


def sizes_line(probe: Probe) -> str:
    """Return the sizes of the probe's draw as text."""
    sizes = ",".join(f"{symbol}={probe.case.sizes[symbol]}" for symbol in sorted(probe.pair.symbols))
    return sizes or "the same sizes"


def sizes_of_their_own(specs: Iterable[TensorSpec], others: Any) -> set[str]:
    """Return the symbols that are whole dimensions of these tensors and on which nothing else depends."""
    given = list(specs)
    dims = {dim for spec in given for dim in spec.dims if isinstance(dim, str) and dim.isidentifier()}
    within = (symbols(replace(spec, dims=tuple(d for d in spec.dims if d not in dims))) for spec in given)
    return dims.difference(symbols(others), *within)


def smaller(tensor: torch.Tensor, spec: TensorSpec, sizes: Collection[str], *, empty: bool = False) -> torch.Tensor:
    """Return a copy of the first half of the tensor along each dimension in `sizes`, or with `empty` a tensor that has
    size 0 there."""
    for dim, size in enumerate(spec.dims):
        if size in sizes:
            tensor = tensor.narrow(dim, 0, 0 if empty else (tensor.shape[dim] + 1) // 2)
    return tensor.clone()


def uneven(specs: Mapping[str, Spec], values: Mapping[str, Any], sizes: Collection[str]) -> dict[str, Any]:
    """Return the inputs with every second item of each list of tensors smaller, and every fourth one empty if the spec
    allows that."""
    made = dict(values)
    for name, spec in specs.items():
        if isinstance(spec, ListSpec) and isinstance(spec.item, TensorSpec):
            may = not spec.item.least
            made[name] = [
                t if i % 2 else smaller(t, spec.item, sizes, empty=may and i % 4 == 2)
                for i, t in enumerate(values[name])
            ]
    return made


def sizes_of_items(pair: Pair) -> set[str]:
    """Return the symbols of sizes on which only the tensors in lists depend."""
    every = {**pair.inputs, **pair.step_inputs}
    lists = {name: spec for name, spec in every.items() if isinstance(spec, ListSpec)}
    items = [spec.item for spec in lists.values() if isinstance(spec.item, TensorSpec)]
    others = [spec.item for spec in lists.values() if not isinstance(spec.item, TensorSpec)]
    counts = [ListSpec(count=spec.count, item=()) for spec in lists.values()]
    return sizes_of_their_own(items, [counts, others, *(spec for name, spec in every.items() if name not in lists)])
