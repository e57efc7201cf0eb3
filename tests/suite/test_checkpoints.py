"""Checkpoints: atomic writes, and validation when they are read."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from training import made

from suite.runtime import CheckpointError, Store
from suite.runtime.checkpoints import check, load, restore_rng


def written(folder: Path, *windows: int) -> list[Path]:
    """Write checkpoints and remove none. Each has an older modification time than the previous one."""
    paths = []
    for count in windows:
        paths.append(Store(folder, keep=99).save(made(count)))
        when = 10**18 - len(os.listdir(folder)) * 10**9
        os.utime(paths[-1], ns=(when, when))
    return paths


def names(folder: Path) -> list[str]:
    """Return the numbers of the checkpoints, latest first."""
    return [p.name.removeprefix("window-").replace(".pt", "").lstrip("0") for p in Store(folder).files()]


# --- round trip -----------------------------------------------------------------------------------------------------


def test_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made(7))
    assert path == tmp_path / "window-00000007.pt"
    found = load(path, "toy")
    assert (found.windows, found.items, found.configuration) == (7, 224, {"eta_update": 0.1})
    assert torch.equal(found.trainer["weights"], torch.arange(1000.0) + 7)
    assert found.trainer["layers"] == [(1, None, "x")]
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing temporary is left"


def test_random_generators_continue_from_the_saved_state(tmp_path: Path) -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    numpy.random.randn()  # the legacy generator caches a second normal value
    path = Store(tmp_path).save(made())

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), numpy.random.randn(), numpy.random.rand(), torch.rand(3).tolist()

    expected = draw()
    assert draw() != expected
    restore_rng(load(path).rng)
    assert draw() == expected


def test_latest_checkpoint_has_the_largest_number_whatever_its_modification_time(tmp_path: Path) -> None:
    """The clock is set back between every two checkpoints."""
    written(tmp_path, 1, 2, 3)
    store = Store(tmp_path, keep=2)
    for windows in range(4, 8):
        when = 10**18 - windows * 10**10
        os.utime(store.save(made(windows)), ns=(when, when))
    assert names(tmp_path) == ["7", "6"]
    assert load(store.latest()).windows == 7


def test_numbers_with_more_digits_sort_later(tmp_path: Path) -> None:
    counts = [99_999_999, 100_000_000, 999_999_999, 1_000_000_000, 10**17]
    written(tmp_path, *counts)
    assert names(tmp_path) == [str(count) for count in reversed(counts)]
    assert load(Store(tmp_path).latest()).windows == 10**17


def test_saving_an_earlier_number_renames_later_checkpoints_to_old(tmp_path: Path) -> None:
    """The run that resumed from 100 has the latest checkpoint at once. Later ones are removed as others are saved."""
    written(tmp_path, 100, 200, 300)
    store = Store(tmp_path, keep=3)
    store.save(made(120))
    assert names(tmp_path) == ["120", "100", "300.old"]
    assert load(tmp_path / "window-00000300.pt.old").windows == 300
    store.save(made(140))
    assert names(tmp_path) == ["140", "120", "100"]


def test_old_checkpoints_of_the_same_number_get_distinct_names(tmp_path: Path) -> None:
    written(tmp_path, 100, 300)
    store = Store(tmp_path, keep=9)
    for windows in (200, 300, 150):
        store.save(made(windows))
    assert names(tmp_path) == ["150", "100", "300.old2", "300.old", "200.old"]


def test_load_rejects_a_file_whose_name_has_another_number(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 5, 6)
    wrong = path.rename(tmp_path / "window-00000300.pt")
    with pytest.raises(CheckpointError) as caught:
        load(Store(tmp_path).latest())
    assert str(caught.value) == (
        f"{wrong} is of 5 windows, not of 300 as its name says; name it window-00000005.pt, or resume from another"
    )
    assert load(wrong.rename(tmp_path / "best.pt")).windows == 5, "a name without a number says nothing"


def test_other_files_are_ignored_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_text("mine")
    mine = {"notes.pt", "window-1.txt", "window-7.pt", "window-000000009.pt", "window-0000000\u0669.pt"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    store = Store(tmp_path, keep=1)
    store.save(made(1))
    store.save(made(2))
    assert names(tmp_path) == ["2"]
    assert {p.name for p in tmp_path.iterdir()} == {*mine, "window-00000002.pt"}


def test_a_folder_or_dead_link_named_as_a_checkpoint_is_reported_and_kept(tmp_path: Path) -> None:
    """`latest` does not silently choose an earlier one, and a run that resumes from an earlier one can save."""
    store = Store(tmp_path, keep=2)
    written(tmp_path, 1, 2)
    (tmp_path / "window-00000008.pt").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(CheckpointError, match=r"window-00000008.pt is a link to a file that is missing; resume from"):
        load(store.latest())
    (tmp_path / "window-00000009.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*window-00000009.pt: it is a folder; resume from .*8.pt"):
        load(store.latest())
    for windows in (3, 4, 5):
        store.save(made(windows))
    assert names(tmp_path) == ["5", "4", "9.old"]
    assert (tmp_path / "window-00000009.pt.old").is_dir()


def test_latest_without_checkpoints_raises_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*leave out --resume"):
        Store(tmp_path / "nowhere").latest()


# --- killed ---------------------------------------------------------------------------------------------------------


class Moments:
    """Copies of the folder before each call with which a save changes it, and at the end: what a kill would leave."""

    CALLS = ("fsync", "replace", "rename", "unlink", "mkdir")

    def __init__(self, folder: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self._copies = copies
        for name in self.CALLS:
            monkeypatch.setattr(os, name, partial(self._called, name, getattr(os, name)))
        monkeypatch.setattr(torch, "save", partial(self._called, "save", torch.save))
        self._copying = False

    def _called(self, name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        if not self._copying:
            self.copy()
            self.calls.append(name)
        return call(*arguments, **options)

    def copy(self) -> None:
        self._copying = True
        shutil.copytree(self.folder, self._copies / str(len(self.calls)))
        self._copying = False

    def last(self) -> list[int]:
        """Return the windows of the latest checkpoint at each moment, and assert that each checkpoint is complete."""
        self.copy()
        self._copying = True
        folders = [self._copies / str(n) for n in range(len(self.calls) + 1)]
        found = [load(Store(folder).latest()) for folder in folders]
        assert all(torch.equal(c.trainer["weights"], torch.arange(1000.0) + c.windows) for c in found)
        return [checkpoint.windows for checkpoint in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def moments(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Moments]:
    return lambda: Moments(folder, tmp_path / "moments", monkeypatch)


def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(
    folder: Path, moments: Callable[[], Moments]
) -> None:
    written(folder, 1, 2)
    seen = moments()
    store = Store(folder, keep=2)
    store.save(made(3))
    assert names(folder) == ["3", "2"]
    found = seen.last()
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_old_checkpoints_are_removed_only_after_the_new_one_is_flushed(
    folder: Path, moments: Callable[[], Moments]
) -> None:
    """A power loss is covered too: the file's bytes, then its name, are flushed to disk first."""
    written(folder, 1, 2)
    seen = moments()
    Store(folder, keep=1).save(made(3))
    calls = [c for c in seen.calls if c in ("save", "fsync", "replace", "unlink")]
    assert calls[calls.index("save") :] == ["save", "fsync", "replace", "fsync", "unlink", "unlink", "unlink"]


