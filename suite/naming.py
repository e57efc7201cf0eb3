"""File names in messages, in one line for any bytes in the name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def shown(path: str | Path) -> str:
    """Return a path with unprintable characters and bytes escaped: `a\\nb`, `\\xff`."""
    try:
        return escaped(os.fsencode(path).decode("utf-8", "backslashreplace"))
    except UnicodeEncodeError:  # a lone surrogate, which no file name has
        return escaped(str(path))


def escaped(text: str) -> str:
    """Return text with line breaks, control characters and lone surrogates escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def typed(argument: str) -> str:
    """Decode a command-line argument as UTF-8, whatever the locale; return it unchanged if its bytes are not UTF-8."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def as_typed(text: str) -> str:
    """Return text in the form of a command-line argument in this locale; ValueError if no argument can contain it."""
    if "\0" in text:
        raise ValueError("it has a null character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return os.fsdecode(text.encode())
    return text


@contextmanager
def utf8_name(folder: Path) -> Iterator[Path]:
    """Yield a UTF-8 name for the folder, as some libraries require; the folder's own name if that is UTF-8."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Path(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
    else:
        yield folder
