"""Errors of a run, each with a one-line message."""

from __future__ import annotations

from perfsuite.errors import PerfsuiteError


class CheckpointError(PerfsuiteError):
    """A checkpoint is missing, damaged, of another trainer, or cannot be written."""


class NotANumberError(CheckpointError):
    """A state contains NaN and must not be written."""
