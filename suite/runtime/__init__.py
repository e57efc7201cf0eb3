"""Run-time services for any trainer: progress, TensorBoard, checkpoints, resuming, clean shutdown, timing, traces."""

from suite.runtime.checkpoints import Checkpoint, CheckpointError, Store
from suite.runtime.interface import DivergedError, Options, Outcome, Trainer
from suite.runtime.loop import fit

__all__ = ["Checkpoint", "CheckpointError", "DivergedError", "Options", "Outcome", "Store", "Trainer", "fit"]
