"""The ablation: its arms, its figures, and the command on a tiny trainer2."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from optimized.compilation import compiled_function
from optimized.trainers.trainer2 import Trainer
from perfsuite.errors import PerfsuiteError
from suite import ablation, trainers
from suite.ablation import ALL, NONE, REFERENCE, Record, Timed
from suite.commands.ablate import ablate as command
from suite.trainer2.config import TrainConfig, short_windows
from suite.ups.config import TrainConfig as UpsTrainConfig

ROOT = Path(__file__).resolve().parents[2]


def record(**changed: object) -> Record:
    """Record of techniques a and b: reference 8 s, none 6 s, +a 3 s, all 2 s, -a 4 s; each round doubles the times."""
    rounds = (1.0, 2.0, 4.0)
    seconds = {REFERENCE: 8.0, NONE: 6.0, "+a": 3.0, ALL: 2.0, "-a": 4.0}
    timed = tuple(
        Timed(name=n, seconds=tuple(s * r for r in rounds), peak_bytes=1 << 20, host_syncs=1, launches=9)
        for n, s in seconds.items()
    )
    made = Record(
        trainer="toy",
        device="a device",
        versions="torch 2",
        date="2026-01-01",
        config={"width": 8},
        techniques=("a", "b"),
        claims={"a": "1–2%"},
        windows=1,
        arms=timed,
    )
    return dataclasses.replace(made, **changed)


def test_arms_are_the_reference_the_cumulative_techniques_and_each_off_alone() -> None:
    found = {a.name: a.on for a in ablation.arms(("a", "b", "c"))}
    assert found == {
        REFERENCE: None,
        NONE: (),
        "+a": ("a",),
        "+b": ("a", "b"),
        ALL: ("a", "b", "c"),
        "-a": ("b", "c"),
        "-b": ("a", "c"),
    }


def test_always_techniques_are_on_in_every_arm_and_omit_the_reference() -> None:
    found = {a.name: a.on for a in ablation.arms(("a", "b"), ("c",))}
    assert found == {NONE: ("c",), "+a": ("c", "a"), ALL: ("c", "a", "b"), "-a": ("c", "b")}


def test_ratio_is_taken_per_round() -> None:
    found = ablation.ratio(record(), REFERENCE, ALL)
    assert (found.value, found.low, found.high) == pytest.approx((4.0, 4.0, 4.0))
    noisy = Timed(name=ALL, seconds=(2.0, 4.4, 8.0))
    wide = ablation.ratio(record(arms=(record().arm(REFERENCE), noisy)), REFERENCE, ALL)
    assert wide.low < wide.value < 4.0 < wide.high
    # Student's t with two degrees of freedom: 4.303.
    logs = [math.log(4), math.log(16 / 4.4), math.log(4)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert wide.high == pytest.approx(math.exp(mean + half), rel=1e-3)


def test_table_shows_both_figures_and_the_claim_of_each_technique() -> None:
    page = ablation.table(record(), "toy.svg")
    assert "![Seconds a window, one technique after another](toy.svg)" in page
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert "| 1–2% | 2.00× (2.00–2.00) | +100.0% (+100.0 to +100.0) | 6.00 s | 1 MiB | 1 | 9 |" in rows["a"]
    assert "| – | 1.50× (1.50–1.50) | +50.0%" in rows["b"]
    assert "**4.00× (4.00–4.00)**" in page
    assert "Without b, the last one, it is 2.67× (2.67–2.67)." in page
    assert "width 8" in page


def without_a_reference() -> Record:
    return record(always=("c",), arms=tuple(a for a in record().arms if a.name != REFERENCE))


def test_table_says_that_the_reference_was_not_timed(tmp_path: Path) -> None:
    ablation.save(without_a_reference(), tmp_path / "toy.json")
    page = ablation.table(ablation.load(tmp_path / "toy.json"))
    assert "A window takes 12.0 s with c alone and 4.00 s with all techniques: **3.00× (3.00–3.00)**" in page
    assert "Without b, the last one, it is 2.00× (2.00–2.00)." in page
    assert "On in every arm: c. The reference trainer was not timed." in page
    assert "| *the optimized one, c alone* | | | | 12.0 s" in page
    assert "*the reference trainer*" not in page


def test_table_shows_the_warnings_of_each_arm() -> None:
    noted = dataclasses.replace(record().arm("+a"), notes=("cuda_graph_step runs eagerly: why",))
    arms = tuple(noted if a.name == "+a" else a for a in record().arms)
    assert "* +a: cuda_graph_step runs eagerly: why" in ablation.table(record(arms=arms))


def test_saved_record_is_loaded_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "new" / "toy.json"
    ablation.save(record(), path)
    assert ablation.load(path) == record()
    assert [p.name for p in path.parent.iterdir()] == ["toy.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 99}', '{"schema": 1, "arms": [{"name": "x"}]}'])
def test_load_rejects_files_that_hold_no_record(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(PerfsuiteError, match=r"x\.json is no ablation"):
        ablation.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"techniques": None},
        {"techniques": ["a", 1]},
        {"always": "c"},
        {"always": [""]},
        {"always": [["c"]]},
        {"always": ["a"]},
    ],
)
def test_load_rejects_records_with_invalid_techniques(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    ablation.save(without_a_reference(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(PerfsuiteError, match=r"x\.json is no ablation"):
        ablation.load(path)


def test_load_accepts_records_without_the_field_always(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    ablation.save(record(), path)
    old = json.loads(path.read_text())
    del old["always"]
    path.write_text(json.dumps(old))
    assert ablation.load(path) == record()
    del old["techniques"]
    path.write_text(json.dumps(old))
    with pytest.raises(PerfsuiteError, match=r"x\.json is no ablation"):
        ablation.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer": 3},
        {"device": None},
        {"config": [1]},
        {"config": None},
        {"claims": "x"},
        {"windows": None},
        {"windows": "3"},
        {"windows": 0},
        {"techniques": ["x" * 10**5], "always": ["x" * 10**5]},
    ],
)
def test_a_record_field_of_the_wrong_type_is_reported_in_one_line(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    ablation.save(record(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    shown(path)


@pytest.mark.parametrize("changed", [{"peak_bytes": "x"}, {"name": [1]}, {"launches": [1]}, {"seconds": [10**400] * 3}])
def test_an_arm_field_of_the_wrong_type_is_reported_in_one_line(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    ablation.save(record(), path)
    stored = json.loads(path.read_text())
    stored["arms"][1] |= changed
    path.write_text(json.dumps(stored))
    shown(path)


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b'{"schema": 1' + b"0" * 5000 + b"}", b"\xff", b"\x80\x04cos\nsystem\n."]
)
def test_a_file_with_arbitrary_bytes_is_reported_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    shown(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_path_that_is_no_regular_file_is_reported_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a\nb.json"
    {"folder": Path.mkdir, "pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero")}[kind](path)
    shown(path, "a\\nb.json is no file; name the .json of an ablation")


def shown(path: Path, stored: str = "x.json is no ablation") -> None:
    """Assert that the command rejects the file in one line and writes nothing."""
    before = sorted(path.parent.iterdir())
    done = CliRunner().invoke(command, ["toy", "--from", str(path)])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert stored in line
    assert len(line) < 600
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"schema": 9}', "its schema must be 1, it has 9"),
        ("{}", "its schema must be 1, it has none"),
        ("[1]", "its schema must be 1, it has none"),
        ('{"schema": 1}', "it lacks 'arms'"),
    ],
)
def test_json_of_another_schema_is_reported_in_one_line(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    shown(path, f"x.json is no ablation ({reason}); measure one with `perfsuite ablate`")


@pytest.mark.parametrize("seconds", [(), (1.0,), (1.0, 2.0), (1.0, 2.0, math.nan), (1.0, 2.0, 0.0), (1.0, 2.0, "x")])
def test_load_rejects_records_with_missing_rounds_arms_or_invalid_seconds(
    seconds: tuple[float, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    arms = [dataclasses.replace(a, seconds=seconds) if a.name == "+a" else a for a in record().arms]
    ablation.save(record(arms=tuple(arms)), path)
    with pytest.raises(PerfsuiteError, match=r"x\.json is no ablation"):
        ablation.load(path)
    ablation.save(record(arms=tuple(arms[:1])), path)
    with pytest.raises(PerfsuiteError, match=r"x\.json is no ablation \(arm 'none' was timed in 0 rounds\)"):
        ablation.load(path)


def test_from_option_rejects_a_record_of_another_trainer(tmp_path: Path) -> None:
    ablation.save(record(), tmp_path / "toy.json")
    done = ablate("trainer2", "--from", str(tmp_path / "toy.json"), "--out", str(tmp_path / "b"))
    assert done.exit_code == 1
    assert "is of the trainer 'toy', not of 'trainer2'" in done.stderr
    assert not (tmp_path / "b").exists()


def test_missing_matplotlib_is_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from suite.commands.ablate import ablate as command

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(command, ["trainer2", "--out", str(tmp_path / "x"), *TINY.split()])
    assert done.exit_code == 1
    assert done.output.startswith("Error: the plot needs matplotlib")
    assert not (tmp_path / "x").exists()


def test_plot_is_deterministic(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        ablation.plot(record(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def drawn(monkeypatch: pytest.MonkeyPatch, of: Record) -> Any:
    """Return the axes of the plot."""
    found: list[Any] = []
    monkeypatch.setattr(ablation.plots, "save", lambda pyplot, figure, path: found.append(figure.axes[0]))
    ablation.plot(of, Path())
    return found[0]


def test_each_bar_begins_where_the_previous_technique_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for of, labels, bars in (
        (record(), ["reference", "all off", "+ a", "+ b"], [(0, 16e3), (0, 12e3), (6e3, 6e3), (0, 4e3)]),
        (without_a_reference(), ["c", "+ a", "+ b"], [(0, 12e3), (6e3, 6e3), (0, 4e3)]),
    ):
        axes = drawn(monkeypatch, of)
        assert [label.get_text() for label in axes.get_yticklabels()] == labels
        found = [n for bar in axes.patches for n in (bar.get_x(), bar.get_width())]
        assert found == pytest.approx([n for bar in bars for n in bar])
        assert axes.get_xscale() == "linear"


def test_axis_is_logarithmic_if_bar_lengths_differ_much(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for slowest, scale in ((1e3, "log"), (20.0, "linear")):
        arms = tuple(dataclasses.replace(a, seconds=(slowest,) * 3) if a.name == NONE else a for a in record().arms)
        axes = drawn(monkeypatch, record(arms=arms))
        assert axes.get_xscale() == scale
        assert ("logarithmic" in axes.get_xlabel()) == (scale == "log")


@pytest.mark.parametrize(("windows", "timed"), [(1, 3), (3, 3), (4, 6)])
def test_whole_periods_rounds_windows_up_to_the_schedule_period(windows: int, timed: int) -> None:
    """A step has two batches, so inverse losses in every sixth batch have a period of three steps."""
    ups = UpsTrainConfig(inverse_loss_frequency=6, accumulation=2)
    assert ablation.whole_periods(windows, ups) == timed
    assert ablation.whole_periods(windows, TrainConfig()) == windows


TINY = (
    "--batch_size 2 --sequence_length 4 --blocks 1 --lattice 2 --memory_slots 8 --window 1 --warmup_steps 1 "
    "--compiled_function false"
)


def ablate(*arguments: str) -> Any:
    """Run the command in this process, where Python and torch are already loaded."""
    from click.testing import CliRunner

    from suite.commands.ablate import ablate as command

    return CliRunner().invoke(command, arguments)


def test_unknown_trainer_is_reported_in_one_line_in_a_subprocess() -> None:
    pytest.importorskip("jsonargparse")
    command = [sys.executable, "-c", "from suite.commands.ablate import ablate; ablate()", "trainer3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: no trainer is called 'trainer3'; did you mean trainer2?\n"


def test_command_measures_trainer2_and_from_shows_the_same_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("jsonargparse")
    # Compilation takes most of a minute, and this test checks no times.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled_function._compiled.cache_clear()
    try:
        done = ablate(
            "trainer2", "--device", "cpu", "--rounds", "2", "--out", str(tmp_path), "--no-plot", *TINY.split()
        )
    finally:
        compiled_function._compiled.cache_clear()
    assert done.exit_code == 0, done.output
    page = (tmp_path / "trainer2.md").read_text()
    assert re.search(r"^\| rotor_update \| 2–3% \|", page, re.MULTILINE)
    shown = next(line for line in page.splitlines() if line.startswith("Configuration: "))
    assert "window 1" in shown
    assert "compiled_function" not in shown  # a technique, so not part of the fixed configuration
    again = ablate("trainer2", "--from", str(tmp_path / "trainer2.json"), "--out", str(tmp_path / "b"), "--no-plot")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "b" / "trainer2.md").read_text() == page


def test_always_option_switches_a_technique_on_in_every_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("jsonargparse")
    from click.testing import CliRunner

    from suite.commands.ablate import ablate as command

    def measure(build: Callable[[ablation.Arm], Any], arms: list[ablation.Arm], *_: Any, **__: Any) -> Any:
        built.update({arm.name: build(arm) for arm in arms})
        return tuple(Timed(name=arm.name, seconds=(1.0, 2.0)) for arm in arms)

    built: dict[str, TrainConfig] = {}
    monkeypatch.setattr(ablation, "measure", measure)
    monkeypatch.setattr(trainers, "build", lambda name, config, *_: config)
    options = ["--always", "rotor_cache", "--device", "cpu", "--out", str(tmp_path), "--no-plot"]
    done = CliRunner().invoke(command, ["trainer2", *options, *TINY.split()])
    assert done.exit_code == 0, done.output
    assert REFERENCE not in built
    assert all(config.rotor_cache for config in built.values())
    assert not built[NONE].rotor_update
    assert built[ALL].rotor_update
    found = ablation.load(tmp_path / "trainer2.json")
    assert found.always == ("rotor_cache",)
    assert "rotor_cache" not in found.config
    assert "rotor_cache" not in found.techniques


def test_from_option_without_out_writes_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from suite.commands.ablate import ablate as command

    monkeypatch.chdir(tmp_path)
    ablation.save(record(), Path("toy.json"))
    done = CliRunner().invoke(command, ["toy", "--from", "toy.json"])
    assert done.exit_code == 0, done.output
    assert ablation.table(record(), None) in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["toy.json"]


def test_entry_point_refers_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["ablate"] == "suite.commands.ablate:ablate"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["trainer3"], 2, "no trainer is called 'trainer3'; did you mean trainer2?"),
        (["trainer2", "--widht", "512"], 2, "widht"),
        (["trainer2", "--from", "nowhere.json"], 1, "nowhere.json is no ablation"),
        (["trainer2", "--width", "100"], 2, "width=100: the field takes up 256 channels"),
        (
            ["trainer2", "--static_shapes", "false"],
            2,
            "switched on in turn, which these fields do not allow: static_sh",
        ),
        (["trainer2", "--from", "x.json", "--width", "512"], 2, "leave out --width 512, or --from"),
        (["trainer2", "--from", "x.json", "--always", "tf32"], 2, "leave out --always, or --from"),
        (["trainer2", "--always", "speed"], 1, "--always speed: no technique of this trainer, which has "),
        (
            ["eigenstate_lm", *(f"--always={t}" for t in trainers.techniques_of("eigenstate_lm"))],
            1,
            "nothing is left to measure; leave one out",
        ),
        (["trainer2", "--seed", str(2**64)], 2, "use 0 to 2^63 - 1"),
        (["trainer2", "--out", f"{__file__}/x"], 1, "cannot write into"),
        (["trainer2", "--device", "meta"], 1, "only cpu and cuda"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments: list[str], code: int, says: str) -> None:
    pytest.importorskip("jsonargparse")
    done = ablate(*arguments)
    assert isinstance(done.exception, SystemExit)
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (code, 1), done.stderr
    assert says in done.stderr


def test_operations_of_a_long_window_are_extrapolated_from_two_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count for nine steps is extrapolated from windows of one and two; a counter replaces the profiler.

    Without short windows, the whole window is counted.
    """
    steps: list[int] = []
    during: list[int] = []

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def count_calls(sides: Mapping[str, tuple[Callable[[], None], Callable[[], object]]]) -> dict[str, tuple[int, int]]:
        counts = {}
        for name, (reset, call) in sides.items():
            reset()
            with Operations() as operations:
                call()
            during.append(operations.count)
            steps.append(trainers[name].config.window)
            counts[name] = 0, operations.count
        return counts

    monkeypatch.setattr("perfsuite.timing.profiler_counts.count_calls", count_calls)
    config = TrainConfig(batch_size=2, sequence_length=4, blocks=1, memory_slots=8, window=9, compiled_function=False)
    batch = next(ablation.random_batches(config, torch.device("cpu")))
    trainers = {n: Trainer(config, ablation.VOCABULARY, "cpu") for n in ("long", "whole")}
    for trainer in trainers.values():
        for _ in range(2):
            trainer.train_window(batch)
    by_two = ablation._counted({"long": trainers["long"]}, batch, short_windows, lambda what: None)
    whole = ablation._counted({"whole": trainers["whole"]}, batch, lambda config: None, lambda what: None)
    assert by_two["long"] == whole["whole"]
    assert steps == [9, 9, 9]  # the window length is restored
    assert during[0] < during[1] < during[2] / 3
    assert short_windows(dataclasses.replace(config, window=2)) is None
    assert short_windows(dataclasses.replace(config, step_progress_every=3)) is None
