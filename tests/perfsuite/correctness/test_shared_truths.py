"""The proofs of one pair share draws and cached truths, and still prove as many cases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scale import FULLY, count
from scratch import Project, lines_with

from perfsuite import Pair, Workload, check, floats, tensor
from perfsuite.correctness import equivalence, rule, shared_truths, side_calls, truths
from perfsuite.correctness.rule import FEW, NONE, REPLICAS
from perfsuite.correctness.shared_truths import CachedReferenceResults, cached_results
from perfsuite.correctness.tally import MIN_PROOFS, Tally
from perfsuite.correctness.truths import Discard, Truth, TruthFunction
from perfsuite.declare.sides import as_side
from perfsuite.draws.cases import case_line
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case, InputCase
from perfsuite.session.proof_item import EXAMPLES

pytest_plugins = ["pytester"]

THREE_SIDES = """
    from perfsuite import Pair, Workload, tensor

    CALLS = []


    def slow(x, y):
        CALLS.append(x.dtype)
        return (x * y).sum(-1)


    def fast(x, y):
        return (x * y).sum(-1)


    dot = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("m", "n"), "y": tensor("m", "n")},
        variants={"other": fast, "wrong": lambda x, y: fast(x, y) * (1.0 + 1e-3 * (len(x) > 3))},
        workloads=[Workload("small", m=4, n=16)],
    )


    def test_the_reference_ran(request):
        request.config.stash["calls"] = len(CALLS)
"""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Record the draws of each proof: (kind, side) → lines of cases."""
    found: dict[str, list[str]] = {}
    own = equivalence.check_case

    def recording(pair: Pair, case: Case, device: str, **given: Any) -> None:
        kind = "gradients" if given["gradients"] else "equivalence"
        found.setdefault(f"{kind} {given['side_name']}", []).append(case_line(case))
        own(pair, case, device, **given)

    monkeypatch.setattr(equivalence, "check_case", recording)
    for profile, number in (("dev", 20), ("ci", 24)):  # the test holds for any number
        monkeypatch.setitem(EXAMPLES, profile, count(quick=number, full=EXAMPLES[profile]))
    monkeypatch.setattr("perfsuite.system.tamper.check", lambda: None)  # it would report both replacements
    return found


@FULLY
@pytest.mark.parametrize("profile", ["dev", "ci"])
def test_each_proof_draws_enough_distinct_cases_shared_by_all_sides(
    project: Project, drawn: dict[str, list[str]], profile: str
) -> None:
    project.write("test_dot.py", THREE_SIDES)
    project.run("-m", "correctness", f"--perfsuite-profile={profile}", "-k", "not wrong").assert_outcomes(passed=8)
    assert set(drawn) == {f"{kind} {side}" for kind in ("equivalence", "gradients") for side in ("optimized", "other")}
    # At most 40 draws are planned for two sizes, and at least a quarter are random.
    most = max(1.5 * EXAMPLES[profile], 40 + EXAMPLES[profile] / 4)
    for cases in drawn.values():
        assert EXAMPLES[profile] <= len(set(cases)) == len(cases) < most
    for kind in ("equivalence", "gradients"):
        assert drawn[f"{kind} optimized"] == drawn[f"{kind} other"]
    # Only the smallest draws, with which Hypothesis begins, are shared.
    both = set(drawn["equivalence optimized"]) & set(drawn["gradients optimized"])
    assert len(both) < EXAMPLES[profile] / 5


