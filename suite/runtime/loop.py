"""The training loop around a trainer. Between windows it does not wait for the device; it only calls `metrics()`."""

from __future__ import annotations

import math
import os
import platform
import reprlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perfsuite.errors import PerfsuiteError
from perfsuite.system import host
from suite import terminal
from suite.launching import LAUNCHED
from suite.naming import escaped, shown
from suite.runtime import checkpoints
from suite.runtime.checkpoints import OLD, Checkpoint, CheckpointError, Start, Store
from suite.runtime.curve_log import FILE, CurveLog
from suite.runtime.display import Display, board, quantity
from suite.runtime.interface import Counted, DivergedError, Options, Outcome, Resumable, Trainer
from suite.runtime.locking import only_one
from suite.runtime.ranges import phase
from suite.runtime.stopping import Stopping
from suite.runtime.timing import Phases, Trace, synchronize
from suite.runtime.together import ALONE, Place, Together

SILENT = 8
"""Number of windows without metrics after which a trainer is assumed to report none."""

OVER = 1
"""Stop request of a rank whose time limit has passed. Other requests are signal numbers, which are larger."""


def fit(
    trainer: Trainer,
    batches: Iterator[Mapping[str, torch.Tensor]],
    options: Options,
    *,
    name: str = "trainer",
    device: torch.device | str = "cpu",
    configuration: Mapping[str, Any] | None = None,
    resume: Path | Start | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    place: Place = ALONE,
) -> Outcome:
    """Train until a limit in `options` is reached, the batches end, the trainer stops or a signal arrives; then save.

    With several ranks, each rank calls this function with its `place`, and all end after the same window. Only rank 0
    writes files and prints.

    `resume` is a checkpoint file from which training continues bitwise. If the folder contains checkpoints, `resume` or
    `overwrite` is required. Checkpoints later than the resumed one are renamed to `*.old`, as described in `Store`; if
    no checkpoint of the folder is resumed, all are renamed.

    Raise DivergedError if the loss is not finite. Raise CheckpointError if a checkpoint cannot be read or written, or
    if another run is writing into the folder.
    """
    if not place.first:
        console = Console(quiet=True)
    run = _Run(trainer, batches, options, name, torch.device(device), dict(configuration or {}), console, place)
    with held(options) if place.first else nullcontext():
        run.begin(Start(resume) if isinstance(resume, Path) else resume, overwrite)
        return run.go()


def held(options: Options) -> AbstractContextManager[None]:
    """Return a context that locks the run's folder, if the run writes into one; see `only_one`."""
    return only_one(Path(options.folder)) if options.folder and options.windows != 0 else nullcontext()


