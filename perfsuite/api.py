"""`check` and `measure`: a pair's proofs and timings from Python, for notebooks."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import hypothesis
import torch

from perfsuite.correctness import (
    contexts,
    convolutions,
    diagnosis,
    effects,
    equivalence,
    execution,
    integrity,
    remedies,
)
from perfsuite.correctness import proofs as proof_list
from perfsuite.correctness.ranks import group
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.draws import coverage
from perfsuite.draws.cases import PHASES, case_line, cases, plain_cases
from perfsuite.errors import MachineError, NotEquivalent, PairError, PerfsuiteError
from perfsuite.measured import Measured
from perfsuite.records import REFERENCE, Case, Evidence
from perfsuite.session import planned_draws
from perfsuite.system import tamper, triton_interpreter
from perfsuite.timing import measuring

FEW_DRAWS = 3


def check(pair: Pair, *, examples: int = 25, device: str | None = None) -> tuple[Evidence, ...]:
    """Run the proofs that `pytest -m correctness` runs, and return the evidence of each.

    Three proofs are left to pytest: compiling the kernels ahead, and calling the sides outside the test and in several
    processes. The last two import the pair's module in another process.

    Each proof has at least `examples` draws, and at least one of every kind of inputs. Raises NotEquivalent if a side
    is not the same function. One of the last lines of its message has the failing draw.
    """
    found = [prove() for _, prove in proofs(pair, examples=examples, device=device)]
    tamper.check()
    return tuple(e for e in found if e is not None)


def proofs(
    pair: Pair, *, examples: int = 25, device: str | None = None
) -> Iterator[tuple[str, Callable[[], Evidence | None]]]:
    """Yield (name, proof) for everything that `check` does. A proof raises NotEquivalent, or returns its evidence."""
    where = _device(pair, device)
    if examples < 1:
        raise PairError(f"examples={examples} is no number of draws; give 1 or more")
    triton_interpreter.quicken()
    pair.validate_functions()
    for name, prove in _proofs(pair, examples, where):
        yield name, functools.partial(_proven, pair, where, prove)


def _device(pair: object, wanted: str | None) -> str:
    """Return the device to use. Raises PerfsuiteError if `pair` is no Pair, or if this machine has no such device."""
    if not isinstance(pair, Pair):
        raise PairError(f"a perfsuite.Pair is needed, and this is a {type(pair).__name__}")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted is not None and wanted.partition(":")[0] not in ("cpu", best):
        raise MachineError(f"device={wanted!r}: torch has no such device here; leave it out for {best!r}")
    return wanted or best


def _proven(pair: Pair, device: str, prove: Callable[[], Evidence | None]) -> Evidence | None:
    with convolutions.exact(pair.precision), group.alone(pair, device):
        return prove()


def _proofs(pair: Pair, examples: int, where: str) -> Iterator[tuple[str, Callable[[], Evidence | None]]]:
    for proof in proof_list.of(pair):
        if proof.side is not None:
            if execution.unavailable(proof.side, where) is None:
                yield proof.name, functools.partial(_equivalence, pair, proof, examples, where)
            continue
        if proof.kind not in _CHECKS:
            continue  # needs a module that another process can import
        check, strategies = _CHECKS[proof.kind]
        whole = functools.partial(check, pair, device=where)
        most = examples if proof.kind == proof_list.TRUTH else FEW_DRAWS
        for words, strategy in strategies.items():
            seed = secrets.randbits(31)
            last = [] if words else list(planned_draws.large(pair, proof.kind, proof.dtype, seed, where))
            hold = functools.partial(_hold, pair, proof.dtype, most, whole, strategy, last=last)
            yield f"{proof.kind}{words}", hold


_PLAIN, _ANY = {"": plain_cases}, {"": plain_cases, ", any draw": cases}
_CHECKS: dict[str, tuple[Callable[..., None], dict[str, Callable[..., Any]]]] = {
    proof_list.INTEGRITY: (integrity.check, _ANY),
    proof_list.CONTEXTS: (contexts.check, _PLAIN),
    proof_list.EFFECTS: (effects.check, _ANY),
    proof_list.TRUTH: (lambda pair, case, device: equivalence.check_truth(pair, case, device), {"": cases}),
}


def _equivalence(pair: Pair, proof: proof_list.Proof, examples: int, device: str) -> Evidence:
    tally, gradients = Tally(), proof.kind == proof_list.GRADIENTS
    side = proof.side or as_side(pair.optimized)
    check = functools.partial(
        equivalence.check_case,
        pair,
        device=device,
        side=side,
        side_name=proof.side_name,
        gradients=gradients,
        tally=tally,
    )
    try:
        seed = secrets.randbits(31)
        first = list(planned_draws.every_kind(pair, proof.kind, proof.dtype, seed, device))
        last = planned_draws.further(pair, proof.dtype, seed, device, tally)
        _hold(pair, proof.dtype, examples, check, first=first, last=last, tally=tally)
    except NotEquivalent as error:
        raise diagnosis.explained(error, pair, side, device, gradients=gradients) from None
    tally.check(pair)
    return tally.evidence(pair, proof.dtype, device)


def _hold(
    pair: Pair,
    dtype: str,
    examples: int,
    check: Callable[[Case], None],
    strategy: Callable[..., Any] = cases,
    *,
    first: Sequence[Case] = (),
    last: Iterable[Case] = (),
    tally: Tally | None = None,
) -> None:
    """Run the check on the first draws, then on random ones, then on the last ones.

    A failing random draw is shrunk. The message ends with the failing draw. Draws on which the reference raises are
    discarded, and counted in the tally.
    """
    check_draw: Callable[[Case], None] = functools.partial(_check_draw, pair, check, tally)
    prove_draw = planned_draws.cut_after_failure(check_draw) if tally is not None else check_draw
    left = examples - coverage.replaced(len(first), examples)

    @hypothesis.settings(
        max_examples=min(left, pair.max_examples or left),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=PHASES,
    )
    @hypothesis.given(strategy(pair, dtype))
    def prove(case: Case) -> None:
        prove_draw(case)

    try:
        with execution.restoring_global_state(pair):
            failure, _ = coverage.first_failure(check_draw, first)
            prove()
            if failure is not None:
                raise failure
            for case in last:
                check_draw(case)
    except BaseExceptionGroup as errors:
        found = diagnosis.unstable(errors)
        if found is None:
            raise
        raise found from None


def _check_draw(pair: Pair, check: Callable[[Case], None], tally: Tally | None, case: Case) -> None:
    """Run the check on a draw. Raises NotEquivalent, which names the draw, if the check fails or the optimized side
    raises; discards the draw if the reference raises."""
    try:
        check(case)
    except NotEquivalent as error:
        message = f"{error}\ndraw: {case_line(case)}"
        failure = NotEquivalent(message, case, names_its_cause=error.names_its_cause)
        failure.steps = error.steps
        raise failure from None
    except (PerfsuiteError, hypothesis.errors.HypothesisException):
        raise
    except Exception as error:
        of_reference = remedies.is_of_reference(error)
        who = REFERENCE if of_reference else "optimized side"
        raised = f"{pair.name}: the {who} raises {type(error).__name__}: {error}{remedies.remedy_of(error, pair, case)}"
        failure = NotEquivalent(f"{raised}\ndraw: {case_line(case)}", case)
        if not of_reference:
            raise failure from error
        if tally is not None:
            tally.discard(failure)


def measure(pair: Pair, *, device: str | None = None) -> Measured:
    """Time every workload of the pair in this process, after proving it on the same inputs.

    The result is a tuple of `Measurement` that prints as a table. Its `.speedups` has the figures, and `.plot()` draws
    them.

    Workloads for another kind of device, or for several processes, are left out.
    """
    where = _device(pair, device)
    pair.validate()
    with convolutions.exact(pair.precision), group.alone(pair, where):
        return Measured(
            measuring.measure(pair, workload, workload_id=f"{pair.name}::speed[{workload.name}]", device=where)
            for workload in pair.workloads
            if workload.device in (None, where)
            and workload.ranks == 1
            and execution.unavailable(as_side(pair.optimized), where) is None
        )
