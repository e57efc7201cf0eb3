"""Pairs that a module declares: by name, in lists, dicts and classes, and by parametrized functions."""

from __future__ import annotations

import types
from typing import Any

import pytest
from scale import FULLY
from scratch import Project

from perfsuite import Pair, Workload, tensor
from perfsuite.declare import discovery
from perfsuite.errors import PairError

pytest_plugins = ["pytester"]

MODULE = """
    import pytest
    from perfsuite import Pair, Workload, tensor


    def scaled(by):
        return Pair(
            reference=lambda x: x * by, optimized=lambda x: by * x, inputs={"x": tensor("n")},
            max_examples=3,
            workloads=[Workload("small", n=8), Workload("other", n=4, marks=[pytest.mark.skip(reason="not here")])],
        )


    losses = [scaled(2), scaled(3)]
    named = {"mean": scaled(4), "a sum": scaled(5)}


    class Norms:
        rms = scaled(6)


    class TestLayers:
        linear = scaled(7)

        def test_its_own(self):
            assert self.linear.reference(2) == 14


    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("heads", "size"), [(1, 64), pytest.param(2, 128, id="wide")])
    def attention(heads: int, size: int, causal: bool) -> Pair:
        return scaled(heads + size + causal)


    def helper(by: int) -> Pair:
        return scaled(by)
"""

NAMES = [
    "losses-0",
    "losses-1",
    "named-mean",
    "named-a_sum",
    "Norms.rms",
    "TestLayers.linear",
    "attention-1-64-False",
    "attention-1-64-True",
    "attention-wide-False",
    "attention-wide-True",
]


def test_pairs_in_a_list_a_dict_a_class_and_from_a_parametrized_function(project: Project) -> None:
    project.write("test_many.py", MODULE)
    result = project.run("--collect-only", "-q")
    ids = [line for line in result.stdout.lines if "::" in line]
    assert list(dict.fromkeys(i.split("::")[1] for i in ids if "::equivalence" in i)) == NAMES
    assert sum("::speed[small]" in i for i in ids) == len(NAMES)
    assert "test_many.py::TestLayers::test_its_own" in ids


def test_declared_pairs_are_proven_and_selected_by_name(project: Project) -> None:
    project.write("test_many.py", MODULE)
    result = project.run("-k", "equivalence or test_its_own or other")
    result.assert_outcomes(passed=len(NAMES) + 1, skipped=len(NAMES))
    result = project.run("test_many.py::attention-wide-True::equivalence[float32]")
    result.assert_outcomes(passed=1)


@FULLY
def test_worker_process_finds_declared_pairs(project: Project) -> None:
    project.write("test_many.py", MODULE)
    result = project.run("--perfsuite-isolate=always", "-k", "equivalence and (losses-1 or attention-wide-True)")
    result.assert_outcomes(passed=2)


def module_with(**held: Any) -> types.ModuleType:
    module = types.ModuleType("m")
    for name, value in held.items():
        if isinstance(value, (type, types.FunctionType)):
            value.__module__ = "m"
        setattr(module, name, value)
    return module


def pair() -> Pair:
    return Pair(reference=abs, optimized=abs, inputs={"x": tensor("n")}, workloads=[Workload("w", n=4)])


def test_find_returns_the_pair_with_the_given_name() -> None:
    first, second = pair(), pair()
    module = module_with(pairs=[first, second], one=first, other={"k": second}, Held=type("Held", (), {"a": first}))
    assert discovery.find(module, "one") is first
    assert discovery.find(module, "pairs-1") is second
    assert discovery.find(module, "other-k") is second
    assert discovery.find(module, "Held.a") is first
    assert discovery.find(module, "pairs-2") is None
    assert discovery.find(module, "nothing") is None


def test_private_mixed_or_imported_values_declare_no_pair() -> None:
    assert list(discovery.pairs_of("_known", [pair()], "m")) == []
    for value in ([], [pair(), 3], {}, {"a": 1}, 3, "pair", lambda: pair()):
        assert list(discovery.pairs_of("x", value, "m")) == []
    imported = type("Held", (), {"a": pair(), "__module__": "elsewhere"})
    assert list(discovery.pairs_of("x", imported, "m")) == []


