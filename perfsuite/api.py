"""`check` and `measure`: a pair's proofs and timings from Python, for notebooks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import hypothesis
import torch

from perfsuite import equivalence, execution, integrity, sampling
from perfsuite import inputs as make
from perfsuite.errors import PerfsuiteError
from perfsuite.pair import Pair, as_side
from perfsuite.records import Case, Evidence, Measurement

INTEGRITY_DRAWS = 3


def check(pair: Pair, *, examples: int = 25, device: str | None = None) -> tuple[Evidence, ...]:
    """Prove the pair equal in each of its dtypes, gradients included, and its integrity; the evidence of each proof.

    NotEquivalent, with the offending draw in its last line, where a side is not the same function.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gradients = pair.gradients and not pair.is_stateful and bool(execution.differentiable(pair))
    found = []
    for dtype in pair.dtypes:
        for with_gradients in (False, True) if gradients else (False,):
            tally = equivalence.Tally()
            _hold(
                pair,
                dtype,
                examples,
                functools.partial(equivalence.check_case, pair, device=where, gradients=with_gradients, tally=tally),
            )
            found.append(tally.evidence(pair, dtype, where))
    _hold(pair, pair.dtypes[0], INTEGRITY_DRAWS, lambda case: integrity.check(pair, case, where))
    if pair.truth is not None:
        _hold(pair, "float64", examples, lambda case: equivalence.check_truth(pair, case, where))
    return tuple(found)


def _hold(pair: Pair, dtype: str, examples: int, check: Callable[[Case], None]) -> None:
    """Run the check over draws of the pair; a failing one shrinks, and ends the message."""

    @hypothesis.settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False)
    @hypothesis.given(make.cases(pair, dtype))
    def prove(case: Case) -> None:
        try:
            check(case)
        except equivalence.NotEquivalent as error:
            raise equivalence.NotEquivalent(f"{error}\ndraw: {make.case_line(case)}") from None
        except (PerfsuiteError, hypothesis.errors.HypothesisException):
            raise
        except Exception as error:
            told = f"{pair.name}: a side raises {type(error).__name__}: {error}\ndraw: {make.case_line(case)}"
            raise equivalence.NotEquivalent(told) from error

    prove()


def measure(pair: Pair, *, device: str | None = None) -> tuple[Measurement, ...]:
    """Time every workload of the pair in this process, each after its proof on the very inputs timed.

    Workloads for another kind of device are left out.
    """
    pair.validate()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(
        sampling.measure(pair, workload, workload_id=f"{pair.name}::speed[{workload.name}]", device=where)
        for workload in pair.workloads
        if workload.device in (None, where) and execution.unavailable(as_side(pair.optimized), where) is None
    )
