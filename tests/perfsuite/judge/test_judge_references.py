"""`perfsuite judge` compares with references of each dtype, with any weights, and beside steps and ties."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from judging import judged, proven
from scale import FULLY

from perfsuite.correctness.truths import Truth
from perfsuite.errors import NotEquivalent, PerfsuiteError
from perfsuite.judge import causes, problem, structure, timing
from perfsuite.judge.process import Nursery
from perfsuite.judge.verdict import Status

MODULE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {made}
    def forward(self, x):
        return {returned}
def get_inputs():
    return [{inputs}]
"""


def written(folder: Path, made: str, returned: str, inputs: str = "torch.randn(16, 32)") -> Path:
    path = folder / "reference.py"
    path.write_text(MODULE.format(made=made, returned=returned, inputs=inputs))
    return path


def like(made: str, returned: str) -> str:
    """Return the text of a candidate."""
    return MODULE.format(made=made, returned=returned, inputs="").replace("Model(", "ModelNew(")


LAYER = "self.layer = torch.nn.Linear(32, 32, dtype=torch.{})"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_reference_of_one_other_dtype_is_proven_in_it(nursery: Nursery, tmp_path: Path, dtype: str) -> None:
    made, inputs = LAYER.format(dtype), f"torch.randn(16, 32, dtype=torch.{dtype})"
    reference = written(tmp_path, made, "self.layer(x).sigmoid()", inputs)
    assert problem.load(reference, "cpu", 0).dtype == dtype
    assert proven(nursery, reference, like(made, "(x @ self.layer.weight.t() + self.layer.bias).sigmoid()")).draws == 8
    with pytest.raises(NotEquivalent, match=r"is wrong|is inaccurate"):
        proven(nursery, reference, like(made, "(x @ self.layer.weight.t()).sigmoid()"))


def test_a_reference_in_float64_is_not_proven_as_one_in_float32(nursery: Nursery, tmp_path: Path) -> None:
    made = LAYER.format("float64")
    reference = written(tmp_path, made, "self.layer(x)", "torch.randn(16, 32, dtype=torch.float64)")
    with pytest.raises(NotEquivalent, match="is wrong"):
        proven(nursery, reference, like(made, "self.layer.float()(x.float()).double()"))


CUT_OFF = ("torch.randn(64, 32, dtype=torch.bfloat16)", LAYER.format("bfloat16"))


@pytest.mark.parametrize("cut", [True, False])
def test_digits_that_are_cut_off_are_a_bias_over_the_timed_calls(tmp_path: Path, cut: bool) -> None:
    inputs, made = CUT_OFF
    judge = timing._Judge(problem.load(written(tmp_path, made, "self.layer(x)", inputs), "cpu", 0), "candidate")
    for seed in range(10):
        truth = judge._truth(seed, judge.problem.values(seed))
        assert isinstance(truth, Truth)
        exact = truth.leaves["output"].float()  # type: ignore[union-attr]
        judge._prove(
            [(exact.view(torch.int32) & -65536).view(torch.float32).bfloat16() if cut else exact.bfloat16()], truth
        )
    with pytest.raises(NotEquivalent, match="lean to one side") if cut else contextlib.nullcontext():
        judge.judge_biases()


@FULLY
def test_a_candidate_that_cuts_digits_off_is_rejected(nursery: Nursery, tmp_path: Path) -> None:
    inputs, made = CUT_OFF
    reference = written(tmp_path, made, "self.layer(x)", inputs)
    rounded = "(x.float() @ self.layer.weight.float().t() + self.layer.bias.float())"
    cut = f"({rounded}.view(torch.int32) & -65536).view(torch.float32).bfloat16()"
    found = judged(nursery, reference, like(made, cut))
    assert found.status is Status.NOT_EQUIVALENT
    assert "lean to one side" in found.message


def test_the_dtype_of_the_outputs_is_the_working_precision(nursery: Nursery, tmp_path: Path) -> None:
    made = LAYER.format("bfloat16")
    reference = written(tmp_path, made, "self.layer(x.to(self.layer.weight.dtype))")
    found = problem.load(reference, "cpu", 0)
    assert found.dtype == "bfloat16"
    assert found.values(0)["x0"].dtype is torch.float32
    own = "(x.bfloat16().float() @ self.layer.weight.float().t() + self.layer.bias).bfloat16()"
    assert proven(nursery, reference, like(made, own)).draws == 8
    reference = written(tmp_path, "", "x.argmax(1)", "torch.randn(16, 32, dtype=torch.bfloat16)")
    assert problem.load(reference, "cpu", 0).dtype == "bfloat16"


def test_parameters_keep_their_dtypes_where_these_differ(nursery: Nursery, tmp_path: Path) -> None:
    made = LAYER.format("bfloat16")
    reference = written(tmp_path, made, "self.layer(x.to(self.layer.weight.dtype)).float()")
    assert problem.load(reference, "cpu", 0).dtype == "float32"
    own = "(x.bfloat16().float() @ self.layer.weight.float().t() + self.layer.bias).bfloat16().float()"
    assert proven(nursery, reference, like(made, own)).draws == 8
    reference.write_text(reference.read_text().replace("self.layer.weight.dtype", "torch.bfloat16"))
    with pytest.raises(PerfsuiteError, match="cast tensors in the dtype of its inputs or parameters, not in a fixed"):
        proven(nursery, reference, like(made, own))


