"""A worker process of another run: it does its job's tasks and judges nothing."""

from __future__ import annotations

from contextlib import closing

import pytest

from perfsuite import revision
from perfsuite.control import Control
from perfsuite.digests import Opened
from perfsuite.worker import OPENED
from perfsuite.workers import Job, Journal


class Worker(Control):
    """`pytest` on the items of a job."""

    mode = "worker"

    def __init__(self, config: pytest.Config, job: Job) -> None:
        super().__init__(config)
        self.job = job
        if any(task.note_ran for task in job.tasks):
            config.stash[OPENED] = Opened(revision.top_or(self.root))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        from perfsuite import worker

        with closing(Journal(self.job)) as journal:
            worker.run(self.job, journal, session, self.device)
        return True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing is concluded here."""

    def pytest_terminal_summary(self, terminalreporter: object) -> None:
        """Nothing is shown here."""
