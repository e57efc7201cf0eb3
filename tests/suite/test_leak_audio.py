"""`perfsuite data leak-audio` and readers of its file: bytes, resumption, classes, mel features, and errors."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from scale import FULLY, some
from training import ROOT, environment

from perfsuite.errors import PerfsuiteError
from suite import hdf5
from suite.commands.data import Bar, data
from suite.leak_cnn import build as building
from suite.leak_cnn import recordings, sources
from suite.leak_cnn.build import Built, build
from suite.leak_cnn.classes import CLASSES, LEAK
from suite.leak_cnn.dataset import Segments, open_data, read_split
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, SEGMENTS, features
from suite.leak_cnn.recordings import Stretch
from suite.leak_cnn.sounds import gain, mixed, rms
from suite.leak_cnn.sources import Recipe

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")
soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'perfsuite[train]'")

SMALL = ("--train", "12", "--validation", "6")
FILES = 18


class Quiet:
    """Progress that records the messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def progress(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total

    def say(self, line: str) -> None:
        self.lines.append(line)


def tone(seconds: float, rate: int, seed: int = 0) -> Any:
    noise = numpy.random.default_rng(seed).standard_normal(int(seconds * rate))
    return 0.2 * numpy.sin(2 * numpy.pi * (200 + 50 * seed) * numpy.arange(len(noise)) / rate) + 0.02 * noise


def wav(path: Path, samples: Any, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate)


def fill(root: Path, names: list[str]) -> Path:
    """Write recordings whose lengths, rates and channels depend on their numbers, not on their order."""
    for name in names:
        number = int(Path(name).stem)
        rate = (8000, 44100, 4096, 16000)[number % 4]
        samples = tone(1.5 + 4.7 * (number % 4), rate, number)
        wav(root / name, numpy.stack([samples, 0.5 * samples], axis=1) if number % 3 == 0 else samples, rate)
    return root


NAMES = ["0.wav", "deep/1.flac", "deep/er/2.WAV", "3.wav", "4.flac", "deep/5.wav"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "sounds", NAMES)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a small data set. Tests that change it use a copy."""
    path = tmp_path_factory.mktemp("made") / "leak.h5"
    build(path, Recipe(train=12, validation=6), Quiet())
    return path


def small(folder: Path | None, **changes: Any) -> Recipe:
    return Recipe(**{"folder": folder, "train": 12, "validation": 6, **changes})


def sha(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(data, ["leak-audio", *arguments])


def one_line(done: Result, *words: str) -> None:
    assert done.exit_code == 1, done.output
    (line,) = [line for line in done.output.splitlines() if not line.startswith("left out ")]
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


# --- the command ----------------------------------------------------------------------------------------------------


def test_entry_point_refers_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["data"] == "suite.commands.data:data"
    assert list(data.commands) == ["leak-audio", "pack", "pde", "replies", "model"]


def test_importing_the_command_does_not_import_torch_h5py_or_soundfile() -> None:
    code = "import suite.commands.data, sys; print([m for m in ('torch', 'h5py', 'soundfile') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_says_that_labels_are_synthetic() -> None:
    assert "The labels are synthetic" in " ".join(invoked("--help").output.split())


def test_synthetic_recordings_are_used_without_a_folder() -> None:
    done = invoked("a.h5", *SMALL)
    assert done.exit_code == 0, done.output
    assert "wrote a.h5: 12 files for train (3 BACKGROUND, 3 CRACK, 2 LEAK, 2 NORMAL, 2 UNCLASSIFIED)" in done.output
    assert "from synthetic recordings" in done.output
    assert done.stdout == f"{sha('a.h5')}  a.h5\n"
    assert sorted(os.listdir()) == ["a.h5"], "nothing is left beside it"
    assert invoked("b.h5", *SMALL, "--seed", "1").exit_code == 0
    assert sha("a.h5") != sha("b.h5")


def test_an_identical_data_set_is_kept() -> None:
    assert invoked("a.h5", *SMALL).exit_code == 0
    before = Path("a.h5").stat()
    again = invoked("a.h5", *SMALL)
    assert again.exit_code == 0
    assert "kept a.h5: 12 files" in again.output
    assert Path("a.h5").stat() == before
    assert invoked("a.h5", *SMALL, "--seed", "2", "--overwrite").exit_code == 0
    assert open_data("a.h5").digest != ""
    one_line(invoked("a.h5", *SMALL), "another data set, of seed 2, not 0", "--overwrite")


def test_recordings_of_a_folder_are_used(folder: Path) -> None:
    done = invoked("out/a.h5", *SMALL, "--from", str(folder), "--reuse", "20")
    assert done.exit_code == 0, done.output
    assert f"from 6 recordings of {folder}, " in done.output
    with h5py.File("out/a.h5") as file:
        assert file.attrs["source"] == b"sounds"
        assert file.attrs["sample_rate"] == 4096
        assert b"synthetic" in file.attrs["label_source"]
        assert b"band noise" in file.attrs["made_LEAK"]
        assert (file["features"].shape, file["features"].dtype) == ((FILES, 40, 2, 32, 1), numpy.float16)


def test_interruption_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(building.features, "features", stop)
        done = invoked("a.h5", *SMALL)
    assert done.exit_code == 130
    assert done.output == "interrupted; the same command goes on from here\n"
    assert invoked("a.h5", *SMALL).exit_code == 0


def test_bar_is_shown_in_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**6, 20))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    for terminal in (True, False):
        out = StringIO()
        with Bar(Console(file=out, width=100, force_terminal=terminal)) as bar:
            for done in range(4):
                bar.progress("making", done, 3)
            bar.say("left out [red]x[/red]")
        assert "left out [red]x[/red]\n" in out.getvalue()
        assert ("\x1b[?25h" in out.getvalue()) == terminal, "the cursor comes back"
        assert [line for line in ("making: 1 of 3 files", "making: 3 of 3 files") if line in out.getvalue()] == (
            [] if terminal else ["making: 1 of 3 files", "making: 3 of 3 files"]
        )
        assert "3 of 3 files" in out.getvalue()


# --- reproducibility ------------------------------------------------------------------------------------------------


def test_order_of_the_folder_listing_does_not_change_the_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fill(tmp_path / "elsewhere" / "sounds", NAMES[::-1])
    first = build(tmp_path / "a.h5", small(folder, reuse=20), Quiet())
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: [(f, d, n[::-1]) for f, d, n in list(walk(root))[::-1]])
    second = build(tmp_path / "b.h5", small(other, reuse=20), Quiet())
    assert first.sha256 == second.sha256 == sha(tmp_path / "a.h5")


def test_omitted_files_do_not_change_the_bytes(folder: Path, tmp_path: Path) -> None:
    first = build(tmp_path / "a.h5", small(folder, reuse=20), Quiet())
    (folder / "broken.wav").write_bytes(b"no sound")
    (folder / "notes.txt").write_text("no sound either")
    assert build(tmp_path / "b.h5", small(folder, reuse=20), Quiet()).sha256 == first.sha256


def test_a_changed_recording_makes_another_data_set(folder: Path, tmp_path: Path) -> None:
    recipe = small(folder, reuse=20)
    build(tmp_path / "a.h5", recipe, Quiet())
    wav(folder / "0.wav", tone(3, 8000, 9))
    with pytest.raises(PerfsuiteError, match=r"exists and is another data set, of other recordings; name another"):
        build(tmp_path / "a.h5", recipe, Quiet())


KILLED = """
import os, signal, sys
from pathlib import Path
from suite.leak_cnn import build, sources
moment, folder = int(sys.argv[1]), Path(sys.argv[2])
replace, calls = os.replace, 0

def replaced(source, target):
    global calls
    calls += 1
    if calls == moment and moment % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)

