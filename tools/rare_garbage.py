"""A pytest plugin for `make test`: collect garbage rarely. Each full collection looks through torch's modules."""

from __future__ import annotations

import gc

import pytest


class RareGarbage:
    """Keeps what lives out of the collector's sight, from the end of the collection on and after each file."""

    def __init__(self) -> None:
        self.file = ""

    def pytest_collection_finish(self) -> None:
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Later tests collect often, and need not look through torch's compiler and Hypothesis' records each time."""
        file = nodeid.partition("::")[0]
        if file != self.file:
            gc.collect()
            gc.freeze()
            self.file = file


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RareGarbage(), "rare-garbage")
