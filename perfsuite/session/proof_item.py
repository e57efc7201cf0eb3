"""A pytest item that proves one property of a pair on drawn inputs, within a time limit."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis.reporting import with_reporter

from perfsuite import faults
from perfsuite.correctness import convolutions, diagnosis, execution, outside, proofs, remedies, side_calls, truths
from perfsuite.correctness.compilations import untraced
from perfsuite.correctness.ranks import group
from perfsuite.correctness.shared_truths import cached_results
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.draws import coverage
from perfsuite.draws.cases import PHASES, case_line, cases, parse_case, plain_cases, requested_case
from perfsuite.draws.discarded_draws import is_left_out
from perfsuite.errors import NotEquivalent, PairError, PerfsuiteError, first_line, users_frame
from perfsuite.records import REFERENCE, Case, Evidence
from perfsuite.session import planned_draws
from perfsuite.system import sanitizer, tamper

EXAMPLES = {"dev": 25, "ci": 25, "thorough": 500}

FEW_EXAMPLES = {"dev": 3, "ci": 3, "thorough": 30}

FEW = (proofs.INTEGRITY, proofs.CONTEXTS, proofs.EFFECTS, proofs.OUTSIDE, proofs.RANKS)
"""Kinds of proofs with many calls per draw, for which a handful of draws is enough."""

ANY_DRAW = (proofs.INTEGRITY, proofs.EFFECTS)
"""Proofs in FEW for which edge sizes, layouts and special values matter, after a few plain draws."""

EVERY_KIND = ("equivalence", "gradients")
"""Kinds of proofs that draw every kind of inputs at least once."""

FORWARD_ONLY = ("equivalence", proofs.TRUTH)
"""Kinds whose draws have no backward pass."""

PLAIN_ONLY = (proofs.CONTEXTS, proofs.OUTSIDE, proofs.RANKS)
"""Proofs in FEW for which plain draws are enough."""

OTHER_PARAMETERS = ("positional argument", "keyword-only argument")
"""Parts of Python's message if a function is called with arguments that it does not accept."""

SMALL_STEP_EXAMPLES = 8
"""Fewest draws of a stateful pair, which runs 100 steps per draw and therefore has fewer draws."""

MORE_DRAWS = 2
"""Ratio of Hypothesis's draws to the number of cases to prove. Hypothesis draws some cases, mostly small ones, several
times."""

Prove = Callable[[Case, Tally], None]


class Hang(BaseException):
    """An item exceeded its time limit. Not a subclass of Exception, so that no handler swallows or retries it."""


class OverTime(Hang):
    """The time limit interrupted a line, which the traceback shows."""


def device() -> str:
    """Return the device on which correctness items run: the GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class _Distinct:
    """Filter that accepts `most` different cases and, after a failure, further cases that shrink it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.passed: set[str] = set()
        self.failed = False

    @contextmanager
    def wanted(self, case: Case) -> Iterator[bool]:
        """Yield whether the case is to be proven. The block must raise if the proof fails."""
        line = case_line(case)
        wanted = line not in self.passed and (self.failed or len(self.passed) < self.most)
        try:
            yield wanted
        except hypothesis.errors.UnsatisfiedAssumption:
            raise
        except BaseException:
            self.failed = True
            raise
        if wanted:
            self.passed.add(line)


