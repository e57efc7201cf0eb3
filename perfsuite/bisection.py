"""Find the commit that made a workload slower: a binary search over commits, each compared with the good one.

`search` has no side effects. `Comparer` runs `perfsuite compare` for a commit in a separate git work tree.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.errors import PerfsuiteError, RevisionError
from perfsuite.history import name_lookup
from perfsuite.records import ACCEPTED, OPTIMIZED, Measurement, Status
from perfsuite.report import jsonfile
from perfsuite.report.model import RunReport
from perfsuite.revisions import revision

REPEATS = 3
"""Most comparisons of a commit. It is compared again while its interval contains half of the whole change."""
TIME, MEMORY = "time", "memory"
COUNTS = {MEMORY: "peak_bytes", "syncs": "host_syncs", "launches": "launches"}
"""Counts that can be searched for instead of the time, without a clock: name → field of a side's record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Increase from one commit to another: relative for the time (0.03 = 3%), absolute for a count."""

    value: float
    low: float
    high: float
    by: str = TIME

    @property
    def shown(self) -> str:
        if self.by == TIME:
            return f"{100 * self.value:+.2f}% ({100 * self.low:+.2f} to {100 * self.high:+.2f})"
        return f"{self.value:+,.0f} {'bytes' if self.by == MEMORY else self.by}"

    def mean(self, others: Sequence[Change]) -> Change:
        """Return the mean of this and further comparisons of the same commits."""
        every = [self, *others]
        value = sum(c.value for c in every) / len(every)
        half = math.sqrt(sum(((c.high - c.low) / 2) ** 2 for c in every)) / len(every)
        return Change(value=value, low=value - half, high=value + half, by=self.by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit, with the first line of its message."""

    hash: str
    subject: str = ""
    date: str = ""

    @property
    def shown(self) -> str:
        return f'{self.hash[:9]} "{self.subject}"'


class SkippedError(PerfsuiteError):
    """A commit that cannot be compared, with the reason."""


Compare = Callable[[Commit, Commit], Change]
"""(Earlier commit, later commit) → increase. Raises SkippedError if the later one cannot be compared."""


@dataclass(kw_only=True, slots=True)
class Found:
    """The result of a search."""

    first: Commit
    """The first commit that is known to take more."""
    parent: Commit
    """The last commit that is known to take no more."""
    whole: Change
    """From the good commit to the bad one."""
    own: Change | None
    """From `parent` to `first`; None if these two cannot be compared with each other."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Commits that could not be compared: hash → reason."""
    suspects: tuple[Commit, ...] = ()
    """Skipped commits between `parent` and `first`. Any of them may be the cause instead."""


def search(
    good: Commit, commits: Sequence[Commit], compare: Compare, report: Callable[[str], None] = lambda line: None
) -> Found:
    """Find the first of `commits`, oldest first, that takes more than `good`.

    A commit counts as bad if its change is more than half of the whole change, from `good` to the last commit. A commit
    that cannot be compared is skipped, and its neighbours are tried. Raises PerfsuiteError if the last commit takes no
    more than `good`, or cannot be compared.
    """
    *_, bad = commits
    try:
        whole = compare(good, bad)
    except SkippedError as error:
        raise PerfsuiteError(f"{bad.shown} cannot be compared: {error}; name another --bad") from None
    report(f"{bad.shown}: {whole.shown}")
    if not whole.low > 0:
        raise PerfsuiteError(
            f"{bad.shown} takes no more than {good.shown}: {whole.shown}; there is nothing to search for"
        )
    low, high = -1, len(commits) - 1  # the last known to be good, and the first known to be bad
    skipped: dict[int, str] = {}
    while (middle := _middle(low, high, skipped)) is not None:
        try:
            change = _decided(good, commits[middle], compare, whole.value / 2)
        except SkippedError as error:
            skipped[middle] = str(error)
            report(f"{commits[middle].shown}: skipped, {error}")
            continue
        is_bad = change.value > whole.value / 2
        report(f"{commits[middle].shown}: {change.shown}, {'takes more' if is_bad else 'takes no more'}")
        low, high = (low, middle) if is_bad else (middle, high)
    parent = commits[low] if low >= 0 else good
    own: Change | None = whole
    if parent is not good or high != len(commits) - 1:
        try:
            own = compare(parent, commits[high])
        except SkippedError as error:
            own = None
            report(f"{commits[high].shown} against {parent.shown}: skipped, {error}")
    return Found(
        first=commits[high],
        parent=parent,
        whole=whole,
        own=own,
        skipped={commits[n].hash: reason for n, reason in sorted(skipped.items())},
        suspects=tuple(commits[n] for n in range(low + 1, high)),
    )


def _middle(low: int, high: int, skipped: Mapping[int, str]) -> int | None:
    """Return the number of the commit nearest to the middle that was not skipped; None if none is left."""
    left = [n for n in range(low + 1, high) if n not in skipped]
    return min(left, key=lambda n: abs(n - (low + high) / 2), default=None)


def _decided(good: Commit, commit: Commit, compare: Compare, threshold: float) -> Change:
    """Compare until the interval excludes the threshold, REPEATS times at most."""
    changes = [compare(good, commit)]
    while (mean := changes[0].mean(changes[1:])).low <= threshold <= mean.high and len(changes) < REPEATS:
        changes.append(compare(good, commit))
    return mean


def summary(found: Found) -> list[str]:
    """Return the result in lines: the commit, its own change, and the skipped commits."""
    own = "it cannot be compared with that one"
    if found.own is not None:
        share = found.own.value / found.whole.value
        own = found.own.shown + ("" if found.own is found.whole else f", {share:.0%} of {found.whole.shown}")
    lines = [
        f"{found.first.shown}, {found.first.date}, is the first that takes more {found.whole.by}",
        f"against {found.parent.shown}: {own}",
    ]
    if found.suspects:
        names = ", ".join(commit.hash[:9] for commit in found.suspects)
        lines.append(f"one of the skipped commits between the two may be the cause instead: {names}")
    lines += [f"skipped {hash[:9]}: {reason}" for hash, reason in found.skipped.items()]
    return lines


def commits_between(good: str, bad: str, root: Path) -> tuple[Commit, list[Commit]]:
    """Return (the good commit, the later commits up to the bad one along first parents).

    Raises PerfsuiteError if the good commit is no ancestor of the bad one, or the same.
    """
    first, last = (revision.resolve(name, root) for name in (good, bad))
    try:
        revision.git("merge-base", "--is-ancestor", first, last, cwd=root)
    except RevisionError:
        raise PerfsuiteError(f"--good {good} is no ancestor of {bad}; name one") from None
    lines = revision.git("log", "--first-parent", "--reverse", "--format=%H%x09%cs%x09%s", f"{first}..{last}", cwd=root)
    commits = [
        Commit(hash=h, date=d, subject=s) for h, d, s in (line.split("\t", 2) for line in lines.split("\n") if line)
    ]
    if not commits:
        raise PerfsuiteError(f"--good {good} and {bad} are the same commit; name an earlier one")
    subject = revision.git("log", "-1", "--format=%s", first, cwd=root)
    return Commit(hash=first, subject=subject), commits


def workload_named(name: str, root: Path) -> str:
    """Return the id of the workload in the current folder's project that `name` equals or is a unique part of.

    A whole id is returned as it is, because the workload may exist only in other commits. Raises PerfsuiteError if no
    workload fits, or several do.
    """
    if re.fullmatch(r".+::.+::speed\[.*\]", name):
        return name
    done = _run("list", "--json", there=root, tree=revision.top_level(root))
    try:
        ids = [str(row["id"]) for row in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError):
        raise PerfsuiteError(
            f"the workloads here cannot be listed: {_reason(done)}; give a whole id, file::pair::speed[name]"
        ) from None
    if not ids:
        raise PerfsuiteError(
            f"there is no workload here that {name} could be; give a whole id, file::pair::speed[name]"
        )
    return name_lookup.workload(name, ids, "that `perfsuite list` shows")


class Comparer:
    """Context manager that runs `perfsuite compare` for a workload in a separate work tree, and removes the tree.

    by  "time", or one of COUNTS
    """

    def __init__(self, workload: str, root: Path, by: str = TIME) -> None:
        self.workload, self.root, self.by = workload, root, by
        self.top = revision.top_level(root)
        self._scratch = Path(tempfile.mkdtemp(prefix="perfsuite-bisect-"))
        self._tree = self._scratch / "tree"

    def __enter__(self) -> Comparer:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._remove()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __call__(self, earlier: Commit, later: Commit) -> Change:
        """Compare two commits. Raises SkippedError if the later one does not run, or is not equivalent."""
        self._remove()
        revision.git("worktree", "add", "--detach", "--quiet", str(self._tree), later.hash, cwd=self.top)
        there = self._tree / self.root.resolve().relative_to(self.top.resolve())
        if not there.is_dir():
            raise SkippedError(f"it has no folder {there.relative_to(self._tree)}")
        folder = self._scratch / "report"
        shutil.rmtree(folder, ignore_errors=True)
        done = _run("compare", earlier.hash, self.workload, "--report", str(folder), there=there, tree=self._tree)
        file = folder / "report.json"
        if not file.exists():
            raise SkippedError(_reason(done))
        return change_of(jsonfile.read(file), self.by)

    def _remove(self) -> None:
        if self._tree.exists():
            revision.git("worktree", "remove", "--force", str(self._tree), cwd=self.top)


def _run(*arguments: str, there: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the perfsuite that is installed here in the folder `there` of a work tree."""
    # -P: not the perfsuite of the tree.
    command = [sys.executable, "-P", "-m", "perfsuite", *arguments]
    return subprocess.run(command, cwd=there, env=_environment(tree), capture_output=True, text=True, check=False)


def _environment(tree: Path) -> dict[str, str]:
    """Return environment variables with which the project's packages are imported from the tree, even if the project is
    installed in editable mode."""
    if (tree / "perfsuite").is_dir():
        return dict(os.environ)
    places = [str(tree), str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of the command's output that says why it failed."""
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in said if "rror" in line]
    return (errors or said or [f"exit code {done.returncode}"])[-1].strip()


def change_of(report: RunReport, by: str) -> Change:
    """Return the change of a comparison's only workload. Raises SkippedError if the report has none."""
    if len(report.verdicts) != 1:
        reason = next(iter(report.problems), "") or f"{len(report.verdicts)} workloads of that name"
        raise SkippedError(reason)
    ((id, verdict),) = report.verdicts.items()
    why = verdict.message.removeprefix(f"{verdict.status.value} {id}: ")
    if verdict.status in (Status.NOT_EQUIVALENT, Status.NOT_PROVEN, Status.NOT_TIMED, Status.UNMEASURED):
        raise SkippedError(why)
    if by == TIME:
        if verdict.slowdown is None or verdict.low is None or verdict.high is None:
            raise SkippedError(why)
        return Change(value=verdict.slowdown, low=verdict.low, high=verdict.high)
    measured = report.measurements.get(id, ())
    found = [change for m in measured if (change := _count(m, COUNTS[by])) is not None]
    if not found:
        raise SkippedError(f"no count of {by} on this device" if measured else why)
    least = min(found)
    return Change(value=least, low=least, high=least, by=by)


def _count(measured: Measurement, name: str) -> float | None:
    counts = [getattr(measured.sides[side], name) for side in (ACCEPTED, OPTIMIZED) if side in measured.sides]
    if len(counts) < 2 or None in counts:
        return None
    return float(counts[1] - counts[0])
