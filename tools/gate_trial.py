"""Try the gate on this GPU: gate_trial.py [--gates N] [--only NAME] [--beside] [--out DIR].

Runs the whole gate N times on unchanged code; it must be green. Then runs the gate once for each fault of plants.py, on
the workloads that show the fault and on some that do not. The former must be red by name, the latter PASS. Faults that
`--changed` must not overlook are gated with --changed. With --beside another process keeps the GPU's tensor cores busy
during each gate; NOISY is then right too. The tool needs a committed baseline of this device. It plants faults in a
separate work tree, so the current one does not change. It leaves out faults that need more GPUs than the machine has.
It prints a table, and writes it to DIR with the output and the report of every run. The exit code is 1 if a run did not
end as it must.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from plants import PLANTS, plant
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.errors import PerfsuiteError
from perfsuite.gate import exit_codes
from perfsuite.records import Status
from perfsuite.report import jsonfile

GREEN: set[Status | None] = {Status.PASS, Status.IMPROVED}
RED: set[Status | None] = {Status.REGRESSED, Status.BELOW_FLOOR}
"""Statuses that count as red. A broken promise, BELOW_FLOOR, is reported before a regression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of the gate. `planted` is the fault's name, or empty."""

    planted: str
    beside: bool = False
    """True if another process used the GPU during the run."""
    code: int
    seconds: float
    verdicts: dict[str, Status]
    lines: tuple[str, ...]
    """The message of each red workload."""

    @property
    def as_it_must(self) -> bool:
        """True if the run ended as it must.

        Workloads must be red by name where the fault shows and PASS where it does not, and the exit code must match. If
        another process used the GPU, each may be NOISY instead.
        """
        if not self.verdicts:
            return False
        if not self.planted:
            return self.code == self._code() and all(s in GREEN | self._also for s in self.verdicts.values())
        found = PLANTS[self.planted]
        if any(self.verdicts.get(i, Status.UNCHANGED) is Status.UNCHANGED for i in found.seen):
            return False
        right = {**dict.fromkeys(found.red, RED), **dict.fromkeys(found.green, GREEN)}
        return self.code == self._code() and all(self.verdicts.get(i) in s | self._also for i, s in right.items())

    @property
    def _also(self) -> set[Status | None]:
        return {Status.NOISY} if self.beside else set()

    def _code(self) -> int:
        red = [s for s in self.verdicts.values() if not s.green]
        if any(s.blames_code for s in red):
            return exit_codes.CODE_AT_FAULT
        return exit_codes.UNDECIDED if red else exit_codes.GREEN


def gate(
    root: Path, out: Path, name: str, *, planted: str = "", options: Sequence[str] = (), beside: bool = False
) -> Trial:
    """Run the gate once in `root`, and write its output to `out`."""
    folder = out / name
    command = [sys.executable, "-m", "perfsuite", "gate", f"--report={folder}", *options]
    began = time.monotonic()
    with (out / f"{name}.txt").open("wb") as log, neighbour() if beside else contextlib.nullcontext():
        code = subprocess.run(command, cwd=root, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - began
    try:
        verdicts = jsonfile.read(folder / "report.json").verdicts
    except PerfsuiteError as error:
        return Trial(planted=planted, beside=beside, code=code, seconds=seconds, verdicts={}, lines=(str(error),))
    return Trial(
        planted=planted,
        beside=beside,
        code=code,
        seconds=seconds,
        verdicts={i: v.status for i, v in verdicts.items()},
        lines=tuple(v.message for v in verdicts.values() if not v.status.green),
    )


BUSY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """Run another process that keeps the GPU's tensor cores busy, and so uses its power and its time slices."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(5)
        if process.poll() is not None:
            raise RuntimeError(f"the neighbour ended with exit code {process.returncode}; look at its output above")
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def work_tree(root: Path) -> Iterator[Path]:
    """Yield a separate work tree of the same repository, at HEAD, and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gate-trial-"))
    tree = folder / "tree"
    try:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), "HEAD"], cwd=root, check=True)
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def shown(trials: list[Trial]) -> Table:
    """Return the table of all runs."""
    table = Table("planted", "exit", "seconds", "verdicts", "red", "as it must")
    for trial in trials:
        statuses = list(trial.verdicts.values())
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
        ends = "yes" if trial.as_it_must else "NO"
        table.add_row(
            (trial.planted or "-") + (" (beside)" if trial.beside else ""),
            str(trial.code),
            f"{trial.seconds:.0f}",
            counts,
            Text("\n".join(trial.lines)),
            ends,
        )
    return table


def main() -> int:
    """Parse the command line and run the trials; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=3)
    parser.add_argument("--only", choices=PLANTS, action="append")
    parser.add_argument("--beside", action="store_true", help="while another process uses the GPU")
    parser.add_argument("--out", type=Path, default=Path(".perfsuite/gate_trial"))
    given = parser.parse_args()
    root = Path.cwd()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # The measuring processes of a planted tree must import that tree, and not an installed copy.
    os.environ.pop("PYTHONSAFEPATH", None)
    trials: list[Trial] = []
    devices = torch.cuda.device_count()

    def keep(trial: Trial) -> None:
        trials.append(trial)
        with (out / "table.txt").open("w") as file:
            Console(file=file, width=200).print(shown(trials))

    for number in range(1, given.gates + 1):
        keep(gate(root, out, f"gate{number}", beside=given.beside))
    for name in given.only or PLANTS:
        found = PLANTS[name]
        if found.devices > devices:
            print(
                f"{name}: left out, since it needs {found.devices} GPUs and this machine has {devices}", file=sys.stderr
            )
            continue
        options = ["--partial", *(["--changed"] if found.seen else []), *found.red, *found.green, *found.seen]
        with work_tree(root) as tree:
            try:
                plant(tree, name)
            except (OSError, ValueError) as error:
                parser.error(str(error))
            keep(gate(tree, out, f"planted_{name}", planted=name, options=options, beside=given.beside))
    Console(width=200).print(shown(trials))
    return 0 if all(trial.as_it_must for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
