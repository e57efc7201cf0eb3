"""Scratch projects for the harness's own tests, and workers that measure nothing.

A gate's verdict depends on times. `FakeWorkers` replaces the measuring processes and gives the times that the test
chooses, so that a verdict is the same on every machine.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import io
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import builders
import pytest
import torch
from _pytest.fixtures import FixtureFunctionDefinition, FixtureManager
from _pytest.pytester import SysModulesSnapshot
from click.testing import CliRunner, Result
from pytest_benchmark.utils import get_machine_id

from perfsuite import cli
from perfsuite.records import Alone, Measurement, Ran, WorkloadProof
from perfsuite.session import changed, device_lock
from perfsuite.session.device_lock import HELD
from perfsuite.session.journal import Job
from perfsuite.session.tasks import ALONE, ITEMS, PROVE, TIME, Failure, Outcome, Reported, Task
from perfsuite.session.worker_pool import Workers
from perfsuite.session.worker_process import Lane

ROOT = Path(__file__).resolve().parents[2]
JITTER = (0.0, 4e-4, -3e-4, 2e-4, -4e-4, 1e-4, 3e-4, -2e-4)
"""Differences of log-ratios between processes, as small as on a quiet machine but not impossibly small."""

TWO_LINES = """
    from perfsuite import Pair, Workload, tensor


    def slow(x):
        return x + x + x


    def fast(x):
        return 3 * x


    scale = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("small", n=64, clock="wall")],
    )
