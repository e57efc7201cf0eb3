"""Trains two configurations of a trainer on the same data in alternating slices of windows.

    two arms → slices (A B, B A, A B, …) → Pair, one per seed → `suite.ab_report`

Both trainers live in one process, and neither is ahead of the other by more than one slice, so machine drift affects
both. Each has its own random state, so it learns the same as it would alone. At the end of a slice both have trained on
the same number of items, rounded to whole windows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from suite.ablation import noting
from suite.configuration import ConfigurationError
from suite.runtime import DivergedError
from suite.runtime.checkpoints import restore_rng, rng_state
from suite.runtime.interface import Counted
from suite.runtime.timing import synchronize

Name = Literal["baseline", "optimized"]
Batch = Mapping[str, torch.Tensor]
clock = time.perf_counter
TICK_S = 1e-9
"""Resolution of the clock in seconds, and the minimum duration of a slice."""
WARM_UP = 3
"""First slices, which are excluded from the throughput; a third of all slices if there are fewer than nine."""
LONGEST_S = 30.0
"""Maximum seconds of a pair of slices. In longer ones the machine could drift between the sides."""
LARGEST_UNIT = 64
"""Both sides meet at the same item after at most this many windows of the larger size; otherwise counts are rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One side of the comparison, before its trainer is built."""

    name: Name
    build: Callable[[], Any]
    """Function that builds the trainer."""
    batches: Iterator[Batch]
    limit: int | None = None
    """Maximum number of windows to train."""
    quality: Callable[[Any], Mapping[str, float]] = lambda trainer: {}
    """Function that computes the trained trainer's evaluation metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Consecutive windows that one side trained."""

    windows: int
    items: int
    seconds: float
    """Seconds until the device had finished, including the time for batches and metrics."""
    loss: float | None
    """Mean loss over the windows with a known loss; None if there are none."""
    losses: int
    """Number of windows with a known loss. A trainer that never waits for the device may skip some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One side's training with one seed, up to the last slice that both sides completed."""

    slices: tuple[Slice, ...]
    build_s: float
    peak_bytes: int | None
    """Peak GPU memory in bytes, excluding the other side's; None on a CPU."""
    quality: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Warnings that were raised during build and warm-up."""

    @property
    def items(self) -> int:
        """Number of items trained on."""
        return sum(s.items for s in self.slices)

    @property
    def loss(self) -> float | None:
        """Mean loss of the last slice."""
        return self.slices[-1].loss if self.slices else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Both sides' training with one seed."""

    seed: int
    baseline: Run
    optimized: Run
    item: str = "items"
    """Plural unit of the items: examples, tokens, segments."""
    noun: str = "window"
    """The trainer's word for a window."""

    @property
    def warm_up(self) -> int:
        """Number of first slices of each side that are excluded from the throughput."""
        return warm_up(len(self.baseline.slices))

    def timed(self) -> list[tuple[Slice, Slice]]:
        """Return the pairs (baseline, optimized) of slices that are included in the throughput."""
        both = zip(self.baseline.slices, self.optimized.slices, strict=True)
        return list(both)[self.warm_up :]


