"""`perfsuite train leak_cnn` and `perfsuite ablate leak_cnn` on a few files."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from suite.commands.ablate import ablate
from suite.commands.train import train

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "leak_cnn"
SIZES = ["--batch_size", "150", "--channels", "[4, 4, 4]", "--hidden", "8", "--num_workers", "0"]
TINY = [*SIZES, "--train_files", "5", "--validation_files", "5", "--use_compile", "false", "--device", "cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder in which the data set is built once."""
    return str(tmp_path_factory.mktemp("cache"))


def invoked(command: click.Command, cache: str, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["leak_cnn", *TINY, "--cache", cache, *arguments])


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_run_writes_checkpoints_and_confusion_matrices(cache: str, side: str) -> None:
    pytest.importorskip("matplotlib")
    given = ["--side", side, "--folder", "run", "--epochs", "4"]
    done = invoked(train, cache, *given, "--windows", "2")
    assert done.exit_code == 0, done.output
    assert "leak_cnn: 2 epochs in" in done.output
    assert "600 segments in all" in done.output
    assert "% of the files, macro-F1" in done.output
    picture = Path("run/confusion.svg").read_text()
    assert picture.startswith("<?xml")
    more = invoked(train, cache, *given, "--resume", "latest")
    assert more.exit_code == 0, more.output
    assert "leak_cnn: 4 epochs, 2 of them in this run," in more.output
    assert sorted(p.name for p in Path("run").glob("*.pt")) == ["window-00000002.pt", "window-00000004.pt"]


def test_optimized_side_resumes_a_run_of_the_reference_side(cache: str) -> None:
    first = invoked(train, cache, "--side", "reference", "--folder", "run", "--windows", "1", "--epochs", "3")
    assert first.exit_code == 0, first.output
    second = invoked(train, cache, "--folder", "run", "--resume", "latest", "--epochs", "3")
    assert second.exit_code == 0, second.output
    assert "leak_cnn: 3 epochs, 2 of them in this run," in second.output


def test_run_succeeds_without_matplotlib(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoked(train, cache, "--folder", "run", "--windows", "1")
    assert done.exit_code == 0, done.output
    assert "no confusion matrix was drawn, which needs matplotlib" in done.output


def test_streaming_is_reported(cache: str) -> None:
    done = invoked(train, cache, "--folder", "run", "--windows", "1", "--batch_size", "80", "--limit_bytes", "20000")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "streamed" in line]
    assert line.startswith("leak_cnn: the split takes ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--data", "nowhere.h5"], 1, "data: there is no file nowhere.h5; make it with `perfsuite data leak-audio"),
        (["--data", "text.h5"], 1, "data: text.h5 is damaged, or no HDF5 file"),
        (["--batch_size", "401"], 1, "batch_size: 401 is more than the 400 segments for train"),
        (["--batch_size", "0"], 2, "batch_size=0: use 1 or more"),
        (["--train_files", "3"], 1, "Error: 3 train files: each of the 5 classes needs a file"),
        (["--cache", __file__], 1, "is a file; name a folder with --cache"),
        (["--autocast_fp16", "--autocast_bf16"], 2, "a product has one precision"),
        (["--limit_bytes", "100"], 1, "limit_bytes: 100 is less than three batches"),
        (
            ["--channels", "3"],
            2,
            "--channels must be a list of 3 values: a whole number, a whole number, a whole number, got '3'",
        ),
        (["--chanels", "3"], 2, "did you mean 'channels'?"),
    ],
)
def test_wrong_options_are_reported_in_one_line(cache: str, arguments: list[str], code: int, says: str) -> None:
    Path("text.h5").write_text("no HDF5")
    done = invoked(train, cache, "--windows", "1", *arguments)
    assert done.exit_code == code, done.output
    (line,) = [line for line in done.output.splitlines() if not line.startswith("data: ")]
    assert line.startswith("Error: ")
    assert says in line


def test_resume_rejects_other_data(cache: str) -> None:
    assert invoked(train, cache, "--folder", "run", "--windows", "1").exit_code == 0
    done = invoked(train, cache, "--folder", "run", "--resume", "latest", "--train_files", "6")
    assert done.exit_code == 1
    assert "the data has changed since the checkpoint was written" in done.output


def test_ablate_times_epochs(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.leak_cnn.config.TECHNIQUES", ("resident_dataset", "device_metrics"))
    done = invoked(ablate, cache, "--rounds", "2", "--out", "found", "--no-plot")
    assert done.exit_code == 0, done.output
    page = Path("found/leak_cnn.md").read_text()
    assert "| device_metrics | 2–5% |" in page
    assert "batch_size 150" in page


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_ablate_reads_every_configuration_file_of_train(name: str) -> None:
    done = CliRunner().invoke(ablate, ["leak_cnn", "--config", str(CONFIGS / f"{name}.yaml"), "--data", "none.h5"])
    assert done.exit_code == 1
    assert "there is no file none.h5" in done.output