class ProofItem(pytest.Function):
    """Item that proves a property over Hypothesis draws. It fails with a readable message and a command that reproduces
    the failure."""

    def __init__(
        self,
        *,
        name: str,
        parent: pytest.Collector,
        pair: Pair,
        dtype: str,
        prove: Prove,
        side: Side | None = None,
        **kwargs: Any,
    ) -> None:
        self.pair, self.dtype, self.prove, self.side, self.home = pair, dtype, prove, side, parent.path.parent
        self.tally = Tally()
        self.evidence: Evidence | None = None
        self.current: Case | None = None
        self.report: Callable[[str], None] = lambda line: None
        """Called with each draw before it is proven."""
        self.only: str = parent.config.option.perfsuite_case or ""
        """The only draw to prove; empty for all."""
        self.alone = ""
        """The only side to call on that draw, instead of a proof; empty for a proof."""
        self.lacked_memory = False
        """Whether a side ran out of device memory on some draw."""
        self.left_out: tuple[str, ...] = ()
        """Draws that are left out, because the reference faults on them."""
        self.kind = name.partition("[")[0]
        self._gradients = pair.gradients and self.kind not in FORWARD_ONLY
        profile = parent.config.option.perfsuite_profile or ("ci" if os.environ.get("CI") else "dev")
        self.limit_s = pair.time_limit * EXAMPLES[profile] / EXAMPLES["dev"]
        node = f"{parent.nodeid}::{name}"
        # The same for all sides of the pair, so that they are proven on the same draws.
        self.seed = _seed(parent, f"{self.kind} {dtype}", profile) if self.kind in EVERY_KIND else None
        self.large_seed = _seed(parent, f"{self.kind} {dtype}, large", profile)
        # Many faults need several elements to be visible, but draws of every kind are mostly tiny.
        self.first = self._test(profile, f"{node}, first", plain_cases) if self.kind in ANY_DRAW else None
        strategy = plain_cases if self.kind in PLAIN_ONLY else cases
        super().__init__(name=name, parent=parent, callobj=self._test(profile, node, strategy, self.seed), **kwargs)

    def _test(self, profile: str, nodeid: str, strategy: Callable[..., Any], seed: int | None = None) -> Any:
        examples = (FEW_EXAMPLES if self.kind in FEW else EXAMPLES)[profile]
        if self.pair.is_stateful and self.kind not in FEW:
            examples = max(SMALL_STEP_EXAMPLES, examples // 8)
        examples = min(examples, self.pair.max_examples or examples)
        self.distinct = distinct = _Distinct(examples)
        prove = self._prove if self.kind in FEW else planned_draws.cut_after_failure(self._prove)

        @hypothesis.settings(
            max_examples=examples if self.kind in FEW else MORE_DRAWS * examples,
            derandomize=profile == "ci",  # ignores earlier failures too
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=PHASES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        )
        @hypothesis.given(case=strategy(self.pair, self.dtype))
        def prove_draws(case: Case) -> None:
            __tracebackhide__ = True
            if profile != "thorough":
                sizes, few = cached_results(self.pair).sizes, self.kind in FEW
                plans = device() == "cuda"
                case = sizes.settled(self.pair, case, gradients=self._gradients, few=few, plans=plans)
            if self.kind in FEW:
                self._prove(case)
                return
            with distinct.wanted(case) as wanted:
                if wanted:
                    prove(case)

        wrapped: Any = prove_draws
        # Hypothesis derives the seed of a derandomised test from its function, which is the same for every pair.
        wrapped.hypothesis.inner_test._hypothesis_internal_add_digest = nodeid.encode()
        # Not hypothesis.seed, which would also disable the database of failures.
        wrapped._hypothesis_internal_use_seed = seed
        return wrapped

    def _prove(self, case: Case) -> None:
        self.current = case
        if is_left_out(self.pair, case, self.left_out):
            self.tally.draws += 1
            self.tally.discarded += 1
            return
        self.report(case_line(case))
        try:
            self._judge(case)
        finally:  # a GPU fault makes every later operation fail, so it takes precedence over this draw's result
            faults.check()

    def _judge(self, case: Case) -> None:
        try:
            with cached_results(self.pair).sizes.noting(case, gradients=self._gradients):
                self.prove(case, self.tally)
        except (NotEquivalent, PairError) as error:
            error.case = case
            raise
        except (hypothesis.errors.HypothesisException, hypothesis.errors.UnsatisfiedAssumption, outside.Unsendable):
            raise
        except (Exception, SystemExit) as error:
            self.lacked_memory |= faults.lacks_memory(error)
            failure = NotEquivalent(self._raised(error, case), case)
            if isinstance(error, SystemExit) or not remedies.is_of_reference(error):
                raise failure from None
            self.tally.discard(failure)

    def _raised(self, error: BaseException, case: Case) -> str:
        who, where = _side_of(error), _place(error)
        if faults.lacks_memory(error):
            return f"{self.pair.name}: the {who} runs out of memory{where}: {first_line(error)}"
        sized = who == REFERENCE and not isinstance(error, (TypeError, NameError, AttributeError))
        remedy = "; bound the sizes it is drawn at with sizes= or where=" if sized else ""
        remedy = remedies.remedy_of(error, self.pair, case) or remedy
        if isinstance(error, TypeError) and any(words in str(error) for words in OTHER_PARAMETERS):
            names, of_step = ", ".join(self.pair.inputs), ", ".join(self.pair.step_inputs)
            remedy = f"; a side is called with its inputs by position, in this order: {names}; wrap it if it is not so"
            if self.pair.is_stateful:
                remedy = (
                    f"; a factory is called with the inputs by position ({names}), and the step that it returns with "
                    f"the step inputs ({of_step})"
                )
        return f"{self.pair.name}: the {who} raises {type(error).__name__}{where}: {first_line(error)}{remedy}"

    def runtest(self) -> None:
        __tracebackhide__ = True
        try:
            self._run()
        except BaseException as error:
            self.lacked_memory |= faults.mentions_memory(error)
            raise

    def _run(self) -> None:
        __tracebackhide__ = True
        # The item's own message says how to reproduce a failure. Hypothesis's would be about an internal test.
        with (
            time_limit(self.limit_s * sanitizer.slower()),
            with_reporter(lambda message: None),
            untraced(),
            execution.few_threads(device()),
            convolutions.exact(self.pair.precision),
            group.alone(self.pair, device()),
        ):
            try:
                if self.alone:
                    self._call_alone(parse_case(self.only, self.dtype))
                    return
                with execution.restoring_global_state(self.pair):
                    self._prove_all()
            except outside.Unsendable as error:
                pytest.skip(f"not called outside of a test: {error}")
            except NotEquivalent as error:
                raise self._explained(error) from None
        tamper.check()
        self.tally.check(self.pair)
        if self.kind in EVERY_KIND:
            self.evidence = self.tally.evidence(self.pair, self.dtype, device())

    def _prove_all(self) -> None:
        __tracebackhide__ = True
        if self.only:
            self._prove(requested_case(self.only, self.pair, self.dtype))
            return
        if self.first is not None:
            self.first()
        for case in planned_draws.large(self.pair, self.kind, self.dtype, self.large_seed, device()):
            self.tally.large.append(case_line(case))
            self._prove(case)
        failure = self._draw_every_kind()
        super().runtest()
        if failure is not None:
            raise failure
        if self.kind == proofs.RANKS:
            for case in planned_draws.in_ranks(self.pair, self.dtype, self.large_seed, device()):
                self._prove(case)
        if self.seed is not None:
            for case in planned_draws.further(self.pair, self.dtype, self.seed, device(), self.tally):
                self._prove(case)
        if self.tally.numbers:
            self._complete_turns()

    def _complete_turns(self) -> None:
        """Prove the last draw again with the checks of those turns that no draw had, because draws were repeated."""
        numbers = self.tally.numbers
        line = list(numbers)[-1]
        for number in range(len(numbers), proofs.TURNS):
            numbers[line] = number
            self._prove(parse_case(line, self.dtype))

    def _draw_every_kind(self) -> NotEquivalent | None:
        """Prove draws that together contain every kind of inputs, and reduce the number of random draws by them. Return
        the first failure, or None."""
        if self.seed is None:
            return None
        sizes = cached_results(self.pair).sizes
        cases = planned_draws.every_kind(
            self.pair, self.kind, self.dtype, self.seed, device(), compiles=lambda: sizes.compiles
        )
        failure, number = coverage.first_failure(self._prove, cases)
        if failure is None:
            self.distinct.most -= coverage.replaced(number, self.distinct.most)
        return failure

    def _call_alone(self, case: Case) -> None:
        """Call one side on the draw. Its outputs are not compared, since only whether it returns matters."""
        pair, gradients = self.pair, self.kind == proofs.GRADIENTS
        how: dict[str, Any] = {"gradients": gradients, "call_side": side_calls.proof_call(case, gradients=gradients)}
        self.current = case
        self.report(case_line(case))
        try:
            if self.alone == REFERENCE:
                with contextlib.suppress(truths.Discard):
                    truths.establish(pair, case, device(), home=self.home, **how)
            else:
                side = self.side or as_side(pair.optimized)
                side_calls.produce(pair, side, case, device(), home=self.home, **how)
        finally:
            faults.check()

    def _explained(self, error: NotEquivalent) -> NotEquivalent:
        __tracebackhide__ = True
        if self.side is None:
            return error
        gradients = self.kind == "gradients"
        return diagnosis.explained(error, self.pair, self.side, device(), gradients=gradients, home=self.home)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        text = self._failure(excinfo, style)
        if faults.mentions_memory(excinfo.value) and (crowd := faults.crowd()):
            return (
                f"{self.pair.name}: no verdict, for lack of memory: {crowd}; prove again when they have ended\n{text}"
            )
        return text

    def _failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any) -> Any:
        error = excinfo.value
        if isinstance(error, faults.DeviceFault):
            return self._with_case(
                f"{self.pair.name}: a GPU kernel faults ({error}), after which every proof of this process fails; "
                f"without --pdb and -s each proof has a process that is replaced",
                self.current,
            )
        if isinstance(error, Hang):
            where = _place(error) if isinstance(error, OverTime) else ""
            within = f"in the {_side_of(error)}{where}: " if where else ""
            return self._with_case(f"{self.pair.name}: {within}{error}", self.current)
        if isinstance(error, (NotEquivalent, PairError)):
            return self._with_case(str(error), error.case)
        if isinstance(error, PerfsuiteError):
            return str(error)
        if isinstance(error, BaseExceptionGroup):
            found = diagnosis.unstable(error)
            if found is not None:
                return self._with_case(str(found), found.case)
        if isinstance(error, (hypothesis.errors.Unsatisfiable, hypothesis.errors.FailedHealthCheck)):
            return (
                f"{self.pair.name}: too few sizes satisfy where=; "
                f"give sizes={{name: size(low, high, multiple_of=…)}} instead"
            )
        return super().repr_failure(excinfo)

    def _with_case(self, message: str, case: Case | None) -> str:
        if case is None:
            return message
        return self.with_reproduction(message, case_line(case))

    def with_reproduction(self, message: str, line: str) -> str:
        """Return the message and the command that proves this draw again. If the inputs are few numbers, include
        them."""
        text = f"{message}\nreproduce: pytest {shlex.quote(self.nodeid)} --perfsuite-case={shlex.quote(line)}"
        inputs = diagnosis.shown(self.pair, parse_case(line, self.dtype), self.home)
        return f"{text}\ninputs: {inputs}" if inputs else text

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid.partition("::")[2].replace("::", ".")


