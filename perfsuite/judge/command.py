"""`perfsuite judge REFERENCE.py CANDIDATE.py…`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import click

from perfsuite.option_types import Finite, NamedPath

UNEXPECTED = 2
"""Exit code if perfsuite itself fails and no candidate is to blame."""


LONGEST_LIMIT_S = 86400.0
"""Largest value of --limit. The system's calls that wait take no timeout that is much longer than a lifetime."""


@click.command()
@click.argument("reference", type=NamedPath(path_type=Path))
@click.argument("candidates", nargs=-1, required=True, type=NamedPath(path_type=Path))
@click.option(
    "--speedup",
    type=Finite(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="The least speedup over the reference.",
)
@click.option(
    "--seconds",
    type=Finite(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="How long each candidate is timed; at least 8 rounds are always run.",
)
@click.option(
    "--limit",
    type=Finite(min=0, min_open=True, max=LONGEST_LIMIT_S),
    default=60.0,
    show_default=True,
    help="Seconds for a build, or for a batch of calls.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="By default the GPU, if there is one.")
@click.option("--no-compile", is_flag=True, help="Do not time torch.compile of the reference.")
@click.option("--tf32", is_flag=True, help="Products and convolutions of float32 may be in TF32.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
def judge(
    reference: Path,
    candidates: tuple[Path, ...],
    speedup: float,
    seconds: float,
    limit: float,
    device: str | None,
    no_compile: bool,
    tf32: bool,
    as_json: bool,
) -> None:
    """Judge untrusted modules: does each compute the reference's function, and how many times as fast?

    The files follow KernelBench: REFERENCE has Model, get_inputs() and get_init_inputs(), each candidate has ModelNew.
    A candidate runs confined, in a process of its own that knows no expected value, no rule and no clock.

    Exits with 0 if all are right and fast enough, 1 if one is wrong or too slow, 10 if one could not be decided.
    """
    import torch

    from perfsuite.declare.workload import TF32
    from perfsuite.errors import HarnessFault, PerfsuiteError
    from perfsuite.gate.exit_codes import CODE_AT_FAULT
    from perfsuite.judge import verdict as verdicts

    options = verdicts.Options(
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        least=speedup,
        seconds=seconds,
        limit_s=limit,
        compiled=not no_compile,
        precision=TF32 if tf32 else None,
    )
    own = sys.stdout
    show = (lambda v: None) if as_json else (lambda v: click.echo(line(v), file=own))
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise PerfsuiteError("--device cuda: there is no CUDA device here; leave it out, or give --device cpu")
        with _ending_at_once(), contextlib.redirect_stdout(sys.stderr):  # the reference may print, too
            found = verdicts.judge(reference, candidates, options, show)
    except PerfsuiteError as error:
        click.echo(f"perfsuite judge: {error}", err=True)
        sys.exit(4)
    except (Exception, HarnessFault) as error:
        traceback.print_exc()
        click.echo(f"perfsuite judge failed with {type(error).__name__}; report this with the traceback", err=True)
        sys.exit(UNEXPECTED)
    if as_json:
        click.echo(json.dumps([v.as_json() for v in found], indent=2))
    codes = [verdicts.EXIT_CODES[v.status] for v in found]
    sys.exit(CODE_AT_FAULT if CODE_AT_FAULT in codes else max(codes))


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGINT, as from Ctrl-C, end this process at once, rather than after the requests in progress."""
    before = {number: signal.signal(number, _terminated) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(number: int, frame: object) -> None:
    """Handle a signal: end at once, and leave no process and no folder behind."""
    from perfsuite.judge.process import abandon

    abandon()
    os._exit(128 + number)


def line(verdict: object) -> str:
    """Return a verdict as a line of text for the terminal."""
    from perfsuite.errors import printable
    from perfsuite.judge.verdict import Verdict

    assert isinstance(verdict, Verdict)
    parts = [f"{verdict.status:<14}  {printable(verdict.candidate)}"]
    if verdict.speedup is not None:
        of = verdict.speedup
        parts.append(f"{of.value:.2f}× the reference ({of.low:.2f} to {of.high:.2f})")
    if verdict.against_compile is not None:
        parts.append(f"{verdict.against_compile.value:.2f}× torch.compile")
    if verdict.draws:
        parts.append(f"{verdict.draws} draws, worst error {verdict.worst:.2f} of its budget")
    if verdict.message:
        parts.append(verdict.message)
    if verdict.not_confined:
        parts.append(f"not kept from it here: {', '.join(verdict.not_confined)}")
    return "  ".join(parts)
