"""Pictures by matplotlib, as SVG that is the same byte for byte for the same figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import write

LINEAR = 100.0
"""Largest ratio of values that a linear axis shows: of smaller ones nothing would be seen but a line at zero."""


def pyplot(missing: str) -> Any:
    """Import matplotlib's pyplot; PerfsuiteError with the line `missing` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise PerfsuiteError(missing) from None
    matplotlib.use("svg")
    from matplotlib import pyplot as found

    return found


def style(plots: Any) -> AbstractContextManager[None]:
    """Return the context in which all pictures are drawn."""
    context: Callable[..., AbstractContextManager[None]] = plots.rc_context
    return context({"svg.hashsalt": "perfsuite", "font.size": 9})


def scale(values: Sequence[float]) -> str:
    """Return matplotlib's name of the scale on which the values can be distinguished: linear, or log."""
    return "log" if values and min(values) > 0 and max(values) > LINEAR * min(values) else "linear"


def save(plots: Any, figure: Any, path: Path) -> None:
    """Write the figure, whole or not at all, and close it."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    plots.close(figure)
    write(path, drawn.getvalue())
