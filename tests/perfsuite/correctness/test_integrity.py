"""Each integrity check rejects a planted fault by name, and accepts correct code that resembles it."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from perfsuite import Pair, floats, listof, module, sampled, scalar, stateful, tensor
from perfsuite.correctness import equivalence, integrity, rule, truths
from perfsuite.correctness.integrity import Probe, memory
from perfsuite.correctness.rule import FEW, NONE
from perfsuite.declare.sides import as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case, InputCase

Call = Callable[..., Any]
X = {"x": tensor("m", "n", values=floats(-4, 4))}
CASE = Case(dtype="float32", sizes={"m": 5, "n": 7, "l": 2}, inputs={}, seed=3)


def pair(reference: Any, optimized: Any, inputs: Any = X, **fields: Any) -> Pair:
    return Pair(reference=reference, optimized=optimized, inputs=inputs, **{"name": "p", **fields})


def probe(of: Pair, case: Case = CASE) -> Probe:
    return Probe(pair=of, side=as_side(of.optimized), name="optimized", case=case, device="cpu", home=None)


def exp_(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x)


# --- faults --------------------------------------------------------------------------------------------------


class Lazy(torch.Tensor):
    pass


def lazy_method(x: torch.Tensor) -> torch.Tensor:
    out = torch.exp(x)
    out.numpy = lambda: None  # type: ignore[method-assign]
    return out


def mutating(x: torch.Tensor) -> torch.Tensor:
    out = torch.exp(x)
    x.mul_(2)
    return out


def mutating_beside(x: torch.Tensor) -> torch.Tensor:
    """Write to the storage of the input, outside its elements."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    whole[0] += 1
    return torch.exp(x)


def reshaping(x: torch.Tensor) -> torch.Tensor:
    out = torch.exp(x)
    x.t_()
    return out


