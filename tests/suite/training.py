"""Helpers shared by the tests of `suite`: the toy trainer in this process or in a separate one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import toy
from rich.console import Console

from suite.runtime import Checkpoint, Options, Outcome, fit
from suite.runtime.checkpoints import rng_state
from suite.text import Batches, synthetic

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(toy.__file__)
SMALL = ("--synthetic", "64", "--vocabulary", "16", "--sequence_length", "8", "--batch_size", "4", "--device", "cpu")


class Toy:
    """Runs the toy trainer with `fit` and keeps its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.trainer: Any = None
        self.said = ""

    def fit(
        self,
        windows: int | None,
        *,
        seed: int = 0,
        resume: Path | None = None,
        overwrite: bool = False,
        wrap: Callable[[Any], Any] = lambda trainer: trainer,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Outcome:
        """Train as in a new process: all random generators are seeded with `seed`."""
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        chosen = toy.Config(**(config or {}))
        self.trainer = wrap(toy.Trainer(chosen, 16, torch.device("cpu")))
        out = StringIO()
        try:
            return fit(
                self.trainer,
                Batches(synthetic(16, 8, 64), 4),
                Options(windows=windows, folder=str(self.folder), **options),
                name="toy",
                configuration={"eta_update": chosen.eta_update},
                resume=resume,
                overwrite=overwrite,
                console=Console(file=out, width=200),
            )
        finally:
            self.said = out.getvalue()


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a subprocess that imports this checkout first."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/suite")])
    given = {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **given, "CUDA_VISIBLE_DEVICES": "", **more}


def started(*arguments: str, small: bool = True) -> subprocess.Popen[str]:
    """Start `perfsuite train toy` in a separate process; skip the test if a library is missing."""
    for library in ("jsonargparse", "yaml"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install 'perfsuite[train]'")
    command = [sys.executable, str(PROGRAM), *arguments, *(SMALL if small else ())]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def made(windows: int = 1, **changes: Any) -> Checkpoint:
    found = Checkpoint(
        name="toy",
        windows=windows,
        items=32 * windows,
        trainer={"weights": torch.arange(1000.0) + windows, "layers": [(1, None, "x")]},
        batches={"epoch": 0},
        configuration={"eta_update": 0.1},
        rng=rng_state(),
    )
    return replace(found, **changes)
