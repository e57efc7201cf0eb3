"""`--shard i/n`: select a part of the workloads for each of several machines, and merge their reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.report.model import Correctness, RunReport


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse(text: str | None) -> Shard | None:
    """Return the shard that "2/3" names. Raises PerfsuiteError for anything else."""
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise PerfsuiteError(f"--shard {text!r} is not a part such as 1/3: number and count, from 1")
    return Shard(int(found[1]), int(found[2]))


def keep(selected: list[Any], shard: Shard) -> None:
    """Remove the timed items of other shards from the list. Shard i of n has every n-th timed item, from the i-th on.

    Neighbouring items are of one module and take about the same time, so all shards take about the same time.
    """
    timed = [item for item in selected if item.get_closest_marker("perf")]
    mine = {id(item) for item in timed[shard.number - 1 :: shard.count]}
    selected[:] = [item for item in selected if id(item) in mine or item not in timed]


def merge(reports: Sequence[RunReport]) -> RunReport:
    """Return one report of all shards. Missing or inconsistent parts become problems of the report. Raises
    PerfsuiteError if there is no report."""
    if not reports:
        raise PerfsuiteError("nothing to merge: name the report.json of every shard")
    first = reports[0]
    problems = [problem for report in reports for problem in report.problems]
    problems += _gaps(reports)
    for name, values in (
        ("revision", {r.revision for r in reports}),
        ("device", {r.machine.device for r in reports}),
        ("number of workloads", {r.collected for r in reports}),
        ("driver", {r.machine.driver for r in reports}),
        ("torch", {r.machine.torch for r in reports}),
    ):
        if len(values) > 1:
            shown = ", ".join(sorted(map(str, values)))
            problems.append(f"the shards differ in {name}: {shown}; run them on one revision, kind of device and stack")
    return replace(
        first,
        seconds=max(r.seconds for r in reports),
        measurements={i: m for r in reports for i, m in r.measurements.items()},
        verdicts={i: v for r in reports for i, v in r.verdicts.items()},
        promises={i: p for r in reports for i, p in r.promises.items()},
        correctness=_joined([r.correctness for r in reports]),
        problems=tuple(dict.fromkeys(problems)),
        complete=all(r.complete for r in reports),
        selected=sum(r.selected or 0 for r in reports),
        workloads=tuple(i for r in reports for i in r.workloads),
        skipped=tuple(i for r in reports for i in r.skipped),
        shard="",
        dirty=any(r.dirty for r in reports),
        spent={what: sum(r.spent.get(what, 0.0) for r in reports) for r in reports for what in r.spent},
        proofs={i: phases for r in reports for i, phases in r.proofs.items()},
        changes={i: change for r in reports for i, change in r.changes.items()},
        noise={i: deviation for r in reports for i, deviation in r.noise.items()},
    )


def _gaps(reports: Sequence[RunReport]) -> list[str]:
    problems = []
    shards = []
    for report in reports:
        shard = parse(report.shard)
        if shard is None:
            problems.append("a report is not of a run with --shard; give the reports of such runs only")
        else:
            shards.append(shard)
    counts = {s.count for s in shards}
    if len(counts) > 1:
        problems.append(f"the shards are of {', '.join(map(str, sorted(counts)))}; give those of one run")
    elif counts:
        there = [s.number for s in shards]
        missing = sorted(set(range(1, counts.pop() + 1)) - set(there))
        if missing:
            problems.append(f"shard {', '.join(map(str, missing))} is missing: its workloads were not judged")
        twice = sorted({n for n in there if there.count(n) > 1})
        if twice:
            problems.append(f"shard {', '.join(map(str, twice))} is there twice")
    every = [i for r in reports for i in r.workloads]
    unjudged = sorted({i for r in reports for i in r.workloads if i not in r.verdicts} - _skipped(reports))
    if unjudged:
        problems.append(f"{len(unjudged)} workloads have no verdict, e.g. {unjudged[0]}")
    total = reports[0].collected
    if not problems and total is not None and len(set(every)) != total:
        problems.append(
            f"the shards have {len(set(every))} of {total} workloads; give all shards of one run, without a selection"
        )
    return problems


def _skipped(reports: Sequence[RunReport]) -> set[str]:
    return {i for r in reports for i in r.skipped}


def _joined(parts: Sequence[Correctness]) -> Correctness:
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part.skip_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Correctness(
        passed=sum(p.passed for p in parts),
        failed=sum(p.failed for p in parts),
        skipped=sum(p.skipped for p in parts),
        skip_reasons=reasons,
        failures={i: why for p in parts for i, why in p.failures.items()},
    )
