"""Errors of a run, each of one line."""

from __future__ import annotations

from perfsuite.errors import PerfsuiteError


class CheckpointError(PerfsuiteError):
    """A checkpoint is missing, damaged or foreign, or cannot be written."""


class NotANumberError(CheckpointError):
    """A state holds NaN, and must not be written."""
