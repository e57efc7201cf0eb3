"""Exit codes of a run, from its verdicts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

GREEN, CODE_AT_FAULT, ENDED_EARLY, COULD_NOT_BEGIN, UNDECIDED = 0, 1, 2, 4, 10
"""Exit codes of perfsuite. 3 to 6 are pytest's own (internal error, could not begin, nothing collected, warnings).
Commands that do not run pytest also use 4, for a wrong name or a damaged file."""


def of(verdicts: Iterable[Any], problems: Collection[str], *, early: bool = False, wrong: bool = False) -> int:
    """Return the exit code of a run with these verdicts and problems. `early`: the run ended early; `wrong`: a proof
    failed."""
    red = [v for v in verdicts if not v.status.green]
    if wrong or any(v.status.blames_code or v.moved == "optimized" for v in red):
        return CODE_AT_FAULT
    if early:
        return ENDED_EARLY
    return UNDECIDED if red or problems else GREEN
