"""Reader for HDF5 files of advection and Darcy flow, from PDEBench or `perfsuite data pde`, sample by sample.

PDEBench uses these layouts, according to its generators (Data_Merge.py, data_io.py) and its published files:

| equation | datasets | attributes |
| --- | --- | --- |
| 1-D advection | tensor [N, 201, 1024], t-coordinate [202], x-coordinate [1024] | beta |
| 1-D Burgers | the same | Nu |
| 1-D reaction-diffusion | tensor [N, 101, 1024], t-coordinate [102], x-coordinate | Nu, rho |
| 2-D Darcy flow | nu [N, 128, 128], tensor [N, 1, 128, 128], x-, y- and in some t-coordinate | beta |
| compressible Navier-Stokes | density, pressure, Vx, Vy, Vz | eta, zeta, M |
| incompressible Navier-Stokes | velocity, particles, force, t | config |
| others | groups 0000, 0001, … with data [101, cells…, channels] | |

The t-coordinate has one more entry than there are frames; the extra entry is ignored. All arrays are float32. If an
attribute is missing, the equation and beta are read from the file name.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from perfsuite.errors import PerfsuiteError, first_line
from suite import hdf5
from suite.building import Array
from suite.ups.recipe import TASKS

NAMED = re.compile(r"(Advection|Burgers|ReacDiff|DarcyFlow)", re.IGNORECASE)
BETA_NAMED = re.compile(r"beta(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", re.IGNORECASE)
EQUATIONS = {"advection": "advection1d", "burgers": "Burgers", "reacdiff": "reaction-diffusion", "darcyflow": "darcy2d"}


@dataclass(frozen=True, kw_only=True)
class PdeFile:
    """Description of a file whose layout was checked. It holds no open file and can be pickled."""

    path: str
    task: str
    """advection1d or darcy2d."""
    beta: float | None
    """Advection speed or Darcy source term; None if neither an attribute nor the file name contains it."""
    samples: int
    frames: int
    """Frames per sample; 1 for Darcy flow."""
    shape: tuple[int, ...]
    """Number of cells in each direction."""
    times: Array
    """Times of the frames, in s, float64 [frames]; 0 for Darcy flow."""
    coordinates: tuple[Array, ...]
    """Coordinates of the cell centres in each direction, float64 [cells] each."""
    stamp: tuple[int, int]
    """Size in bytes and modification time in ns, used to detect that the file was replaced."""


class Example(NamedTuple):
    """The input and output of one prediction."""

    before: Array
    """float32 [*grid]: u at one time, or the coefficient a of Darcy flow."""
    after: Array
    """float32 [*grid]: u at the next time, or the solution u of Darcy flow."""
    time: float
    """Time of `before`, in s; 0 for Darcy flow."""
    sample: int


def open_pde(path: str | Path) -> PdeFile:
    """Check the layout of a file and return its description.

    The values are checked later, when they are read, because reading all of a large file takes long.

    PerfsuiteError if the layout is wrong; its one-line message names the problem and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        raise PerfsuiteError(f"data: {path} is a folder; name an HDF5 file in it")
    if not path.is_file():
        raise PerfsuiteError(
            f"data: there is no file {path}; make it with `perfsuite data pde {path} --task {'|'.join(TASKS)}`"
        )
    library = hdf5.library()
    try:
        if not library.is_hdf5(path):
            raise _wrong(path, "is not an HDF5 file")
        with library.File(path, "r") as file:
            return _checked(path, file)
    except hdf5.ERRORS as error:
        reason = first_line(error) or type(error).__name__
        raise _wrong(path, f"is truncated or damaged: {reason}") from None


