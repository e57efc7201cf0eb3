"""The loop around a trainer: its ends, its resumption, and its messages."""

from __future__ import annotations

import json
import os
import random
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
from suite.runtime import CheckpointError, DivergedError, Options, Store, fit
from suite.runtime.checkpoints import load
from suite.runtime.display import Rate, quantity
from suite.runtime.timing import Phases, quantile


def state_of(path: Path) -> dict[str, Any]:
    found = load(path)
    return {"trainer": found.trainer, "batches": found.batches, "rng": found.rng, "items": found.items}


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def signalled(at: int, number: int) -> Any:
    """Wrap a trainer that gets a signal within a window."""

    def wrap(trainer: Any) -> Any:
        train = trainer.train_window

        def window(batch: Any) -> None:
            if trainer.windows + 1 == at:
                os.kill(os.getpid(), number)
            train(batch)

        trainer.train_window = window
        return trainer

    return wrap


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_run(run: Toy) -> None:
    outcome = run.fit(40, checkpoint_every=10, keep=2)
    assert (outcome.windows, outcome.items, outcome.exit_code, outcome.signal) == (40, 40 * 32, 0, None)
    assert outcome.metrics is not None
    assert outcome.metrics["loss"] < 2.8, "it has learnt something"
    assert outcome.checkpoint == run.folder / "window-00000040.pt"
    # The loss of window 40 is not known: it pushes no good one out.
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


