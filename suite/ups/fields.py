"""The fields of one data file: the split of its samples, their normalisation, and batches of examples.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import permutation
from suite.building import Array
from suite.ups.pdebench import Examples, PdeFile, open_pde

SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Affine normalisation z = (u - mean) / std."""

    mean: float
    std: float

    def apply(self, u: torch.Tensor) -> torch.Tensor:
        """Normalise a tensor of any shape."""
        return (u - self.mean) / self.std

    def undo(self, z: torch.Tensor) -> torch.Tensor:
        """Apply the inverse of `apply`."""
        return z * self.std + self.mean


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B examples of one task."""

    task: str
    before: torch.Tensor
    """float32 [B, *grid], normalised: u at one time, or the coefficient a of Darcy flow."""
    after: torch.Tensor
    """float32 [B, *grid], normalised: u at the next time, or the solution u of Darcy flow."""
    times: torch.Tensor
    """Times of `before`, in s, float32 [B]; 0 for Darcy flow."""
    points: torch.Tensor
    """Cell centres at which a decoder is queried, float32 [N, dimensions]; row i is for `before.flatten(1)[:, i]`."""


class Fields:
    """Training and validation examples of one file.

    All frames of a sample are in the same split. The seed, the number of samples and `validation` determine the splits.
    """

    def __init__(self, path: str | Path, *, validation: float = 0.1, seed: int = 0) -> None:
        """Open a file, and read all its training samples to compute their mean and standard deviation.

        validation  fraction of the samples used for validation; each split has at least one sample

        PerfsuiteError if the file is invalid, has too few samples, or all its training samples have the same value.
        """
        self.file: PdeFile = open_pde(path)
        if not 0 < validation < 1:
            raise PerfsuiteError(f"validation: {validation} is out of range; give more than 0 and less than 1")
        if self.file.samples < len(SPLITS):
            raise PerfsuiteError(
                f"data: {path} has {self.file.samples} sample, where training and validation need one each; "
                "make more with `perfsuite data pde --samples`"
            )
        order = permutation(self.file.samples, seed, 0, "cpu").tolist()
        held = min(max(round(validation * len(order)), 1), len(order) - 1)
        self.samples: dict[str, list[int]] = {"train": sorted(order[held:]), "validation": sorted(order[:held])}
        self._examples = Examples(self.file)
        self.before, self.after = self._normalisations()
        grid = numpy.meshgrid(*self.file.coordinates, indexing="ij")
        self.points = torch.from_numpy(numpy.stack([axis.reshape(-1) for axis in grid], axis=1).astype(numpy.float32))

    def count(self, split: str) -> int:
        """Return the number of examples of a split."""
        return len(self.samples[split]) * self._examples.of_a_sample

    def batch(self, split: str, indices: Sequence[int]) -> Batch:
        """Return the examples at `indices` on the CPU. IndexError if an index is outside 0 to count(split) - 1."""
        examples = [self._examples[self._place(split, index)] for index in indices]
        before = torch.from_numpy(numpy.stack([e.before for e in examples]))
        after = torch.from_numpy(numpy.stack([e.after for e in examples]))
        return Batch(
            task=self.file.task,
            before=self.before.apply(before),
            after=self.after.apply(after),
            times=torch.tensor([e.time for e in examples], dtype=torch.float32),
            points=self.points,
        )

    def raw(self, sample: int) -> tuple[Array, Array]:
        """Return all (inputs, outputs) of a sample of the file, float32 and not normalised."""
        return self._examples.fields(sample)

    def close(self) -> None:
        """Close the file. The next read opens it again."""
        self._examples.close()

    def _place(self, split: str, index: int) -> int:
        """Convert an index within a split to an index among all examples of the file."""
        if not 0 <= index < self.count(split):
            raise IndexError(index)
        sample, frame = divmod(index, self._examples.of_a_sample)
        return self.samples[split][sample] * self._examples.of_a_sample + frame

    def _normalisations(self) -> tuple[Normalisation, Normalisation]:
        """Return the normalisations of (inputs, outputs). For advection they are the same, because both are u."""
        before, after = _Moments(), _Moments()
        one = self.file.task == "advection1d"
        for sample in self.samples["train"]:
            ins, outs = self._examples.fields(sample)
            before.add(ins)
            if not one:
                after.add(outs)
        first = before.normalisation(self.file.path)
        return (first, first) if one else (first, after.normalisation(self.file.path))


class _Moments:
    """Running mean and variance over a sequence of arrays, in float64 (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, array: Array) -> None:
        values = array.astype(numpy.float64)
        mean = float(values.mean())
        off = mean - self.mean
        total = self.count + values.size
        self.squares += float(((values - mean) ** 2).sum()) + off**2 * self.count * values.size / total
        self.mean += off * values.size / total
        self.count = total

    def normalisation(self, path: str) -> Normalisation:
        std = math.sqrt(self.squares / self.count)
        if std == 0:
            raise PerfsuiteError(
                f"data: {path} has the same value everywhere in its training samples; name a file with fields that vary"
            )
        return Normalisation(mean=self.mean, std=std)
