"""The HDF5 file of leak_cnn's data: its attributes, its digest, and bytes that are those of its content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from suite.leak_cnn.features import Array

FORMAT = "leak-audio"
VERSION = 1


def library() -> Any:
    """h5py; PerfsuiteError where it is not there."""
    try:
        import h5py
    except ImportError:
        raise PerfsuiteError(
            "the data set needs the package h5py, which is not installed; pip install 'perfsuite[train]'"
        ) from None
    return h5py


def opened(path: Path | str, digest: str) -> Any:
    """A file that was found right before, to be read; PerfsuiteError where it is no longer that one."""
    try:
        file = library().File(path, "r")
    except OSError as error:
        raise PerfsuiteError(f"data: {path} can no longer be read: {' '.join(str(error).split())}") from None
    if attributes_of(file).get("digest") != digest:
        file.close()
        raise PerfsuiteError(f"data: {path} was replaced by another set while it was used; begin anew")
    return file


def attributes(path: Path) -> dict[str, Any]:
    """Of the file; none where it is no HDF5 file. Lists for arrays."""
    try:
        with library().File(path, "r") as file:
            return attributes_of(file)
    except (OSError, RuntimeError, KeyError, ValueError):
        return {}


def attributes_of(file: Any) -> dict[str, Any]:
    """Of an open file."""
    return {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value


def content_digest(content: Mapping[str, Array]) -> str:
    """Of the datasets by their names: what a reader holds the file against."""
    digest = hashlib.sha256()
    for name in sorted(content):
        array = numpy.ascontiguousarray(content[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


def write(path: Path, content: Mapping[str, Array], attributes: Mapping[str, Any]) -> None:
    """An HDF5 file that has no time in it, so that its bytes are those of its content."""
    with library().File(path, "w", libver="v110") as file:
        for name, array in content.items():
            file.create_dataset(name, data=array, track_times=False)
        for name, value in {**attributes, "digest": content_digest(content)}.items():
            file.attrs[name] = numpy.bytes_(value.encode()) if isinstance(value, str) else value
    with path.open("rb+") as file:
        os.fsync(file.fileno())