class Examples(hdf5.Reader, Sequence[Example]):
    """Sequence of the examples of a file, each read on access.

    An example of advection is u at a frame and at the next frame. A sample has frames - 1 examples, and the index is
    sample · (frames - 1) + frame. Darcy flow has one example per sample. The object can be pickled: each process opens
    the file itself.
    """

    def __init__(self, file: PdeFile) -> None:
        super().__init__()
        self.file = file
        self.of_a_sample = file.frames - 1 if file.task == "advection1d" else 1

    def __len__(self) -> int:
        return self.file.samples * self.of_a_sample

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]  # no slices
        """Read an example. PerfsuiteError if it cannot be read, or has a NaN or infinite value."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        sample, frame = divmod(index % len(self), self.of_a_sample)
        if self.file.task == "darcy2d":
            before, after = self._read("nu", sample), self._read("tensor", (sample, 0))
        else:
            before, after = self._read("tensor", (sample, slice(frame, frame + 2)))
        return Example(before=before, after=after, time=float(self.file.times[frame]), sample=sample)

    def fields(self, sample: int) -> tuple[Array, Array]:
        """Return (inputs, outputs) of a sample, float32. For advection, both are the array of all its frames."""
        if self.file.task == "darcy2d":
            return self._read("nu", sample), self._read("tensor", (sample, 0))
        frames = self._read("tensor", sample)
        return frames, frames

    def _read(self, name: str, place: Any) -> Array:
        try:
            found: Array = self._opened()[name][place]
        except hdf5.ERRORS as error:
            reason = first_line(error) or type(error).__name__
            raise _wrong(self.file.path, f"is truncated or damaged: {reason}") from None
        if not numpy.isfinite(found).all():
            sample = place if isinstance(place, int) else place[0]
            raise _wrong(self.file.path, f"has NaN or infinite values in {name}, sample {sample}")
        return found.astype(numpy.float32, copy=False)

    def _open(self) -> Any:
        path = self.file.path
        try:
            file = hdf5.library().File(path, "r")
            stamp = _stamp(path)
        except OSError as error:
            raise PerfsuiteError(f"data: {path} can no longer be read: {first_line(error)}; begin anew") from None
        if stamp != self.file.stamp:
            file.close()
            raise PerfsuiteError(f"data: {path} was replaced while it was used; begin anew")
        return file


def _checked(path: Path, file: Any) -> PdeFile:
    equation = _equation(path, file)
    if equation not in TASKS:
        raise _wrong(path, f"is PDEBench's file of the {equation} equation, where {' or '.join(TASKS)} is needed")
    tensor = file["tensor"]
    _floats(path, file, "tensor")
    if equation == "advection1d":
        samples, frames, *shape = _shape(path, tensor, "[samples, frames, points]", 3)
        if frames < 2:
            raise _wrong(path, f"has {frames} frame of each sample, where 2 or more are needed")
        times = _coordinate(path, file, "t-coordinate")
        if len(times) < frames:
            raise _wrong(path, f"has {len(times)} times for {frames} frames")
        if not (numpy.diff(times[:frames]) > 0).all():
            raise _wrong(path, "has a t-coordinate that does not increase")
    else:
        samples, channels, *shape = _shape(path, tensor, "[samples, 1, x, y]", 4)
        _floats(path, file, "nu")
        if channels != 1 or file["nu"].shape != (samples, *shape):
            raise _wrong(
                path,
                f"has nu {list(file['nu'].shape)} and tensor {list(tensor.shape)}, "
                "where [samples, x, y] and [samples, 1, x, y] are needed",
            )
        frames, times = 1, numpy.zeros(1)
    coordinates = tuple(_coordinate(path, file, name) for name in ("x-coordinate", "y-coordinate")[: len(shape)])
    if [len(c) for c in coordinates] != shape:
        raise _wrong(path, f"has coordinates of {[len(c) for c in coordinates]} cells for fields of {shape}")
    return PdeFile(
        path=str(path),
        task=equation,
        beta=_beta(path, file),
        samples=samples,
        frames=frames,
        shape=tuple(shape),
        times=times[:frames],
        coordinates=coordinates,
        stamp=_stamp(path),
    )


def _equation(path: Path, file: Any) -> str:
    """Return the task of a file, or the name of an unsupported PDEBench equation.

    PerfsuiteError if the equation cannot be determined.
    """
    names, attributes = set(file), hdf5.attributes_of(file)
    if {"density", "pressure", "Vx"} & names:
        return "compressible Navier-Stokes"
    if {"velocity", "particles", "force"} <= names:
        return "incompressible Navier-Stokes"
    groups = [name for name in names if name.isdigit()]
    if groups and "data" in file[groups[0]]:
        shape = file[groups[0]]["data"].shape
        return "diffusion-sorption" if len(shape) == 3 else "diffusion-reaction or shallow-water"
    if "tensor" not in names:
        listed = ", ".join(sorted(names)[:5]) or "nothing"
        raise _wrong(path, f"is not laid out as PDEBench does: it has no dataset tensor, but {listed}")
    if "nu" in names:
        return "darcy2d"
    if file["tensor"].ndim == 4:
        raise _wrong(path, "has a tensor of four dimensions, as Darcy flow has, but no dataset nu")
    if "Nu" in attributes:
        return "reaction-diffusion" if "rho" in attributes else "Burgers"
    if "beta" in attributes:
        return "advection1d"
    named = NAMED.search(path.name)
    if named is None:
        raise _wrong(
            path,
            "does not say whether it is of advection or of Burgers' equation: both have the same datasets; "
            "give it PDEBench's name 1D_Advection_Sols_beta<beta>.hdf5 or the attribute beta",
        )
    return EQUATIONS[named[1].lower()]


def _beta(path: Path, file: Any) -> float | None:
    value = hdf5.attributes_of(file).get("beta")
    if value is None:
        named = BETA_NAMED.search(path.name)
        return None if named is None else float(named[1])
    beta = float(numpy.asarray(value, dtype=numpy.float64).reshape(-1)[0])
    if not numpy.isfinite(beta):
        raise _wrong(path, f"has the attribute beta {beta}, which is no number")
    return beta


def _shape(path: Path, dataset: Any, wanted: str, dimensions: int) -> tuple[int, ...]:
    shape = tuple(int(length) for length in dataset.shape)
    if len(shape) != dimensions or 0 in shape:
        raise _wrong(path, f"has a tensor of the shape {list(shape)}, where {wanted} is needed")
    return shape


def _coordinate(path: Path, file: Any, name: str) -> Array:
    if name not in file:
        raise _wrong(path, f"has no dataset {name}")
    _floats(path, file, name)
    found: Array = file[name][()].astype(numpy.float64)
    if found.ndim != 1 or not numpy.isfinite(found).all():
        raise _wrong(path, f"has a {name} that is no list of numbers")
    return found


def _floats(path: Path, file: Any, name: str) -> None:
    if file[name].dtype.kind != "f":
        raise _wrong(path, f"has {name} of the type {file[name].dtype}, where floating-point numbers are needed")


def _stamp(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _wrong(path: str | Path, what: str) -> PerfsuiteError:
    return PerfsuiteError(f"data: {path} {what}; name another file, or make one with `perfsuite data pde`")
