"""Fixtures of the harness's own tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """An empty scratch project; the test module says `pytest_plugins = ["pytester"]`."""
    from scratch import Project

    return Project(pytester, monkeypatch)
