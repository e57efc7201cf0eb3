"""Each kind of inputs is drawn at least once in a proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scratch import Project

from perfsuite import Pair, check, floats, integers, scalar, size, stateful, tensor
from perfsuite.correctness import incoming_gradients, side_calls
from perfsuite.correctness.tally import Tally
from perfsuite.declare.sides import as_side
from perfsuite.declare.specs import LAYOUTS, elements
from perfsuite.draws import coverage, input_kinds
from perfsuite.draws import inputs as make
from perfsuite.draws.input_kinds import whole_tensors
from perfsuite.draws.tensor_values import LARGE, UNBOUNDED_REGIMES
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case, InputCase
from perfsuite.session import planned_draws

pytest_plugins = ["pytester"]


def pair(where: Callable[..., bool] | None = None, **inputs: Any) -> Pair:
    return Pair(name="p", reference=torch.add, optimized=torch.add, inputs=inputs, where=where)


def drawn(of: Pair, seed: int = 0) -> list[Case]:
    found = list(coverage.draws(of, "float32", seed))
    for case in found:
        make.build(of, case, "cpu")
    return found


@pytest.mark.parametrize("seed", range(5))
def test_planned_draws_contain_all_kinds(seed: int) -> None:
    of = pair(x=tensor("n", "m"), p=scalar(floats(0, 1)))
    found = drawn(of, seed)
    held = set().union(*(input_kinds.kinds_in(of, case) for case in found))
    assert held >= set(input_kinds.kinds(of))
    assert {k[1] for k in held if k[0] == "regime"} | {LARGE} == set(UNBOUNDED_REGIMES)
    assert len(found) <= 38


@pytest.mark.parametrize("seed", range(5))
def test_planned_draws_in_float16_contain_values_whose_squares_overflow(seed: int) -> None:
    of = replace(pair(x=tensor("n", "m")), dtypes=("float32", "float16"))
    kinds = (input_kinds.kinds_in(of, case) for case in drawn(of, seed))
    assert any(("regime", LARGE) in found for found in kinds)
    assert ("regime", LARGE) in input_kinds.kinds(replace(of, inputs={"x": tensor("n", "m", dtype="float16")}))
    assert ("regime", LARGE) not in input_kinds.kinds(replace(of, dtypes=("bfloat16",)))


def test_several_tensors_share_the_draws() -> None:
    one, three = (drawn(pair(**{name: tensor("n") for name in names})) for names in ("x", "xyz"))
    assert len(three) < len(one)
    for case in three:
        spoiled = [how.regime for how in case.inputs.values() if how.regime in coverage.SPOILING]
        assert not spoiled or all(how.regime in ("normal", *spoiled) for how in case.inputs.values())


def test_each_size_exceeds_a_large_tile_while_the_others_are_small() -> None:
    of = pair(x=tensor("n", "m"), y=tensor("m"))
    for symbol, other in (("n", "m"), ("m", "n")):
        found = [case.sizes for case in drawn(of) if case.sizes[symbol] > 257]
        assert [min(n for n in (512, 1023, 1024, 2176) if sizes[symbol] <= n) for sizes in found] == [
            512,
            1023,
            1024,
            2176,
        ]
        assert all(sizes[other] <= coverage.SMALL for sizes in found)
    assert (
        max(case.sizes["n"] for case in coverage.draws(of, "float32", 0, extent=input_kinds.Extent(large=False))) <= 257
    )


@pytest.mark.parametrize("seed", range(5))
def test_each_end_and_choice_of_a_scalar_is_drawn_beside_ordinary_values(seed: int) -> None:
    inputs = {
        "x": tensor("n"),
        "rate": scalar(floats(0.25, 0.75)),
        "power": scalar(floats(0)),
        "at": scalar(integers(0, "n")),
        "mode": scalar((True, False)),
    }
    every = [case for case in drawn(pair(**inputs), seed) if case.sizes["n"] > 1]
    plain = [case for case in every if {how.regime for how in case.inputs.values()} <= {"normal"}]
    assert {0.25, 0.75} <= {case.sizes["rate"] for case in plain}
    assert 0 in {case.sizes["power"] for case in plain}
    assert {case.sizes["mode"] for case in plain} == {True, False}
    assert 0 in {case.sizes["at"] for case in plain}
    assert any(case.sizes["at"] == case.sizes["n"] - 1 for case in plain)


def test_each_size_is_0_or_1_while_the_others_are_larger() -> None:
    found = [case.sizes for case in drawn(pair(x=tensor("n", "m")))]
    for n in (0, 1):
        for symbol, other in (("n", "m"), ("m", "n")):
            assert any(sizes[symbol] == n and sizes[other] > 1 for sizes in found)


@pytest.mark.parametrize("seed", range(5))
def test_all_tensors_share_each_layout_once_and_all_sizes_are_whole_tiles_once(seed: int) -> None:
    found = drawn(pair(x=tensor("n", "m", "k"), y=tensor("m", "k", 3)), seed)
    for layout in LAYOUTS:
        assert any({case.inputs.get(n, InputCase()).layout for n in "xy"} == {layout} for case in found)
    for sizes in input_kinds.TOGETHER_SIZES.values():
        assert any(all(n in sizes for n in case.sizes.values()) for case in found)


def test_whole_tiles_are_as_large_as_the_element_limit_allows() -> None:
    for dims, tile in (("nm", 64), ("nmk", 64), ("nmkl", 16)):
        found = [case.sizes for case in drawn(pair(x=tensor(*dims)))]
        assert dict.fromkeys(dims, tile) in found


def test_declared_least_size_does_not_limit_large_sizes() -> None:
    assert any(case.sizes["n"] > 2048 for case in drawn(pair(x=tensor("n", least=2))))


@pytest.mark.parametrize("seed", range(3))
def test_large_draws_have_each_size_once_and_the_rows_layout_first(seed: int) -> None:
    found = list(coverage.large_draws(pair(x=tensor("n", "m")), "float32", seed))
    assert sorted(symbol for case in found for symbol, n in case.sizes.items() if n > 2048) == ["m", "n"]
    assert [case.inputs for case in found] == [{"x": InputCase(layout="rows")}, {}]
    assert not list(coverage.large_draws(pair(x=tensor("n", "n")), "float32", seed))


def test_no_size_exceeds_a_large_tile_if_that_has_too_many_elements() -> None:
    square, declared = pair(x=tensor("n", "n")), pair(x=tensor("n"))
    declared.sizes = {"n": size(0, 100)}
    lists = pair(x=[tensor("n")] * 2, y=tensor("n"))
    for of in (square, declared, lists):
        assert all(case.sizes["n"] < 1024 for case in drawn(of))


def test_values_of_an_empty_tensor_do_not_count_as_a_kind() -> None:
    of = pair(x=tensor("n"))
    case = Case(dtype="float32", sizes={"n": 0}, inputs={"x": InputCase(regime="zeros")}, seed=0)
    assert input_kinds.kinds_in(of, case) == {("size", "n", "empty")}


def test_drawn_sizes_respect_their_declared_ranges() -> None:
    of = Pair(
        name="p",
        reference=torch.add,
        optimized=torch.add,
        inputs={"x": tensor("n", "k")},
        sizes={"n": size(16, 64, multiple_of=16), "k": size(3, 5)},
    )
    found = drawn(of)
    assert {case.sizes["n"] for case in found} <= {16, 32, 48, 64}
    assert {case.sizes["k"] for case in found} <= {3, 4, 5}
    assert {k[2] for k in input_kinds.kinds(of) if k[0] == "size"} == {
        *(f"a tile of {n}" for n in (16, 32, 64)),
        input_kinds.LAST,
    }
    assert 5 in {case.sizes["k"] for case in found if case.sizes["n"] >= 16}


def test_declared_maximum_is_drawn_if_it_exceeds_all_tiles() -> None:
    few, many = (
        Pair(
            name="p",
            reference=torch.sin,
            optimized=torch.sin,
            inputs={"x": tensor("n", "m")},
            sizes={"n": size(1, most)},
        )
        for most in (2000, 8000)
    )
    assert [max(case.sizes["n"] for case in drawn(of)) for of in (few, many)] == [1024, 8000]


def test_draws_that_where_excludes_are_left_out() -> None:
    of = pair(where=lambda n: n > 20, x=tensor("n"))
    found = drawn(of)
    assert found
    assert all(case.sizes["n"] > 20 for case in found)


def test_fault_in_one_regime_is_detected_in_every_run(project: Project) -> None:
    project.write(
        "tests/test_add.py",
        """
        import torch
        from perfsuite import Pair, Workload, tensor

        def wrong(x):
            tiny = bool(((x.abs() < 1e-38) & (x != 0)).any()) and x.numel() > 1
            return 2 * x + 1 if tiny else 2 * x

        doubled = Pair(name="doubled", reference=lambda x: 2 * x, optimized=wrong, inputs={"x": tensor("n")},
                       gradients=False, workloads=[Workload("w", n=4)])
        """,
    )
    for seed in range(4):
        result = project.run("-m", "correctness", "-k", "equivalence", f"--hypothesis-seed={seed}")
        result.assert_outcomes(failed=1)


def test_planned_draws_cover_all_kinds_of_incoming_gradients() -> None:
    of = Pair(name="p", reference=torch.sin, optimized=torch.sin, inputs={"x": tensor("n", values=floats(-2, 2))})
    for seed in range(5):
        found = list(incoming_gradients.in_turn(coverage.draws(of, "float32", seed)))
        assert {incoming_gradients.kind_of(case) for case in found if case.sizes["n"]} == set(incoming_gradients.KINDS)


def test_planned_draws_take_few_steps_of_a_stateful_pair() -> None:
    of = Pair(
        name="p",
        reference=stateful(CountedSteps),
        optimized=stateful(CountedSteps),
        inputs={"x": tensor("n")},
        step_inputs={"g": tensor("n")},
        gradients=False,
    )
    (first, *_), whole = (
        planned_draws.every_kind(of, "equivalence", "float32", 0, "cpu"),
        Case(dtype="float32", sizes={"n": 3}, inputs={}, seed=0),
    )
    assert [_compared(of, case) for case in (first, whole)] == [[1, 2, 17], [1, 2, 17, 100]]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_draws_in_ranks_differ_in_the_sizes_that_are_multiples_of_their_number(ranks: int) -> None:
    x = tensor("ranks * rows", "n", "m", by_rank=0)
    of = Pair(name="p", reference=torch.sin, optimized=torch.sin, inputs={"x": x}, gradients=False, ranks=(ranks,))
    sizes = [case.sizes for case in planned_draws.in_ranks(of.at(ranks), "float32", 0, "cpu")]
    off = [[name for name in ("m", "n", "rows") if drawn[name] % ranks] for drawn in sizes]
    assert off == [[], ["m"], ["n"], ["rows"], ["m", "n", "rows"]]
    assert sizes[-1] == {"m": 1, "n": 1, "rows": 1, "ranks": ranks}


def test_draws_in_ranks_have_sizes_that_the_pair_allows() -> None:
    x = tensor("ranks * rows", "n", by_rank=0)
    given: Any = {"reference": torch.sin, "optimized": torch.sin, "inputs": {"x": x}, "gradients": False, "ranks": (2,)}
    of = Pair(name="p", sizes={"n": size(16, 64, multiple_of=16)}, where=lambda rows: rows > 1, **given)
    sizes = [case.sizes for case in planned_draws.in_ranks(of.at(2), "float32", 0, "cpu")]
    assert {(drawn["n"], drawn["rows"] % 2) for drawn in sizes} == {(16, 0), (16, 1)}
    assert not list(planned_draws.in_ranks(Pair(max_examples=1, **given).at(2), "float32", 0, "cpu"))


class CountedSteps:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __call__(self, g: torch.Tensor) -> torch.Tensor:
        self.x = self.x + g
        return self.x


def _compared(of: Pair, case: Case) -> list[int]:
    leaves = side_calls.produce(of, as_side(of.optimized), case, "cpu", gradients=False)
    return sorted({int(name.split(" after ")[1].split()[0]) for name in leaves})


@pytest.mark.parametrize("dims", ["abc", "abcd", "abcde"])
def test_draws_of_many_sizes_are_not_too_large(dims: str) -> None:
    of = pair(x=tensor(*dims))
    cases = [*coverage.draws(of, "float32", 1)]
    assert all(elements(spec, case.sizes) <= coverage.MOST_OF_TILES for case in cases for spec in whole_tensors(of))
    for symbol in dims:  # each size still exceeds a large tile in some draw
        assert any(case.sizes[symbol] > 128 for case in cases)


def test_limiting_elements_does_not_call_where_without_scalars() -> None:
    inputs: dict[str, Any] = {"x": tensor(*"abcd"), "p": scalar(floats(0, 1))}
    of = pair(where=lambda a, p: p <= 1 and a >= 0, **inputs)
    assert [*coverage.draws(of, "float32", 1)]


# --- few draws ------------------------------------------------------------------------------------------------------

SELDOM_ANY = """
import torch
from perfsuite import Pair, Workload, size, tensor

