"""Plant a fault in one optimized module of this tree, to see the gate turn red: plant_slowdown.py NAME.

Prints the gate command for the workloads that show the fault. `git checkout optimized` removes the fault.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from plants import PLANTS, plant


def main() -> None:
    """Parse the command line, and plant the fault."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(f"{name:15} {p.what}" for name, p in PLANTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=PLANTS, metavar="NAME")
    given = parser.parse_args()
    try:
        print(f"changed {plant(Path.cwd(), given.name)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    found = PLANTS[given.name]
    ids = shlex.join([*found.red, *found.green, *found.seen])
    print(f"perfsuite gate --partial {'--changed ' if found.seen else ''}{ids}")


if __name__ == "__main__":
    main()
