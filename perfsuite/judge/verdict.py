"""Judge the candidates of one problem: prove several at the same time, then time them one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from perfsuite.correctness import convolutions
from perfsuite.errors import NotEquivalent
from perfsuite.gate.exit_codes import CODE_AT_FAULT, GREEN, UNDECIDED
from perfsuite.judge import problem as problems
from perfsuite.judge.process import Ended, Nursery, refuse_where_unsupported, shortened
from perfsuite.judge.timing import STAND_IN, UNCERTAIN, Ratio, Times, Unusable, time_candidate
from perfsuite.judge.trial import Served, prove

COMPILE_PATIENCE = 5
"""torch.compile of the reference may take this multiple of the limit on a request."""
RIVALS = {
    "reference": "the reference, in a process of its own,",
    "compile": "torch.compile of the reference",
    STAND_IN: "the reference, in a second process of its own,",
}
OTHERWISE = {"compile": "; --no-compile times without it"}
OTHER_NAMES = "; its parameters have other names than the reference's, so that both were built from one seed"
PACKED = (
    "; the parameters are set after __init__: if {} is computed from them there, let it be computed at the first call"
)
NEEDS_GPU = "; it names CUDA or Triton, and was run on the CPU: judge it on a machine with a GPU"
NOT_VARIED = "its parameters have other names than the reference's, so whether it uses {} (0 or 1) was not tested"
FASTER = 1.05
"""Least speedup of a candidate that computes with the reference's own operations; below it, the candidate counts as a
copy of the reference."""
TOO_SHORT = 0.05
"""Largest share by which the seconds of a call may be uncertain. Beyond it the call is too short, and measuring longer
would not help."""
AT_ONCE = 4
"""Number of candidates for each proving thread that are proven before the correct ones among them are timed."""


class Status(StrEnum):
    """Outcome of judging a candidate."""

    PASS = "PASS"
    NOT_EQUIVALENT = "NOT_EQUIVALENT"
    TOO_SLOW = "TOO_SLOW"
    NOISY = "NOISY"


EXIT_CODES = {
    Status.PASS: GREEN,
    Status.NOT_EQUIVALENT: CODE_AT_FAULT,
    Status.TOO_SLOW: CODE_AT_FAULT,
    Status.NOISY: UNDECIDED,
}


@dataclass(slots=True)
class Verdict:
    """The verdict on one candidate."""

    candidate: str
    status: Status = Status.NOISY
    message: str = ""
    draws: int = 0
    worst: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    speedup: Ratio | None = None
    """Speedup over the reference."""
    against_compile: Ratio | None = None
    borrowed: str = ""
    """The PyTorch operations of the reference, if the candidate also runs all of them."""
    excused: int = 0
    """Elements in which it differs and which the reference's `excuse` leaves out."""
    same_parameters: bool = True
    not_tested: list[str] = field(default_factory=list)
    """The reference's parameters and buffers of which a candidate with other names may make no use: scales of 1 and
    biases of 0."""
    not_confined: list[str] = field(default_factory=list)
    """The restrictions that this machine cannot enforce on the candidate."""

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {**dataclasses.asdict(self), "status": str(self.status)}


@dataclass(frozen=True, slots=True)
class Options:
    """Options for judging candidates."""

    device: str
    least: float = 1.0
    """Required speedup."""
    seconds: float = 10.0
    limit_s: float = 60.0
    """Seconds for one request to a process: a build, or a batch of calls."""
    compiled: bool = True
    """Whether torch.compile of the reference is timed too."""
    precision: str | None = None
    """Precision, as a pair declares it: with "tf32", float32 products and convolutions may use TF32."""


