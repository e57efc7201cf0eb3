"""Output of a command. A closed pipe or a terminal that lacks characters does not end a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, cast

import click

from perfsuite.errors import PerfsuiteError


def tell(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to stdout, or to stderr with `err`.

    If the reader has closed the pipe, as `head` does, nothing more is printed. PerfsuiteError if stdout cannot be
    written for another reason, e.g. a full disk.
    """
    try:
        click.echo(_written(text), err=err, nl=nl)
    except OSError as error:
        silence(err=err)
        if not err and not isinstance(error, BrokenPipeError):
            reason = error.strerror or str(error)
            raise PerfsuiteError(f"cannot write to the standard output: {reason}; send it elsewhere") from None


def _written(text: str) -> str:
    """Return the text with a file name's undecoded bytes decoded as UTF-8, or escaped if they are not UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()


def reserve() -> None:
    """Open os.devnull for each of the three standard streams that is closed.

    Otherwise the next opened file would get a standard stream's descriptor, and printed text would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor


def silence(*, err: bool) -> None:
    """Drop all later output and the buffered output, since flushing it at exit would fail again."""
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError, ValueError, AttributeError):  # the stream is closed, or has no file descriptor
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())
        os.close(handle)


class _Error:
    """Stream that writes to the current `sys.stderr`, and drops what cannot be written."""

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
    """Return a rich console for stderr."""
    from rich.console import Console

    return Console(file=cast("IO[str]", _Error()), highlight=False)