def private_buffer() -> Call:
    buffers: dict[Any, torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        out = buffers.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
        return torch.exp(x, out=out)

    return call


def alternating_buffers() -> Call:
    """Return a side that alternates two buffers, so that the third call overwrites the first result."""
    held: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        if len(held) < 2:
            held.append(torch.empty_like(x))
        held.append(held.pop(0))
        return torch.exp(x, out=held[-1])

    return call


def many_buffers() -> Call:
    """Return a side that reuses 30 buffers in turn, which a few calls do not show."""
    held: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        held.append(held.pop(0) if len(held) == 30 else torch.empty_like(x))
        return torch.exp(x, out=held[-1])

    return call


def seldom_wrong() -> Call:
    calls = itertools.count(1)
    return lambda x: torch.exp(x) if next(calls) % 30 else torch.zeros_like(x)


def wrong_once(at: int) -> Call:
    calls = itertools.count(1)
    return lambda x: torch.zeros_like(x) if next(calls) == at else torch.exp(x)


def unwritten(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:-1] = torch.exp(x[:-1])
    return out


def recycled(x: torch.Tensor) -> torch.Tensor:
    """Return memory that may still contain the reference's result, because the allocator reuses it."""
    return torch.empty_like(x)


def racing() -> Call:
    lock, calls = threading.Lock(), [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        with lock:
            calls[0] += 1
        out = torch.exp(x)
        return out * 1.01 if calls[0] % 3 == 2 else out

    return call


def replayed(key: Callable[[torch.Tensor], Any]) -> Call:
    answers: dict[Any, torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        found = answers.setdefault(key(x), torch.exp(x))
        return found.clone()

    return call


def late() -> Call:
    """Return a side that returns the result for the previous call's inputs."""
    held: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        held.append(x.clone())
        return torch.exp(held[-2] if len(held) > 1 and held[-2].shape == x.shape else x)

    return call


FAULTS: dict[str, tuple[Callable[[Probe], None], Call, str]] = {
    "subclass": (
        integrity.lazy_output,
        lambda x: torch.exp(x).as_subclass(Lazy),
        "returns output as a Lazy, a tensor subclass that may compute when read",
    ),
    "overridden method": (
        integrity.lazy_output,
        lazy_method,
        "returns output with its method numpy overridden: it may compute when read",
    ),
    "sparse": (
        integrity.lazy_output,
        lambda x: torch.exp(x).to_sparse(),
        "returns output as a sparse_coo tensor; only dense tensors are compared: return its values",
    ),
    "on no device": (integrity.lazy_output, lambda x: torch.exp(x).to("meta"), "as a meta tensor: it holds no values"),
    "mutation": (
        integrity.undeclared_mutation,
        mutating,
        "changes its input x in place, which the pair does not declare; the reference does not change it",
    ),
    "reshaped input": (integrity.undeclared_mutation, reshaping, "reshapes its input x in place"),
    "private buffer": (integrity.private_buffer, private_buffer(), "hands out a private static buffer; return a copy"),
    "private buffers in turn": (
        integrity.private_buffer,
        alternating_buffers(),
        "hands out a private static buffer; return a copy",
    ),
    "many private buffers in turn": (
        integrity.drift,
        many_buffers(),
        "returns output in the memory of an earlier call's outputs, which the caller still has",
    ),
    "an answer of thirty": (integrity.drift, seldom_wrong(), "drifts: right at first, after 29 calls it is not"),
    "unwritten": (
        integrity.unwritten_output,
        unwritten,
        "leaves output unwritten, or reads memory it never wrote: with fresh memory filled with NaN, p: output",
    ),
    "recycled memory": (integrity.unwritten_output, recycled, "leaves output unwritten"),
    "race": (integrity.nondeterminism, racing(), "is not deterministic within its budget: repeat 2 of 3 on the same"),
    "replayed by shape": (
        integrity.call_order,
        replayed(lambda x: x.shape),
        "gives one answer to different inputs: an earlier answer is replayed",
    ),
    "one call late": (integrity.call_order, late(), "depends on the order of its calls: call 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_rejected_by_name(name: str) -> None:
    check, optimized, match = FAULTS[name]
    with pytest.raises(NotEquivalent) as caught:
        check(probe(pair(exp_, optimized)))
    message = str(caught.value)
    assert message.startswith("p: the optimized side ")
    assert match in message
    assert "\n" not in message


def test_input_that_the_reference_changes_too_must_be_declared() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.exp(x)
        x.add_(x)
        return out

    with pytest.raises(NotEquivalent, match="which the pair does not declare; add it to mutates="):
        integrity.undeclared_mutation(probe(pair(doubled, mutating)))


def test_one_wrong_output_is_reported_as_drift_and_not_as_call_order() -> None:
    words = "drifts: right at first, wrong at call 3, alternating between two inputs, and right when these calls are"
    with pytest.raises(NotEquivalent, match=words):
        integrity.call_order(probe(pair(exp_, wrong_once(at=3))))


def test_write_to_the_storage_outside_an_input_is_detected() -> None:
    strided = Case(dtype="float32", sizes=CASE.sizes, inputs={"x": InputCase(layout="offset")}, seed=3)
    with pytest.raises(NotEquivalent, match="changes its input x in place"):
        integrity.undeclared_mutation(probe(pair(exp_, mutating_beside), strided))


@pytest.mark.parametrize("name", FAULTS)
def test_integrity_check_rejects_every_planted_fault(name: str) -> None:
    fresh: dict[str, Callable[[], Call]] = {
        "private buffer": private_buffer,
        "private buffers in turn": alternating_buffers,
        "many private buffers in turn": many_buffers,
        "an answer of thirty": seldom_wrong,
        "race": racing,
        "one call late": late,
        "replayed by shape": lambda: replayed(lambda x: x.shape),
    }
    optimized = fresh[name]() if name in fresh else FAULTS[name][1]
    with pytest.raises(NotEquivalent, match="p: "):
        integrity.check(pair(exp_, optimized), CASE, "cpu")


# --- look-alikes ---------------------------------------------------------------------------------------------


def written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:-1] = torch.exp(x[:-1])
    out[-1:] = torch.exp(x[-1:])
    return out


def cached_by_content() -> Call:
    tables: dict[int, torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        scale = tables.setdefault(x.shape[1], torch.ones(x.shape[1], dtype=x.dtype))
        return torch.exp(x) * scale

    return call


def workspace() -> Call:
    """Return a side with a private scratch buffer, which it never returns."""
    scratch: dict[Any, torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        held = scratch.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype))
        torch.exp(x, out=held)
        return held.clone()

    return call


def in_any_order() -> Call:
    calls = [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        eps = torch.finfo(x.dtype).eps
        return torch.exp(x) * (1 + (calls[0] % 3) * eps)

    return call


def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x)


def into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.exp(x, out=out)


TWO = {"total": tensor("m", "n", values=floats(-4, 4)), "x": tensor("m", "n", values=floats(-4, 4))}
OUT = {"x": tensor("m", "n", values=floats(-4, 4)), "out": tensor("m", "n")}
_HONEST: dict[str, Pair] = {
    "the same": pair(exp_, exp_),
    "torch.empty, fully written": pair(exp_, written),
    "a cache by size": pair(exp_, cached_by_content()),
    "a cache by content": pair(exp_, replayed(lambda x: tuple(x.flatten().tolist()))),
    "a private workspace": pair(exp_, workspace()),
    "another order each time": pair(exp_, in_any_order()),
    "a declared change in place": pair(accumulate, lambda total, x: total.copy_(total + x), TWO, mutates={"total"}),
    "a declared change, nothing returned": pair(
        lambda total, x: (accumulate(total, x), None)[1],
        lambda total, x: (total.copy_(total + x), None)[1],
        TWO,
        mutates={"total"},
    ),
    "an output given": pair(into, lambda x, out: (out.copy_(torch.exp(x)), None)[1], OUT, mutates={"out": "written"}),
    "a view where the reference has one": pair(lambda x: x[1:], lambda x: x.narrow(0, 1, x.shape[0] - 1)),
    "the input itself where the reference returns it": pair(lambda x: x, lambda x: x.view(x.shape)),
    "a copy where the reference has a view": pair(lambda x: x[1:], lambda x: x[1:].clone()),
    "whole numbers and None": pair(lambda x: (x > 0, None, 3), lambda x: (x.gt(0), None, 3)),
    "a parameter": pair(exp_, lambda x: torch.nn.Parameter(torch.exp(x), requires_grad=False)),
    "a tuple without names": pair(lambda x: Extremes(x.amin(0), x.exp()), lambda x: (x.amin(0), x.exp())),
    "names where the reference has none": pair(lambda x: [x.amin(0), x.exp()], lambda x: Extremes(x.amin(0), x.exp())),
    "a tuple of another class": pair(
        lambda x: {"a": Extremes(x.sin(), x.exp()), "b": x.cos()},
        lambda x: {"b": x.cos(), "a": Bounds(x.sin(), x.exp())},
    ),
}


class Extremes(NamedTuple):
    least: torch.Tensor
    most: torch.Tensor


class Bounds(NamedTuple):
    least: torch.Tensor
    most: torch.Tensor


class Reversed(NamedTuple):
    most: torch.Tensor
    least: torch.Tensor


def test_fields_of_named_tuples_are_compared() -> None:
    of = pair(lambda x: {"y": [Extremes(x.sin(), x.exp())]}, lambda x: {"y": [Reversed(x.sin(), x.exp())]})
    equivalence.check_case(of, CASE, "cpu")
    says = r"returns output\['y'\]\[0\] with the fields most, least where the reference's are least, most"
    with pytest.raises(NotEquivalent, match=says):
        integrity.check(of, CASE, "cpu")


def test_fields_of_named_tuples_that_a_step_returns_are_compared() -> None:
    def extremes(kind: Any) -> Call:
        def build(params: list[torch.Tensor]) -> Call:
            def step(grads: list[torch.Tensor]) -> Any:
                for param, grad in zip(params, grads, strict=True):
                    param.sub_(0.1 * grad)
                return kind(params[0].sum(), params[0].sin())

            return step

        return build

    def check(kind: Any) -> None:
        integrity.check(pair(stateful(extremes(Extremes)), stateful(extremes(kind)), **STATE), CASE, "cpu")

    check(Bounds)
    with pytest.raises(NotEquivalent, match="returns output with the fields most, least"):
        check(Reversed)


@pytest.mark.parametrize("name", _HONEST)
@pytest.mark.parametrize("sizes", [{"m": 5, "n": 7}, {"m": 1, "n": 1}, {"m": 2, "n": 0}], ids=str)
def test_an_honest_look_alike_passes(name: str, sizes: dict[str, int]) -> None:
    integrity.check(_HONEST[name], Case(dtype="float32", sizes=sizes, inputs={}, seed=5), "cpu")


def total(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(xs).sum(0)


def emptied(xs: list[torch.Tensor]) -> torch.Tensor:
    found = total(xs)
    del xs[:]
    return found


def appended(xs: list[torch.Tensor]) -> torch.Tensor:
    xs.append(total(xs))
    return xs[-1].clone()


def by_address(kept: dict[int, torch.Tensor], xs: list[torch.Tensor]) -> torch.Tensor:
    found = kept.setdefault(xs[0].data_ptr(), total(xs))
    del xs[:]
    return found.clone()


LISTS = {"xs": listof("l", tensor("n", values=floats(-4, 4)))}


@pytest.mark.parametrize("optimized", [emptied, appended])
def test_list_that_a_call_uses_up_keeps_its_tensors(optimized: Call) -> None:
    with pytest.raises(NotEquivalent, match=r"p: the optimized side (removes|adds) xs\[\d\] (from|to) its input"):
        integrity.check(pair(total, optimized, LISTS, consumes={"xs"}), CASE, "cpu")
    integrity.check(pair(optimized, optimized, LISTS, consumes={"xs"}), CASE, "cpu")
    integrity.check(pair(optimized, optimized, LISTS), CASE, "cpu")


def test_answers_kept_by_address_are_found_where_both_sides_empty_a_list() -> None:
    kept: dict[int, torch.Tensor] = {}
    with pytest.raises(NotEquivalent, match="keeps answers by address or identity"):
        integrity.reused_memory(probe(pair(emptied, lambda xs: by_address(kept, xs), LISTS)))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.rand(3))
        self.register_buffer("b", self.a)


def scaled(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x * net.a + net.b


def untied(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.b = net.b.clone()
    return scaled(net, x)


def with_a_buffer(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.register_buffer("c", net.b.clone(), persistent=False)
    return x * net.a + net.c


@pytest.mark.parametrize(
    ("optimized", "says"),
    [(untied, r"changes the tensor under net.b from that of net.a to its own"), (with_a_buffer, "adds net.c to its")],
)
def test_module_keeps_its_buffers_unless_the_reference_changes_them(optimized: Call, says: str) -> None:
    inputs = {"net": module(Tied), "x": tensor("m", 3, values=floats(-4, 4))}
    with pytest.raises(NotEquivalent, match=says):
        integrity.check(pair(scaled, optimized, inputs), CASE, "cpu")
    integrity.check(pair(optimized, optimized, inputs), CASE, "cpu")


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
@pytest.mark.parametrize("regime", ["normal", "nonfinite", "zeros"])
def test_uncommon_layouts_and_regimes_pass(layout: str, regime: str) -> None:
    case = Case(dtype="float32", sizes=CASE.sizes, inputs={"x": InputCase(layout=layout, regime=regime)}, seed=5)
    integrity.check(pair(exp_, written, {"x": tensor("m", "n")}), case, "cpu")


# --- stateful sides ------------------------------------------------------------------------------------------


def descend(params: list[torch.Tensor]) -> Call:
    def step(grads: list[torch.Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(0.1 * g)

    return step


def scaling(params: list[torch.Tensor]) -> Call:
    def step(grads: list[torch.Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(g.mul_(0.1))

    return step


def uninitialised(params: list[torch.Tensor]) -> Call:
    speed = [torch.empty_like(p) for p in params]

    def step(grads: list[torch.Tensor]) -> None:
        for p, g, v in zip(params, grads, speed, strict=True):
            p.sub_(0.1 * g + 0 * v)

    return step


STATE = {
    "inputs": {"params": listof("l", tensor("n", values=floats(-4, 4)))},
    "step_inputs": {"grads": listof("l", tensor("n", values=floats(-4, 4)))},
    "mutates": {"params"},
}


def test_faults_of_stateful_sides_are_rejected() -> None:
    integrity.check(pair(stateful(descend), stateful(descend), **STATE), CASE, "cpu")
    with pytest.raises(NotEquivalent, match=r"changes its input grads\[0\] in place, .*; the reference does not"):
        integrity.check(pair(stateful(descend), stateful(scaling), **STATE), CASE, "cpu")
    with pytest.raises(NotEquivalent, match=r"changes its input grads\[0\] in place, .*; add 'grads' to mutates="):
        integrity.check(pair(stateful(scaling), stateful(scaling), **STATE), CASE, "cpu")
    with pytest.raises(NotEquivalent, match="leaves output unwritten, or reads memory it never wrote"):
        integrity.check(pair(stateful(descend), stateful(uninitialised), **STATE), CASE, "cpu")


def test_answers_that_change_from_call_to_call_are_not_reported_as_unwritten() -> None:
    calls = itertools.count(1)
    with pytest.raises(NotEquivalent, match="output of the optimized side is wrong") as caught:
        integrity.unwritten_output(probe(pair(exp_, lambda x: torch.exp(x) + next(calls))))
    assert "unwritten" not in str(caught.value)


def test_uninitialised_memory_is_not_reported_as_shared_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory may hold finite values when one instance steps, and NaN when several do."""
    monkeypatch.setattr(integrity, "CHECKS", (integrity.several_instances,))
    instances = []

    def unlucky(params: list[torch.Tensor]) -> Call:
        instances.append(1)
        odd = len(instances) % 2 == 0
        speed = [torch.empty_like(p).copy_(p * (torch.nan if odd else 0)) for p in params]
        if torch.utils.deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled():
            speed = [torch.empty_like(p) for p in params]

        def step(grads: list[torch.Tensor]) -> None:
            for p, g, v in zip(params, grads, speed, strict=True):
                p.sub_(0.1 * g + 0 * v)

        return step

    with pytest.raises(NotEquivalent, match="leaves output unwritten, or reads memory it never wrote"):
        integrity.check(pair(stateful(descend), stateful(unlucky), **STATE), CASE, "cpu")


def test_uninitialised_memory_is_not_reported_as_a_kept_output() -> None:
    """Uninitialised memory may hold NaN only in the call after a NaN was written to an output."""
    calls, last = itertools.count(1), memory.LATER_CALLS + 4

    def unlucky(x: torch.Tensor) -> torch.Tensor:
        if torch.utils.deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled():
            return torch.empty_like(x)
        return torch.full_like(x, torch.nan) if next(calls) == last else torch.exp(x)

    with pytest.raises(NotEquivalent, match="leaves output unwritten, or reads memory it never wrote"):
        integrity.private_buffer(probe(pair(exp_, unlucky)))


def test_unwritten_output_is_reported_if_its_memory_holds_nan_already() -> None:
    def stale(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        return out.fill_(torch.nan) if out.any() else out

    with pytest.raises(NotEquivalent, match="leaves output unwritten, or reads memory it never wrote"):
        integrity.unwritten_output(probe(pair(exp_, stale)))


# --- seams ---------------------------------------------------------------------------------------------------


def test_other_case_has_other_values_of_the_same_sizes() -> None:
    found = probe(pair(exp_, exp_))
    other = found.other_case()
    assert other.sizes == CASE.sizes
    assert not torch.equal(found.drawn()["x"], found.drawn(other)["x"])


def test_new_memory_is_poisoned_only_inside_the_context() -> None:
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    with integrity.poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.empty_like(torch.ones(3, 4)).isnan().all()
        assert torch.ones(2).new_empty(50).isnan().all()
        assert torch.empty_strided((3, 4), (1, 3)).isnan().all()
        assert (torch.empty(9, dtype=torch.int32) == 2**31 - 1).all()
    after = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    assert after == before


def test_poisoned_memory_ends_if_an_exception_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), integrity.poisoned_memory():
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_draw_on_which_the_reference_overflows_is_skipped() -> None:
    overflowing = pair(lambda x: x.exp() * 1e30 * 1e30, lambda x: x.exp() * 1e30 * 1e30)
    integrity.check(overflowing, CASE, "cpu")


def test_wrong_output_is_not_reported_as_unwritten() -> None:
    with pytest.raises(NotEquivalent, match="is wrong") as caught:
        integrity.unwritten_output(probe(pair(exp_, lambda x: torch.exp(x) * 1.1)))
    assert "unwritten" not in str(caught.value)


def rounds_where_deterministic(x: torch.Tensor) -> torch.Tensor:
    """Be less precise in deterministic mode, like a library with another algorithm for it."""
    return torch.exp(x).bfloat16().float() if torch.are_deterministic_algorithms_enabled() else torch.exp(x)


def test_other_algorithm_in_deterministic_mode_is_not_reported_as_unwritten() -> None:
    integrity.unwritten_output(probe(pair(exp_, rounds_where_deterministic)))
    with pytest.raises(NotEquivalent, match="leaves output unwritten"):
        integrity.unwritten_output(probe(pair(exp_, lambda x: unwritten(rounds_where_deterministic(x)))))


def test_side_that_is_right_only_on_another_draw_is_reported_as_wrong() -> None:
    def wrong_on_this_one(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * (1.1 if torch.equal(x, made.drawn()["x"]) else 1)

    made = probe(pair(exp_, wrong_on_this_one))
    assert made.is_right(made.call(made.drawn(made.other_case())), made.other_case())
    with pytest.raises(NotEquivalent, match="output of the optimized side is wrong"):
        integrity.unwritten_output(made)


OPTION: dict[str, Any] = {**X, "power": scalar((1, 2))}
WITH_OPTION = Case(dtype="float32", sizes={"m": 5, "n": 7, "power": 2}, inputs={}, seed=3)


def test_ignored_option_is_not_reported_as_a_cached_result() -> None:
    def kept(x: torch.Tensor, power: int) -> torch.Tensor:
        return answers.setdefault(float(x.sum()), x**power)

    answers: dict[float, torch.Tensor] = {}
    with pytest.raises(NotEquivalent, match="gives the same answer whatever power is"):
        integrity.partial_keys(probe(pair(torch.pow, lambda x, power: x * x, OPTION), WITH_OPTION))
    with pytest.raises(NotEquivalent, match="keeps answers by a part of the values"):
        integrity.partial_keys(probe(pair(torch.pow, kept, OPTION), WITH_OPTION))


def test_profile_functions_are_as_before_the_check_for_calls_of_the_reference() -> None:
    def own(frame: Any, event: str, argument: Any) -> None:
        return None

    def unprofiled(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(None)
        return x.sin()

    def unprofiled_too(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(None)
        return torch.sin(x)

    before, of_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(own)
    sys.setprofile(own)
    try:
        integrity.calls_reference(probe(pair(lambda x: torch.sin(x), torch.sin)))
        with pytest.raises(NotEquivalent, match="replaces Python's profile function, which the reference does not"):
            integrity.calls_reference(probe(pair(lambda x: torch.sin(x), unprofiled)))
        integrity.calls_reference(probe(pair(unprofiled, unprofiled_too)))
        found = sys.getprofile(), threading.getprofile()
    finally:
        sys.setprofile(before)
        threading.setprofile(of_threads)  # type: ignore[arg-type]  # typeshed has no None
    assert found == (own, own)


def test_output_of_an_unsupported_type_is_a_pair_error() -> None:
    with pytest.raises(PairError, match="output is a str"):
        integrity.check(pair(exp_, lambda x: "text"), CASE, "cpu")
    assert make.build(pair(exp_, exp_), CASE, "cpu")["x"].shape == (5, 7)


@pytest.fixture
def lucky(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reject every output unless all replicas are used; return the list of requested replica counts."""
    own, judge, asked, bare = truths.Runs.truth, equivalence.judge, list[int](), list[truths.Truth]()

    def truth_(runs: truths.Runs, replicas: int) -> truths.Truth:
        truth = own(runs, replicas)
        asked.append(replicas)
        bare.extend([truth] * (replicas in (NONE, FEW)))
        return truth

    def judge_(of: Pair, truth: truths.Truth, produced: Any, **named: Any) -> None:
        if any(truth is t for t in bare):
            raise NotEquivalent("the reference was lucky")
        judge(of, truth, produced, **named)

    monkeypatch.setattr(truths.Runs, "truth", truth_)
    monkeypatch.setattr(equivalence, "judge", judge_)
    return asked


def test_side_clearly_within_the_budget_needs_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = truths.Runs.truth, []

    def counted(runs: truths.Runs, replicas: int) -> truths.Truth:
        asked.append(replicas)
        return own(runs, replicas)

    monkeypatch.setattr(truths.Runs, "truth", counted)
    integrity.check(pair(exp_, lambda x: torch.exp(x)), CASE, "cpu")
    assert set(asked) == {NONE}


def test_identical_right_output_is_compared_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, judged = equivalence.judge, list[str]()

    def counted(*given: Any, **named: Any) -> None:
        judged.append(named["name"])
        judge(*given, **named)

    def seen(*answers: torch.Tensor, **declared: Any) -> int:
        judged.clear()
        of = probe(pair(exp_, torch.exp, **declared))
        for answer in answers:
            of.is_right({"output": answer})
        return len(judged)

    monkeypatch.setattr(equivalence, "judge", counted)
    right = exp_(*probe(pair(exp_, torch.exp)).drawn().values())
    wrong = right + 1e-3
    assert seen(right, right.clone(), right) == 1
    assert seen(wrong, wrong.clone()) == 6, "without replicas, by few, and by all"
    assert seen(right, right.double()) > 1
    assert seen(right, right.T.contiguous().T) > 1
    changed = right.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    assert seen(right, changed, right) == 3
    assert seen(right, right, signed_zeros=True) == 2


def test_all_replicas_are_used_if_a_side_exceeds_the_budget_with_few(lucky: list[int]) -> None:
    integrity.check(pair(exp_, lambda x: torch.exp(x)), CASE, "cpu")
    assert lucky.count(NONE) == lucky.count(FEW) == lucky.count(rule.REPLICAS) > 1
    wrong = probe(pair(exp_, lambda x: torch.exp(x) + 1e-3))
    with pytest.raises(NotEquivalent, match="times its"):
        wrong.judge(wrong.call(wrong.drawn()))


def test_all_replicas_are_used_before_a_wrong_output_for_other_values_is_reported(lucky: list[int]) -> None:
    with pytest.raises(NotEquivalent, match="earlier ones in one element of them alone"):
        integrity.partial_keys(probe(pair(exp_, replayed(lambda x: x.flatten()[:-1].sum().item()))))
    assert rule.REPLICAS in lucky


def test_sampled_values_are_not_changed_in_single_elements() -> None:
    """Both halves of each row are equal, so a side may read either."""

    def halves(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        half = torch.rand((*shape[:-1], shape[-1] // 2), generator=generator, dtype=dtype)
        return torch.cat([half, half], -1)

    def first(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x * table[..., :4].repeat(1, 2)

    of = pair(torch.mul, first, {"x": tensor("m", 8), "table": tensor("m", 8, values=sampled(halves))})
    integrity.check(of, CASE, "cpu")


def test_inputs_are_rounded_to_the_declared_precision_for_side_and_truth() -> None:
    """Otherwise rounding could move values across a jump of the function, where the truth differs."""

    def finer(t: torch.Tensor) -> torch.Tensor:
        return t - t.half().float()

    def shows(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) + 100 * finer(x).sign()

    of = pair(exp_, shows, precision="float16")
    integrity.check(of, CASE, "cpu")
    seen: list[torch.Tensor] = []

    def descends(weight: torch.Tensor) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.clone())
            weight.add_(x.mean())
            return weight.clone()

        return step

    state = {"inputs": {"w": tensor("n")}, "step_inputs": {"x": tensor("n")}, "precision": "float16"}
    stepping = pair(stateful(descends), stateful(descends), **state)
    probe(stepping).call(probe(stepping).drawn())
    assert seen
    assert all(not finer(x).any() for x in seen)


def test_guarded_memory_has_its_own_storage_with_offset_0() -> None:
    """DistributedDataParallel assumes this for its buckets."""

    def at_the_beginning(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        made.as_strided(x.shape, x.stride(), 0).copy_(x.sin())
        return made

    integrity.check(pair(torch.sin, at_the_beginning, gradients=False), CASE, "cpu")


def test_resized_storage_is_not_guarded() -> None:
    """`fully_shard` frees a layer and allocates it again in this way."""

    def resized(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        size = made.untyped_storage().nbytes()
        made.untyped_storage().resize_(0)
        made.untyped_storage().resize_(size)
        return made.copy_(x.sin())

    integrity.check(pair(torch.sin, resized, gradients=False), CASE, "cpu")


def test_guards_are_not_traced_by_fullgraph_compilation() -> None:
    compiled = torch.compile(lambda x: torch.zeros_like(x) + 2 * x, backend="eager", fullgraph=True)
    integrity.check(pair(lambda x: 2 * x, lambda x: compiled(x), gradients=False), CASE, "cpu")
