"""Endings of the suite's commands where they cannot go on: in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import probe
from suite.configuration import ConfigurationError
from suite.naming import escaped, shown
from suite.terminal import reserve, tell

INTERRUPTED = 130


class Failed(click.ClickException):
    """Error that is shown in one line, if anybody reads it."""

    def show(self, file: Any = None) -> None:
        tell(f"Error: {self.format_message()}", err=True)


class Wrong(Failed):
    """Error of the command line or a configuration; click's UsageError would take three lines."""

    exit_code = 2


@contextmanager
def in_one_line(interrupted: str, remedy: str = "free some of it") -> Iterator[None]:
    """End the command in one line where the block fails.

    The exit code is 1 for a PerfsuiteError and, with the `remedy`, where memory runs out; 2 for a wrong configuration;
    130, with the line `interrupted`, for Ctrl-C.
    """
    reserve()
    try:
        yield
    except KeyboardInterrupt:
        tell(interrupted, err=True)
        sys.exit(INTERRUPTED)
    except PerfsuiteError as error:
        text = escaped(" ".join(str(error).split()))
        raise (Wrong if isinstance(error, ConfigurationError) else Failed)(text) from None
    except (MemoryError, RuntimeError) as error:
        if reason := out_of_memory(error):
            raise Failed(f"{reason}; {remedy}") from None
        raise


def out_of_memory(error: BaseException) -> str | None:
    """Return the error's message, in a line, if the memory of a device or of the host does not suffice; else None."""
    torch = sys.modules.get("torch")
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):  # Python's own says nothing
        return text or "out of memory"
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return text.split(". ")[0]
    on_host = re.search(r"can't allocate memory: you tried to allocate \d+ bytes", text)  # a RuntimeError like others
    return on_host[0] if on_host else None


def writable(folder: Path) -> None:
    """Make the folder before anything is measured; PerfsuiteError where no file can be written in it."""
    try:
        probe(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write into {shown(folder)}: {reason}; name another folder with --out") from None
