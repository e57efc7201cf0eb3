"""Errors that are reported to the user in one line: what is wrong, where, and the remedy."""

from __future__ import annotations

import math
import sysconfig
import traceback
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
"""The folder of perfsuite's own code."""
MOST_CHARACTERS = 300
"""Most characters of another library's message; the rest is cut off."""


class PerfsuiteError(Exception):
    """A user's mistake, or something that the machine lacks. The message is one line with the problem and the
    remedy."""


class PairError(PerfsuiteError):
    """A pair is declared in a way that cannot be proven or timed."""

    case: Any = None
    """The draw that showed the error, a `Case`; None if it is an error of the declaration alone."""


class NotEquivalent(Exception):  # noqa: N818 - named as the verdict is
    """The optimized side is not the same function. Has a readable message, and the draw if one showed it."""

    case: Any
    """The draw that showed the error, a `Case`, or None."""
    excess: float
    """Error as a multiple of its budget; infinite for an error without a budget."""
    steps: int | None = None
    """Number of steps of a stateful pair after which its state was wrong; None if no state was."""
    names_its_cause: bool
    """Whether the message already names the cause, so that no likely cause is searched for."""

    def __init__(
        self, message: str, case: Any = None, *, excess: float = math.inf, names_its_cause: bool = False
    ) -> None:
        super().__init__(message)
        self.case, self.excess, self.names_its_cause = case, excess, names_its_cause


class GlobalStateChanged(NotEquivalent):
    """A side leaves global state changed for later code. `words` follow the side's name in the message; without them,
    `side` is the whole message."""

    def __init__(self, side: str, words: str = "") -> None:
        super().__init__(f"{side} {words}" if words else side)
        self.words = words


class NotTimed(NotEquivalent):
    """The results are right, but the timed calls did not do the function's work."""


class BaselineError(PerfsuiteError):
    """A baseline file is missing, damaged, foreign or of another schema."""


class MachineError(PerfsuiteError):
    """This machine is not the one on which the baseline was recorded, or lacks something that is needed."""


class RevisionError(PerfsuiteError):
    """A revision cannot be loaded in addition to the current tree."""


class HarnessFault(BaseException):
    """perfsuite itself raised while it compared outputs: no side is to blame, and nothing is proven."""


class TamperedError(PerfsuiteError):
    """A clock, a function or a rule that a verdict depends on has been replaced."""


class NoisyError(MachineError):
    """Other processes use this machine so much that a measurement is inconclusive."""


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, shortened; empty if it has none.

    If a line ends with a colon, the next line is added.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    shown = 1
    while lines[shown - 1].endswith(":") and shown < len(lines):
        shown += 1
    return " ".join(lines[:shown])[:MOST_CHARACTERS]


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the error's traceback that is in the user's code; None if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(Path(f.filename))]
    return frames[-1] if frames else None


def is_library(path: Path) -> bool:
    """Return whether the file belongs to Python, to an installed package or to perfsuite."""
    folders = (sysconfig.get_path("stdlib"), PACKAGE)
    return "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in folders)


def printable(name: object) -> str:
    """Return the name in one line, with Python's escapes for characters that cannot be printed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))


def in_one_line(error: BaseException) -> str:
    """Return the type of the error and the first line of its message."""
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
