"""`pytest -m perf`: time each workload in one process, without a baseline."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest

from perfsuite.gate import decision
from perfsuite.records import Status, Verdict
from perfsuite.session.modes.base import failed
from perfsuite.session.modes.proofs import Proofs
from perfsuite.session.tasks import NEVER_REACHED, Outcome, Task
from perfsuite.session.timed_item import Result, SpeedItem

BLOCKS = 8
"""Number of blocks of a process: half of the number at acceptance, since this run shows a figure and need not detect a
slowdown of 1%."""
ONE_PROCESS = (Status.PASS, Status.NOISY)
"""Verdicts that are neither red nor shown. One process can show that a promise is broken, but cannot confirm one. PASS
would look like a verdict of the gate."""


class Plain(Proofs):
    """Measurement without a baseline. Each item waits for the measurement of its own workload only."""

    history = "pytest"

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._stream: Generator[tuple[str, Outcome]] | None = None

    def close(self) -> None:
        super().close()
        if self._stream is not None:
            self._stream.close()

    def judge(self, item: SpeedItem) -> Result:
        id = item.nodeid
        if proof := self.unproven.get(id.rpartition("::")[0]):
            self.verdicts[id] = not_proven(id, proof)
            return self.judged(id, red=True)
        if self._stream is None:
            self._stream = self._measured()
        while id not in self.runs and id not in self.failures:
            if next(self._stream, None) is None:
                self.keep(id, NEVER_REACHED)
        failure = self.failures.get(id)
        if failure is not None and failure.skipped:
            return Result(skipped=True, message=failure.message)
        if failure is not None:
            self.verdicts[id] = failed(id, failure)
        else:
            runs, promises = {id: tuple(self.runs[id])}, {id: item.promises}
            self.verdicts |= decision.promises_only(runs, promises, selected=max(1, len(self.items)))
        return self.judged(id, red=self.verdicts[id].status not in ONE_PROCESS)

    def _measured(self) -> Generator[tuple[str, Outcome]]:
        ids = self.measurable()
        tasks = [Task(id=i, limit_s=self.items[i].pair.time_limit, blocks=BLOCKS) for i in ids]
        self.before(tasks)
        with self.turn():
            yield from self.work(tasks)

    def before(self, tasks: list[Task]) -> None:
        """Say what is about to be timed."""
        self.announce(tasks)

    def shown_verdicts(self) -> dict[str, Verdict]:
        shown = {i: v for i, v in self.verdicts.items() if v.status not in ONE_PROCESS}
        late = {i: p for i in self.runs if (p := self.unproven.get(i.rpartition("::")[0]))}
        return shown | {i: not_proven(i, proof) for i, proof in late.items()}


def not_proven(id: str, proof: str) -> Verdict:
    """Return the verdict on a workload of a pair whose proof failed."""
    text = f"{Status.NOT_PROVEN} {id}: {proof} failed, so its times do not count"
    return replace(Verdict(id=id, status=Status.NOT_PROVEN, message=text), moved="optimized")
