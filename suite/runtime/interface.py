"""Interface of the training loop: the trainers and batches that it accepts, its options, and its outcome."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from perfsuite.errors import PerfsuiteError

SEEDS = 2**63
"""torch's generators accept only seeds below this."""


class Trainer(Protocol):
    """Interface of a trainer.

    Optional members:

    last_metrics()  like `metrics`, but waits for the last queued window. The loop calls it before it writes a
                    checkpoint, so that a diverged state does not replace a good checkpoint.
    window_name     the user's word for a window, e.g. "epoch"
    settles         number of windows after which nothing more is compiled or captured; 1 by default
    stops()         reason to end the training, as text, or None. It is called before each window. All ranks must return
                    a reason at the same window.
    """

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Queue the work of one window. The batch is on the CPU. The method need not wait for the device."""

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of a finished window, usually the previous one; None if there are none yet.

        "loss", if present, must be finite, or the run ends; "step" may then give the step for the message. "window" may
        give the metrics' window, counted from 1 over the whole training. Without it, the lag is assumed to be the
        number of windows that returned None.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next window depends on, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state bitwise."""


@runtime_checkable
class Resumable(Protocol):
    """Batches that can save and restore their position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Counted(Protocol):
    """Batches with a known number of items per batch, and a known number of batches."""

    unit: str
    """Plural noun for the items, e.g. "tokens"."""
    total: int
    """Total number of batches, including those before a resume."""

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of items in a batch without reading tensor values from a device."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Configuration fields of the run, which every trainer's configuration has."""

    windows: int | None = None
    """Total number of windows, including those before a resume; null: train until interrupted."""
    seconds: float | None = None
    """Seconds after which this run ends."""
    seed: int = 0
    folder: str | None = None
    """Folder for checkpoints, metrics and TensorBoard's files."""
    checkpoint_every: int = 1000
    """Windows between two checkpoints; 0: write one only at the end."""
    keep: int = 3
    """Number of checkpoints to keep, in addition to those whose next window's loss is not known yet."""
    tensorboard: bool = False
    tensorboard_every: int = 10
    timing_debug: bool = False
    """Print the seconds per phase at the end. This synchronises the device after each phase, which slows the run."""
    profile: str | None = None
    """File for a Chrome trace of a few windows."""

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
