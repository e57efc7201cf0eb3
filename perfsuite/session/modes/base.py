"""State that every kind of run shares: the machine, the selected workloads, the workers, and the report.

Each mode (perfsuite/session/modes/) is a subclass, registered with pytest as a plugin of the run.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.baseline.device_files import Baselines
from perfsuite.declare import discovery
from perfsuite.errors import PerfsuiteError
from perfsuite.gate import conclusion, exit_codes, throughput
from perfsuite.history import store
from perfsuite.history.records import run_of
from perfsuite.records import Machine, Measurement, Status, Verdict, WorkloadProof
from perfsuite.report import units
from perfsuite.report.model import Correctness, RunReport
from perfsuite.revisions import revision
from perfsuite.session import benchmark_records, device_lock, lanes, sharding
from perfsuite.session.progress import Progress, measurements, proofs_on, shown
from perfsuite.session.tasks import ITEMS, NEVER_REACHED, PROVE, TIME, Failure, Outcome, Task
from perfsuite.session.timed_item import Result, SpeedItem
from perfsuite.session.worker_pool import Workers, pytest_arguments
from perfsuite.session.worker_process import Lane, devices_of
from perfsuite.system import machine
from perfsuite.system.folders import SCRATCH

RERUNS = ("reruns", "retries", "force_flaky")
"""Options of plugins that run a failed test again."""
ONCE = "a proof or a verdict that failed stays failed; a pair is not run again until it is green"
BESIDE = "timed items cannot run beside each other: run without -n (xdist)"


class Mode:
    """One pytest run. Subclasses define how a workload's verdict is reached, and how the run ends."""

    mode = "measure"
    history = ""
    """The run's kind in the history; empty for a run that is not kept there."""
    beside = False
    """Whether the run may share the machine with other processes of pytest, as with xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.root = config, config.rootpath
        self.arguments = dict(a.partition("=")[::2] for a in config.option.perfsuite_argument)
        self.items: dict[str, SpeedItem] = {}
        self.known: dict[str, SpeedItem] = {}
        self.broken: dict[str, str] = {}
        """Module or folder that could not be collected → its error, in one line."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.runs: dict[str, list[Measurement]] = {}
        self.proofs: dict[str, WorkloadProof] = {}
        self.failures: dict[str, Failure] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.unproven: dict[str, str] = {}
        """Pair → its first proof that failed."""
        self.asked: set[str] = set()
        self.spent: dict[str, float] = {}
        self.started, self.clock = datetime.now(UTC), monotonic()
        self.complete, self.early, self.refused = True, False, False
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.skip_reasons: dict[str, int] = {}
        self.correctness_failures: dict[str, str] = {}
        self.written: dict[str, Path] = {}
        self.shard = sharding.parse(config.option.perfsuite_shard)
        self._progress: Progress | None = None
        self.durations = lanes.Durations(self.scratch)
        self._machine: Machine | None = None
        if not self.beside and getattr(config.option, "numprocesses", None):
            raise pytest.UsageError(BESIDE)

    # --- the machine, the baselines and the items -------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """This machine, as the driver describes it. The parent process never opens the device."""
        if self._machine is None:
            self._machine = machine.identify()
        return self._machine

    @property
    def device(self) -> str:
        return "cuda" if self.machine.count else "cpu"

    @functools.cached_property
    def baselines(self) -> Baselines:
        return Baselines(self.root / (self.config.option.perfsuite_baselines or "baselines"), lambda: self.machine)

    @property
    def scratch(self) -> Path:
        return self.root / SCRATCH

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Accepted entries of this machine, as far as the run has read them."""
        return self.baselines.entries

    @property
    def progress(self) -> Progress:
        self._progress = self._progress or Progress(self.config)
        return self._progress

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            errors = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[:1]
            self.broken[report.nodeid] = errors[-1] if errors else "it could not be collected"

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        """Record all collected items, and those that -k and -m selected. Sort the timed ones last, so that nothing runs
        at the same time."""
        selected.sort(key=lambda item: isinstance(item, SpeedItem))
        self.known = {i.nodeid: i for i in every if isinstance(i, SpeedItem)}
        for name in RERUNS:
            if getattr(self.config.option, name, None):
                raise pytest.UsageError(f"--{name.replace('_', '-')}: {ONCE}")
        for item in selected:
            ours = isinstance(item, SpeedItem) or item.get_closest_marker("correctness")
            if ours and item.get_closest_marker("flaky"):
                raise pytest.UsageError(f"{item.nodeid} is marked flaky: {ONCE}")
        if self.shard is not None:
            sharding.keep(selected, self.shard)
        proofs: list[Any] = [i for i in selected if getattr(i, "kind", "") == "contexts"]
        self.notes += discovery.unsupported_note(proof.pair for proof in proofs)
        self.items = {i.nodeid: i for i in selected if isinstance(i, SpeedItem)}

    def measurable(self) -> list[str]:
        return [i for i, item in self.items.items() if self.inapplicable(item) is None]

    def inapplicable(self, item: SpeedItem) -> str | None:
        """Return why the workload cannot be measured on this machine; None if it can."""
        wanted = item.workload.device
        if wanted is not None and wanted != self.device:
            return f"the workload is for {wanted}; this machine measures on {self.device}"
        if (ranks := item.workload.ranks) > 1 and 0 < self.machine.count < ranks:
            return f"the workload is for {ranks} GPUs; this machine has {self.machine.count}"
        skip = evaluate_skip_marks(item)
        return f"it is skipped: {skip.reason}" if skip else None

    def margin(self, id: str) -> float | None:
        """Return the margin that the workload declares, or else the project for all (`perfsuite_margin`)."""
        declared = self.items[id].workload.margin
        if declared is not None:
            return declared
        for_all = str(self.config.getini("perfsuite_margin") or "")
        return margin_from(for_all) if for_all else None

    def in_scope(self, id: str) -> bool:
        """Return whether the arguments of this run include the whole file of an accepted workload."""
        file = (self.root / id.partition("::")[0]).resolve()
        if any("::" in a for a in self.config.args):
            return False
        given = [(self.config.invocation_params.dir / a).resolve() for a in self.config.args]
        return any(file == g or g in file.parents for g in given)

    # --- measuring --------------------------------------------------------------------------------------------------

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other run measures on this machine's devices."""
        return device_lock.turn(machine.measured_devices(self.device), self.machine.device_name, self.progress.say)

    @functools.cached_property
    def workers(self) -> Workers:
        """Object that starts this run's processes."""
        return Workers(
            root=self.root,
            folder=self.scratch / "workers",
            arguments=pytest_arguments(self.config),
            progress=lambda lane, id: self.progress.begin(lane, id),  # pytest's reporter is created after the control
        )

    def work(
        self,
        tasks: Sequence[Task],
        *,
        everywhere: bool = False,
        ahead: Sequence[str] = (),
        further: Callable[[str], Sequence[Task]] | None = None,
    ) -> Generator[tuple[str, Outcome]]:
        """Run the tasks in workers and keep the outcomes. Yield (id, outcome) as each ends.

        The tasks run in the lanes for timing, or in one for each core if nothing is timed (`everywhere`). Meanwhile,
        processes that will time the workloads `ahead` are started on the remaining cores. `further` is as in
        `Workers.run`. Tasks that need several GPUs run last, one at a time.
        """
        for part in self.parts(tasks):
            yield from self._work(part, everywhere, [i for i in ahead if not self.needs_all_gpus(i)], further)

    def needs_all_gpus(self, id: str) -> bool:
        """Return whether this item calls its sides in several processes, each with its own GPU."""
        return self.device == "cuda" and self.ranks_of(id) > 1

    def ranks_of(self, id: str) -> int:
        """Return the number of processes that call the sides of a selected item."""
        return self.items[id].workload.ranks if id in self.items else 1

    def parts(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Return the tasks that need one GPU, then those that need all GPUs. Empty lists are left out."""
        parts = ([t for t in tasks if self.needs_all_gpus(t.id) == all_gpus] for all_gpus in (False, True))
        return [part for part in parts if part]

    def _work(
        self,
        tasks: Sequence[Task],
        everywhere: bool,
        ahead: Sequence[str],
        further: Callable[[str], Sequence[Task]] | None,
    ) -> Generator[tuple[str, Outcome]]:
        kinds = {task.id: task.kind for task in tasks}
        lost = dict.fromkeys(kinds)
        began, what = monotonic(), "proofs" if everywhere else "timing"
        try:
            planned, chosen = self._planned(tasks, everywhere)
            self.progress.include(sum(task.kind != ITEMS for task in planned))
            self._start_ahead(ahead, chosen)
            run = self.workers.run(planned, chosen, lambda busy: self._start_ahead(ahead, busy), further)
            with closing(run) as outcomes:
                for id, outcome in outcomes:
                    lost.pop(id, None)
                    self.keep(id, outcome)
                    if not isinstance(outcome, Failure):
                        self.durations.note(kinds[id], id, outcome.seconds)
                    if kinds[id] != ITEMS and (text := shown(outcome)):  # pytest reports its items itself
                        self.progress.ended(id, text)
                    yield id, outcome
            for id in lost:
                self.keep(id, NEVER_REACHED)
                yield id, NEVER_REACHED
        finally:
            self.spent[what] = self.spent.get(what, 0.0) + monotonic() - began
            self.progress.done()
            self.durations.save()

    def _start_ahead(self, ids: Sequence[str], busy: Sequence[Lane]) -> None:
        """Start processes that will time these workloads, while the lanes `busy` are in use."""
        if ids:
            timing = self.timing_lanes(())
            each = lanes.started_ahead(self.machine, timing, self.gpu_memory_bytes, len(ids))
            self.workers.prepare(timing, ids, each, lanes.started_at_once(self.machine, len(busy)))

    @functools.cached_property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of the GPU in bytes. The driver is queried once, although lanes are planned for every round and
        whenever a proof ends."""
        return machine.gpu_memory_bytes()

    def lanes_for(self, tasks: Sequence[Task], everywhere: bool = False) -> list[Lane]:
        """Return the lanes for tasks of one of the `parts`: those for timing, or one for each core."""
        if tasks and all(self.needs_all_gpus(task.id) for task in tasks):
            return [lanes.ALL_GPUS]
        return lanes.for_proving(tasks, self.machine) if everywhere else self.timing_lanes(tasks)

    def timing_lanes(self, tasks: Sequence[Task]) -> list[Lane]:
        """Return the lanes for tasks that time."""
        return lanes.for_timing(self.machine)

    def _planned(self, tasks: Sequence[Task], everywhere: bool) -> tuple[list[Task], list[Lane]]:
        chosen = self.lanes_for(tasks, everywhere)
        return lanes.ordered(tasks, chosen, self._proof_and_timing_s if everywhere else self.expected_s), chosen

    def _proof_and_timing_s(self, task: Task) -> float:
        """Return the seconds of a proof and of the timing after it. The longest workloads are timed first, so they are
        proven first."""
        timing = Task(id=task.id, kind=TIME, accepted=task.accepted)
        return self.expected_s(task) + (self.expected_s(timing) if task.kind == PROVE else 0.0)

    def expected_s(self, task: Task) -> float:
        """Return the estimated seconds of the task, from the last time it ran, or else from the accepted figures."""
        entry = self.entries.get(task.id)
        if entry is None:
            return self.durations.of(task)
        side = "reference" if task.kind == PROVE else "optimized"
        return self.durations.of(task, entry.sides[side].seconds)

    def announce(
        self, timed: Sequence[Task], proofs: Sequence[Task] = (), *, proving: bool = False, after: Sequence[Task] = ()
    ) -> None:
        """Print what is about to run and how long it will take, estimated from earlier runs. The estimate includes the
        tasks `after`."""
        if not timed and not proofs:
            return
        first, then = self._planned(timed, proving), self._planned(proofs, True)
        rounds = ((timed, proving), (proofs, True), (after, False))
        parts_planned = [self._planned(part, where) for tasks, where in rounds for part in self.parts(tasks)]
        seconds = sum(lanes.seconds_of(*p, self.expected_s) for p in parts_planned)
        is_new = any(t.proof is None and not self.durations.has(t) for t in (*timed, *proofs))
        more = ", longer if code is compiled for the first time" if is_new else ""
        parts = []
        if timed and proving:
            parts.append(proofs_on(*first))
        elif timed:
            gpus = len(devices_of(first[1]))
            on = f" on each of {gpus} GPUs" if gpus > 1 else ""
            parts.append(f"{measurements([t.id for t in timed])} timed one at a time{on}")
        if proofs:
            parts.append(proofs_on(*then))
        self.progress.expect(f"{', then '.join(parts)}: about {units.duration(seconds)}{more}", len(timed))

    def keep(self, id: str, outcome: Outcome) -> None:
        """Record the outcome of a task. A workload keeps its first failure, unless only a later one blames the code."""
        if isinstance(outcome, Failure):
            before = self.failures.setdefault(id, outcome)
            if outcome.status.blames_code and not before.status.blames_code:
                self.failures[id] = outcome
        elif isinstance(outcome, Measurement):
            self.runs.setdefault(id, []).append(outcome)
        elif isinstance(outcome, WorkloadProof):
            self.proofs[id] = outcome

    def result(self, item: SpeedItem) -> Result:
        """Return the result of one workload, and measure it if needed."""
        id = item.nodeid
        self.asked.add(id)
        if hasattr(self.config, "workerinput"):
            return Result(red=True, message=f"{Status.UNMEASURED} {id}: {BESIDE}")
        try:
            reason = self.inapplicable(item)
            if reason is not None and id not in self.entries:
                return Result(skipped=True, message=reason)
            return self.judge(item)
        except PerfsuiteError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return Result(red=True, message=f"{Status.UNMEASURED} {id}: {error}")

    def judge(self, item: SpeedItem) -> Result:
        """Return the result of a workload that this machine can measure, or that is accepted on it."""
        raise NotImplementedError  # not called in a mode that runs no item

    def judged(self, id: str, *, red: bool) -> Result:
        """Return the result that corresponds to this run's verdict on a workload."""
        verdict = self.verdicts[id]
        return Result(measurements=tuple(self.runs.get(id, ())), verdict=verdict, message=verdict.message, red=red)

    # --- the end of the run -----------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "correctness" not in report.keywords or (report.when != "call" and not (report.skipped or report.failed)):
            return
        self.counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.skip_reasons[reason] = self.skip_reasons.get(reason, 0) + 1
        if report.failed:
            self.correctness_failures[report.nodeid] = (str(report.longrepr).splitlines() or [""])[0]
            self.unproven.setdefault(report.nodeid.rpartition("::")[0], report.nodeid)

    def pytest_keyboard_interrupt(self) -> None:
        self.complete = False

    def shown_verdicts(self) -> dict[str, Verdict]:
        """Return the verdicts as the reports show them."""
        return self.verdicts

    @functools.cached_property
    def tree(self) -> revision.State:
        """State of the work tree, read when it is first needed."""
        return revision.quiet_state(self.root, ignored=self.baselines.folder)

    def report(self) -> RunReport:
        """Return the run as the reports show it."""
        return RunReport(
            machine=self.machine,
            revision=self.tree.revision,
            dirty=self.tree.dirty,
            started=self.started.isoformat(timespec="seconds"),
            seconds=monotonic() - self.clock,
            measurements={i: tuple(r) for i, r in self.runs.items() if i not in self._without_time()},
            verdicts=self.shown_verdicts(),
            promises={i: item.promises for i, item in self.items.items()},
            correctness=Correctness(**self.counts, skip_reasons=self.skip_reasons, failures=self.correctness_failures),
            problems=tuple(self.problems),
            complete=self.complete,
            selected=len(self.items),
            collected=len({*self.known, *self.entries}),
            workloads=tuple(self.items),
            skipped=tuple(i for i, item in self.items.items() if i not in self.entries and self.inapplicable(item)),
            shard=str(self.shard or ""),
            spent=self.spent,
            proofs={i: p.phases for i, p in self.proofs.items()},
        )

    def _without_time(self) -> set[str]:
        """Return the measured workloads whose proof failed. Their figures are meaningless."""
        return {i for i in self.runs if i.rpartition("::")[0] in self.unproven}

    def exit_code(self) -> int:
        """Return the run's exit code, apart from pytest's own."""
        if self.refused:
            return int(pytest.ExitCode.USAGE_ERROR)
        return exit_codes.of(
            self.shown_verdicts().values(),
            self.problems,
            early=self.early or not self.complete,
            wrong=bool(self.correctness_failures),
        )

    def refuse(self, reason: str) -> None:
        """Record that the run cannot begin, with the reason."""
        self.problems.append(reason)
        self.refused = True

    def finish(self, session: pytest.Session) -> None:
        """Record missing results as problems. Called once when pytest ends, before the reports are written."""

    def close(self) -> None:
        """Stop the workers, which may still be running if pytest ends before every item has its result."""
        if "workers" in vars(self):
            self.workers.close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.close()
        if self._progress is not None:
            self._progress.done()
        self.finish(session)
        code = self.exit_code()
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = code or session.exitstatus
        folder = self.config.option.perfsuite_report
        if folder:
            from perfsuite.report import write_all

            try:
                self.written = write_all(self.report(), Path(folder))
            except PerfsuiteError as error:
                self.notes.append(f"no report: {error}")
        if self.history and (self.runs or self.shown_verdicts()):
            self._keep_in_history()
        awaited = self.config.stash.get(conclusion.AWAITED, None)
        if awaited is not None:
            awaited.reach(self.mode, int(session.exitstatus))

    def _keep_in_history(self) -> None:
        from perfsuite.history import index

        try:
            run = run_of(self.report(), kind=self.history, host=platform.node(), entries=self.entries)
            store.write(run, store.folder_of(self.root))
            index.add_last(store.folder_of(self.root), self.baselines.folder)
        except PerfsuiteError as error:
            self.notes.append(f"the run is not in the history: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from perfsuite.report import terminal

        try:
            shown = self.report()
        except PerfsuiteError as error:  # for instance, this machine cannot be identified
            terminalreporter.write_line(f"no report: {error}")
            return
        if shown.measurements or shown.verdicts or self.problems:
            terminalreporter.section("perfsuite", sep="=")
            # pytest has printed the failed proofs already.
            brief = replace(shown, correctness=replace(shown.correctness, failures={}))
            terminal.show(brief, terminal.console(terminalreporter._tw._file))
            benchmark_records.hide_table(self.config)
        promised = [item.promises for item in self.items.values()]
        unknown = throughput.unknown_devices(promised, self.baselines.devices())
        for line in (*self.notes, *unknown, *(f"{form}: {path}" for form, path in self.written.items())):
            terminalreporter.write_line(line)


def failed(id: str, failure: Failure) -> Verdict:
    """Return the verdict on a workload that has no measurement."""
    moved = "optimized" if failure.message.startswith("the optimized side ") else None
    return Verdict(id=id, status=failure.status, message=f"{failure.status} {id}: {failure.message}", moved=moved)


def margin_from(text: str) -> float:
    """Return the margin that `perfsuite_margin` in pytest's configuration declares. Raises UsageError if it is not a
    number between 0 and 1."""
    try:
        margin = float(text)
    except ValueError:
        margin = 0.0
    if not 0 < margin < 1:
        raise pytest.UsageError(f"perfsuite_margin = {text!r} is no share between 0 and 1, such as 0.05 for 5%")
    return margin