def _seed(collector: pytest.Collector, proof: str, profile: str) -> int:
    """Return the seed of a proof's draws. It is the same for every side, and differs between runs unless the profile is
    "ci"."""
    run = "" if profile == "ci" else _seed_of_run(collector.config)
    return int.from_bytes(hashlib.sha256(f"{run} {collector.nodeid} {proof}".encode()).digest())


def _seed_of_run(config: pytest.Config) -> str:
    """Return the seed of the run: that of --hypothesis-seed, else a common one for all workers of xdist, else a random
    one of this process."""
    given = config.getoption("hypothesis_seed", None)
    if given is not None:
        return str(given)
    return os.environ.get("PYTEST_XDIST_TESTRUNUID") or _RUN


_RUN = secrets.token_hex()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the main thread after `seconds`. End the process 30 s later if Python cannot interrupt it."""

    def expire(signum: int, frame: Any) -> None:
        raise OverTime(
            f"hangs: stopped after its time limit of {seconds:g} s; if it compiles or tunes for so long, raise the "
            f"pair's time_limit"
        )

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(Exception):  # no real stderr under some captures
        faulthandler.dump_traceback_later(seconds + 30, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def _here() -> Path:
    return Path.cwd()


def _side_of(error: BaseException) -> str:
    return REFERENCE if remedies.is_of_reference(error) else "optimized side"


def _place(error: BaseException) -> str:
    """Return " at FILE:LINE" for the innermost line of the user's code in the error's traceback, or ""."""
    frame = users_frame(error)
    return f" at {_relative(frame.filename)}:{frame.lineno}" if frame is not None else ""


def _relative(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_here())) if _here() in path.parents else filename
