"""The command `perfsuite curve`."""

from __future__ import annotations

import itertools
import logging
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from perfsuite.report.files import write
from suite import plotting, run_page
from suite.commands.ending import in_one_line
from suite.naming import shown, utf8_name
from suite.run_page import Points, rates_of
from suite.runtime import curve_log
from suite.terminal import tell

STARTED = re.compile(r"tfevents\.(\d+)\.")
"""Pattern of an event file's name; its number is the Unix time in seconds at which the file was begun."""
PAGE = "run.html"


@click.command()
@click.argument("folder", type=NamedPath())
@click.option("--out", type=NamedPath(), help="SVG file.  [default: FOLDER/curve.svg]")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
def curve(folder: str, out: str | None, opens: bool) -> None:
    """Plot the loss and the throughput of the run in FOLDER, and write the page FOLDER/run.html.

    The page has all curves, metrics, techniques, the environment and the configuration. Each run writes its metrics to
    FOLDER/metrics.jsonl. For older runs, the TensorBoard files are read instead. The time between the end of a run and
    its resumption is left out.
    """
    with in_one_line("interrupted"):
        path = Path(out) if out else Path(folder) / "curve.svg"
        if path.suffix != ".svg":
            raise PerfsuiteError(f"--out {shown(path)}: the picture is an SVG file; name one that ends in .svg")
        points, about = read(Path(folder)), curve_log.about_of(Path(folder))
        noun = str(about.get("window", "window"))
        plot(points, path, noun)
        html = Path(folder) / PAGE
        try:
            write(html, run_page.page(about, points, summary(points, noun)))
        except OSError as error:
            reason = error.strerror or error
            raise PerfsuiteError(f"cannot write {shown(html)}: {reason}; make room, or the folder writable") from None
        tell(summary(points, noun))
        for written in (path, html):
            tell(f"wrote {shown(written)}", err=True)
        if opens:
            click.launch(str(html))


def read(folder: Path) -> Mapping[str, Points]:
    """Return metric → points of a run. PerfsuiteError if the folder has no metrics, or fewer than two losses."""
    if os.path.isfile(folder):
        raise PerfsuiteError(f"{shown(folder)} is a file; name the folder of a run")
    try:
        lines = curve_log.read(folder)
    except OSError as error:
        raise PerfsuiteError(
            f"cannot read {shown(folder / curve_log.FILE)}: {error.strerror or error}; make it readable, or name "
            "another folder"
        ) from None
    found = logged(lines) if lines else _from_tensorboard(folder)
    if len(found.get("loss", ())) < 2:
        raise PerfsuiteError(f"{shown(folder)} holds no curve: fewer than two losses were written; train on")
    return found


def logged(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return metric → points, from the lines of a run's log."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("window", "seconds") and isinstance(value, int | float):
                found.setdefault(name, []).append((line["window"], line["seconds"], value))
    return dict(found)


def _from_tensorboard(folder: Path) -> Mapping[str, Points]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise PerfsuiteError("the curve needs tensorboard: pip install 'perfsuite[train]'") from None
    board = folder / "tensorboard"
    files = list(board.glob("*tfevents*")) if os.path.isdir(board) else []
    if not files:
        raise PerfsuiteError(
            f"{shown(folder)} has no {curve_log.FILE} with a finished window, and no TensorBoard files; "
            "name the folder of a run"
        )
    for file in files:
        if not os.path.isfile(file):  # reading a pipe would block
            raise PerfsuiteError(f"cannot read {shown(file)}: it is no file; move it away")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of an abandoned run's windows, which it drops
    try:
        with utf8_name(board) as named:
            events = EventAccumulator(str(named), size_guidance={"scalars": 0}).Reload()
    except OSError as error:
        raise PerfsuiteError(
            f"cannot read {shown(board)}: {error.strerror or error}; make it readable, or name another folder"
        ) from None
    except Exception as error:  # foreign files raise errors of any kind, e.g. protobuf's
        raise PerfsuiteError(
            f"{shown(board)} holds a damaged file ({type(error).__name__}); move it away, or name another folder"
        ) from None
    starts = [int(m[1]) for file in files if (m := STARTED.search(file.name))]
    return {
        tag: joined([(e.step, e.wall_time, e.value) for e in events.Scalars(tag)], starts)
        for tag in events.Tags()["scalars"]
    }


def joined(points: Points, starts: Sequence[int]) -> Points:
    """Remove the time between the end of a run and its resumption at one of `starts`.

    Each such gap is replaced by the median time that the same number of windows takes elsewhere.
    """
    pairs = list(itertools.pairwise(points))
    resumed = [any(a[1] < start <= b[1] for start in starts) for a, b in pairs]
    paces = [
        (b[1] - a[1]) / (b[0] - a[0]) for (a, b), new in zip(pairs, resumed, strict=True) if not new and b[0] > a[0]
    ]
    pace = statistics.median(paces) if paces else 0.0
    kept, left_out = list(points[:1]), 0.0
    for (a, b), new in zip(pairs, resumed, strict=True):
        if new:
            left_out += max(0.0, b[1] - a[1] - pace * (b[0] - a[0]))
        kept.append((b[0], b[1] - left_out, b[2]))
    return kept


def summary(points: Mapping[str, Points], noun: str = "window") -> str:
    """Return a one-line summary of the run."""
    first, last = points["loss"][0], points["loss"][-1]
    seconds = last[1] - first[1]
    rate = f": {(last[0] - first[0]) / seconds:.3g} {noun}s/s" if seconds > 0 else ""
    took = f"{seconds:.0f}" if 10 <= seconds < 1e9 else f"{seconds:.3g}"
    return f"{noun}s {first[0]} to {last[0]} in {took} s{rate}; loss {first[2]:.4g} at first, {last[2]:.4g} at last"


def plot(points: Mapping[str, Points], path: Path, noun: str = "window") -> None:
    """Plot loss and throughput over the windows as an SVG file."""
    pyplot = plotting.pyplot("the curve needs matplotlib: pip install 'perfsuite[test]'")
    loss = points["loss"]
    rates = rates_of(loss)
    with plotting.style(pyplot):
        figure, (above, below) = pyplot.subplots(
            2, sharex=True, figsize=(8, 4.5), layout="constrained", height_ratios=(2, 1)
        )
        above.plot([w for w, _, _ in loss], [v for *_, v in loss], color="#4c72b0", linewidth=1)
        above.set_yscale(plotting.scale([v for *_, v in loss]))
        above.set_ylabel("loss")
        below.plot([w for w, _ in rates], [r for _, r in rates], color="#55a868", linewidth=1)
        below.set_ylabel(f"{noun}s/s")
        below.set_ylim(bottom=0)
        below.set_xlabel(noun)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        plotting.save(pyplot, figure, path)