"""
SMALL = "test_scale.py::scale::speed[small]"
OUTER = (
    "CI",
    "COLUMNS",
    "GITHUB_ACTIONS",
    "GITHUB_STEP_SUMMARY",
    "PERFSUITE_JOB",
    "PYTEST_ADDOPTS",
    "PYTEST_XDIST_AUTO_NUM_WORKERS",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
)
"""Environment variables of the outer test run, which a run within a test must not see."""


class FakeWorkers:
    """Replaces `perfsuite.session.modes.base.Workers`: `outcome(id, process, second)` gives the result of each
    measurement.

    `process` counts the timing processes from 0; `second` says whether the accepted side is timed, too. Proofs succeed,
    unless `outcome` is a failure for that workload. A trace finds `ran`, and `own` sources.
    """

    def __init__(self, outcome: Callable[[str, int, bool], Outcome]) -> None:
        self.outcome = outcome
        self.calls: list[tuple[tuple[str, ...], dict[str, str]]] = []
        """For each timing process: (ids, id → accepted revision)."""
        self.proven: list[str] = []
        self.failing: set[str] = set()
        self.skipping: set[str] = set()
        self.unloaded: dict[str, str] = {}
        """Workload → reason why it cannot be compared with its accepted side."""
        self.ran: Ran | None = None
        """Record of the files that every workload ran, as proofs and traces report it."""
        self.own: tuple[str, ...] = ()
        self.alone: dict[str, Outcome] = {}
        """Workload → measurement of its reference in a process that has run no optimized side, if that is not long."""
        self.tasks: list[Task] = []
        self.begun: Callable[[int, str], None] = lambda lane, id: None

    def __call__(self, *, progress: Callable[[int, str], None], folder: Path, **given: Any) -> Any:
        self.begun, self.folder = progress, folder
        return self

    @property
    def limits(self) -> dict[str, float]:
        return {task.id: task.limit_s for task in self.tasks}

    def prepare(self, lanes: Sequence[Lane], ids: Sequence[str], each: int, at_once: int) -> None:
        """Do nothing: these processes need no time to start."""

    def begin_early(self, tasks: Sequence[Task], lanes: Sequence[Lane], most: int) -> None:
        """Do nothing: no process waits for a task."""

    def is_any_free(self, lanes: Sequence[Lane]) -> bool:
        """Return False: no process is waiting."""
        return False

    def end_early(self, ids: Collection[str]) -> None:
        """Do nothing: no process has begun early."""

    def deliver(self, proof: WorkloadProof) -> None:
        """Do nothing: no process has begun early."""

    def close(self) -> None:
        """Do nothing: no process waits."""

    def run(
        self,
        tasks: Sequence[Task],
        lanes: Sequence[Lane],
        meanwhile: Callable[[Sequence[Lane]], None] = lambda busy: None,
        further: Callable[[str], Sequence[Task]] | None = None,
    ) -> Generator[tuple[str, Outcome], None, None]:
        process, seen, left = len(self.calls), Counter[str](), deque(tasks)
        while left:
            task = left.popleft()
            self.tasks.append(task)
            self.begun(0, task.id)
            number = max(0, process + (seen[task.id] if task.kind == TIME else -1))
            if task.kind == TIME:
                seen[task.id] += 1
                if number == len(self.calls):
                    self.calls.append(((), {}))
                ids, accepted = self.calls[number]
                self.calls[number] = (
                    (*ids, task.id),
                    accepted | ({task.id: task.accepted.revision} if task.accepted else {}),
                )
            outcome = self.outcome(task.id, number, task.accepted is not None)
            if task.kind == PROVE and not isinstance(outcome, Failure):
                outcome = self._proof(task)
            if task.kind == ITEMS:
                outcome = self._reported(task.id)
            if task.kind == ALONE:
                outcome = self.alone.get(task.id, Alone(id=task.id, blocks_s=(1.0,)))
            yield task.id, outcome
            left.extend(further(task.id) if further else ())
        meanwhile(lanes[:1])

    def _proof(self, task: Task) -> WorkloadProof:
        if self.ran and changed.launches_the_same(task.launched, task.changed, self.ran.launched, self.own):
            return WorkloadProof(id=task.id, seed=0, same_launches=True)
        self.proven.append(task.id)
        unloaded = self.unloaded.get(task.id, "") if task.accepted else ""
        return WorkloadProof(id=task.id, seed=0, unloaded=unloaded, ran=self.ran if task.note_ran else None)

    def _reported(self, id: str) -> Reported:
        """Report that a proof passed, failed (if in `failing`) or was skipped; as JSON, which has no tuples."""
        fails, skips = id in self.failing, id in self.skipping
        text = "it is wrong" if fails else (id, 1, "Skipped: not here") if skips else None
        report = pytest.TestReport(
            nodeid=id,
            location=(id, 0, id),
            keywords={"correctness": 1},
            outcome="failed" if fails else "skipped" if skips else "passed",
            longrepr=text,
            when="setup" if skips else "call",
        )
        return Reported(reports=(json.loads(json.dumps({**report._to_json(), "$report_type": "TestReport"})),))


def times(*, speedup: float = 2.0, slower: float = 0.0, noise: float = 1.0, **fields: Any) -> Any:
    """Return an outcome for FakeWorkers: `speedup` over the reference, `slower` (relative) than what was accepted."""

    def outcome(id: str, process: int, second: bool) -> Measurement:
        jitter = noise * JITTER[process % len(JITTER)]
        known: dict[str, Any] = {"device": "cpu", "clock": "wall", "sizes": {"n": 64}, **fields}
        return builders.measurement(
            id,
            ratio=math.log(speedup) - math.log1p(slower) + jitter,
            accepted=-math.log1p(slower) + jitter if second else None,
            optimized_s=1e-5 * (1 + slower),
            reference_s=1e-5 * speedup,
            **known,
        )

    return outcome


def fails(failure: Failure, *, among: Callable[[str, int, bool], Outcome] | None = None, only: str = "") -> Any:
    """Return an outcome for FakeWorkers: this failure for ids that contain `only`; the others are as in `among`."""
    others = among or times()
    return lambda id, process, second: failure if only in id else others(id, process, second)


LIBRARY = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
"""Folders whose modules belong to no project."""
_INSTALLED: set[str] = set()
"""Names of the modules found there, cached because thousands are looked up after each run."""


def forget_only_the_project(pytester: pytest.Pytester) -> SysModulesSnapshot:
    """Make pytester forget only the project's modules after a run in this process: torch cannot be imported twice."""

    folder = str(pytester.path)

    def keep(name: str) -> bool:
        if name in _INSTALLED:
            return True
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and file.startswith(LIBRARY):
            _INSTALLED.add(name)
        return file is None or not file.startswith(folder)

    return SysModulesSnapshot(preserve=keep)