def scaled(x, y):
    return x.sum(1) * y{times}

scaled_sums = Pair(
    reference=scaled,
    optimized=scaled,
    inputs={{"x": tensor("rows", "a * b * c * d * e * f * g * h"), "y": tensor("rows")}},
    sizes={{"rows": size(1, 4)}} | dict.fromkeys("abcdefgh", size(0, 1)),
    max_examples=5,
    gradients=False,
    workloads=[Workload("w", rows=4, **dict.fromkeys("abcdefgh", 1))],
)
"""


def test_pair_passes_if_few_random_draws_prove_nothing(project: Project) -> None:
    project.write("tests/test_sums.py", SELDOM_ANY.format(times=""))
    for seed in range(3):  # in most draws the rows are empty, so every sum is 0
        result = project.run("-m", "correctness", "-k", "equivalence", f"--hypothesis-seed={seed}")
        result.assert_outcomes(passed=1)


def test_degenerate_task_is_reported_after_plain_draws(project: Project) -> None:
    project.write("tests/test_sums.py", SELDOM_ANY.format(times=" * 0"))
    result = project.run("-m", "correctness", "-k", "equivalence")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the reference gives the same answer whatever its inputs are, on all of 8 draws*"])


@pytest.mark.parametrize("multiple", [0, 1])
def test_check_makes_further_draws(multiple: int) -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1) * y * multiple

    of = Pair(
        name="scaled",
        reference=scaled,
        optimized=scaled,
        inputs={"x": tensor("rows", "a * b * c * d * e * f * g * h"), "y": tensor("rows")},
        sizes={"rows": size(1, 4), **dict.fromkeys("abcdefgh", size(0, 1))},
        max_examples=5,
    )
    if multiple:
        check(of, device="cpu")
    else:
        with pytest.raises(NotEquivalent, match="the same answer whatever its inputs are, on all of 8 draws"):
            check(of, device="cpu")


@pytest.mark.parametrize("draws", [2, 4, 8])
def test_plain_draws_follow_if_the_reference_raised_on_all_draws(draws: int) -> None:
    of = Pair(
        name="p",
        reference=abs,
        optimized=abs,
        inputs={"x": tensor("rows", "a * b * c * d * e * f * g * h")},
        sizes={"rows": size(1, 4), **dict.fromkeys("abcdefgh", size(0, 1))},
        max_examples=draws,
        gradients=False,
    )
    case, tally = Case(dtype="float32", sizes={}, inputs={}, seed=0), Tally(draws=draws, discarded=draws)
    tally.raised = NotEquivalent("p: the reference raises ValueError", case)
    found = []
    for further in planned_draws.further(of, "float32", 0, "cpu", tally):
        found.append(further)
        tally.draws += 1
        assert all(further.sizes[symbol] == 1 for symbol in "abcdefgh")
    assert len(found) == {2: 1, 4: 2, 8: 3}[draws]
    assert not tally.proves_too_little


def test_no_further_draws_are_made_if_enough_is_proven() -> None:
    of = pair(x=tensor("n"), where=lambda n: n < 1 / 0)  # not asked
    proven = Tally(draws=3, answers_differ=True)
    assert list(planned_draws.further(of, "float32", 0, "cpu", proven)) == []
