"""Print where the seconds of proofs went: proof_cost.py [--fill N] [--log FILE] [PYTEST'S ARGUMENTS].

Proves one item after another in this process. Prints, in Markdown, the seconds of each pair by kind of item, and the
median over the pairs. With --fill N, N processes first prove the same pairs twice, each some of them, so that the
caches are full. Items of a pair share draws only within a process, so runs that spread the items of a pair over
processes, as those with xdist do, leave sizes that are not compiled yet. --log appends the seconds of each item when it
ends, so that they are kept if the run is cut off; pairs of which not all items have ended are not counted. `--read
FILE` prints the tables of one or several such files. `--profile FILE` writes a profile of the proofs (cProfile), for
`python -m pstats FILE`. docs/measuring.md has figures of an H200.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ALONE = ("-q", "-m", "correctness", "--perfsuite-isolate=never", "-p", "no:cacheprovider")
Seconds = dict[str, dict[str, float]]
"""Seconds by pair and by kind of item."""


SELECTED = "selected"
"""Stands before an item's id where the items that will be proven are listed."""


class Log:
    """Plugin that lists the items, and then records the seconds of each, including setup and teardown."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.lines, self.seconds = file, list[str](), 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """List the items; pytest calls this after it has collected and selected them."""
        for item in session.items:
            self._add(f"{SELECTED}\t{item.nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the seconds of an item; pytest calls this after its setup, call and teardown."""
        self.seconds += report.duration
        if report.when == "teardown":
            self._add(f"{self.seconds:.3f}\t{report.nodeid}")
            self.seconds = 0.0

    def _add(self, line: str) -> None:
        self.lines.append(line)
        if self.file is not None:
            with self.file.open("a") as out:
                print(line, file=out)


class Share:
    """Plugin that selects every `of`-th pair, beginning with number `first`."""

    def __init__(self, first: int, of: int) -> None:
        self.first, self.of = first, of

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the items of all other pairs; pytest calls this with the items that it has collected."""
        pairs = list(dict.fromkeys(pair_of(item.nodeid) for item in items))[self.first :: self.of]
        config.hook.pytest_deselected(items=[item for item in items if pair_of(item.nodeid) not in pairs])
        items[:] = [item for item in items if pair_of(item.nodeid) in pairs]


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


def pair_of(id: str) -> str:
    """Return the part of an item's id that names the pair."""
    return id.rpartition("::")[0]


def by_pair(lines: list[str]) -> Seconds:
    """Return the seconds of each pair of which all listed items have ended, by kind of item."""
    found: Seconds = defaultdict(lambda: defaultdict(float))
    listed, ended = set[str](), set[str]()
    for line in lines:
        seconds, id = line.split("\t")
        if seconds == SELECTED:
            listed.add(id)
            continue
        ended.add(id)
        found[pair_of(id)][id.rpartition("::")[2].partition("[")[0]] += float(seconds)
    for id in listed - ended:
        found.pop(pair_of(id), None)
    return found


def fill(processes: int, arguments: list[str]) -> None:
    """Prove the selected pairs twice in this number of processes, each of which proves some of the pairs."""
    commands = [[sys.executable, __file__, f"--share={i}/{processes}", *arguments] for i in range(processes)]
    for _ in range(2):  # the first run stops drawing new sizes when compiling has taken a second
        running = [subprocess.Popen(c, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for c in commands]
        for process in running:
            process.wait()


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
    parser.add_argument("--fill", type=int, default=0, metavar="N", help="first fill the caches, in N processes")
    parser.add_argument("--share", metavar="I/N", help="prove only every N-th pair, beginning with number I, from 0")
    given, rest = parser.parse_known_args()
    code, log, profile = 0, Log(given.log), Profile()
    plugins: list[object] = [log, *([profile] if given.profile else [])]
    if given.share:
        first, _, of = given.share.partition("/")
        if not (first.isdigit() and of.isdigit() and int(first) < int(of)):
            parser.error(f"--share={given.share}: give a number and a count, like 0/4")
        plugins.append(Share(int(first), int(of)))
    try:
        if given.read:
            log.lines = [line for file in given.read for line in file.read_text().splitlines()]
        else:
            if given.fill:
                fill(given.fill, rest)
            code = int(pytest.main([*ALONE, *rest], plugins=plugins))
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
