"""Top-level pytest configuration: the sides' packages are found from the root, wherever pytest is started."""

from __future__ import annotations

pytest_plugins = ["perfsuite.plugin"]
