"""What a command says. No run fails because whoever listened has gone, or has fewer characters."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast

import click

from perfsuite.errors import PerfsuiteError


def tell(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to the standard output, or error.

    A reader that has enough, as `head` has, is told nothing more. PerfsuiteError where the standard output cannot be
    written to otherwise, a full disk for instance.
    """
    try:
        click.echo(_written(text), err=err, nl=nl)
    except OSError as error:
        silence(err=err)
        if not err and not isinstance(error, BrokenPipeError):
            reason = error.strerror or str(error)
            raise PerfsuiteError(f"cannot write to the standard output: {reason}; send it elsewhere") from None


def _written(text: str) -> str:
    """With the bytes of a file's name as the characters that they are, or escaped."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def reserve() -> None:
    """Open what is closed of the three standard streams: the next file would get its number, and what it is told."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def silence(*, err: bool) -> None:
    """Drop all that is written from now on, and what waits to be: it would fail again when the process ends."""
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError, ValueError, AttributeError):  # it is closed, or none of the process's own
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())
        os.close(handle)


class _Error:
    """The standard error as it is at the time; what cannot be written is dropped."""

    def write(self, text: str) -> int:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def console() -> Any:
    """rich's, on the standard error."""
    from rich.console import Console

    return Console(file=cast("IO[str]", _Error()), highlight=False)
