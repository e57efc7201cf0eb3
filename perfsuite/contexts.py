"""Other ways of calling the optimized side: each must give what the reference gives when it is called so.

A way that the reference does not support (it raises there) is left out. A side may refuse a second or a double backward
pass by raising, as many kernels do; a wrong answer is a fault everywhere.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from perfsuite import equivalence, execution, incoming, process_state, truths
from perfsuite import inputs as make
from perfsuite import many_elements as large
from perfsuite.errors import NotEquivalent, first_line
from perfsuite.execution import Leaves
from perfsuite.integrity.probe import Probe, same_leaf
from perfsuite.pair import CONTEXTS, GRAD_OUTPUT, Pair, Side, as_side
from perfsuite.records import Case
from perfsuite.rule import NONE, eps_of
from perfsuite.truths import Discard, Known, Truth, Way

Result = TypeVar("Result")

MOST_ALONE = 4
"""The number of differentiable inputs that are tried alone where there are more."""
GRAPHS = 4
"""Other calls whose graphs live at the same time."""
SECOND_EPS = 4
"""Second derivatives of an equal formula differ by more than its values do: by up to 1.8 times their budget."""
THREAD_CALLS = 3
MANY_STEPS = 300
"""Steps of a stateful pair. A fault that begins after the steps that its proof compares shows by then."""
COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")
"""The file of torch's that calls what was compiled."""
WARMUP_CALLS = 3
"""Before a call is captured in a graph."""
EMPTY_GRAPH = "The CUDA Graph is empty"
"""Begin of torch's warning where a capture holds no work."""
DELAY_CYCLES = 20_000_000
"""About 10 ms of a GPU: its own stream is held up so long before the inputs are there."""


def check(pair: Pair, case: Case, device: str, *, home: Path | None = None, thorough: bool = False) -> None:
    """NotEquivalent, naming the way, where the optimized side is right when called plainly and wrong so.

    With `thorough` also what costs much.
    """
    probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=case, device=device, home=home)
    if not pair.is_stateful and not probe.answers_rightly():
        return  # equivalence says how
    ways = WAYS
    if pair.is_stateful:
        ways = COSTLY_STATEFUL if thorough else ()
    elif _is_compiled(probe):
        # torch.compile compiles, captures graphs and replays them in one thread at a time.
        ways = tuple(way for way in (*WAYS, *COSTLY) if way is not two_threads) if thorough else COMPILED
    elif thorough:
        ways = (*WAYS, *COSTLY)
    with execution.recompiling():
        for way in ways:
            if way.__name__ not in pair.unsupported:
                with process_state.kept(quick=True):
                    _try(way, probe)


def _is_compiled(probe: Probe) -> bool:
    """Whether a call runs what torch.compile made."""
    entered = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        if not entered and event == "call" and frame.f_code.co_filename.endswith(COMPILED_CALL):
            # The same file keeps functions from being compiled, many of torch's own among them.
            entered = type(frame.f_locals.get("self")).__name__ in ("OptimizeContext", "RunOnlyContext")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        probe.call(probe.drawn())
    finally:
        sys.setprofile(before)
    return entered


def _try(way: Callable[[Probe], None], probe: Probe) -> None:
    try:
        way(probe)
    except NotEquivalent as error:
        if way.__name__ not in CONTEXTS:
            raise
        remedy = f"if the kernel does not support this, declare unsupported={{{way.__name__!r}: 'why'}}"
        raise NotEquivalent(f"{error}; {remedy}", error.case) from None


# --- forward --------------------------------------------------------------------------------------------------------


def inference_mode(probe: Probe) -> None:
    """Under torch.inference_mode(), with inputs made before it and with inputs made inside it."""
    for inside, words in ((False, "under torch.inference_mode()"), (True, "on inputs made under inference_mode()")):

        def way(
            call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int, inside: bool = inside
        ) -> Leaves:
            with torch.inference_mode():
                given = make.clone(values) if inside else values
                return execution.copies_of(execution._with_changed(pair, given, call(*given.values())))

        _hold(probe, way, words)


def no_gradient_needed(probe: Probe) -> None:
    """With grad mode on, where no input needs a gradient: the answer, and whether it needs one."""
    _hold(probe, functools.partial(_marked, only=()), "with grad mode on where no input needs a gradient")


def other_thread(probe: Probe) -> None:
    """In a thread that has called nothing before."""

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        (leaves,) = _in_threads([functools.partial(_plain, call, pair, values, seed)])
        return leaves

    _hold(probe, way, "in another thread")


