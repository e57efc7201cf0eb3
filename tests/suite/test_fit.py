"""The training loop `fit`: how it ends, how it resumes, and its messages."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from rich.console import Console
from scale import FULLY
from training import Toy, started

from perfsuite.errors import PerfsuiteError
from suite.runtime import CheckpointError, DivergedError, Options, Store, fit, ranges
from suite.runtime.checkpoints import load
from suite.runtime.display import Rate, quantity
from suite.runtime.timing import Phases, quantile


def state_of(path: Path) -> dict[str, Any]:
    found = load(path)
    return {"trainer": found.trainer, "batches": found.batches, "rng": found.rng, "items": found.items}


def same(one: Any, other: Any) -> bool:
    """Return whether both are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def signalled(at: int, number: int) -> Any:
    """Wrap a trainer so that the process gets a signal within window `at`."""

    def wrap(trainer: Any) -> Any:
        train = trainer.train_window

        def window(batch: Any) -> None:
            if trainer.windows + 1 == at:
                os.kill(os.getpid(), number)
            train(batch)

        trainer.train_window = window
        return trainer

    return wrap


# --- end of a run ---------------------------------------------------------------------------------------------------


def test_a_run_trains_and_keeps_the_last_checkpoints(run: Toy) -> None:
    outcome = run.fit(40, checkpoint_every=10, keep=2)
    assert (outcome.windows, outcome.items, outcome.exit_code, outcome.signal) == (40, 40 * 32, 0, None)
    assert outcome.metrics is not None
    assert outcome.metrics["loss"] < 2.8, "it has learnt something"
    assert outcome.checkpoint == run.folder / "window-00000040.pt"
    # The loss of window 41 is unknown, so its checkpoint does not count against `keep`.
    assert sorted(p.name for p in run.folder.glob("window-*")) == [f"window-000000{n}.pt" for n in (20, 30, 40)]
    assert "toy: 40 windows in" in run.said
    assert "1.28k tokens" in run.said


