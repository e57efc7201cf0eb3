"""Reads untrusted `torch.save` files: runs no code in them, and uses no more memory than the file's size."""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

CUT = "is damaged, or no checkpoint"


class DamagedError(ValueError):
    """A file cannot be read. The message completes a sentence that begins with the file's name."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file, or a link to one; OSError if it is missing, not readable or not a regular file.

    Reading a pipe would block, and reading a device might never finish.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def content(file: IO[bytes]) -> Any:
    """Load the object from an archive, with its tensors on the CPU; DamagedError if the file is damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            _check(archive, os.fstat(file.fileno()).st_size)
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for content that is rejected later
            return torch.load(file, map_location="cpu", weights_only=True)
    except (DamagedError, OSError):
        raise
    except Exception as error:  # zipfile and torch raise about a dozen types for a truncated, empty or foreign file
        if isinstance(error, MemoryError) or re.search("allocate memory", str(error)):
            raise DamagedError("takes more memory than there is, or is damaged") from None
        raise DamagedError(CUT) from None


def _check(archive: zipfile.ZipFile, size: int) -> None:
    """Raise DamagedError unless each part of an archive occurs once, is uncompressed and matches its checksum."""
    parts = archive.infolist()
    stored = all(p.compress_type == zipfile.ZIP_STORED and p.file_size == p.compress_size for p in parts)
    # PyTorch does not compress. Compressed or overlapping parts could expand to any amount of memory.
    if not stored or sum(p.file_size for p in parts) > size or len({p.filename for p in parts}) < len(parts):
        raise DamagedError(CUT)
    broken = archive.testzip()
    if broken is not None:
        raise DamagedError(f"is damaged, in {broken[:100]}")
