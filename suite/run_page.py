"""HTML page of a run, run.html: curves, metrics, techniques, environment and configuration in one file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import jinja2

from perfsuite.errors import PerfsuiteError
from suite import plotting, trainers

Points = Sequence[tuple[int, float, float]]
"""(window, seconds, value). Seconds count from the run's start, or from 1970."""
SHOWN = 400
"""Curves are thinned to fewer than 800 points. Throughput is averaged between them, so that noise does not hide it."""
TEMPLATE = Path(__file__).with_suffix(".html")


def page(about: Mapping[str, Any], points: Mapping[str, Points], summary: str) -> str:
    """Return the page as HTML.

    about    content of `run.json`; empty if the run has none
    points   metric → its curve; "loss" is required
    summary  one-line summary of the run

    PerfsuiteError if matplotlib is not installed.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    configuration = about.get("configuration")
    fields = dict(configuration) if isinstance(configuration, Mapping) else {}
    name = str(about.get("trainer", "run"))
    noun = str(about.get("window", "window"))
    shown = {key: value for key, value in about.items() if key not in ("configuration", "trainer", "window")}
    drawn: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{name}, {fields['side']} side" if "side" in fields else name,
        summary=summary,
        curves=[
            *(
                _drawn(metric, [(window, value) for window, _, value in found], noun)
                for metric, found in points.items()
            ),
            _drawn(f"{noun}s a second", rates_of(points["loss"]), noun),
        ],
        metrics=[(metric, *_extremes([v for *_, v in found])) for metric, found in points.items()],
        techniques=_techniques(name, fields),
        environment=[(key, _text(value)) for key, value in shown.items()],
        configuration=[(key, _text(value)) for key, value in fields.items()],
    )
    return drawn


def _techniques(name: str, fields: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return (technique, whether it was on) for the trainer; an empty list for an unknown trainer."""
    try:
        names = trainers.techniques_of(name)
    except PerfsuiteError:
        return []
    return [(technique, bool(fields[technique])) for technique in names if technique in fields]


def _extremes(values: Sequence[float]) -> list[str]:
    return [f"{value:.5g}" for value in (values[0], values[-1], min(values), max(values))]


def rates_of(loss: Points) -> list[tuple[float, float]]:
    """Return (window, windows per second) between consecutive points of a curve, thinned according to `SHOWN`."""
    spaced = loss[:: max(1, len(loss) // SHOWN)]
    return [
        ((a[0] + b[0]) / 2, (b[0] - a[0]) / (b[1] - a[1]))
        for a, b in itertools.pairwise(spaced)
        if b[1] > a[1] and b[0] > a[0]
    ]


def _drawn(name: str, points: Sequence[tuple[float, float]], noun: str) -> tuple[str, str]:
    """Return (name, SVG) of a curve of (window, value)."""
    pyplot = plotting.pyplot("the page needs matplotlib: pip install 'perfsuite[test]'")
    spaced = points[:: max(1, len(points) // SHOWN)]
    with plotting.style(pyplot):
        figure, axes = pyplot.subplots(figsize=(4.4, 2.4), layout="constrained")
        axes.plot([window for window, _ in spaced], [value for _, value in spaced], color="#4c72b0", linewidth=1)
        axes.set_yscale(plotting.scale([value for _, value in spaced]))
        axes.set_xlabel(noun)
        axes.spines[["top", "right"]].set_visible(False)
        drawn = StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    content = drawn.getvalue()
    return name, content[content.index("<svg") :]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