def judge(
    reference: Path,
    candidates: Sequence[Path],
    options: Options,
    done: Callable[[Verdict], None] = lambda v: None,
    nursery: Nursery | None = None,
) -> list[Verdict]:
    """Return a verdict on each candidate, in their order; `done` is called with each.

    A `nursery` that is passed in is not closed. Raises PerfsuiteError if the reference is not usable or a file is
    missing.
    """
    refuse_where_unsupported()
    for path in candidates:
        problems.check_file(path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(convolutions.exact(options.precision))
        problem = problems.load(reference, options.device, secrets.randbits(31), options.precision)
        varied = problem.varied()
        beside = max(1, len(os.sched_getaffinity(0)) // 2) if options.device == "cpu" else 2
        nursery = nursery or stack.enter_context(contextlib.closing(Nursery()))
        found: list[Verdict] = []
        # Nothing is timed while a proof runs, and only this many processes wait to be timed.
        for first in range(0, len(candidates), AT_ONCE * beside):
            some = candidates[first : first + AT_ONCE * beside]
            with contextlib.ExitStack() as started:
                prove_one = partial(_prove, started, nursery, problem, varied, options)
                with ThreadPoolExecutor(beside) as pool:
                    proven = list(pool.map(prove_one, some))
                for verdict, served in proven:
                    if served is not None:
                        with contextlib.closing(served):
                            _time(nursery, served.problem, served, verdict, options)
                    found.append(verdict)
                    done(verdict)
        return found


def _prove(
    started: contextlib.ExitStack,
    nursery: Nursery,
    problem: problems.Problem,
    varied: problems.Problem,
    options: Options,
    path: Path,
) -> tuple[Verdict, Served | None]:
    """Prove a candidate. Return (its verdict, its process if it is correct).

    It gets the `varied` weights if its parameters have the reference's names and shapes. `started` ends its process if
    nobody has ended it before, as when another candidate's proof raises.
    """
    verdict = Verdict(candidate=str(path), status=Status.NOT_EQUIVALENT)
    served: Served | None = None
    try:
        served = _candidate(nursery, varied, path, options)
        started.callback(served.close)
        verdict.not_confined, verdict.same_parameters = served.process.lacking, served.same_parameters
        if not served.same_parameters:
            served.problem = problem  # it was built from the seed
            verdict.not_tested = problem.neutral
        proof = prove(served.problem, served)
        verdict.draws, verdict.worst, verdict.borrowed = proof.draws, proof.worst, proof.borrowed
        verdict.excused = proof.excused
    except (Ended, NotEquivalent) as error:
        verdict.message = f"it {error}" if isinstance(error, Ended) else str(error)
        if isinstance(error, Ended) and options.device == "cpu" and _names_gpu(path):
            verdict.message += NEEDS_GPU
        if served is not None:
            if not served.same_parameters:
                verdict.message += OTHER_NAMES
            elif served.kept and problem.state and isinstance(error, NotEquivalent):
                verdict.message += PACKED.format(shortened(", ".join(served.kept)))
            served.close()
        return verdict, None
    return verdict, served


def _names_gpu(path: Path) -> bool:
    text = path.read_bytes().lower()
    return b"cuda" in text or b"triton" in text


def _candidate(nursery: Nursery, problem: problems.Problem, path: Path, options: Options) -> Served:
    return Served.start(nursery, problem, path, problems.CANDIDATE, options.limit_s)


def _time(nursery: Nursery, problem: problems.Problem, served: Served, verdict: Verdict, options: Options) -> None:
    """Time a proven candidate against the reference, each in its own process, and complete the verdict."""
    sides, path = {"candidate": served}, Path(verdict.candidate)
    names = ["reference", *(["compile"] if options.compiled else [])]
    try:
        for name in names:
            sides[name] = _rival(nursery, problem, name, options)
        times = time_candidate(
            problem,
            sides,
            "candidate",
            seconds=options.seconds,
            least=options.least,
            again=lambda: _candidate(nursery, problem, path, options),
            stand_in=lambda: _rival(nursery, problem, "reference", options),
        )
    except Ended as error:
        verdict.message = f"while it is timed, it {error}"
    except NotEquivalent as error:
        verdict.message = str(error)
    except Unusable as error:
        verdict.status = Status.NOISY
        verdict.message = f"not timed: {RIVALS[error.side]} {error}{OTHERWISE.get(error.side, '')}"
    else:
        _decide(times, verdict, options)
    finally:
        for name, side in sides.items():
            if name != "candidate":
                side.close()


def _rival(nursery: Nursery, problem: problems.Problem, name: str, options: Options) -> Served:
    """Start the reference in a process of its own, compiled or not. Raises Unusable if that fails."""
    limit = options.limit_s * (COMPILE_PATIENCE if name == "compile" else 1)
    try:
        return Served.start(nursery, problem, problem.file, problems.MODEL, limit, compiled=name == "compile")
    except (Ended, NotEquivalent) as error:
        raise Unusable(name, str(error)) from None


def _decide(times: Times, verdict: Verdict, options: Options) -> None:
    verdict.seconds = dict(times.seconds)
    verdict.speedup, verdict.against_compile = times.ratios["reference"], times.ratios.get("compile")
    asked = max(options.least, FASTER) if verdict.borrowed else options.least
    borrowed = f"it computes with the reference's own operations of torch's ({verdict.borrowed}), not with a kernel"
    if verdict.borrowed and verdict.speedup.high < FASTER:
        verdict.status, verdict.message = Status.NOT_EQUIVALENT, f"{borrowed}, and is no faster"
    elif verdict.speedup.low >= asked:
        verdict.status = Status.PASS
        untested = NOT_VARIED.format(", ".join(verdict.not_tested)) if verdict.not_tested else ""
        excused = f"excuse() left out {verdict.excused} elements in which it differs" if verdict.excused else ""
        parts = [borrowed if verdict.borrowed else "", shortened(untested), excused]
        verdict.message = "; ".join(filter(None, parts))
    elif verdict.speedup.high < options.least:
        verdict.status = Status.TOO_SLOW
        verdict.message = (
            f"it is {verdict.speedup.value:.3g} times as fast as the reference, and {options.least:g} is asked"
        )
    else:
        verdict.status = Status.NOISY
        remedy = "measure longer, with --seconds"
        if UNCERTAIN * times.messages_s > TOO_SHORT * times.seconds["candidate"]:
            remedy = (
                f"its call takes {times.seconds['candidate'] * 1e6:.3g} µs, too little beside the "
                f"{times.messages_s * 1e6:.3g} µs of the messages for it; give larger inputs in get_inputs()"
            )
        verdict.message = (
            f"{borrowed}; "
            * bool(verdict.borrowed)
            + f"between {verdict.speedup.low:.3g} and {verdict.speedup.high:.3g} times as fast as the reference, and "
            f"{asked:g} is asked: {remedy}"
        )
