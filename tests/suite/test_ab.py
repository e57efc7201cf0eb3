"""`perfsuite ab`: equal items, alternating slices, intervals from a fake clock, and error messages."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import toy
from click.testing import CliRunner, Result
from training import ROOT, environment

from suite import ab, ab_report, trainers
from suite.ab import Arm, Comparison, Pair, Run, Slice, unit_of
from suite.ab_report import Record, Setting
from suite.commands.ab import ab as command
from suite.configuration import ConfigurationError
from suite.leak_cnn import report as leak_report
from suite.leak_cnn.metrics import EpochMetrics
from suite.runtime import DivergedError
from suite.text import Batches, synthetic
from suite.ups import evaluation
from suite.ups.batches import Data, mixture_of
from suite.ups.config import TrainConfig
from suite.ups.losses import ups_loss
from suite.ups.networks import Networks

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'perfsuite[train]'")

CPU = torch.device("cpu")
TINY = str(ROOT / "configs/ups/tiny.yaml")
SMALL = ("--synthetic", "64", "--vocabulary", "16", "--sequence_length", "8", "--device", "cpu")


BOTH = ("toy", "--baseline", "a.yaml", "--optimized", "a.yaml")


class Clock:
    """Fake clock that `sleep` advances without waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0
        self.asleep: Callable[[int], None] = lambda count: None
        """Called after each sleep with the number of sleeps so far."""

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self.asleep(self.sleeps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ab, "clock", made)
    monkeypatch.setattr(toy, "time", SimpleNamespace(sleep=made.sleep))
    return made


def files(baseline: str = "batch_size: 4", optimized: str = "batch_size: 4") -> tuple[str, ...]:
    Path("a.yaml").write_text(baseline)
    Path("b.yaml").write_text(optimized)
    return ("--baseline", "a.yaml", "--optimized", "b.yaml")


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def toys(*arguments: str, baseline: str = "batch_size: 4", optimized: str = "batch_size: 4") -> Result:
    return invoked("toy", *files(baseline, optimized), *SMALL, *arguments)


def found(folder: str = ".perfsuite/ab/toy") -> dict[str, Any]:
    return json.loads((Path(folder) / "ab.json").read_text())


def one_line(done: Result, code: int, *words: str) -> None:
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    (line,) = [line for line in done.output.splitlines() if not line.startswith(("data: ", "seed "))]
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


# --- the measurement ------------------------------------------------------------------------------------------------


class Rows:
    """Iterator of batches with `rows` rows."""

    unit = "rows"

    def __init__(self, rows: int, total: int = 10**6) -> None:
        self.rows, self.total, self.made = rows, total, 0

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.made += 1
        return {"x": torch.zeros(self.rows)}

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        return len(batch["x"])


class Counter:
    """Trainer that logs its name at each window. Window n takes `seconds(n)`; its loss is 1/n."""

    def __init__(self, name: str, log: list[str], seconds: Callable[[int], float], clock: Clock) -> None:
        self.name, self.log, self.seconds, self.clock, self.windows = name, log, seconds, clock, 0

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        self.windows += 1
        self.log.append(self.name)
        self.clock.now += self.seconds(self.windows)

    def metrics(self) -> dict[str, float] | None:
        return {"loss": 1 / self.windows, "window": self.windows}


def compared(
    clock: Clock,
    rows: tuple[int, int] = (4, 4),
    seconds: tuple[Callable[[int], float], Callable[[int], float]] = (lambda n: 1.0, lambda n: 1.0),
    limits: tuple[int | None, int | None] = (48, 48),
    slices: int = 12,
    ends_s: float | None = None,
) -> tuple[Pair, list[str]]:
    log: list[str] = []
    arms = [
        Arm(name=n, build=lambda n=n, s=s: Counter(n, log, s, clock), batches=Rows(r), limit=limit)
        for n, r, s, limit in zip(("baseline", "optimized"), rows, seconds, limits, strict=True)
    ]
    comparison = Comparison(arms, seed=0, device=CPU, slices=slices, seconds=ends_s)
    comparison.run()
    return comparison.pair(), log


