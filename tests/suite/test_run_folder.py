"""A run's folder: one run at a time writes to it, and checkpoints of earlier runs are not lost."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from training import SMALL, Toy

from suite.commands.train import train
from suite.runtime import CheckpointError, Store
from suite.runtime.checkpoints import load
from suite.runtime.curve_log import read
from suite.runtime.locking import LOCK, only_one


def during(window: int, act: Callable[[], object]) -> Callable[[Any], Any]:
    """Wrap a trainer so that another thread calls `act` during that window, in place of another process."""

    def wrap(trainer: Any) -> Any:
        whole = trainer.train_window

        def train_window(batch: Any) -> None:
            if trainer.windows + 1 == window:
                other = threading.Thread(target=act)
                other.start()
                other.join()
            whole(batch)

        trainer.train_window = train_window
        return trainer

    return wrap


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(train, ["toy", *SMALL, *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("window-*")}


@contextmanager
def another_process(folder: Path) -> Iterator[int]:
    """Start another process that holds the folder's lock, and yield its process id."""
    message, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about fork; the child needs no threads
        pid = os.fork()
    if pid == 0:
        try:
            with only_one(folder):
                os.write(tell, b"in")
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(message, 2) == b"in"
    os.close(message)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- two runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("arguments", [[], ["--resume", "latest"], ["--overwrite"]])
def test_a_second_run_in_a_folder_ends_at_once_and_no_checkpoint_is_lost(
    run: Toy, window: int, arguments: list[str]
) -> None:
    """The second run starts before the first checkpoint (window 1) or after it (window 5)."""
    seen: list[Any] = []

    def second() -> None:
        before = contents(run.folder)
        seen.append(invoked("--folder", str(run.folder), "--windows", "9", *arguments))
        assert contents(run.folder) == before
        seen.append(before)

    outcome = run.fit(6, checkpoint_every=2, wrap=during(window, second))
    done, _ = seen
    assert done.exit_code == 1
    assert done.output == (
        f"Error: another run is writing into {run.folder}; wait until it has ended, or name another --folder\n"
    )
    assert outcome.windows == 6
    assert sorted(contents(run.folder)) == [f"window-0000000{n}.pt" for n in (2, 4, 6)]


def test_train_locks_its_folder_from_before_the_data_is_loaded_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the data can take a minute, and the command also writes to the folder after the last window."""
    from suite import trainers

    seen: list[str] = []

    def refused() -> None:
        with pytest.raises(CheckpointError, match="another run is writing into"), only_one(tmp_path / "run"):
            pass
        seen.append("refused")

    def in_a_thread() -> None:
        other = threading.Thread(target=refused)
        other.start()
        other.join()

    data = trainers.data_of

    def loading(name: str) -> Any:
        in_a_thread()
        return data(name)

    def finish(name: str) -> Any:
        return lambda trainer, folder: in_a_thread()

    monkeypatch.setattr(trainers, "data_of", loading)
    monkeypatch.setattr(trainers, "finish_of", finish)
    done = invoked("--folder", "run", "--windows", "2")
    assert (done.exit_code, seen) == (0, ["refused"] * 2), done.output
    assert [p.name for p in (tmp_path / "run").glob("window-*")] == ["window-00000002.pt"]


def test_lock_is_released_when_its_run_is_killed(run: Toy) -> None:
    with another_process(run.folder):
        with pytest.raises(CheckpointError, match=f"another run is writing into {run.folder}; wait until it has ended"):
            run.fit(3)
        assert os.listdir(run.folder) == [LOCK]
    assert run.fit(3).windows == 3
    assert list(contents(run.folder)) == ["window-00000003.pt"]


def test_lock_covers_other_paths_to_the_same_folder(run: Toy, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.folder)
    with another_process(run.folder):
        for folder in (tmp_path / "link", tmp_path / "other" / ".." / "run"):
            (tmp_path / "other").mkdir(exist_ok=True)
            with pytest.raises(CheckpointError, match="another run is writing into"), only_one(folder):
                pass


def test_runs_in_different_folders_do_not_block_each_other(run: Toy, tmp_path: Path) -> None:
    with another_process(tmp_path / "another"), another_process(run.folder / "within"):
        assert run.fit(2).windows == 2


def test_commands_that_train_nothing_need_no_lock(run: Toy) -> None:
    with another_process(run.folder):
        assert run.fit(0).windows == 0
        assert invoked("--folder", str(run.folder), "--show").exit_code == 0


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_lock_that_cannot_be_created_is_reported_in_one_line(run: Toy, tmp_path: Path, what: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run.folder.mkdir()
    if what == "folder":
        (run.folder / LOCK).mkdir()
    else:
        (run.folder / LOCK).symlink_to(mine)
    done = invoked("--folder", str(run.folder), "--windows", "2")
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: cannot write into {run.folder}: ")
    assert done.output.endswith("; name another --folder\n")
    assert done.output.count("\n") == 1
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--folder", "a/new/one", "--resume", "latest"], "no checkpoint in a/new/one"),
        (["--folder", "a/new/one", "--resume", "nowhere.pt"], "no checkpoint nowhere.pt"),
        (["--folder", "a/new/one", "--device", "abacus"], "--device abacus"),
        (["--folder", "a/file/one"], "cannot write into a/file/one: Not a directory; name another --folder"),
    ],
)
def test_a_run_that_fails_to_start_creates_no_folder(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("")
    done = invoked("--windows", "2", *arguments)
    assert (done.exit_code, message in done.output) == (1, True), done.output
    assert os.listdir("a") == ["file"]


# --- checkpoints of earlier runs ------------------------------------------------------------------------------------


def test_resuming_from_an_earlier_checkpoint_makes_that_run_the_latest(run: Toy) -> None:
    """Checkpoints of later windows are reported, and kept as *.old until newer ones replace them."""
    run.fit(6, checkpoint_every=2)
    outcome = run.fit(3, resume=run.folder / "window-00000002.pt")
    why = "renamed to *.old, since they are of later windows or another run"
    assert f"in {run.folder}, {why}: window-00000006.pt" in run.said
    assert Store(run.folder).latest() == outcome.checkpoint == run.folder / "window-00000003.pt"
    assert sorted(contents(run.folder)) == [
        "window-00000002.pt",
        "window-00000003.pt",
        "window-00000004.pt.old",
        "window-00000006.pt.old",
    ]
    run.fit(8, resume=outcome.checkpoint, checkpoint_every=1, keep=2)
    assert "renamed" not in run.said
    # The losses of windows 8 and 9 are unknown, so the checkpoints before them do not count against `keep`.
    assert [load(p).windows for p in Store(run.folder).files()] == [8, 7, 6, 5]


def test_overwrite_makes_the_new_run_the_latest(run: Toy) -> None:
    run.fit(6, checkpoint_every=2)
    run.fit(1, overwrite=True)
    assert Store(run.folder).latest() == run.folder / "window-00000001.pt"
    assert "another run: window-00000006.pt, window-00000004.pt, window-00000002.pt" in run.said


def test_resuming_from_another_folder_makes_that_run_the_latest(run: Toy, tmp_path: Path) -> None:
    """Checkpoints of another run never count as later, whatever their number."""
    run.fit(3)
    source = (run.folder / "window-00000003.pt").rename(tmp_path / "window-00000003.pt")
    run.fit(2)
    outcome = run.fit(4, resume=source)
    assert [p.name for p in Store(run.folder).files()] == ["window-00000004.pt", "window-00000002.pt.old"]
    run.fit(5, resume=run.folder / "window-00000002.pt.old")
    assert Store(run.folder).latest() == run.folder / "window-00000005.pt"
    assert outcome.checkpoint == run.folder / "window-00000004.pt"


def test_a_run_that_trains_nothing_renames_no_checkpoint(run: Toy) -> None:
    run.fit(6, checkpoint_every=2)
    before = contents(run.folder)
    run.fit(2, resume=run.folder / "window-00000002.pt")
    assert contents(run.folder) == before


def test_nan_in_the_first_window_keeps_the_checkpoint_resumed_from(run: Toy) -> None:
    """The failed run's own checkpoint is removed, so the one that it resumed from is the latest again."""
    from suite.runtime import DivergedError

    run.fit(6, checkpoint_every=2)
    with pytest.raises(DivergedError):
        run.fit(9, resume=run.folder / "window-00000004.pt", config={"nan_at": 5}, checkpoint_every=1, keep=1)
    assert Store(run.folder).latest() == run.folder / "window-00000004.pt"
    with pytest.raises(DivergedError):
        run.fit(9, overwrite=True, config={"nan_at": 1}, checkpoint_every=1, keep=1)
    assert load(Store(run.folder).latest()).windows >= 4


