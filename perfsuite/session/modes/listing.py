"""`perfsuite list`: show the workloads of a selection, and what is accepted of them on this machine."""

from __future__ import annotations

import sys

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.session.modes.base import Mode


class List(Mode):
    """The run of `perfsuite list`. It runs no item."""

    mode = "list"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        from perfsuite.session import listing

        if self.broken:
            id, error = next(iter(self.broken.items()))
            others = f" (and {len(self.broken) - 1} more)" if len(self.broken) > 1 else ""
            raise session.Interrupted(f"{id}: {error}{others}; fix it first")
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