def test_slices_alternate_and_the_first_side_alternates_too(clock: Clock) -> None:
    _, log = compared(clock, limits=(8, 8), slices=4)
    a, b = ["baseline"], ["optimized"]
    assert log == [*a, *b, *b * 2, *a * 2, *a * 2, *b * 2, *b * 3, *a * 3]


def test_both_sides_train_on_the_same_number_of_items_in_every_slice(clock: Clock) -> None:
    pair, _ = compared(clock, rows=(24, 40), limits=(50, 50))
    assert [s.items for s in pair.baseline.slices] == [s.items for s in pair.optimized.slices]
    assert pair.baseline.items == 1200
    assert sum(s.windows for s in pair.baseline.slices) == 50  # limited: the optimized side could train on more items
    assert sum(s.windows for s in pair.optimized.slices) == 30


def test_slices_are_rounded_to_whole_windows_if_windows_rarely_end_together(clock: Clock) -> None:
    assert unit_of(24, 40) == 120
    assert unit_of(1000, 1001) == 1001
    pair, _ = compared(clock, rows=(999, 1500), limits=(60, 60), slices=5)
    seen = [0, 0]
    for a, b in zip(pair.baseline.slices, pair.optimized.slices, strict=True):
        seen = [seen[0] + a.items, seen[1] + b.items]
        assert abs(seen[0] - seen[1]) <= (999 + 1500) / 2
    assert sum(s.windows for s in pair.baseline.slices) <= 60


def test_a_side_limited_to_one_large_window_trains_that_window(clock: Clock) -> None:
    pair, _ = compared(clock, rows=(4, 400), limits=(1, 1))
    assert [s.windows for s in pair.optimized.slices] == [1]


def test_sides_that_reach_no_common_item_count_raise_configuration_error(clock: Clock) -> None:
    with pytest.raises(ConfigurationError, match="equally many items after 9 and 4 windows at the earliest"):
        compared(clock, rows=(4, 9), limits=(1, 1))


def test_speedup_excludes_the_warm_up_slices(clock: Clock) -> None:
    pair, _ = compared(clock, seconds=(lambda n: 3.0, lambda n: 1000.0 if n == 1 else 1.0))
    assert pair.warm_up == 3
    ratio = ab_report.speedup([pair])
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.count) == pytest.approx((3.0, 3.0, 3.0, 11))
    assert [s.seconds for s in pair.optimized.slices[:4]] == [1000.0, 1.0, 2.0, 4.0]


def test_speedup_is_1_for_equal_sides_on_a_machine_that_slows_down(clock: Clock) -> None:
    """The machine is twice as slow at the end. All of A before all of B would give a difference of a half."""

    def drifting(_: int) -> float:
        return 1.0 + clock.now / 100

    pair, _ = compared(clock, seconds=(drifting, drifting), slices=48)
    ratio = ab_report.speedup([pair])
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.value == pytest.approx(1.0, abs=1e-3)
    assert ratio.low < 1 < ratio.high


def test_warm_up_is_shorter_when_there_are_few_slices(clock: Clock) -> None:
    counts = {limit: compared(clock, limits=(limit, limit))[0] for limit in (1, 2, 5, 6)}
    assert {limit: (len(p.baseline.slices), len(p.timed())) for limit, p in counts.items()} == {
        1: (1, 0),
        2: (2, 1),
        5: (5, 4),
        6: (6, 4),
    }
    assert ab_report.speedup([counts[1]]) is None
    alone = ab_report.speedup([counts[2]])
    assert alone is not None
    assert (alone.low, alone.high) == (None, None)


def test_time_limit_ends_the_comparison_after_a_complete_pair_of_slices(clock: Clock) -> None:
    pair, _ = compared(clock, (4, 4), (lambda n: 0.5, lambda n: 0.5), (None, None), ends_s=100.0)
    timed = [a.seconds + b.seconds for a, b in pair.timed()]
    assert sum(timed[:-1]) < 100 <= sum(timed)
    assert [s.items for s in pair.baseline.slices] == [s.items for s in pair.optimized.slices]
    assert [s.windows for s in pair.baseline.slices] == [1, 2, 4, *[8] * len(timed)]


def test_slices_of_slow_windows_stay_short(clock: Clock) -> None:
    """Half of 120 windows would take ten minutes, long enough for the machine to drift."""
    pair, _ = compared(clock, (4, 4), (lambda n: 10.0, lambda n: 10.0), (120, 120), slices=2)
    assert {s.windows for s in pair.baseline.slices} == {1}


