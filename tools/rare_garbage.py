"""A pytest plugin for `make test`: collect garbage rarely. Each full collection scans torch's modules."""

from __future__ import annotations

import gc

import pytest


class RareGarbage:
    """Hide living objects from the collector, after pytest's collection of tests and after each file."""

    def __init__(self) -> None:
        self.file = ""

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Collect garbage and freeze what is left after the last test of a file.

        Later collections then need not scan torch's compiler and Hypothesis' records each time.
        """
        file = nodeid.partition("::")[0]
        if file != self.file:
            gc.collect()
            gc.freeze()
            self.file = file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RareGarbage(), "rare-garbage")
