"""`perfsuite train`: how the CLI finds the command, and its output."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from training import ROOT, SMALL, environment, started

from perfsuite.cli import main
from perfsuite.errors import PerfsuiteError
from perfsuite.gate import exit_codes
from suite import trainers
from suite.commands.train import train
from suite.runtime import archive

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'perfsuite[train]'")


def invoked(*arguments: str, small: bool = True) -> Result:
    return CliRunner().invoke(train, [*arguments, *(SMALL if small else ())])


def one_line(done: Result, code: int, *words: str) -> None:
    assert done.exit_code == code, done.output
    (line,) = [line for line in done.output.splitlines() if not line.startswith("data: ")]
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


# --- in the CLI -----------------------------------------------------------------------------------------------------


def installed(folder: Path, *, record: str, editable: Path | None = None) -> Path:
    """Write a site-packages folder in which perfsuite declares a command of the package `others`."""
    info = described(folder / "perfsuite-0.1.0.dist-info", "METADATA")
    (info / "RECORD").write_text(record)
    if editable is not None:
        origin = {"dir_info": {"editable": True}, "url": editable.as_uri()}
        (info / "direct_url.json").write_text(json.dumps(origin))
    return folder


def described(info: Path, name: str) -> Path:
    """Write a distribution's metadata, without its list of files."""
    info.mkdir(parents=True)
    (info / name).write_text("Metadata-Version: 2.1\nName: perfsuite\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[perfsuite.commands]\nteach = others.commands:teach\n")
    return info


def perfsuite(site: Path, *arguments: str, within: Path | None = None) -> subprocess.CompletedProcess[str]:
    given = environment(PYTHONPATH=f"{site}:{ROOT}")
    command = [sys.executable, "-m", "perfsuite", *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, cwd=within)


def cloned(folder: Path) -> Path:
    """Write a clone that contains the command's package, which the wheel lacks."""
    (folder / "others").mkdir(parents=True)
    (folder / "others" / "commands.py").write_text(
        "import click\n\n\n@click.command()\ndef teach():\n    'Teach it.'\n    click.echo('taught')\n"
    )
    return folder


def test_commands_are_found_in_a_clone_despite_its_egg_info(tmp_path: Path) -> None:
    """`pip install -e .` creates an egg-info in the clone, which hides the installed metadata."""
    clone = cloned(tmp_path / "clone")
    site = installed(tmp_path / "site", record="../perfsuite.pth,,\n", editable=clone)
    info = described(clone / "perfsuite.egg-info", "PKG-INFO")
    (info / "SOURCES.txt").write_text("README.md\npyproject.toml\nperfsuite/__init__.py\nperfsuite/cli.py\n")
    (info / "top_level.txt").write_text("perfsuite\n")
    done = perfsuite(site, "teach", within=clone)
    assert (done.stdout, done.stderr) == ("taught\n", "")
    shutil.rmtree(clone / "others")  # as in a source release, which lacks this package
    assert "needs the package 'others'" in perfsuite(site, "teach", within=clone).stderr


def test_commands_are_found_beside_an_editable_install(tmp_path: Path) -> None:
    """The working folder does not matter. pip maps only the wheel's packages; the command's package is beside them."""
    clone = cloned(tmp_path / "a clone")
    site = installed(tmp_path / "site", record="../perfsuite.pth,,\n", editable=clone)
    assert perfsuite(site, "teach").stdout == "taught\n"
    assert "Teach it." in perfsuite(site, "--help").stdout


