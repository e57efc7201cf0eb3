"""One-line error endings of the suite's commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import check
from suite.configuration import ConfigurationError
from suite.naming import escaped, shown
from suite.terminal import reserve, tell

INTERRUPTED = 130


class Failed(click.ClickException):
    """Error that is printed in one line to stderr."""

    def show(self, file: Any = None) -> None:
        tell(f"Error: {self.format_message()}", err=True)


class Wrong(Failed):
    """Error in the command line or a configuration, in one line; click's UsageError prints three."""

    exit_code = 2


@contextmanager
def in_one_line(interrupted: str, remedy: str = "free some of it") -> Iterator[None]:
    """End the command with a one-line message if the block fails.

    The exit code is 1 for a PerfsuiteError and for a path that cannot be accessed, and also if memory runs out, with
    `remedy` in the message. It is 2 for a wrong configuration, and 130 for Ctrl-C, with the message `interrupted`.
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
    except OSError as error:  # e.g. Path.is_file raises for a name that is too long, or in a folder of another user
        if not isinstance(error.filename, str | bytes):
            raise
        why = error.strerror or type(error).__name__
        raise Failed(f"cannot access {shown(os.fsdecode(error.filename))}: {why}; name another path") from None
    except (MemoryError, RuntimeError) as error:
        if reason := out_of_memory(error):
            raise Failed(f"{reason}; {remedy}") from None
        raise


def out_of_memory(error: BaseException) -> str | None:
    """Return the error's message in one line if the memory of a device or of the host ran out; else None."""
    torch = sys.modules.get("torch")
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):  # Python's own MemoryError has no message
        return text or "out of memory"
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return text.split(". ")[0]
    on_host = re.search(r"can't allocate memory: you tried to allocate \d+ bytes", text)  # a plain RuntimeError
    return on_host[0] if on_host else None


def writable(folder: Path) -> None:
    """Create the folder before anything is measured; PerfsuiteError if no file can be written in it."""
    check(folder, name=shown(folder), remedy="name another folder with --out")
