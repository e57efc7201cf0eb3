"""Find what has changed for a workload since it was accepted: files, commits and other differences. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from perfsuite.baseline.accepted_entries import Entry, short
from perfsuite.errors import RevisionError
from perfsuite.records import CodeChange, Machine
from perfsuite.revisions import revision
from perfsuite.session import changed

MOST = 20
"""Most commits that are listed."""


def since_accepted(
    entries: Mapping[str, Entry],
    top: Path,
    machine: Machine,
    with_commits: Collection[str],
    settings: Mapping[str, str] | None = None,
) -> dict[str, CodeChange]:
    """Return the change of each workload for which it is known what it ran when it was accepted.

    with_commits  workloads whose commits and uncommitted changes are listed too, which takes git the longest
    settings      pytest's present settings (`digests.settings`); None if they are not compared
    """
    found = {}
    for id, (files, other) in changed.differences(entries, top, machine, settings=settings).items():
        entry, asked = entries[id], id in with_commits
        found[id] = CodeChange(
            since=short(entry.revision),
            files=tuple(files),
            commits=_commits(entry.revision, files, top) if asked else (),
            uncommitted=_uncommitted(files, top) if asked else (),
            other=other,
        )
    return found


def _commits(accepted: str | None, files: Sequence[str], top: Path) -> tuple[str, ...]:
    """Return the commits after the accepted one that changed a file; none if git does not know the accepted one."""
    if not files or accepted is None:
        return ()
    try:
        lines = revision.git("log", f"-{MOST}", "--format=%h %s", f"{accepted}..HEAD", "--", *files, cwd=top)
    except RevisionError:
        return ()
    return tuple(lines.splitlines())


def _uncommitted(files: Sequence[str], top: Path) -> tuple[str, ...]:
    if not files:
        return ()
    try:
        names = revision.git("diff", "--name-only", "-z", "HEAD", "--", *files, cwd=top).split("\0")
    except RevisionError:
        return ()
    return tuple(name for name in names if name)
