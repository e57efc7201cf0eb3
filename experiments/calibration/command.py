"""The command `perfsuite calibrate`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.calibration import measure, record
from experiments.calibration.record import BLOCKS, KINDS, ROUNDS, Recording
from perfsuite.codec import to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import Finite, NamedPath
from perfsuite.records import Machine
from perfsuite.report import terminal, units
from perfsuite.session import device_lock
from perfsuite.system.machine import measured_devices

OUT = "docs/calibration"
SECONDS = {"cuda": 500.0, "cpu": 200.0}
BENCHMARK_MAX_TIME = 0.25
"""A quarter of pytest-benchmark's default, so that every side has a run in every process."""
NO_DO_BENCH = "triton.testing.do_bench: not available here, it needs an NVIDIA GPU and triton"
INTERRUPTED = 2


@click.command()
@click.option("--out", default=OUT, show_default=True, type=NamedPath(file_okay=False), help="Folder of the results.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What to measure.  [default: the GPU, if any]")
@click.option("--processes", default=12, show_default=True, type=click.IntRange(2), help="Measuring processes.")
@click.option("--seconds", type=Finite(1, 1e6), help="Budget of the whole.  [default: 500 on a GPU, 200 on a CPU]")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Only this kind; repeatable.")
@click.option(
    "--blocks", default=BLOCKS, show_default=True, type=click.IntRange(2), help="Blocks a process, as the gate's."
)
@click.option(
    "--rounds", default=ROUNDS, show_default=True, type=click.IntRange(2), help="ABBA rounds a block, as the gate's."
)
@click.option(
    "--benchmark-max-time",
    default=BENCHMARK_MAX_TIME,
    show_default=True,
    type=Finite(0, 1e6),
    help="Seconds a run of pytest-benchmark; 0 leaves it out.",
)
@click.option("--more", is_flag=True, help="Add a session to the stored recording of this device.")
@click.option("--add", multiple=True, type=NamedPath(dir_okay=False), help="Add the sessions of this recording.")
@click.option(
    "--from", "stored", type=NamedPath(dir_okay=False), help="Write the table and the plot anew; measure nothing."
)
@click.option(
    "--suites",
    default=200,
    show_default=True,
    type=click.IntRange(1),
    help="Simulated suites at each planted slowdown.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the resampling.")
