"""Print where the seconds of proofs went: proof_cost.py [--log FILE] [PYTEST'S ARGUMENTS].

Proves one item after another in this process. Prints, in Markdown, the seconds of each pair by kind of item, and the
median over the pairs. For figures with full caches run it twice. --log appends the seconds of each item when it ends,
so that they are kept if the run is cut off. `--read FILE` prints the tables of one or several such files. `--profile
FILE` writes a profile of the proofs (cProfile), for `python -m pstats FILE`. docs/measuring.md has figures of an H200.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ALONE = ("-q", "-m", "correctness", "--perfsuite-isolate=never", "-p", "no:cacheprovider")
Seconds = dict[str, dict[str, float]]
"""Seconds by pair and by kind of item."""


class Log:
    """Plugin that records the seconds of each item, including setup and teardown."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.lines = file, list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the seconds of one phase of an item; pytest calls this for setup, call and teardown."""
        line = f"{report.duration:.3f}\t{report.nodeid}"
        self.lines.append(line)
        if self.file is not None:
            with self.file.open("a") as out:
                print(line, file=out)


class Profile:
    """Plugin that profiles the proofs, without collection and start-up."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Profile one item; pytest calls this around it."""
        self.profile.enable()
        try:
            yield
        finally:
            self.profile.disable()


def by_pair(lines: list[str]) -> Seconds:
    """Return the seconds of each pair, by kind of item."""
    found: Seconds = defaultdict(lambda: defaultdict(float))
    for line in lines:
        seconds, id = line.split("\t")
        *pair, item = id.split("::")
        found["::".join(pair)][item.partition("[")[0]] += float(seconds)
    return found


def table(seconds: Seconds) -> list[str]:
    """Return the table of the pairs, the longest first, and the median."""
    kinds = sorted({kind for of_pair in seconds.values() for kind in of_pair})
    total = {pair: sum(of_pair.values()) for pair, of_pair in seconds.items()}
    rows = [f"| pair: seconds | all | {' | '.join(kinds)} |", f"| --- |{' ---: |' * (1 + len(kinds))}"]
    for pair in sorted(total, key=total.__getitem__, reverse=True):
        each = " | ".join(f"{seconds[pair].get(kind, 0.0):.1f}" for kind in kinds)
        rows.append(f"| {pair.rpartition('::')[2]} | {total[pair]:.1f} | {each} |")
    median, together = statistics.median(total.values()), sum(total.values())
    return [*rows, "", f"Pairs: {len(total)}, median: {median:.2f} s, together: {together:.0f} s."]


def main() -> int:
    """Print the table; return pytest's exit code, or 4 if a file of --read cannot be read or is not a log."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--log", type=Path, help="append the seconds of each item to this file")
    parser.add_argument("--read", type=Path, nargs="+", help="prove nothing: print the table of these files")
    parser.add_argument("--profile", type=Path, help="write a profile to this file; the seconds are longer then")
    given, rest = parser.parse_known_args()
    code, log, profile = 0, Log(given.log), Profile()
    try:
        if given.read:
            log.lines = [line for file in given.read for line in file.read_text().splitlines()]
        else:
            code = int(pytest.main([*ALONE, *rest], plugins=[log, *([profile] if given.profile else [])]))
        if given.profile:
            profile.profile.dump_stats(given.profile)
        found = by_pair(log.lines)
    except (OSError, ValueError) as error:
        print(f"proof_cost.py: {error}; give files that --log has written", file=sys.stderr)
        return 4
    print("\n".join(table(found) if found else ["No pair was proven."]))
    return code


if __name__ == "__main__":
    sys.exit(main())
