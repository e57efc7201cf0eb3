"""The likely cause of a simple error is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import perfsuite
from perfsuite import Pair, floats, integers, listof, sampled, scalar, size, tensor
from perfsuite.correctness import contexts, diagnosis, remedies, side_calls, truths
from perfsuite.correctness.integrity import calls
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.relations import reaches, relation
from perfsuite.declare.sides import as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case, InputCase

TRUTH = torch.linspace(-3, 4, 64, dtype=torch.float64).reshape(8, 8).sin()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (1.0005 * TRUTH, "times 1.0005: a constant factor"),
        (-TRUTH, "times -1: a constant factor"),
        (TRUTH + 3e-6, "plus 3e-06 in each element"),
        (TRUTH.t(), "its last two dimensions exchanged"),
        (TRUTH.roll(1, 0), "shifted by +1 along dimension 0"),
        (TRUTH.roll(-1, 1), "shifted by -1 along dimension 1"),
    ],
)
def test_a_simple_relation_to_the_truth_is_named(wrong: torch.Tensor, says: str) -> None:
    found = relation(wrong, TRUTH)
    assert found is not None
    assert says in found


@pytest.mark.parametrize(
    "got",
    [
        TRUTH.float().half().double(),
        TRUTH + 1e-3 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double(),
        TRUTH.flatten(),
        torch.full_like(TRUTH, float("nan")),
        torch.zeros_like(TRUTH).index_fill(0, torch.tensor([3]), 1.0),
        TRUTH,
    ],
    ids=["rounded", "noise", "another shape", "not finite", "something else", "right"],
)
def test_no_relation_is_named_for_other_answers(got: torch.Tensor) -> None:
    assert relation(got, TRUTH) is None


def test_no_factor_is_named_if_there_are_few_different_values() -> None:
    """With few different values a constant factor may be due to chance: a rounded value is repeated."""
    assert relation(TRUTH.sign() * 0.999, TRUTH.sign()) is None


@pytest.mark.parametrize(
    ("optimized", "says"),
    [
        (lambda x: x.exp() * 1.0005, "likely cause: it is the truth times 1.0005: a constant factor"),
        (lambda x: x.exp() + 1e-3, "likely cause: it is the truth plus 0.001 in each element: a constant offset"),
        (lambda x: x.half().exp().float(), "likely cause: its error is that of float16 or TF32"),
    ],
)
def test_a_failure_message_names_the_likely_cause(optimized: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    inputs = {"x": tensor(16, 16, values=floats(-2, 2))}
    with pytest.raises(NotEquivalent) as caught:
        perfsuite.check(Pair(name="p", reference=torch.exp, optimized=optimized, inputs=inputs), examples=5)
    assert says in str(caught.value)


def test_one_wrong_element_is_not_taken_for_a_lower_precision() -> None:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y[5, 5] += 1e-3
        return y

    assert explained(Pair(name="p", reference=torch.exp, optimized=optimized, inputs={"x": tensor(16, 16)}), {}) is None


def test_gradients_of_one_wrong_row_are_not_taken_for_those_of_a_lower_precision() -> None:
    def optimized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() * (1 + 1e-3 * (torch.arange(len(x)) == 5)[:, None])

    inputs = {"x": tensor(16, 16, values=floats(-1, 1)), "w": tensor(16, 16, values=floats(-1, 1))}
    pair = Pair(name="p", reference=lambda x, w: (x @ w).tanh(), optimized=optimized, inputs=inputs)
    case = Case(dtype="float32", sizes={}, inputs={}, seed=0)
    assert diagnosis.explain(pair, as_side(optimized), case, "cpu", gradients=True) is None
    half = replace(pair, optimized=lambda x, w: (x.half() @ w.half()).float().tanh())
    assert "of float16" in (diagnosis.explain(half, as_side(half.optimized), case, "cpu", gradients=True) or "")


def explained(pair: Pair, sizes: dict[str, int], layout: str = "contiguous") -> str | None:
    inputs = {name: InputCase(layout=layout) for name in pair.inputs}
    case = Case(dtype="float32", sizes=sizes, inputs=inputs, seed=0)
    return diagnosis.explain(pair, as_side(pair.optimized), case, "cpu")


def test_an_answer_that_is_constant_at_one_size_is_not_taken_for_a_constant() -> None:
    """An exclusive sum of one term is 0, whatever the term."""
    inputs = {"x": tensor("m", "n", values=floats(-4, 4))}
    pair = Pair(name="p", reference=lambda x: x.cumsum(-1), optimized=lambda x: x.cumsum(-1) - x, inputs=inputs)
    assert explained(pair, {"m": 1, "n": 1}) is None
    pair = replace(pair, optimized=lambda x: torch.full_like(x, 0.5))
    assert "it does not read them" in (explained(pair, {"m": 1, "n": 1}) or "")


def test_equal_values_of_an_expanded_input_are_not_taken_for_its_layout() -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        return x.shape[1] - 1 - x.flip(-1).argmax(-1)

    pair = Pair(name="p", reference=lambda x: x.argmax(-1), optimized=last, inputs={"x": tensor("m", "n")})
    says = "it is right for other values, and wrong where values of x are equal along a dimension"
    assert explained(pair, {"m": 3, "n": 5}, "inner expanded") == says
    pair = replace(pair, optimized=lambda x: x.argmax(-1) if x.is_contiguous() else x.argmax(-1) + 1)
    assert (explained(pair, {"m": 3, "n": 5}, "inner expanded") or "").endswith("wrong for inner expanded x")


def of_three_values(generator: torch.Generator, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0.05, 0.65, 0.92], dtype=dtype)[torch.randint(0, 3, shape, generator=generator)]


def test_few_different_errors_name_every_precision_that_explains_them() -> None:
    """The sigmoids of these values in bfloat16 have such small errors that float16 would explain them too."""

    def optimized(x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid().bfloat16().float()

    pair = Pair(
        name="p",
        reference=lambda x: x * x.sigmoid(),
        optimized=optimized,
        inputs={"x": tensor(16, 64, values=sampled(of_three_values))},
        gradients=False,
    )
    case = Case(dtype="float32", sizes={}, inputs={}, seed=0)
    truth = truths.establish(pair, case, "cpu", gradients=False)
    produced = side_calls.produce(pair, as_side(optimized), case, "cpu", gradients=False)
    assert diagnosis.precision_of(pair, truth, produced) == "float16 or TF32 or bfloat16"


def test_a_wrong_factor_of_one_element_is_not_taken_for_rounding() -> None:
    """One element is too few to name a factor. With many, whose signs differ, all errors point away from zero."""
    inputs = {"x": tensor("n", values=floats(-2, 2))}
    pair = Pair(name="p", reference=lambda x: 2 * x, optimized=lambda x: 2.001 * x, inputs=inputs, gradients=False)
    with pytest.raises(NotEquivalent) as caught:
        perfsuite.check(pair, examples=5)
    assert "likely cause: its error is that of" not in str(caught.value)


def without_a_tail(x: torch.Tensor) -> torch.Tensor:
    made = x.exp()
    made[..., x.shape[-1] // 16 * 16 :] = 0
    return made


@pytest.mark.parametrize(
    ("optimized", "says"),
    [
        (lambda x: x.exp() * (2 if x.shape[-1] == 1 else 1), "right at larger sizes, and wrong at n=1: a special case"),
        (
            lambda x: x.exp() if len(x) else x.new_zeros(1),
            "a special case of these sizes; if it is never called with n=0, declare it: tensor(…, least=1)",
        ),
        (without_a_tail, "off the tile's size"),
    ],
)
def test_sizes_at_which_a_side_is_wrong_are_named(optimized: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    inputs = {"x": tensor("n", values=floats(-2, 2))}
    with pytest.raises(NotEquivalent) as caught:
        perfsuite.check(Pair(name="p", reference=torch.exp, optimized=optimized, inputs=inputs, gradients=False))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([True, False], "it is right with twice=False, and wrong with twice=True"),
        ([0, 1, 2], "it is right with twice=0 or twice=1, and wrong with twice=2"),
    ],
)
def test_an_option_with_which_a_side_is_wrong_is_named(options: list[int], says: str) -> None:
    pair = Pair(
        name="p",
        reference=lambda x, twice: x * (3 if twice == max(options) else 1),
        optimized=lambda x, twice: x * 1,
        inputs={"x": tensor("n", values=floats(-2, 2)), "twice": scalar(options)},
        gradients=False,
    )
    with pytest.raises(NotEquivalent) as caught:
        perfsuite.check(pair)
    assert says in str(caught.value)


def test_no_option_is_named_if_a_side_is_wrong_with_every_value() -> None:
    pair = Pair(
        name="p",
        reference=lambda x, twice: x * 3,
        optimized=lambda x, twice: x * 1,
        inputs={"x": tensor("n", values=floats(-2, 2)), "twice": scalar([True, False])},
        gradients=False,
    )
    with pytest.raises(NotEquivalent) as caught:
        perfsuite.check(pair)
    assert "wrong with twice" not in str(caught.value)


def polar(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.hypot(x, y), torch.atan2(y, x)


@pytest.mark.parametrize(
    ("optimized", "says"),
    [
        (lambda x, y: polar(x, y)[::-1], r"likely cause: output\[0\] and output\[1\] are exchanged"),
        (
            lambda y, x: polar(x, y),
            "likely cause: it is right with x and y exchanged: a side is called with the inputs by",
        ),
        (lambda x, y: polar(x, y + 0.5), "wrong"),
    ],
)
def test_outputs_or_inputs_that_are_exchanged_are_named(optimized: Callable[..., torch.Tensor], says: str) -> None:
    inputs = {name: tensor("n", values=floats(1, 4)) for name in "xy"}
    of = Pair(name="p", reference=polar, optimized=optimized, inputs=inputs, gradients=False)
    with pytest.raises(NotEquivalent, match=says) as caught:
        perfsuite.check(of, examples=10)
    assert ("exchanged" in says) == ("exchanged" in str(caught.value))


@pytest.mark.parametrize(("eps", "does"), [(2.0**-10, True), (2.0**-7, False)])
def test_an_error_far_below_a_precision_is_not_its_rounding(eps: float, does: bool) -> None:
    assert reaches(TRUTH.half().double(), TRUTH, eps) is does
    assert not reaches(TRUTH + 1e-6, TRUTH, eps)
    assert reaches(TRUTH[:1] + 1e-6, TRUTH[:1], eps)


def test_a_nonfinite_value_that_the_pair_may_exclude_is_named() -> None:
    pair = Pair(name="p", reference=torch.exp, optimized=lambda x: x.nan_to_num().exp(), inputs={"x": tensor("n")})
    with pytest.raises(
        NotEquivalent, match=r"never called with NaN or infinity, declare it: values=floats\(nonfinite="
    ):
        perfsuite.check(pair, examples=100)


def test_a_plainly_wrong_side_is_not_blamed_on_threads_or_call_order() -> None:
    """The side is wrong where the first element is large: on some draws, however it is called."""
    pair = Pair(
        name="p",
        reference=torch.exp,
        optimized=lambda x: torch.exp(x) + 0.01 * (x[:1] > 0.5).float().sum(),
        inputs={"x": tensor(3, values=floats(-1, 1))},
        gradients=False,
    )
    for seed in range(12):
        case = Case(dtype="float32", sizes={}, inputs={}, seed=seed)
        contexts.check(pair, case, "cpu")
        probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=case, device="cpu", home=None)
        calls.call_order(probe)
        calls.reused_memory(probe)


def test_a_gradient_that_goes_to_another_of_equal_values_is_named() -> None:
    def last_largest(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1).max(-1).values

    x = tensor("m", 5, values=floats(-1, 1), least=1)
    pair = Pair(name="p", reference=lambda x: x.max(-1).values, optimized=last_largest, inputs={"x": x})
    with pytest.raises(NotEquivalent, match="goes to another one of several equal values of x than the reference's"):
        perfsuite.check(pair, examples=50)


def test_no_cause_is_guessed_if_an_output_shares_memory_with_an_input() -> None:
    pair = Pair(
        name="p",
        reference=lambda x: x.abs() if len(x) > 1 else x + 0,
        optimized=lambda x: x.abs() if len(x) > 1 else x.view_as(x),
        inputs={"x": tensor("n", values=floats(-1, 1))},
        gradients=False,
    )
    with pytest.raises(NotEquivalent, match=r"in the memory of its input x.*return a copy") as caught:
        perfsuite.check(pair, examples=50)
    assert "likely cause" not in str(caught.value)


def test_each_size_of_zero_is_named_if_a_side_raises() -> None:
    pair = Pair(name="p", reference=torch.abs, optimized=torch.abs, inputs={"x": tensor("m", "n")})
    case = Case(dtype="float32", sizes={"m": 0, "n": 0}, inputs={}, seed=0)
    remedy = remedies.remedy_of(IndexError("index 0 is out of bounds"), pair, case)
    assert remedy == "; if it is never called with m=0 or n=0, declare it: tensor(…, least=1)"


def test_diagnosis_tries_no_size_beyond_the_declared_ones() -> None:
    seen: list[tuple[int, ...]] = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    inputs = {"x": tensor("a", "b", "c", "d", values=floats(-1, 1))}
    pair = Pair(name="p", reference=torch.abs, optimized=wrong, inputs=inputs, sizes=dict.fromkeys("abcd", size(1, 4)))
    with pytest.raises(NotEquivalent, match="wrong"):
        perfsuite.check(pair, examples=10)
    assert max(max(shape) for shape in seen) <= 4


def test_diagnosis_limits_the_number_of_elements() -> None:
    elements: list[int] = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        elements.append(x.numel())
        return x + 1

    inputs = {"x": tensor("a", "b", "c", "d", values=floats(-1, 1))}
    pair = Pair(name="p", reference=torch.abs, optimized=wrong, inputs=inputs, gradients=False)
    case = Case(dtype="float32", sizes=dict.fromkeys("abcd", 3), inputs={}, seed=0)
    diagnosis.explain(pair, as_side(wrong), case, "cpu")
    assert max(elements) <= 2**20


def test_remedy_declares_the_length_of_a_list_in_sizes() -> None:
    pair = Pair(name="p", reference=torch.abs, optimized=torch.abs, inputs={"params": listof("count", tensor("n"))})
    case = Case(dtype="float32", sizes={"count": 0, "n": 3}, inputs={}, seed=0)
    remedy = remedies.remedy_of(IndexError("list index out of range"), pair, case)
    assert remedy == '; if it is never called with count=0, declare it: sizes={"count": size(1, …)}'
    both = remedies.remedy_of(IndexError(), pair, replace(case, sizes={"count": 0, "n": 0}))
    assert both.endswith('count=0 or n=0, declare it: sizes={"count": size(1, …)}, tensor(…, least=1)')


def share(labels: torch.Tensor, kept: torch.Tensor, otherwise: float) -> torch.Tensor:
    """Return the share of labels that are kept, or another value if none is."""
    return kept.double().sum() / len(labels) if kept.any() else labels.new_full((), otherwise, dtype=torch.float64)


def guesses(pair: Pair, sizes: dict[str, int]) -> list[str]:
    """Return the diagnosis of each draw of these sizes on which the optimized side is wrong."""
    found = []
    for seed in range(60):
        case = Case(dtype="float32", sizes=sizes, inputs={}, seed=seed)
        values = make.build(pair, case, "cpu").values()
        if not torch.allclose(pair.reference(*values), pair.optimized(*values)):
            found.append(diagnosis.explain(pair, as_side(pair.optimized), case, "cpu") or "")
    assert found
    return found


LABELS = {"labels": tensor("n", dtype="int64", values=integers(0, 3, also=(-100,)), least=1)}


@pytest.mark.parametrize(
    ("kept", "otherwise", "word"),
    [
        # Wrong if all labels are ignored, which is likely only with a single label.
        (lambda labels: labels >= 0, 1.0, "sizes"),
        # Ignores label 0, so that the answer for a single label 0 is 0.
        (lambda labels: labels > 0, 0.0, "zeros"),
    ],
)
def test_a_fault_of_some_values_is_not_given_another_cause(
    kept: Callable[[torch.Tensor], torch.Tensor], otherwise: float, word: str
) -> None:
    pair = Pair(
        name="p",
        reference=lambda labels: share(labels, labels >= 0, 0.0),
        optimized=lambda labels: share(labels, kept(labels), otherwise),
        inputs=LABELS,
        gradients=False,
    )
    assert not [guess for guess in guesses(pair, {"n": 1}) if word in guess]


def test_values_are_not_named_as_the_cause_if_larger_inputs_are_right() -> None:
    pair = Pair(
        name="p",
        reference=lambda x: x + 0,
        optimized=lambda x: x + 0 if len(x) > 3 else x.abs(),
        inputs={"x": tensor("n", values=floats(-1, 1))},
        gradients=False,
    )
    assert not [words for words in guesses(pair, {"n": 2}) if "values only" in words]


def test_small_inputs_are_shown() -> None:
    inputs = {"x": tensor("n", values=floats(-1, 1)), "labels": tensor("m", dtype="int64", values=integers(3, 3))}
    pair = Pair(name="p", reference=torch.abs, optimized=torch.abs, inputs={**inputs, "scale": scalar(floats(2, 2))})
    case = Case(dtype="float32", sizes={"n": 1, "m": 2, "scale": 2.0}, inputs={"x": InputCase(regime="zeros")}, seed=0)
    assert diagnosis.shown(pair, case) == "x=[0], labels=[3, 3], scale=2"
    assert not diagnosis.shown(pair, replace(case, sizes={"n": 7, "m": 2, "scale": 2.0}))
    assert not diagnosis.shown(replace(pair, inputs={"x": listof("n", tensor(1))}), case)
