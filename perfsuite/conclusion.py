"""Whether a run that was asked for a verdict reached one. A run that ends early, whoever ends it, must not be green.

pytest itself exits with 0 where a hook says `pytest.exit(…, returncode=0)`, a conftest says `sys.exit(0)`, or an option
such as --collect-only runs no item. Whoever asks for a gate says so here first; the mode that judges says when it is
done. Nothing here imports anything heavy: every pytest run with the plugin loads it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

GREEN, CODE_AT_FAULT, ENDED_EARLY, UNDECIDED = 0, 1, 2, 10
"""Exit codes of ours; 3 to 6 are pytest's own (internal error, could not begin, nothing collected, warnings)."""


@dataclass(slots=True)
class Conclusion:
    """What a run was asked for, and the exit code that it came to; None until then."""

    mode: str
    code: int | None = None


def of(verdicts: Iterable[Any], problems: Collection[str], *, early: bool = False, wrong: bool = False) -> int:
    """The exit code of a run with these verdicts and problems; `wrong` where a proof failed."""
    red = [v for v in verdicts if not v.status.green]
    if early:
        return ENDED_EARLY
    if wrong or any(v.status.blames_code or v.moved == "optimized" for v in red):
        return CODE_AT_FAULT
    return UNDECIDED if red or problems else GREEN


_open: list[Conclusion] = []


def expect(mode: str) -> None:
    """The run that begins is to end in a verdict of this mode."""
    _open.append(Conclusion(mode))


def expected() -> bool:
    """Whether a verdict is awaited."""
    return bool(_open)


def reach(mode: str, code: int) -> None:
    """The run of this mode has judged everything; `code` is its exit code."""
    for awaited in _open:
        if awaited.mode == mode:
            awaited.code = code


def close(code: int) -> int:
    """The exit code of the run that ends with pytest's `code`: red where the awaited verdict was not reached."""
    awaited = _open.pop() if _open else None
    if awaited is None:
        return code
    if awaited.code is None and code in (0, 1):
        print(
            f"perfsuite: no verdict: the run ended before `{awaited.mode}` was done (pytest gave exit code {code}); "
            "look for an option that runs no test (--collect-only, --fixtures, ...) in addopts or PYTEST_ADDOPTS, and "
            "for pytest.exit or sys.exit in a conftest",
            file=sys.stderr,
        )
        return ENDED_EARLY
    return code or awaited.code or 0


def guard_exit() -> None:
    """Where a conftest ends the interpreter itself, its exit code is set here: nothing else runs any more."""

    def leave() -> None:
        if _open:
            code = close(0)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)
