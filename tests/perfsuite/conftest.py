"""Fixtures of the harness's own tests."""

from __future__ import annotations

from revisions import repo
from scratch import project

__all__ = ["project", "repo"]
