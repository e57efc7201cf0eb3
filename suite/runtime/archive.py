"""What `torch.save` wrote, read without trust: no code in it is run, and it is read into no more memory than it has."""

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
    """What a file is that cannot be read, as the end of a sentence that begins with its name."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A regular file, or a link to one; OSError where it is missing, not permitted, or something else.

    A pipe would be waited for, and a device might be read for ever.
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
    """The object in an archive, its tensors on the CPU; DamagedError where it is not as it was written."""
    try:
        with zipfile.ZipFile(file) as archive:
            _check(archive, os.fstat(file.fileno()).st_size)
        file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused later
            return torch.load(file, map_location="cpu", weights_only=True)
    except (DamagedError, OSError):
        raise
    except (
        Exception
    ) as error:  # zipfile and torch raise a dozen kinds on a file that is cut, empty or of something else
        if isinstance(error, MemoryError) or re.search("allocate memory", str(error)):
            raise DamagedError("takes more memory than there is, or is damaged") from None
        raise DamagedError(CUT) from None


def _check(archive: zipfile.ZipFile, size: int) -> None:
    """Pass an archive whose every part is there once, stored as it is, and has its checksum."""
    parts = archive.infolist()
    stored = all(p.compress_type == zipfile.ZIP_STORED and p.file_size == p.compress_size for p in parts)
    # torch compresses nothing. Parts that are compressed, or within each other, are read into any amount of memory.
    if not stored or sum(p.file_size for p in parts) > size or len({p.filename for p in parts}) < len(parts):
        raise DamagedError(CUT)
    broken = archive.testzip()
    if broken is not None:
        raise DamagedError(f"is damaged, in {broken[:100]}")
