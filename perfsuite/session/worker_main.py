"""Run the tasks of a worker process, and write a line with the outcome of each."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import secrets
import warnings
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import pytest

from perfsuite import faults
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side, module_of
from perfsuite.errors import (
    HarnessFault,
    NoisyError,
    NotEquivalent,
    NotTimed,
    PerfsuiteError,
    RevisionError,
    TamperedError,
    in_one_line,
)
from perfsuite.records import Alone, Measurement, Ran, Status, WorkloadProof
from perfsuite.revisions import revision
from perfsuite.revisions.observed_files import Observed
from perfsuite.session import preload
from perfsuite.session.gpu_sharing import Gpu
from perfsuite.session.journal import WAITS, Journal
from perfsuite.session.tasks import ALONE, ITEMS, PROVE, Failure, Outcome, Reported, Task
from perfsuite.session.timed_item import SpeedItem
from perfsuite.session.worker_process import in_phase
from perfsuite.timing.alternation import Alternation

OBSERVED = pytest.StashKey[Observed]()
"""The worker's record of opened files and of imports by name. It begins before the test modules are imported."""


FAULTED = 86
"""Exit code of a worker that ends itself because it can no longer use its GPU."""


def get_ready() -> None:
    """Import the compiler and create a CUDA context in advance, so that the first task on a GPU does not wait for
    them."""
    import torch

    with contextlib.suppress(RuntimeError):  # the proofs may need all the memory
        torch.zeros(1, device="cuda").add_(1).item()
    preload.import_compiler()


def run(journal: Journal, session: pytest.Session, device: str, gpu: Gpu) -> None:
    """Run the tasks as they arrive."""
    found = {i.nodeid: i for i in session.items}
    gpu.leave()
    for task in journal.tasks():
        item = found.get(task.id)
        if gpu.shared:
            journal.phase(task.id, WAITS)
            gpu.prepare()
        if task.kind != ITEMS:
            _settle()
        journal.begin(task.id)
        outcome: Outcome
        if item is None:
            outcome = Failure(status=Status.UNMEASURED, message="it could not be collected again in a worker")
        elif task.kind == ITEMS:
            outcome = _run_item(item, task, journal)
            faults.free_memory()
        elif isinstance(item, SpeedItem):
            outcome = _Workload(item, task, journal, device, gpu).outcome()
        else:
            outcome = Failure(status=Status.UNMEASURED, message="it is no workload any more")
        try:
            faults.check()
        except faults.DeviceFault as fault:
            journal.fault(task.id, str(fault))
            os._exit(FAULTED)  # every later task would fail too
        gpu.leave()
        if isinstance(outcome, Failure):
            journal.failure(task.id, outcome)
        else:
            journal.result(task.id, outcome)


def _settle() -> None:
    """Free the objects of an earlier workload, and exclude the remaining ones from garbage collection."""
    from perfsuite.correctness import execution

    execution.forget_compiled()
    gc.collect()
    gc.freeze()  # otherwise each collection takes 0.2 s to traverse torch's modules


class _Reports:
    """Pytest plugin that keeps the reports."""

    def __init__(self) -> None:
        self.every: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.every.append(report)


def _run_item(item: pytest.Item, task: Task, journal: Journal) -> Reported | Failure:
    """Run a correctness item as pytest does, including its plugins' hooks, such as warning filters."""
    from perfsuite.session.proof_item import ProofItem

    if isinstance(item, ProofItem):
        item.report = functools.partial(journal.draw, task.id)
        item.only, item.alone, item.left_out = task.case, task.side, task.left_out
    reports, plugins, hook = _Reports(), item.config.pluginmanager, item.config.hook
    plugins.register(reports)
    try:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    finally:
        plugins.unregister(reports)
    failed = any(report.failed for report in reports.every)
    if failed and task.crowded and isinstance(item, ProofItem) and item.lacked_memory and faults.is_crowded():
        return Failure(status=Status.UNMEASURED, message="lacked memory beside other processes", crowded=True)
    made = (hook.pytest_report_to_serializable(config=item.config, report=r) for r in reports.every)
    return Reported(reports=tuple(made))


