"""Write perfsuite's samples as records of pytest-benchmark. Only this module uses pytest-benchmark's private API.

`tests/perfsuite/test_plugin.py` tests the API of the versions in use.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from perfsuite.records import OPTIMIZED, REFERENCE

SIDES = (f"@{REFERENCE}", f"@{OPTIMIZED}")
"""Endings of the names of perfsuite's records."""


def silence(benchmark: Any) -> None:
    """Keep the fixture from warning that it was not used: perfsuite does not use its timer."""
    benchmark._mode = "perfsuite"


def record(benchmark: Any, node_id: str, side: str, samples_s: tuple[float, ...], extra: Mapping[str, Any]) -> None:
    """Add a record `node_id@side` with these samples (seconds) to the session of the `benchmark` fixture."""
    if benchmark.disabled or not samples_s:
        return
    stats = benchmark._make_stats(1)
    stats.name = f"{node_id.rpartition('::')[2]}@{side}"
    stats.fullname = f"{node_id}@{side}"
    stats.group = node_id
    for sample in samples_s:
        stats.update(sample)
    stats.extra_info = dict(extra)  # by default, all records of the fixture share one dict


def hide_table(config: pytest.Config) -> None:
    """Hide pytest-benchmark's own table if all its records are perfsuite's, unless one of pytest-benchmark's options is
    given. perfsuite's own table shows these records."""
    session = getattr(config, "_benchmarksession", None)
    outside = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given = (*config.invocation_params.args, *config.getini("addopts"), *outside)
    if session is None or any(str(argument).startswith("--benchmark") for argument in given):
        return
    if all(record.fullname.endswith(SIDES) for record in session.benchmarks):
        session.quiet = True
