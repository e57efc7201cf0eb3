"""Try the gate on this GPU: gate_trial.py [--gates N] [--share S] [--only NAME] [--out DIR].

The whole gate N times on unchanged code, each in fresh processes, which must be green; then once for each technique
with S more work planted in its optimized side (tools/plant_slowdown.py) and another workload beside it, which must be
red for the one and green for the other. Wants a committed baseline of this device. Plants in a work tree of its own, so
that this one stays as it is. Prints a table, writes it with every run's output and report to DIR, and exits with 1
where a run did not end as it must.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plant_slowdown import NAMES, plant
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Status
from perfsuite.report import jsonfile

BESIDE = {
    "rotor_update": "rotor_update or fused_adamw_cnn",
    "metric_batching": "metric_batching or fused_adamw_cnn",
    "lior_and_speed": "(test_lior_and_speed and rows4m) or fused_adamw_cnn",
    "fused_adamw": "(test_fused_adamw and matrices24) or (lior_and_speed and batch64)",
    "pairwise_cosine": "(test_pairwise_cosine and n8192) or (lior_and_speed and batch64)",
}
"""For each technique what is gated: a workload of its own that shows the plant, and one of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of the gate. `planted` is the technique with more work in it, or empty."""

    planted: str
    code: int
    seconds: float
    verdicts: dict[str, Status]
    lines: tuple[str, ...]
    """What is said of each red workload."""

    @property
    def as_it_must(self) -> bool:
        """Green where nothing is planted; else red for that module's workloads, and green for the others."""
        if not self.verdicts:
            return False
        red = {i for i, status in self.verdicts.items() if status is Status.REGRESSED}
        green = {i for i, status in self.verdicts.items() if status.green}
        if not self.planted:
            return self.code == 0 and len(green) == len(self.verdicts)
        own = {i for i in self.verdicts if f"/test_{self.planted}.py::" in i}
        return self.code == 1 and red == own and bool(own) and bool(green) and green == set(self.verdicts) - own


def gate(root: Path, out: Path, name: str, *, planted: str = "", keyword: str = "") -> Trial:
    """One run of the gate in `root`; its output goes to `out`."""
    folder = out / name
    command = [sys.executable, "-m", "pytest", "-m", "perf", "--benchmark-compare", "-p", "no:cacheprovider"]
    command += ["-k", keyword] if keyword else []
    command += [f"--perfsuite-report={folder}"]
    began = time.monotonic()
    with (out / f"{name}.txt").open("wb") as log:
        code = subprocess.run(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - began
    try:
        verdicts = jsonfile.read(folder / "report.json").verdicts
    except PerfsuiteError as error:
        return Trial(planted=planted, code=code, seconds=seconds, verdicts={}, lines=(str(error),))
    return Trial(
        planted=planted,
        code=code,
        seconds=seconds,
        verdicts={i: v.status for i, v in verdicts.items()},
        lines=tuple(v.message for v in verdicts.values() if not v.status.green),
    )


@contextlib.contextmanager
def work_tree(root: Path) -> Iterator[Path]:
    """Another work tree of the same repository, at HEAD."""
    folder = Path(tempfile.mkdtemp(prefix="gate-trial-"))
    tree = folder / "tree"
    try:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), "HEAD"], cwd=root, check=True)
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def shown(trials: list[Trial]) -> Table:
    """The table of all runs."""
    table = Table("planted", "exit", "seconds", "verdicts", "red", "as it must")
    for trial in trials:
        statuses = list(trial.verdicts.values())
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
        ends = "yes" if trial.as_it_must else "NO"
        table.add_row(
            trial.planted or "-", str(trial.code), f"{trial.seconds:.0f}", counts, Text("\n".join(trial.lines)), ends
        )
    return table


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.03)
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/gate_trial"))
    given = parser.parse_args()
    root = Path.cwd()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # What the measuring processes of a planted tree import is that tree: it comes before any installed copy.
    os.environ.pop("PYTHONSAFEPATH", None)
    trials: list[Trial] = []

    def keep(trial: Trial) -> None:
        trials.append(trial)
        with (out / "table.txt").open("w") as file:
            Console(file=file, width=200).print(shown(trials))

    for number in range(1, given.gates + 1):
        keep(gate(root, out, f"gate{number}"))
    for name in given.only or NAMES:
        with work_tree(root) as tree:
            try:
                plant(tree, name, given.share)
            except (OSError, ValueError) as error:
                parser.error(str(error))
            keep(gate(tree, out, f"planted_{name}", planted=name, keyword=BESIDE[name]))
    Console(width=200).print(shown(trials))
    return 0 if all(trial.as_it_must for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