class _Installed(importlib.metadata.PathDistribution):
    """Installed package whose files are read only once: pytest asks all packages for them at each start."""

    @functools.cached_property
    def entry_points(self) -> importlib.metadata.EntryPoints:  # type: ignore[override]  # there it is a property
        return super().entry_points

    @functools.cached_property
    def metadata(self) -> importlib.metadata.PackageMetadata:  # type: ignore[override]  # as above
        return super().metadata

    @functools.cached_property
    def files(self) -> list[importlib.metadata.PackagePath] | None:  # type: ignore[override]  # as above
        return super().files


@functools.cache
def _installed() -> list[_Installed]:
    # `_path` is private.
    return [_Installed(found._path) for found in importlib.metadata.distributions()]  # type: ignore[attr-defined]


_note_fixtures = FixtureManager.pytest_plugin_registered


def _note_fixtures_if_any(self: FixtureManager, plugin: object, plugin_name: str) -> None:
    """Look for fixtures as pytest does, but only in plugins that have some: it examines every attribute of each."""
    holders = [plugin] if isinstance(plugin, ModuleType) else type(plugin).__mro__
    has_some = any(type(value) is FixtureFunctionDefinition for holder in holders for value in vars(holder).values())
    if has_some or plugin_name.endswith("conftest.py"):
        _note_fixtures(self, plugin, plugin_name)


@functools.cache
def _machine_id() -> str:
    found: str = get_machine_id()
    return found


def hide_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts find a machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what the plugin sets on such a machine
    # torch may know the GPUs from an earlier test.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


class Project:
    """Folder with its own test modules, and methods to run them."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, copies: Path) -> None:
        self.pytester, self.monkeypatch, self.copies = pytester, monkeypatch, copies
        self.path = pytester.path
        self.workers: FakeWorkers | None = None
        for name in OUTER:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(HELD, "cpu")  # no measurement here could be disturbed by another run on this machine
        # Hides a git repository that may contain /tmp.
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(self.path.parent))
        # Nothing here depends on time: a run within a test does not wait for others that measure on this CPU.
        monkeypatch.setenv(device_lock.HELD, "cpu")
        # If perfsuite is not installed, the processes that a run starts find it here.
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        _put(path, "\n".join(line[indent:] for line in lines) + "\n")
        return path

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.path / name
        text = path.read_text()
        assert old in text
        _put(path, text.replace(old, new))

    def measured(self, outcome: Any) -> FakeWorkers:
        """Replace the workers: from now on runs in this process measure nothing, and get `outcome`."""
        self.workers = FakeWorkers(outcome)
        self.monkeypatch.setattr("perfsuite.session.modes.base.Workers", self.workers)
        self.monkeypatch.setattr("perfsuite.system.tamper.check", lambda: None)  # it would find the replaced workers
        return self.workers

    @contextmanager
    def pretending(self, outcome: Any) -> Iterator[None]:
        """Measure nothing within the block, as after `measured`; afterwards runs measure again."""
        outer = self.monkeypatch
        try:
            with outer.context() as self.monkeypatch:
                self.measured(outcome)
                yield
        finally:
            self.monkeypatch, self.workers = outer, None

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run pytest in this process; warnings are not errors, as they are in our own tests.

        Every run has the same draws, unless a profile is given: no test may depend on what is drawn.
        """
        chosen = () if any("--perfsuite-profile" in a for a in arguments) else ("--perfsuite-profile=ci",)
        own, installed = importlib.metadata.distributions, _installed()
        with warnings.catch_warnings(), self.monkeypatch.context() as patch:
            patch.setattr("importlib.metadata.distributions", lambda **given: own(**given) if given else installed)
            patch.setattr(FixtureManager, "pytest_plugin_registered", _note_fixtures_if_any)
            # pytest-benchmark asks git seven times at each start, for the name of a file that nothing here saves, and
            # another program for the processor.
            patch.setattr("pytest_benchmark.plugin.get_tag", lambda *given: "unversioned")
            patch.setattr("pytest_benchmark.session.get_machine_id", _machine_id)
            warnings.simplefilter("ignore")
            given = ("-p", "perfsuite.plugin", "-p", "no:logging", *cli.QUIET, *chosen, *arguments)
            done = self.pytester.runpytest_inprocess(*given, no_reraise_ctrlc=True)
            if any("--benchmark-json" in a for a in arguments):
                _close_written_files()
            return done

    def gate(self, *arguments: str) -> pytest.RunResult:
        return self.run("-m", "perf", *arguments, "--benchmark-compare")

    def cli(self, *arguments: str, **given: Any) -> Result:
        """Run `perfsuite …` in this process; the result includes its pytest's output."""

        def main(args: Sequence[str]) -> int:
            return int(self.run(*args).ret)

        with self.monkeypatch.context() as patch:
            patch.setattr("pytest.main", main)
            return CliRunner().invoke(cli.main, arguments, **given)

    def accept(self, outcome: Any | None = None, *arguments: str) -> Path:
        """Commit, accept what `outcome` gives, and return the baseline's path."""
        if not (self.path / ".git").exists():
            self.commit()
        self.measured(outcome or times())
        done = self.cli("accept", "--reason", "the first", *arguments)
        assert done.exit_code == 0, done.output
        (path,) = (self.path / "baselines").glob("*.json")
        return path

    def accept_again(self, name: str) -> None:
        """Call `accept()` for a fixture of this name; later tests get copies of the files."""
        copy = self.copies / name
        if copy.exists():
            shutil.copytree(copy, self.path, dirs_exist_ok=True)
        else:
            self.accept()
            shutil.copytree(self.path, copy)

    def process(self, *command: str, timeout: float = 240.0, **given: Any) -> subprocess.CompletedProcess[str]:
        """Run a real process in the project's folder: `pytest …` or `perfsuite …`."""
        return subprocess.run(
            self.command(*command), cwd=self.path, capture_output=True, text=True, timeout=timeout, check=False, **given
        )

    @staticmethod
    def command(program: str, *arguments: str) -> list[str]:
        plugin = ["-p", "perfsuite.plugin"] if program == "pytest" else []
        return [sys.executable, "-m", program, *plugin, *arguments]

    def git(self, *arguments: str) -> str:
        return git(self.path, *arguments)

    def commit(self, message: str = "work") -> str:
        """Commit everything and return the revision."""
        if not (self.path / ".git").exists():
            self.git("init")
            self.write(".gitignore", "__pycache__/\n.perfsuite/\n.hypothesis/\n.benchmarks/\nbaselines/")
        self.git("add", "-A")
        self.git("commit", "-m", message, "--allow-empty")
        return self.git("rev-parse", "HEAD")


