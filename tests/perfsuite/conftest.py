"""Fixtures of the harness's own tests, and their order."""

from __future__ import annotations

import pytest
from judging import nursery
from repositories import repo
from scratch import hide_gpus, project

from perfsuite.system import machine

__all__ = ["nursery", "project", "repo"]

LONGEST = "test_the_readmes_example_from_times_to_gate"


@pytest.fixture(autouse=True)
def _cpu_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs from scratch projects, except in tests marked `gpu`, so that results are the same on all machines."""
    if "project" in request.fixturenames and request.node.get_closest_marker("gpu") is None and machine.has_gpu():
        hide_gpus(monkeypatch)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest test first. At the end of a run, the other cores would be idle while it ran."""
    items.sort(key=lambda item: item.name != LONGEST)
