"""`perfsuite run`: time every workload on its own inputs, proven first, then prove every pair on all cores."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from perfsuite.declare.sides import as_side
from perfsuite.report import units
from perfsuite.session.aot_compile import KERNELS
from perfsuite.session.modes.plain import Plain
from perfsuite.session.tasks import ITEMS, Task
from perfsuite.session.timed_item import SpeedItem


class Run(Plain):
    """Timed items go first, while the machine is quiet. A pair whose proof fails afterwards loses its figures.

    Only `pytest -m correctness` compiles every kernel for another device: that proves nothing about this machine, and
    takes a quarter of the proofs' time.
    """

    mode = history = "run"

    def isolates(self, item: pytest.Item) -> bool:
        return not isinstance(item, SpeedItem)

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        selected.sort(key=_turn)
        super().collected(every, selected)
        left_out = [i for i in selected if i.name == KERNELS]
        if left_out:
            selected[:] = [i for i in selected if i.name != KERNELS]
            self.isolated = {id: i for id, i in self.isolated.items() if i.name != KERNELS}
            self.config.hook.pytest_deselected(items=left_out)
            what = units.count(len(left_out), "pair")
            self.notes.append(f"kernels of {what} are not compiled for sm_90 here; `pytest -m correctness` does it")
        selected.sort(key=lambda item: not isinstance(item, SpeedItem))

    def before(self, tasks: list[Task]) -> None:
        self.announce(tasks, self.item_tasks())

    def expected_s(self, task: Task) -> float:
        """Return the estimated seconds of the task. A pair whose workload took long also has long proofs. These begin
        first, so that no core is idle at the end."""
        if task.kind != ITEMS or self.durations.has(task):
            return super().expected_s(task)
        timed = [m.seconds for i, runs in self.runs.items() if i.rpartition("::")[0] == task.group for m in runs]
        return super().expected_s(task) + max(timed, default=0.0)


def _turn(item: pytest.Item) -> int:
    """Return the sort key of an item. Timed items come first. Of these, the ones that compile come last, so that the
    first figure appears soon: compiling may take a minute."""
    if not isinstance(item, SpeedItem):
        return 2
    side = as_side(item.pair.optimized)
    try:
        source = inspect.getsource(inspect.getmodule(side.call))  # type: ignore[arg-type]  # TypeError for None
    except (OSError, TypeError):
        source = ""
    return int(side.compile is not None or "torch.compile" in source)
