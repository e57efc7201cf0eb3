"""`perfsuite run`: time every workload on its own inputs, proven first, then prove every pair on all cores."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from perfsuite.ahead import KERNELS
from perfsuite.modes.plain import Plain
from perfsuite.pair import as_side
from perfsuite.report import units
from perfsuite.speed import SpeedItem
from perfsuite.workers import ITEMS, Failure, Outcome, Reported, Task

ITEM_LIMIT_S = 600.0
"""Beyond the limit that a proof sets itself: for an item that is no pair's, or that cannot be interrupted."""


class Run(Plain):
    """Timed items go first, while the machine is quiet; a pair whose proof fails afterwards loses its figures.

    Compiling every kernel for another device is left to `pytest -m correctness`: it proves nothing of this machine,
    and takes a quarter of the proofs' time.
    """

    mode = "run"

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._proofs: Generator[tuple[str, Outcome]] | None = None
        self._ended: dict[str, Outcome] = {}

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        selected.sort(key=_turn)
        super().collected(every, selected)
        left_out = [i for i in selected if i.name == KERNELS]
        if left_out:
            selected[:] = [i for i in selected if i.name != KERNELS]
            self.config.hook.pytest_deselected(items=left_out)
            what = units.count(len(left_out), "pair")
            self.notes.append(f"kernels of {what} are not compiled for sm_90 here; `pytest -m correctness` does it")
        selected.sort(key=lambda item: not isinstance(item, SpeedItem))
        self._proven = [i for i in selected if not isinstance(i, SpeedItem)]

    def close(self) -> None:
        super().close()
        if self._proofs is not None:
            self._proofs.close()

    def before(self, tasks: list[Task]) -> None:
        self.announce(tasks, self._item_tasks())

    def _item_tasks(self) -> list[Task]:
        return [Task(id=i.nodeid, kind=ITEMS, limit_s=_limit(i)) for i in self._proven]

    def expected_s(self, task: Task) -> float:
        """A pair whose workload took long has long proofs, too, which begin first: no core is idle at the end."""
        if task.kind != ITEMS or self.durations.has(task):
            return super().expected_s(task)
        timed = [m.seconds for i, runs in self.runs.items() if i.rpartition("::")[0] == task.group for m in runs]
        return super().expected_s(task) + max(timed, default=0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if isinstance(item, SpeedItem):
            return None
        if self._proofs is None:
            self._proofs = self.work(self._item_tasks(), everywhere=True)
        while item.nodeid not in self._ended:
            found = next(self._proofs, None)
            if found is None:
                break
            self._ended[found[0]] = found[1]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item) -> list[Any]:
        outcome = self._ended.get(item.nodeid)
        if isinstance(outcome, Reported):
            restore = item.config.hook.pytest_report_from_serializable
            return [restore(config=item.config, data=_with_tuple(data)) for data in outcome.reports]
        text = outcome.message if isinstance(outcome, Failure) else "its process never reached it"
        return [
            pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords=dict.fromkeys(item.keywords, 1),
                outcome="failed",
                longrepr=f"{item.name}: {text}",
                when="call",
            )
        ]


def _with_tuple(report: dict[str, Any]) -> dict[str, Any]:
    """A skipped item's (path, line, reason), which JSON has made a list of, is a tuple again: pytest insists on it."""
    place = report.get("longrepr")
    return {**report, "longrepr": tuple(place)} if isinstance(place, list) else report


def _turn(item: pytest.Item) -> int:
    """Timed items first, and of these last what compiles, which may take a minute: the first figure comes soon."""
    if not isinstance(item, SpeedItem):
        return 2
    side = as_side(item.pair.optimized)
    try:
        source = inspect.getsource(inspect.getmodule(side.call))  # type: ignore[arg-type]  # None is a TypeError
    except (OSError, TypeError):
        source = ""
    return int(side.compile is not None or "torch.compile" in source)


def _limit(item: pytest.Item) -> float:
    pair = getattr(item, "pair", None)
    return ITEM_LIMIT_S + (pair.time_limit if pair is not None else 0.0)
