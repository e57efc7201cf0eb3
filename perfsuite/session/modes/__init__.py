"""One class for each kind of run. `mode_for` chooses it from pytest's options."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from perfsuite.session.journal import load_job
from perfsuite.session.modes.base import Mode

MODES = {
    "measure": "plain:Plain",
    "run": "run:Run",
    "gate": "gate:Gate",
    "accept": "accept:Accept",
    "compare": "compare:Compare",
    "environments": "environments:Environments",
    "list": "listing:List",
}


def mode_of(config: pytest.Config) -> str:
    """Return the kind of run that pytest's options ask for."""
    option = config.option
    chosen: str = option.perfsuite_mode or ("gate" if getattr(option, "benchmark_compare", None) else "measure")
    return chosen


def mode_for(config: pytest.Config) -> Mode:
    """Return the object that controls the run. Raises UsageError if the options contradict each other."""
    job = load_job()
    if job is not None:
        from perfsuite.session.modes.worker import Worker

        return Worker(config, job)
    option = config.option
    comparing = getattr(option, "benchmark_compare", None)
    if isinstance(comparing, str) and Path(comparing).exists() and not comparing.endswith(".json"):
        raise pytest.UsageError(
            f"--benchmark-compare took {comparing!r} as its value, so that it was not collected; "
            f"write --benchmark-compare last"
        )
    mode = mode_of(config)
    if mode == "gate" and comparing is not None:
        # Ours replaces pytest-benchmark's comparison, which never fails by itself.
        option.benchmark_compare = None
    module, _, name = MODES[mode].partition(":")
    made: Any = getattr(importlib.import_module(f"perfsuite.session.modes.{module}"), name)
    chosen: Mode = made(config)
    return chosen