def two_threads(probe: Probe) -> None:
    """In two threads at the same time, each with inputs of its own."""
    cases = (probe.case, probe.other_case())
    try:
        for case in cases:
            probe.truth(case)
    except Discard:
        return
    if not probe.is_right(probe.call(probe.drawn(cases[1]), cases[1]), cases[1]):
        return  # plainly wrong there: equivalence says how
    for side in (as_side(probe.pair.reference), probe.side):
        call = execution.callable_of(side)
        jobs = [[probe.drawn(case) for _ in range(THREAD_CALLS)] for case in cases]
        together = threading.Barrier(2, timeout=60)

        def work(drawn: list[dict[str, Any]], call: Any = call, barrier: threading.Barrier = together) -> list[Leaves]:
            answers = []
            for values in drawn:
                barrier.wait()
                answers.append(_plain(call, probe.pair, values, probe.case.seed))
            return answers

        for drawn in jobs:
            for values in drawn:
                execution.poison(probe.pair, values)
        try:
            # What one thread sets and puts back, another may have read meanwhile: of settings that is no fault.
            with execution.quiet(side), process_state.kept():
                both = _in_threads([functools.partial(work, drawn) for drawn in jobs])
        except Exception as error:
            if side is not probe.side:
                return
            raise probe.fault(f"raises {_named(error)} when two threads call it at the same time") from None
        if side is not probe.side:
            continue
        for case, answers in zip(cases, both, strict=True):
            for produced in answers:
                known = functools.partial(probe.truth, case)
                _judge(probe, known, produced, "when two threads call it at the same time")


