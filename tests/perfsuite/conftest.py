"""Fixtures of the harness's own tests, and which of them begins first."""

from __future__ import annotations

import pytest
from judging import nursery
from revisions import repo
from scratch import project

__all__ = ["nursery", "project", "repo"]

LONGEST = "test_the_readmes_example_from_times_to_gate"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first. At the end of the run, the other core would be idle while it ran."""
    items.sort(key=lambda item: item.name != LONGEST)