@pytest.mark.parametrize(("profile", "same"), [pytest.param("dev", False, marks=FULLY), ("ci", True)])
def test_runs_draw_different_cases_unless_the_profile_or_seed_fixes_them(
    project: Project, drawn: dict[str, list[str]], profile: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("test_dot.py", THREE_SIDES)
    arguments = ("-m", "correctness", f"--perfsuite-profile={profile}", "-k", "equivalence and not wrong and not other")
    runs = []
    for run in ("first", "second"):
        monkeypatch.setattr("perfsuite.session.proof_item._RUN", run)
        drawn.clear()
        project.run(*arguments)
        runs.append(drawn["equivalence optimized"])
    assert (runs[0] == runs[1]) == same
    if profile == "dev":
        for seeded in (1, 1, 2):
            drawn.clear()
            project.run(*arguments, f"--hypothesis-seed={seeded}")
            runs.append(drawn["equivalence optimized"])
        assert runs[2] == runs[3] != runs[4]


def test_wrong_variant_fails_alone_and_its_failure_can_be_reproduced(project: Project) -> None:
    project.write("test_dot.py", THREE_SIDES)
    result = project.run("-m", "correctness", "-k", "equivalence or gradients")
    result.assert_outcomes(passed=4, failed=2)
    output = result.stdout.str()
    lines = lines_with(output, "reproduce: pytest", "wrong")
    assert len(lines) == len(lines_with(output, "reproduce: pytest")) == 2
    for line in lines:
        assert "seed=0" in line  # the draw was shrunk
    again = project.run(*line.removeprefix("reproduce: pytest ").replace("'", "").split())
    again.assert_outcomes(failed=1)


def test_reference_runs_once_per_draw_for_all_sides(project: Project) -> None:
    project.write("test_dot.py", THREE_SIDES)

    def runs(*sides: str) -> int:
        ids = [f"test_dot.py::dot::equivalence[float32{side}]" for side in sides]
        result = project.run("--hypothesis-seed=1", *ids, "test_dot.py::test_the_reference_ran", "-p", "no:randomly")
        result.assert_outcomes(passed=len(sides) + 1)
        return int(lines_with(result.stdout.str(), "calls=")[0].partition("=")[2])

    project.write(
        "conftest.py",
        """
        def pytest_terminal_summary(terminalreporter, config):
            terminalreporter.write_line(f"calls={config.stash['calls']}")
        """,
    )
    one = runs("")
    assert one >= 3 * EXAMPLES["dev"]  # at least the truth, the reference, and the check of the task
    assert runs("", "-other") == one


# --- cached truths --------------------------------------------------------------------------------------------------


def product(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return {"product": x @ y, "transposed": (x * 2).t(), "count": len(x), "mean": float(x.double().mean())}


def pair_of(reference: Callable[..., Any] = product, **options: Any) -> Pair:
    inputs = {"x": tensor("m", "n", values=floats(-2, 2)), "y": tensor("n", "m", values=floats(-2, 2))}
    return Pair(
        reference=reference,
        optimized=reference,
        inputs=inputs,
        workloads=[Workload("w", m=2, n=2)],
        name="kept",
        **{"variants": {"other": reference}, **options},
    )


def case_of(seed: int = 0, **sizes: int) -> Case:
    return Case(
        dtype="float32", sizes={"m": 3, "n": 4, **sizes}, inputs={"x": InputCase(layout="transposed")}, seed=seed
    )


def ask(known: CachedReferenceResults, pair: Pair, case: Case, *, gradients: bool = False) -> truths.Truth:
    return known.truths(pair, case, "cpu", gradients=gradients, home=None)(REPLICAS)


def counted(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def counting(*args: Any) -> Any:
        calls.append(1)
        return call(*args)

    return counting, calls


@pytest.mark.parametrize("gradients", [False, True])
def test_cached_truth_equals_the_established_one(gradients: bool) -> None:
    call, calls = counted(lambda x, y: x @ y if gradients else product(x, y))
    pair, known = pair_of(call), CachedReferenceResults()
    first = ask(known, pair, case_of(), gradients=gradients)
    runs = len(calls)
    again = ask(known, pair, case_of(), gradients=gradients)
    assert len(calls) == runs
    for part in ("leaves", "reference", "errors"):
        one, two = getattr(first, part), getattr(again, part)
        assert list(one) == list(two)
        for name, leaf in one.items():
            assert type(leaf) is type(two[name])
            if isinstance(leaf, torch.Tensor):
                assert torch.equal(leaf, two[name])
                assert (leaf.stride(), leaf.dtype) == (two[name].stride(), two[name].dtype)
            else:
                assert leaf == two[name]
    for part in ("ill_conditioned", "rounding", "eps", "periods", "excused", "plain", "declared_precision"):
        assert getattr(first, part) == getattr(again, part)


def test_truths_are_not_cached_for_a_pair_with_one_side() -> None:
    call, calls = counted(lambda x, y: x @ y)
    pair, known = pair_of(call, variants={}), CachedReferenceResults()
    ask(known, pair, case_of())
    runs = len(calls)
    ask(known, pair, case_of())
    assert len(calls) == 2 * runs


def test_different_draws_have_separate_truths() -> None:
    call, calls = counted(lambda x, y: x @ y)
    pair, known = pair_of(call), CachedReferenceResults()
    usual = Case(dtype="float32", sizes={"m": 3, "n": 4}, inputs={}, seed=0)
    half = Case(dtype="bfloat16", sizes={"m": 3, "n": 4}, inputs={}, seed=0)
    for case, gradients in ((usual, False), (usual, True), (half, False), (case_of(), False), (case_of(1), False)):
        before = len(calls)
        ask(known, pair, case, gradients=gradients)
        assert len(calls) > before


def test_changes_to_a_returned_truth_do_not_change_the_cache() -> None:
    pair, known = pair_of(), CachedReferenceResults()
    expected = ask(known, pair, case_of()).leaves["output['product']"].clone()
    for _ in range(2):
        truth = ask(known, pair, case_of())
        assert torch.equal(truth.leaves["output['product']"], expected)
        for leaves in (truth.leaves, truth.reference, truth.errors, truth.moved):
            for leaf in leaves.values():
                if isinstance(leaf, torch.Tensor):
                    leaf.zero_()
            leaves.clear()


def test_discarded_draw_stays_discarded() -> None:
    call, calls = counted(lambda x, y: (1e30 * x.abs() + 1e30) ** 2 @ y)
    pair, known = pair_of(call), CachedReferenceResults()
    for _ in range(2):
        with pytest.raises(Discard):
            ask(known, pair, case_of())
    assert len(calls) == 2  # the truth and the reference, once


def test_truths_beyond_the_cache_limit_are_recomputed() -> None:
    call, calls = counted(lambda x, y: x @ y)
    pair, known = pair_of(call), CachedReferenceResults(most_bytes=1)
    ask(known, pair, case_of())
    runs = len(calls)
    ask(known, pair, case_of())
    assert len(calls) == 2 * runs


def test_truth_that_cannot_be_cached_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("not this one")

    call, calls = counted(lambda x, y: x @ y)
    pair, known = pair_of(call), CachedReferenceResults()
    monkeypatch.setattr(torch, "save", fails)
    ask(known, pair, case_of())
    runs = len(calls)
    ask(known, pair, case_of())
    assert len(calls) == 2 * runs


def test_fault_of_the_reference_is_reported_by_every_proof() -> None:
    pair, known = pair_of(lambda x, y: (x @ y).bfloat16().to(x.dtype)), CachedReferenceResults()
    case = Case(dtype="float32", sizes={"m": 8, "n": 8}, inputs={}, seed=0)
    for _ in range(2):
        with pytest.raises(PairError, match="rounded to half precision inside"):
            equivalence.check_case(pair, case, "cpu", results=known)
    constant = pair_of(lambda x, y: torch.ones_like(x))
    known, tallies = CachedReferenceResults(), [Tally(), Tally()]
    for tally in tallies:
        for seed in range(MIN_PROOFS):
            equivalence.check_case(constant, case_of(seed), "cpu", tally=tally, results=known)
        with pytest.raises(NotEquivalent, match="the same answer whatever its inputs are"):
            tally.evidence(constant, "float32", "cpu")


def test_sides_that_return_nothing_must_declare_what_they_change() -> None:
    def halve(x: torch.Tensor) -> None:
        x.mul_(0.5)

    pair = Pair(name="p", reference=halve, optimized=halve, inputs={"x": tensor("n")}, gradients=False)
    check(replace(pair, mutates={"x"}), examples=MIN_PROOFS)
    with pytest.raises(NotEquivalent, match=r"returns nothing, and the pair declares no .* in place: mutates=\{…\}"):
        check(pair, examples=MIN_PROOFS)


@pytest.mark.parametrize("right", [True, False])
def test_constant_python_number_is_a_degenerate_task(right: bool) -> None:
    pair, tally = pair_of(lambda x, y: float((x @ y).sum() if right else 1.0)), Tally()
    for seed in range(MIN_PROOFS):
        equivalence.check_case(pair, case_of(seed), "cpu", tally=tally)
    if right:
        assert tally.evidence(pair, "float32", "cpu")
        return
    with pytest.raises(NotEquivalent, match="the same answer whatever its inputs are"):
        tally.evidence(pair, "float32", "cpu")


def test_cache_holds_only_the_results_of_the_latest_pair() -> None:
    one, other = pair_of(), pair_of()
    known = cached_results(one)
    assert cached_results(one) is known
    assert cached_results(other) is not known
    assert cached_results(one) is not known
    assert len(shared_truths._latest) == 1


# --- time limits and replicas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "seconds"), [("dev", "0.2 s"), pytest.param("thorough", "4 s", marks=FULLY)])
def test_time_limit_grows_with_the_draws_of_the_profile(project: Project, profile: str, seconds: str) -> None:
    _with_sleep(project, "slow")
    result = project.run("-k", "equivalence and not other and not wrong", f"--perfsuite-profile={profile}")
    assert lines_with(result.stdout.str(), "hangs", f"its time limit of {seconds}")


@pytest.mark.parametrize(("function", "side"), [("slow", "reference"), ("fast", "optimized side")])
def test_message_of_the_time_limit_names_the_side_and_the_line(project: Project, function: str, side: str) -> None:
    line = _with_sleep(project, function)
    result = project.run("-k", "equivalence and not other and not wrong")
    assert lines_with(result.stdout.str(), f"dot: in the {side} at ", f"test_dot.py:{line}: hangs: stopped")


def _with_sleep(project: Project, function: str) -> int:
    """Write the pair with a sleep in this function and a time limit of 0.2 s; return the line of the sleep."""
    before, after = THREE_SIDES.split(f"def {function}(x, y):")
    after = after.replace("return (x * y).sum(-1)", "__import__('time').sleep(600)", 1)
    text = f"{before}def {function}(x, y):{after}".replace("workloads=", "time_limit=0.2, workloads=")
    path = project.write("test_dot.py", text)
    return 1 + [".sleep(" in line for line in path.read_text().splitlines()].index(True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 33), (17, 8)])
def test_budget_with_few_replicas_bounds_the_budget_with_all(dtype: str, sizes: tuple[int, int]) -> None:
    def norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).softmax(-1).cumsum(-1) / y.square().sum(-1, keepdim=True)

    pair = Pair(name="p", reference=norm, optimized=norm, inputs={n: tensor("m", "n") for n in "xy"})
    for seed in range(count(full=100, quick=5)):
        case = Case(dtype=dtype, sizes=dict(zip("mn", sizes, strict=True)), inputs={}, seed=seed)
        established = (truths.establish(pair, case, "cpu", gradients=True, replicas=r) for r in (NONE, FEW, REPLICAS))
        bare, few, every = established
        assert (bare.replicas, every.is_complete) == (0, True)
        assert 0 < few.replicas < few.needed == bare.needed == every.replicas
        for fewer in (bare, few):
            share = rule.sure(fewer.replicas, fewer.needed)
            for by_fewer, by_all in ((fewer.errors, every.errors), (fewer.moved, every.moved)):
                for name, error in by_fewer.items():
                    assert (by_all[name] >= share * error * (1 - 1e-12)).all()