def warm_up(slices: int) -> int:
    """Return how many of `slices` slices are excluded from the throughput."""
    return min(slices, WARM_UP, max(1, slices // 3))


class Comparison:
    """Train both arms with one seed.

    slices   approximate number of slices of a training; a long training has more
    seconds  seconds from the end of warm-up until both sides' training ends; None: train to the arms' limits
    stopped  called after each window; if it returns True, training ends there and the current slice is discarded

    ConfigurationError if the training has no end, or the limits are too small for the sides to meet at the same item.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        seed: int,
        device: torch.device,
        slices: int,
        seconds: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._sides = [_Side(arm, device, stopped) for arm in arms]
        self._seed, self._slices, self._seconds = seed, slices, seconds
        self._stopped, self._progress = stopped, progress
        self._unit = unit_of(*(side.items for side in self._sides))
        limits = [side.items * side.arm.limit for side in self._sides if side.arm.limit is not None]
        if limits and self._unit > max(limits):
            windows = " and ".join(str(self._unit // side.items) for side in self._sides)
            raise ConfigurationError(
                f"the sides have trained on equally many items after {windows} windows at the earliest, which is more "
                f"than either may train; raise --windows or the number of steps"
            )
        # A side with one large window may let the other side train beyond its limit.
        self._units = max(1, min(limits) // self._unit) if limits else None
        if self._units is None and seconds is None:
            raise ConfigurationError("the training has no end: set it with --windows or --seconds")

    def run(self) -> None:
        """Build, train and evaluate both sides. DivergedError, with side and window, if a loss is not finite."""
        for side in self._sides:
            if self._stopped():
                return
            side.build(self._seed)
        for number, goal in enumerate(self._goals()):
            order = self._sides if number % 2 == 0 else self._sides[::-1]
            for side in order:
                side.train_to(goal, warm=number < WARM_UP)
                if self._stopped():
                    return
            self._progress(f"seed {self._seed}, slice {number + 1}: {', '.join(s.summary() for s in self._sides)}")
        for side in self._sides:
            side.evaluate()

    def pair(self) -> Pair:
        """Return the slices that both sides have completed so far."""
        whole = min(len(side.slices) for side in self._sides)
        baseline, optimized = (side.run(whole) for side in self._sides)
        first = self._sides[0]
        return Pair(seed=self._seed, baseline=baseline, optimized=optimized, item=first.item, noun=first.noun)

    def _goals(self) -> Iterator[int]:
        """Yield the cumulative number of items per side at the end of each slice."""
        total = sys.maxsize if self._units is None else self._units
        largest = max(1, total // self._slices)
        # Compilation and capture take place in the first slice.
        settled = max(math.ceil(side.settles * side.items / self._unit) for side in self._sides)
        longest_s = LONGEST_S if self._seconds is None else min(LONGEST_S, self._seconds / self._slices)
        done, size, ends = 0, min(settled, largest), math.inf
        for number in itertools.count(1):
            left = total - done
            done += size if left >= 2 * size else left  # the loss of a short last slice would be noisy
            before = clock()
            yield done * self._unit
            now = clock()
            if done == total or now >= ends:
                return
            if number == WARM_UP and self._seconds is not None:
                ends = now + self._seconds
            if now - before < longest_s / 2:
                size = min(2 * size, largest)


def unit_of(*items: int) -> int:
    """Return the items after which windows of these sizes end together; the largest size if that takes too many."""
    together = math.lcm(*items)
    return together if together <= LARGEST_UNIT * max(items) else max(items)


class _Side:
    """An arm with its trainer and its measurements."""

    def __init__(self, arm: Arm, device: torch.device, stopped: Callable[[], bool]) -> None:
        self.arm, self.device = arm, device
        self._stopped = stopped
        first = next(arm.batches, None)
        if first is None:
            raise PerfsuiteError(f"{arm.name}: the data have no batch; name more")
        counted = arm.batches if isinstance(arm.batches, Counted) else None
        self._count: Callable[[Batch], int] = counted.items if counted is not None else _items
        self.item = counted.unit if counted is not None else "tokens" if "input_ids" in first else "items"
        self.items = max(1, self._count(first))
        """Number of items per window."""
        self._batches = itertools.chain([first], arm.batches)
        self.trainer: Any = None
        self.slices: list[tuple[int, int, float]] = []
        """(last window, items, seconds) of each slice."""
        self._windows = 0
        self._lag = 0
        self._losses: dict[int, float] = {}
        self._quality: Mapping[str, float] = {}
        self._notes: list[str] = []
        self._build_s = 0.0
        self._own = _Own(device)

    @property
    def settles(self) -> int:
        """Number of windows after which the trainer compiles and captures nothing more."""
        found: int = getattr(self.trainer, "settles", 1)
        return found

    @property
    def noun(self) -> str:
        found: str = getattr(self.trainer, "window_name", "window")
        return found

    def build(self, seed: int) -> None:
        """Build the trainer with freshly seeded random generators."""
        _seed(seed)
        self._own.take()
        with noting(self._notes), self._own:
            began = clock()
            self.trainer = self.arm.build()
            synchronize(self.device)
            self._build_s = clock() - began

    def train_to(self, goal: int, *, warm: bool) -> None:
        """Train one slice, up to `goal` items in total, rounded to the nearest whole window."""
        last = max(1, (2 * goal + self.items) // (2 * self.items))
        with noting(self._notes) if warm else contextlib.nullcontext(), self._own:
            items = 0
            synchronize(self.device)
            began = clock()
            while self._windows < last:
                items += self._window()
                if self._stopped():
                    return
            synchronize(self.device)
            seconds = max(clock() - began, TICK_S)
            newest = getattr(self.trainer, "last_metrics", None)
            if newest is not None:
                self._look(newest(), self._windows)
        self.slices.append((last, items, seconds))

    def evaluate(self) -> None:
        """Compute the trainer's evaluation metrics."""
        self._quality = {name: float(value) for name, value in self.arm.quality(self.trainer).items()}

    def summary(self) -> str:
        """Describe the last slice as text."""
        _, items, seconds = self.slices[-1]
        loss = self._slice(len(self.slices) - 1).loss
        return f"{self.arm.name} {items / seconds:.4g} {self.item}/s" + ("" if loss is None else f", loss {loss:.4g}")

    def run(self, slices: int) -> Run:
        """Return the record of the training with its first `slices` slices."""
        return Run(
            slices=tuple(self._slice(number) for number in range(slices)),
            build_s=self._build_s,
            peak_bytes=self._own.peak,
            quality=self._quality,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _slice(self, number: int) -> Slice:
        last, items, seconds = self.slices[number]
        first = self.slices[number - 1][0] if number else 0
        losses = [loss for window, loss in self._losses.items() if first < window <= last]
        mean = math.fsum(losses) / len(losses) if losses else None
        return Slice(windows=last - first, items=items, seconds=seconds, loss=mean, losses=len(losses))

    def _window(self) -> int:
        """Train one window and return its number of items."""
        batch = next(self._batches, None)
        if batch is None:
            raise PerfsuiteError(f"{self.arm.name}: the data ended at {self.noun} {self._windows}; lower --windows")
        self.trainer.train_window(batch)
        self._windows += 1
        found = self.trainer.metrics()
        if found is None:
            self._lag += not self._losses
        else:
            self._look(found, int(found.get("window", self._windows - self._lag)))
        return self._count(batch)

    def _look(self, found: Mapping[str, float] | None, window: int) -> None:
        """Record the loss of a window; DivergedError if it is not finite."""
        loss = None if found is None else found.get("loss")
        if loss is None:
            return
        self._losses[window] = float(loss)
        if not math.isfinite(loss):
            noun = self.noun
            raise DivergedError(
                f"{self.arm.name}, {noun} {window}: the loss is {float(loss)}; training has stopped; "
                f"lower the learning rate, or look at that {noun}'s data"
            )


class _Own:
    """Context with one side's random state and cuDNN benchmark flag. It also measures the side's memory.

    Attribute `peak`: peak GPU memory in bytes, excluding the other side's memory; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.peak: int | None = 0 if self._cuda else None
        self._held = self._before = 0
        self._default = torch.backends.cudnn.benchmark
        self.take()

    def take(self) -> None:
        """Save the current random state and flag, from which the side continues."""
        self._rng, self._benchmark = rng_state(), torch.backends.cudnn.benchmark

    def __enter__(self) -> None:
        restore_rng(self._rng)
        torch.backends.cudnn.benchmark = self._benchmark
        if self._cuda:
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *_: object) -> None:
        self.take()
        torch.backends.cudnn.benchmark = self._default
        if self.peak is not None:
            others = self._before - self._held
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - others)
            self._held = torch.cuda.memory_allocated(self._device) - others


def _items(batch: Batch) -> int:
    """Return the number of tokens in `input_ids`, or else the number of rows of the first tensor that has rows."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return next((len(t) for t in batch.values() if t.dim()), 1)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
