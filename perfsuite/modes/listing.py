"""`perfsuite list`: what a selection holds, and what is accepted of it here."""

from __future__ import annotations

import sys

import pytest

from perfsuite.control import Control
from perfsuite.errors import PerfsuiteError


class List(Control):
    """No item is run."""

    mode = "list"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        from perfsuite import listing

        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} error(s) while collecting; fix them first")
        try:
            self.load_baseline()
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
        """The table is all that is shown."""
