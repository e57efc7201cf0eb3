"""Checkpoints: written whole or not at all, read without trust."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from training import environment, made

from suite.runtime import CheckpointError, Store
from suite.runtime.checkpoints import check, load, restore_rng


def written(folder: Path, windows: int) -> Path:
    """A checkpoint later than all the others, whatever the resolution of the file system's clock."""
    path = Store(folder, keep=9).save(made(windows))
    when = 10**18 + len(list(folder.iterdir())) * 10**9
    os.utime(path, ns=(when, when))
    return path


# --- round trip -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made(7))
    assert path == tmp_path / "window-00000007.pt"
    found = load(path, "toy")
    assert (found.windows, found.items, found.configuration) == (7, 224, {"eta_update": 0.1})
    assert torch.equal(found.trainer["weights"], torch.arange(1000.0) + 7)
    assert found.trainer["layers"] == [(1, None, "x")]
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing temporary is left"


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    numpy.random.randn()  # the legacy generator keeps a second normal value back
    path = Store(tmp_path).save(made())

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), numpy.random.randn(), numpy.random.rand(), torch.rand(3).tolist()

    expected = draw()
    assert draw() != expected
    restore_rng(load(path).rng)
    assert draw() == expected


def test_the_last_written_stay_whatever_their_numbers(tmp_path: Path) -> None:
    for windows in (100, 200, 300):
        written(tmp_path, windows)
    store = Store(tmp_path, keep=2)
    store.save(made(120))  # of a run that went on from 100
    assert {p.name for p in store.files()} == {"window-00000120.pt", "window-00000300.pt"}
    assert store.latest().name == "window-00000120.pt"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_text("mine")
    (tmp_path / "window-1.txt").write_text("mine")
    store = Store(tmp_path, keep=1)
    store.save(made(1))
    store.save(made(2))
    assert {p.name for p in tmp_path.iterdir()} == {"notes.pt", "window-1.txt", "window-00000002.pt"}


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*leave out --resume"):
        Store(tmp_path / "nowhere").latest()


# --- killed ---------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from training import made
from suite.runtime import Store
from suite.runtime.checkpoints import load

torch.set_num_threads(1)
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)

def save(store, windows):
    store.save(made(windows, trainer={"weights": torch.full((200_000,), float(windows))}))

for moment in ("torch.save", "os.fsync", "os.replace"):
    store = Store(moment, keep=2)
    save(store, 1)
    pid = os.fork()
    if pid == 0:
        module, name = moment.split(".")
        setattr({"os": os, "torch": torch}[module], name, die)
        save(store, 2)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    assert [p.name for p in store.files()] == ["window-00000001.pt"]
    assert load(store.latest()).windows == 1
    assert len(list(Path(moment).glob(".window-*.tmp"))) == 1
    store.tidy()
    assert not list(Path(moment).glob(".*"))

store = Store("random", keep=2)
save(store, 1)
n = 0
while n < 16 or load(store.latest()).windows <= 2:  # a machine that is busy takes longer to save
    n += 1
    before = load(store.latest()).windows
    pid = os.fork()
    while pid == 0:
        before += 1
        save(store, before)
    time.sleep((0.002 + 0.037 * ((n * 0.618) % 1)) * (1 + n // 16))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for path in store.files():
        found = load(path)
        assert (found.trainer["weights"] == found.windows).all()
    assert load(store.latest()).windows >= before
store.tidy()
assert not list(Path("random").glob(".*"))
"""


def test_killed_within_a_save_and_at_random_moments(tmp_path: Path) -> None:
    """By SIGKILL: before the file is flushed, before it gets its name, and wherever it strikes."""
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_another_run_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / f".window-00000001.pt.{os.getpid()}.tmp"
    path.write_text("half")
    Store(tmp_path).tidy()
    assert path.exists()


def test_a_full_disk_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, keep=1)
    store.save(made(1))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*window-00000002.pt: No space left on device; free space"
    ):
        store.save(made(2))
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["window-00000001.pt"]
    assert load(store.latest()).windows == 1


# --- damaged, foreign -----------------------------------------------------------------------------------------------


def test_a_checkpoint_cut_anywhere_is_one_line(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made())
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=r"is damaged, or no checkpoint; there is no other beside it"
        ) as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_one_bit_is_noticed(tmp_path: Path) -> None:
    """Of the data of a tensor: torch itself would load it."""
    path = Store(tmp_path).save(made())
    whole = bytearray(path.read_bytes())
    place = whole.index(numpy.arange(501.0, 505.0, dtype="<f4").tobytes())
    whole[place] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="is damaged, in"):
        load(path)


def test_the_remedy_names_the_one_before(tmp_path: Path) -> None:
    before, last = written(tmp_path, 1), written(tmp_path, 2)
    last.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"resume from {before}"):
        load(last)


def test_random_damage_is_never_another_error(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made())
    whole = path.read_bytes()
    chance = random.Random(5)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 3, 50])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            found = load(path)
        except CheckpointError:
            continue
        assert torch.equal(found.trainer["weights"], torch.arange(1000.0) + 1), "what is read is what was written"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"format": "another", "version": 1}, "is no checkpoint of `perfsuite train`"),
        ([1, 2], "is no checkpoint of `perfsuite train`"),
        ({"format": "perfsuite.checkpoint", "version": 99}, "has format version 99, this perfsuite reads 1"),
        ({"format": "perfsuite.checkpoint", "version": 1, "name": "toy"}, "is damaged: it lacks windows, items"),
    ],
)
def test_a_foreign_checkpoint_is_one_line(tmp_path: Path, content: object, told: str) -> None:
    path = tmp_path / "window-00000001.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=told):
        load(path)


def test_another_zip(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(path)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "was-here"),)

    path = tmp_path / "x.pt"
    torch.save({"format": "perfsuite.checkpoint", "trainer": Evil()}, path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(path)
    assert not (tmp_path / "was-here").exists()


def test_another_trainers(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made())
    with pytest.raises(CheckpointError, match="is of the trainer 'toy', not of 'trainer2'"):
        load(path, "trainer2")


@pytest.mark.parametrize("name", ["nowhere.pt", "."])
def test_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        load(tmp_path / name)


# --- what may be written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": [torch.tensor([1.0, float("nan")])]}, r"state\['a'\]\[0\] holds NaN"),
        ({"a": {"b": numpy.float64(1)}}, r"state\['a'\]\['b'\] is a float64, which cannot be read back"),
        ({"a": Path("x")}, r"state\['a'\] is a PosixPath"),
        ({(1, 2): 3}, "state has a key of type tuple"),
    ],
)
def test_a_state_that_must_not_be_written(state: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        check(state)


def test_a_state_that_may_be_written_can_be_read(tmp_path: Path) -> None:
    state = {
        1: [None, True, "x", b"y", (torch.float16, torch.device("cpu"), torch.Size([2]))],
        "inf": torch.tensor([float("inf")]),
        "rows": torch.arange(3),
    }
    check(state)
    found = load(Store(tmp_path).save(made(trainer=state))).trainer
    assert found[1] == state[1]
