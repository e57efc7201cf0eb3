"""Interface of the training loop: trainers and batches that it takes, its options, and its outcome."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from perfsuite.errors import PerfsuiteError

SEEDS = 2**63
"""torch's generators take no larger seed."""


class Trainer(Protocol):
    """Interface of a trainer.

    It may also have the following members. `last_metrics()` is like `metrics`, but waits for the last queued window. It
    is called before a checkpoint is written, so that none replaces a good one after a window that diverged.
    `window_name` is the user's word for a window, "epoch" for instance. `settles` is the number of windows after which
    nothing is compiled or captured any more, by default 1. `stops()` is called before each window. It returns the
    reason why the training should end, in words, or None; all ranks must return it at the same window.
    """

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Queue one window's work, with the batch on the CPU. It need not wait for the device."""

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of a window that has finished, usually the previous one; None if there are none yet.

        "loss", if present, must be finite; if it is not, "step" may give the step. "window" may give the window that
        they belong to, counted from 1 over the whole training. Without it they are assumed to lag by as many windows
        as returned None.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next window depends on, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, bitwise."""


@runtime_checkable
class Resumable(Protocol):
    """Batches that can save and restore their position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Counted(Protocol):
    """Batches that know the number of items in a batch, and the number of batches."""

    unit: str
    """Plural noun for the items that `items` counts."""
    total: int
    """Number of batches in all, including those before a resume."""

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of items in a batch, without reading values on a device."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fields of every configuration that concern the run and not the trainer."""

    windows: int | None = None
    """Windows in all, including those before a resume; null: until interrupted."""
    seconds: float | None = None
    """Seconds after which this run ends."""
    seed: int = 0
    folder: str | None = None
    """Folder for checkpoints, metrics and TensorBoard's files."""
    checkpoint_every: int = 1000
    """Windows between two checkpoints; 0: only at the end."""
    keep: int = 3
    """Checkpoints to keep, in addition to those whose loss is not known yet."""
    tensorboard: bool = False
    tensorboard_every: int = 10
    timing_debug: bool = False
    """Print seconds per phase at the end. It waits for the device after each phase, which slows the run."""
    profile: str | None = None
    """File into which a Chrome trace of a few windows is written."""

    def __post_init__(self) -> None:
        least = {"windows": 0, "seconds": 0, "seed": 0, "checkpoint_every": 0, "keep": 1, "tensorboard_every": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ValueError(f"{name} must be {bound} or more, got {value}")
        if self.seed >= SEEDS:
            raise ValueError(f"seed must be less than 2^63, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a run."""

    windows: int
    items: int
    seconds: float
    metrics: Mapping[str, float] | None
    checkpoint: Path | None
    signal: signal.Signals | None

    @property
    def exit_code(self) -> int:
        """0, or 128 plus the number of the signal that ended the run."""
        return 0 if self.signal is None else 128 + int(self.signal)


class DivergedError(PerfsuiteError):
    """The loss is NaN or infinite."""
