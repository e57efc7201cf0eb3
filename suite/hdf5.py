"""HDF5 files of data sets: attributes, digest, and a writer whose bytes depend only on the content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from suite.building import Array

ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError)
"""Exceptions that h5py raises for a file that is damaged or laid out differently."""


def library() -> Any:
    """Import h5py; PerfsuiteError if it is not installed."""
    try:
        import h5py
    except ImportError:
        raise PerfsuiteError(
            "the data set needs the package h5py, which is not installed; pip install 'perfsuite[train]'"
        ) from None
    return h5py


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A dataset that is too large for memory, as consecutive blocks of rows."""

    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    read: Callable[[], Iterator[Array]]
    """Function that returns a new iterator over all blocks; it is called more than once."""


Content = Mapping[str, Array | Blocks]
"""Name → dataset."""


def attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a file, with arrays as lists; an empty dict if it is not an HDF5 file."""
    try:
        with library().File(path, "r") as file:
            return attributes_of(file)
    except (OSError, RuntimeError, KeyError, ValueError):
        return {}


def attributes_of(file: Any) -> dict[str, Any]:
    """Return the attributes of an open file, with arrays as lists."""
    return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value


def content_digest(content: Content) -> str:
    """Return the SHA-256 digest of all datasets, sorted by name. Readers use it to verify a file."""
    digest = hashlib.sha256()
    for name in sorted(content):
        array = content[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        for block in _blocks(array):
            digest.update(block.tobytes())
    return digest.hexdigest()


def write(path: Path, content: Content, attributes: Mapping[str, Any]) -> None:
    """Write an HDF5 file without timestamps, so that its bytes depend only on its content."""
    with library().File(path, "w", libver="v110") as file:
        for name, array in content.items():
            if isinstance(array, Blocks):
                _write_blocks(file, name, array)
            else:
                file.create_dataset(name, data=array, track_times=False)
        for name, value in {**attributes, "digest": content_digest(content)}.items():
            file.attrs[name] = numpy.bytes_(value.encode()) if isinstance(value, str) else value
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _write_blocks(file: Any, name: str, blocks: Blocks) -> None:
    dataset = file.create_dataset(name, shape=blocks.shape, dtype=blocks.dtype, track_times=False)
    row = 0
    for block in blocks.read():
        dataset[row : row + len(block)] = block
        row += len(block)


def _blocks(array: Array | Blocks) -> Iterator[Array]:
    if isinstance(array, Blocks):
        yield from map(numpy.ascontiguousarray, array.read())
    else:
        yield numpy.ascontiguousarray(array)


class Reader:
    """Picklable reader of a file, which each process opens when it first reads."""

    def __init__(self) -> None:
        self._file: Any = None
        self._process = 0

    def _open(self) -> Any:
        """Open the file; PerfsuiteError if it is not the file that was checked."""
        raise NotImplementedError

    def _opened(self) -> Any:
        if self._file is None or self._process != os.getpid():  # a handle inherited through a fork is the parent's
            self._file = self._open()
            self._process = os.getpid()
        return self._file

    def close(self) -> None:
        """Close the file. The next read opens it again."""
        if self._file is not None and self._process == os.getpid():
            self._file.close()
        self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