def autocast(probe: Probe) -> None:
    """Under torch.autocast to half precision: the reference's dtype, to the precision that it has there. The backward
    pass comes after it."""
    dtype = torch.bfloat16
    device = torch.device(probe.device).type

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        with torch.autocast(device, dtype=dtype):
            return _plain(call, pair, values, seed)

    reference = as_side(probe.pair.reference)
    try:
        plain = _produced(probe, reference, _plain)
        under = _produced(probe, reference, way)
    except Exception:
        return
    lower = any(not same_leaf(plain.get(name), leaf) for name, leaf in under.items())
    words, eps = f"under torch.autocast({device!r}, torch.bfloat16)", torch.finfo(dtype).eps if lower else None
    _hold(probe, way, words, eps=eps)
    if not _differentiable(probe):
        return

    def backward(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        with torch.autocast(device, dtype=dtype):
            graph = _graph(call, pair, values, seed)
        return _backward(*graph)

    _hold(probe, backward, f"in a backward pass after a call {words}", eps=eps)


# --- backward -------------------------------------------------------------------------------------------------------


def one_gradient_needed(probe: Probe) -> None:
    """Where only one of several inputs needs a gradient, and where all but one do."""
    paths = _differentiable(probe)
    if len(paths) < 2:
        return
    step = -(-len(paths) // MOST_ALONE)
    for path in paths[probe.case.seed % step :: step]:
        others = tuple(p for p in paths if p != path)
        _hold_some(probe, (path,), others, f"where only {path} needs a gradient")
        if len(others) > 1:
            _hold_some(probe, others, (path,), f"where all inputs but {path} need a gradient")


def _hold_some(probe: Probe, marked: Collection[str], others: Collection[str], words: str) -> None:
    way = functools.partial(_marked, only=marked, differentiate=True)
    known = functools.partial(_with_gradients, probe, {f"gradient of {path}" for path in others})
    _hold(probe, way, words, known=known)


def second_backward(probe: Probe) -> None:
    """A second backward pass through the same graph, which was retained."""
    if not _differentiable(probe) or set(probe.pair.consumes) - {GRAD_OUTPUT}:
        return

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        leaves, outputs, marked, weights = _graph(call, pair, values, seed)
        given = list(marked.values())
        same = [weight.clone() for weight in weights]  # the first pass may use up what comes in to it
        torch.autograd.grad(outputs, given, weights, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(outputs, given, same, allow_unused=True)
        return _detached(leaves) | {f"gradient of {p}": g for p, g in zip(marked, again, strict=True)}

    known = functools.partial(_with_gradients, probe, set())
    _hold(probe, way, "in a second backward pass with retain_graph=True", known=known, refusable=True)


def two_graphs(probe: Probe) -> None:
    """A backward pass after other calls, on other values, as where a layer is used several times; theirs come later."""
    if not _differentiable(probe):
        return
    others = [probe.drawn(probe.other_case(number)) for number in range(GRAPHS)]

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        graph = _graph(call, pair, values, seed)
        beside = [_graph(call, pair, make.clone(given), seed) for given in others]
        found = _backward(*graph)
        for other in beside:
            _backward(*other)
        return found

    known = functools.partial(_with_gradients, probe, set())
    _hold(probe, way, "in a backward pass that comes after another call, and before theirs", known=known)


def double_backward(probe: Probe) -> None:
    """The gradients of its gradients."""
    if not _differentiable(probe):
        return

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        _, outputs, marked, weights = _graph(call, pair, values, seed)
        given = list(marked.values())
        first = torch.autograd.grad(outputs, given, weights, create_graph=True, allow_unused=True)
        if not all(g is None or g.requires_grad for g in first):
            raise RuntimeError("a gradient without a graph: it cannot be differentiated, and says so")
        named = {f"gradient of {p}": g for p, g in zip(marked, first, strict=True) if g is not None}
        again, directions = incoming.drawn(named, seed)
        if not again:
            second: Any = [None] * len(given)
        else:
            second = torch.autograd.grad(again, given, directions, allow_unused=True)
        # What is constant has no graph: its derivative is 0.
        return {
            f"second derivative of {p}": torch.zeros_like(x) if g is None else g
            for (p, x), g in zip(marked.items(), second, strict=True)
        }

    eps = SECOND_EPS * eps_of(probe.pair.precision or probe.case.dtype)
    _hold(probe, way, "when its gradients are differentiated once more", eps=eps, refusable=True)


# --- on a GPU -------------------------------------------------------------------------------------------------------


def other_stream(probe: Probe) -> None:
    """On a stream that is not the default one, where the inputs are there only later."""
    if torch.device(probe.device).type != "cuda":
        return

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        late = make.map_tensors(values, torch.empty_like)
        execution.poison(pair, values)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(DELAY_CYCLES)
            make.copy_values(late, values)
            leaves = execution.copies_of(execution._with_changed(pair, late, call(*late.values())))
        stream.synchronize()
        return leaves

    _hold(probe, way, "on a stream that is not the default one")


def captured_graph(probe: Probe) -> None:
    """Captured in a CUDA graph, and replayed on inputs that were not there when it was captured."""
    if torch.device(probe.device).type != "cuda":
        return
    others = probe.drawn(probe.other_case())

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        held = make.clone(values)
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            torch.cuda.synchronize()
            with torch.cuda.stream(aside):
                for _ in range(WARMUP_CALLS):  # what is compiled or allocated at a first call cannot be captured
                    call(*make.clone(others).values())
                with _waits_refused():  # else the capture would fail, after which torch's generator raises
                    call(*make.clone(others).values())
            torch.cuda.synchronize()
            _overwrite(held)
            with _capturing(graph, aside):
                leaves = execution._with_changed(pair, held, call(*held.values()))
            _overwrite(leaves)
            make.copy_values(held, values)
            execution.poison(pair, held)
            graph.replay()
            torch.cuda.synchronize()
            return execution.copies_of(leaves)

    _hold(probe, way, "when a CUDA graph that captured it is replayed", refusable=True)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Inside, a call of torch that waits for the GPU raises."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not know of every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """torch.cuda.graph, which leaves its stream the current one where the capture fails."""
    before = torch.cuda.current_stream()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=EMPTY_GRAPH)  # its answer shows it
            with torch.cuda.graph(graph, stream=stream):
                yield
    finally:
        torch.cuda.set_stream(before)


def many_elements(probe: Probe) -> None:
    """On more elements than 32 bits can count."""
    large.check(probe)


# --- stateful pairs -------------------------------------------------------------------------------------------------


def many_steps(probe: Probe) -> None:
    """After many more steps than are usually compared."""
    pair = replace(probe.pair, steps=(MANY_STEPS,))
    known = truths.by_replicas(pair, probe.case, probe.device, most=1, gradients=False, home=probe.home)
    try:
        known(NONE)
    except Discard:
        return
    produced = truths.produce(pair, probe.side, probe.case, probe.device, gradients=False, home=probe.home)
    equivalence.hold(pair, known, produced, name=probe.name)


WAYS: tuple[Callable[[Probe], None], ...] = (
    inference_mode,
    no_gradient_needed,
    other_thread,
    two_threads,
    autocast,
    one_gradient_needed,
    two_graphs,
    second_backward,
    double_backward,
    other_stream,
    captured_graph,
)
COMPILED = (no_gradient_needed, one_gradient_needed)
"""A side that compiles takes seconds for each way. On a CPU only these are tried, unless the profile is "thorough"."""
COSTLY: tuple[Callable[[Probe], None], ...] = (many_elements,)
COSTLY_STATEFUL: tuple[Callable[[Probe], None], ...] = (many_steps,)


# --- what they share ------------------------------------------------------------------------------------------------


def _hold(
    probe: Probe,
    way: Way,
    words: str,
    *,
    known: Known | None = None,
    eps: float | None = None,
    refusable: bool = False,
) -> None:
    """Call the side in this way and hold it against the truth: of a plain call where none is given, unless `eps` says
    that precision is lower in this way."""
    reference = as_side(probe.pair.reference)
    try:
        expected = _produced(probe, reference, way)
        if known is None:
            if eps is None and _is_plain(probe, expected):
                known = functools.partial(probe.truth, None)
            else:
                known = truths.by_replicas(
                    probe.pair, probe.case, probe.device, gradients=False, home=probe.home, eps=eps, way=way
                )
        known(NONE)
    except Discard:
        return
    except Exception:  # the reference does not support it
        return
    try:
        produced = _produced(probe, probe.side, way)
    except NotEquivalent:
        raise
    except Exception as error:
        if refusable:
            return
        raise probe.fault(f"raises {_named(error)} {words}, where the reference does not") from None
    _judge(probe, known, produced, words)


def _judge(probe: Probe, known: Known, produced: Leaves, words: str) -> None:
    try:
        equivalence.hold(probe.pair, known, produced, name=probe.name, strict_strides=False)
    except NotEquivalent as error:
        raise probe.fault(f"is wrong {words}: {error}") from None


def _is_plain(probe: Probe, expected: Leaves) -> bool:
    """Whether these are the names that a plain call gives."""
    return sorted(expected) == sorted(probe.truth().reference)


def _produced(probe: Probe, side: Side, way: Way) -> Leaves:
    return truths.produce(probe.pair, side, probe.case, probe.device, gradients=False, home=probe.home, way=way)


def _plain(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
    with torch.no_grad():
        return _detached(execution._with_changed(pair, values, call(*values.values())))


def _marked(
    call: Callable[..., Any],
    pair: Pair,
    values: dict[str, Any],
    seed: int,
    *,
    only: Collection[str],
    differentiate: bool = False,
) -> Leaves:
    """Called with grad mode on, where these inputs alone need a gradient."""
    marked = execution.require_gradients(pair, values)
    for path, tensor in marked.items():
        tensor.requires_grad_(path in only)
    with torch.enable_grad():
        leaves = execution._with_changed(pair, values, call(*values.values()))
    if not differentiate:
        needing = {n: isinstance(t, torch.Tensor) and t.requires_grad for n, t in leaves.items()}
        return _detached(leaves) | {f"{n} needs a gradient": True for n, needs in needing.items() if needs}
    outputs, weights = incoming.drawn(leaves, seed, pair.output_dtype)
    return _backward(leaves, outputs, {path: marked[path] for path in only}, weights)


def _graph(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Any:
    """(leaves, outputs that need a gradient, marked inputs, incoming gradients)."""
    marked = execution.require_gradients(pair, values)
    with torch.enable_grad():
        leaves = execution._with_changed(pair, values, call(*values.values()))
    outputs, weights = incoming.drawn(leaves, seed, pair.output_dtype)
    return leaves, outputs, marked, weights


def _backward(
    leaves: Leaves, outputs: list[torch.Tensor], marked: Mapping[str, torch.Tensor], weights: list[torch.Tensor]
) -> Leaves:
    """The leaves and the gradients of the marked inputs, of what `_graph` gives."""
    given = list(marked.values())
    found = torch.autograd.grad(outputs, given, weights, allow_unused=True) if outputs else [None] * len(given)
    return _detached(leaves) | {f"gradient of {path}": g for path, g in zip(marked, found, strict=True)}


def _differentiable(probe: Probe) -> list[str]:
    """The paths of the inputs whose gradients are compared."""
    if not probe.pair.gradients or probe.pair.is_stateful:
        return []
    return list(execution.require_gradients(probe.pair, probe.drawn()))


def _with_gradients(probe: Probe, left_out: set[str], replicas: int) -> Truth:
    """The truth of a plain call and of its gradients, without these outputs."""
    return _without(probe.truth(replicas=replicas, gradients=True), left_out)


def _without(truth: Truth, names: set[str]) -> Truth:
    def kept(leaves: Any) -> Any:
        return {name: leaf for name, leaf in leaves.items() if name not in names}

    return replace(
        truth,
        leaves=kept(truth.leaves),
        reference=kept(truth.reference),
        errors=kept(truth.errors),
        moved=kept(truth.moved),
        rounding=truth.rounding - names,
    )


def _detached(leaves: Leaves) -> Leaves:
    return {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in leaves.items()}


def _overwrite(value: Any) -> None:
    """Fill the GPU's tensors in it with what is no answer."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        if tensor.is_cuda:
            make.fill_poison(made)
        return made

    make.copy_values(value, make.map_tensors(value, other))


def _in_threads(jobs: list[Callable[[], Result]]) -> list[Result]:
    """Each job's result, in threads of their own; raises what the first failing one raised."""
    found: list[Any] = [RuntimeError("the thread did not end")] * len(jobs)

    def work(number: int) -> None:
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # torch warns where a product is a thread's first use of CUDA
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
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def _named(error: BaseException) -> str:
    line = first_line(error)
    return f"{type(error).__name__} ({line})" if line else type(error).__name__
