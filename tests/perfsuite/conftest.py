"""Fixtures of the harness's own tests."""

from __future__ import annotations

import pytest
from scratch import Project, forget_only_the_project


@pytest.fixture
def project(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty scratch project; the test module says `pytest_plugins = ["pytester"]`."""
    monkeypatch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", forget_only_the_project)
    return Project(request.getfixturevalue("pytester"), monkeypatch)
