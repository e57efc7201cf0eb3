"""`perfsuite list`: show the pairs and workloads of a selection, and their accepted figures on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from rich.table import Table

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.report import terminal, units
from perfsuite.report.workload_rows import names_of
from perfsuite.session.timed_item import SpeedItem


def show(
    items: Mapping[str, SpeedItem],
    *,
    entries: Mapping[str, Entry],
    inapplicable: Callable[[SpeedItem], str | None],
    known: int,
    device: str,
    as_json: bool = False,
) -> None:
    """Print the selected workloads as a table or as JSON.

    `entries` are the accepted entries of this machine, and `known` is the number of all workloads.
    """
    rows = []
    for id, item in items.items():
        entry = entries.get(id)
        rows.append(
            {
                "id": id,
                "clock": item.workload.clock,
                "direction": item.workload.direction,
                "device": item.workload.device or "any",
                "sizes": item.workload.described,
                "promised_speedup": item.promises.speedup,
                "accepted_s": entry.sides["optimized"].seconds if entry else None,
                "runs_here": inapplicable(item) is None,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("technique", "workload", "device", "clock", "direction", "sizes", "promise", "accepted"):
        whole = heading != "sizes"  # a truncated name could not be copied into a selection; sizes may wrap
        table.add_column(
            heading, justify="right" if heading in ("promise", "accepted") else "left", no_wrap=whole, overflow="fold"
        )
    names = names_of([str(row["id"]) for row in rows])
    for row in rows:
        technique, workload = names[str(row["id"])]
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
    terminal.console().print(table)
    here = sum(bool(r["runs_here"]) for r in rows)
    print(f"{len(rows)} of {known} workloads; {here} of them run here ({device})")
