"""Running one side returns its outputs, in-place changes and gradients, by name."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from perfsuite import Pair, compiled, integers, module, side, stateful, tensor
from perfsuite.correctness import execution, incoming_gradients, redrawn_roundings
from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import PairError
from perfsuite.records import Case

INPUTS = {"x": tensor("n"), "i": tensor("n", dtype="int64", values=integers()), "y": tensor("n", dtype="float32")}


def pair(call: Any = torch.exp, inputs: Any = None, **fields: Any) -> Pair:
    return Pair(reference=call, optimized=call, inputs=inputs or {"x": tensor("n")}, name="p", **fields)


def ran(of: Pair, *, gradients: bool = False, n: int = 4, seed: int = 0) -> execution.Leaves:
    values = make.build(of, Case(dtype="float32", sizes={"n": n, "m": 3}, inputs={}, seed=seed), "cpu")
    execution.poison(of, values)
    call = of.reference
    return execution.run(call.call if isinstance(call, Side) else call, of, values, gradients=gradients, seed=seed)


def test_outputs_are_named_by_their_place() -> None:
    leaves = ran(pair(lambda x: {"a": (x, [1, None]), "b": 2.5}))
    assert list(leaves) == ["output['a'][0]", "output['a'][1][0]", "output['a'][1][1]", "output['b']"]
    assert list(ran(pair(lambda x: x * 1))) == ["output"]
    assert ran(pair(lambda x: None)) == {"output": None}
    assert ran(pair(lambda x: ())) == {}


def test_output_of_an_unsupported_type_is_an_error() -> None:
    with pytest.raises(PairError, match=r"output\[1\] is a str; a side returns tensors, numbers, None, or tuples"):
        ran(pair(lambda x: (x, "text")))


def test_changed_inputs_follow_the_outputs_and_count_once() -> None:
    both = {"x": tensor("n"), "out": tensor("n")}

    def step(x: torch.Tensor, out: torch.Tensor) -> Any:
        out.copy_(x)
        return x.add_(1), x * 2

    leaves = ran(pair(step, both, mutates={"x": "changed", "out": "written"}))
    assert list(leaves) == ["output[0] is x", "output[1]", "x (in place)", "out (in place)"]
    assert leaves["output[0] is x"] is True


def test_inputs_that_are_only_written_are_poisoned() -> None:
    both = {
        "x": tensor("n"),
        "out": tensor("n"),
        "many": [tensor("n", dtype="int32", values=integers()), tensor("n", dtype="bool")],
    }
    leaves = ran(pair(lambda x, out, many: None, both, mutates={"out": "written", "many": "written"}))
    out = leaves["out (in place)"]
    assert isinstance(out, torch.Tensor)
    assert out.isnan().all()
    assert leaves["many[0] (in place)"].tolist() == [2**31 - 1] * 4  # type: ignore[union-attr]
    assert leaves["many[1] (in place)"].tolist() == [True] * 4  # type: ignore[union-attr]


def test_differentiable_inputs_are_found() -> None:
    of = pair(
        inputs={
            **INPUTS,
            "held": tensor("n", differentiable=False),
            "changed": tensor("n"),
            "nest": [tensor("n"), tensor("n", dtype="int64", values=integers())],
            "net": module(lambda n: torch.nn.Linear(n, n)),
        },
        mutates={"changed"},
    )
    assert execution.differentiable(of) == ("x", "y", "nest", "net")
    values = make.build(of, Case(dtype="float32", sizes={"n": 3}, inputs={}, seed=0), "cpu")
    assert list(execution.require_gradients(of, values)) == ["x", "y", "nest[0]", "net.weight", "net.bias"]


def test_incoming_gradients_are_non_uniform_and_repeat_by_seed() -> None:
    first = ran(pair(torch.exp), gradients=True, n=50)["gradient of x"]
    again = ran(pair(torch.exp), gradients=True, n=50)["gradient of x"]
    other = ran(pair(torch.exp), gradients=True, n=50, seed=1)["gradient of x"]
    output = ran(pair(torch.exp), gradients=True, n=50)["output"]
    assert isinstance(first, torch.Tensor)
    assert isinstance(output, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert not first.requires_grad
    assert not output.requires_grad
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.as_tensor(other))
    came_in = first / output
    assert came_in.unique().numel() == 50
    assert (came_in < 0).any()
    assert (came_in > 0).any()


def test_two_outputs_have_different_incoming_gradients() -> None:
    gradient = ran(pair(lambda x: (x * 1, x * -1)), gradients=True, n=50)["gradient of x"]
    assert isinstance(gradient, torch.Tensor)
    assert gradient.any()


def test_an_unused_input_has_no_gradient() -> None:
    leaves = ran(pair(lambda x, y: x * 1, {"x": tensor("n"), "y": tensor("n")}), gradients=True)
    assert leaves["gradient of y"] is None
    assert ran(pair(lambda x: x.detach()), gradients=True)["gradient of x"] is None


def test_grad_mode_is_off_without_gradients() -> None:
    seen = []
    ran(pair(lambda x: seen.append((x.requires_grad, torch.is_grad_enabled())) or x))
    ran(pair(lambda x: seen.append((x.requires_grad, torch.is_grad_enabled())) or x * 1), gradients=True)
    assert seen == [(False, False), (True, True)]


def test_steps_get_their_inputs_and_states_are_copies() -> None:
    def build(x: torch.Tensor) -> Any:
        def step(g: torch.Tensor) -> torch.Tensor:
            x.add_(g)
            return x.sum()

        return step

    of = pair(stateful(build), mutates={"x"})
    given: list[int] = []

    def ones(i: int) -> dict[str, Any]:
        given.append(i)
        return {"g": torch.ones(2)}

    states = execution.run_steps(build, of, {"x": torch.zeros(2)}, (1, 3), ones)
    assert given == [1, 2, 3]
    assert list(states) == [1, 3]
    assert list(states[1]) == ["output after 1 step", "x (in place) after 1 step"]
    assert states[1]["x (in place) after 1 step"].tolist() == [1, 1]  # type: ignore[union-attr]
    assert states[3]["output after 3 steps"] == 6


def test_unavailable_gives_the_reason() -> None:
    assert execution.unavailable(side(abs), "cpu") is None
    assert execution.unavailable(side(abs, devices=["cuda"]), "cpu") == (
        "runs on cuda only, and this machine has no such device"
    )
    assert execution.unavailable(side(abs, available=lambda: "no nvcc; install it"), "cpu") == "no nvcc; install it"
    assert execution.unavailable(side(abs, devices=["cuda"]), "cuda:1") is None


def test_compiled_side_is_compiled_once_per_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def fake(call: Any, **options: Any) -> Any:
        calls.append(options)
        return lambda *args: call(*args)

    monkeypatch.setattr(torch, "compile", fake)
    execution.forget_compiled()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    once = execution.callable_of(compiled(double))
    assert execution.callable_of(compiled(double)) is once
    assert execution.callable_of(compiled(double, mode="max-autotune")) is not once
    assert execution.callable_of(compiled(double, dynamic=True)) is not once
    assert calls == [{"dynamic": False}, {"dynamic": False, "mode": "max-autotune"}, {"dynamic": True}]
    execution.forget_compiled()
    execution.callable_of(compiled(double))
    assert len(calls) == 4
    step = execution.callable_of(compiled(stateful(lambda x: lambda g: x + g)))(torch.ones(1))
    assert step(torch.ones(1)) == 2
    assert execution.callable_of(Side(call=double)) is double
    execution.forget_compiled()


def test_only_warnings_of_compiled_sides_are_silenced() -> None:
    for made in (compiled(abs), Side(call=torch.compile(lambda x: x))):
        with execution.quiet(made):
            warnings.warn("from the compiler", stacklevel=1)
    with execution.quiet(Side(call=abs)), pytest.warns(UserWarning, match="from the side"):
        warnings.warn("from the side", stacklevel=1)


# --- redrawn roundings ---------------------------------------------------------------------------------------


def redrawn(call: Any, seed: int = 0, **options: Any) -> Any:
    with redrawn_roundings.redrawn_roundings(seed, **options):
        return call()


def test_redrawn_roundings_move_arithmetic_by_an_ulp_and_repeat_by_seed() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    exact = torch.exp(x)
    moved = redrawn(lambda: torch.exp(x))
    assert torch.equal(moved, redrawn(lambda: torch.exp(x)))
    assert not torch.equal(moved, redrawn(lambda: torch.exp(x), seed=1))
    share = (moved.double() / exact.double() - 1).abs()
    assert 0 < float(share.mean()) < float(share.max()) <= 1.6 * torch.finfo(torch.float32).eps
    assert torch.equal(torch.exp(x), exact)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[3:].T,
        lambda x: x.clone(),
        lambda x: x.amax(0),
        lambda x: x.sort().values,
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.clamp(-1, 1),
        lambda x: x.relu(),
        lambda x: x.abs(),
        lambda x: -x,
        lambda x: torch.cat([x, x]),
        lambda x: x.double().float(),
        lambda x: x.floor(),
        lambda x: x > 0,
        lambda x: x.argmax(),
        lambda x: x.new_zeros(3),
        lambda x: x * 0,
    ],
)
def test_operations_that_do_not_round_are_not_changed(call: Any) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(redrawn(lambda: call(x)), call(x))


def test_sums_are_redrawn_as_if_added_in_sequence() -> None:
    x = torch.rand(64, 768, generator=torch.Generator().manual_seed(0))
    w = torch.rand(768, 64, generator=torch.Generator().manual_seed(1))
    eps = torch.finfo(torch.float32).eps
    for call in (lambda: x.sum(-1), lambda: x.mean(-1), lambda: x @ w, lambda: torch.addmm(x[:, :64], x, w)):
        share = (redrawn(call).double() / call().double() - 1).abs()
        assert 4 * eps < float(share.max()) <= (math.sqrt(768 / 3) + 2) * eps
    half = (x.half() @ w.half()).double()
    share = (redrawn(lambda: x.half() @ w.half()).double() / half - 1).abs()
    assert float(share.max()) < 2 * torch.finfo(torch.float16).eps  # kept in float32


def test_roundings_are_redrawn_by_the_depth_of_each_operation() -> None:
    x = torch.rand(64, 768, generator=torch.Generator().manual_seed(0))
    eps = torch.finfo(torch.float32).eps
    with redrawn_roundings.redrawn_roundings(0):
        both = [(torch.exp(x), x.sum(-1)) for _ in range(3)]
    for plain, summed in both:
        assert float((plain.double() / torch.exp(x).double() - 1).abs().max()) <= 1.6 * eps
        assert float((summed.double() / x.sum(-1).double() - 1).abs().max()) > 4 * eps


def test_roundings_drawn_ahead_are_limited_and_each_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrawn_roundings, "DRAWN_AHEAD", 64)
    with redrawn_roundings.redrawn_roundings(0, units=1e6) as mode:  # one unit has only three different factors
        found = [torch.ones(n, dtype=torch.float64).exp() for n in [5] * 40 + [100] + [5] * 40]
        for depth in range(1, 100):
            torch.ones(3, depth).sum(-1)
    every = torch.cat(found)
    assert len(every.unique()) == len(every) == 500
    assert len(mode.factors) == redrawn_roundings.MOST_KEPT
    assert max(len(f.drawn) for f in mode.factors.values()) <= 64


def test_cancelling_terms_inside_an_operation_keep_their_roundings() -> None:
    """The gradient of a softmax over one element is 0, the difference of two equal terms."""
    x = torch.zeros(64, 1, requires_grad=True)

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad((torch.softmax(x, -1) * 3).sum(), x)
        return found

    assert not gradient().any()
    assert redrawn(gradient).any()
    ones = torch.ones(64)
    assert redrawn(lambda: torch.exp(ones * 0) - 1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decomposed_operations_keep_dtype_shape_and_value(dtype: torch.dtype) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x.requires_grad_()
    w = torch.ones(8, dtype=dtype)
    functional = torch.nn.functional

    def both(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = call(x)
        incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return out.detach(), torch.autograd.grad(out, x, incoming.to(dtype))[0]

    for call in (
        lambda x: torch.softmax(x, -1),
        lambda x: torch.log_softmax(x, -1),
        lambda x: functional.layer_norm(x, (8,), w, w),
        lambda x: functional.rms_norm(x, (8,), w),
        lambda x: functional.group_norm(x, 2),
        functional.gelu,
        functional.silu,
        torch.sigmoid,
        torch.tanh,
        functional.softplus,
        functional.logsigmoid,
        lambda x: functional.mse_loss(x, w.expand(6, 8)),
        lambda x: functional.cross_entropy(x, torch.arange(6)),
    ):
        for plain, moved in zip(both(call), redrawn(lambda call=call: both(call)), strict=True):
            assert moved.dtype == plain.dtype
            assert moved.shape == plain.shape
            error = (moved.double() - plain.double()).square().mean().sqrt()
            assert float(error) < 10 * torch.finfo(dtype).eps * float(plain.double().square().mean().sqrt())


def test_in_place_operations_and_empty_tensors_are_handled() -> None:
    x = torch.ones(1000)
    with redrawn_roundings.redrawn_roundings(0):
        x.mul_(3.0).add_(1.0)
        torch._foreach_add_([x], 1.0)
        torch.empty(0).exp().sum()
        torch.empty(0, 4).mean(0)
    assert 0 < float((x - 5).abs().max()) < 1e-5


def test_least_bounds_the_rounding_unit() -> None:
    x = torch.ones(1000, dtype=torch.float64)
    assert float((redrawn(lambda: x.exp(), least=1e-6) / math.e - 1).abs().max()) > 5e-7


def test_shared_incoming_gradients_are_one_tensor() -> None:
    outputs = {"output[0]": torch.ones(3), "output[1]": torch.ones(3), "output[2]": torch.ones(4)}
    first, second, other = incoming_gradients.for_outputs(outputs, 7, kind=incoming_gradients.SHARED)
    assert first is second
    assert other.shape == (4,)
    plain = incoming_gradients.for_outputs(outputs, 7)
    assert torch.equal(plain[0], first)
    assert not torch.equal(plain[1], first)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_incoming_gradients_of_complex_outputs_have_two_parts(dtype: str | None) -> None:
    outputs = {"output": torch.ones(50, dtype=torch.complex64)}
    (given,) = incoming_gradients.for_outputs(outputs, 7, dtype)
    for part in (given.real, given.imag):
        assert 0.5 < float(part.std()) < 1.5
        assert torch.equal(part, part.bfloat16().float()) == (dtype is not None)
    assert not torch.equal(given.real, given.imag)


@pytest.mark.parametrize(("device", "threads", "inside"), [("cuda", 8, 4), ("cuda", 2, 2), ("cpu", 8, 8)])
def test_few_threads_limits_cpu_threads_for_a_gpu(device: str, threads: int, inside: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with execution.few_threads(device):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