@click.option(
    "--picture", default="svg", show_default=True, type=click.Choice(["svg", "png"]), help="Form of the plot."
)
@click.option("--no-plot", is_flag=True, help="Write no plot; matplotlib is not needed then.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the estimated seconds; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def calibrate(
    out: str,
    device: str | None,
    processes: int,
    seconds: float | None,
    kinds: tuple[str, ...],
    blocks: int,
    rounds: int,
    benchmark_max_time: float,
    more: bool,
    add: tuple[str, ...],
    stored: str | None,
    suites: int,
    seed: int,
    picture: str,
    no_plot: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure on this device what the gate's rule assumes.

    Measures the noise, and how often the gate raises a false alarm or finds a planted slowdown of .5 to 5%, compared
    with pytest-benchmark and do_bench on the same kernels. Writes <device>.json with every ABBA round, <device>.md and
    a plot.
    """
    folder = Path(out)
    console = terminal.console(sys.stderr)
    try:
        _check_options(measures=not stored, more=more, dry_run=dry_run, plots=not no_plot)
        others = [(name, record.load(Path(name))) for name in add]
        if stored:
            recording = record.load(Path(stored))
        else:
            machine, kind = _machine(device)
            names = tuple(k for k in KINDS if k in kinds) or tuple(KINDS)
            design = measure.Design(
                device=kind,
                kinds=names,
                extras=record.EXTRAS,
                processes=processes,
                blocks=blocks,
                rounds=rounds,
                seconds=seconds or SECONDS[kind],
                benchmark_max_time=benchmark_max_time,
                do_bench=kind == "cuda" and find_spec("triton") is not None,
            )
            before = record.load(folder / f"{machine.device}.json") if more else None
            if dry_run:
                _show_plan(design, machine, as_json)
                return
            recording = _measured(design, machine, before, folder, console)
        for name, other in others:
            recording = record.joined(recording, other, name=name)
        if stored:
            _keep_sessions(recording, folder / f"{recording.machine.device}.json")
        _finish(recording, folder, suites, seed, None if no_plot else picture, as_json, console)
    except PerfsuiteError as error:
        raise click.ClickException(" ".join(str(error).split())) from None


def _check_options(*, measures: bool, more: bool, dry_run: bool, plots: bool) -> None:
    """Raise PerfsuiteError if the options contradict each other, or ask for a plot that cannot be made."""
    if not measures and (more or dry_run):
        raise PerfsuiteError("--from measures nothing, so that --more and --dry-run do nothing; leave them out")
    if plots and not dry_run and find_spec("matplotlib") is None:
        from experiments.calibration.report import REMEDY

        raise PerfsuiteError(REMEDY)


def _keep_sessions(recording: Recording, path: Path) -> None:
    """Raise PerfsuiteError if `recording` lacks sessions of the recording at `path`, which it is about to replace."""
    if not path.exists():
        return
    lacking = sum(session not in recording.sessions for session in record.load(path).sessions)
    if lacking:
        raise PerfsuiteError(
            f"{path} has {units.count(lacking, 'session')} that would be lost; add them with --add "
            f"{shlex.quote(str(path))}, or name another folder with --out"
        )


def _machine(device: str | None) -> tuple[Machine, str]:
    from perfsuite.system import machine

    found = machine.identify(prefer=device)
    return found, "cpu" if found.device.startswith("cpu") else "cuda"


def _show_plan(design: measure.Design, machine: Machine, as_json: bool) -> None:
    lines = measure.plan(design)
    if as_json:
        estimate = design.fitting * design.process_s + measure.ANALYSIS_S
        plan = {"machine": to_json(machine), "design": to_json(design), "estimated_seconds": round(estimate)}
        click.echo(json.dumps(plan, indent=2))
        return
    click.echo(f"{machine.device_name} ({machine.device})")
    click.echo("\n".join(lines))


def _measured(
    design: measure.Design, machine: Machine, before: Recording | None, folder: Path, console: Console
) -> Recording:
    """Measure, and keep the recording in a partial file until it is complete. Exits with INTERRUPTED after Ctrl-C."""
    partial = folder / f"{machine.device}.partial.json"
    planting = dict(before.planting) if before is not None else {}

    def whole(now: Recording) -> Recording:
        return now if before is None else record.joined(before, now, name="this session")

    measuring = measure.Measuring(design=design, machine=machine, planting=planting)
    if not design.do_bench:
        measuring.left_out.append(NO_DO_BENCH)
    if not design.benchmark_max_time:
        measuring.left_out.append("pytest-benchmark: not asked for")
    # This fails before minutes of measuring if the sessions do not fit together or the folder cannot be written.
    record.save(partial, whole(measuring.recording()))
    measuring.kept = lambda now: _ignore(record.save(partial, whole(now)))
    turn = device_lock.turn(measured_devices(design.device), machine.device_name, console.print)
    with turn, _bar(console, design) as progress:
        measuring.progress = progress
        try:
            recording = measuring.run()
        except PerfsuiteError:
            partial.unlink(missing_ok=True)
            raise
    record.save(partial, whole(recording))
    if measuring.interrupted:
        stored = folder / f"{machine.device}.json"
        command = ["perfsuite", "calibrate", "--from", str(partial), "--out", str(folder)]
        command += ["--add", str(stored)] if before is None and stored.exists() else []
        console.print(
            f"interrupted: {recording.processes} process(es) of this session are kept in {partial}; "
            f"`{shlex.join(command)}` makes the table of them",
            soft_wrap=True,
        )
        sys.exit(INTERRUPTED)
    return whole(recording)


def _ignore(value: object) -> None:
    """Return None: turns an expression into the body of a callback that must return None."""


@contextmanager
def _bar(console: Console, design: measure.Design) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar, or a line for each process if the output is not a terminal."""
    steps = len(design.kinds) + bool(design.benchmark_max_time) + design.do_bench
    if not console.is_terminal:
        seen: set[int] = set()

        def report(process: int, what: str) -> None:
            if process not in seen:
                seen.add(process)
                console.print(f"measuring, process {process} of {design.processes}")

        yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=design.processes * steps)

        def draw(process: int, what: str) -> None:
            bar.update(task, description=f"measuring, process {process} of {design.processes}: {what}")
            done = bar.tasks[0].completed
            bar.update(task, completed=max(done + 1, (process - 1) * steps + 1))

        yield draw


def _finish(
    recording: Recording,
    folder: Path,
    suites: int,
    seed: int,
    picture: str | None,
    as_json: bool,
    console: Console,
) -> None:
    from experiments.calibration import analysis, report
    from perfsuite.report import files

    with console.status("analysing") if console.is_terminal else nullcontext() as status:

        def progress(what: str) -> None:
            if status is not None:
                status.update(f"analysing: {what}")

        found = analysis.analyse(recording, seed=seed, suites=suites, progress=progress)
    stem = recording.machine.device
    written = [record.save(folder / f"{stem}.json", recording)]
    name = f"{stem}.{picture}" if picture else None
    if name:
        written.append(report.plot(found, folder / name))
    written.append(files.write(folder / f"{stem}.md", report.table(found, recording, picture=name)))
    (folder / f"{stem}.partial.json").unlink(missing_ok=True)
    if as_json:
        click.echo(json.dumps({**to_json(found), "files": [str(p) for p in written]}, indent=2))
        return
    shown = terminal.console()
    _show(shown, report.suite_table(found), report.constants(found))
    for line in (*found.warnings, *(f"left out: {line}" for line in found.left_out)):
        shown.print(line, soft_wrap=True)
    for path in written:
        shown.print(f"wrote {path}", soft_wrap=True)


def _show(console: Console, *tables: Iterable[str]) -> None:
    """Print Markdown tables in the terminal."""
    for lines in tables:
        heads, _, *rows = ([cell.strip("*") for cell in line[2:-2].split(" | ")] for line in lines)
        table = Table(*heads)
        for row in rows:
            table.add_row(*row)
        console.print(table)
