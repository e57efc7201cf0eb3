"""The command `perfsuite`: a thin layer over the pytest items.

Exit codes: 0 all is well · 1 the code is at fault: a regression, a broken promise, a wrong result · 2 interrupted,
ended early, or the command line is wrong · 3 an internal error · 4 the run could not begin (a damaged baseline, a wrong
option, an unknown name) · 5 nothing was collected · 10 nothing is decided: the machine, the baseline or the measurement
is at fault.

Other packages add commands through the entry-point group "perfsuite.commands": each entry is a click command.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from perfsuite import __version__
from perfsuite.command_group import CannotBegin, Commands
from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath

FOLDER = NamedPath(file_okay=False)
REPORT = ".perfsuite/report"
FILES = ("report.json", "junit.xml", "summary.md", "report.html")
EARLIER = "earlier"
"""Subfolder with the files of the last report that has results, if the runs after it had none."""
QUIET = ("-W", "ignore:Module already imported so cannot be rewritten; perfsuite:pytest.PytestAssertRewriteWarning")
"""Options that silence pytest's warning that it cannot rewrite the asserts of perfsuite's plugins, which this command
has already imported."""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="perfsuite")
def main() -> None:
    """Is the fast version still the same function, and is it still fast?

    A pair of functions is declared once in a test module. perfsuite proves that both are equal, times them on this
    machine, and fails where the result is worse than accepted. Start with `perfsuite doctor`, then `perfsuite run`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run


def _selection(command: Any) -> Any:
    command = click.argument("paths", nargs=-1, type=NamedPath())(command)
    return click.option("-k", "keyword", metavar="EXPRESSION", help="Only items whose names match, as pytest's -k.")(
        command
    )


