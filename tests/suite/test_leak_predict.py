"""`perfsuite evaluate leak_cnn` and `perfsuite predict`, with a network trained on two kinds of sound."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy
import pytest
import torch
from click.testing import CliRunner, Result
from training import ROOT

from suite.commands.data import data
from suite.commands.evaluate import evaluate
from suite.commands.predict import predict
from suite.commands.train import train
from suite.leak_cnn.dataset import open_data
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES
from suite.leak_cnn.trained import sound_of, trained_of
from suite.runtime import Store, checkpoints

pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")
soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'perfsuite[train]'")

SETTINGS = ["--channels", "[4,4,8]", "--hidden", "16", "--batch_size", "80", "--epochs", "12", "--num_workers", "0"]


def sound(kind: str, seconds: float, seed: int) -> numpy.ndarray:
    """Return a sound: white noise for LEAK, a hum for NORMAL."""
    random = numpy.random.default_rng(seed)
    times = numpy.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    hum = 0.1 * numpy.sin(2 * numpy.pi * (100 + 10 * seed) * times) + 1e-3 * random.standard_normal(len(times))
    return hum if kind == "NORMAL" else 0.1 * random.standard_normal(len(times))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with labelled recordings, their data set leak.h5, and a run trained on it."""
    folder = tmp_path_factory.mktemp("leak")
    for kind in ("LEAK", "NORMAL"):
        for number in range(6):
            path = folder / "in" / kind / f"{number}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, sound(kind, 10, number), SAMPLE_RATE)
    made = CliRunner().invoke(data, ["leak-audio", str(folder / "leak.h5"), "--labelled", str(folder / "in")])
    assert made.exit_code == 0, made.output
    arguments = ["leak_cnn", "--side", "reference", "--data", str(folder / "leak.h5"), "--device", "cpu"]
    arguments += ["--learning_rate", "1e-2", "--folder", str(folder / "run"), *SETTINGS]
    done = CliRunner().invoke(train, arguments)
    assert done.exit_code == 0, done.output
    return folder


def predicted(*arguments: object) -> Result:
    return CliRunner().invoke(predict, ["--device", "cpu", *map(str, arguments)])


def test_predict_classifies_unseen_recordings(run: Path, tmp_path: Path) -> None:
    names = {}
    for kind in ("LEAK", "NORMAL"):
        names[kind] = tmp_path / f"{kind}.wav"
        soundfile.write(names[kind], sound(kind, 25, 50), SAMPLE_RATE)
    done = predicted("--checkpoint", run / "run", "--json", *names.values())
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert [(row["begin"], row["end"]) for row in rows[:3]] == [(0, 10), (10, 20), (15, 25)]
    for row in rows:
        is_leak = row["recording"] == str(names["LEAK"])
        assert row["leak"] is is_leak
        assert (row["probability"] > 0.5) is is_leak
        assert max(row["classes"], key=row["classes"].get) == ("LEAK" if is_leak else "NORMAL")
        assert sum(row["classes"].values()) == pytest.approx(1, abs=1e-5)
    table = predicted("--checkpoint", run / "run", names["LEAK"])
    assert table.exit_code == 0
    assert [word for word in ("0 to 10", "no leak") if word in table.output] == ["0 to 10"]


def test_a_short_recording_is_repeated_to_fill_a_piece(run: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "short.wav", sound("LEAK", 3, 60), SAMPLE_RATE)
    file, found = Store(run / "run").latest(), checkpoints.load_latest(Store(run / "run"), "leak_cnn")[1]
    trained = trained_of(file, found.trainer, torch.device("cpu"))
    samples = sound_of(tmp_path / "short.wav")
    (piece,) = trained.judged(samples)
    assert (piece.begin, piece.end, piece.leak) == (0, 3, True)
    (repeated,) = trained.judged(numpy.tile(samples, 4)[:SAMPLES])
    assert repeated[2:] == piece[2:]


