"""The scratch projects of the harness's own tests serve here too."""

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
    """Every run draws the same: a fault is found, or it is not."""
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("planted", derandomize=True)
    hypothesis.settings.load_profile("planted")
    yield
    hypothesis.settings.load_profile(before)