def test_pairs_in_a_list_or_a_class_of_a_class_are_found() -> None:
    class Held:
        several = (pair(), pair())
        _private = (pair(),)
        elsewhere = types.ModuleType

        class Inner:
            a = pair()

        def made(self) -> Pair:
            return pair()

    module = module_with(Held=Held)
    Held.Inner.__module__ = "m"
    Held.itself = Held  # type: ignore[attr-defined]
    names = [name for name, _ in discovery.pairs_of("Held", Held, "m")]
    assert names == ["Held.several-0", "Held.several-1", "Held.Inner.a"]
    assert discovery.find(module, "Held.several-1") is Held.several[1]
    assert discovery.find(module, "Held.Inner.a") is Held.Inner.a


def factory(body: Any) -> Any:
    def made(n: int) -> Pair:
        return body(n)

    made.__module__ = "m"
    return pytest.mark.parametrize("n", [1, 2], ids=["one", "two"])(made)


def test_failing_function_is_reported_with_its_parameters() -> None:
    assert [name for name, _ in discovery.pairs_of("f", factory(lambda n: pair()), "m")] == ["f-one", "f-two"]
    with pytest.raises(PairError, match=r"f\(n=1\) raises ZeroDivisionError: division by zero"):
        list(discovery.pairs_of("f", factory(lambda n: 1 / 0), "m"))
    with pytest.raises(PairError, match=r"f\(n=1\) is annotated to return a Pair and returns int"):
        list(discovery.pairs_of("f", factory(lambda n: n), "m"))


def names_of(ids: Any, *values: Any) -> list[str]:
    def made(n: Any) -> Pair:
        return pair()

    made.__module__ = "m"
    return [name for name, _ in discovery.pairs_of("f", pytest.mark.parametrize("n", values, ids=ids)(made), "m")]


def test_names_do_not_depend_on_the_process() -> None:
    assert names_of(None, abs, pair, int, object(), 2.5, "a b") == [
        "f-abs",
        "f-pair",
        "f-int",
        "f-n3",
        "f-2.5",
        "f-a_b",
    ]


def test_ids_may_be_falsy_or_a_function() -> None:
    assert names_of([0, ""], 5, 6) == ["f-0", "f-"]
    assert names_of(lambda n: None if n == 6 else f"of{n}", 5, 6) == ["f-of5", "f-6"]


def test_two_pairs_with_the_same_name_are_refused() -> None:
    with pytest.raises(PairError, match=r"f declares two pairs called 'f-1'; give them different keys or ids="):
        names_of(None, 1, 1)
    with pytest.raises(PairError, match="d declares two pairs called 'd-a_b'"):
        list(discovery.pairs_of("d", {"a b": pair(), "a/b": pair()}, "m"))


def test_marks_on_a_parameter_set_are_refused() -> None:
    with pytest.raises(PairError, match=r"parametrize\(n\): marks of one set of parameters are not applied to a pair"):
        names_of(None, 1, pytest.param(2, marks=pytest.mark.skip(reason="not here")))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("n", 5), r"parametrize\(n\): the values are 5, which is no list"),
        (("n", [1, 2], False, ["one"]), r"parametrize\(n\): ids= has 1 names for 2 sets of parameters"),
        (("n,k", [(1, 2, 3)]), r"parametrize\(n, k\): \[1, 2, 3\] has 3 values for 2 parameters"),
        (("n,k", [1]), r"parametrize\(n, k\): a set is 1, which is no list"),
        (("n,k", [pytest.param(1)]), r"parametrize\(n, k\): \(1,\) has 1 values for 2 parameters"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(arguments: Any, said: str) -> None:
    def made(n: int, k: int = 0) -> Pair:
        return pair()

    made.__module__ = "m"
    with pytest.raises(PairError, match=said):
        list(discovery.pairs_of("f", pytest.mark.parametrize(*arguments)(made), "m"))