def test_trained_of_uses_the_best_weights(run: Path) -> None:
    file, found = checkpoints.load_latest(Store(run / "run"), "leak_cnn")
    trained = trained_of(file, found.trainer, torch.device("cpu"))
    assert trained.epoch == found.trainer["best"]["epoch"] > 0
    assert all(torch.equal(trained.weights[name], w) for name, w in found.trainer["best"]["weights"].items())


def test_evaluate_reports_the_test_split(run: Path, tmp_path: Path) -> None:
    arguments = ["leak_cnn", "--checkpoint", str(run / "run"), "--data", str(run / "leak.h5"), "--device", "cpu"]
    done = CliRunner().invoke(evaluate, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("test: ")
    found = json.loads((tmp_path / "evaluation.json").read_text())
    files = found["confusion"]["files"]
    assert sum(map(sum, files)) == len(open_data(run / "leak.h5").files["test"]) == 2
    assert (found["split"], found["data_of_the_training"], found["file_accuracy"]) == ("test", True, 1.0)
    assert (tmp_path / "confusion.svg").exists()


def test_evaluated_matches_the_validation_of_the_reference_trainer(run: Path, tmp_path: Path) -> None:
    """The reference trainer gets the best weights, which need not be those of its last epoch."""
    from reference.trainers.leak_cnn import Trainer

    file, found = checkpoints.load_latest(Store(run / "run"), "leak_cnn")
    trained = trained_of(file, found.trainer, torch.device("cpu"))
    audio = open_data(run / "leak.h5")
    plain = Trainer(trained.config, audio, "cpu")
    with torch.no_grad():
        for name, weight in plain.weights.items():
            weight.copy_(trained.weights[name])
    expected, given = plain._validation(0), trained.evaluated(audio, "validation")
    assert given.files == expected.files
    assert given.segments.confusion == expected.segments.confusion
    assert given.segments.loss == pytest.approx(expected.segments.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "run", "none.wav"], "none.wav is no file; name a WAV or FLAC recording"),
        (["--checkpoint", "run", "a" * 300], f"cannot access {'a' * 300}: File name too long; name another path"),
        (["--checkpoint", "run", "leak.h5"], "leak.h5 cannot be judged: damaged"),
        (["--checkpoint", "in", "in/LEAK/0.wav"], "no checkpoint in; name a file, or a folder"),
    ],
)
def test_predict_reports_wrong_input_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(run)
    done = predicted(*arguments)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["leak_cnn", "--rollout", "3"], "--rollout is an option of ups alone"),
        (["ups", "--split", "test"], "--split is an option of leak_cnn alone"),
        (["polychromic"], "polychromic: only ups, leak_cnn, eigenstate_lm, trainer2 can be evaluated"),
        (["leak_cnn", "--data", "none.h5"], "there is no file none.h5"),
        (["leak_cnn", "--data", "a" * 300], f"cannot access {'a' * 300}: File name too long; name another path"),
    ],
)
def test_evaluate_reports_wrong_input_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(run)
    done = CliRunner().invoke(evaluate, [*arguments, "--checkpoint", "run", "--device", "cpu"])
    assert done.exit_code in (1, 2)
    (line,) = done.output.splitlines()
    assert words in line


def test_split_test_is_rejected_for_a_data_set_without_one(run: Path, tmp_path: Path) -> None:
    synthetic = ["--train_files", "5", "--validation_files", "5", "--cache", str(tmp_path)]
    arguments = ["leak_cnn", "--checkpoint", str(run / "run"), "--device", "cpu", *synthetic]
    done = CliRunner().invoke(evaluate, [*arguments, "--split", "test"])
    assert (done.exit_code, "--split test:" in done.output) == (1, True)
    done = CliRunner().invoke(evaluate, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "the data are not those of the training" in done.output


def test_entry_point_refers_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["predict"] == "suite.commands.predict:predict"
