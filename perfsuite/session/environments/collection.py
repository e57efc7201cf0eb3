"""Find the test modules that cannot be imported in another environment, and the reasons.

That environment runs this module as `python -m perfsuite.session.environments.collection PYTEST'S ARGUMENTS`. The last
line of its output is the result, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from perfsuite.errors import PerfsuiteError, printable
from perfsuite.session.environments.interpreter import Interpreter

LIMIT_S = 600.0
"""Seconds that the collection may take."""


def failures(there: Interpreter, modules: Collection[str], arguments: Sequence[str], root: Path) -> dict[str, str]:
    """Return module → the error, for each module that the other environment cannot collect.

    modules    paths from `root`
    arguments  pytest's arguments of this run

    Raises PerfsuiteError if pytest cannot collect there at all.
    """
    command = [there.path, "-m", __name__, *arguments, *modules]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
        code, found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise PerfsuiteError(
            f"--python {printable(there.path)}: it has not imported the test modules after {LIMIT_S:g} s"
        ) from None
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PerfsuiteError(
            f"--python {printable(there.path)}: pytest ends while it collects there ({printable(last)}); run it there "
            "by itself to see why"
        ) from None
    if not found and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        last = ([*done.stderr.strip().splitlines()] or [f"exit code {code}"])[-1].removeprefix("E").strip()
        raise PerfsuiteError(
            f"--python {printable(there.path)}: pytest cannot collect there ({printable(last)}); run it there by "
            "itself to see why"
        )
    return dict(found)


class _Errors:
    """A plugin that keeps the last line of each collector's error."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            raised = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            self.found[report.nodeid.partition("::")[0]] = (raised or lines or ["no error is shown"])[-1]


def main() -> None:
    """Print pytest's exit code, and the modules that cannot be collected with their errors."""
    errors = _Errors()
    code = pytest.main([*sys.argv[1:], "--collect-only", "--continue-on-collection-errors"], plugins=[errors])
    print()
    print(json.dumps([int(code), errors.found]))


if __name__ == "__main__":
    main()
