"""Fixtures of the planted tests, which share the scratch projects of the harness's own tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "perfsuite"))

from scratch import project

__all__ = ["project"]


@pytest.fixture(autouse=True)
def _the_same_draws() -> Iterator[None]:
    """Use the same draws in every run, so that a fault is found always or never."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("planted", derandomize=True)
    hypothesis.settings.load_profile("planted")
    yield
    hypothesis.settings.load_profile(before)
