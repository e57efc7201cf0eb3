"""One pytest run's control: who measures, when, and what each timed item is told."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from perfsuite import baseline, gate, machine, revision, turns, waivers
from perfsuite.errors import BaselineError, PerfsuiteError
from perfsuite.progress import Progress
from perfsuite.records import Machine, Measurement, Status, Verdict
from perfsuite.report.model import Correctness, RunReport
from perfsuite.speed import Result, SpeedItem
from perfsuite.workers import UNLOADED, Failure, Job, Journal, Workers, load_job, pytest_arguments

ACCEPT_PROCESSES = 5
ACCEPT_RIVAL_PROCESSES = 2
"""A rival's place in the table needs no more, and its compilation is most of a process's time."""
SCRATCH = ".perfsuite"
RERUNS = ("reruns", "retries", "force_flaky")
"""Options of plugins that run a failed test again."""
ONCE = "a proof or a verdict that failed stays failed; a pair is not run again until it is green"
BESIDE = "timed items cannot run beside each other: run without -n (xdist)"
RED_IN_A_PLAIN_RUN = (Status.NOT_EQUIVALENT, Status.BELOW_FLOOR, Status.UNMEASURED)
"""A plain run has one process: it can break a promise, not settle one."""


@dataclass(slots=True)
class _Found:
    """What has been measured so far."""

    runs: dict[str, list[Measurement]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def add(self, id: str, outcome: Measurement | Failure) -> None:
        if isinstance(outcome, Failure):
            self.failures.setdefault(id, outcome)
        else:
            self.runs.setdefault(id, []).append(outcome)


class Control:
    """Registered as a plugin of the run; `mode` is worker, ahead, measure, gate, accept, list or compare."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.job: Job | None = load_job()
        option = config.option
        comparing = getattr(option, "benchmark_compare", None)
        self.mode: str = "worker" if self.job else option.perfsuite_mode or ("gate" if comparing else "measure")
        if self.mode == "run":
            self.mode = "measure"
        self.arguments = _arguments(option.perfsuite_argument)
        self.items: dict[str, SpeedItem] = {}
        self.known: dict[str, SpeedItem] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.found = _Found()
        self.verdicts: dict[str, Verdict] = {}
        self.started = datetime.now(UTC)
        self.clock = monotonic()
        self.complete = True
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.skip_reasons: dict[str, int] = {}
        self.correctness_failures: dict[str, str] = {}
        self.measured_correctness = False
        self._stream: Iterator[tuple[str, Measurement | Failure]] | None = None
        self._progress: Progress | None = None
        self._machine: Machine | None = None
        self._baseline: baseline.Baseline | None = None
        self._swallowed_path(comparing)
        if self.mode == "gate" and comparing is not None and hasattr(option, "benchmark_compare"):
            # Ours replaces pytest-benchmark's comparison, which never fails by itself.
            option.benchmark_compare = None
        if self.mode in ("gate", "measure", "accept", "compare") and getattr(option, "numprocesses", None):
            raise pytest.UsageError(BESIDE)

    def _swallowed_path(self, comparing: Any) -> None:
        if isinstance(comparing, str) and Path(comparing).exists() and not comparing.endswith(".json"):
            raise pytest.UsageError(
                f"--benchmark-compare took {comparing!r} as its value, so that it was not collected; "
                f"write --benchmark-compare last"
            )

    # --- what there is -------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """This machine, by the driver's word: the parent never opens the device."""
        if self._machine is None:
            self._machine = machine.identify()
        return self._machine

    @property
    def device(self) -> str:
        return "cuda" if self.machine.count else "cpu"

    @property
    def baselines(self) -> Path:
        chosen = self.config.option.perfsuite_baselines
        return self.root / (chosen or "baselines")

    @property
    def baseline_path(self) -> Path:
        return self.baselines / f"{self.machine.device}.json"

    @property
    def revisions(self) -> Path:
        """Where trees of other revisions lie while they are measured."""
        return self.root / SCRATCH / "revisions"

    def collected(self, every: Sequence[pytest.Item], selected: list[pytest.Item]) -> None:
        """All collected items, and those that -k and -m left: the timed ones go last, so that nothing runs beside."""
        selected.sort(key=lambda item: isinstance(item, SpeedItem))
        self.known = {i.nodeid: i for i in every if isinstance(i, SpeedItem)}
        for name in RERUNS:
            if getattr(self.config.option, name, None):
                raise pytest.UsageError(f"--{name.replace('_', '-')}: {ONCE}")
        for item in selected:
            ours = isinstance(item, SpeedItem) or item.get_closest_marker("correctness")
            if ours and item.get_closest_marker("flaky"):
                raise pytest.UsageError(f"{item.nodeid} is marked flaky: {ONCE}")
        self.items = {i.nodeid: i for i in selected if isinstance(i, SpeedItem)}
        if self.mode != "gate":
            return
        try:
            self._load_baseline()
            self._waivers = waivers.load(
                self.baselines / "waivers.toml", today=date.today(), known_ids={*self.known, *self.entries}
            )
        except PerfsuiteError as error:
            self.problems.append(str(error))  # for the report, which is written all the same
            raise pytest.UsageError(str(error)) from None
        in_scope = {k: e for k, e in self.entries.items() if self._in_scope(k)}
        self.problems += gate.missing(in_scope, self.known, whole=True)
        if not self.items:
            self.problems.append("nothing was measured: no timed item of a pair was selected; see `perfsuite list`")

    def _load_baseline(self) -> None:
        path = self.baseline_path
        if path.exists():
            self._baseline = baseline.load(path)
            errors, notes = baseline.compare_machines(self._baseline.machine, self.machine)
            self.wrong_machine = errors
            self.notes += notes
            return
        self.wrong_machine = []
        others = sorted(p.stem for p in self.baselines.glob("*.json"))
        if others:
            self.notes.append(f"no baseline for {self.machine.device}; there are: {', '.join(others)}")

    @property
    def entries(self) -> Mapping[str, baseline.Entry]:
        """What is accepted on this machine, as far as the run has read it."""
        return self._baseline.entries if self._baseline else {}

    def _in_scope(self, id: str) -> bool:
        """Whether the arguments of this run cover the file of an accepted workload, whole."""
        file = self.root / id.partition("::")[0]
        if any("::" in a for a in self.config.args):
            return False
        given = [(self.config.invocation_params.dir / a).resolve() for a in self.config.args]
        return any(file.resolve() == g or g in file.resolve().parents for g in given)

    # --- measuring -----------------------------------------------------------------------------------------------

    def _told(self) -> Progress:
        self._progress = self._progress or Progress(self.config)
        return self._progress

    def _workers(self) -> Workers:
        return Workers(
            root=self.root,
            folder=self.root / SCRATCH / "workers",
            arguments=pytest_arguments(self.config),
            rival_processes=ACCEPT_RIVAL_PROCESSES if self.mode == "accept" else 1,
            twin=self.mode == "accept",
            limits={i: item.pair.time_limit for i, item in self.items.items()},
            progress=self._told().begin,
        )

    def _turn(self) -> AbstractContextManager[None]:
        return turns.turn(machine.measured_devices(self.device), self.machine.device_name, self._told().say)

    def _one_process(self, ids: Sequence[str]) -> Iterator[tuple[str, Measurement | Failure]]:
        with self._turn():
            yield from self._workers().run(ids)

    def _measurable(self) -> list[str]:
        return [i for i, item in self.items.items() if self.inapplicable(item) is None]

    def inapplicable(self, item: SpeedItem) -> str | None:
        """Why the workload is not for this machine, or None."""
        wanted = item.workload.device
        if wanted is not None and wanted != self.device:
            return f"the workload is for {wanted}; this machine measures on {self.device}"
        skip = evaluate_skip_marks(item)
        return f"it is skipped: {skip.reason}" if skip else None

    def result(self, item: SpeedItem) -> Result:
        """What became of one workload; measures on demand."""
        if hasattr(self.config, "workerinput"):
            return Result(red=True, message=f"{Status.UNMEASURED} {item.nodeid}: {BESIDE}")
        reason = self.inapplicable(item)
        if reason is not None and item.nodeid not in self.entries:
            return Result(skipped=True, message=reason)
        if self.mode == "gate":
            if not self.verdicts:
                with self._turn():
                    self._gate()
            verdict = self.verdicts[item.nodeid]
            runs = tuple(self.found.runs.get(item.nodeid, ()))
            return Result(measurements=runs, verdict=verdict, message=verdict.message, red=not verdict.status.green)
        return self._plain(item)

    def _plain(self, item: SpeedItem) -> Result:
        """One process, streamed: each item waits for its own measurement."""
        id = item.nodeid
        if self._stream is None:
            self._stream = self._one_process(self._measurable())
            self._expect(1, len(self._measurable()))
        while id not in self.found.runs and id not in self.found.failures:
            try:
                self.found.add(*next(self._stream))
            except StopIteration:
                self.found.add(id, Failure(status=Status.UNMEASURED, message="the measuring process never reached it"))
        failure = self.found.failures.get(id)
        if failure is not None and failure.skipped:
            return Result(skipped=True, message=failure.message)
        if failure is not None:
            verdict = _failed(id, failure)
        else:
            looked = gate.promises_look(
                {id: self.found.runs[id]}, {id: item.promises}, selected=max(1, len(self.items))
            )
            verdict = looked[id]
        self.verdicts[id] = verdict
        runs = tuple(self.found.runs.get(id, ()))
        red = verdict.status in RED_IN_A_PLAIN_RUN
        return Result(measurements=runs, verdict=verdict, message=verdict.message, red=red)

    def _expect(self, processes: int, workloads: int) -> None:
        if self._progress is not None:
            self._progress.expect(processes, workloads)

    def _through(
        self,
        workers: Workers,
        found: _Found,
        ids: Sequence[str],
        processes: int,
        accepted: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """`processes` processes, one after the other; a workload that fails in one is not tried in the next."""
        if not ids:
            return
        self._expect(processes, len(ids))
        for _ in range(processes):
            left = [i for i in ids if i not in found.failures]
            with closing(workers.run(left, accepted=accepted)) as outcomes:
                for id, outcome in outcomes:
                    found.add(id, outcome)
        if self._progress is not None:
            self._progress.done()

    # --- the gate ------------------------------------------------------------------------------------------------

    def _gate(self) -> None:
        ids = self._measurable()
        promises = {i: self.items[i].promises for i in self.items}
        selected = max(1, len(self.items))
        if self.wrong_machine:
            self.verdicts = {
                i: Verdict(id=i, status=Status.WRONG_MACHINE, message=f"WRONG_MACHINE {i}: {self.wrong_machine[0]}")
                for i in self.items
            }
            return
        workers = self._workers()
        unknown = [i for i in ids if i not in self.entries]
        self._through(workers, self.found, [i for i in ids if i in self.entries], gate.FIRST_PROCESSES)
        # One process is enough to say what a workload without a baseline does, and that it is equal.
        self._through(workers, self.found, unknown, 1 if unknown else 0)
        failed = self.found.failures
        judged = {i: self.found.runs.get(i, []) for i in ids if i not in failed and i not in unknown}
        looked = gate.first_look(
            self.entries, judged, {i: promises[i] for i in judged}, selected=selected, prior=self._prior()
        )
        verdicts = {i: v for i, v in looked.items() if isinstance(v, Verdict)}
        opened = {i: o for i, o in looked.items() if isinstance(o, gate.Open)}
        if opened:
            verdicts |= self._second(workers, opened)
        for id, item in self.items.items():
            if id in verdicts or (id not in self.entries and self.inapplicable(item)):
                continue  # what was never accepted here and is for another device is skipped
            if id in failed:
                verdicts[id] = _failed(id, failed[id])
            elif id in unknown:
                verdicts[id] = self._no_baseline(id)
            else:
                reason = self.inapplicable(self.items[id]) or "it was not measured"
                text = f"UNMEASURED {id}: it is in the baseline, but {reason}"
                verdicts[id] = Verdict(id=id, status=Status.UNMEASURED, message=text)
        self.verdicts = waivers.apply(verdicts, self._waivers)

    def _prior(self) -> Any:
        return gate.suite_prior(self.entries) if self.entries else None

    def _no_baseline(self, id: str) -> Verdict:
        path = self.baseline_path
        where = path.relative_to(self.root) if self.root in path.parents else path
        what = f"it is not in {where}" if path.exists() else f"there is no {where}"
        return Verdict(
            id=id,
            status=Status.NO_BASELINE,
            message=f"NO_BASELINE {id}: {what}; accept it with `perfsuite accept -k … --reason …`",
        )

    def _second(self, workers: Workers, opened: Mapping[str, gate.Open]) -> dict[str, Verdict]:
        """Stage 2: against the accepted revision where git has it, else against the baseline in more processes."""
        unloaded: dict[str, str] = {}
        clean: dict[str, str] = {}
        for id, item in opened.items():
            rev = item.entry.revision
            if rev is None:
                unloaded[id] = "it was accepted outside git"
            elif item.entry.dirty:
                unloaded[id] = f"it was accepted with uncommitted changes on {baseline.short(rev)}"
            else:
                clean[id] = rev
        with revision.extracted(clean.values(), self.root, self.revisions) as (trees, refused):
            unloaded |= {i: str(refused[rev]) for i, rev in clean.items() if rev in refused}
            loadable = {i: (str(trees[rev]), rev) for i, rev in clean.items() if rev in trees}
            verdicts: dict[str, Verdict] = {}
            second = _Found()
            left = list(loadable)
            so_far = 0
            for number, stage in enumerate(gate.STAGES):
                more = stage.processes - so_far
                self._through(workers, second, left, more, accepted={i: loadable[i] for i in left})
                so_far = stage.processes
                for id in [i for i in left if i in second.failures]:
                    failure = second.failures[id]
                    if failure.message.startswith(UNLOADED):
                        unloaded[id] = failure.message.removeprefix(UNLOADED)
                    else:
                        verdicts[id] = _failed(id, failure)
                left = [i for i in left if i not in second.failures]
                runs = {i: second.runs[i] for i in left}
                verdicts |= gate.second_look({i: opened[i] for i in left}, runs, stage=number)
                left = [i for i in left if i not in verdicts]
            for id, measured in second.runs.items():
                if id not in second.failures:
                    self.found.runs[id] += measured
            if unloaded:
                verdicts |= self._stored(workers, opened, unloaded)
            return verdicts

    def _stored(
        self, workers: Workers, opened: Mapping[str, gate.Open], unloaded: Mapping[str, str]
    ) -> dict[str, Verdict]:
        more = gate.STORED_PROCESSES - gate.FIRST_PROCESSES
        self._through(workers, self.found, list(unloaded), more)
        verdicts: dict[str, Verdict] = {}
        for reason in dict.fromkeys(unloaded.values()):
            ids = [i for i, r in unloaded.items() if r == reason]
            failed = [i for i in ids if i in self.found.failures]
            verdicts |= {i: _failed(i, self.found.failures[i]) for i in failed}
            left = {i: opened[i] for i in ids if i not in failed}
            verdicts |= gate.stored_look(left, {i: self.found.runs[i] for i in left}, reason=reason)
        return verdicts

    # --- accept, compare, list -----------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        if self.mode == "worker":
            from perfsuite import worker

            assert self.job is not None
            with closing(Journal(self.job)) as journal:
                worker.run(self.job, journal, session.items, self.device)
            return True
        if self.mode in ("accept", "compare", "list"):
            if session.testsfailed:
                raise session.Interrupted(f"{session.testsfailed} error(s) while collecting; mend them first")
            try:
                with self._turn() if self.mode != "list" else nullcontext():
                    return getattr(self, f"_{self.mode}")()
            except PerfsuiteError as error:
                self.problems.append(str(error))
                return True
        return None

    def _list(self) -> bool:
        from perfsuite import listing

        try:
            if self.baseline_path.exists():
                self._baseline = baseline.load(self.baseline_path)
        except PerfsuiteError as error:
            self.problems.append(str(error))
            print(error, file=sys.stderr)
        listing.show(
            self.items,
            entries=self.entries,
            inapplicable=self.inapplicable,
            known=len(self.known),
            device=self.machine.device,
            as_json=self.arguments.get("json") == "yes",
        )
        return True

    def _accept(self) -> bool:
        if not self.items:
            self.problems.append("nothing to accept: no timed item of a pair was selected; see `perfsuite list`")
            return True
        head, dirty = revision.head(self.root)
        more = self.arguments.get("more") == "yes"
        if dirty and self.arguments.get("dirty") != "yes":
            raise BaselineError(
                "the work tree has uncommitted changes, so that the accepted code could not be loaded again; "
                "commit them, or accept with --allow-dirty"
            )
        if self.baseline_path.exists():
            baseline.load(self.baseline_path)  # a damaged file is told before the minutes of measuring
        ids = self._measurable()
        if not ids:
            self.problems.append(
                f"nothing to accept: none of {len(self.items)} selected workloads is for {self.device}"
            )
            return True
        processes = int(self.arguments.get("processes", ACCEPT_PROCESSES))
        with revision.extracted([head] if head and not dirty else [], self.root, self.revisions) as (trees, _):
            # The accepted side against its own second import: the noise that the gate's second look has to beat.
            twins = {i: (str(tree), rev) for i in ids for rev, tree in trees.items()}
            self._through(self._workers(), self.found, ids, processes, accepted=twins)
        promises = {i: self.items[i].promises for i in ids}
        self.verdicts = {i: _failed(i, f) for i, f in self.found.failures.items()}
        measured = {i: r for i, r in self.found.runs.items() if i not in self.found.failures}
        looked = gate.promises_look(
            measured, {i: promises[i] for i in measured}, selected=max(1, len(ids)), processes=processes
        )
        self.verdicts |= looked
        red = [v for v in self.verdicts.values() if not v.status.green]
        self.problems += [f"not accepted: {v.message}" for v in red]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entries = [
            baseline.entry_from(
                measured[v.id],
                machine=self.machine,
                promises=promises[v.id],
                revision=head,
                dirty=dirty,
                reason=self.arguments.get("reason", ""),
                accepted=now,
            )
            for v in looked.values()
            if v.status.green
        ]
        if not entries:
            return True
        drop = list(self._gone()) if self.arguments.get("prune") == "yes" else []
        old, new = baseline.update(
            self.baseline_path,
            lambda before: baseline.merge(before, entries, machine=self.machine, more=more, drop=drop),
        )
        self.notes += baseline.describe_changes(old, new)
        self.notes += gate.too_noisy(new.entries, [e.id for e in entries])
        self.notes.append(f"wrote {self.baseline_path}")
        return True

    def _gone(self) -> Collection[str]:
        """Accepted workloads that no longer exist, as far as this run's arguments reach."""
        entries = baseline.load(self.baseline_path).entries if self.baseline_path.exists() else {}
        return [i for i in entries if i not in self.known and self._in_scope(i)]

    def _compare(self) -> bool:
        rev = self.arguments["revision"]
        full = revision.resolve(rev, self.root)
        ids = self._measurable()
        if not ids:
            self.problems.append("nothing to compare: no timed item of a pair for this machine was selected")
            return True
        with revision.extracted([full], self.root, self.revisions) as (trees, refused):
            if refused:
                raise refused[full]
            accepted = {i: (str(trees[full]), full) for i in ids}
            self._through(self._workers(), self.found, ids, gate.SECOND_PROCESSES, accepted=accepted)
        failures = self.found.failures
        self.verdicts = {i: _failed(i, f) for i, f in failures.items()}
        runs = {i: self.found.runs[i] for i in ids if i not in failures}
        if runs:
            self.verdicts |= gate.compare_look(runs, revision=full, selected=len(ids))
        return True

    # --- what the run tells --------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "correctness" not in report.keywords or (report.when != "call" and not (report.skipped or report.failed)):
            return
        self.counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.skip_reasons[reason] = self.skip_reasons.get(reason, 0) + 1
        if report.failed:
            self.correctness_failures[report.nodeid] = (str(report.longrepr).splitlines() or [""])[0]

    def pytest_keyboard_interrupt(self) -> None:
        self.complete = False

    def report(self) -> RunReport:
        """The run as the reports show it."""
        head, _ = revision.head(self.root)
        verdicts = self.verdicts
        if self.mode == "measure":
            # A plain run judges promises alone: PASS would read as the gate's.
            verdicts = {i: v for i, v in verdicts.items() if v.status in RED_IN_A_PLAIN_RUN}
        return RunReport(
            machine=self.machine,
            revision=head,
            started=self.started.isoformat(timespec="seconds"),
            seconds=monotonic() - self.clock,
            measurements={i: tuple(r) for i, r in self.found.runs.items()},
            verdicts=verdicts,
            promises={i: item.promises for i, item in self.items.items()},
            correctness=Correctness(**self.counts, skip_reasons=self.skip_reasons, failures=self.correctness_failures),
            problems=tuple(self.problems),
            complete=self.complete,
            selected=len(self.items),
            collected=len({*self.known, *self.entries}),
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.mode == "worker":
            return
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        if self._progress is not None:
            self._progress.done()
        if self.mode == "gate" and self.items and not self.verdicts and self.complete and not _collecting(session):
            reason = next(filter(None, map(self.inapplicable, self.items.values())), "pytest ran no item")
            self.problems.append(f"nothing was measured: none of {len(self.items)} selected workloads; {reason}")
        red = [v for v in self.verdicts.values() if not v.status.green]
        if (self.problems or (red and self.mode != "measure")) and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        folder = self.config.option.perfsuite_report
        if folder and self.mode != "list":
            from perfsuite.report import write_all

            try:
                self.written = write_all(self.report(), Path(folder))
            except PerfsuiteError as error:
                self.problems.append(str(error))
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.mode in ("worker", "list"):
            return
        from perfsuite.report import annotations, terminal

        shown = self.report()
        if shown.measurements or shown.verdicts or self.problems:
            terminalreporter.section("perfsuite", sep="=")
            # pytest has told the failed proofs already.
            brief = replace(shown, correctness=replace(shown.correctness, failures={}))
            terminal.show(brief, terminal.console(terminalreporter._tw._file))
        for note in self.notes:
            terminalreporter.write_line(note)
        for form, path in getattr(self, "written", {}).items():
            terminalreporter.write_line(f"{form}: {path}")
        if self.mode == "gate" and annotations.wanted():
            for line in annotations.lines(shown):
                terminalreporter.write_line(line)


def _failed(id: str, failure: Failure) -> Verdict:
    return Verdict(id=id, status=failure.status, message=f"{failure.status} {id}: {failure.message}")


def _collecting(session: pytest.Session) -> bool:
    """Whether the run only lists its items, or ended while it collected."""
    return bool(session.config.option.collectonly) or session.exitstatus not in (0, 1, 5)


def _arguments(given: Sequence[str]) -> dict[str, str]:
    return {k: v for k, _, v in (a.partition("=") for a in given)}