def test_each_side_has_the_losses_of_a_run_by_itself() -> None:
    """Both sides draw from the random generators of Python, NumPy and PyTorch."""

    def alone(batch_size: int) -> list[float]:
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        trainer = toy.Trainer(toy.Config(), 16, CPU)
        batches = Batches(synthetic(16, 8, 64), batch_size)
        losses = []
        for _ in range(13):
            trainer.train_window(next(batches))
            losses.append(float(trainer.losses[-1]))
        return losses[:12]

    arms = [
        Arm(
            name=name,
            build=lambda: toy.Trainer(toy.Config(), 16, CPU),
            batches=Batches(synthetic(16, 8, 64), size),
            limit=13 * 4 // size,
        )
        for name, size in (("baseline", 4), ("optimized", 4))
    ]
    comparison = Comparison(arms, seed=3, device=CPU, slices=13)
    comparison.run()
    pair = comparison.pair()
    assert [s.loss for s in pair.baseline.slices[:12]] == alone(4)
    assert [s.loss for s in pair.optimized.slices[:12]] == alone(4)
    assert pair.baseline.slices[12].loss is None  # the toy reports a loss one window later


def test_last_loss_of_a_slice_is_read_from_last_metrics(clock: Clock) -> None:
    class Late(Counter):
        def metrics(self) -> dict[str, float] | None:
            return None

        def last_metrics(self) -> dict[str, float]:
            return {"loss": math.nan if self.windows == 6 else 1.0}

    late = Arm(name="optimized", build=lambda: Late("b", [], lambda n: 1.0, clock), batches=Rows(4), limit=12)
    prompt = Arm(name="baseline", build=lambda: Counter("a", [], lambda n: 1.0, clock), batches=Rows(4), limit=12)
    comparison = Comparison([prompt, late], seed=0, device=CPU, slices=4)
    with pytest.raises(DivergedError, match="optimized, window 6: the loss is nan"):
        comparison.run()
    pair = comparison.pair()
    assert [s.loss for s in pair.optimized.slices] == [1.0, 1.0]
    assert pair.baseline.slices[1].loss == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert (pair.baseline.slices[1].losses, pair.optimized.slices[1].losses) == (2, 1)


def test_peak_memory_excludes_memory_held_by_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(now=50, peak=50)  # these 50 bytes belong to neither side

    def holding(held: int, at_most: int) -> None:
        gpu.now, gpu.peak = gpu.now + held, gpu.now + at_most

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gpu.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(gpu, "peak", gpu.now))
    first, second = (ab._Own(torch.device("cuda")) for _ in range(2))
    with first:
        holding(100, 120)
    with second:
        holding(1000, 1000)
    with first:
        holding(10, 300)
    with second:
        holding(-400, 5)
    with first:
        holding(0, 200)
    assert (first.peak, second.peak) == (400, 1005)
    assert ab._Own(CPU).peak is None


# --- the report -----------------------------------------------------------------------------------------------------


def run_of(loss: float, seconds: float, quality: Mapping[str, float] | None = None, peak: int | None = None) -> Run:
    slices = tuple(Slice(windows=2, items=8, seconds=seconds, loss=loss, losses=2) for _ in range(6))
    return Run(slices=slices, build_s=1.0, peak_bytes=peak, quality=quality or {})


def record(*pairs: Pair, **changed: Any) -> Record:
    a = Setting(file="a.yaml", side="reference", fields={"width": 8, "model": {"scale": 1.0}, "on": False})
    b = Setting(file="b.yaml", side="optimized", fields={"width": 8, "model": {"scale": 2.0}, "on": True})
    known: dict[str, Any] = {
        "trainer": "toy",
        "device": "a device",
        "versions": "torch 2",
        "date": "2026-01-01",
        "baseline": a,
        "optimized": b,
        "pairs": pairs,
    }
    return Record(**{**known, **changed})