class _Workload:
    """One task on one workload. `phase` is the side that is running, for the message if the process dies."""

    def __init__(self, item: SpeedItem, task: Task, journal: Journal, device: str, gpu: Gpu) -> None:
        self.item, self.task, self.journal, self.device, self.gpu = item, task, journal, device, gpu
        self.phase = "start"

    def report(self, name: str) -> None:
        self.phase = name
        self.journal.phase(self.item.nodeid, name)

    def alone(self) -> bool:
        """Wait until no other process uses the GPU. Return whether there may have been one."""
        return self._wait(self.gpu.alone)

    def beside(self) -> bool:
        """Let other processes use the GPU too, and wait until none times. Return whether there may be any."""
        return self._wait(self.gpu.prepare)

    def _wait(self, wait: Callable[[], None]) -> bool:
        if self.gpu.shared:
            if self.device == "cuda":
                import torch

                torch.cuda.synchronize()
            self.report(WAITS)
            wait()
            self.report("timing")
        return self.gpu.shared

    def outcome(self) -> Outcome:
        """Return the outcome of the task. Every error is a failure of only this workload."""
        import torch

        from perfsuite.correctness import convolutions
        from perfsuite.correctness.ranks import group

        try:
            # A warning inside a timed call is the user's own, and must not become an error here.
            pair = self.item.pair
            with warnings.catch_warnings(), convolutions.exact(pair.precision), group.alone(pair, self.device):
                warnings.simplefilter("ignore")
                kinds: dict[str, Callable[[], Outcome]] = {PROVE: self._prove, ALONE: self._reference_alone}
                return kinds.get(self.task.kind, self._time)()
        except (Exception, SystemExit, HarnessFault) as error:
            return self._failure(error)
        finally:
            if self.device == "cuda":
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _failure(self, error: BaseException) -> Failure:
        """Return the failure of the workload that corresponds to the error."""
        if isinstance(error, (NotTimed, TamperedError)):
            return Failure(status=Status.NOT_TIMED, message=str(error))
        if isinstance(error, NotEquivalent):
            return Failure(status=Status.NOT_EQUIVALENT, message=str(error))
        if isinstance(error, NoisyError):
            return Failure(status=Status.NOISY, message=str(error))
        return Failure(status=Status.UNMEASURED, message=self._why_unmeasured(error))

    def _why_unmeasured(self, error: BaseException) -> str:
        from perfsuite.correctness.ranks.group import RanksFailed

        if isinstance(error, RevisionError):
            return f"the accepted side raises RevisionError: {error}"
        if isinstance(error, (PerfsuiteError, HarnessFault)):
            return str(error)
        if faults.OF_THE_TRUTH in getattr(error, "__notes__", ()):
            return (
                f"the reference in float64 {faults.OUT_OF_MEMORY}; declare truth=, the same function with less memory"
            )
        if isinstance(error, RanksFailed):
            return in_phase(self.phase, str(error))
        return in_phase(
            self.phase, faults.OUT_OF_MEMORY if faults.lacks_memory(error) else f"raises {in_one_line(error)}"
        )

    def _in_ranks(self) -> Any:
        """Return the object that runs the task in separate processes, for a workload of several processes."""
        from perfsuite.session.rank_timing.parent import RankTiming

        module = self.item.getparent(pytest.Module)
        assert module is not None
        return RankTiming(self.item.pair, self.item.workload, module.obj, self.device, self.report)

    def _time(self) -> Measurement:
        from perfsuite.timing import measuring, sampling

        task = self.task
        if self.item.workload.ranks > 1:
            return cast("Measurement", self._in_ranks().measure(task))

        def waits(begins: bool) -> None:
            self.report(WAITS if begins else "timing")

        alternating = Alternation(task.alternates, int(task.second), waits) if task.alternates else None
        with alternating or contextlib.nullcontext() as turns:
            return measuring.measure(
                self.item.pair,
                self.item.workload,
                workload_id=self.item.nodeid,
                device=self.device,
                home=self.item.home,
                accepted=self._accepted() if task.accepted else None,
                proof=task.proof,
                wait_for_proof=self._wait_for_proof if task.awaits_proof else None,
                seed=task.seed,
                reference=task.reference,
                blocks=task.blocks or sampling.BLOCKS,
                thorough=task.thorough,
                new_values=task.new_values,
                report=self.report,
                alone=self.alone,
                beside=self.beside,
                turns=turns,
            )

    def _reference_alone(self) -> Alone:
        from perfsuite.records import REFERENCE
        from perfsuite.timing import measuring

        began = perf_counter()
        if self.item.workload.ranks > 1:
            return cast("Alone", self._in_ranks().reference_alone(self.task, lambda: perf_counter() - began))
        self.report(REFERENCE)
        bench = self._bench(secrets.randbits(31), None)
        counts = self.task.proof.counts.get(REFERENCE) if self.task.proof else None
        blocks = measuring.reference_alone(bench, self.task.clock, counts, self.alone)
        outside_s = self._outside_s(bench) if self.task.outside else None
        return Alone(id=self.item.nodeid, blocks_s=blocks, outside_s=outside_s, seconds=perf_counter() - began)

    def _outside_s(self, bench: Any) -> float | None:
        """Return the seconds of a call of the optimized side where no test is running; None if they cannot be measured.

        The child process imports the pair's module again, with all of its sides. It does not compute gradients.
        """
        from perfsuite.correctness import outside

        module = self.item.getparent(pytest.Module)
        if module is None or bench.gradients:
            return None
        try:
            return outside.seconds(bench.pair, bench.case, self.device, module=module.obj, home=self.item.home)
        except (outside.Unsendable, NotEquivalent):  # the proof `outside` reports it
            return None

    def _wait_for_proof(self) -> WorkloadProof:
        """Wait for the proof. Other processes may prepare meanwhile, but none times before the last proof has ended."""
        found: list[WorkloadProof] = []
        self._wait(lambda: found.append(self.journal.proof()))
        return found[0] if found else self.journal.proof()

    def _prove(self) -> WorkloadProof:
        from perfsuite.revisions import digests

        if self.task.note_ran:
            self.item.config.stash[OBSERVED].begin()
        if self.task.launched and self.item.workload.ranks == 1 and (traced := self._traced()):
            return traced
        proof, top = self._proof(), revision.top_or(self.item.config.rootpath)
        if self.task.same_code and not digests.loads(self.task.same_code, top):
            self.task = replace(self.task, same_code=())
            proof = self._proof()
        return proof

    def _proof(self) -> WorkloadProof:
        from perfsuite.records import REFERENCE
        from perfsuite.timing import workload_proof
        from perfsuite.timing.bench import Phases

        task, phases = self.task, Phases()
        seed = secrets.randbits(31) if task.seed is None else task.seed
        began = perf_counter()
        with phases.time("accepted side"):
            accepted, unloaded = self._comparable(seed)
        if unloaded:
            # Nothing is proven, because the other revision may have registered its functions instead of the current
            # ones.
            return WorkloadProof(id=self.item.nodeid, seed=seed, unloaded=unloaded, seconds=perf_counter() - began)
        if self.item.workload.ranks > 1:
            proof = cast("WorkloadProof", self._in_ranks().prove(replace(task, seed=seed)))
            bench = self._bench(seed, None) if task.note_ran else None
        else:
            bench = self._bench(seed, accepted)
            bench.phases = phases
            proof = workload_proof.prove(
                bench,
                self.item.nodeid,
                with_reference=task.reference not in (0, 1),
                slow=task.slow,
                same_code=bool(task.same_code),
                enough_s=task.enough_s,
                with_rivals=task.thorough,
                # Launches and syncs only matter on the device clock, and if there are many, the profiler takes seconds.
                uncounted=() if task.reference is None or bench.workload.clock == "device" else (REFERENCE,),
                summarise=task.summarise,
            )
        with phases.time("digests"):
            ran = self._ran(bench) if task.note_ran else None
        return replace(proof, ran=ran, phases=dict(phases.seconds), seconds=perf_counter() - began)

    def _ran(self, bench: Any) -> Ran:
        """Return a record of all code and data that the optimized side uses."""
        from perfsuite.records import OPTIMIZED
        from perfsuite.revisions import digests, unversioned_code
        from perfsuite.timing import launch_digest, provenance

        observed = self.item.config.stash[OBSERVED]
        self.report(OPTIMIZED)
        side = as_side(bench.pair.optimized)
        executed = provenance.run(
            bench.pair, side, bench.master(OPTIMIZED), bench.case, self.device, gradients=bench.gradients
        )
        module = self.item.getparent(pytest.Module)
        assert module is not None
        outside = unversioned_code.imported(observed.top)
        ran = digests.ran([module.obj], executed.files, executed.compiled, observed, outside)
        if bench.workload.ranks > 1:  # each rank launches its own
            return replace(ran, untraced="several processes call it")
        launched, untraced = launch_digest.launched(bench, observed.top)
        return replace(ran, launched=launched, untraced=untraced)

    def _traced(self) -> WorkloadProof | None:
        """Return a proof with `same_launches` if a trace shows that the workload launches what was accepted, else
        None."""
        began = perf_counter()
        try:
            same = self._launches_the_same()
        except (Exception, SystemExit):  # a side that cannot be traced is proven instead
            return None
        finally:
            _settle()
        return (
            WorkloadProof(id=self.item.nodeid, seed=0, same_launches=True, seconds=perf_counter() - began)
            if same
            else None
        )

    def _launches_the_same(self) -> bool:
        from perfsuite.session import changed
        from perfsuite.timing import launch_digest

        bench = self._bench(secrets.randbits(31), None)
        launched, _ = launch_digest.launched(bench, revision.top_or(self.item.config.rootpath))
        own = self._own_sources() if launched else ()
        return changed.launches_the_same(self.task.launched, self.task.changed, launched, own)

    def _own_sources(self) -> list[str]:
        """Return the sources that only the optimized side runs, and neither the reference nor the module that declares
        the pair."""
        from perfsuite.revisions import digests

        declaring = self.item.getparent(pytest.Module)
        assert declaring is not None
        optimized, reference = (
            module_of(as_side(self.item.pair.optimized)),
            module_of(as_side(self.item.pair.reference)),
        )
        found = digests.only(optimized, [reference], revision.top_or(self.item.config.rootpath))
        return [] if optimized is declaring.obj or reference is declaring.obj else found

    def _comparable(self, seed: int) -> tuple[Pair | None, str]:
        """Return (the accepted revision's pair or None, why the current side cannot be compared with it or empty).

        There is no pair if both revisions have the same code, because the accepted side then does not run in the proof.
        """
        if not self.task.accepted or self.task.same_code:
            return None, ""
        try:
            accepted = self._accepted()
            problem = self._shared(self._bench(seed, accepted))
        except (RevisionError, NotEquivalent) as error:
            return None, str(error)
        return (None, problem) if problem else (accepted, "")

    def _accepted(self) -> Pair:
        module = self.item.getparent(pytest.Module)
        assert module is not None
        assert self.task.accepted is not None
        return revision.load_pair(self.item.pair, module.obj, self.task.accepted)

    def _bench(self, seed: int, accepted: Pair | None) -> Any:
        from perfsuite.timing.bench import Bench

        return Bench(
            pair=self.item.pair,
            workload=self.item.workload,
            device=self.device,
            home=self.item.home,
            seed=seed,
            report=self.report,
            accepted=accepted,
        )

    def _shared(self, bench: Any) -> str:
        """Return why the accepted side would not run the accepted revision's code; empty if it does."""

        from perfsuite.records import ACCEPTED, OPTIMIZED
        from perfsuite.timing import provenance

        def executed(name: str, pair: Pair) -> provenance.Executed:
            self.report(name)
            side, master = as_side(pair.optimized), bench.master(name)
            return provenance.run(bench.pair, side, master, bench.case, self.device, gradients=bench.gradients)

        current = executed(OPTIMIZED, bench.pair)
        try:
            accepted = executed(ACCEPTED, bench.accepted)
        except NotEquivalent:
            raise
        except Exception as error:
            if faults.lacks_memory(error):
                raise
            return f"the accepted side raises {in_one_line(error)}"
        assert self.task.accepted is not None
        return provenance.problem(accepted, current, self.task.accepted)
