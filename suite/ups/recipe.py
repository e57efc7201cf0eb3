"""Recipes for files of PDE samples, and the names that PDEBench gives such files.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from suite.configuration import ConfigurationError
from suite.ups import advection, darcy

TASKS = ("advection1d", "darcy2d")
BETAS = {"advection1d": advection.BETAS, "darcy2d": darcy.BETAS}
NAMES = {"advection1d": "1D_Advection_Sols_beta{beta}.hdf5", "darcy2d": "2D_DarcyFlow_beta{beta}_Train.hdf5"}
"""Task → template of PDEBench's file name for a beta."""
OPTIONS = {"advection1d": "--points", "darcy2d": "--resolution"}
SIZES = {"advection1d": (1024, 32, 16384), "darcy2d": (128, 8, 1024)}
"""Task → number of cells in each direction: (default, minimum, maximum). The default is PDEBench's."""
MOST = 1_000_000
"""Maximum number of samples in a file."""
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one file. The random numbers of a sample depend only on the seed and the sample's index."""

    task: str
    samples: int
    seed: int
    beta: float
    size: int
    """Number of cells in each direction."""

    @property
    def summary(self) -> str:
        """One-line description of the recipe."""
        cells = f"{self.size} x {self.size}" if self.task == "darcy2d" else self.size
        return f"{self.samples} samples of {self.task}, beta {self.beta:g}, {cells} cells"


def recipes(
    *, task: str, samples: int, seed: int, betas: Sequence[str], points: int | None, resolution: int | None
) -> list[Recipe]:
    """Return a recipe for each requested beta, in ascending order. ConfigurationError if an option is invalid.

    betas  numbers from `BETAS` as text, or `all`; an empty sequence means 1
    """
    if task not in TASKS:
        what = f"--task {task}: there is no such task" if task else "--task is missing"
        raise ConfigurationError(f"{what}; give {' or '.join(TASKS)}")
    if not 1 <= samples <= MOST:
        raise ConfigurationError(f"--samples {samples}: give 1 to {MOST}")
    sizes = {"advection1d": points, "darcy2d": resolution}
    for other, given in sizes.items():
        if other != task and given is not None:
            raise ConfigurationError(f"{OPTIONS[other]} {given}: it is an option of {other}; give {OPTIONS[task]}")
    default, least, most = SIZES[task]
    given = sizes[task]
    size = default if given is None else given
    if not least <= size <= most:
        raise ConfigurationError(f"{OPTIONS[task]} {size}: give {least} to {most}")
    return [
        Recipe(task=task, samples=samples, seed=seed, beta=beta, size=size) for beta in _numbers(task, betas or ["1"])
    ]


def file_name(task: str, beta: float) -> str:
    """Return the name that PDEBench gives the file of a task and beta."""
    return NAMES[task].format(beta=float(beta))


def _numbers(task: str, texts: Sequence[str]) -> list[float]:
    known = BETAS[task]
    found: set[float] = set()
    for text in texts:
        if text == ALL:
            found.update(known)
            continue
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if number not in known:
            listed = ", ".join(f"{beta:g}" for beta in known)
            raise ConfigurationError(f"--beta {text}: {task} has no such beta; give {listed} or {ALL}")
        found.add(number)
    return sorted(found)
