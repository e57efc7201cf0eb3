"""`perfsuite list`: show the workloads of a selection, and what is accepted of them on this machine."""

from __future__ import annotations

import sys

import pytest

from perfsuite.control import Control
from perfsuite.errors import PerfsuiteError


class List(Control):
    """No item is run."""

    mode = "list"

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.broken: list[str] = []
        """The modules that cannot be collected, each with the error."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            errors = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.broken.append(f"{report.nodeid}: {errors[-1]}" if errors else report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        from perfsuite import listing

        if self.broken:
            others = f" (and {len(self.broken) - 1} more)" if len(self.broken) > 1 else ""
            raise session.Interrupted(f"{self.broken[0]}{others}; fix it first")
        try:
            self.baselines.load()
        except PerfsuiteError as error:
            self.problems.append(str(error))
            print(error, file=sys.stderr)
        listing.show(
            self.items,
            entries=self.entries,
            inapplicable=self.inapplicable,
            known=len(self.known),
            device=self.machine.device,
            as_json=self.arguments.get("json") == "yes",
        )
        return True

    def pytest_terminal_summary(self, terminalreporter: object) -> None:
        """Do nothing: the table is all that is shown."""
