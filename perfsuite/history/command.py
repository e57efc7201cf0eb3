"""Output of the command `perfsuite history`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsuite.codec import to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.history import index, name_lookup, page, steps, store, terminal
from perfsuite.history.index import Index, ListedRun
from perfsuite.history.records import Accepted
from perfsuite.history.series import Point, points
from perfsuite.history.steps import Step
from perfsuite.report import files
from perfsuite.report.terminal import console


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The index's answer for one workload, or for the last runs if none is given."""

    total: int
    steps: Mapping[str, Sequence[Step]]
    listed: tuple[ListedRun, ...] = ()
    workload: str = ""
    points: tuple[Point, ...] = ()
    accepted: Mapping[str, Sequence[Accepted]]


def show(
    workload: str | None,
    *,
    limit: int,
    device: str | None,
    baselines: str,
    as_json: bool,
    html: str | None,
    say: Callable[[str], None],
) -> None:
    """Print the history of the project in the current folder, or write it as a page.

    Raises PerfsuiteError if the project has no history, or if `workload` or `device` does not match exactly one.
    """
    root = store.find(Path.cwd())
    if root is None:
        raise PerfsuiteError(
            "there is no history here: `perfsuite run`, `gate`, `accept` and `pytest -m perf` write one into "
            f"{store.folder_of(Path())} of the folder that they run in"
        )
    folder = store.folder_of(root)
    problems: list[str] = []

    def query(runs: Index) -> Found:
        problems[:] = runs.problems
        if not runs.count():
            raise PerfsuiteError(f"{folder} holds no run that can be read; `perfsuite run` adds one")
        return _query(runs, workload=workload, limit=limit, device=device)

    try:
        found = index.using(folder, root / baselines, query, say)
    finally:  # also before an error, which a skipped file may explain
        for problem in problems:
            say(f"skipped: {problem}")
    if html is not None:
        say(f"wrote {files.write(Path(html), _page(found, limit))}")
    if as_json:
        print(json.dumps(_document(found, limit), indent=1, ensure_ascii=False))
    elif html is None:
        _print(found, limit)


def _query(there: Index, *, workload: str | None, limit: int, device: str | None) -> Found:
    slug = name_lookup.device(device, there.devices()) if device is not None else None
    listed: tuple[ListedRun, ...] = ()
    series: tuple[Point, ...] = ()
    accepted: Mapping[str, Sequence[Accepted]] = {}
    id = ""
    if workload is None:
        listed = tuple(there.runs(limit, slug))
    else:
        id = name_lookup.workload(workload, there.workloads())
        accepted = there.accepted(id)
        series = tuple(points(there.series(id, slug), accepted))
    return Found(
        total=there.count(slug),
        steps={i: [s for s in found if slug in (None, s.device)] for i, found in there.steps().items()},
        listed=listed,
        workload=id,
        points=series,
        accepted=accepted,
    )


def _print(found: Found, limit: int) -> None:
    out = console()
    if not found.workload:
        terminal.show_runs(out, found.listed, found.total, found.steps)
    elif not found.points:
        out.print(f"{found.workload} has no run on that device", soft_wrap=True)
    else:
        own = found.steps.get(found.workload, ())
        terminal.show_workload(out, found.workload, found.points, limit, own, found.accepted)


def _page(found: Found, limit: int) -> str:
    if not found.workload:
        return page.of_runs(found.listed, found.total)
    own = found.steps.get(found.workload, ())
    return page.of_workload(found.workload, found.points, limit, own, found.accepted)


def _document(found: Found, limit: int) -> dict[str, Any]:
    head = {"perfsuite_history": store.SCHEMA, "steps_are_looked_for": steps.is_available()}
    if not found.workload:
        every = {id: to_json(s) for id, s in found.steps.items() if s}
        runs = [{**_head(one.run), "verdicts": dict(one.counts)} for one in found.listed]
        return {**head, "total": found.total, "runs": runs, "steps": every}
    return {
        **head,
        "workload": found.workload,
        "total": len(found.points),
        "runs": [
            {
                **_head(p.run),
                **to_json(p.figures),
                "baseline": to_json(p.accepted),
                "change": p.change,
                "change_is_against": None if p.change is None else "baseline" if p.stored else "accepted revision",
                "changed_since": list(p.marks),
            }
            for p in reversed(found.points[-limit:])
        ],
        "steps": to_json(found.steps.get(found.workload, [])),
        "accepted": to_json(found.accepted),
    }


def _head(run: Any) -> dict[str, Any]:
    head: dict[str, Any] = to_json(replace(run, workloads={}))
    del head["workloads"]
    return head
