"""Print where the seconds of a run went: gate_cost.py REPORT.json [--most N].

Prints two Markdown tables: seconds by part of the run, and seconds by workload and phase, the longest first.
docs/measuring.md shows them for a gate on an H200.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement
from perfsuite.report import jsonfile
from perfsuite.report.model import RunReport
from perfsuite.session.progress import name_of

PHASES = ("warm-up", "timing", "allocation", "checks")
MOST = 12


def parts(report: RunReport) -> list[str]:
    """Return the table of the run's seconds by part, and how many processes measured the workloads."""
    other = report.seconds - sum(report.spent.values())
    processes = Counter(len(runs) for runs in report.measurements.values())
    counts = ", ".join(f"{workloads} in {count}" for count, workloads in sorted(processes.items()))
    rows = [f"| {name} | {seconds:.0f} |" for name, seconds in (*report.spent.items(), ("start and report", other))]
    return ["| part | seconds |", "| --- | ---: |", *rows, "", f"Workloads by the number of processes: {counts}."]


def workloads(report: RunReport, most: int) -> list[str]:
    """Return the table of seconds by workload: its proof, its first process with some phases, and all its processes."""
    longest = sorted(report.measurements.items(), key=lambda item: sum(m.seconds for m in item[1]), reverse=True)
    rows = [_row(name_of(id), [report.proofs.get(id, {})], [runs]) for id, runs in longest[:most]]
    if rest := longest[most:]:
        proofs, runs = [report.proofs.get(id, {}) for id, _ in rest], [runs for _, runs in rest]
        rows.append(_row(f"the other {len(rest)} together", proofs, runs))
    titles = ("proof", "first process", *PHASES, "processes", "all processes")
    return [f"| workload: seconds | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(titles)}", *rows]


def _row(name: str, proofs: Sequence[Mapping[str, float]], runs: Sequence[Sequence[Measurement]]) -> str:
    proof = sum(sum(p.values()) for p in proofs)
    first = [r[0] for r in runs if r]
    seconds = [proof, sum(m.seconds for m in first), *(sum(m.phases.get(p, 0.0) for m in first) for p in PHASES)]
    processes = sum(map(len, runs))
    every = sum(m.seconds for r in runs for m in r)
    return f"| {name} | {' | '.join(f'{s:.1f}' for s in seconds)} | {processes} | {every:.1f} |"


def main() -> int:
    """Print the tables. If the report cannot be read, print one line that says why, and return 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="report.json of `perfsuite gate`")
    parser.add_argument("--most", type=int, default=MOST, help=f"so many workloads by themselves (default: {MOST})")
    given = parser.parse_args()
    try:
        report = jsonfile.read(given.report)
    except PerfsuiteError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join([*parts(report), "", *workloads(report, given.most)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