@pytest.mark.parametrize("elements", [16, rule.REPLICAS_UP_TO])
def test_truth_with_added_replicas_equals_one_with_all_made_at_once(elements: int) -> None:
    """New replicas are added to the earlier ones, unless the tensors are large."""
    calls = []

    def exp(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        return torch.exp(x)

    pair = Pair(name="p", reference=exp, optimized=exp, inputs={"x": tensor("n")})
    case = Case(dtype="float32", sizes={"n": elements}, inputs={}, seed=0)
    known = truths.by_replicas(pair, case, "cpu", gradients=False)
    for replicas in (NONE, REPLICAS, rule.CAREFUL):
        found, own = known(replicas), len(calls)
        calls.clear()
        at_once = truths.establish(pair, case, "cpu", gradients=False, replicas=replicas)
        assert (found.replicas, found.needed) == (at_once.replicas, at_once.needed)
        assert torch.equal(found.errors["output"], at_once.errors["output"])
        assert torch.equal(found.moved["output"], at_once.moved["output"])
        assert (own < len(calls)) == (elements == 16 and replicas != NONE)
        calls.clear()


def test_replicas_are_added_only_if_a_side_is_not_clearly_right(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    own = truths.Runs.truth

    def counting(runs: truths.Runs, replicas: int) -> truths.Truth:
        asked.append(replicas)
        return own(runs, replicas)

    monkeypatch.setattr(truths.Runs, "truth", counting)
    case = Case(dtype="float32", sizes={"n": 16}, inputs={}, seed=0)
    for wrong, expected in ((0.0, [NONE]), (1e-3, [NONE, FEW, REPLICAS])):
        asked.clear()
        pair = Pair(
            name="p",
            reference=torch.exp,
            optimized=lambda x, wrong=wrong: torch.exp(x) * (1 + wrong),
            inputs={"x": tensor("n")},
        )
        tally = Tally()
        if wrong:
            with pytest.raises(NotEquivalent, match="wrong"):
                equivalence.check_case(pair, case, "cpu", tally=tally)
        else:
            equivalence.check_case(pair, case, "cpu", tally=tally)
            assert tally.elements == 16
            assert 0 < tally.worst <= rule.sure(0, rule.MAX_REPLICAS)
        assert asked == expected


def noted(known: TruthFunction) -> tuple[TruthFunction, list[int]]:
    """Return the function, and a list that records the number of replicas of each call."""
    asked = list[int]()

    def noting(replicas: int) -> Truth:
        asked.append(replicas)
        return known(replicas)

    return noting, asked


@pytest.mark.parametrize("gradients", [False, True])
def test_side_that_passes_with_few_replicas_passes_with_all(gradients: bool) -> None:
    """A side that passes with no or few replicas also passes with all, for any error."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).softmax(-1)

    pair = Pair(name="p", reference=product, optimized=product, inputs={n: tensor("n", "n") for n in "xy"})
    settled = set()
    for seed in range(count(full=40, quick=4)):
        case = Case(dtype="float32", sizes={"n": 8}, inputs={}, seed=seed)
        known, asked = noted(truths.by_replicas(pair, case, "cpu", gradients=gradients))
        right = side_calls.produce(pair, as_side(product), case, "cpu", gradients=gradients)
        for eps in range(0, 60, 3):
            asked.clear()
            wrong = {name: leaf * (1 + eps * 2.0**-24) for name, leaf in right.items()}
            with contextlib.suppress(NotEquivalent):
                equivalence.hold(pair, known, wrong)
            settled.add(last := asked[-1])
            if last in (NONE, FEW):
                equivalence.judge(pair, known(REPLICAS), wrong)
    assert {NONE, FEW} < settled


@pytest.mark.parametrize("add", [1e6, 0.0])
def test_conditioning_of_a_draw_is_decided_without_replicas(add: float) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + add - add

    pair = Pair(name="p", reference=shifted, optimized=shifted, inputs={"x": tensor("n")})
    case = Case(dtype="float32", sizes={"n": 40}, inputs={}, seed=1)
    known, asked = noted(truths.by_replicas(pair, case, "cpu", gradients=False))
    produced = side_calls.produce(pair, as_side(shifted), case, "cpu", gradients=False)
    truth = equivalence.hold(pair, known, produced)
    assert asked == [NONE]
    assert truth.ill_conditioned == known(REPLICAS).ill_conditioned == bool(add)


@pytest.mark.parametrize(("factor", "runs"), [(1.0, 2), (1e5, 2 + 2 * rule.MAX_REPLICAS)])
def test_zero_gradient_needs_replicas_only_if_the_side_is_far_from_it(factor: float, runs: int) -> None:
    """The truth of the shift's gradient is 0. Replicas are made only if the side's gradient is far from it."""
    calls = []

    def shifted(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + shift - (x + shift).mean(-1, keepdim=True)

    inputs = {"x": tensor("m", "n"), "shift": tensor(values=floats(1, 2))}
    pair = Pair(name="p", reference=shifted, optimized=shifted, inputs=inputs)
    case = Case(dtype="float32", sizes={"m": 5, "n": 40}, inputs={}, seed=1)
    produced = side_calls.produce(pair, as_side(shifted), case, "cpu", gradients=True)
    produced["gradient of shift"] = factor * produced["gradient of shift"]
    known = truths.by_replicas(pair, case, "cpu", gradients=True)
    calls.clear()
    assert known(NONE).rounding == {"gradient of shift"}
    with contextlib.suppress(NotEquivalent):
        equivalence.hold(pair, known, produced)
    assert len(calls) == runs if factor == 1 else len(calls) >= runs