def _pytest(
    mode: str,
    paths: Sequence[str],
    keyword: str | None,
    *,
    marker: str = "perf",
    report: str | None = None,
    arguments: Sequence[str] = (),
    extra: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Run pytest on the items, in this process. With `as_json`, pytest writes to stderr, so that stdout contains only
    the report."""
    import pytest

    from perfsuite.gate import conclusion

    pytest_arguments = ["-m", marker] if marker else []
    pytest_arguments += ["-k", keyword] if keyword else []
    pytest_arguments += [f"--perfsuite-mode={mode}", *(f"--perfsuite-argument={a}" for a in arguments)]
    pytest_arguments += [f"--perfsuite-report={report}"] if report else []
    pytest_arguments += ["--benchmark-quiet"]  # perfsuite's own table has the same figures
    plugins = [] if _registered() else ["-p", "perfsuite.plugin"]
    quiet = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with conclusion.expecting(mode) as awaited, quiet, _terminated_as_interrupted():
        code = awaited.close(int(pytest.main([*plugins, *QUIET, *pytest_arguments, *extra, *paths])))
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        selected = f" that -k {keyword!r} selects" if keyword else ""
        where = " ".join(paths) or "this folder"
        click.echo(f"perfsuite {mode}: there is no item{selected} in {where}; `perfsuite list` names all", err=True)
    return code


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Make SIGTERM end the run as Ctrl-C does: stop its workers, release its locks, and write its report."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _registered() -> bool:
    return any(e.value == "perfsuite.plugin" for e in entry_points(group="pytest11"))


@main.command()
@_selection
@click.option("--report", default=REPORT, show_default=True, type=FOLDER, help="Folder of the report.")
@click.option("--profile", type=click.Choice(["dev", "ci", "thorough"]), help="How many draws a proof takes.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON when done.")
def run(paths: tuple[str, ...], keyword: str | None, report: str, profile: str | None, as_json: bool) -> None:
    """Prove and measure every pair on this machine, and write a report.

    Each workload is proven on the timed inputs and timed. Then the proofs of all pairs run; if one fails, the pair's
    figures are dropped. No baseline is needed; `perfsuite gate` compares with one.
    """
    extra = [f"--perfsuite-profile={profile}"] if profile else []
    _reported("run", paths, keyword, report, marker="correctness or perf", extra=extra, as_json=as_json)


@main.command()
@_selection
@click.option("--report", default=REPORT, show_default=True, type=FOLDER, help="Folder of the report.")
@click.option("--baselines", type=FOLDER, help="Folder of the baselines.  [default: baselines]")
@click.option("--changed", is_flag=True, help="Measure only what a change since acceptance could have affected.")
@click.option("--partial", is_flag=True, help="Judge a part of what is accepted, as -k or PATHS say.")
@click.option("--shard", metavar="I/N", help="Judge part I of N; `perfsuite merge` puts the reports together.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON when done.")
def gate(
    paths: tuple[str, ...],
    keyword: str | None,
    report: str,
    baselines: str | None,
    changed: bool,
    partial: bool,
    shard: str | None,
    as_json: bool,
) -> None:
    """Compare every workload with its accepted baseline; red if one is worse.

    Does the same as `pytest -m perf --benchmark-compare`, and also writes JUnit, JSON, HTML, a Markdown job summary
    and, on GitHub, annotations.
    """
    extra = [f"--perfsuite-baselines={baselines}"] if baselines else []
    extra += [f"--perfsuite-{name}" for name, on in (("changed", changed), ("partial", partial)) if on]
    extra += [f"--perfsuite-shard={shard}"] if shard else []
    _reported("gate", paths, keyword, report, extra=extra, as_json=as_json, summary=True)


def _reported(
    mode: str,
    paths: Sequence[str],
    keyword: str | None,
    report: str,
    *,
    as_json: bool,
    summary: bool = False,
    marker: str = "perf",
    arguments: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> NoReturn:
    """Run pytest with a report in this folder. Exit with pytest's exit code, even if the report fails."""
    from perfsuite.report import jsonfile, markdown

    folder = Path(report)
    _set_aside(folder)
    written = folder / FILES[0]
    stale = os.path.lexists(written)
    code = _pytest(
        mode, paths, keyword, marker=marker, report=report, arguments=arguments, extra=extra, as_json=as_json
    )
    try:
        if as_json and written.exists() and not stale:
            click.echo(written.read_text(encoding="utf-8"))
        if summary and written.exists() and not stale:
            markdown.append_job_summary(jsonfile.read(written))
    except (OSError, PerfsuiteError) as error:
        click.echo(f"the report is not shown: {error}", err=True)
    if not stale and _has_results(written):
        shutil.rmtree(folder / EARLIER, ignore_errors=True)
    elif (folder / EARLIER).is_dir():
        click.echo(f"this run has no results; the report of an earlier one is in {folder / EARLIER}", err=True)
    sys.exit(code)


def _set_aside(folder: Path) -> None:
    """Move an earlier report into a subfolder, or remove it if it has no results.

    It must not look like the report of a run that cannot begin.
    """
    earlier, keep = folder / EARLIER, _has_results(folder / FILES[0])
    found = [folder / name for name in FILES if os.path.lexists(folder / name)]
    for file in [path for path in found if not path.is_dir()]:
        with suppress(OSError):
            if keep:
                earlier.mkdir(exist_ok=True)
                file.replace(earlier / file.name)
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _has_results(file: Path) -> bool:
    """Return whether this is the JSON report of a run that proved or measured something."""
    from perfsuite.report import jsonfile

    try:
        found = jsonfile.read(file)
    except PerfsuiteError:
        return False
    return bool(found.measurements or found.verdicts or found.correctness.passed or found.correctness.failed)


@main.command()
@_selection
@click.option("--reason", help="Why the new figures are right; kept in the baseline. Asked for where it is missing.")
@click.option("--more", is_flag=True, help="Add a session to the figures of unchanged code, without rivals.")
@click.option("--prune", is_flag=True, help="Drop workloads of the collected files that no longer exist.")
@click.option("--processes", default=5, show_default=True, type=click.IntRange(3), help="Measuring processes.")
@click.option("--allow-dirty", is_flag=True, help="Accept with uncommitted changes; the code cannot be loaded again.")
@click.option("--baselines", type=FOLDER, help="Folder of the baselines.  [default: baselines]")
@click.option("--shard", metavar="I/N", help="Accept part I of N.")
def accept(
    paths: tuple[str, ...],
    keyword: str | None,
    reason: str | None,
    more: bool,
    prune: bool,
    processes: int,
    allow_dirty: bool,
    baselines: str | None,
    shard: str | None,
) -> None:
    """Measure on this machine and write the figures into its baseline.

    The only way to change a baseline. Prints what changes and by how much. An interrupted run is resumed on the same
    commit and machine.
    """
    if prune and (part := next((path for path in paths if "::" in path), None)):
        raise click.UsageError(f"--prune drops workloads of whole files, and {part} is a part of one; name the file")
    if not reason or not reason.strip():
        if not sys.stdin.isatty():
            raise click.UsageError("give --reason: why are the new figures right?")
        reason = click.prompt("Why are the new figures right?")
    arguments = [f"reason={reason}", f"processes={processes}"]
    arguments += [f"{n}=yes" for n, on in (("more", more), ("prune", prune), ("dirty", allow_dirty)) if on]
    extra = [f"--perfsuite-baselines={baselines}"] if baselines else []
    extra += [f"--perfsuite-shard={shard}"] if shard else []
    sys.exit(_pytest("accept", paths, keyword, arguments=arguments, extra=extra))


@main.command()
@click.argument("revision", required=False)
@_selection
@click.option("--python", metavar="FILE", help="Another environment's interpreter, in place of a revision.")
@click.option(
    "--processes", default=4, show_default=True, type=click.IntRange(2), help="Pairs of processes of --python."
)
@click.option("--report", default=REPORT, show_default=True, type=FOLDER, help="Folder of the report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON when done.")
def compare(
    revision: str | None,
    paths: tuple[str, ...],
    keyword: str | None,
    python: str | None,
    processes: int,
    report: str,
    as_json: bool,
) -> None:
    """Time the optimized sides of REVISION and of the work tree against each other.

    Both are loaded in one process and interleaved, so that the state of the machine cancels. No baseline is needed.

    With --python, compare two environments instead of two revisions: the same code with another torch, triton or
    Python. Everything is proven in both, and processes of both take turns in timing, block by block. Two processes
    differ more than two revisions in one process, so that only larger changes are found; the table says how large.
    """
    if python is None:
        if revision is None:
            raise click.UsageError("give a REVISION, or --python another environment's interpreter")
        _reported("compare", paths, keyword, report, arguments=[f"revision={revision}"], as_json=as_json)
    written = Path(report) / "environments.json"
    given = paths if revision is None else (revision, *paths)  # with --python, the first argument is a path
    if revision is not None and not Path(revision.partition("::")[0]).exists():
        raise click.UsageError(f"{revision} is no path, and --python takes the place of a revision; leave it out")
    from perfsuite.report import files
    from perfsuite.session.environments.interpreter import located

    try:
        located(python)
        files.check(Path(report))
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None
    arguments = [f"python={python}", f"processes={processes}", f"file={written}"]
    with suppress(OSError):  # of an earlier run
        written.unlink()
    code = _pytest("environments", given, keyword, arguments=arguments, as_json=as_json)
    if as_json and written.exists():
        click.echo(written.read_text(encoding="utf-8"))
    sys.exit(code)


@main.command()
@click.argument("workload")
@click.option("--good", required=True, metavar="REV", help="A commit that was as fast as it should be.")
@click.option("--bad", default="HEAD", show_default=True, metavar="REV", help="A later one that is not.")
@click.option(
    "--by",
    type=click.Choice(["time", "memory", "syncs", "launches"]),
    default="time",
    show_default=True,
    help="What it takes more of.",
)
def bisect(workload: str, good: str, bad: str, by: str) -> None:
    """Find the commit that made WORKLOAD slower than a good one.

    WORKLOAD is an id as reports show it, for instance 'tests/test_dots.py::dots::speed[large]', or a unique part of
    one, such as 'dots[large]'. Each commit gets a separate work tree, where `perfsuite compare` times it against the
    good one; the checkout is not changed. Commits that cannot be compared are skipped.
    """
    from perfsuite import bisection
    from perfsuite.report import units

    root = Path.cwd()
    try:
        first, commits = bisection.commits_between(good, bad, root)
        workload = bisection.workload_named(workload, root)
        click.echo(f"{units.count(len(commits), 'commit')} after {first.shown}", err=True)
        with bisection.Comparer(workload, root, by) as compare:
            found = bisection.search(first, commits, compare, lambda line: click.echo(line, err=True))
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None
    for line in bisection.summary(found):
        click.echo(line)


@main.command()
@click.argument("workload", required=False)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1), help="Most runs to show, the newest.")
@click.option("--device", metavar="NAME", help="Only runs on this device, or a part of its name that fits no other.")
@click.option("--baselines", default="baselines", show_default=True, type=FOLDER, help="Folder of the baselines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", metavar="FILE", type=NamedPath(dir_okay=False), help="Write a page in place of the tables.")
def history(
    workload: str | None, limit: int, device: str | None, baselines: str, as_json: bool, html: str | None
) -> None:
    """List the last runs, or those of WORKLOAD with its times and level shifts.

    WORKLOAD is an id as reports show it, or a unique part of one. Each `run`, `gate`, `accept` and `pytest -m perf`
    leaves a file in .perfsuite/history.
    """
    from perfsuite.history import command

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        command.show(workload, limit=limit, device=device, baselines=baselines, as_json=as_json, html=html, say=say)
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None


