"""A measuring process of the calibration: `python -m experiments.calibration.worker JOB`.

It times every kind of the job and writes a line of JSON for each event: a step begins, ends or fails, or has a result.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from experiments.calibration import benched, workloads
from experiments.calibration.record import KindRecord, ToolRun, rounded, side_name, side_names
from perfsuite.codec import from_json, to_json
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.declare.specs import tensor
from perfsuite.errors import in_one_line
from perfsuite.records import ACCEPTED, REFERENCE, Case, Counts
from perfsuite.system.orphans import die_with_parent
from perfsuite.timing.clocks import CpuClock, clock_for
from perfsuite.timing.runner import WARMUP_CALLS, Clock, Runner
from perfsuite.timing.sampling import BLOCKS, ROUNDS, Sampler

DO_BENCH_QUANTILES = (0.5, 0.2, 0.8)
SECOND = "experiments.calibration._accepted_workloads"
BENCHMARK, DO_BENCH = "pytest-benchmark", "do_bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob:
    """Measurements that one process is to make."""

    out: str
    device: str
    kinds: tuple[str, ...]
    extras: tuple[float, ...]
    blocks: int
    rounds: int
    planting: Mapping[str, Mapping[str, float]]
    """Calibration of planted work from earlier processes. Kinds that it lacks are calibrated here."""
    benchmark_max_time: float
    """Seconds a run of pytest-benchmark; 0 leaves it out."""
    do_bench: bool
    parent: int
    """The process that started this one."""


class QuadSampler(Sampler):
    """The gate's sampler, which also keeps every ABBA round and the seconds spent on each side. All sides take part in
    every round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rounds_s: dict[str, list[tuple[float, ...]]] = {n: [] for n in self.runners}
        self.spent_s = dict.fromkeys(self.runners, 0.0)

    def plan(self, blocks: int = BLOCKS, rounds: int = ROUNDS) -> None:
        """Choose the number of calls in a sample. Every process measures exactly this many blocks and ABBA rounds."""
        super().plan(blocks, rounds)
        self.blocks, self.rounds = blocks, rounds

    def sample(self, name: str, *arguments: Any, **options: Any) -> float:
        """Return the seconds of one sample of the side."""
        began = perf_counter()
        try:
            return super().sample(name, *arguments, **options)
        finally:
            self.spent_s[name] += perf_counter() - began

    def _block(self, block: int, rounds: int) -> None:
        times: dict[str, list[float]] = {n: [] for n in self.runners}
        for number in range(rounds):
            order = list(self.runners)
            if number == 0 or self.small:
                began = perf_counter()
                self._allocate(order)
                for name in order:
                    self.spent_s[name] += (perf_counter() - began) / len(order)
            self.rng.shuffle(order)
            total = dict.fromkeys(order, 0.0)
            for name in [*order, *reversed(order)]:
                total[name] += self.sample(name)
            for name, seconds in total.items():
                times[name].append(max(seconds / 2, 1e-12))
        for name, values in times.items():
            self.blocks_s[name].append(statistics.median(values))
            # A discarded block is measured again under the same number.
            self.rounds_s[name] = [*self.rounds_s[name][:block], tuple(map(rounded, values))]


