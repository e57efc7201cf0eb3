"""Output of a command. No run fails because the reader has gone, or the terminal has fewer characters."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast

import click

from perfsuite.errors import PerfsuiteError


def tell(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to the standard output, or error.

    Where the reader has closed the pipe, as `head` does, nothing more is printed. PerfsuiteError where the standard
    output cannot be written to for another reason, a full disk for instance.
    """
    try:
        click.echo(_written(text), err=err, nl=nl)
    except OSError as error:
        silence(err=err)
        if not err and not isinstance(error, BrokenPipeError):
            reason = error.strerror or str(error)
            raise PerfsuiteError(f"cannot write to the standard output: {reason}; send it elsewhere") from None


def _written(text: str) -> str:
    """Return the text with the bytes of a file's name as the characters that they stand for, or escaped."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def reserve() -> None:
    """Open those of the three standard streams that are closed.

    Otherwise the next file would get the number of one, and with it what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def silence(*, err: bool) -> None:
    """Drop all later output and what is buffered: writing it when the process ends would fail again."""
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError, ValueError, AttributeError):  # it is closed, or has no file descriptor
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())
        os.close(handle)


class _Error:
    """The standard error as it is at the time of writing; what cannot be written is dropped."""

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
    """Return a rich console on the standard error."""
    from rich.console import Console

    return Console(file=cast("IO[str]", _Error()), highlight=False)
