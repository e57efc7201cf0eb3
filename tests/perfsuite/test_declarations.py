"""Declarations about a kernel: related sizes, ignored labels, consumed inputs, another output dtype."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from scale import count

import perfsuite
from perfsuite import Pair, Workload, floats, integers, size, tensor
from perfsuite.correctness import contexts
from perfsuite.declare import expressions
from perfsuite.declare.pair_fields import CONTEXTS
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import cases
from perfsuite.draws.memory_layouts import with_layout
from perfsuite.errors import NotEquivalent, PairError

SOME = {"values": floats(-2, 2)}


def check(pair: Pair) -> None:
    """Run all proofs, on draws that are the same in every run."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("declared", derandomize=True)
    hypothesis.settings.load_profile("declared")
    try:
        perfsuite.check(pair, examples=count(quick=3, full=12), device="cpu")
    finally:
        hypothesis.settings.load_profile(before)


def cases_of(pair: Pair, count: int = 40) -> list[Any]:
    found: list[Any] = []

    @hypothesis.settings(max_examples=count, database=None, derandomize=True)
    @hypothesis.given(cases(pair, "float32"))
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "depends_on", "value"),
    [("half", {"half"}, 6), ("2*half", {"half"}, 12), ("(half + k) // 4 - 1", {"half", "k"}, 1), ("7", set(), 7)],
)
def test_size_expressions_depend_on_other_sizes(text: str, depends_on: set[str], value: int) -> None:
    assert expressions.names(text) == depends_on
    assert expressions.value(text, {"half": 6, "k": 5}) == value


@pytest.mark.parametrize("text", ["2**half", "half/2", "f(half)", "half half", "", "1.5*half", "-half"])
def test_invalid_size_expression_is_refused_by_tensor_and_integers(text: str) -> None:
    with pytest.raises(PairError, match="is no size: use a name, or sums, products"):
        tensor("m", text)
    with pytest.raises(PairError, match="is no size"):
        integers(0, text)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value