def test_each_checkpoint_is_written_once(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def save(self: Store, checkpoint: Any, **options: Any) -> Path:
        saved.append(checkpoint.windows)
        return self.folder / "x"

    monkeypatch.setattr(Store, "save", save)
    run.fit(20, checkpoint_every=10)
    run.fit(5, checkpoint_every=3)
    assert saved == [10, 20, 3, 5]


def test_keep_limits_checkpoints_of_a_trainer_without_metrics(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.metrics = lambda: None
        return trainer

    run.fit(20, checkpoint_every=2, keep=2, wrap=wrap)
    assert [p.name for p in Store(run.folder).files()] == ["window-00000020.pt", "window-00000018.pt"]


def test_zero_windows_create_no_folder(run: Toy) -> None:
    outcome = run.fit(0)
    assert outcome.checkpoint is None
    assert not run.folder.exists()


def test_only_the_end_is_saved_with_checkpoint_every_0(run: Toy) -> None:
    run.fit(12, checkpoint_every=0)
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000012.pt"]


def test_seconds_limit_the_run(run: Toy) -> None:
    assert run.fit(None, seconds=0).windows == 0
    assert run.fit(None, seconds=0.02).windows > 0


def test_run_ends_when_the_batches_end() -> None:
    """The batches are neither resumable nor text, and the run has no folder."""
    batches = iter([{"x": torch.zeros(3, 2)}] * 5)

    class Counting:
        def train_window(self, batch: Any) -> None: ...
        def metrics(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("not asked for without a folder")

        def load_state_dict(self, state: Any) -> None: ...

    outcome = fit(Counting(), batches, Options(windows=9))
    assert (outcome.windows, outcome.items, outcome.checkpoint) == (5, 15, None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_window_and_saves(run: Toy, number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    outcome = run.fit(1000, wrap=signalled(17, number))
    assert (outcome.windows, outcome.exit_code) == (17, code)
    assert load(run.folder / "window-00000017.pt").trainer["windows"] == 17
    assert "finishing the window, then saving" in run.said
    assert f"ended by {number.name}" in run.said
    assert signal.getsignal(number) is before


def test_a_second_sigint_ends_the_process_at_once(tmp_path: Path) -> None:
    process = started("toy", "--folder", "run", "--sleep", "0.02", "--checkpoint_every", "2")
    wait_for(tmp_path / "run", 1)
    # The second signal must not wait for the window to finish.
    process.send_signal(signal.SIGINT)
    first = process.stdout and next(line for line in process.stdout if "finishing the window" in line)
    assert first
    process.send_signal(signal.SIGINT)
    code = process.wait(30)
    assert code in (-signal.SIGINT, 130), "the latter where the first had ended it already"
    process.communicate()
    assert load(Store(tmp_path / "run").latest()).windows >= 2


def wait_for(folder: Path, count: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while len(list(folder.glob("window-*.pt"))) < count:
        assert time.monotonic() < end, "no checkpoint was written"
        time.sleep(0.005)


def test_a_second_signal_kills_a_window_that_hangs(run: Toy, tmp_path: Path) -> None:
    process = started("toy", "--folder", "run", "--sleep", "300", "--windows", "5")
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("data:"))
    time.sleep(0.3)  # until the first window sleeps; an earlier signal takes the other branch
    process.send_signal(signal.SIGINT)
    message = next(process.stdout, "")
    if "finishing" in message:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT
    else:
        assert process.wait(30) == 130
    process.communicate()
    assert not list(tmp_path.glob("run/window-*"))


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("at", [1, 7, 10, 11])
def test_nan_loss_stops_the_run_and_names_its_window(run: Toy, at: int, keep: int) -> None:
    """The NaN may be known only after its window's checkpoint was written; earlier checkpoints remain.

    The weights at the start of window 11 may be the cause, so `keep` does not count their checkpoint.
    """
    with pytest.raises(DivergedError, match=rf"window {at}: the loss is nan; training has stopped") as caught:
        run.fit(30, config={"nan_at": at}, checkpoint_every=5, keep=keep)
    good = [f"window-{windows:08d}.pt" for windows in (5, 10) if windows < at]
    assert sorted(p.name for p in run.folder.glob("window-*")) == good[-keep - (at == 11) :]
    assert (good[-1] if good else "no checkpoint was written") in str(caught.value)
    assert ("or the one before if that fails at once" in str(caught.value)) == (len(good) > 1)


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_does_not_count_a_checkpoint_before_the_next_loss_is_known(run: Toy, keep: int) -> None:
    """A trainer that has the last window's loss at the checkpoint does not know yet whether its weights are good."""

    def wrap(trainer: Any) -> Any:
        trainer.metrics = trainer.last_metrics = lambda: {"loss": float(trainer.losses[-1])}
        return trainer

    with pytest.raises(DivergedError, match=r"window 16: the loss is nan.*window-00000015.pt, or the one before"):
        run.fit(30, config={"nan_at": 16}, checkpoint_every=5, keep=keep, wrap=wrap)
    names = [f"window-{windows:08d}.pt" for windows in (15, 10, 5)]
    assert [p.name for p in Store(run.folder).files()] == names[: keep + 1]
    resumed = run.fit(17, resume=Store(run.folder).files()[1], checkpoint_every=5, keep=keep, wrap=wrap)
    assert resumed.windows == 17


def test_nan_in_the_first_window_after_a_resume_keeps_the_checkpoint(run: Toy) -> None:
    run.fit(4, keep=1)
    with pytest.raises(DivergedError, match="window 5: the loss is nan"):
        run.fit(9, resume=Store(run.folder).latest(), config={"nan_at": 5}, checkpoint_every=1, keep=1)
    assert [p.name for p in Store(run.folder).files()] == ["window-00000004.pt"]


def test_nan_in_the_state_is_not_saved(run: Toy) -> None:
    run.fit(4)

    def wrap(trainer: Any) -> Any:
        train = trainer.train_window

        def window(batch: Any) -> None:
            train(batch)
            if trainer.windows == 8:
                trainer.scores[3, 3] = float("nan")

        trainer.train_window = window
        return trainer

    with pytest.raises(DivergedError, match=r"window 8: the trainer's state\['scores'\] holds NaN.*window-00000004.pt"):
        run.fit(8, resume=Store(run.folder).latest(), wrap=wrap)
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000004.pt"]


def test_last_metrics_are_checked_before_the_last_window_is_saved(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.last_metrics = lambda: {"loss": float(trainer.losses[-1])}
        return trainer

    with pytest.raises(DivergedError, match="window 10: the loss is nan"):
        run.fit(10, config={"nan_at": 10}, checkpoint_every=5, wrap=wrap)
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000005.pt"]


def test_error_uses_the_window_number_from_the_metrics(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.metrics = lambda: {"loss": float("inf") if trainer.windows == 6 else 1.0, "window": trainer.windows - 3}
        return trainer

    with pytest.raises(DivergedError, match="window 3: the loss is inf"):
        run.fit(30, wrap=wrap)


def test_trainer_can_stop_the_run(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.stops = lambda: "nothing more to learn" if trainer.windows == 7 else None
        return trainer

    outcome = run.fit(30, wrap=wrap)
    assert (outcome.windows, outcome.exit_code) == (7, 0)
    assert "; nothing more to learn" in run.said
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000007.pt"]


# --- resumption -----------------------------------------------------------------------------------------------------


def test_run_interrupted_at_random_windows_ends_bitwise_the_same(run: Toy, tmp_path: Path) -> None:
    whole = Toy(tmp_path / "whole")
    expected = whole.fit(60)
    assert expected.checkpoint is not None
    chance = random.Random(11)
    for attempt in range(4):
        broken = Toy(tmp_path / f"broken{attempt}")
        resume, windows, n = None, 0, 0
        while windows < 60:
            at = windows + chance.randint(1, 30)
            # The seed differs each time, so the generators' states must come from the checkpoint.
            outcome = broken.fit(60, seed=n, resume=resume, wrap=signalled(at, signal.SIGTERM), checkpoint_every=7)
            resume, windows, n = outcome.checkpoint, outcome.windows, n + 1
        assert n > 1
        assert resume is not None
        assert same(state_of(resume), state_of(expected.checkpoint))


@FULLY
def test_run_interrupted_and_resumed_in_another_process_ends_bitwise_the_same(tmp_path: Path) -> None:
    options = ("--windows", "40", "--checkpoint_every", "5")
    whole = started("toy", "--folder", "whole", *options)
    broken = started("toy", "--folder", "broken", *options, "--sleep", "0.01")
    wait_for(tmp_path / "broken", 1)
    broken.send_signal(signal.SIGTERM)
    output, _ = broken.communicate(timeout=60)
    assert broken.returncode == 143, output
    assert whole.wait(60) == 0
    whole.communicate()
    assert load(Store(tmp_path / "broken").latest()).windows < 40
    resumed = started("toy", "--folder", "broken", *options, "--resume", "latest")
    output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, output
    assert "resumed with another sleep: 0.0, before 0.01" in output
    names = [folder / "window-00000040.pt" for folder in (tmp_path / "whole", tmp_path / "broken")]
    assert same(*map(state_of, names))


def test_resuming_a_finished_run_trains_nothing(run: Toy) -> None:
    run.fit(4)
    outcome = run.fit(4, resume=Store(run.folder).latest())
    assert (outcome.windows, run.trainer.windows, outcome.exit_code) == (4, 4, 0)
    assert len(Store(run.folder).files()) == 1


def test_a_folder_with_checkpoints_requires_resume_or_overwrite(run: Toy) -> None:
    run.fit(4)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run.*--resume latest.*--overwrite"):
        run.fit(4)
    assert run.fit(3, overwrite=True).windows == 3
    assert Store(run.folder).latest().name == "window-00000003.pt"


def test_a_changed_configuration_is_reported(run: Toy) -> None:
    run.fit(4)
    run.fit(6, resume=Store(run.folder).latest(), config={"eta_update": 0.2})
    assert "resumed with another eta_update: 0.2, before 0.1" in run.said


def test_a_state_that_does_not_fit_raises_checkpoint_error(run: Toy) -> None:
    run.fit(4)

    def wrap(trainer: Any) -> Any:
        trainer.scores = torch.zeros(3, 3)
        return trainer

    with pytest.raises(CheckpointError, match=r"does not fit this trainer: RuntimeError.*; resume with"):
        run.fit(6, resume=Store(run.folder).latest(), wrap=wrap)


def test_batches_without_a_position_cannot_be_resumed(run: Toy, tmp_path: Path) -> None:
    run.fit(4)
    with pytest.raises(CheckpointError, match="position in the data"):
        fit(
            toy.Trainer(toy.Config(), 16, torch.device("cpu")),
            iter([{"x": torch.zeros(1)}]),
            Options(windows=9),
            name="toy",
            resume=Store(run.folder).latest(),
        )


def test_an_unreadable_state_is_reported_before_the_first_window(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.state_dict = lambda: {"config": trainer.config}
        return trainer

    with pytest.raises(CheckpointError, match=r"state\['config'\] is a Config, which cannot be read back"):
        run.fit(4, wrap=wrap)
    assert run.trainer.windows == 0


def test_a_failed_intermediate_checkpoint_does_not_end_the_run(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Store.save

    def fails(self: Store, checkpoint: Any, **options: Any) -> Path:
        if checkpoint.windows == 5:
            raise CheckpointError("cannot write it")
        return save(self, checkpoint, **options)

    monkeypatch.setattr(Store, "save", fails)
    assert run.fit(10, checkpoint_every=5).windows == 10
    assert "cannot write it; the run goes on" in run.said
    with pytest.raises(CheckpointError, match="cannot write it"):
        run.fit(5, overwrite=True)


def test_an_unwritable_folder_is_reported_before_the_first_window(run: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc/nowhere"), tmp_path / "file", tmp_path / "file" / "x"):
        run.folder = folder
        with pytest.raises(CheckpointError, match=r"cannot write into .*; name another --folder"):
            run.fit(5, overwrite=True)
        assert run.trainer.windows == 0


# --- services -------------------------------------------------------------------------------------------------------


def test_fit_calls_only_metrics_between_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` reads no values of a batch and does not wait for the device."""
    calls: list[str] = []

    class Silent:
        def __getattr__(self, name: str) -> Any:
            if name in ("last_metrics", "stops"):
                raise AttributeError(name)
            return lambda *a: calls.append(name)

    class Opaque(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is torch.Tensor.numel, f"{func} looks at a batch"
            return super().__torch_function__(func, types, args, kwargs or {})

    monkeypatch.setattr("suite.runtime.timing.synchronize", lambda device: calls.append("synchronize"))
    batch = {"input_ids": torch.zeros(2, 3).as_subclass(Opaque)}
    outcome = fit(Silent(), iter([batch] * 3), Options())
    assert outcome.items == 18
    assert calls == ["train_window", "metrics"] * 3


def test_timing_debug_shows_the_phases(run: Toy) -> None:
    run.fit(20, timing_debug=True, checkpoint_every=5)
    lines = {line.split()[1]: line.split() for line in run.said.splitlines() if line.startswith("│")}
    assert set(lines) == {"data", "train", "metrics", "checkpoint"}
    assert lines["train"][3] == "20"
    assert "p95" in run.said
    run.fit(1, overwrite=True)
    assert "p95" not in run.said


def test_phases_synchronize_only_when_timing_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("suite.runtime.timing.synchronize", calls.append)
    for on, count in ((False, 0), (True, 2)):
        phases = Phases(torch.device("cpu"), on)
        for _ in range(2):
            with phases("train"):
                pass
        assert len(calls) == count
        assert list(phases.seconds) == ["train"] * on


def test_quantile_returns_order_statistics() -> None:
    values = [float(n) for n in range(100)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([3.0], 0.95)) == (50, 95, 3)


@pytest.mark.parametrize(("windows", "said"), [(8, "wrote"), (4, "with fewer windows"), (2, "nothing was written")])
def test_profile_writes_a_trace(run: Toy, tmp_path: Path, windows: int, said: str) -> None:
    path = tmp_path / "of any \udcff bytes" / "t\udcff.json"
    run.fit(windows, profile=str(path))
    assert said in run.said
    assert path.exists() == (windows > 2)
    assert ("First look at the phase" in run.said) == path.exists()
    if path.exists():
        assert "aten::softmax" in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_trace_without_a_window_is_not_written(run: Toy, tmp_path: Path) -> None:
    """A trace begins with the third window, which these batches do not have."""
    path, out = tmp_path / "t.json", StringIO()
    batches = iter([{"input_ids": torch.zeros(4, 8, dtype=torch.int64), "attention_mask": torch.ones(4, 8)}] * 2)
    trainer = toy.Trainer(toy.Config(), 16, torch.device("cpu"))
    outcome = fit(trainer, batches, Options(profile=str(path)), console=Console(file=out, width=200))
    assert outcome.windows == 2
    assert "nothing was written" in out.getvalue()
    assert not path.exists()


def test_an_unwritable_trace_is_reported_before_the_first_window(run: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfsuiteError, match="profile: cannot write"):
        run.fit(8, profile=str(tmp_path / "file" / "t.json"))
    assert run.trainer.windows == 0


def test_a_trace_that_cannot_be_written_whole_is_reported_and_the_run_goes_on(run: Toy, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # more than a checkpoint takes
    try:
        run.fit(8, profile=str(tmp_path / "t.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(r"profile: cannot write .*t\.json: .*; free space there, or name another file", run.said)
    assert "nothing was written" not in run.said
    assert run.trainer.windows == 8
    assert not [path for path in tmp_path.iterdir() if "t.json" in path.name or "trace" in path.name]


@pytest.mark.parametrize("method", ["start", "stop", "key_averages"])
def test_a_profiler_that_fails_is_reported_and_the_run_goes_on(
    run: Toy, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("CUPTI is in use\nby another process")

    monkeypatch.setattr(torch.profiler.profile, method, fail)
    run.fit(8, profile=str(tmp_path / "t.json"))
    lines = [line for line in run.said.splitlines() if line.startswith("profile: ")]
    assert len(lines) == 1
    assert "RuntimeError: CUPTI is in use; " in lines[0]
    assert run.trainer.windows == 8
    assert not ranges._traced


@pytest.fixture
def files_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number TensorBoard's files with as many digits each: it sorts files of the same second by name, 10 before 9."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))


@pytest.mark.usefixtures("files_by_age")
def test_tensorboard_logs_the_loss_of_a_resumed_run(run: Toy) -> None:
    run.fit(25, tensorboard=True, tensorboard_every=5, checkpoint_every=10)
    run.fit(40, tensorboard=True, tensorboard_every=5, resume=Store(run.folder).latest())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [e.step for e in events.Scalars("loss")] == [5, 10, 15, 20, 30, 35]


@pytest.mark.usefixtures("files_by_age")
def test_tensorboard_shows_only_the_current_run_of_a_folder(run: Toy) -> None:
    """Values of an overwritten run are removed, and the window before the first resumed one is not logged."""
    run.fit(30, tensorboard=True, tensorboard_every=5)
    run.fit(8, tensorboard=True, tensorboard_every=1, overwrite=True)
    run.fit(10, tensorboard=True, tensorboard_every=1, resume=run.folder / "window-00000008.pt")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")][:8] == [1, 2, 3, 4, 5, 6, 7, 9]


def test_a_full_disk_under_tensorboard_does_not_end_the_run(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    from torch.utils.tensorboard import SummaryWriter

    def full(self: object, *arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    monkeypatch.setattr(SummaryWriter, "close", full)
    assert run.fit(9, tensorboard=True, tensorboard_every=1).windows == 9
    assert run.said.count("tensorboard: cannot write: No space left on device; the run goes on without") == 1
    assert Store(run.folder).latest().name == "window-00000009.pt"


def test_missing_tensorboard_is_reported_with_its_install_command(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(PerfsuiteError, match=r"needs the package tensorboard.*pip install 'perfsuite\[train\]'"):
        run.fit(5, tensorboard=True)


def test_tensorboard_needs_a_folder() -> None:
    trainer = toy.Trainer(toy.Config(), 16, torch.device("cpu"))
    batches: Iterator[Any] = iter([])
    with pytest.raises(PerfsuiteError, match="name one with --folder"):
        fit(trainer, batches, Options(tensorboard=True))


def test_progress_bar_is_shown_in_a_terminal(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    from suite.runtime.display import Display

    out = StringIO()
    console = Console(file=out, force_terminal=True, width=150)
    with Display(console, "toy", 40, 0, "tokens") as display:
        display.show(10, 40, 100, {"loss": 1.25})
        display.say("a line")
        display.leave("the last line")
    message = out.getvalue()
    assert "10 of 40 windows · loss 1.25" in message
    assert "a line\n" in message
    assert message.index("\x1b[?25h", message.index("the last line")), "the cursor is back"


def test_rate_covers_only_the_last_seconds() -> None:
    rate = Rate(seconds=5)
    assert rate.value() is None
    for second in range(20):
        rate.add(float(second), 100 * second if second < 10 else 1000 + 50 * (second - 10))
    assert rate.value() == 50
    assert [quantity(v) for v in (7, 1234, 2.5e6, 3e9)] == ["7", "1.23k", "2.5M", "3G"]
    assert [quantity(v) for v in (999.4, 999.6, 999_600, 1e12)] == ["999", "1k", "1M", "1T"]


@pytest.mark.parametrize("wrong", [{"windows": -1}, {"keep": 0}, {"seconds": float("nan")}])
def test_options_out_of_range_raise_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Options(**wrong)
