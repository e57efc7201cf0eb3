"""How a command of the suite ends where it cannot go on: in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from perfsuite.errors import PerfsuiteError
from suite.configuration import ConfigurationError

INTERRUPTED = 130


class Wrong(click.ClickException):
    """In one line, where click's UsageError takes three."""

    exit_code = 2


@contextmanager
def in_one_line(interrupted: str) -> Iterator[None]:
    """Exit code 1 for a PerfsuiteError, 2 for a wrong configuration, 130 with the line `interrupted` for Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(interrupted, err=True)
        sys.exit(INTERRUPTED)
    except PerfsuiteError as error:
        told = " ".join(str(error).split())
        raise (Wrong if isinstance(error, ConfigurationError) else click.ClickException)(told) from None
