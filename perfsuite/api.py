"""`check` and `measure`: a pair's proofs and timings from Python, for notebooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch

from perfsuite import contexts, diagnosis, effects, equivalence, execution, guard, integrity, interpreter, measuring
from perfsuite import inputs as make
from perfsuite.errors import PerfsuiteError
from perfsuite.pair import Pair, as_side
from perfsuite.records import Case, Evidence, Measurement

FEW_DRAWS = 3


def check(pair: Pair, *, examples: int = 25, device: str | None = None) -> tuple[Evidence, ...]:
    """Prove the pair equal in each of its dtypes, gradients included, and its integrity; the evidence of each proof.

    NotEquivalent, with the offending draw in one of its last lines, where a side is not the same function.
    """
    found = [prove() for _, prove in proofs(pair, examples=examples, device=device)]
    guard.check()
    return tuple(e for e in found if e is not None)


def proofs(
    pair: Pair, *, examples: int = 25, device: str | None = None
) -> Iterator[tuple[str, Callable[[], Evidence | None]]]:
    """(name, proof) for all that `check` does, one by one: a proof raises NotEquivalent, or gives its evidence."""
    interpreter.quicken()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gradients = pair.gradients and not pair.is_stateful and bool(execution.differentiable(pair))
    for dtype in pair.dtypes:
        for with_gradients in (False, True) if gradients else (False,):
            kind = "gradients" if with_gradients else "equivalence"
            yield f"{kind}[{dtype}]", functools.partial(_equivalence, pair, dtype, examples, where, with_gradients)
    for name, check, strategy in (
        ("integrity", integrity.check, make.plain_cases),
        ("integrity, any draw", integrity.check, make.cases),
        ("contexts", contexts.check, make.plain_cases),
        ("effects", effects.check, make.plain_cases),
        ("effects, any draw", effects.check, make.cases),
    ):
        whole = functools.partial(check, pair, device=where)
        yield name, functools.partial(_hold, pair, pair.dtypes[0], FEW_DRAWS, whole, strategy)
    if pair.truth is not None:
        yield (
            "truth",
            functools.partial(
                _hold, pair, "float64", examples, lambda case: equivalence.check_truth(pair, case, where)
            ),
        )


def _equivalence(pair: Pair, dtype: str, examples: int, device: str, gradients: bool) -> Evidence:
    tally = equivalence.Tally()
    try:
        _hold(
            pair,
            dtype,
            examples,
            functools.partial(equivalence.check_case, pair, device=device, gradients=gradients, tally=tally),
        )
    except equivalence.NotEquivalent as error:
        raise diagnosis.explained(error, pair, as_side(pair.optimized), device, gradients=gradients) from None
    return tally.evidence(pair, dtype, device)


def _hold(
    pair: Pair, dtype: str, examples: int, check: Callable[[Case], None], strategy: Callable[..., Any] = make.cases
) -> None:
    """Run the check over draws of the pair; a failing one shrinks, and ends the message."""

    @hypothesis.settings(
        max_examples=min(examples, pair.max_examples or examples),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=make.PHASES,
    )
    @hypothesis.given(strategy(pair, dtype))
    def prove(case: Case) -> None:
        try:
            check(case)
        except equivalence.NotEquivalent as error:
            raise equivalence.NotEquivalent(f"{error}\ndraw: {make.case_line(case)}", case) from None
        except (PerfsuiteError, hypothesis.errors.HypothesisException):
            raise
        except Exception as error:
            told = f"{pair.name}: a side raises {type(error).__name__}: {error}\ndraw: {make.case_line(case)}"
            raise equivalence.NotEquivalent(told, case) from error

    try:
        prove()
    except BaseExceptionGroup as group:
        found = diagnosis.unstable(group)
        if found is None:
            raise
        raise found from None


def measure(pair: Pair, *, device: str | None = None) -> tuple[Measurement, ...]:
    """Time every workload of the pair in this process, each after its proof on the very inputs timed.

    Workloads for another kind of device are left out.
    """
    pair.validate()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(
        measuring.measure(pair, workload, workload_id=f"{pair.name}::speed[{workload.name}]", device=where)
        for workload in pair.workloads
        if workload.device in (None, where) and execution.unavailable(as_side(pair.optimized), where) is None
    )
