"""Run correctness items in worker processes: a fault, a crash or a hang then costs one proof and not the run.

Under xdist this holds only for GPU faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from perfsuite import faults
from perfsuite.revisions import bytecode
from perfsuite.session.modes.base import Mode
from perfsuite.session.tasks import ITEMS, Failure, Outcome, Reported, Task

ITEM_LIMIT_S = 600.0
"""Seconds that are added to the pair's own limit. The sum limits an item without a pair, and a proof that Python cannot
interrupt."""
GRACE_S = 60.0
"""Seconds beyond the pair's own limit for a side that is called alone on one draw."""
AUTO, ALWAYS = "auto", "always"


class Proofs(Mode):
    """Workers run the items of `isolated` on all cores; pytest gets their reports in its own order.

    Under xdist, each of its processes runs its own proofs. After a GPU fault in such a process, perfsuite's workers run
    the faulting proof and all later ones of that process.
    """

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.isolated: dict[str, pytest.Item] = {}
        self._proofs: Generator[tuple[str, Outcome]] | None = None
        self._ended: dict[str, Outcome] = {}
        self._lost = False
        """Whether a fault has taken the GPU from this process."""

    def isolates(self, item: pytest.Item) -> bool:
        """Return whether the item is a proof on a GPU, where a kernel's fault would make all later items fail."""
        from perfsuite.session.proof_item import ProofItem

        return isinstance(item, ProofItem) and self._apart

    @property
    def _apart(self) -> bool:
        option = self.config.option
        if option.perfsuite_isolate != AUTO:
            return bool(option.perfsuite_isolate == ALWAYS)
        # Options that need the test in this process: a debugger, or its output as it comes.
        return self.device == "cuda" and not (option.usepdb or option.capture == "no")

    @property
    def _under_xdist(self) -> bool:
        return hasattr(self.config, "workerinput")

    @property
    def _by_worker(self) -> bool:
        """Whether perfsuite's workers run the isolated items, and not this xdist process."""
        return self._lost or not self._under_xdist or self.config.option.perfsuite_isolate != AUTO

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        super().collected(every, selected)
        self.isolated = {i.nodeid: i for i in selected if self.isolates(i)}
        if self.isolated:
            bytecode.keep_during(self.config)

    def ranks_of(self, id: str) -> int:
        pair = getattr(self.isolated.get(id), "pair", None)
        return pair.at_ranks if pair is not None else super().ranks_of(id)

    def close(self) -> None:
        super().close()
        if self._proofs is not None:
            self._proofs.close()

    def item_tasks(self) -> list[Task]:
        """Return a task for each isolated item."""
        return [self._task(item) for item in self.isolated.values()]

    def _task(self, item: pytest.Item) -> Task:
        return Task(id=item.nodeid, kind=ITEMS, limit_s=_limit(item), case=self.config.option.perfsuite_case or "")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if item.nodeid not in self.isolated:
            return self._beside_isolated(item, nextitem)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._here(item, nextitem) or self._reports(item, self._outcome(item)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _beside_isolated(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run an item that is not isolated. The next such item is passed as `nextitem`, so that pytest tears down the
        fixtures that it does not need. Return None where pytest can do this itself."""
        if nextitem is None or nextitem.nodeid not in self.isolated or not self._by_worker:
            return None
        items = item.session.items
        later = [] if self._under_xdist else items[items.index(nextitem) :]  # what xdist hands out later is not known
        following = next((i for i in later if i.nodeid not in self.isolated), None)
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    def _here(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[Any]:
        """Run an item in this xdist process and return its reports. Return none if a worker has to run it."""
        if self._by_worker:
            return []
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        try:
            faults.check()
        except faults.DeviceFault:
            self._lost = True
            # Tear down every fixture, since the next item may be of another module. Fixtures that use the GPU fail now.
            with contextlib.suppress(Exception):
                item.session._setupstate.teardown_exact(None)
            return []
        return reports

    def _outcome(self, item: pytest.Item) -> Outcome | None:
        if self._under_xdist:
            return self._settled(item, self._alone(replace(self._task(item), crowded=False)))
        if self._proofs is None:
            self._proofs = self.work(self.item_tasks(), everywhere=True)
        while item.nodeid not in self._ended:
            found = next(self._proofs, None)
            if found is None:
                break
            self._ended[found[0]] = found[1]
        if len(self._ended) == len(self.isolated):
            self._proofs.close()  # nothing else may run while workloads are timed
        outcome = self._ended.get(item.nodeid)
        if isinstance(outcome, Failure) and outcome.crowded:
            self._ended |= dict(self._proofs)  # once the other processes have ended, the memory is free
            outcome = self._alone(replace(self._task(item), crowded=False))
        return self._settled(item, outcome)

    def _settled(self, item: Any, outcome: Outcome | None) -> Outcome | None:
        """Return the outcome of a proof. If its process ended during a draw, find out which side is to blame."""
        if not isinstance(outcome, Failure) or not outcome.case:
            return outcome
        from perfsuite.session.isolation import Blame

        blame = Blame(
            pair=item.pair,
            dtype=item.dtype,
            run=self._alone,
            limit_s=item.limit_s + GRACE_S,
            requested=self.config.option.perfsuite_case or "",
        )
        return blame.settle(item.nodeid, outcome)

    def _alone(self, task: Task) -> Outcome:
        return dict(self.work([task], everywhere=True))[task.id]

    def _reports(self, item: pytest.Item, outcome: Outcome | None) -> list[Any]:
        if isinstance(outcome, Reported):
            restore = item.config.hook.pytest_report_from_serializable
            return [restore(config=item.config, data=_with_tuple(data)) for data in outcome.reports]
        return [
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords=dict.fromkeys(item.keywords, 1),
                outcome="failed",
                longrepr=_message(item, outcome if isinstance(outcome, Failure) else None),
                when="call",
            )
        ]


def _message(item: Any, failure: Failure | None) -> str:
    """Return the message for an item that has no report. Only the failure of a proof has a draw."""
    if failure is None:
        return f"{item.name}: its process never reached it"
    pair = getattr(item, "pair", None)
    message = f"{item.name if pair is None else pair.name}: {failure.message}"
    return item.with_reproduction(message, failure.case) if failure.case else message


def _with_tuple(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with a skipped item's (path, line, reason) as a tuple again, as pytest requires: JSON has made
    it a list."""
    place = report.get("longrepr")
    return {**report, "longrepr": tuple(place)} if isinstance(place, list) else report


def _limit(item: pytest.Item) -> float:
    pair = getattr(item, "pair", None)
    return ITEM_LIMIT_S + (pair.time_limit if pair is not None else 0.0)
