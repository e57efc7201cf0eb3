"""A worker process of another run: it does the tasks of its job and gives no verdicts."""

from __future__ import annotations

from contextlib import closing

import pytest

from perfsuite.revisions import revision
from perfsuite.revisions.observed_files import Observed
from perfsuite.session import preload
from perfsuite.session.gpu_sharing import Gpu
from perfsuite.session.journal import WAITS, Job, Journal
from perfsuite.session.modes.base import Mode
from perfsuite.session.worker_main import OBSERVED


class Worker(Mode):
    """The pytest run of a worker process, on the items of its job."""

    mode = "worker"

    def __init__(self, config: pytest.Config, job: Job) -> None:
        super().__init__(config)
        preload.read_environment()
        self.job, self.journal, self.gpu = job, Journal(job), Gpu(job.lock)
        if self.gpu.shared:  # importing torch would disturb what another process times
            self.journal.phase("", WAITS)
            self.gpu.prepare()
            self.journal.phase("", "start")
        if job.note_ran:
            ini = {config.inipath} if config.inipath else set()
            config.stash[OBSERVED] = Observed(revision.top_or(self.root), ini)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        from perfsuite.session import worker_main

        if self.job.ahead and self.device == "cuda":
            worker_main.get_ready()
        with closing(self.journal):
            worker_main.run(self.journal, session, self.device, self.gpu)
        return True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Conclude nothing: the run that started this worker does that."""
        if (observed := self.config.stash.get(OBSERVED, None)) is not None:
            observed.close()

    def pytest_terminal_summary(self, terminalreporter: object) -> None:
        """Do nothing: a worker shows nothing."""