class _Run:
    """One call of `fit`."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterator[Mapping[str, torch.Tensor]],
        options: Options,
        name: str,
        device: torch.device,
        configuration: dict[str, Any],
        console: Console | None,
        place: Place,
    ) -> None:
        self.place, self.together = place, Together(place)
        self.trainer = trainer
        self.batches = batches
        self.options = options
        self.name = name
        self.device = device
        self.configuration = configuration
        self.console = console or terminal.console()
        self.store = Store(options.folder, options.keep) if options.folder and place.first else None
        self.windows = 0
        self.items = 0
        self.unit = batches.unit if isinstance(batches, Counted) else "items"
        self.noun = getattr(trainer, "window_name", "window")
        self.lag = 0
        self.metrics: Mapping[str, float] | None = None
        self.saved: Path | None = None
        self.saved_windows = -1
        self.reached: int | None = -1
        """Windows of the resumed checkpoint if it is in the folder, else -1; None once later ones are renamed."""
        self.doubtful: list[tuple[int, Path]] = []
        """(windows, file) of checkpoints whose next window's loss is unknown: they replace none. The weights before a
        window determine its loss. A checkpoint is removed if the loss of its own last window is not finite."""
        self._say: Callable[[str], None] = partial(self.console.print, soft_wrap=True, markup=False, highlight=False)
        """Prints a line for the user, above the progress bar if there is one."""
        self.writer: Any = None
        self.log: CurveLog | None = None
        self.due = 0
        self.why: str | None = None
        """Reason that the trainer gave for ending the run."""
        self.phases = Phases(device, options.timing_debug)
        profile = Path(options.profile) if options.profile and place.first else None
        self.trace = Trace(profile, device, lambda text: self._say(text))  # `_say` changes when the display opens

    def begin(self, resume: Start | None, overwrite: bool) -> None:
        """Load the checkpoint to resume. Without one, refuse a folder that contains checkpoints unless `overwrite`."""
        if self.options.tensorboard and not self.options.folder:
            raise PerfsuiteError("tensorboard: true needs a folder for its files; name one with --folder")
        if self.options.folder:
            checkpoints.check(self.trainer.state_dict(), "the trainer's state")  # fail now, not after hours
        if resume is not None:
            self._resume(resume)
            self.together.check_begin(self.windows)
        elif self.store is not None and not overwrite:
            self.store.refuse_others()
        if self.store is not None and self.options.windows != 0:
            self.store.tidy()

    def _resume(self, start: Start) -> None:
        path, found = start.path, start.take(self.name)
        fits = partial(_fitting, path)
        with fits("this trainer", "resume with the configuration that it was made with"):
            self.trainer.load_state_dict(found.trainer)
        if found.batches is not None and isinstance(self.batches, Resumable):
            with fits("these data", "resume with those that it was made with"):
                self.batches.load_state_dict(found.batches)
        elif found.batches is not None:
            raise CheckpointError(
                f"{shown(path)} knows a position in the data, which these batches cannot take over; "
                "resume with the data that it was made with"
            )
        for field in sorted(found.configuration.keys() & self.configuration.keys()):
            before, now = found.configuration[field], self.configuration[field]
            if before != now:
                self._say(f"resumed with another {field}: {_brief(now)}, before {_brief(before)}")
        self.windows, self.items, self.saved, self.saved_windows = found.windows, found.items, path, found.windows
        if self.store is not None and self.store.holds(path):
            self.reached = found.windows
        with fits("the generators of random numbers", "resume from another"):  # last: the steps above may draw
            checkpoints.restore_rng(found.rng)

    def go(self) -> Outcome:
        options, started, first = self.options, time.monotonic(), self.windows
        with ExitStack() as stack:
            self._open_logs(stack)
            end = self._end()
            display = stack.enter_context(Display(self.console, self.name, end, self.windows, self.unit, self.noun))
            self._say = display.say
            launched = LAUNCHED in os.environ
            stop = stack.enter_context(Stopping(display.leave, self.noun, once=launched))
            asked = self._train(display, stop, started, end)
            self._end_trace()
            with self.phases("checkpoint"):
                self._save(last=True)
            synchronize(self.device)
            seconds = time.monotonic() - started
        if options.timing_debug:
            self.console.print(self.phases.table())
        if self.trace.hotspots is not None:
            self.console.print(self.trace.hotspots.table())
            self._say(self.trace.hotspots.advice())
        by = signal.Signals(asked) if asked > OVER else stop.signal
        self._finish(first, seconds, by)
        return Outcome(
            windows=self.windows,
            items=self.items,
            seconds=seconds,
            metrics=self.metrics,
            checkpoint=self._newest(),
            signal=by,
        )

    def _end(self) -> int | None:
        """Return the number of windows after which the run ends; None if it has no such limit."""
        counted = self.batches.total if isinstance(self.batches, Counted) else None
        return min((n for n in (self.options.windows, counted) if n is not None), default=None)

    def _open_logs(self, stack: ExitStack) -> None:
        options = self.options
        if self.store is not None:
            kept = self.windows if self.reached != -1 else 0  # otherwise the folder's curve belongs to another run
            self.log = CurveLog(self.store.folder, kept, self._about())
            stack.callback(self._logged, self.log.close)
        if options.tensorboard and self.store is not None:
            self.writer = stack.enter_context(board(self.store.folder / "tensorboard", self.windows))
            self.due = (self.windows // options.tensorboard_every + 1) * options.tensorboard_every

    def _train(self, display: Display, stop: Stopping, started: float, end: int | None) -> int:
        """Train windows until the run ends. Return the ranks' stop request that ended it, or 0."""
        options = self.options
        while options.windows is None or self.windows < options.windows:
            over = options.seconds is not None and time.monotonic() - started >= options.seconds
            asked = self.together.ends(int(stop.signal or (OVER if over else 0)))
            self.why = getattr(self.trainer, "stops", _never)()
            if asked or self.why is not None:
                return asked
            self.trace.before()
            with self.phases("data"), phase("data"):
                batch = next(self.batches, None)
            if batch is None:
                return asked
            self._window(batch, display)
            display.show(self.windows, end, self.items, self.metrics)
        return 0

    def _window(self, batch: Mapping[str, torch.Tensor], display: Display) -> None:
        """Train one window, process its metrics, and write a checkpoint if one is due."""
        every = self.options.checkpoint_every
        with self.phases("train"), phase("train"):
            self.trainer.train_window(batch)
        self.windows += 1
        self._count(batch, display)
        with self.phases("metrics"):
            self._look(self.trainer.metrics())
        if self.trace.after():
            self._say(f"profile: wrote {shown(self.options.profile or '')}")
        if every and self.windows % every == 0 and self.windows != self._end():  # the end of the run saves anyway
            with self.phases("checkpoint"):
                self._save(last=False)

    def _end_trace(self) -> None:
        profile = self.options.profile
        if self.trace.close():
            self._say(f"profile: wrote {shown(profile or '')}, with fewer windows: the run has ended")
        elif profile and self.trace.written is None and not self.trace.failed:
            self._say("profile: nothing was written, the run was too short: a trace begins after two windows")

    def _count(self, batch: Mapping[str, torch.Tensor], display: Display) -> None:
        """Add a batch's items, from sizes only: the batches' own count, else tokens, else the first tensor's rows."""
        if isinstance(self.batches, Counted):
            self.items += self.batches.items(batch)
        elif "input_ids" in batch:
            self.unit = display.unit = "tokens"
            self.items += batch["input_ids"].numel()
        else:
            self.items += next((len(t) for t in batch.values() if t.dim()), 0)

    def _look(self, found: Mapping[str, float] | None) -> None:
        """Process new metrics; DivergedError if the loss is not finite."""
        if found is None:
            self.lag += self.metrics is None
            return
        window = int(found.get("window", self.windows - self.lag))
        self._judge(found, window)
        self.metrics = found
        self._trust(window)
        self._show(found, window)

    def _about(self) -> dict[str, Any]:
        """Return the content of run.json: the trainer, the machine and the configuration."""
        on_gpu = self.device.type == "cuda"
        return {
            "trainer": self.name,
            "window": self.noun,
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else host.cpu_model(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "ranks": self.place.ranks,
            "configuration": self.configuration,
        }

    def _logged(self, call: Callable[[], object]) -> None:
        """Call a method of the curve log, if there is one; an OSError ends logging."""
        if self.log is not None:
            try:
                call()
            except OSError as error:
                self._end_log(error)

    def _end_log(self, error: OSError) -> None:
        """Stop logging after an error; the training continues without its curve."""
        self.log = None
        self._say(f"{FILE}: cannot write: {error.strerror or error}; the run goes on without")

    def _show(self, found: Mapping[str, float], window: int) -> None:
        """Write metrics to the curve log, and to TensorBoard if it is due."""
        if self.log is not None:
            self._logged(partial(self.log.add, window, found))
        if self.writer is not None and window >= self.due:
            self.due = (window // self.options.tensorboard_every + 1) * self.options.tensorboard_every
            try:
                for key, value in found.items():
                    if key != "window":
                        self.writer.add_scalar(key, float(value), window)
            except OSError as error:  # from the writer's thread; the training continues
                self.writer = None
                self._say(f"tensorboard: cannot write: {error.strerror or error}; the run goes on without")

    def _judge(self, found: Mapping[str, float], window: int) -> None:
        loss = found.get("loss")
        if loss is not None and not math.isfinite(loss):
            while self.doubtful and self.doubtful[-1][0] >= window:
                with suppress(OSError):
                    self.doubtful.pop()[1].unlink()
            where = f"{self.noun} {window}" + (f", step {int(found['step'])}" if "step" in found else "")
            raise DivergedError(f"{where}: the loss is {float(loss)}; training has stopped{self._kept()}")

    def _trust(self, window: int) -> None:
        """Mark the checkpoints before this window as good, since the loss that follows from them is finite."""
        while self.doubtful and self.doubtful[0][0] < window:
            _, self.saved = self.doubtful.pop(0)
            if self.store is not None:
                self.store.prune(self.saved, more=len(self.doubtful))

    def _kept(self) -> str:
        newest = self._newest()
        good = f"the last checkpoint is {shown(newest)}" if newest else "no checkpoint was written"
        if not self.place.first and self.saved_windows > 0:  # written by rank 0
            good = f"the last checkpoint is of {self.noun} {self.saved_windows}"
        # The newest checkpoint may have diverged already: it may have been the start of that window.
        several = self.store is None or len(self.store.files()) > 1
        before = ", or the one before if that fails at once" if several and (newest or self.saved_windows > 0) else ""
        return f"; {good}{before}; lower the learning rate, or look at that {self.noun}'s data"

    def _newest(self) -> Path | None:
        """Return the latest checkpoint that this run has written, else the one that it resumed, else None."""
        return self.doubtful[-1][1] if self.doubtful else self.saved

    def _save(self, *, last: bool) -> None:
        """Write a checkpoint. During the run, a failure is only reported; at the end it is raised."""
        if self.windows == self.saved_windows or self.windows == 0:
            return
        newest = getattr(self.trainer, "last_metrics", None)
        if newest is not None and (found := newest()) is not None:
            self._judge(found, self.windows)
            self._trust(self.windows)
            if last:
                self.metrics = found
                self._show(found, self.windows)
        if not self.options.folder:
            return
        if self.log is not None:
            self._logged(self.log.flush)
        state = self.trainer.state_dict()
        written = self.store is None or self._write(self.store, state, last=last)
        if self.together.by_first(written):
            self.saved_windows = self.windows

    def _write(self, store: Store, state: dict[str, Any], *, last: bool) -> bool:
        """Write a checkpoint of this state. Return True on success."""
        try:
            checkpoints.check(state, "the trainer's state")
        except checkpoints.NotANumberError as error:
            raise DivergedError(f"{self.noun} {self.windows}: {error}; training has stopped{self._kept()}") from None
        made = Checkpoint(
            name=self.name,
            windows=self.windows,
            items=self.items,
            trainer=state,
            batches=self.batches.state_dict() if isinstance(self.batches, Resumable) else None,
            configuration=self.configuration,
            rng=checkpoints.rng_state(),
        )
        silent = self.metrics is None and self.lag >= SILENT
        try:
            self._leave_behind(store)
            path = store.save(made, more=0 if silent else len(self.doubtful) + 1)
        except CheckpointError as error:
            if last:
                raise
            self._say(f"{error}; the run goes on")
            return False
        if silent:
            self.saved = path
            self.doubtful.clear()
        else:
            self.doubtful.append((self.windows, path))
        return True

    def _leave_behind(self, store: Store) -> None:
        """Before the first save, rename checkpoints of another run, or of windows trained again, to `*.old`."""
        if self.reached is None:
            return
        if later := store.leave_behind(self.reached):
            names = ", ".join(path.name for path in later)
            self._say(
                f"in {shown(store.folder)}, renamed to *{OLD}, since they are of later windows or another run: {names}"
            )
        self.reached = None

    def _finish(self, first: int, seconds: float, by: signal.Signals | None) -> None:
        line = f"{self.name}: {self.windows} {self.noun}{'s' * (self.windows != 1)}"
        line += f", {self.windows - first} of them in this run," if first else ""
        line += f" in {seconds:.1f} s"
        if self.metrics is not None and "loss" in self.metrics:
            line += f", loss {float(self.metrics['loss']):.6g}"
        line += f", {quantity(self.items)} {self.unit} in all" if self.items else ""
        if by is None and self.windows == first and 0 < (self.options.windows or 0) <= first:
            line += f"; windows: {self.options.windows} is reached already; raise it"
        elif by is None and self.windows == first and (ended := getattr(self.batches, "ended", None)):
            line += f"; {ended}"
        line += f"; {self.why}" if self.why is not None else ""
        self._say(line + (f"; ended by {by.name}" if by else ""))
        if newest := self._newest():
            self._say(f"checkpoint: {shown(newest)}")


def _never() -> None:
    """Default for `stops` of a trainer that never ends the run itself."""


@contextmanager
def _fitting(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Turn any error into a CheckpointError, since loading a part of a checkpoint may raise any type."""
    try:
        yield
    except PerfsuiteError as error:
        raise CheckpointError(f"{shown(path)}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        kind = type(error).__name__
        raise CheckpointError(f"{shown(path)} does not fit {what}: {kind}: {reason}; {remedy}") from None


def _brief(value: object) -> str:
    """Return a field's value as text of at most 200 characters, since a damaged checkpoint may contain a long one."""
    return escaped(str(value) if type(value) in (bool, int, float, str, type(None)) else reprlib.repr(value))[:200]