def test_remedy_for_damaged_checkpoints_leads_to_an_intact_one(run: Toy) -> None:
    """If the latest two are damaged, the errors lead to the one before; `latest` works again after that resume."""
    run.fit(6, checkpoint_every=2)
    arguments = ["--folder", str(run.folder), "--windows", "4", "--seed", "0"]
    for number in (4, 6):
        (run.folder / f"window-0000000{number}.pt").write_bytes(b"PK")
    path = "latest"
    for expected in (6, 4):
        done = invoked(*arguments, "--resume", path)
        assert done.exit_code == 1
        assert f"window-0000000{expected}.pt is damaged" in done.output
        path = done.output.split("resume from ")[1].strip()
    assert invoked(*arguments, "--resume", path).exit_code == 0
    assert load(Store(run.folder).latest()).windows == 4
    assert invoked(*arguments, "--windows", "5", "--resume", "latest").exit_code == 0


@pytest.mark.parametrize(
    ("file", "message"), [("nowhere.pt", "no checkpoint nowhere.pt"), ("text.pt", "text.pt is "), ("other.pt", "other")]
)
def test_checkpoint_is_checked_before_the_data_are_loaded(
    run: Toy, monkeypatch: pytest.MonkeyPatch, file: str, message: str
) -> None:
    run.fit(2)
    found = load(Store(run.folder).latest())
    found.name = "another trainer"
    Store("others").save(found).rename("other.pt")
    Path("text.pt").write_text("no checkpoint")
    monkeypatch.setattr("suite.trainers.data_of", lambda name: pytest.fail("the data are loaded first"))
    done = invoked("--folder", str(run.folder), "--windows", "4", "--resume", file)
    assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
    assert message in done.output


def test_curve_of_a_run_resumed_from_another_folder_starts_anew(run: Toy, tmp_path: Path) -> None:
    run.fit(4, checkpoint_every=1)
    other = tmp_path / "other"
    shutil.copytree(run.folder, other)
    run.fit(2, overwrite=True)
    run.fit(6, resume=other / "window-00000004.pt")
    assert min(line["window"] for line in read(run.folder)) == 5


def test_a_run_with_all_its_windows_done_says_so(run: Toy) -> None:
    outcome = run.fit(4)
    run.fit(2, resume=outcome.checkpoint)
    assert "windows: 2 is reached already; raise it" in run.said
