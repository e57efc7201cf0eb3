"""Run the measuring processes of a calibration one after another, and collect their records. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.calibration.record import (
    KINDS,
    KindRecord,
    ProcessRecord,
    Recording,
    SessionRecord,
    ToolRun,
    rounded,
    side_names,
)
from perfsuite.codec import from_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Machine
from perfsuite.session.journal import Lines
from perfsuite.session.worker_pool import POLL_S
from perfsuite.session.worker_process import end, start
from perfsuite.system.machine import package_version

SILENCE_S = 240.0
"""Seconds without a report after which a process counts as hanging: every kind takes less than a minute."""
START_S = {"cuda": 8.0, "cpu": 3.0}
KIND_S = {"cuda": 3.5, "cpu": 4.2}
"""Seconds of a process's start, and of one kind with 8 sides, 8 blocks and 7 ABBA rounds. Only the plan uses them."""
ANALYSIS_S = 120.0
"""Reserved for simulating the gate, the table and the plot."""
DO_BENCH_S = 0.2
FEWEST = 2
"""Minimum number of processes, run even beyond the budget: one does not show the noise between processes."""
GIVE_UP = 2
"""Number of consecutive failed processes after which the run ends."""
WORKER = "experiments.calibration.worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """Design of the measurement."""

    device: str
    """"cuda" or "cpu"."""
    kinds: tuple[str, ...]
    extras: tuple[float, ...]
    processes: int
    blocks: int
    rounds: int
    seconds: float
    """Budget in seconds of the whole run, including the analysis."""
    benchmark_max_time: float
    do_bench: bool

    @property
    def process_s(self) -> float:
        """Estimated seconds of one process."""
        sides = len(side_names(self.extras)) / 8
        share = max(sides * self.blocks * self.rounds / 56, 0.02)
        runs = len(self.extras) * len(self.kinds)
        other = runs * (1.3 * self.benchmark_max_time + DO_BENCH_S * self.do_bench)
        return START_S[self.device] + KIND_S[self.device] * len(self.kinds) * share + other

    @property
    def fitting(self) -> int:
        """Number of processes that the budget is expected to hold, at least FEWEST."""
        return max(FEWEST, min(self.processes, int((self.seconds - ANALYSIS_S) / self.process_s)))


@dataclass(slots=True)
class Measuring:
    """One session of measuring; calls `progress(process, what)` at each step, `kept(recording)` after each process."""

    design: Design
    machine: Machine
    planting: dict[str, Mapping[str, float]] = field(default_factory=dict)
    progress: Callable[[int, str], None] = lambda process, what: None
    kept: Callable[[Recording], None] = lambda recording: None
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False
    _processes: list[ProcessRecord] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def run(self) -> Recording:
        """Measure until the design is complete, the budget is spent, processes fail repeatedly, or Ctrl-C is pressed.

        Results recorded until then are kept. Raises PerfsuiteError if nothing could be measured.
        """
        design = self.design
        longest, failed, number, problem = 0.0, 0, 1, ""
        try:
            for number in range(1, design.processes + 1):
                spent = time.monotonic() - self._began
                if number > FEWEST and spent + longest > design.seconds - ANALYSIS_S:
                    self.left_out.append(
                        f"{design.processes - number + 1} of {design.processes} processes: the budget of "
                        f"{design.seconds:g} s was spent"
                    )
                    break
                began = time.monotonic()
                problem = self._one(number)
                longest = max(longest, time.monotonic() - began)
                failed = failed + 1 if problem else 0
                if problem and problem not in self.left_out:
                    problem = f"process {number}: {problem}"
                    self.left_out.append(problem)
                if problem and number == 1 and not self._processes:
                    break
                if failed == GIVE_UP:
                    if number < design.processes:
                        rest = design.processes - number
                        self.left_out.append(
                            f"{rest} of {design.processes} processes, because {failed} in a row failed"
                        )
                    break
        except KeyboardInterrupt:
            self.interrupted = True
            self.left_out.append(f"the run was interrupted in process {number}; the rest was not measured")
        recording = self.recording()
        if not recording.kinds and not self.interrupted:
            raise PerfsuiteError(f"nothing could be measured: {problem}")
        return recording

    def recording(self) -> Recording:
        """Return everything recorded so far."""
        machine = self.machine
        session = SessionRecord(
            date=self._date,
            driver=machine.driver,
            cuda=machine.cuda,
            torch=machine.torch,
            triton=machine.triton,
            python=machine.python,
            benchmark_version=package_version("pytest-benchmark"),
            benchmark_max_time=self.design.benchmark_max_time,
            processes=tuple(self._processes),
            seconds=rounded(time.monotonic() - self._began),
            left_out=tuple(dict.fromkeys(self.left_out)),
        )
        return Recording(
            machine=machine,
            blocks=self.design.blocks,
            rounds=self.design.rounds,
            extras=self.design.extras,
            planting=dict(self.planting),
            sessions=(session,),
        )

    def _one(self, number: int) -> str:
        """Run one process. Return why it failed or ended early; empty if it finished."""
        with tempfile.TemporaryDirectory(prefix="perfsuite-calibrate-") as folder:
            out, log = Path(folder) / "out.jsonl", Path(folder) / "log"
            design = self.design
            job = {
                "out": str(out),
                "parent": os.getpid(),
                "device": design.device,
                "kinds": list(design.kinds),
                "extras": list(design.extras),
                "blocks": design.blocks,
                "rounds": design.rounds,
                "planting": {k: dict(v) for k, v in self.planting.items()},
                "benchmark_max_time": design.benchmark_max_time,
                "do_bench": design.do_bench,
            }
            path = Path(folder) / "job.json"
            path.write_text(json.dumps(job))
            out.touch()
            gathered = _Gathered(self, number)
            try:
                for event in _events(path, out, log):
                    gathered.take(event)
            finally:
                record = gathered.record()
                if record.kinds:
                    self._processes.append(record)
                    self.kept(self.recording())
            stopped = f"it reported nothing for {SILENCE_S:g} s and was stopped"
            if record.kinds:
                return "" if gathered.done else stopped if gathered.hung else f"it ended early: {_tail(log)}"
            ended = stopped if gathered.hung else f"it ended before it had measured anything: {_tail(log)}"
            return "; ".join(gathered.failures) or ended


class _Gathered:
    """Results that one process has reported so far."""

    def __init__(self, measuring: Measuring, number: int) -> None:
        self.measuring, self.number = measuring, number
        self.began = time.monotonic()
        self.start_s = 0.0
        self.kinds: dict[str, KindRecord] = {}
        self.failures: list[str] = []
        self.done = self.hung = False

    def take(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        if name == "started":
            self.start_s = time.monotonic() - self.began
        elif name == "begin":
            self.measuring.progress(self.number, event["what"])
        elif name == "planting":
            self.measuring.planting[event["kind"]] = event["planting"]
        elif name == "kind":
            self.kinds[event["kind"]] = from_json(KindRecord, event["record"])
        elif name == "run":
            self._add_run(event)
        elif name == "failed":
            self._add_failure(f"{event['what']}: {event['why']}")
        elif name == "done":
            self.done = True
        elif name == "hung":
            self.hung = True

    def _add_run(self, event: Mapping[str, Any]) -> None:
        kind = self.kinds[event["kind"]]
        run = {event["side"]: from_json(ToolRun, event["run"])}
        if event["tool"] == "benchmark":
            kind = replace(kind, benchmark={**kind.benchmark, **run})
        else:
            kind = replace(kind, do_bench={**kind.do_bench, **run})
        self.kinds[event["kind"]] = kind

    def _add_failure(self, failure: str) -> None:
        self.failures.append(failure)
        if failure not in self.measuring.left_out:
            self.measuring.left_out.append(failure)

    def record(self) -> ProcessRecord:
        return ProcessRecord(
            kinds=self.kinds, start_s=rounded(self.start_s), seconds=rounded(time.monotonic() - self.began)
        )


def _with_this_package() -> dict[str, str]:
    """Return the variables with which a process finds the package of WORKER, which is not installed."""
    places = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def _events(job: Path, out: Path, log: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a worker until it ends. A worker that hangs is stopped; its last event is "hung"."""
    child = start([sys.executable, "-m", WORKER, str(job)], log, environment=_with_this_package())
    reported, heard = Lines(out), time.monotonic()
    try:
        while True:
            ended = child.poll() is not None
            lines = reported.new()
            if lines:
                heard = time.monotonic()
            for line in lines:
                yield json.loads(line)
            if ended:
                return
            if time.monotonic() - heard > SILENCE_S:
                yield {"event": "hung"}
                return
            time.sleep(POLL_S)
    finally:
        end(child)


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def plan(design: Design) -> list[str]:
    """Return the plan in lines, with the estimated seconds."""
    fits = design.fitting
    total = fits * design.process_s + ANALYSIS_S
    tools = []
    if design.benchmark_max_time > 0:
        tools.append(f"pytest-benchmark, {design.benchmark_max_time:g} s a run")
    if design.do_bench:
        tools.append("triton.testing.do_bench")
    return [
        f"device: {design.device}",
        f"processes: {fits} of {design.processes}, about {design.process_s:.0f} s each, with a budget of "
        f"{design.seconds:g} s{' (the minimum)' if fits == FEWEST < design.processes else ''}",
        *(f"kind {k}: {KINDS[k]}" for k in design.kinds),
        f"sides, interleaved: {', '.join(side_names(design.extras))}",
        f"blocks × rounds a process: {design.blocks} × {design.rounds}",
        f"other tools: {'; '.join(tools) or 'none'}",
        f"estimated: {total:.0f} s, including up to {ANALYSIS_S:.0f} s for the table and the plot",
    ]
