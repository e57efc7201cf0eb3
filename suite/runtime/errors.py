"""How a run fails, in one line."""

from __future__ import annotations

from perfsuite.errors import PerfsuiteError


class CheckpointError(PerfsuiteError):
    """A checkpoint that is missing, damaged, foreign, or cannot be written."""


class NotANumberError(CheckpointError):
    """A state that must not be written: it holds NaN."""
