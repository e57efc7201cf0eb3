"""Specs: the declarations that are accepted or rejected, and the sizes that they depend on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from perfsuite import constant, floats, integers, listof, module, recorded, sampled, scalar, size, tensor
from perfsuite.declare.specs import Floats, Integers, accepted, symbols
from perfsuite.errors import PairError


@pytest.mark.parametrize(
    ("declare", "match"),
    [
        (lambda: floats(2, 1), r"floats\(2, 1\): the lower bound is above the upper one; swap them"),
        (lambda: tensor("n", layouts=["diagonal"]), "unknown layout 'diagonal'; choose from contiguous, transposed"),
        (lambda: tensor("n", dtype="complex64"), "dtype='complex64', and only real values are drawn: declare the real"),
        (lambda: tensor("n", dtype="complex64", values=floats(-1, 1)), "only real values are drawn"),
        (lambda: tensor("n", dtype="complex128", values=integers(0, 9)), "only real values are drawn"),
        (lambda: size(5, 2), r"size\(5, 2, multiple_of=1\): not a range; use 0 <= low <= high"),
        (lambda: size(-1), "not a range"),
        (lambda: size(1, 8, multiple_of=0), "not a range"),
    ],
)
def test_a_wrong_declaration_raises_a_one_line_error(declare: Callable[[], Any], match: str) -> None:
    with pytest.raises(PairError, match=match) as caught:
        declare()
    assert "\n" not in str(caught.value)


def test_a_tensor_s_values_follow_its_dtype() -> None:
    assert tensor("n").values == Floats()
    assert tensor("n", dtype="bfloat16").values == Floats()
    assert tensor("n", dtype="float32").values == Floats()
    assert tensor("n", dtype="int64").values == Integers()
    assert tensor("n", dtype="bool").values == Integers()
    assert tensor("n", dtype="int32", values=integers(0, 9)).values == Integers(low=0, high=9)


def test_bounded_values_are_finite() -> None:
    assert floats().nonfinite
    assert not floats(0).nonfinite
    assert not floats(None, 1).nonfinite
    assert not floats(nonfinite=False).nonfinite
    assert floats(0, 1).bounded
    assert not floats(0).bounded


def test_symbols_are_the_sizes_that_a_spec_depends_on() -> None:
    assert symbols(tensor("m", 3, "n")) == {"m", "n"}
    assert symbols(tensor("P", 3, dtype="int64", values=integers("low", ["n", "n", 5]))) == {"P", "low", "n"}
    assert symbols(listof("count", tensor("n"))) == {"count", "n"}
    assert symbols(listof(4, (tensor("a"), {"key": tensor("b")}))) == {"a", "b"}
    assert symbols([tensor("a"), [tensor("b")]]) == {"a", "b"}
    assert symbols(module(lambda width, depth, bias=True: None)) == {"width", "depth"}
    assert symbols(module(lambda **sizes: None)) == set()
    for spec in (constant("n"), recorded("x.pt"), scalar(floats(0, 1)), 5):
        assert symbols(spec) == set()


def test_accepted_returns_the_values_that_a_function_names() -> None:
    values = {"a": 1, "b": 2}
    assert accepted(lambda b: None, values) == {"b": 2}
    assert accepted(lambda a, **rest: None, values) == values
    assert accepted(lambda: None, values) == {}


def test_a_scalar_takes_a_list_or_a_range() -> None:
    assert scalar([True, False]).values == (True, False)
    assert scalar(floats(0, 1)).values == floats(0, 1)
    for wrong in (0.1, "ab", [], ["a"]):
        with pytest.raises(PairError, match=r"give a range or a list, as scalar\(floats\(0, 1\)\)"):
            scalar(wrong)  # type: ignore[arg-type]


def test_specs_are_frozen_and_compare_by_value() -> None:
    assert tensor("n", values=floats(0, 1)) == tensor("n", values=floats(0, 1))
    with pytest.raises(AttributeError):
        tensor("n").dtype = "int64"  # type: ignore[misc]
    assert sampled(len).make is len  # type: ignore[arg-type]


def test_declaring_a_pair_imports_no_torch() -> None:
    code = (
        "import sys; from perfsuite import Pair, Workload, tensor\n"
        "Pair(reference=len, optimized=len, inputs={'x': tensor('n')}, workloads=[Workload('w', n=1)]).validate()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_listof_without_a_number_of_items_is_refused() -> None:
    several: Any = tensor("m", "n")
    with pytest.raises(
        PairError, match="listof: a TensorSpec is no number of items; give that number and the spec of one item"
    ):
        listof(several, tensor("n"))
