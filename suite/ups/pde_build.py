"""Generation of PDE samples in PDEBench's file layout: blocks of samples → part files → one HDF5 file.

The same recipe gives the same bytes with any number of processes. Finished parts are kept in a folder next to the
output file until it is complete, so that a killed run can be resumed.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import probe
from suite import hdf5, parallel
from suite.building import Array, Parts, Watcher, digest_of, digest_of_file, parts_beside
from suite.configuration import ConfigurationError
from suite.hdf5 import Blocks
from suite.ups import advection, darcy
from suite.ups.recipe import Recipe, file_name

FORMAT = "perfsuite-pde"
VERSION = 1
BLOCK = 32
"""Samples per block, which is generated and saved as a whole: 26 MB of advection or 4 MB of Darcy flow."""
DESCRIBED = {
    "advection1d": {
        "equation": "u_t + beta u_x = 0, periodic on [0, 1]",
        "values": "the exact solution at the cells' centres",
    },
    "darcy2d": {
        "equation": "div(nu grad u) = -beta on the unit square, u = 0 at its boundary",
        "values": "at the cells' centres, by cell-centred finite volumes with harmonic means of nu",
    },
}
"""Task → attributes that describe the content of its file."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished file."""

    path: Path
    sha256: str
    """SHA-256 of the file."""
    recipe: Recipe
    kept: bool
    """True if the requested file already existed and was kept."""


def targets(out: Path, recipes: list[Recipe]) -> list[tuple[Path, Recipe]]:
    """Return the file of each recipe.

    For one recipe, the file is `out`. For several, the files have PDEBench's names and are in the folder `out`.

    ConfigurationError if `out` is a folder where a file is needed, or a file where a folder is needed.
    """
    if len(recipes) == 1:
        recipe = recipes[0]
        if out.is_dir():
            example = out / file_name(recipe.task, recipe.beta)
            raise ConfigurationError(f"{out} is a folder; name the file to write, e.g. {example}")
        return [(out, recipe)]
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is a file, and {len(recipes)} betas make a file each; name a folder")
    return [(out / file_name(recipe.task, recipe.beta), recipe) for recipe in recipes]


def check(out: Path, recipe: Recipe, *, workers: int, overwrite: bool) -> None:
    """Raise PerfsuiteError, before minutes of computation, if `out` has other content or cannot be written."""
    hdf5.library()
    if not 1 <= workers <= parallel.MOST:
        raise ConfigurationError(f"--workers {workers}: give 1 to {parallel.MOST}")
    if out.is_dir():
        raise ConfigurationError(f"{out} is a folder; name another, or move it away")
    if out.exists() and not overwrite:
        found = hdf5.attributes(out)
        if found.get("format") != FORMAT:
            raise ConfigurationError(
                f"{out} exists and was not made by `perfsuite data pde`; name another file, or give --overwrite"
            )
        for name, value in _settings(recipe).items():
            if found.get(name) != value:
                raise ConfigurationError(
                    f"{out} exists and has {name} {found.get(name)}, not {value}; "
                    "name another file, or give --overwrite"
                )
    try:
        probe(out.parent)
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror or error}; name another file") from None


def build(out: Path, recipe: Recipe, watcher: Watcher, *, workers: int = 1, overwrite: bool = False) -> Built:
    """Generate the file `out`. PerfsuiteError if that fails, or if `out` exists and has other content."""
    check(out, recipe, workers=workers, overwrite=overwrite)
    try:
        with parts_beside(out) as parts:
            kept = out.exists() and not overwrite
            if kept:
                _verify(out, recipe)
            else:
                _made(out, recipe, parts, watcher, workers)
            parts.clear()
        return Built(path=out, sha256=digest_of_file(out), recipe=recipe, kept=kept)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write {out}: {reason}; name another file, or make room") from None


