"""Errors that end in one line for the user: what is wrong, where, and the remedy."""

from __future__ import annotations

from typing import Any


class PerfsuiteError(Exception):
    """A user's mistake or a machine's lack, told in one line that names it and the remedy."""


class PairError(PerfsuiteError):
    """A pair is declared in a way that cannot be proven or timed."""

    case: Any = None
    """The draw that showed it, a `Case`; None where the declaration alone does."""


class BaselineError(PerfsuiteError):
    """A baseline file is missing, damaged, foreign or of another schema."""


class MachineError(PerfsuiteError):
    """This machine is not the one the baseline was recorded on, or lacks what is needed."""


class RevisionError(PerfsuiteError):
    """A revision cannot be loaded beside the current tree."""


class TamperedError(PerfsuiteError):
    """A clock, a function or a rule that a verdict rests on has been replaced."""


class NoisyError(MachineError):
    """Others use this machine so much that a measurement decides nothing."""
