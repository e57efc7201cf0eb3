"""`perfsuite list`: the pairs and workloads that a selection holds, and what is accepted of them here."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from perfsuite.report import units
from perfsuite.report.model import names

if TYPE_CHECKING:
    from perfsuite.control import Control


def show(control: Control) -> None:
    """Print the selected workloads, as a table or with `json` as JSON lines."""
    for problem in control.problems:
        print(problem, file=sys.stderr)
    rows = []
    for id, item in control.items.items():
        entry = control.entries.get(id)
        rows.append(
            {
                "id": id,
                "clock": item.workload.clock,
                "direction": item.workload.direction,
                "device": item.workload.device or "any",
                "sizes": item.workload.sizes,
                "promised_speedup": item.promises.speedup,
                "accepted_s": entry.sides["optimized"].seconds if entry else None,
                "runs_here": control.inapplicable(item) is None,
            }
        )
    if control.arguments.get("json") == "yes":
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("technique", "workload", "device", "clock", "direction", "sizes", "promise", "accepted"):
        table.add_column(heading, justify="right" if heading in ("promise", "accepted") else "left")
    for row in rows:
        technique, workload = names(str(row["id"]))
        sizes = row["sizes"]
        assert isinstance(sizes, dict)
        promise, seconds = row["promised_speedup"], row["accepted_s"]
        table.add_row(
            technique,
            workload,
            str(row["device"]),
            str(row["clock"]),
            str(row["direction"]),
            " ".join(f"{k}={v}" for k, v in sizes.items()),
            f"{promise:g}×" if isinstance(promise, float | int) else "",
            units.seconds(seconds) if isinstance(seconds, float) else "",
        )
    Console(highlight=False).print(table)
    here = sum(bool(r["runs_here"]) for r in rows)
    print(f"{len(rows)} of {len(control.known)} workloads; {here} of them run here ({control.machine.device})")