@dataclass(frozen=True, kw_only=True)
class MakeBlock:
    """Picklable callable that generates the samples of a block and saves them as a part file."""

    recipe: Recipe
    folder: Path
    size: int
    """Samples per block; the last block may have fewer."""

    def __call__(self, block: int) -> None:
        samples = [sample(self.recipe, index) for index in self._samples(block)]
        Parts(self.folder).save(self.name(block), numpy.stack(samples))

    def name(self, block: int) -> str:
        """Return the name of a block's part. It contains the block size, because another size gives other blocks."""
        return f"part-samples-{digest_of(_settings(self.recipe))[:32]}-{self.size}-{block}"

    def blocks(self) -> range:
        """Return the numbers of all blocks."""
        return range(-(-self.recipe.samples // self.size))

    def load(self, block: int) -> Array | None:
        """Return the saved part of a block; None if it is missing or damaged."""
        return Parts(self.folder).load(self.name(block))

    def _samples(self, block: int) -> range:
        return range(block * self.size, min((block + 1) * self.size, self.recipe.samples))


def sample(recipe: Recipe, index: int) -> Array:
    """Generate a sample, float32: the frames [201, points] of advection, or (nu, u) [2, n, n] of Darcy flow."""
    if recipe.task == "advection1d":
        initial = advection.drawn(recipe.seed, index)
        return advection.solution(initial, recipe.beta, recipe.size).astype(numpy.float32)
    a = darcy.coefficient(recipe.seed, index, recipe.size)
    return numpy.stack([a, darcy.solve(a, recipe.beta)]).astype(numpy.float32)


def _made(out: Path, recipe: Recipe, parts: Parts, watcher: Watcher, workers: int) -> None:
    make = MakeBlock(recipe=recipe, folder=parts.folder, size=BLOCK)
    lacking = [block for block in make.blocks() if make.load(block) is None]
    done = len(make.blocks()) - len(lacking)
    with contextlib.closing(parallel.each(make, lacking, workers)) as finished:
        for count, _ in enumerate(finished, done + 1):
            watcher.progress("making", min(count * BLOCK, recipe.samples), recipe.samples)
    whole = parts.folder / "part-whole.h5"
    hdf5.write(whole, _content(make, watcher), _attributes(recipe))
    os.replace(whole, out)


def _content(make: MakeBlock, watcher: Watcher) -> hdf5.Content:
    """Return the datasets of PDEBench's layout, sorted by name."""
    recipe = make.recipe
    x = advection.centres(recipe.size).astype(numpy.float32)

    def blocks() -> Iterator[Array]:
        for block in make.blocks():
            watcher.progress("writing", block * make.size, recipe.samples)
            found = make.load(block)
            if found is None:
                raise OSError(None, f"{make.folder} has lost what was just written there")
            yield found

    n = recipe.size
    if recipe.task == "advection1d":
        shape = (recipe.samples, advection.FRAMES, n)
        return {
            "t-coordinate": advection.stored_times().astype(numpy.float32),
            "tensor": _float32(shape, blocks),
            "x-coordinate": x,
        }
    return {
        "nu": _float32((recipe.samples, n, n), lambda: (block[:, 0] for block in blocks())),
        "tensor": _float32((recipe.samples, 1, n, n), lambda: (block[:, 1:] for block in blocks())),
        "x-coordinate": x,
        "y-coordinate": x,
    }


def _float32(shape: tuple[int, ...], read: Any) -> Blocks:
    return Blocks(shape=shape, dtype=numpy.dtype(numpy.float32), read=read)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the file attributes that record a recipe. PDEBench's files also have the attribute `beta`."""
    return {"format_version": VERSION, **asdict(recipe)}


def _attributes(recipe: Recipe) -> dict[str, Any]:
    return {"format": FORMAT, **_settings(recipe), **DESCRIBED[recipe.task]}


def _verify(out: Path, recipe: Recipe) -> None:
    """Raise ConfigurationError if the content of a file with matching attributes differs from what was written."""
    try:
        with hdf5.library().File(out, "r") as file:
            content = {name: _dataset(file[name]) for name in file}
            whole = hdf5.content_digest(content) == hdf5.attributes_of(file).get("digest")
    except hdf5.ERRORS:
        whole = False
    if not whole:
        raise ConfigurationError(f"{out} exists and is damaged; give --overwrite to make it again")


def _dataset(dataset: Any) -> Blocks:
    def read() -> Iterator[Array]:
        for row in range(0, len(dataset), BLOCK):
            yield dataset[row : row + BLOCK]

    return Blocks(shape=dataset.shape, dtype=dataset.dtype, read=read)
