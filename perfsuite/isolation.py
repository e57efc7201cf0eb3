"""Find the side that is to blame where the process of a proof faults, crashes, hangs or exits.

The draw that was under way is run again, one side alone in a process. A draw on which the reference faults is left out
and counted, and the proof is made anew; where the optimized side faults, that is the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfsuite.cases import parse_case
from perfsuite.left_out import misaligned_inputs
from perfsuite.pair import Pair
from perfsuite.records import OPTIMIZED, REFERENCE, Status
from perfsuite.tasks import ITEMS, Failure, Outcome, Reported, Task

MOST_LEFT_OUT = 4
"""Draws on which the reference faults, before the pair must say what it is to be called with."""


@dataclass(frozen=True, slots=True)
class Blame:
    """Finds the cause of a proof's failed process. `run` does a task in a process of its own."""

    pair: Pair
    dtype: str
    run: Callable[[Task], Outcome]
    limit_s: float

    def settle(self, id: str, failure: Failure) -> Outcome:
        """Return the outcome of a proof whose process ended with this failure."""
        left_out: list[str] = []
        while failure.case:
            if (found := self._alone(id, failure.case, REFERENCE)) is None:
                return self._optimized(id, failure)
            left_out.append(failure.case)
            if len(left_out) == MOST_LEFT_OUT:
                return _verdict(
                    f"the reference {found} on {len(left_out)} draws; bound what it is drawn with: sizes=, where=, "
                    f"tensor(…, layouts=…, align=…)",
                    failure.case,
                )
            outcome = self.run(self._task(id, left_out=tuple(left_out)))
            if not isinstance(outcome, Failure):
                return outcome
            failure = outcome
        return failure

    def _optimized(self, id: str, failure: Failure) -> Outcome:
        """Return the verdict where the reference alone does not fail."""
        found = self._alone(id, failure.case, OPTIMIZED)
        if found is not None:
            return _verdict(f"the optimized side {found}{self._hint(failure.case)}", failure.case)
        # Some items call it in other ways than a plain call.
        outcome = self.run(self._task(id, case=failure.case))
        if isinstance(outcome, Failure) and outcome.case:
            found = _what(outcome)
            return _verdict(f"the optimized side {found}, but not when it is called plainly", failure.case)
        if isinstance(outcome, Reported) and outcome.has_failed:
            return outcome
        return _verdict(
            f"the process of this proof {_what(failure)}, and not when the draw was repeated; run it again by itself",
            failure.case,
        )

    def _alone(self, id: str, case: str, side: str) -> str | None:
        """Call only this side on the draw, in a process. Return how that process failed; None if it did not fail."""
        outcome = self.run(self._task(id, case=case, side=side))
        return _what(outcome) if isinstance(outcome, Failure) else None

    def _task(self, id: str, *, case: str = "", side: str = "", left_out: tuple[str, ...] = ()) -> Task:
        return Task(id=id, kind=ITEMS, limit_s=self.limit_s, case=case, side=side, left_out=left_out, crowded=False)

    def _hint(self, line: str) -> str:
        names = sorted(misaligned_inputs(self.pair, parse_case(line, self.dtype)))
        if not names:
            return ""
        return (
            f"; the data of {', '.join(names)} begins one element after an aligned address: if the kernel requires "
            f"alignment, declare it, as in tensor(…, align=16)"
        )


def _what(failure: Failure) -> str:
    """Return how the process of a side failed, e.g. "crashed with SIGSEGV"."""
    return failure.message.removeprefix("the measuring process ")


def _verdict(message: str, case: str) -> Failure:
    return Failure(status=Status.NOT_EQUIVALENT, message=message, case=case)
