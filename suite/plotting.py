"""SVG plots by matplotlib, byte for byte reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import write

LINEAR = 100.0
"""Largest ratio of maximum to minimum on a linear axis. With a larger ratio, small values would look like zero."""


def pyplot(missing: str) -> Any:
    """Import matplotlib's pyplot; PerfsuiteError with the message `missing` if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise PerfsuiteError(missing) from None
    matplotlib.use("svg")
    from matplotlib import pyplot as found

    return found


def style(plots: Any) -> AbstractContextManager[None]:
    """Return the style context for all plots."""
    context: Callable[..., AbstractContextManager[None]] = plots.rc_context
    return context({"svg.hashsalt": "perfsuite", "font.size": 9})


def scale(values: Sequence[float]) -> str:
    """Return matplotlib's name of the scale on which the values are distinguishable: linear or log."""
    return "log" if values and min(values) > 0 and max(values) > LINEAR * min(values) else "linear"


def save(plots: Any, figure: Any, path: Path) -> None:
    """Write the figure, completely or not at all, and close it."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plots.close(figure)
    write(path, drawn.getvalue())
