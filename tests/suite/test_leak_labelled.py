"""`perfsuite data leak-audio --labelled`: classes by folder, splits by recording, and error messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner, Result

from suite.commands.data import data
from suite.leak_cnn import labelled
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.dataset import LeakAudio, open_data
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, SEGMENTS, features

pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")
soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'perfsuite[train]'")

SPLITS = ("train", "validation", "test")


def recording(path: Path, seconds: float, seed: int) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.1 * numpy.random.default_rng(seed).standard_normal(int(seconds * SAMPLE_RATE))
    soundfile.write(path, samples, SAMPLE_RATE, subtype="FLOAT")
    return samples.astype(numpy.float32)


def fill(root: Path, classes: tuple[str, ...] = CLASSES, count: int = 4) -> Path:
    """Write recordings of 25, 7, 10 and 3 s for each class."""
    for kind in classes:
        for number in range(count):
            seconds = (25, 7, 10, 3)[number % 4]
            recording(root / kind / f"{number}.wav", seconds, 100 * CLASSES.index(kind) + number)
    return root


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(data, ["leak-audio", *arguments])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(*arguments: str) -> LeakAudio:
    done = invoked("a.h5", "--labelled", "in", *arguments)
    assert done.exit_code == 0, done.output
    return open_data("a.h5")


def test_pieces_of_a_recording_share_one_split_and_the_folder_s_label() -> None:
    fill(Path("in"))
    found = made()
    assert found.summary.startswith("data: a.h5 of in, labelled by their folders: files")
    assert set(found.files) == set(SPLITS)
    where: dict[tuple[str, int], set[str]] = {}
    for split in SPLITS:
        whole = found.read(split)
        mels = whole.features.view(-1, SEGMENTS, 32)
        labels = whole.labels.view(-1, SEGMENTS)[:, 0]
        for piece, label in zip(mels, labels.tolist(), strict=True):
            for number in range(4):
                path = Path("in", CLASSES[label], f"{number}.wav")
                given = labelled.pieces(soundfile.read(path, dtype="float32")[0])
                if any(torch.equal(piece, torch.from_numpy(features(g)).view(SEGMENTS, 32)) for g in given):
                    where.setdefault((CLASSES[label], number), set()).add(split)
    assert len(where) == 20
    assert all(len(splits) == 1 for splits in where.values())
    # 25 s give two pieces and the rest is dropped; 7 s and 3 s are repeated.
    assert sum(len(files) for files in found.files.values()) == 5 * (2 + 1 + 1 + 1)
    assert all(count > 0 for split in SPLITS for count in found.counts(split).tolist())


def test_a_short_recording_is_repeated_to_fill_a_piece() -> None:
    samples = 0.1 * numpy.random.default_rng(0).standard_normal(3 * SAMPLE_RATE).astype(numpy.float32)
    (piece,) = labelled.pieces(samples)
    assert len(piece) == SAMPLES
    middle = slice(100, 3 * SAMPLE_RATE - 100)
    assert numpy.array_equal(piece[: 3 * SAMPLE_RATE][middle], samples.astype(numpy.float64)[middle])
    assert numpy.array_equal(piece[3 * SAMPLE_RATE : 6 * SAMPLE_RATE][middle], samples.astype(numpy.float64)[middle])


def test_identical_data_set_is_kept_and_another_seed_is_rejected() -> None:
    fill(Path("in"))
    made()
    first = Path("a.h5").read_bytes()
    again = invoked("a.h5", "--labelled", "in")
    assert (again.exit_code, "kept a.h5" in again.output) == (0, True)
    other = invoked("a.h5", "--labelled", "in", "--seed", "1")
    assert other.exit_code == 1
    assert "seed 0, not 1" in other.output
    recording(Path("in/LEAK/more.wav"), 10, 999)
    more = invoked("a.h5", "--labelled", "in")
    assert (more.exit_code, "of other recordings" in more.output) == (1, True)
    assert Path("a.h5").read_bytes() == first


def test_class_option_maps_folder_names_and_classes_may_be_missing() -> None:
    fill(Path("in"), ("LEAK", "NORMAL"))
    os.rename("in/LEAK", "in/leaks")
    found = made("--class", "leaks=LEAK")
    assert found.counts("train").gt(0).tolist() == [False, False, True, True, False]


def test_unusable_recordings_are_omitted_and_counted() -> None:
    fill(Path("in"))
    Path("in/LEAK/0.wav").write_bytes(Path("in/LEAK/1.wav").read_bytes())
    soundfile.write("in/CRACK/2.wav", numpy.zeros(SAMPLE_RATE), SAMPLE_RATE)
    done = invoked("a.h5", "--labelled", "in")
    assert done.exit_code == 0, done.output
    assert "left out: 1 repeated, 1 silent" in done.output


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ("rm -r in", [], "in is no folder; name one that holds a folder for each class"),
        ("mv in/LEAK in/leaks", [], "the folder leaks is no class; there are BACKGROUND, CRACK, LEAK"),
        ("rm -r in/LEAK", [], "it has the classes BACKGROUND, CRACK, NORMAL, UNCLASSIFIED; give LEAK and one more"),
        ("rm in/LEAK/*", [], "in/LEAK holds no WAV or FLAC recording"),
        ("rm in/LEAK/[01].wav", [], "of LEAK 2 recordings are usable; each of the splits"),
        ("cp in/LEAK/1.wav in", [], "the recording 1.wav is in no class's folder"),
        (":", ["--labelled", "a" * 300], f"cannot access {'a' * 300}: File name too long; name another path"),
        (":", ["--from", "in"], "--from has no effect with --labelled"),
        (":", ["--test-share", "1"], "--test-share 1: a share of the recordings; give more than 0"),
        (":", ["--test-share", ".5", "--validation-share", ".5"], "nothing is left to train on"),
        (":", ["--class", "LEAK"], "--class LEAK: give FOLDER=CLASS"),
        (":", ["--class", "LEAK=leak"], "--class LEAK=leak: there are the classes"),
        (":", ["--class", "leaks=LEAK"], "in has no folder leaks"),
    ],
)
def test_wrong_input_is_reported_in_one_line(change: str, arguments: list[str], words: str) -> None:
    fill(Path("in"))
    assert os.system(change) == 0
    done = invoked("a.h5", "--labelled", "in", *arguments)
    assert done.exit_code == 1, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error")]
    assert words in line
    assert not Path("a.h5").exists()


def test_option_test_share_requires_labelled() -> None:
    done = invoked("a.h5", "--test-share", ".2")
    assert (done.exit_code, "--test-share has no effect without --labelled; leave it out" in done.output) == (1, True)
