"""`check` and `measure` from Python: evidence for a good pair, one message with its draw for a bad one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from scale import count

import perfsuite
from perfsuite import Pair, Workload, floats, integers, side, stateful, tensor
from perfsuite.draws.cases import case_line, parse_case
from perfsuite.errors import NotEquivalent, PairError, PerfsuiteError
from perfsuite.measured import Measured
from perfsuite.records import Case
from perfsuite.session import planned_draws
from perfsuite.state import process_state
from perfsuite.system import tamper
from perfsuite.timing.sampling import BLOCKS

EXAMPLES = count(quick=3, full=10)
X = {"x": tensor("m", "n", values=floats(-4, 4))}


def pair(optimized: Any = torch.exp, reference: Any = torch.exp, **fields: Any) -> Pair:
    return Pair(reference=reference, optimized=optimized, **{"inputs": X, "name": "p", **fields})


@pytest.fixture(autouse=True)
def fixed_draws() -> Iterator[None]:
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("fixed draws", derandomize=True)
    hypothesis.settings.load_profile("fixed draws")
    yield
    hypothesis.settings.load_profile(before)


def test_check_returns_evidence_of_every_proof_for_a_correct_pair() -> None:
    evidence = perfsuite.check(pair(dtypes=("float32", "float64")), examples=EXAMPLES, device="cpu")
    assert [e.dtype for e in evidence] == ["float32", "float64", "float32", "float64"]
    assert all(e.draws >= EXAMPLES for e in evidence)
    assert all(e.pair == "p" for e in evidence)
    assert all(0 <= e.worst < 1 for e in evidence)
    assert len(perfsuite.check(pair(gradients=False), examples=EXAMPLES, device="cpu")) == 1
    assert (
        len(
            perfsuite.check(
                pair(inputs={"x": tensor("n", dtype="int64", values=integers(-9, 9))}, reference=abs, optimized=abs)
            )
        )
        == 1
    )


def replaying() -> Callable[[torch.Tensor], torch.Tensor]:
    held: dict[Any, torch.Tensor] = {}

    def call(x: torch.Tensor) -> torch.Tensor:
        out = held.setdefault((tuple(x.shape), x.dtype), torch.empty(x.shape, dtype=x.dtype))
        return out.copy_(torch.exp(x))

    return call


def changing(x: torch.Tensor) -> torch.Tensor:
    out = torch.exp(x)
    x.data = x.data * 2
    return out


def raising(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("optimized", "match"),
    [
        (lambda x: torch.exp(x) * (1 + 1e-4), "output of the optimized side is wrong"),
        (lambda x: torch.exp(x.detach()) + 0 * x, "gradient of x of the optimized side is wrong"),
        (replaying(), "hands out a private static buffer"),
        (raising, "p: the optimized side raises ZeroDivisionError: boom"),
    ],
    ids=["wrong", "gradient", "integrity", "raises"],
)
def test_check_reports_the_fault_of_a_wrong_pair_with_a_small_draw(optimized: Any, match: str) -> None:
    only_forward = optimized.__name__ in ("call", "raising")
    with pytest.raises(NotEquivalent, match=match) as caught:
        perfsuite.check(pair(optimized, gradients=not only_forward), examples=20, device="cpu")
    message, draw, *cause = str(caught.value).splitlines()
    assert not cause or cause[0].startswith("likely cause: ")
    assert message.startswith("p: ")
    case = parse_case(draw.removeprefix("draw: "), "float32")
    assert case.seed == 0
    assert all(value <= 3 for value in case.sizes.values())


def test_wrong_truth_is_detected() -> None:
    with pytest.raises(NotEquivalent, match="truth= must compute the same function as the reference"):
        perfsuite.check(
            pair(truth=lambda x: torch.exp(x) * (1 + 1e-9), gradients=False), examples=EXAMPLES, device="cpu"
        )
    perfsuite.check(pair(truth=lambda x: 1 / torch.exp(-x), gradients=False), examples=EXAMPLES, device="cpu")


def test_check_fails_if_the_reference_overflows_on_every_draw() -> None:
    def overflowing(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * 1e30 * 1e30

    bad = pair(overflowing, overflowing, gradients=False, sizes={"m": perfsuite.size(1, 9), "n": perfsuite.size(1, 9)})
    with pytest.raises(NotEquivalent, match=r"the reference alone overflows.*too little is proven"):
        perfsuite.check(bad, examples=EXAMPLES, device="cpu")


def test_check_raises_pair_error_if_the_output_is_not_a_tensor() -> None:
    with pytest.raises(PairError, match="output is a str"):
        perfsuite.check(pair(lambda x: "text", gradients=False), examples=5, device="cpu")


def test_every_kind_of_inputs_is_drawn() -> None:
    """Every kind of inputs is drawn, so that a fault at one size is found; random draws alone would seldom find it."""

    def optimized(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if x.shape[-1] != 17 else x.exp() * 2

    for _ in range(5):
        with pytest.raises(NotEquivalent, match="n=17"):
            perfsuite.check(pair(optimized, gradients=False), examples=5, device="cpu")


def test_draws_on_which_the_reference_raises_are_not_counted() -> None:
    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1)  # raises if there are no elements

    (evidence,) = perfsuite.check(pair(largest, largest, gradients=False), examples=20, device="cpu")
    assert evidence.draws >= 20


def test_check_accepts_stateful_pairs() -> None:
    def step(x: torch.Tensor) -> Any:
        def descend(g: torch.Tensor) -> None:
            x.sub_(g)

        return descend

    of = pair(
        stateful(step),
        stateful(step),
        step_inputs={"g": tensor("m", "n", values=floats(-4, 4))},
        mutates={"x"},
        sizes={"m": perfsuite.size(0, 5), "n": perfsuite.size(0, 5)},
    )
    (evidence,) = perfsuite.check(of, examples=5, device="cpu")
    assert evidence.draws >= 5


@pytest.mark.parametrize("wrong_from", [1, 2, 17])
def test_a_failing_draw_of_a_stateful_pair_is_shrunk_with_the_steps_that_it_took(wrong_from: int) -> None:
    def descending(x: torch.Tensor, first: int) -> Any:
        number = 0

        def descend(g: torch.Tensor) -> None:
            nonlocal number
            number += 1
            x.sub_(g if number < first else 1.01 * g)

        return descend

    of = pair(
        stateful(lambda x: descending(x, wrong_from)),
        stateful(lambda x: descending(x, 1000)),
        step_inputs={"g": tensor("m", "n", values=floats(1, 4))},
        mutates={"x"},
    )
    with pytest.raises(NotEquivalent, match=f"after {wrong_from} step") as caught:
        perfsuite.check(of, examples=20, device="cpu")
    assert caught.value.case.steps == wrong_from
    assert caught.value.case.sizes == {"m": 1, "n": 1}


def test_a_draw_that_failed_before_is_run_for_the_same_steps() -> None:
    needed = {"m=3;seed=1": 17, "m=2;seed=1": 2, "m=1;seed=1": 17}
    run: list[int | None] = []

    def prove(case: Case) -> None:
        steps = needed[case_line(replace(case, steps=None))]
        run.append(case.steps)
        if case.steps is None or case.steps >= steps:
            error = NotEquivalent("wrong", case)
            error.steps = steps
            raise error

    cut = planned_draws.cut_after_failure(prove)
    case = Case(dtype="float32", sizes={"m": 3}, inputs={}, seed=1)
    for m, passes in ((3, False), (2, False), (1, True), (3, False), (2, False)):
        with nullcontext() if passes else pytest.raises(NotEquivalent):
            cut(replace(case, sizes={"m": m}))
    assert run == [None, 17, 2, 17, 2]


def test_measure_times_the_workloads_of_this_device() -> None:
    of = pair(
        workloads=[Workload("here", m=3, n=4, clock="wall"), Workload("there", m=3, n=4, device="cuda")],
        rivals={"wrong": lambda x: torch.exp(x) * 2},
    )
    (made,) = perfsuite.measure(of, device="cpu")
    assert made.id == "p::speed[here]"
    assert len(made.log_ratios["reference"]) == BLOCKS
    assert made.skipped["wrong"].startswith("not equal")
    with pytest.raises(NotEquivalent, match="is wrong"):
        perfsuite.measure(pair(lambda x: torch.exp(x) * 2, workloads=[Workload("w", m=3, n=4)]), device="cpu")
    with pytest.raises(PairError, match="has no workload"):
        perfsuite.measure(pair(), device="cpu")
    elsewhere = pair(side(torch.exp, devices=["cuda"]), workloads=[Workload("w", m=3, n=4)])
    none = perfsuite.measure(elsewhere, device="cpu")
    assert none == ()
    assert repr(none) == "no workload for this device"


@pytest.fixture(scope="module")
def measured() -> Measured:
    def slow(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.exp() for row in x])

    workloads = [Workload(name, m=40, n=4, clock="wall") for name in ("w<b>", "two")]
    return perfsuite.measure(pair(torch.exp, slow, workloads=workloads), device="cpu")


def test_measurements_have_a_speedup_and_print_as_a_table(measured: Measured) -> None:
    made = measured[0]
    assert made.speedup is not None
    assert made.speedup > 1
    assert measured.speedups["w<b>"].value == pytest.approx(made.speedup)
    assert repr(made).startswith("<Measurement of p::speed[w<b>] on cpu, ")
    assert repr(made).endswith(" times as fast as the reference>")
    head, _, name, line, _ = repr(measured).splitlines()
    assert head.split() == ["workload", "reference", "optimized", "speedup", "interval"]
    assert name == "p"
    assert line.split()[0] == "w<b>"
    assert "w&lt;b&gt;" in measured._repr_html_()


def test_a_plot_has_a_panel_for_each_workload(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PerfsuiteError, match="a plot needs matplotlib, which is not installed"):
        measured.plot()
    monkeypatch.undo()
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[train]'")
    matplotlib.use("agg")
    panels = measured.plot().axes
    assert [panel.get_title().partition("[")[2][:3] for panel in panels] == ["w<b", "two"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["optimized", "reference"]


# --- regressions ----------------------------------------------------------------------------------------------------

TABLE = torch.arange(4.0)


def test_constant_returned_by_both_sides_is_not_reported_as_a_private_buffer() -> None:
    of = pair(lambda x: (torch.exp(x), TABLE), lambda x: (torch.exp(x) * 1, TABLE))
    perfsuite.check(of, examples=3, device="cpu")


class Rotating:
    """Returns a constant, and its result in one of two buffers."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, list[torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = self.buffers.setdefault(x.shape, [torch.empty(x.shape, dtype=x.dtype) for _ in range(9)])
        buffers.append(buffers.pop(0))
        return TABLE, torch.exp(x, out=buffers[0])