def test_a_wheel_does_not_provide_commands_of_the_repository(tmp_path: Path) -> None:
    """An unrelated package of that name in the current folder is not imported."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "__init__.py").write_text("raise SystemExit('never imported')")
    site = installed(tmp_path / "site", record="perfsuite/__init__.py,,\nperfsuite/cli.py,,\n")
    help_ = perfsuite(site, "--help")
    assert help_.returncode == 0
    assert "doctor" in help_.stdout
    assert "teach" not in help_.stdout
    asked = perfsuite(site, "teach", "me", "--anything")
    assert (asked.returncode, asked.stdout) == (exit_codes.COULD_NOT_BEGIN, "")
    assert asked.stderr.startswith(
        "Error: command 'teach' needs the package 'others', which perfsuite does not install"
    )
    assert asked.stderr.count("\n") == 1


def test_entry_point_refers_to_the_command() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["train"] == "suite.commands.train:train"
    assert train.name == "train"
    assert "train" not in main.commands, "perfsuite itself knows of no trainer"


def test_importing_the_command_does_not_import_torch() -> None:
    """`perfsuite --help` imports the command, so it must not import torch."""
    code = "import suite.commands.train, sys; print([m for m in ('torch', 'jsonargparse', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_shows_usage_and_an_example() -> None:
    done = invoked("--help", small=False)
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")
    assert "perfsuite train trainer2 --config FILE" in " ".join(done.output.split())


# --- runs -----------------------------------------------------------------------------------------------------------


def test_fields_come_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("eta_update: 0.3\nwindows: 500\nfolder: out\nmodel:\n  scale: 0.2\n")
    done = invoked("toy", "--config", "c.yaml", "--windows", "12", "--checkpoint_every", "6", "--side", "reference")
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in Path("out").glob("window-*")) == ["window-00000006.pt", "window-00000012.pt"]
    from suite.runtime.checkpoints import load

    found = load(Path("out/window-00000012.pt"), "toy")
    wanted = {"side": "reference", "eta_update": 0.3, "model": {"scale": 0.2}, "synthetic": 64, "use_cudagraphs": True}
    assert wanted.items() <= found.configuration.items()


def test_resume_accepts_latest_a_folder_or_a_file() -> None:
    assert invoked("toy", "--windows", "4").exit_code == 0
    folder = Path(".perfsuite/train/toy-optimized")
    assert [p.name for p in folder.glob("window-*")] == ["window-00000004.pt"]
    one_line(invoked("toy", "--windows", "6"), 1, "holds checkpoints of an earlier run", "--resume latest")
    assert invoked("toy", "--windows", "6", "--resume", "latest").exit_code == 0
    assert invoked("toy", "--windows", "7", "--resume", str(folder)).exit_code == 0
    assert invoked("toy", "--windows", "8", "--resume", str(folder / "window-00000007.pt")).exit_code == 0
    assert (folder / "window-00000008.pt").exists()
    one_line(invoked("toy", "--windows", "9", "--resume", "nowhere.pt"), 1, "no checkpoint nowhere.pt")
    (folder / "window-00000008.pt").write_bytes(b"PK")
    one_line(
        invoked("toy", "--windows", "9", "--resume", "latest"), 1, "is damaged", "resume from", "window-00000007.pt"
    )
    assert invoked("toy", "--windows", "2", "--overwrite").exit_code == 0


def test_resume_reads_the_checkpoint_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoked("toy", "--windows", "2").exit_code == 0
    read, content = [], archive.content
    monkeypatch.setattr(archive, "content", lambda file: read.append(file.name) or content(file))
    assert invoked("toy", "--windows", "3", "--resume", "latest").exit_code == 0
    assert len(read) == 1


def test_resume_with_another_seed_is_rejected() -> None:
    assert invoked("toy", "--windows", "4").exit_code == 0
    done = invoked("toy", "--windows", "6", "--resume", "latest", "--seed", "3")
    one_line(done, 1, "seed has changed since the checkpoint was written")


def test_show_prints_a_configuration_that_can_be_read_again() -> None:
    done = invoked("toy", "--eta_update", "0.5", "--show")
    assert done.exit_code == 0
    assert "eta_update: 0.5\n" in done.output
    assert "checkpoint_every: 1000\n" in done.output
    Path("shown.yaml").write_text(done.output)
    assert invoked("toy", "--config", "shown.yaml", "--show", small=False).output == done.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tooy"], 2, ["no trainer is called 'tooy'; did you mean toy?"]),
        (["--eta_update", "toy"], 2, ["the name of a trainer comes first"]),
        (["toy", "--eta_updat", "1"], 2, ["--eta_updat", "did you mean 'eta_update'?"]),
        (["toy", "--cofig", "toy.yaml"], 2, ["--cofig: no field is called 'cofig'; did you mean 'config'?"]),
        (["toy", "--eta_update", "fast"], 2, ["--eta_update must be a number, got 'fast'"]),
        (["toy", "--eta_update", "-0.5"], 2, ["eta_update must be positive"]),
        (["toy", "--config", "nowhere.yaml"], 2, ["nowhere.yaml: No such file"]),
        (["toy", "--windows", "-3"], 2, ["windows must be 0 or more"]),
        (["toy", "--nan_at", "3", "--windows", "9"], 1, ["window 3: the loss is nan", "no checkpoint was written"]),
        (["toy", "--device", "cuda:99"], 1, ["--device cuda:99", "perfsuite doctor"]),
        (["toy", "--device", "abacus"], 1, ["--device abacus: only cpu and cuda are trained on"]),
        (["toy", "--device", "meta"], 1, ["--device meta: only cpu and cuda are trained on"]),
        (["toy", "--seed", str(2**63)], 2, ["seed must be less than 2^63"]),
        (["toy", "--synthetic", str(10**15)], 1, ["Unable to allocate", "iB for an array", "lower batch_size"]),
        (["toy", "--synthetic", "2"], 1, ["batch_size: 4 is more than the 2 sequences"]),
        (["toy", "--synthetic", "0", "--data", "nowhere"], 1, ["data: nowhere is no folder"]),
        (["toy", "--data", "nowhere"], 2, ["synthetic: 64 takes the place of data: nowhere"]),
        (["toy", "--synthetic", "0", "--data", ""], 2, ["--data: data must be text or null, got nothing"]),
        (["toy", "--seconds", "1e400"], 2, ["--seconds: seconds must be finite in float32, got 1e400"]),
        (["toy", "--seconds", "nan"], 2, ["--seconds must be a number or null, got 'nan'"]),
        (
            ["toy", "--folder", "/proc/nowhere", "--windows", "1"],
            1,
            ["cannot write into /proc/nowhere", "name another"],
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments: list[str], code: int, words: list[str]) -> None:
    # The tested argument comes last, because the last value of a field is used.
    name, *others = arguments
    one_line(CliRunner().invoke(train, [name, *SMALL, *others]), code, *words)


def test_gpu_out_of_memory_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import toy

    def full(self: object, batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(toy.Trainer, "train_window", full)
    one_line(invoked("toy", "--windows", "3"), 1, "CUDA out of memory; lower batch_size")


@pytest.mark.parametrize("name", ["trainer2", "leak_cnn", "eigenstate_lm", "ups", "polychromic"])
def test_out_of_memory_remedy_names_integer_fields_of_the_trainer(name: str) -> None:
    config = trainers.config_of(name)
    assert trainers.TRAINERS[name].lowered
    for field in trainers.TRAINERS[name].lowered:
        assert isinstance(getattr(config(), field), int)
        assert field in trainers.memory_remedy(name)


def test_host_out_of_memory_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import toy

    def full(self: object, *arguments: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(toy.Trainer, "__init__", full)
    one_line(invoked("toy", "--windows", "3"), 1, "tried to allocate 4611686018427387904 bytes; lower batch_size")


def test_train_runs_in_a_separate_process() -> None:
    process = started("toy", "--windows", "5")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "data: 64 random sequences of 8 tokens, vocabulary 16\n" in output
    assert "toy: 5 windows in" in output
    assert "checkpoint: .perfsuite/train/toy-optimized/window-00000005.pt\n" in output


def test_interruption_before_the_first_window_exits_with_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainers, "data_of", interrupted)
    done = invoked("toy")
    assert (done.exit_code, done.output) == (130, "interrupted\n")


# --- trainers -------------------------------------------------------------------------------------------------------


def entry(**changes: str) -> trainers.Entry:
    given = {"config": "toy:Config", "reference": "toy:Trainer", "optimized": "toy:Trainer", **changes}
    return trainers.Entry(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": "no_such_package.config:C"}, "there is no module no_such_package.config"),
        ({"config": "suite.no_such_module:C"}, "there is no module suite.no_such_module"),
        ({"config": "toy:Nothing"}, "toy:Nothing cannot be loaded"),
        ({"optimized": "needs_something:T"}, "needs_something needs no_such_library, which is not installed"),
    ],
)
def test_a_trainer_that_cannot_be_imported_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    (tmp_path / "needs_something.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(trainers.TRAINERS, "broken", entry(**changes))
    one_line(invoked("broken", "--windows", "1"), 1, f"trainer broken: {message}")


@pytest.mark.parametrize("name", ["trainer2", "eigenstate_lm", "polychromic"])
def test_data_beside_synthetic_ones_are_rejected(name: str) -> None:
    data = trainers.data_config_of(name)
    with pytest.raises(ValueError, match="synthetic: 4 takes the place of data: nowhere; leave data out, or use 0"):
        data(data="nowhere", synthetic=4)


def test_trainer2_is_registered_by_names_without_an_import() -> None:
    found = trainers.find("trainer2")
    assert (found.config, found.reference, found.optimized) == (
        "suite.trainer2.config:TrainConfig",
        "reference.trainers.trainer2:Trainer",
        "optimized.trainers.trainer2:Trainer",
    )


def test_build_calls_the_class_of_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    made = trainers.Entry(
        config=dict,
        reference=lambda *given: seen.append(("reference", *given)),  # type: ignore[arg-type, return-value]
        optimized=lambda *given: seen.append(("optimized", *given)),  # type: ignore[arg-type, return-value]
    )
    monkeypatch.setitem(trainers.TRAINERS, "sides", made)
    for side in ("reference", "optimized"):
        trainers.build("sides", "config", 7, "cpu", side)  # type: ignore[arg-type]
    assert seen == [("reference", "config", 7, "cpu"), ("optimized", "config", 7, "cpu")]


def test_register_rejects_a_name_that_is_in_use() -> None:
    with pytest.raises(PerfsuiteError, match="a trainer is called 'trainer2' already"):
        trainers.register("trainer2", entry())