def test_proportional_sizes_need_no_where_condition() -> None:
    pair = Pair(
        reference=swiglu,
        optimized=lambda x: torch.sigmoid(x[..., : x.shape[-1] // 2]) * x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
        inputs={"x": tensor("m", "2*half", **SOME)},
        workloads=[Workload("w", m=4, half=8)],
    )
    pair.validate()
    assert pair.symbols == {"m", "half"}
    check(pair)


def test_least_bounds_the_sizes_of_an_expression() -> None:
    pair = Pair(reference=abs, optimized=abs, inputs={"x": tensor("m", "2*n", least=1)}, sizes={"m": size(3, 9)})
    drawn = cases_of(pair)
    assert {case.sizes["m"] for case in drawn} <= set(range(3, 10))
    assert min(case.sizes["n"] for case in drawn) == 1
    assert min(c.sizes["n"] for c in cases_of(Pair(reference=abs, optimized=abs, inputs={"x": tensor("n")}))) == 0


def test_workload_sizes_may_have_the_name_of_an_option() -> None:
    workload = Workload("w", sizes={"repeat": 4, "device": 2}, n=3)
    assert (workload.sizes, workload.repeat) == ({"repeat": 4, "device": 2, "n": 3}, 1)


def test_integer_labels_may_include_an_ignored_value() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = labels != -100
        chosen = torch.log_softmax(logits, -1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
        return -torch.where(kept, chosen, 0).sum()

    inputs = {
        "logits": tensor("N", "V+1", **SOME),
        "labels": tensor("N", dtype="int64", values=integers(0, "V+1", also=(-100,))),
    }
    check(Pair(reference=loss, optimized=by_hand, inputs=inputs))
    drawn = [make.build(Pair(reference=loss, optimized=loss, inputs=inputs), c, "cpu") for c in cases_of_loss(inputs)]
    labels = torch.cat([values["labels"] for values in drawn])
    assert int(labels.min()) == -100
    assert 0.05 < float((labels == -100).double().mean()) < 0.25
    assert all(int(v["labels"].amax()) < v["logits"].shape[1] for v in drawn)


def cases_of_loss(inputs: dict[str, Any]) -> list[Any]:
    drawn = cases_of(Pair(reference=abs, optimized=abs, inputs=inputs))
    return [case for case in drawn if case.sizes["N"] > 0]


# --- consumed inputs ------------------------------------------------------------------------------------------------


class _InPlace(torch.autograd.Function):
    """Function whose backward pass stores the gradient of x in x itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.detach().mul_(2 * grads[0])


class _Incoming(_InPlace):
    """Function whose backward pass stores the gradient of x in the incoming gradient."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].mul_(2 * x)


def squares(function: Any, **fields: Any) -> Pair:
    return Pair(
        reference=lambda x: x * x,
        optimized=lambda x: function.apply(x),
        inputs={"x": tensor("m", "n", layouts=("contiguous",), **SOME)},  # writing to an expanded tensor raises
        **fields,
    )


@pytest.mark.parametrize(("function", "name"), [(_InPlace, "x"), (_Incoming, "grad_output")])
def test_input_overwritten_by_the_backward_pass_must_be_declared_as_consumed(function: Any, name: str) -> None:
    with pytest.raises(NotEquivalent, match=f"consumes={{['\"]{name}['\"]}}"):
        check(squares(function))
    check(squares(function, consumes={name}))


def test_gradient_in_the_memory_of_a_consumed_input_must_be_right() -> None:
    class Wrong(_InPlace):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return x.detach().mul_(grads[0])

    with pytest.raises(NotEquivalent, match="gradient of x"):
        check(squares(Wrong, consumes={"x"}))


def test_workloads_with_consumed_inputs_can_be_timed() -> None:
    for function, name in ((_InPlace, "x"), (_Incoming, "grad_output")):
        workload = Workload("w", m=16, n=16, direction="both", clock="wall")
        (measured,) = perfsuite.measure(squares(function, consumes={name}, workloads=[workload]), device="cpu")
        assert measured.sides["optimized"].wall_s > 0


def test_consumed_inputs_forbid_repeat_and_must_exist() -> None:
    pair = squares(_InPlace, consumes={"x"}, workloads=[Workload("w", m=4, n=4, repeat=2)])
    with pytest.raises(PairError, match="calls it again on inputs that it has used up"):
        pair.validate()
    with pytest.raises(PairError, match="there is no such input"):
        squares(_InPlace, consumes={"y"})


# --- outputs and draws ----------------------------------------------------------------------------------------------


def test_output_dtype_is_declared_and_checked() -> None:
    def pair(call: Any, **fields: Any) -> Pair:
        return Pair(reference=torch.exp, optimized=call, inputs={"x": tensor("n", values=floats(-2, 2))}, **fields)

    check(pair(lambda x: torch.exp(x).bfloat16(), output_dtype="bfloat16"))
    check(pair(lambda x: torch.exp(x.float()), output_dtype="float32", dtypes=("bfloat16",)))
    with pytest.raises(NotEquivalent, match=r"has dtype torch\.float32 where the reference has torch\.bfloat16"):
        check(pair(torch.exp, output_dtype="bfloat16"))
    with pytest.raises(NotEquivalent, match=r"is wrong|is inaccurate"):
        check(pair(lambda x: torch.exp(x * 1.1).bfloat16(), output_dtype="bfloat16"))
    with pytest.raises(PairError, match="output_dtype 'half' is not one of"):
        pair(torch.exp, output_dtype="half")


def test_max_examples_limits_the_number_of_draws() -> None:
    called: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        called.append(x.numel())
        return torch.exp(x)

    few = Pair(reference=torch.exp, optimized=counting, inputs={"x": tensor("n", **SOME)}, max_examples=2)
    check(few)
    once = len(called)
    check(Pair(reference=torch.exp, optimized=counting, inputs={"x": tensor("n", **SOME)}, max_examples=12))
    assert len(called) - once > once
    with pytest.raises(PairError, match="a proof takes 1 draw or more"):
        Pair(reference=torch.exp, optimized=torch.exp, inputs={"x": tensor("n")}, max_examples=0)


@pytest.mark.parametrize("align", [1, 2, 4, 16, 64])
def test_offset_layout_respects_the_declared_alignment(align: int) -> None:
    spec = tensor("n", align=align)
    view = with_layout(torch.zeros(33), "offset", spec.align)
    assert view.storage_offset() * 4 % align == 0 < view.storage_offset()
    assert with_layout(torch.zeros(33), "offset").data_ptr() % 16 == 4


def test_alignment_must_be_a_power_of_two() -> None:
    with pytest.raises(PairError, match="align=12 is no power of two"):
        tensor("n", align=12)


# --- calling contexts and other declarations ------------------------------------------------------------------------


def test_contexts_that_can_be_declared_are_those_that_are_checked() -> None:
    assert tuple(way.__name__ for way in (*contexts.WAYS, *contexts.COSTLY, *contexts.STATEFUL)) == CONTEXTS


def test_step_inputs_without_specs_are_refused() -> None:
    with pytest.raises(PairError, match=r"step_inputs=\{'g'\}: give each input's name with what it is"):
        Pair(reference=torch.exp, optimized=torch.exp, inputs={}, step_inputs={"g"})  # type: ignore[arg-type]  # wrong


def test_unsupported_contexts_are_declared_with_a_reason() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x.t()

    def pair(**fields: Any) -> Pair:
        inputs, sizes = {"x": tensor("m", "n", **SOME)}, {"m": size(0, 33), "n": size(0, 33)}
        return Pair(reference=lambda x: x @ x.t(), optimized=product, inputs=inputs, sizes=sizes, **fields)

    with pytest.raises(
        NotEquivalent,
        match=r"has dtype .*; if the kernel does not support this, declare unsupported={'autocast': 'why'}",
    ):
        check(pair())
    check(pair(unsupported={"autocast": "it computes in float32"}))
    with pytest.raises(PairError, match=r"unsupported={'autocats': …}: not one of inference_mode"):
        pair(unsupported={"autocats": "it computes in float32"})
    with pytest.raises(PairError, match="say why the optimized side does not support it"):
        pair(unsupported={"autocast": " "})


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to the 10 mantissa bits of TF32."""
    if x.dtype != torch.float32:
        return x
    bits = (x.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return x + (bits.view(torch.float32) - x).detach()


def test_tf32_products_must_be_declared() -> None:
    def pair(rounded: Any, **fields: Any) -> Pair:
        return Pair(
            reference=lambda x, y: x @ y,
            optimized=lambda x, y: rounded(x) @ rounded(y),
            inputs={"x": tensor("m", "k", **SOME), "y": tensor("k", "n", **SOME)},
            gradients=False,
            unsupported={"autocast": "it rounds by itself"},
            **fields,
        )

    with pytest.raises(NotEquivalent, match=r"is wrong|is inaccurate"):
        check(pair(in_tf32))
    check(pair(in_tf32, precision="tf32"))
    with pytest.raises(NotEquivalent, match=r"is wrong|is inaccurate"):
        check(pair(lambda x: x.to(torch.float8_e4m3fn).to(x.dtype), precision="tf32"))
    with pytest.raises(PairError, match=r"precision 'tf16' is not one of float64, .*, tf32"):
        pair(in_tf32, precision="tf16")


def test_integer_inputs_need_a_range_unless_they_are_only_written() -> None:
    def pair(dtype: str, **fields: Any) -> Pair:
        return Pair(reference=abs, optimized=abs, inputs={"i": [tensor("n", dtype=dtype)]}, **fields)

    with pytest.raises(
        PairError, match=r"input 'i' holds whole numbers of a range that is not given; give it, as tens"
    ):
        pair("int32")
    pair("bool")
    pair("int32", mutates={"i": "written"})
    Pair(reference=abs, optimized=abs, inputs={"i": tensor("n", dtype="int32", values=integers())})