def test_private_buffer_returned_beside_a_constant_is_detected() -> None:
    of = pair(Rotating(), lambda x: (TABLE, torch.exp(x)), gradients=False)
    with pytest.raises(NotEquivalent, match=r"output\[1\].*return a copy"):
        perfsuite.check(of, examples=3, device="cpu")


class KeepsAnswers:
    """Returns a constant, and the answer that it has kept for these values."""

    def __init__(self) -> None:
        self.answers: dict[tuple[float, ...], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = (*x.shape, *x.flatten().tolist())
        return TABLE, self.answers.setdefault(key, torch.exp(x))


def test_cached_result_returned_beside_a_constant_is_detected() -> None:
    of = pair(KeepsAnswers(), lambda x: (TABLE, torch.exp(x)), gradients=False)
    with pytest.raises(NotEquivalent, match=r"keeps output\[1\] and returns it again"):
        perfsuite.check(of, examples=3, device="cpu")


class RaisesAtNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.isnan().any():
            raise ValueError("no NaN please")
        (x,) = ctx.saved_tensors
        return gradient * torch.exp(x)


def test_backward_pass_that_raises_on_nan_is_detected() -> None:
    with pytest.raises(NotEquivalent, match="raises ValueError: no NaN please in a backward pass whose incoming"):
        perfsuite.check(pair(RaisesAtNan.apply), examples=3, device="cpu")


def test_autocast_left_enabled_by_a_side_is_reported_and_restored() -> None:
    def leaves_autocast(x: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_enabled("cpu", True)
        return torch.exp(x)

    with pytest.raises(NotEquivalent, match="autocast"):
        perfsuite.check(pair(leaves_autocast), examples=3, device="cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "name", ["autocast on cpu", "autocast's dtype on cpu", "the processor's cores of this process"]
)
def test_changed_process_setting_is_restored(name: str) -> None:
    other = {"autocast on cpu": True, "autocast's dtype on cpu": torch.float16}
    before = process_state.settings([name])
    changed = other[name] if name in other else tuple(before[name][:1])
    process_state.restore({name: changed}, [name])
    try:
        assert process_state.settings([name])[name] == changed
    finally:
        process_state.restore(before, [name])
    assert process_state.settings([name]) == before


def test_constants_in_tuples_and_from_arithmetic_are_guarded(tmp_path: Path) -> None:
    source = tmp_path / "constants.py"
    source.write_text("A, B = 2.0**-13, 64 << 20\nC = -1\nD: int = 3\nE = len('x')\nF, G = f()\nH = 2 * other\n")
    _, constants, _ = tamper._declared(str(source))
    assert constants == {"A": 2.0**-13, "B": 64 << 20, "C": -1, "D": 3}


@pytest.mark.parametrize("function", [perfsuite.check, perfsuite.measure])
@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        (pair(), "gpu", "device='gpu': torch has no such device here; leave it out for '"),
        (torch.exp, None, "a perfsuite.Pair is needed, and this is a builtin_function_or_method"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    function: Callable[..., Any], given: Any, device: str | None, says: str
) -> None:
    with pytest.raises(PerfsuiteError) as raised:
        function(given, device=device)
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_not_blamed_on_the_optimized_side() -> None:
    with pytest.raises(PerfsuiteError, match="device='cuda': torch has no such device here"):
        perfsuite.check(pair(), device="cuda")


def test_check_needs_a_draw() -> None:
    with pytest.raises(PairError, match="examples=0 is no number of draws"):
        perfsuite.check(pair(), examples=0, device="cpu")
