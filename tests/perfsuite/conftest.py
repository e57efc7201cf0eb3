"""Fixtures of the harness's own tests, and which of them begins first."""

from __future__ import annotations

import pytest
from revisions import repo
from scratch import project

__all__ = ["project", "repo"]

LONGEST = "test_the_readmes_example_from_proof_to_gate"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At the end one core would wait for it."""
    items.sort(key=lambda item: item.name != LONGEST)
