"""A pytest plugin for `make test` that collects garbage rarely, since each full collection scans torch's modules."""

from __future__ import annotations

import gc

import pytest


class RareGarbage:
    """Freeze living objects (gc.freeze) after pytest has collected the tests, and after the first test of each file."""

    def __init__(self) -> None:
        self.file = ""

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Collect garbage, and freeze the remaining objects, after the first test of each file.

        Later collections then do not scan torch's compiler and the records of Hypothesis each time.
        """
        file = nodeid.partition("::")[0]
        if file != self.file:
            gc.collect()
            gc.freeze()
            self.file = file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RareGarbage(), "rare-garbage")