def git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command in this folder, run without the user's and the system's git configuration."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
    )
    return done.stdout.strip()


def _put(path: Path, text: str) -> None:
    """Write the file.

    A later version gets a later second, because a .pyc file is matched by the source's second and size.
    """
    before = path.stat().st_mtime if path.exists() else 0.0
    path.write_text(text)
    if path.stat().st_mtime < before + 1:
        os.utime(path, (before + 1, before + 1))


def real_workers(folder: Path) -> Workers:
    """Return workers that do start processes, for the project in `folder`."""
    arguments = ["-p", "no:cacheprovider", "-q", f"--rootdir={folder}", "-p", "perfsuite.plugin"]
    return Workers(root=folder, folder=folder / ".perfsuite/workers", arguments=arguments)


def run_tasks(workers: Workers, *tasks: Task) -> list[tuple[str, Outcome]]:
    """Run the tasks in one lane, and return their outcomes."""
    return list(workers.run(tasks, [Lane()]))


def lines_with(text: str, *wanted: str) -> list[str]:
    """Return the lines that contain all of `wanted`."""
    return [line for line in text.splitlines() if all(w in line for w in wanted)]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after 120 s, which suffices on a busy machine."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _close_written_files() -> None:
    """Close the files that pytest-benchmark 5.2 opens when it parses --benchmark-json; else a later test is blamed."""
    for file in gc.get_objects():
        if isinstance(file, io.BufferedWriter) and str(file.name).endswith(".json"):
            file.close()


@pytest.fixture
def project(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Make an empty scratch project; the test module says `pytest_plugins = ["pytester"]`."""
    monkeypatch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", forget_only_the_project)
    copies = request.getfixturevalue("tmp_path_factory").getbasetemp() / "accepted"
    return Project(request.getfixturevalue("pytester"), monkeypatch, copies)


__all__ = [
    "ROOT",
    "SMALL",
    "TWO_LINES",
    "Failure",
    "FakeWorkers",
    "Job",
    "Project",
    "fails",
    "hide_gpus",
    "lines_with",
    "real_workers",
    "run_tasks",
    "runs",
    "times",
    "wait_for",
]