class Process:
    """The work of one process; `emit` is called with each event."""

    def __init__(self, job: CalibrationJob, emit: Callable[[Mapping[str, Any]], None]) -> None:
        self.job, self.emit = job, emit
        if torch.device(job.device).type == "cpu":
            # With several threads, calls as short as these would measure the scheduler of a shared machine.
            torch.set_num_threads(1)
        self.clock: Clock = clock_for(job.device)
        self.second = second_import()
        self.runners: dict[str, dict[str, Runner]] = {}
        self.masters: dict[str, dict[str, torch.Tensor]] = {}
        self.rng = random.Random(secrets.randbits(64))

    def run(self) -> None:
        """Measure every kind with the gate's sampler, then with the other tools. They run each side through all kinds,
        as in a suite."""
        for kind in self.job.kinds:
            self._attempt(kind, functools.partial(self._kind, kind))
        measured = [k for k in self.job.kinds if k in self.runners]
        sides = [s for s in side_names(self.job.extras) if s not in (REFERENCE, ACCEPTED)]
        self.rng.shuffle(sides)
        if self.job.benchmark_max_time > 0 and measured:
            self._attempt(BENCHMARK, lambda: self._benchmark(sides, measured))
        if self.job.do_bench and measured:
            self._attempt(DO_BENCH, lambda: self._do_bench(sides, measured))

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        self.emit({"event": "begin", "what": what})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work()
        except Exception as error:
            self.runners.pop(what, None)
            self.emit({"event": "failed", "what": what, "why": in_one_line(error)})
        self.emit({"event": "end", "what": what})

    def _kind(self, name: str) -> None:
        began = perf_counter()
        job, device = self.job, self.job.device
        kind = workloads.KINDS[name]
        generator = torch.Generator(device=device).manual_seed(secrets.randbits(31))
        master = kind.inputs(device, max(job.extras), generator)
        planting = job.planting.get(name)
        if planting is None:
            planting = self._planting(kind, master)
            self.emit({"event": "planting", "kind": name, "planting": planting})
        runners = self._runners(name, master, planting)
        wall = isinstance(self.clock, CpuClock)
        extra_of = {REFERENCE: None, ACCEPTED: 0.0} | {side_name(x): x for x in job.extras}
        counts = {} if wall else {s: Counts(host_syncs=0, launches=kind.launches(extra_of[s])) for s in runners}
        clock_kind = "wall" if wall else kind.clock
        masters = dict.fromkeys(runners, master)
        sampler = QuadSampler(runners, masters, self.clock, clock_kind, counts, self.rng, _quiet)
        sampler.plan(job.blocks, job.rounds)
        condition = sampler.run()
        record = KindRecord(
            clock=clock_kind,
            rounds_s={n: tuple(q) for n, q in sampler.rounds_s.items()},
            side_s={n: rounded(s) for n, s in sampler.spent_s.items()},
            seconds=rounded(perf_counter() - began),
            condition=condition,
        )
        self.runners[name], self.masters[name] = runners, master
        self.emit({"event": "kind", "kind": name, "record": to_json(record)})

    def _runners(
        self, name: str, master: Mapping[str, torch.Tensor], planting: Mapping[str, float]
    ) -> dict[str, Runner]:
        """Return a warmed-up runner of each side of a kind."""
        job, device = self.job, self.job.device
        kind, second = workloads.KINDS[name], self.second.KINDS[name]
        calls = {REFERENCE: kind.reference(device), ACCEPTED: second.optimized(device, 0.0, planting)}
        calls |= {side_name(x): kind.optimized(device, x, planting) for x in job.extras}
        # No outputs are declared: nothing is proven here, so nothing has to be restored between calls.
        pair = Pair(reference=_nothing, optimized=_nothing, inputs={n: tensor("n") for n in master}, name=name)
        case = Case(dtype="float32", sizes={}, inputs={}, seed=0)
        runners = {
            side: Runner(name=side, side=Side(call=call), pair=pair, case=case, direction="forward", device=device)
            for side, call in calls.items()
        }
        for runner in runners.values():
            runner.allocate(master, self.rng)
            runner.warm_up(self.clock)
        return runners

    def _planting(self, kind: workloads.Kind, master: Mapping[str, torch.Tensor]) -> dict[str, float]:
        clock_kind = "wall" if isinstance(self.clock, CpuClock) else kind.clock
        unplanted = {"seconds": 1.0, "overhead_s": 0.0, "cycles_per_s": 1.0}
        call = kind.optimized(self.job.device, 0.0, unplanted)
        inputs = {n: t.clone() for n, t in master.items()}

        def run() -> None:
            call(*inputs.values())

        def timed(work: Callable[..., Any]) -> float:
            return self.clock.sample(clock_kind, _reset, work, 4, kind.launches(0.0) + 1, "planting")

        for _ in range(WARMUP_CALLS):
            run()
        self.clock.synchronize()
        return {k: float(v) for k, v in kind.calibrate(self.job.device, run, timed).items()}

    def _prepared(self, kind: str, side: str) -> Callable[[], object]:
        """Return a call of the side that waits for completion, on fresh inputs as in a test of another tool."""
        runner = self.runners[kind][side]
        runner.allocate(self.masters[kind], self.rng)
        runner.call()
        self.clock.synchronize()
        if isinstance(self.clock, CpuClock):
            return runner.call

        def call() -> None:
            runner.call()
            self.clock.synchronize()

        return call

    def _benchmark(self, sides: list[str], kinds: list[str]) -> None:
        """Run the real pytest-benchmark through its command line."""
        import pytest

        names = {f"{s}-{k}": (s, k) for s in sides for k in kinds}
        benches = [(n, functools.partial(self._prepared, k, s)) for n, (s, k) in names.items()]
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "found.json"
            arguments = [str(Path(benched.__file__)), "-q", "--noconftest", "-c", os.devnull, f"--rootdir={folder}"]
            arguments += ["-p", "pytest_benchmark.plugin", "-p", "no:cacheprovider", "--benchmark-quiet"]
            arguments += [f"--benchmark-storage={folder}", f"--benchmark-json={found}", "-W", "ignore"]
            arguments += [f"--benchmark-max-time={self.job.benchmark_max_time}", "--import-mode=importlib"]
            code = pytest.main(arguments, plugins=[benched.Benches(benches)])
            if code != 0:
                raise RuntimeError(f"pytest ended with {code!r}")
            runs = json.loads(found.read_text())["benchmarks"]
        for run in runs:
            side, kind = names[run["param"]]
            stats = run["stats"]
            timed = ToolRun(
                median=rounded(stats["median"]),
                min=rounded(stats["min"]),
                rounds=stats["rounds"],
                iterations=stats["iterations"],
                seconds=rounded(stats["total"] * stats["iterations"]),
            )
            self.emit({"event": "run", "tool": "benchmark", "kind": kind, "side": side, "run": to_json(timed)})

    def _do_bench(self, sides: list[str], kinds: list[str]) -> None:
        """Run the real `triton.testing.do_bench` with its own settings."""
        from triton.testing import do_bench

        for side in sides:
            for kind in kinds:
                self._prepared(kind, side)
                began = perf_counter()
                middle, low, _ = do_bench(self.runners[kind][side].call, quantiles=list(DO_BENCH_QUANTILES))
                timed = ToolRun(
                    median=rounded(middle * 1e-3),
                    min=rounded(low * 1e-3),
                    rounds=0,
                    iterations=1,
                    seconds=rounded(perf_counter() - began),
                )
                self.emit({"event": "run", "tool": "do_bench", "kind": kind, "side": side, "run": to_json(timed)})


def second_import() -> ModuleType:
    """Import the workloads again under another name: new functions at other addresses."""
    spec = importlib.util.spec_from_file_location(SECOND, workloads.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SECOND] = module
    spec.loader.exec_module(module)
    return module


def _nothing(*arguments: object) -> None:
    """Do nothing. Both sides of the pair are this function, because here each side has its own call."""


def _reset() -> None:
    """Do nothing: nothing is restored between calls."""


def _quiet(phase: str) -> None:
    """Do nothing: the phase is not reported."""


def main(path: str) -> None:
    """Do the job in the file `path`."""
    die_with_parent()
    job = from_json(CalibrationJob, json.loads(Path(path).read_text()))
    if os.getppid() != job.parent:
        return  # the parent ended while this process was importing torch
    # pytest-benchmark must see only its own options.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    with open(job.out, "a", buffering=1) as stream:

        def emit(event: Mapping[str, Any]) -> None:
            stream.write(json.dumps(event) + "\n")
            stream.flush()

        process = Process(job, emit)
        gc.collect()
        gc.freeze()
        emit({"event": "started"})
        process.run()
        emit({"event": "done"})


if __name__ == "__main__":
    main(sys.argv[1])