@main.command()
@click.argument("reports", nargs=-1, required=True, type=NamedPath(dir_okay=False))
@click.option("--report", default=REPORT, show_default=True, type=FOLDER, help="Folder of the merged report.")
def merge(reports: tuple[str, ...], report: str) -> None:
    """Merge the REPORTS (report.json) of all shards of a gate.

    Red unless every shard is present and green.
    """
    from perfsuite.report import jsonfile, markdown, model, terminal, write_all
    from perfsuite.session import sharding

    try:
        whole = sharding.merge([jsonfile.read(Path(path)) for path in reports])
        written = write_all(whole, Path(report))
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None
    terminal.show(whole)
    for form, path in written.items():
        click.echo(f"{form}: {path}")
    try:
        markdown.append_job_summary(whole)
    except PerfsuiteError as error:
        click.echo(str(error), err=True)
    sys.exit(model.exit_code(whole))


@main.command()
@click.argument("report", type=NamedPath(dir_okay=False))
@click.option("--page", metavar="URL", help="Address of the whole report, for a link.")
def comment(report: str, page: str | None) -> None:
    """Print a pull-request comment for REPORT (report.json).

    The comment is Markdown of at most 65,536 characters, GitHub's limit. Its first line is a hidden marker, by which a
    later run finds the comment and updates it.
    """
    from perfsuite.report import comment as comments
    from perfsuite.report import jsonfile

    try:
        click.echo(comments.text(jsonfile.read(Path(report)), page), nl=False)
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None


