"""The fields of a task, from a file or made in memory, from which the latents of ups are encoded.

source: ups, technique 002 (data)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import permutation
from suite.building import Array, digest_of, digest_of_file
from suite.ups import advection, darcy
from suite.ups.fields import Fields, Normalisation

STEADY_DT = 1.0
"""Time step of a task without time: any number that is no time step of the other task."""
SYNTHETIC_BETA = 1.0


@dataclass(frozen=True, kw_only=True)
class TaskFields:
    """The normalised fields of a task, sample by sample.

    A sample is a sequence of states: the frames of advection, or (a, u) of Darcy flow. Each state but the last forms an
    example with the next one.
    """

    task: str
    name: str
    """Name for messages: the file, or a note that the fields were made in memory."""
    train: tuple[int, ...]
    """Samples to train on; no sample is in both splits."""
    validation: tuple[int, ...]
    states: int
    """States per sample."""
    dt: float
    """Time from a state to the next, in s."""
    points: torch.Tensor
    """float32 [*grid, d]: the cells' centres."""
    normalisations: tuple[Normalisation, Normalisation]
    """Normalisations of the first state and of the later ones; the same for advection."""
    digest: str
    """Digest of the file's bytes, or of the settings that the fields were made from."""
    read: Callable[[int], torch.Tensor]
    """A sample's number → its states, float32 [states, *grid], normalised."""
    path: Path | None = None
    """The file, if there is one."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Cells in each direction."""
        return tuple(self.points.shape[:-1])

    @property
    def samples(self) -> int:
        """Number of samples of both splits."""
        return len(self.train) + len(self.validation)

    def at(self, sample: int, state: int) -> torch.Tensor:
        """Return one state, float32 [*grid]."""
        return self.read(sample)[state]


@dataclass(frozen=True)
class _OfFile:
    """Reads the samples of a file."""

    fields: Fields

    def __call__(self, sample: int) -> torch.Tensor:
        ins, outs = self.fields.raw(sample)
        if self.fields.file.task == "advection1d":
            return self.fields.before.apply(torch.from_numpy(ins))
        both = (self.fields.before.apply(torch.from_numpy(ins)), self.fields.after.apply(torch.from_numpy(outs)))
        return torch.stack(both)


@dataclass(frozen=True)
class _InMemory:
    """Reads the samples of a tensor."""

    states: torch.Tensor

    def __call__(self, sample: int) -> torch.Tensor:
        return self.states[sample]


def from_file(path: str | Path, task: str, *, validation: float, seed: int) -> TaskFields:
    """Open a file of PDEBench's layout; PerfsuiteError if it is invalid or of another task."""
    fields = Fields(path, validation=validation, seed=seed)
    file = fields.file
    if file.task != task:
        raise PerfsuiteError(f"data: {path} is of {file.task}, where {task} is needed; name another file")
    dt = float(file.times[1] - file.times[0]) if task == "advection1d" else STEADY_DT
    return TaskFields(
        task=task,
        name=str(path),
        train=tuple(fields.samples["train"]),
        validation=tuple(fields.samples["validation"]),
        states=file.frames if task == "advection1d" else 2,
        dt=dt,
        points=fields.points.reshape(*file.shape, len(file.shape)),
        normalisations=(fields.before, fields.after),
        digest=digest_of_file(Path(path)),
        read=_OfFile(fields),
        path=Path(path),
    )


def synthetic(task: str, *, samples: int, cells: int, frames: int, validation: float, seed: int) -> TaskFields:
    """Make a few samples in memory, of the same equations as the files of `perfsuite data pde`.

    cells   number of cells in each direction
    frames  number of frames of advection: the first of the 201
    """
    if task == "advection1d":
        solved = [advection.solution(advection.drawn(seed, i), SYNTHETIC_BETA, cells)[:frames] for i in range(samples)]
        dt = advection.FRAME_S
    else:
        coefficients = [darcy.coefficient(seed, i, cells) for i in range(samples)]
        solved = [numpy.stack((a, darcy.solve(a, SYNTHETIC_BETA))) for a in coefficients]
        dt = STEADY_DT
    states = torch.from_numpy(numpy.stack(solved))
    order = permutation(samples, seed, 0, "cpu").tolist()
    held = min(max(round(validation * samples), 1), samples - 1)
    train = sorted(order[held:])
    if task == "advection1d":
        both = (_normalisation(states[train]),) * 2
        normalised = both[0].apply(states)
    else:
        both = (_normalisation(states[train, 0]), _normalisation(states[train, 1]))
        normalised = torch.stack([both[i].apply(states[:, i]) for i in range(2)], 1)
    grid = numpy.meshgrid(*[advection.centres(cells)] * (1 if task == "advection1d" else 2), indexing="ij")
    settings = {"task": task, "samples": samples, "cells": cells, "frames": frames, "seed": seed}
    return TaskFields(
        task=task,
        name=f"{samples} samples of {task} made in memory",
        train=tuple(train),
        validation=tuple(sorted(order[:held])),
        states=normalised.shape[1],
        dt=dt,
        points=torch.from_numpy(numpy.stack(grid, -1)).float(),
        normalisations=both,
        digest=digest_of({**settings, "validation": validation}),
        read=_InMemory(normalised.float()),
    )


def token_grid(task: str, tokens: int) -> tuple[int, ...]:
    """Return the tokens along each dimension: (tokens,) on a line, the factors nearest to a square on a plane."""
    if task == "advection1d":
        return (tokens,)
    columns = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    return (tokens // columns, columns)


def check_grid(fields: TaskFields, tokens: int) -> None:
    """Raise PerfsuiteError if the cells of a grid do not divide into the tokens."""
    wanted = token_grid(fields.task, tokens)
    if any(cells % count for cells, count in zip(fields.grid, wanted, strict=True)):
        actual, asked = (" x ".join(map(str, sizes)) for sizes in (fields.grid, wanted))
        raise PerfsuiteError(
            f"tokens={tokens}: {fields.name} has {actual} cells, which do not divide into {asked} tokens; "
            "use another number of tokens, or other fields"
        )


def _normalisation(values: Array | torch.Tensor) -> Normalisation:
    given = torch.as_tensor(values).double()
    return Normalisation(mean=float(given.mean()), std=float(given.std(correction=0)))
