"""The fields of a task, from a file or made in memory. The latents of ups are encoded from them.

Source: ups, technique 002 (data)
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

UNEVEN = 1e-3
"""Largest relative difference of the time steps of a file's frames."""
STEADY_DT = 1.0
"""Time step of a steady task. It has no meaning, but must differ from the time steps of the other task."""
SYNTHETIC_BETA = 1.0


@dataclass(frozen=True, kw_only=True)
class TaskFields:
    """The normalised fields of a task.

    A sample is a sequence of states: the frames of advection, or (a, u) of Darcy flow. Two consecutive states form an
    example.
    """

    task: str
    name: str
    """Name in messages: the file, or a note that the fields were made in memory."""
    train: tuple[int, ...]
    """Indices of the training samples. No sample is in both splits."""
    validation: tuple[int, ...]
    """Indices of the validation samples."""
    states: int
    """Number of states per sample."""
    dt: float
    """Time from a state to the next, in s; 1 for Darcy flow."""
    points: torch.Tensor
    """float32 [*grid, d]: the cell centres."""
    normalisations: tuple[Normalisation, Normalisation]
    """Normalisation of the first state, and of the later states. For advection they are the same."""
    digest: str
    """Digest of the file's bytes, or of the settings that the fields were made from."""
    read: Callable[[int], torch.Tensor]
    """Index of a sample → its normalised states, float32 [states, *grid]."""
    path: Path | None = None
    """The file, if there is one."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of cells in each direction."""
        return tuple(self.points.shape[:-1])

    @property
    def samples(self) -> int:
        """Number of samples in both splits together."""
        return len(self.train) + len(self.validation)

    def at(self, sample: int, state: int) -> torch.Tensor:
        """Return one normalised state, float32 [*grid]."""
        return self.read(sample)[state]


@dataclass(frozen=True)
class _OfFile:
    """Function that reads a sample from a file."""

    fields: Fields

    def __call__(self, sample: int) -> torch.Tensor:
        ins, outs = self.fields.raw(sample)
        if self.fields.file.task == "advection1d":
            return self.fields.before.apply(torch.from_numpy(ins))
        both = (self.fields.before.apply(torch.from_numpy(ins)), self.fields.after.apply(torch.from_numpy(outs)))
        return torch.stack(both)


@dataclass(frozen=True)
class _InMemory:
    """Function that reads a sample from a tensor."""

    states: torch.Tensor

    def __call__(self, sample: int) -> torch.Tensor:
        return self.states[sample]


def from_file(path: str | Path, task: str, *, validation: float, seed: int) -> TaskFields:
    """Open a file in PDEBench's layout.

    PerfsuiteError if it is invalid or belongs to another task, or if its frames are not evenly spaced in time.
    """
    fields = Fields(path, validation=validation, seed=seed)
    file = fields.file
    if file.task != task:
        raise PerfsuiteError(f"data: {path} is of {file.task}, where {task} is needed; name another file")
    dt = STEADY_DT
    if task == "advection1d":
        between = numpy.diff(file.times)
        dt = float(between[0])
        if not numpy.allclose(between, dt, rtol=UNEVEN, atol=0):
            raise PerfsuiteError(
                f"data: {path} has frames {between.min():.3g} to {between.max():.3g} s apart; the trainer needs even "
                "steps"
            )
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
    """Make samples in memory, from the same equations as the files of `perfsuite data pde`.

    cells   number of cells in each direction
    frames  number of frames of an advection sample, which are the first of its 201 frames
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
    """Return the number of tokens along each dimension: (tokens,) in 1-D, the two most equal factors in 2-D."""
    if task == "advection1d":
        return (tokens,)
    columns = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    return (tokens // columns, columns)


def check_grid(fields: TaskFields, tokens: int) -> None:
    """Raise PerfsuiteError if the cells of the grid do not divide evenly into the tokens."""
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
