"""Show the measurements of a pair in a notebook: a table, the speedups and a plot."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement
from perfsuite.report import terminal, units
from perfsuite.report.workload_rows import Comparison, row, sides


class Measured(tuple[Measurement, ...]):
    """Measurements of a pair's workloads, each from one process. Prints as a table."""

    __slots__ = ()

    @property
    def speedups(self) -> dict[str, Comparison]:
        """Workload → speedup over the reference, with its 95% interval over the blocks of this process."""
        found = {m.workload: row(m.id, [m]).speedup for m in self}
        return {workload: speedup for workload, speedup in found.items() if speedup is not None}

    def __repr__(self) -> str:
        return self._printed().export_text().rstrip() if self else "no workload for this device"

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{self!r}</p>"
        return self._printed().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def plot(self) -> Any:
        """Plot the time of each block of each side, with one panel per workload. Return the matplotlib figure.

        Raises PerfsuiteError if matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError:
            raise PerfsuiteError("a plot needs matplotlib, which is not installed: pip install matplotlib") from None
        figure, panels = pyplot.subplots(len(self) or 1, 1, squeeze=False, figsize=(7, 1.2 + 1.4 * len(self)))
        for panel, measured in zip(panels[:, 0], self, strict=False):
            names = [name for name in sides([measured]) if measured.sides[name].blocks_s]
            for height, name in enumerate(reversed(names)):
                blocks = measured.sides[name].blocks_s
                panel.plot([1e6 * s for s in blocks], [height] * len(blocks), "|", markersize=12)
            panel.set_yticks(range(len(names)), labels=reversed(names))
            panel.set_ylim(-0.6, len(names) - 0.4)
            panel.set_xscale("log")
            speedup = self.speedups.get(measured.workload)
            faster = f": {units.ratio(speedup.value)}" if speedup else ""
            panel.set_title(f"{measured.pair}[{measured.workload}]{faster}", fontsize="medium")
            panel.set_xlabel(f"µs a call, {measured.clock} clock, on {measured.device}")
        figure.tight_layout()
        return figure

    def _printed(self) -> Console:
        console = Console(file=io.StringIO(), width=terminal.PLAIN_WIDTH, highlight=False, record=True)
        console.print(terminal.table(tuple(row(m.id, [m]) for m in self), console.width))
        return console