@pytest.mark.parametrize("after", [100, -1])
def test_a_kill_while_checkpoints_are_renamed_to_old_leaves_a_complete_one(
    folder: Path, moments: Callable[[], Moments], after: int
) -> None:
    """Covers a run that resumes from 100 and a run that starts from scratch."""
    written(folder, 100, 200, 300)
    seen = moments()
    store = Store(folder, keep=1)
    store.leave_behind(after)
    store.save(made(110))
    assert names(folder) == ["110"]
    found = seen.last()
    assert set(found[: found.index(110)]) == {100, 200, 300}
    assert set(found[found.index(110) :]) == {110}


def test_tidy_removes_half_written_files_of_killed_runs(tmp_path: Path) -> None:
    (tmp_path / f".window-00000001.pt.{os.getpid()}.tmp").write_text("half, of a process whose number is used again")
    (tmp_path / ".mine.tmp").write_text("mine")
    Store(tmp_path).tidy()
    assert [p.name for p in tmp_path.iterdir()] == [".mine.tmp"]


def test_save_does_not_follow_symbolic_links(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".window-00000001.pt.{os.getpid()}.tmp").symlink_to(mine)
    (tmp_path / "window-00000001.pt").symlink_to(mine)
    Store(tmp_path).save(made(1))
    assert mine.read_text() == "mine"
    assert load(tmp_path / "window-00000001.pt").windows == 1


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_cannot_grow_is_reported_with_the_system_s_reason(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    made_large = dataclasses.replace(made(1), trainer={"weights": torch.zeros(100_000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # PyTorch's own message names a position in its file
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*window-00000001.pt: File too large; free space"):
            Store(tmp_path).save(made_large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


# --- damaged, foreign -----------------------------------------------------------------------------------------------


def test_a_truncated_checkpoint_is_reported_in_one_line(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made())
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=r"is damaged, or no checkpoint; there is no other beside it"
        ) as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_one_flipped_bit_is_detected(tmp_path: Path) -> None:
    """One flipped bit in a tensor's data is detected, although torch itself would load the file."""
    path = Store(tmp_path).save(made())
    whole = bytearray(path.read_bytes())
    place = whole.index(numpy.arange(501.0, 505.0, dtype="<f4").tobytes())
    whole[place] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="is damaged, in"):
        load(path)


def test_remedy_names_the_checkpoint_before_the_damaged_one(tmp_path: Path) -> None:
    first, second, third = written(tmp_path, 1, 2, 3)
    second.write_bytes(b"")
    third.write_bytes(b"")
    for damaged, other in ((third, second), (second, first)):
        with pytest.raises(CheckpointError, match=f"resume from {other}$"):
            load(damaged)
    first.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"resume from {third}$"):
        load(first)


def test_random_damage_raises_no_error_but_checkpoint_error(tmp_path: Path) -> None:
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
    ("content", "message"),
    [
        ({"format": "another", "version": 1}, "is no checkpoint of `perfsuite train`"),
        ([1, 2], "is no checkpoint of `perfsuite train`"),
        ({"format": "perfsuite.checkpoint", "version": 99}, "has format version 99, this perfsuite reads 1"),
        ({"format": "perfsuite.checkpoint", "version": 1, "name": "toy"}, "is damaged: it lacks windows, items"),
    ],
)
def test_a_file_with_other_contents_raises_checkpoint_error(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "window-00000001.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_zip_file_without_a_checkpoint_raises_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(path)


def test_load_executes_no_code_from_the_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "was-here"),)

    path = tmp_path / "x.pt"
    torch.save({"format": "perfsuite.checkpoint", "trainer": Evil()}, path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(path)
    assert not (tmp_path / "was-here").exists()


def test_load_rejects_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    path = Store(tmp_path).save(made())
    with pytest.raises(CheckpointError, match="is of the trainer 'toy', not of 'trainer2'"):
        load(path, "trainer2")


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere.pt", r"no checkpoint .*/nowhere\.pt; name one"), (".", "cannot read .*: it is a folder; ")],
)
def test_a_missing_file_or_a_folder_raises_checkpoint_error(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / name)


# --- values that may be written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [torch.tensor([1.0, float("nan")])]}, r"state\['a'\]\[0\] holds NaN"),
        ({"a": {"b": numpy.float64(1)}}, r"state\['a'\]\['b'\] is a float64, which cannot be read back"),
        ({"a": Path("x")}, r"state\['a'\] is a PosixPath"),
        ({(1, 2): 3}, "state has a key of type tuple"),
    ],
)
def test_check_rejects_nan_and_types_that_cannot_be_read_back(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check(state)


def test_a_state_that_passes_check_can_be_read_back(tmp_path: Path) -> None:
    state = {
        1: [None, True, "x", b"y", (torch.float16, torch.device("cpu"), torch.Size([2]))],
        "inf": torch.tensor([float("inf")]),
        "rows": torch.arange(3),
    }
    check(state)
    found = load(Store(tmp_path).save(made(trainer=state))).trainer
    assert found[1] == state[1]