@main.command()
@click.argument("folder", default=".", type=NamedPath())
@click.option("--ci", type=click.Choice(["github", "gitlab"]), default="github", show_default=True, help="Whose CI.")
def init(folder: str, ci: str) -> None:
    """Write a first pair and CI workflows, and print the next commands.

    Also write an example of waivers. FOLDER is the top folder of a repository, by default the current one. Existing
    files are left as they are, and listed.
    """
    from perfsuite import scaffold

    try:
        for line in scaffold.write(Path(folder), ci):
            click.echo(line)
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None


@main.command(name="list")
@_selection
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(paths: tuple[str, ...], keyword: str | None, as_json: bool) -> None:
    """List pairs, workloads, their promises and the figures accepted here."""
    arguments = ["json=yes"] if as_json else []
    sys.exit(_pytest("list", paths, keyword, arguments=arguments, extra=["-qq", "--no-header", "--no-summary"]))


@main.command()
@click.argument("baseline", type=NamedPath(dir_okay=False))
@click.option("--write", type=NamedPath(dir_okay=False), help="Put it between the markers in this Markdown file.")
def table(baseline: str, write: str | None) -> None:
    """Print a baseline as a Markdown table, or write it into a file."""
    from perfsuite.baseline import storage as stored
    from perfsuite.report import files, markdown

    try:
        text = markdown.table(stored.load(baseline).entries.values())
        if write is None:
            click.echo(text)
        else:
            target = Path(write)
            files.write(target, markdown.insert(target.read_text(encoding="utf-8"), text))
    except OSError as error:
        raise CannotBegin(f"{write}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CannotBegin(f"{write}: not UTF-8 text; name a Markdown file") from None
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Report what this machine can run and what is missing, with a remedy for each."""
    from perfsuite import doctor as examination
    from perfsuite.codec import to_json

    try:
        findings = examination.examine()
    except PerfsuiteError as error:
        raise CannotBegin(str(error)) from None
    if as_json:
        click.echo(json.dumps([to_json(f) for f in findings], indent=2))
    else:
        Console(highlight=False).print(examination.table(findings))
    sys.exit(1 if any(f.status == "missing" for f in findings) else 0)
