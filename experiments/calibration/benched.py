"""Module that pytest-benchmark collects: one benchmark for each (side, kind) that the measuring process registers.

It is not a test module of the harness: `experiments.calibration.worker` runs it by its path, in the worker's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

PREPARED = "perfsuite_prepared"


class Benches:
    """A pytest plugin that supplies the benchmarks: (name, prepare), where `prepare()` returns the call to time."""

    def __init__(self, benches: Sequence[tuple[str, Callable[[], Callable[[], object]]]]) -> None:
        self.benches = benches

    def pytest_generate_tests(self, metafunc: Any) -> None:
        metafunc.parametrize(PREPARED, [pytest.param(p, id=name) for name, p in self.benches])


def test_side(benchmark: Any, perfsuite_prepared: Callable[[], Callable[[], object]]) -> None:
    benchmark(perfsuite_prepared())
