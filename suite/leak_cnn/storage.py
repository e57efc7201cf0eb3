"""The HDF5 file of leak_cnn's data set: its format, and a function that reopens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from suite import hdf5

FORMAT = "leak-audio"
VERSION = 1


def opened(path: Path | str, digest: str) -> Any:
    """Open a file for reading that was checked before. PerfsuiteError if it now contains another data set."""
    try:
        file = hdf5.library().File(path, "r")
    except OSError as error:
        raise PerfsuiteError(f"data: {path} can no longer be read: {' '.join(str(error).split())}") from None
    if hdf5.attributes_of(file).get("digest") != digest:
        file.close()
        raise PerfsuiteError(f"data: {path} was replaced by another set while it was used; begin anew")
    return file