def test_differences_over_several_seeds_have_a_confidence_interval() -> None:
    pairs = [
        Pair(
            seed=s,
            baseline=run_of(1.0, 4.0, {"f1": 0.5}, 1 << 30),
            item="tokens",
            optimized=run_of(loss, 2.0, {"f1": 0.5}, 1 << 29),
        )
        for s, loss in enumerate((1.1, 1.2, 1.3))
    ]
    estimate = ab_report.difference([(p.baseline.loss, p.optimized.loss) for p in pairs])
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.value == pytest.approx(0.2)
    # Student's t with two degrees of freedom: 4.303.
    assert estimate.value - estimate.low == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    shown = ab_report.page(record(*pairs))
    assert "| tokens a second | 2.00 | 4.00 | 2.00× (2.00–2.00) |" in shown
    assert "| loss after 48 tokens | 1 | 1.2 | +0.2 (-0.04841 to +0.4484) |" in shown
    assert "| f1 | 0.5 | 0.5 | +0 (+0 to +0) |" in shown
    assert "| peak GPU memory | 1.00 GiB | 512 MiB | 0.500× |" in shown
    assert "| 1 | 48 | 4 | 2.00× (2.00–2.00) | 1, 1.2 | 0.5, 0.5 |" in shown
    assert "| model.scale | 1.0 | 2.0 |" in shown
    assert "| on | false | true |" in shown
    assert "| side | reference | optimized |" in shown
    assert "width" not in shown


