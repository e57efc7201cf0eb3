"""Base class of the runs that do one task of their own, instead of running items."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.session.modes.base import Mode


class Whole(Mode, ABC):
    """A run that runs no item: `whole` does its task."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} error(s) while collecting; fix them first")
        try:
            self.check()
            with self.turn():
                self.whole()
        except PerfsuiteError as error:
            self.refuse(str(error))
        return True

    def check(self) -> None:
        """Raise PerfsuiteError for what can be refused before the run waits for others that measure."""

    @abstractmethod
    def whole(self) -> None:
        """Do the run's task."""