class Quiet:
    progress = say = lambda self, *shown: None

os.replace = replaced
build.BLOCK = 1
build.build(Path("a.h5"), sources.Recipe(folder=folder, train=12, validation=6, reuse=20), Quiet())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("moment", some([1, *sorted(random.Random(7).sample(range(2, 24), 3)), 24], [1]))
def test_a_killed_run_is_resumed(folder: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed before or after it renames one of its files: 6 recordings, 18 blocks, the data set."""
    monkeypatch.setattr(building, "BLOCK", 1)
    whole = build(Path("whole.h5"), small(folder, reuse=20), Quiet())
    command = [sys.executable, "-c", KILLED, str(moment), str(folder)]
    assert subprocess.run(command, env=environment(), cwd=Path.cwd()).returncode == -signal.SIGKILL
    assert not Path("a.h5").exists()
    have = len(list(Path("a.h5.parts").glob("*.npy")))
    assert have == moment - moment % 2
    worked: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (worked.append(name), function(*given))[1]

    monkeypatch.setattr(recordings, "read", counted("read", recordings.read))
    monkeypatch.setattr(building.features, "features", counted("made", features))
    assert build(Path("a.h5"), small(folder, reuse=20), Quiet()).sha256 == whole.sha256 == sha("a.h5")
    assert len(worked) == 24 - have, "what was done is not done again"
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["a.h5", "sounds", "whole.h5"]


def test_damaged_parts_are_rebuilt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(Path("whole.h5"), small(folder, reuse=20), Quiet())
    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "write", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(Path("a.h5"), small(folder, reuse=20), Quiet())
    for part in Path("a.h5.parts").glob("*.npy"):
        os.truncate(part, part.stat().st_size // 2)
    assert build(Path("a.h5"), small(folder, reuse=20), Quiet()).sha256 == whole.sha256


def test_an_unrelated_file_in_the_parts_folder_is_kept() -> None:
    Path("a.h5.parts").mkdir()
    Path("a.h5.parts/notes.txt").write_text("mine")
    build(Path("a.h5"), small(None), Quiet())
    assert os.listdir("a.h5.parts") == ["notes.txt"]


def test_a_second_process_for_the_same_file_is_rejected() -> None:
    from filelock import FileLock

    with FileLock("a.h5.parts.lock"):
        one_line(invoked("a.h5", *SMALL), "another process is making a.h5")


# --- omitted recordings ---------------------------------------------------------------------------------------------


def damaged(root: Path) -> dict[str, str]:
    """Write unusable recordings; return name → reason, except for a duplicate."""
    wav(root / "cut.wav", tone(3, 8000))
    os.truncate(root / "cut.wav", 9000)
    wav(root / "cut.flac", tone(3, 8000))
    os.truncate(root / "cut.flac", (root / "cut.flac").stat().st_size // 2)
    wav(root / "silent.wav", numpy.zeros(9000))
    wav(root / "short.wav", tone(0.05, 8000))
    wav(root / "slow.wav", tone(3, 2000), 2000)
    soundfile.write(root / "nan.wav", numpy.full(9000, numpy.nan), 8000, subtype="FLOAT")
    soundfile.write(root / "huge.wav", numpy.full(9000, 1e39), 8000, subtype="DOUBLE")
    (root / "text.wav").write_text("no sound")
    (root / "nothing.flac").write_bytes(b"")
    (root / "gone.wav").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe.wav")
    shutil.copy(root / "0.wav", root / "repeated.wav")
    return {
        "cut.wav": "damaged: cut off",
        "cut.flac": "damaged",
        "silent.wav": "silent",
        "short.wav": "short: 0.05 s",
        "slow.wav": "unsuited: sampled at 2000 Hz",
        "nan.wav": "damaged: a sample is no number",
        "huge.wav": "damaged: a sample is no number, or far above full scale",
        "text.wav": "damaged",
        "nothing.flac": "damaged",
        "gone.wav": "damaged: No such file",
        "pipe.wav": "unsuited: no regular file",
    }


def test_unusable_recordings_are_omitted_with_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "NAMED", 99)
    clean = build(Path("a.h5"), small(folder, reuse=20), Quiet())
    reasons = damaged(folder)
    quiet = Quiet()
    built = build(Path("b.h5"), small(folder, reuse=20, train=11, validation=7), quiet)
    assert built.source.endswith("left out: 7 damaged, 1 repeated, 1 short, 1 silent, 2 unsuited")
    assert len(quiet.lines) == 12
    for name, reason in reasons.items():
        (line,) = [line for line in quiet.lines if f" {name}: " in line]
        assert line.startswith(f"left out {name}: {reason}")
    assert clean.source.startswith(f"6 recordings of {folder}, ")
    assert built.source.startswith(f"6 recordings of {folder}, ")


def test_names_that_are_not_utf_8_are_escaped(folder: Path) -> None:
    try:
        os.rename(folder / "0.wav", os.fsencode(folder) + b"/caf\xe9.wav")
    except OSError:
        pytest.skip("this file system takes no such name")
    Path(os.fsdecode(os.fsencode(folder) + b"/bad\xe9.wav")).write_text("")
    root = os.fsdecode(os.fsencode(folder.parent) + b"/s\xe9s")
    os.rename(folder, root)
    done = invoked(os.fsdecode(b"a\xe9.h5"), *SMALL, "--from", root, "--reuse", "20")
    assert done.exit_code == 0, done.output
    assert r"wrote a\xe9.h5: 12 files" in done.output
    assert "from 6 recordings" in done.output
    assert "left out bad\ufffd.wav: damaged" in done.output


def test_at_most_ten_omitted_recordings_are_named(folder: Path) -> None:
    for number in range(15):
        (folder / f"bad{number}.wav").write_text("")
    quiet = Quiet()
    assert "15 damaged" in build(Path("a.h5"), small(folder, reuse=20), quiet).source
    assert len(quiet.lines) == sources.NAMED


def test_only_as_many_recordings_are_read_as_needed(folder: Path) -> None:
    wav(folder / "long.wav", tone(400, 4096, 3), 4096)
    seed = next(s for s in range(99) if recordings.in_order([*NAMES, "long.wav"], s)[0] == "long.wav")
    assert build(Path("a.h5"), small(folder, seed=seed), Quiet()).source.endswith("; 6 more were not needed")


def test_many_recordings_need_few_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for number in range(80):
        wav(Path(f"many/{number}.wav"), tone(0.3, 4096, number), 4096)
    monkeypatch.setattr(building, "BLOCK", 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 16, limits[1]))
    try:
        build(Path("a.h5"), small(Path("many"), reuse=99), Quiet())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_wav_with_an_unknown_size_is_read() -> None:
    """Programs that write WAV to a pipe set the size to 0xFFFFFFFF."""
    wav(Path("a.wav"), tone(3, 8000))
    content = bytearray(Path("a.wav").read_bytes())
    content[4:8] = content[40:44] = b"\xff" * 4
    Path("b.wav").write_bytes(content)
    assert numpy.array_equal(recordings.read(Path("a.wav")), recordings.read(Path("b.wav")))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "nowhere"], ["--from nowhere is no folder"]),
        (["--from", "file"], ["--from file is no folder"]),
        (["--from", "a" * 300], [f"--from: cannot read {'a' * 300}: File name too long"]),
        (["--from", "empty"], ["--from empty holds no WAV or FLAC recording"]),
        (["--from", "mute"], ["--from mute holds no usable sound", "left out: 1 silent"]),
        (["--from", "little"], ["2 s of sound give ", "files for train", "not 12", "--reuse"]),
        (["--train", "4"], ["4 train files: each of the 5 classes needs a file; give 5 or more"]),
        (["--validation", "-1"], ["-1 validation files: "]),
        (["--validation", str(10**12)], ["1000000000000 validation files: ", "give 100000 or less"]),
        (["--snr", "9", "3"], ["--snr 9 3: give the lower end first"]),
        (["--snr", "nan", "3"], ["--snr nan 3"]),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments: list[str], words: list[str]) -> None:
    Path("file").write_text("")
    Path("empty").mkdir()
    wav(Path("mute/a.wav"), numpy.zeros(9000))
    wav(Path("little/a.wav"), tone(1, 8000))
    wav(Path("little/b.wav"), tone(1, 8000, 1))
    one_line(invoked("a.h5", *SMALL, *arguments), *words)
    assert not [name for name in os.listdir() if name.startswith("a.h5")], "nothing is left behind"


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("folder", ["folder is a folder; name the file"]),
        ("text", ["text exists and is no leak-audio data set", "--overwrite"]),
        ("other.h5", ["other.h5 exists and is no leak-audio data set"]),
        ("text/a.h5", ["cannot write text/a.h5: ", "name another file"]),
        ("/proc/a.h5", ["cannot write /proc/a.h5: ", "name another file"]),
    ],
)
def test_an_output_path_that_cannot_be_written_is_reported(out: str, words: list[str]) -> None:
    Path("folder").mkdir()
    Path("text").write_text("mine")
    with h5py.File("other.h5", "w") as file:
        file["x"] = 1
    one_line(invoked(out, *SMALL), *words)
    assert Path("text").read_text() == "mine"


def test_a_full_disk_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    one_line(invoked("a.h5", *SMALL), "cannot write a.h5: No space left on device")


@pytest.mark.parametrize(("module", "arguments"), [("h5py", []), ("soundfile", ["--from", "."])])
def test_a_missing_library_is_reported_with_its_install_command(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wav(Path("a.wav"), tone(1, 8000))
    monkeypatch.setitem(sys.modules, module, None)
    one_line(invoked("a.h5", *arguments), f"the package {module}", "pip install 'perfsuite[train]'")


# --- audio ----------------------------------------------------------------------------------------------------------


def independent_mels(samples: Any) -> Any:
    """Compute one segment from the definition: the DFT as a sum for each bin, each triangle by interpolation."""
    n = numpy.arange(512)
    windowed = samples.astype(numpy.float64) * numpy.sin(numpy.pi * n / 512) ** 2
    magnitudes = [abs(numpy.sum(windowed * numpy.exp(-2j * numpy.pi * k * n / 512))) for k in range(257)]
    points = [700 * (10 ** (m * 2595 * numpy.log10(1 + 2048 / 700) / 33 / 2595) - 1) for m in range(34)]
    found = []
    for left, peak, right in zip(points, points[1:], points[2:], strict=False):
        weights = numpy.interp(8.0 * numpy.arange(257), [left, peak, right], [0, 1, 0])
        found.append(20 * numpy.log10(max(numpy.dot(weights, magnitudes), 1e-10)))
    return numpy.array(found)


def test_mel_features_match_the_definition() -> None:
    samples = numpy.random.default_rng(3).standard_normal(SAMPLES) * numpy.geomspace(1e-6, 1, SAMPLES)
    samples[: 2 * 512] = 0.0
    found = features(samples)
    assert (found.shape, found.dtype) == ((40, 2, 32, 1), numpy.float16)
    assert (found[0] == -200).all(), "silence is the floor"
    for long, short in ((1, 0), (1, 1), (17, 1), (39, 0), (39, 1)):
        begin = 1024 * long + 512 * short
        exact = independent_mels(samples[begin : begin + 512])
        assert (
            numpy.abs(found[long, short, :, 0] - exact) <= numpy.spacing(numpy.abs(exact).astype(numpy.float16))
        ).all()


def test_a_tone_peaks_in_the_mel_band_of_its_frequency() -> None:
    samples = numpy.sin(2 * numpy.pi * 1000 * numpy.arange(SAMPLES) / SAMPLE_RATE)
    mel = 2595 * numpy.log10(1 + 1000 / 700) / (2595 * numpy.log10(1 + 2048 / 700)) * 33 - 1
    assert (features(samples)[..., 0].argmax(-1) == round(mel)).all()


@pytest.mark.parametrize("rate", [4096, 8000, 11025, 44100, 48000, 96000])
def test_resampling_preserves_a_tone_without_aliasing(rate: int) -> None:
    times = numpy.arange(10 * rate) / rate
    wav(Path("a.wav"), 0.5 * numpy.sin(2 * numpy.pi * 700 * times), rate)
    found = recordings.read(Path("a.wav"))
    assert (found.shape, found.dtype) == ((SAMPLES,), numpy.float32)
    exact = 0.5 * numpy.sin(2 * numpy.pi * 700 * numpy.arange(SAMPLES) / SAMPLE_RATE)
    inside = slice(64, -64)
    assert numpy.abs(found - exact)[inside].max() < 0.002
    if rate > 8000:
        wav(Path("b.wav"), 0.5 * numpy.sin(2 * numpy.pi * 3300 * times), rate)
        assert rms(recordings.resampled(soundfile.read("b.wav")[0], rate)) < gain(-50), "no aliasing"


def test_a_long_stereo_recording_is_mixed_to_mono() -> None:
    samples = tone(23, 8000)
    wav(Path("a.flac"), numpy.stack([samples, -0.5 * samples], axis=1))
    found = recordings.read(Path("a.flac"))
    assert len(found) == 23 * SAMPLE_RATE
    assert rms(found) == pytest.approx(0.25 * rms(samples), rel=0.02)


def level(kind: str, snr_db: float, seed: int = 1) -> tuple[float, Any, Any]:
    recording = numpy.random.default_rng(0).standard_normal(SAMPLES)
    random = numpy.random.default_rng(seed)
    sound = mixed(kind, recording, snr_db, random)
    return rms(sound - recording), recording, sound


def test_sound_levels_match_the_class() -> None:
    added, recording, _ = level("NORMAL", 0)
    assert gain(-45) * 0.9 < added / rms(recording) < gain(-35) * 1.1
    for snr_db in (-10.0, 0.0, 10.0):
        added, recording, _ = level("LEAK", snr_db)
        assert added / rms(recording) == pytest.approx(gain(-snr_db), rel=0.01)
    added, recording, sound = level("UNCLASSIFIED", -10.0)
    on = numpy.abs(sound - recording).reshape(-1, 128).max(axis=1) > 0.3
    assert 0.15 < on.mean() < 0.7
    assert rms(level("BACKGROUND", 0)[2]) < gain(-4.5) * rms(recording)
    added, recording, sound = level("CRACK", 0)
    clicks = numpy.abs(sound - recording).reshape(-1, 512).max(axis=1) > 0.3
    assert 0.2 < clicks.mean() < 0.99
    with pytest.raises(ValueError, match="OTHER"):
        mixed("OTHER", recording, 0.0, numpy.random.default_rng(0))


# --- pieces ---------------------------------------------------------------------------------------------------------


def test_pieces_last_ten_seconds_and_use_each_stretch_once_per_round() -> None:
    random = numpy.random.default_rng(5)
    given = [Stretch(n, 0, int(random.choice([SAMPLES, 5000, 9999, 30001]))) for n in range(40)]
    made = recordings.pieces(given, 1000, 3, lambda turn: numpy.random.default_rng([turn]).permutation(len(given)))
    assert {sum(s.length for s in piece) for piece in made} == {SAMPLES}
    used = numpy.zeros(40)
    for stretch in (s for piece in made for s in piece):
        assert 0 <= stretch.start < stretch.start + stretch.length <= given[stretch.recording].length
        used[stretch.recording] += stretch.length
    lengths = numpy.array([s.length for s in given])
    assert (used <= 3 * lengths).all()
    assert used.sum() > 3 * lengths.sum() - 2 * SAMPLES, "little is left over"
    assert recordings.pieces(given, 7, 3, lambda turn: numpy.random.default_rng([turn]).permutation(40)) == made[:7]


def test_a_short_recording_is_repeated_to_fill_a_piece() -> None:
    (piece,) = recordings.pieces([Stretch(0, 0, SAMPLES // 4)], 1, 4, lambda turn: numpy.arange(1))
    assert piece == [Stretch(0, 0, SAMPLES // 4)] * 4
    assert not recordings.pieces([Stretch(0, 0, SAMPLES // 4)], 1, 3, lambda turn: numpy.arange(1))
    assert not recordings.pieces([], 1, 3, lambda turn: numpy.arange(0))
    sound = recordings.joined(piece, lambda number: numpy.ones(SAMPLES // 4, numpy.float32))
    assert sound.shape == (SAMPLES,)
    assert sound[[0, -1, SAMPLES // 4]].max() < 0.01, "joints are faded"
    assert sound[SAMPLES // 8] == 1


@pytest.mark.parametrize(("count", "validation"), [(0, 0), (1, 0), (2, 1), (10, 2), (11, 2)])
def test_no_stretch_is_in_both_splits(count: int, validation: int) -> None:
    given = [Stretch(n, 0, SAMPLES) for n in range(count)]
    train, kept = recordings.divided(given, 0.2)
    assert len(kept) == validation
    assert kept + train == given


# --- reading --------------------------------------------------------------------------------------------------------


def test_read_split_returns_all_segments_of_a_split(made: Path) -> None:
    found = open_data(made)
    assert (
        found.summary
        == f"data: {made} of synthetic, synthetic labels: files 12 for train, 6 for validation, of 80 segments"
    )
    for split, files in (("train", 12), ("validation", 6)):
        whole = read_split(found, split)
        assert found.segments(split) == files * SEGMENTS == len(whole.features)
        assert (whole.features.shape[1:], whole.features.dtype) == ((1, 32, 1), torch.float16)
        assert (whole.labels.dtype, whole.leaks.dtype, whole.files.dtype) == (torch.int64, torch.float32, torch.int64)
        assert torch.equal(whole.leaks == 1, whole.labels == LEAK)
        assert whole.files.tolist() == [file for file in range(files) for _ in range(80)]
        counts = found.counts(split)
        assert torch.equal(counts, torch.bincount(whole.labels, minlength=5))
        assert int(counts.max() - counts.min()) <= SEGMENTS, "each class has as many files, or one more"
    with h5py.File(made) as file:
        assert torch.equal(
            read_split(found, "validation").features.view(6, 40, 2, 32, 1), torch.from_numpy(file["features"][12:])
        )
        assert numpy.isfinite(file["snr_db"][()]).tolist() == [label in (LEAK, 4) for label in file["labels"][()]]


def test_segments_match_the_whole_split(made: Path) -> None:
    found = open_data(made)
    segments, whole = Segments(found, "validation"), read_split(found, "validation")
    assert len(segments) == 6 * SEGMENTS
    for index in (0, 1, 79, 80, 333, 479, -1):
        mels, label, leak = segments[index]
        assert (mels.shape, mels.dtype, label.dtype, leak.dtype) == ((32, 1), torch.float16, torch.int64, torch.float32)
        assert torch.equal(mels, whole.features[index, 0])
        assert (label, leak) == (whole.labels[index], whole.leaks[index])
    for index in (480, -481):
        with pytest.raises(IndexError):
            segments[index]
    segments.close()
    assert torch.equal(segments[5][0], whole.features[5, 0]), "it opens again"
    segments.close()


def test_open_segments_can_be_pickled(made: Path) -> None:
    segments = Segments(open_data(made), "train")
    first = segments[7][0]
    other = pickle.loads(pickle.dumps(segments))
    assert other._file is None
    assert torch.equal(other[7][0], first)
    segments.close()
    other.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # of fork, Python 3.12
@pytest.mark.parametrize("context", [pytest.param("spawn", marks=FULLY), "fork"])
def test_data_loader_workers_read_the_same_segments(made: Path, context: str) -> None:
    found = open_data(made)
    segments, whole = Segments(found, "validation"), read_split(found, "validation")
    assert segments[0][1] == whole.labels[0]  # the file is open here when the workers start
    loader = torch.utils.data.DataLoader(segments, batch_size=96, num_workers=2, multiprocessing_context=context)
    parts = list(loader)
    assert parts[0][0].shape == (96, 32, 1)
    assert torch.equal(torch.cat([p[0] for p in parts]), whole.features[:, 0])
    assert torch.equal(torch.cat([p[1] for p in parts]), whole.labels)
    assert torch.equal(torch.cat([p[2] for p in parts]), whole.leaks)
    segments.close()


def test_a_file_that_is_replaced_during_use_raises_error(made: Path) -> None:
    shutil.copy(made, "a.h5")
    found = open_data("a.h5")
    changed(Path("a.h5"), attribute("digest", "0"))
    for read in (lambda: read_split(found, "train"), lambda: Segments(found, "train")[0]):
        with pytest.raises(PerfsuiteError, match="was replaced by another set while it was used"):
            read()
    os.remove("a.h5")
    with pytest.raises(PerfsuiteError, match=r"data: a\.h5 can no longer be read: "):
        read_split(found, "train")


def test_check_batch_rejects_a_batch_larger_than_the_split(made: Path) -> None:
    found = open_data(made)
    found.check_batch("validation", 480)
    with pytest.raises(
        PerfsuiteError, match=r"val_batch: 481 is more than the 480 segments for validation in .*; lower"
    ):
        found.check_batch("validation", 481, "val_batch")


def changed(path: Path, change: Callable[[Any], None]) -> None:
    with h5py.File(path, "r+") as file:
        change(file)


def replaced(name: str, value: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[name]
        file[name] = value

    return change


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda file: file.attrs.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (attribute("sample_rate", 8000), "has sample_rate 8000, where the trainer needs 4096"),
        (attribute("mels", 64), "has mels 64, where the trainer needs 32"),
        (attribute("mel_scale", "slaney"), "has mel_scale slaney"),
        (attribute("format", "other"), "is no leak-audio data set"),
        (attribute("digest", "0"), "is damaged: its content is not what was written"),
        (lambda file: file.__delitem__("labels"), "has no dataset 'labels'"),
        (lambda file: file.attrs.__delitem__("sample_rate"), "has sample_rate None"),
        (
            replaced("features", numpy.zeros((18, 40, 2, 31, 1), "f2")),
            r"shape \[18, 40, 2, 31, 1\], where \[files, 40, 2",
        ),
        (replaced("features", numpy.zeros((18, 40, 2, 32, 1), "f4")), "has features of type float32, where float16"),
        (replaced("features", numpy.zeros(18, "f2")), r"has features of the shape \[18\]"),
        (replaced("labels", numpy.zeros(17, "i8")), r"has \[17\] labels for 18 files"),
        (replaced("class_names", numpy.array(["A", "B"], "S")), "has class_names A, B, where the trainer needs BACK"),
        (lambda file: (file.__delitem__("snr_db"), file.create_group("snr_db")), "is damaged, or no HDF5 file"),
        (lambda file: file["labels"].__setitem__(0, (file["labels"][0] + 1) % 5), "is damaged: its content"),
        (lambda file: file["features"].__setitem__((3, 2, 1, 0, 0), 9), "is damaged: its content"),
    ],
)
def test_open_data_reports_invalid_files_in_one_line(made: Path, change: Callable[[Any], None], message: str) -> None:
    shutil.copy(made, "a.h5")
    changed(Path("a.h5"), change)
    with pytest.raises(PerfsuiteError, match=message) as error:
        open_data("a.h5")
    assert str(error.value).startswith("data: a.h5 ")
    assert "\n" not in str(error.value)


def test_a_file_without_a_source_is_read(made: Path) -> None:
    shutil.copy(made, "a.h5")
    changed(Path("a.h5"), lambda file: file.attrs.__delitem__("source"))
    assert "of an unknown source" in open_data("a.h5").summary


def scattered(file: Any) -> None:
    replaced("splits", (numpy.arange(18) % 2).astype("i1"))(file)
    replaced("labels", numpy.arange(18) // 2 % 5)(file)


def sealed(path: Path, change: Callable[[Any], None]) -> None:
    """Change the file and update its digest, as another program might."""
    changed(path, change)
    with h5py.File(path, "r+") as file:
        file.attrs["digest"] = hdf5.content_digest({name: file[name][()] for name in file})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("labels", numpy.arange(18) % 4), "has no file of UNCLASSIFIED for train"),
        (
            replaced("labels", numpy.array([*range(5), *range(5), 0, 1, *range(4), 0, 0])),
            "of UNCLASSIFIED for validation",
        ),
        (replaced("labels", numpy.array([*range(5), *range(5), 0, 5, *range(5), 0])), "has labels outside 0 to 4"),
        (replaced("splits", numpy.zeros(18, "i1")), "has no file of BACKGROUND, CRACK, .* for validation"),
        (scattered, "has the files for train scattered"),
    ],
)
def test_open_data_rejects_invalid_labels_and_splits(made: Path, change: Callable[[Any], None], message: str) -> None:
    shutil.copy(made, "a.h5")
    sealed(Path("a.h5"), change)
    with pytest.raises(PerfsuiteError, match=message):
        open_data("a.h5")


@pytest.mark.parametrize("keep", [0, 100, 3000, -1000, -1])
def test_open_data_rejects_truncated_files(made: Path, keep: int) -> None:
    content = made.read_bytes()
    Path("a.h5").write_bytes(content[: keep if keep >= 0 else len(content) + keep])
    with pytest.raises(PerfsuiteError, match=r"^data: a.h5 is .*; name another, or make one with") as error:
        open_data("a.h5")
    assert "\n" not in str(error.value)


def test_open_data_reports_a_missing_file() -> None:
    with pytest.raises(PerfsuiteError, match=r"there is no file a.h5; make it with `perfsuite data leak-audio a.h5`"):
        open_data("a.h5")


def test_labels_are_balanced_and_shuffled() -> None:
    recipe = Recipe(train=500, validation=125)
    for split, count in enumerate((500, 125)):
        found = building.labels(recipe, split)
        assert numpy.bincount(found).tolist() == [count // 5] * 5
        assert found != sorted(found)
        assert found == building.labels(recipe, split)
    assert len(CLASSES) == 5


def test_build_returns_the_counts_of_each_class(made: Path) -> None:
    built: Built = build(made, Recipe(train=12, validation=6), Quiet())
    assert built.kept
    assert sum(built.counts["train"].values()) == 12
    assert set(built.counts["validation"]) == set(CLASSES)


# --- real recordings ------------------------------------------------------------------------------------------------

FETCH = [sys.executable, str(ROOT / "tools/speech_corpus.py")]


def tool(name: str, script: str) -> None:
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)


def fetched(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": str(Path("bin").absolute())}
    return subprocess.run([*FETCH, *arguments], env=given, capture_output=True, text=True)


def test_speech_corpus_tool_downloads_and_unpacks_a_package() -> None:
    tool("apt-get", "import sys; open(f'{sys.argv[-1]}_1_all.deb', 'w')")
    tool("dpkg-deb", "import pathlib, sys; (pathlib.Path(sys.argv[-1]) / 'one.wav').write_text('')")
    done = fetched("speech")
    assert (done.returncode, done.stdout) == (0, f"1 recordings in {Path('speech').absolute()}\n")
    tool("dpkg-deb", "")
    assert fetched("other", "package").stderr == "speech_corpus: package has no WAV file; name another package\n"


def test_speech_corpus_tool_reports_errors_in_one_line() -> None:
    Path("bin").mkdir()
    assert fetched("speech").stderr == "speech_corpus: no apt-get here; this needs Debian or Ubuntu\n"
    tool("dpkg-deb", "")
    tool("apt-get", "import sys; sys.exit('W: old\\nE: Unable to locate package')")
    done = fetched("speech")
    assert done.returncode == 1
    assert done.stderr.startswith("speech_corpus: apt-get: E: Unable to locate package; is the package archive")
    assert done.stderr.count("\n") == 1
    assert not Path("speech").exists()
    assert fetched().stderr.startswith("usage: ")
