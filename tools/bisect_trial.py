"""Try `perfsuite bisect` on this machine: bisect_trial.py NAME [--by COUNT] [--workload ID] [--commits N] [--at K].

Clones this repository into a temporary folder and adds N commits, each of which changes a constant of the module that
the fault NAME of plants.py edits. Commit K, by default one by lot, also plants the fault. Then searches for the commit
that made the fault's first workload slower, or that takes more of COUNT. Prints the command's output, its seconds, and
whether it found the commit. The exit code is 1 if it did not.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plants import PLANTS, plant

from perfsuite import bisection

AUTHOR = ("-c", "user.name=bisect_trial", "-c", "user.email=bisect_trial@localhost")
SUBJECT = "Commit {} of the trial"


def commit_all(root: Path, name: str, commits: int, at: int) -> None:
    """Add the commits to the repository at `root`. Commit `at`, counted from 1, plants the fault `name`."""
    path = root / "optimized" / f"{PLANTS[name].module}.py"
    text = path.read_text()
    for number in range(1, commits + 1):
        if number == at:
            path.write_text(text)
            text = plant(root, name).read_text()
        path.write_text(f"{text}\nCOMMIT = {number}\n")
        command = ["git", *AUTHOR, "commit", "--quiet", "--all", f"--message={SUBJECT.format(number)}"]
        subprocess.run(command, cwd=root, check=True)


def bisect(root: Path, workload: str, commits: int, by: str) -> tuple[str, float]:
    """Search among the last commits of the repository at `root`. Return (output, seconds)."""
    command = [sys.executable, "-P", "-m", "perfsuite", "bisect", workload, f"--good=HEAD~{commits}", f"--by={by}"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout, time.monotonic() - began


def main() -> int:
    """Parse the command line and run the trial; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[n for n, p in PLANTS.items() if p.red], metavar="NAME")
    parser.add_argument("--by", choices=[bisection.TIME, *bisection.COUNTS], default=bisection.TIME)
    parser.add_argument("--workload", help="another workload than the fault's first")
    parser.add_argument("--commits", type=int, default=32)
    parser.add_argument("--at", type=int)
    given = parser.parse_args()
    at = given.at or random.SystemRandom().randint(1, given.commits)
    os.environ.pop("PYTHONSAFEPATH", None)  # the measuring processes must import the tree of their commit
    with tempfile.TemporaryDirectory(prefix="bisect-trial-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(Path.cwd()), str(tree)], check=True)
        try:
            commit_all(tree, given.name, given.commits, at)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        workload = given.workload or PLANTS[given.name].red[0]
        output, seconds = bisect(tree, workload, given.commits, given.by)
    found = f'"{SUBJECT.format(at)}"' in next((line for line in output.splitlines() if "is the first that" in line), "")
    print(output, f"{'found' if found else 'NOT FOUND'}: commit {at} of {given.commits}, in {seconds:.0f} s", sep="")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
