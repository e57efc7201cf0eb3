"""Find the side that is to blame if the process of a proof faults, crashes, hangs or exits.

The last draw is run again, with only one side in each process. If the reference faults on it, the draw is left out and
counted, and the proof is run again without it. If the optimized side faults, the proof fails and names that side.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from perfsuite.declare.pair import Pair
from perfsuite.draws.cases import parse_case
from perfsuite.draws.discarded_draws import misaligned_inputs
from perfsuite.records import OPTIMIZED, REFERENCE, Status
from perfsuite.session.tasks import ITEMS, Failure, Outcome, Reported, Task

MOST_LEFT_OUT = 4
"""Number of draws on which the reference faults after which the proof fails and asks for bounds on the inputs."""
BOUND = "restrict its inputs with sizes=, where= or tensor(…, layouts=…, align=…)"


class _Unreached(Exception):  # noqa: N818 - no error: it carries an outcome
    """A process failed before it reached the draw, which shows nothing about the side."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Blame:
    """Search for the cause of a failed process of a proof. `run` runs a task in a separate process.

    `requested` is the only draw to prove, from `--perfsuite-case`; empty for all.
    """

    pair: Pair
    dtype: str
    run: Callable[[Task], Outcome]
    limit_s: float
    requested: str = ""

    def settle(self, id: str, failure: Failure) -> Outcome:
        """Return the outcome of a proof whose process ended with this failure."""
        try:
            return self._settled(id, failure)
        except _Unreached as unreached:
            return unreached.failure

    def _settled(self, id: str, failure: Failure) -> Outcome:
        left_out: list[str] = []
        while failure.case:
            if (found := self._alone(id, failure.case, REFERENCE)) is None:
                return self._optimized(id, failure)
            left_out.append(failure.case)
            if self.requested or len(left_out) == MOST_LEFT_OUT:
                on = "this draw" if self.requested else f"{len(left_out)} draws"
                return _verdict(f"on {on} the reference", found, f"; {BOUND}", failure.case)
            outcome = self.run(self._task(id, left_out=tuple(left_out)))
            if not isinstance(outcome, Failure):
                return outcome
            failure = outcome
        return failure

    def _optimized(self, id: str, failure: Failure) -> Outcome:
        """Return the outcome if the reference alone does not fail."""
        found = self._alone(id, failure.case, OPTIMIZED)
        if found is not None:
            return _verdict("the optimized side", found, self._hint(failure.case), failure.case)
        # Some proofs call the optimized side in other ways, such as under autocast.
        outcome = self.run(self._task(id, case=failure.case))
        if isinstance(outcome, Failure):
            if not outcome.case:
                raise _Unreached(outcome)
            return _verdict("the optimized side", outcome, ", but not when it is called plainly", failure.case)
        if isinstance(outcome, Reported) and outcome.has_failed:
            return outcome
        what, log = _what(failure)
        message = f"the process of this proof {what}, and not when the draw was repeated; run it again by itself{log}"
        return Failure(status=Status.UNMEASURED, message=message, case=failure.case)

    def _alone(self, id: str, case: str, side: str) -> Failure | None:
        """Call only this side on the draw, in a process. Return how that process failed; None if it did not fail."""
        outcome = self.run(self._task(id, case=case, side=side))
        if not isinstance(outcome, Failure):
            return None
        if not outcome.case:
            raise _Unreached(outcome)
        return outcome

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


def _what(failure: Failure) -> tuple[str, str]:
    """Return (how the process of a side failed, where its log is), e.g. ("crashed with SIGSEGV", "; log: FILE")."""
    what = failure.message.removeprefix("the measuring process ")
    found = re.fullmatch(r"(.*); (?:its|the worker's) log is (\S+)", what, re.DOTALL)
    return (found[1], f"; log: {found[2]}") if found else (what, "")


def _verdict(side: str, failure: Failure, remedy: str, case: str) -> Failure:
    what, log = _what(failure)
    return Failure(status=Status.NOT_EQUIVALENT, message=f"{side} {what}{remedy}{log}", case=case)
