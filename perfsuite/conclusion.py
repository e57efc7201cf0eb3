"""Record whether a run that was asked for a verdict reached one. A run that ends early, whoever ends it, must not be
green.

pytest itself exits with 0 where a hook says `pytest.exit(…, returncode=0)`, a conftest says `sys.exit(0)`, or an option
such as --collect-only runs no item. The caller that asks for a gate registers this here first; the mode that decides
reports when it is done. Nothing here imports anything heavy: every pytest run with the plugin loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from perfsuite.exit_codes import ENDED_EARLY


@dataclass(slots=True)
class Awaited:
    """A verdict that a run was asked for. `code` is the exit code that it came to; None until then."""

    mode: str
    code: int | None = None

    def reach(self, mode: str, code: int) -> None:
        """Note that the run has judged everything, in this mode."""
        if mode == self.mode:
            self.code = code

    def close(self, code: int) -> int:
        """Return the exit code of the run that pytest ended with `code`: red where the verdict was not reached."""
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
"""Stash key of the verdict that a run was asked for."""
_asked: list[Awaited] = []


@contextmanager
def expecting(mode: str) -> Iterator[Awaited]:
    """Wrap a call of pytest.main whose run is to end in a verdict of this mode."""
    awaited = Awaited(mode)
    _asked.append(awaited)
    try:
        yield awaited
    finally:
        _asked.remove(awaited)


def asked() -> Awaited | None:
    """Return the verdict that the caller of pytest.main wants, if it has said so."""
    return _asked[-1] if _asked else None
