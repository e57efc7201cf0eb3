"""Merge baselines that were accepted in other clones: merge_baselines.py INTO FROM [FROM ...].

Two GPUs accept twice as fast as one. Each uses a clone of its own at the same commit, with `perfsuite accept -k ...`.
An entry of a FROM file is merged if INTO lacks it or has an older one. All files must be of the same device. The tool
prints the ids of the merged entries.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perfsuite.baseline import accepted_entries, storage
from perfsuite.errors import PerfsuiteError


def newer(old: accepted_entries.Baseline, other: accepted_entries.Baseline) -> list[accepted_entries.Entry]:
    """Return the entries of `other` that `old` lacks, or has in an older version."""
    return [e for i, e in other.entries.items() if i not in old.entries or old.entries[i].accepted < e.accepted]


def main() -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, metavar="INTO")
    parser.add_argument("others", type=Path, metavar="FROM", nargs="+")
    given = parser.parse_args()
    try:
        for path in given.others:
            other = storage.load(path)

            def change(
                old: accepted_entries.Baseline | None, other: accepted_entries.Baseline = other
            ) -> accepted_entries.Baseline:
                if old is None:
                    return other
                found = newer(old, other)
                print("\n".join(e.id for e in found))
                return accepted_entries.merge(old, found, machine=other.machine)

            storage.update(given.into, change)
    except PerfsuiteError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