def test_one_seed_gives_no_interval_and_nan_becomes_null_in_the_json(tmp_path: Path) -> None:
    pair = Pair(seed=0, baseline=run_of(1.0, 4.0, {"f1": math.nan}), optimized=run_of(1.1, 2.0, {"f1": 1.0}))
    ab_report.save(record(pair, partial="why"), tmp_path)
    stored = json.loads((tmp_path / "ab.json").read_text())
    assert stored["loss_difference"] == {"value": pytest.approx(0.1), "low": None, "high": None, "count": 1}
    assert stored["pairs"][0]["baseline"]["quality"] == {"f1": None}
    shown = (tmp_path / "ab.md").read_text()
    assert "**Partial**: why." in shown
    assert "of one seed and have no interval" in shown
    assert "not measured: ran on a CPU" in shown


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_compares_two_configurations_of_a_trainer(clock: Clock) -> None:
    """The optimized side has twice the batch size, as many tokens, and a third of the time per token."""
    done = toys(
        "--windows", "48", "--seed", "5", "--seed", "6", "--eta_update", "0.02",
        baseline="batch_size: 4\nsleep: 3.0", optimized="batch_size: 8\nsleep: 2.0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "3.00× (3.00–3.00)" in done.output
    stored = found()
    assert [p["seed"] for p in stored["pairs"]] == [5, 6]
    for pair in stored["pairs"]:
        a, b = pair["baseline"], pair["optimized"]
        assert a["items"] == b["items"] == 48 * 4 * 8
        assert [s["items"] for s in a["slices"]] == [s["items"] for s in b["slices"]]
        assert (sum(s["windows"] for s in a["slices"]), sum(s["windows"] for s in b["slices"])) == (48, 24)
        assert pair["warm_up"] == 3
    assert stored["pairs"][0]["baseline"]["loss"] != stored["pairs"][1]["baseline"]["loss"]
    assert stored["speedup"]["value"] == pytest.approx(3.0)
    assert stored["speedup"]["count"] == 18
    assert stored["loss_difference"]["low"] < stored["loss_difference"]["value"] < stored["loss_difference"]["high"]
    assert stored["differing"] == {"side": ["reference", "optimized"], "batch_size": [4, 8], "sleep": [3.0, 2.0]}
    assert stored["baseline"]["fields"]["eta_update"] == stored["optimized"]["fields"]["eta_update"] == 0.02
    assert stored["partial"] is None
    assert {"trainer": "toy", "item": "tokens", "noun": "window", "versions": f"torch {torch.__version__}"}.items() <= (
        stored.items()
    )
    assert stored["device"]
    assert stored["date"]


def test_side_options_choose_the_implementation_of_each_side(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    built: list[str] = []

    def build(name: str, config: Any, given: Any, device: Any, side: str) -> toy.Trainer:
        built.append(side)
        return toy.Trainer(config, given, device)

    monkeypatch.setattr(trainers, "build", build)
    assert toys("--windows", "3").exit_code == 0
    sides = ("--baseline-side", "optimized", "--optimized-side", "reference")
    assert toys("--windows", "3", *sides, "--out", "o").exit_code == 0
    assert built == ["reference", "optimized", "optimized", "reference"]
    assert found("o")["differing"] == {"side": ["optimized", "reference"]}


def test_quality_metrics_of_the_trainer_are_compared(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    entry = trainers.Entry(
        config=toy.Config,
        reference=toy.Trainer,
        optimized=toy.Trainer,
        quality=lambda trainer, given: {"eta": trainer.config.eta_update, "vocabulary": given},
    )
    monkeypatch.setitem(trainers.TRAINERS, "toy", entry)
    done = toys("--windows", "3", baseline="eta_update: 0.5", optimized="eta_update: 0.25")
    assert done.exit_code == 0, done.output
    stored = found()
    assert stored["pairs"][0]["optimized"]["quality"] == {"eta": 0.25, "vocabulary": 16}
    assert stored["quality_difference"]["eta"]["value"] == -0.25


def test_ups_reference_and_optimized_agree_on_the_tiny_configuration(tmp_path: Path) -> None:
    done = invoked(
        "ups", "--baseline", TINY, "--optimized", TINY, "--windows", "6", "--device", "cpu", "--out", "out",
        "--compile", "false",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    stored = found("out")
    (pair,) = stored["pairs"]
    a, b = pair["baseline"], pair["optimized"]
    assert (stored["item"], stored["noun"], a["items"], b["items"]) == ("examples", "step", 48, 48)
    assert a["loss"] == pytest.approx(b["loss"], rel=0.01)
    names = [f"NRMSE of {t}, step {n}, averages" for t, n in (("advection1d", 1), ("advection1d", 4), ("darcy2d", 1))]
    assert set(names) < set(a["quality"])
    for name in names:
        assert a["quality"][name] == pytest.approx(b["quality"][name], rel=0.01)
        assert f"| {name} |" in (tmp_path / "out/ab.md").read_text()
    assert stored["differing"] == {"side": ["reference", "optimized"]}
    assert stored["baseline"]["fields"]["compile"] is False
    assert a["peak_bytes"] is None
    assert "not measured" in done.output


def test_ups_quality_covers_averaged_and_trained_weights() -> None:
    config = TrainConfig(
        tokens=8, latent_width=8, width=16, depth=1, heads=2, decoder_width=16, decoder_depth=1, batch_size=2
    )
    given = mixture_of(Data(tokens=8, latent_width=8, synthetic=4, synthetic_frames=13, batch_size=2))
    networks = Networks(config, given)
    averages = {name: weight.detach() + 0.1 for name, weight in networks.weights().items()}
    trainer = SimpleNamespace(config=config, device=CPU, refiner=None, averages=averages, weights=networks.weights())
    errors = trainers.quality_of("ups")(trainer, given)
    state = {"averages": averages, "weights": networks.weights()}
    every = []
    for weights in ("averages", "trained"):
        found, step = evaluation.loaded(config, given, state, CPU, weights)
        scores, _ = evaluation.evaluate(found, given, CPU, 10, step)
        wanted = {(s.task, s.step): s for s in scores}
        line = "advection1d"
        assert errors[f"NRMSE of {line}, step 1, {weights}"] == wanted[line, 1].nrmse
        assert errors[f"NRMSE of {line}, step 10, {weights}"] == wanted[line, 10].nrmse
        assert errors[f"NRMSE of darcy2d's latents, step 1, {weights}"] == wanted["darcy2d", 1].latent_nrmse
        every.append(scores)
    assert every[0] != every[1]
    assert len(errors) == 14


def test_ups_held_out_loss_covers_all_validation_examples_without_inverse_losses() -> None:
    config = TrainConfig(
        tokens=8, latent_width=8, width=16, depth=1, heads=2, decoder_width=16, decoder_depth=1, batch_size=2
    )
    given = mixture_of(Data(tokens=8, latent_width=8, synthetic=4, synthetic_frames=13, batch_size=2))
    found = evaluation.held_out_loss(config, given, CPU, lambda z, dt: z + dt[:, None, None])
    none, expected = (torch.zeros(()), torch.zeros(())), torch.zeros(())
    for task in given.tasks:
        before = torch.cat([task.rows([i], "validation") for i in range(task.count("validation"))])
        z, target = task.latents.rows[before], task.latents.rows[before + 1]
        expected += ups_loss(config, z + task.fields.dt, target, task.at_boundary, none) / 2
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_ups_held_out_loss_samples_examples_at_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an even spacing, all examples could be first states."""
    monkeypatch.setattr(evaluation, "EXAMPLES", 4)
    config = TrainConfig(
        tokens=8, latent_width=8, width=16, depth=1, heads=2, decoder_width=16, decoder_depth=1, batch_size=2
    )
    given = mixture_of(Data(tokens=8, latent_width=8, synthetic=40, synthetic_frames=13, batch_size=2))
    seen, (task, _) = set(), given.tasks
    assert task.count("validation") % 4 == 0
    rows, of_class = task.rows, type(task)
    monkeypatch.setattr(
        of_class, "rows", lambda self, indices, split: seen.update(i % 12 for i in indices) or rows(indices, split)
    )
    evaluation.held_out_loss(config, dataclasses.replace(given, tasks=given.tasks[:1]), CPU, lambda z, dt: z)
    assert len(seen) > 1


def test_evaluation_data_can_be_built_for_any_batch_size() -> None:
    config = TrainConfig(
        tokens=8, latent_width=8, width=16, depth=1, heads=2, decoder_width=16, decoder_depth=1, batch_size=3
    )
    data = evaluation.data_for(config, Data(synthetic=4, synthetic_frames=3))
    assert len(mixture_of(data).tasks) == 2


def test_ups_epochs_option_overrides_the_steps_of_the_file() -> None:
    """The file sets 100 steps. An epoch of its 15 examples has one whole step of 8."""
    done = invoked(
        "ups", "--baseline", TINY, "--optimized", TINY, "--epochs", "2", "--device", "cpu", "--out", "out",
        "--optimized-side", "reference",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [s["windows"] for s in found("out")["pairs"][0]["optimized"]["slices"]] == [1, 1]
    assert found("out")["differing"] == {}


def test_leak_cnn_quality_comes_from_its_last_validation() -> None:
    segments = EpochMetrics(loss=0.5, accuracy=0.75, f1=0.7, confusion=[])
    validation = leak_report.Validation(segments=segments, files=[[3, 1], [0, 4]])
    quality = trainers.quality_of("leak_cnn")
    stored = quality(SimpleNamespace(validation=lambda: validation), None)
    assert stored["validation_loss"] == 0.5
    assert stored["file_accuracy"] == 7 / 8
    assert quality(SimpleNamespace(validation=lambda: None), None) == {}
    assert trainers.quality_of("trainer2")(None, None) == {}


# --- wrong input and interruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toi"], ["no trainer is called 'toi'; did you mean toy?"]),
        (["toy", "--optimized", "a.yaml"], ["--baseline: name the YAML file"]),
        (["toy", "--baseline", "no.yaml", "--optimized", "a.yaml"], ["no.yaml: No such file"]),
        (["trainer2", "--epochs", "2"], ["--epochs: trainer2 has no epochs; use --windows 2"]),
        (["eigenstate_lm", "--epochs", "2"], ["eigenstate_lm has no epochs; use --windows 2"]),
        (["leak_cnn", "--epochs", "2", "--windows", "2"], ["--epochs and --windows"]),
        (["ups", "--epochs", "2", "--steps", "2"], ["--epochs and --steps"]),
        ([*BOTH, "--eta_updte", "1"], ["--eta_updte: no field"]),
        (["toy", "--baseline", "a.yaml", "--optimized", "wrong.yaml"], ["wrong.yaml: no field is called 'colour'"]),
        ([*BOTH, "--windows", "0"], ["windows: 0"]),
        ([*BOTH, "--windows", "x"], ["--windows must be a whole number"]),
        ([*BOTH, "--seed", "1", "--seed", "1"], ["a seed is there twice"]),
        (["toy", "--baseline", "a.yaml", "--optimized", "seven.yaml"], ["seed is 0 in a.yaml and 7 in seven.yaml"]),
        (["toy", "--baseline", "a.yaml", "--optimized", "long.yaml"], ["sequence_length is 256", "the same data"]),
        ([*BOTH, "--device", "meta"], ["only cpu and cuda"]),
        ([*BOTH, "--synthetic", "2"], ["batch_size: 4 is more than"]),
        ([*BOTH, "--synthetic", "9"], ["no end", "--windows or --seconds"]),
        ([*BOTH, "--out", "a.yaml/x"], ["cannot write into a.yaml/x"]),
        ([*BOTH, "--synthetic", "9", "--windows", "1", "--out", "a" * 300], ["cannot write into aaa", "too long"]),
    ],
)  # fmt: skip
def test_wrong_input_is_reported_in_one_line(arguments: list[str], words: list[str]) -> None:
    Path("a.yaml").write_text("batch_size: 4")
    Path("wrong.yaml").write_text("colour: red")
    Path("seven.yaml").write_text("seed: 7")
    Path("long.yaml").write_text("sequence_length: 512")
    one_line(invoked(*arguments), 2, *words)
    assert not list(Path().rglob("ab.json"))


def test_an_earlier_result_is_replaced_only_with_overwrite(clock: Clock) -> None:
    assert toys("--windows", "3").exit_code == 0
    before = Path(".perfsuite/ab/toy/ab.json").read_text()
    one_line(toys("--windows", "4"), 2, "ab.json is there already", "--out", "--overwrite")
    assert Path(".perfsuite/ab/toy/ab.json").read_text() == before
    assert toys("--windows", "4", "--out", "else").exit_code == 0
    assert toys("--windows", "4", "--overwrite").exit_code == 0
    assert len(found()["pairs"][0]["baseline"]["slices"]) == 4


def test_nan_loss_error_names_side_and_window(clock: Clock) -> None:
    done = toys("--windows", "24", optimized="batch_size: 4\nnan_at: 7")
    one_line(done, 1, "optimized, window 7: the loss is nan", "marked as partial")
    stored = found()
    assert "optimized, window 7" in stored["partial"]
    assert [len(stored["pairs"][0][name]["slices"]) for name in ("baseline", "optimized")] == [4, 4]
    assert toys("--windows", "24", "--out", "o", baseline="batch_size: 4\nnan_at: 3").exit_code == 1
    assert "baseline, window 3" in found("o")["partial"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_completed_slices_as_a_partial_result(clock: Clock, number: signal.Signals) -> None:
    def asleep(count: int) -> None:
        if count == 48 + 27:  # in the second seed
            signal.raise_signal(number)

    clock.asleep = asleep
    both = "batch_size: 4\nsleep: 1.0"
    done = toys("--windows", "24", "--seed", "0", "--seed", "1", baseline=both, optimized=both)
    assert done.exit_code == 128 + number, done.output
    assert clock.sleeps == 48 + 27
    stored = found()
    assert stored["partial"] == f"ended by {number.name}"
    slices = [[len(p[name]["slices"]) for name in ("baseline", "optimized")] for p in stored["pairs"]]
    assert slices == [[12, 12], [7, 7]]
    assert "partial" in done.output


def test_a_signal_before_the_first_slice_keeps_the_earlier_result(clock: Clock) -> None:
    assert toys("--windows", "3").exit_code == 0
    before = Path(".perfsuite/ab/toy/ab.json").read_text()
    clock.asleep = lambda count: signal.raise_signal(signal.SIGINT)
    done = toys("--windows", "24", "--overwrite", baseline="sleep: 1.0", optimized="sleep: 1.0")
    assert done.exit_code == 130
    assert "nothing was written" in done.output
    assert Path(".perfsuite/ab/toy/ab.json").read_text() == before


# --- in the CLI -----------------------------------------------------------------------------------------------------


def test_entry_point_refers_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["ab"] == "suite.commands.ab:ab"
    assert command.name == "ab"


def test_importing_the_command_does_not_import_torch() -> None:
    """`perfsuite --help` imports the command, so it must not import torch."""
    code = "import suite.commands.ab, sys; print([m for m in ('torch', 'jsonargparse', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_shows_an_example() -> None:
    done = invoked("--help")
    assert done.exit_code == 0
    assert "perfsuite ab ups --baseline configs/ups/1gpu_baseline.yaml" in " ".join(done.output.split())