def test_a_trainer_without_metrics_keeps_as_many(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.metrics = lambda: None
        return trainer

    run.fit(20, checkpoint_every=2, keep=2, wrap=wrap)
    assert [p.name for p in Store(run.folder).files()] == ["window-00000020.pt", "window-00000018.pt"]


def test_no_windows(run: Toy) -> None:
    outcome = run.fit(0)
    assert outcome.checkpoint is None
    assert not run.folder.exists()


def test_only_the_end_is_saved(run: Toy) -> None:
    run.fit(12, checkpoint_every=0)
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000012.pt"]


def test_so_many_seconds(run: Toy) -> None:
    assert run.fit(None, seconds=0).windows == 0
    assert run.fit(None, seconds=0.02).windows > 0


def test_batches_that_end() -> None:
    """Batches need not be resumable, nor text, and a run needs no folder."""
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


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    process = started("toy", "--folder", "run", "--sleep", "0.02", "--checkpoint_every", "2")
    wait_for(tmp_path / "run", 1)
    # Two of them a moment apart, in a window that lasts: the second must not wait for it.
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
    time.sleep(0.3)  # until it sleeps in its first window; earlier is fine too, but another path
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
def test_nan_stops_with_its_window(run: Toy, at: int, keep: int) -> None:
    """It also stops if the NaN is known only after that window's checkpoint was written; the earlier one remains."""
    with pytest.raises(DivergedError, match=rf"window {at}: the loss is nan; training has stopped") as caught:
        run.fit(30, config={"nan_at": at}, checkpoint_every=5, keep=keep)
    good = [f"window-{windows:08d}.pt" for windows in (5, 10) if windows < at]
    assert sorted(p.name for p in run.folder.glob("window-*")) == good[-keep:]
    assert (good[-1] if good else "no checkpoint was written") in str(caught.value)


def test_nan_in_the_first_window_after_a_resume(run: Toy) -> None:
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


def test_the_last_window_is_asked_for_before_it_is_saved(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.last_metrics = lambda: {"loss": float(trainer.losses[-1])}
        return trainer

    with pytest.raises(DivergedError, match="window 10: the loss is nan"):
        run.fit(10, config={"nan_at": 10}, checkpoint_every=5, wrap=wrap)
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000005.pt"]


def test_a_trainer_that_names_its_windows(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.metrics = lambda: {"loss": float("inf") if trainer.windows == 6 else 1.0, "window": trainer.windows - 3}
        return trainer

    with pytest.raises(DivergedError, match="window 3: the loss is inf"):
        run.fit(30, wrap=wrap)


def test_a_trainer_that_ends_the_run(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.stops = lambda: "nothing more to learn" if trainer.windows == 7 else None
        return trainer

    outcome = run.fit(30, wrap=wrap)
    assert (outcome.windows, outcome.exit_code) == (7, 0)
    assert "; nothing more to learn" in run.said
    assert [p.name for p in run.folder.glob("window-*")] == ["window-00000007.pt"]


# --- going on -------------------------------------------------------------------------------------------------------


def test_interrupted_at_random_windows_it_ends_bitwise_the_same(run: Toy, tmp_path: Path) -> None:
    whole = Toy(tmp_path / "whole")
    expected = whole.fit(60)
    assert expected.checkpoint is not None
    chance = random.Random(11)
    for attempt in range(4):
        broken = Toy(tmp_path / f"broken{attempt}")
        resume, windows, n = None, 0, 0
        while windows < 60:
            at = windows + chance.randint(1, 30)
            # Another seed each time: what the generators were must come from the checkpoint.
            outcome = broken.fit(60, seed=n, resume=resume, wrap=signalled(at, signal.SIGTERM), checkpoint_every=7)
            resume, windows, n = outcome.checkpoint, outcome.windows, n + 1
        assert n > 1
        assert resume is not None
        assert same(state_of(resume), state_of(expected.checkpoint))


@FULLY
def test_interrupted_in_processes_of_their_own(tmp_path: Path) -> None:
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


def test_what_is_done_is_not_done_again(run: Toy) -> None:
    run.fit(4)
    outcome = run.fit(4, resume=Store(run.folder).latest())
    assert (outcome.windows, run.trainer.windows, outcome.exit_code) == (4, 4, 0)
    assert len(Store(run.folder).files()) == 1


def test_a_folder_of_another_run_is_not_endangered(run: Toy) -> None:
    run.fit(4)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run.*--resume latest.*--overwrite"):
        run.fit(4)
    assert run.fit(3, overwrite=True).windows == 3
    assert Store(run.folder).latest().name == "window-00000003.pt"


def test_a_changed_configuration_is_reported(run: Toy) -> None:
    run.fit(4)
    run.fit(6, resume=Store(run.folder).latest(), config={"eta_update": 0.2})
    assert "resumed with another eta_update: 0.2, before 0.1" in run.said


def test_a_state_that_does_not_fit_is_one_line(run: Toy) -> None:
    run.fit(4)

    def wrap(trainer: Any) -> Any:
        trainer.scores = torch.zeros(3, 3)
        return trainer

    with pytest.raises(CheckpointError, match=r"does not fit this trainer: RuntimeError.*; resume with"):
        run.fit(6, resume=Store(run.folder).latest(), wrap=wrap)


def test_batches_without_a_position_cannot_go_on(run: Toy, tmp_path: Path) -> None:
    run.fit(4)
    with pytest.raises(CheckpointError, match="position in the data"):
        fit(
            toy.Trainer(toy.Config(), 16, torch.device("cpu")),
            iter([{"x": torch.zeros(1)}]),
            Options(windows=9),
            name="toy",
            resume=Store(run.folder).latest(),
        )


def test_a_state_that_cannot_be_read_back_is_reported_at_the_start(run: Toy) -> None:
    def wrap(trainer: Any) -> Any:
        trainer.state_dict = lambda: {"config": trainer.config}
        return trainer

    with pytest.raises(CheckpointError, match=r"state\['config'\] is a Config, which cannot be read back"):
        run.fit(4, wrap=wrap)
    assert run.trainer.windows == 0


def test_a_checkpoint_that_fails_on_the_way_does_not_end_the_run(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_folder_that_cannot_be_written_into_is_reported_before_the_first_window(run: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc/nowhere"), tmp_path / "file", tmp_path / "file" / "x"):
        run.folder = folder
        with pytest.raises(CheckpointError, match=r"cannot write into .*; name another --folder"):
            run.fit(5, overwrite=True)
        assert run.trainer.windows == 0


# --- services -------------------------------------------------------------------------------------------------------


def test_nothing_but_metrics_is_asked_for_between_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No values of a batch are read, and nothing waits for the device."""
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


def test_timing(run: Toy) -> None:
    run.fit(20, timing_debug=True, checkpoint_every=5)
    lines = {line.split()[1]: line.split() for line in run.said.splitlines() if line.startswith("│")}
    assert set(lines) == {"data", "train", "metrics", "checkpoint"}
    assert lines["train"][3] == "20"
    assert "p95" in run.said
    run.fit(1, overwrite=True)
    assert "p95" not in run.said


def test_the_device_is_waited_for_only_when_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("suite.runtime.timing.synchronize", calls.append)
    for on, count in ((False, 0), (True, 2)):
        phases = Phases(torch.device("cpu"), on)
        for _ in range(2):
            with phases("train"):
                pass
        assert len(calls) == count
        assert list(phases.seconds) == ["train"] * on


def test_quantiles() -> None:
    values = [float(n) for n in range(100)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([3.0], 0.95)) == (50, 95, 3)


@pytest.mark.parametrize(("windows", "said"), [(8, "wrote"), (4, "with fewer windows"), (2, "nothing was written")])
def test_a_trace(run: Toy, tmp_path: Path, windows: int, said: str) -> None:
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


def test_a_trace_that_cannot_be_written_is_reported_at_the_start(run: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfsuiteError, match="profile: cannot write"):
        run.fit(8, profile=str(tmp_path / "file" / "t.json"))
    assert run.trainer.windows == 0


def test_tensorboard(run: Toy) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    run.fit(25, tensorboard=True, tensorboard_every=5, checkpoint_every=10)
    run.fit(40, tensorboard=True, tensorboard_every=5, resume=Store(run.folder).latest())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [e.step for e in events.Scalars("loss")] == [5, 10, 15, 20, 30, 35]


def test_tensorboard_shows_one_run_of_a_folder(run: Toy) -> None:
    """It shows neither another run's values there, nor the window at which a resumed run begins."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
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


def test_without_tensorboard_it_is_one_line(run: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(PerfsuiteError, match=r"needs the package tensorboard.*pip install 'perfsuite\[train\]'"):
        run.fit(5, tensorboard=True)


def test_tensorboard_needs_a_folder() -> None:
    trainer = toy.Trainer(toy.Config(), 16, torch.device("cpu"))
    batches: Iterator[Any] = iter([])
    with pytest.raises(PerfsuiteError, match="name one with --folder"):
        fit(trainer, batches, Options(tensorboard=True))


def test_the_bar_of_a_terminal(tmp_path: Path) -> None:
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


def test_rate() -> None:
    rate = Rate(seconds=5)
    assert rate.value() is None
    for second in range(20):
        rate.add(float(second), 100 * second if second < 10 else 1000 + 50 * (second - 10))
    assert rate.value() == 50
    assert [quantity(v) for v in (7, 1234, 2.5e6, 3e9)] == ["7", "1.23k", "2.5M", "3G"]
    assert [quantity(v) for v in (999.4, 999.6, 999_600, 1e12)] == ["999", "1k", "1M", "1T"]


@pytest.mark.parametrize("wrong", [{"windows": -1}, {"keep": 0}, {"seconds": float("nan")}])
def test_options_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Options(**wrong)