@pytest.mark.parametrize(
    ("made", "name", "renamed"),
    [("torch.nn.Parameter(torch.tensor([0.7]))", "scale", "scale"), ("torch.nn.LayerNorm(32)", "norm", "other")],
)
def test_draws_do_not_change_the_weights(nursery: Nursery, tmp_path: Path, made: str, name: str, renamed: str) -> None:
    """A parameter with one element, and one of ones or zeros, are those of the candidate in each draw."""
    returned = "{}(x)" if "Norm" in made else "x * {}"
    reference = written(tmp_path, f"self.{name} = {made}", returned.format(f"self.{name}"))
    candidate = like(f"self.{renamed} = {made}", returned.format(f"self.{renamed}"))
    assert proven(nursery, reference, candidate).draws == 8


STEPS = "(x / 2).round().to(torch.int8)"
ROUNDED_UP = "(x / 2 + 0.5).floor().to(torch.int8)"
"""Values next to a step of round() that differ from its own, as another order of summation gives."""
EXCUSE = """
def excuse(x, *, eps):
    assert x.dtype == torch.float64
    return (x / 2 - (x / 2).floor() - 0.5).abs() <= {distance}
"""


def with_steps(folder: Path, distance: str) -> Path:
    path = written(folder, "", STEPS, "torch.randint(0, 16, (16, 32)).float()")
    path.write_text(path.read_text() + EXCUSE.format(distance=distance) * bool(distance))
    return path


def test_values_beside_a_step_are_left_out_if_the_reference_excuses_them(nursery: Nursery, tmp_path: Path) -> None:
    reference = with_steps(tmp_path, "16 * eps")
    assert proven(nursery, reference, like("", ROUNDED_UP)).excused > 0
    with pytest.raises(NotEquivalent, match="whole numbers and bools must be equal"):
        proven(nursery, reference, like("", f"{ROUNDED_UP} + (x == 2)"))
    with pytest.raises(NotEquivalent, match="whole numbers and bools must be equal"):
        proven(nursery, with_steps(tmp_path, ""), like("", ROUNDED_UP))


def test_an_excuse_for_most_elements_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    with pytest.raises(PerfsuiteError, match=r"excuse\(\) leaves out .* in which .*own.py differs; narrow it"):
        proven(nursery, with_steps(tmp_path, "1"), like("", f"{STEPS} + 1"))


def test_an_excused_element_of_a_timed_call_is_not_compared(tmp_path: Path) -> None:
    judge = timing._Judge(problem.load(with_steps(tmp_path, "16 * eps"), "cpu", 0), "candidate")
    drawn = judge.drawn()
    (x,) = drawn.arguments
    judge._check([(x / 2 + 0.5).floor().to(torch.int8)], drawn)
    with pytest.raises(NotEquivalent, match="output 0 of a timed call is not the reference's"):
        judge._check([(x / 2 + 1).floor().to(torch.int8)], drawn)


def test_few_elements_that_jump_are_named_with_the_remedy(tmp_path: Path) -> None:
    pair = problem.load(with_steps(tmp_path, ""), "cpu", 0).pair
    expected = torch.arange(600.0)
    jumps, drifts, differs = expected.clone(), expected + 1e-3, expected + 100
    jumps[3:7] += 1
    assert "let the reference define excuse()" in causes.beside_steps(pair, jumps, expected)
    assert "let the reference define excuse()" in causes.beside_steps(pair, jumps.int(), expected.int())
    assert not causes.beside_steps(pair, drifts, expected)
    assert not causes.beside_steps(pair, differs, expected)
    assert not causes.beside_steps(problem.load(with_steps(tmp_path, "0"), "cpu", 0).pair, jumps, expected)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("torch.rand(2, 20, 20).triu()", "is triangular"),
        ("torch.eye(20)", "is triangular"),
        ("torch.cov(torch.rand(20, 30))", "is symmetric"),
        ("torch.rand(20, 30).softmax(1)", "has rows that sum to 1"),
        ("torch.rand(20, 30).cumsum(1)", "is sorted"),
        ("torch.arange(20)", "is sorted"),
        ("torch.randperm(20)", "has no value twice"),
        ("torch.randint(0, 2, (20, 30)).float() * 2 - 1", "has whole numbers only"),
        ("torch.rand(20, 20)", ""),
        ("torch.rand(20, 30).T", ""),
        ("torch.ones(20, 30)", ""),
        ("torch.rand(())", ""),
        ("torch.empty(0, 5)", ""),
        ("torch.randint(0, 3, (20,))", ""),
        ("torch.rand(20, 30) > 0.5", ""),
    ],
)
def test_a_structure_that_draws_do_not_keep_is_named(made: str, words: str) -> None:
    template = [torch.rand(20, 30), {"a": eval(made)}]
    clause = structure.clause_of(template)
    assert words in clause
    assert bool(clause) == bool(words)
    assert not words or "get_inputs()[1]['a'] " in clause


def test_a_wrong_answer_names_the_structure_of_the_template(nursery: Nursery, tmp_path: Path) -> None:
    path = written(tmp_path, "", "torch.matmul(x, x)", "torch.rand(32, 32).triu()")
    own = like("", "torch.matmul(x.triu(), x)")
    with pytest.raises(NotEquivalent, match=r"is wrong at .*; get_inputs\(\)\[0\] is triangular, and drawn inputs"):
        proven(nursery, path, own)
