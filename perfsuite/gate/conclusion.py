"""Record whether a run that must reach a verdict has reached one. A run that ends early, for whatever reason, must not
be green.

pytest itself exits with 0 if a hook calls `pytest.exit(…, returncode=0)`, a conftest calls `sys.exit(0)`, or an option
such as --collect-only runs no item. The caller of a gate registers the expected verdict here first, and the mode
reports when it is done. This module imports nothing heavy, because every pytest run with the plugin imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from perfsuite.gate.exit_codes import ENDED_EARLY


@dataclass(slots=True)
class Awaited:
    """The verdict that a run must reach. `code` is the exit code of the verdict; None until it is reached."""

    mode: str
    code: int | None = None

    def reach(self, mode: str, code: int) -> None:
        """Record that the run has reached its verdict, if it is of this mode."""
        if mode == self.mode:
            self.code = code

    def close(self, code: int) -> int:
        """Return the exit code of the run, which pytest ended with `code`: red if the verdict was not reached."""
        if self.code is not None:
            return code or self.code
        if code not in (0, 1):
            return code
        print(
            f"perfsuite: no verdict: the run ended before `{self.mode}` was done (pytest gave exit code {code}); "
            "look for an option that runs no test (--collect-only, --fixtures, ...) in addopts or PYTEST_ADDOPTS, and "
            "for pytest.exit or sys.exit in a conftest",
            file=sys.stderr,
        )
        return ENDED_EARLY


AWAITED: pytest.StashKey[Awaited] = pytest.StashKey()
"""Stash key of the verdict that a run must reach."""
_asked: list[Awaited] = []


@contextmanager
def expecting(mode: str) -> Iterator[Awaited]:
    """Wrap a call of pytest.main whose run must reach a verdict of this mode."""
    awaited = Awaited(mode)
    _asked.append(awaited)
    try:
        yield awaited
    finally:
        _asked.remove(awaited)


def asked() -> Awaited | None:
    """Return the verdict that the caller of pytest.main expects; None if it expects none."""
    return _asked[-1] if _asked else None
