"""Accepted figures over time, from every version of the baseline files in git and from those in the work tree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from perfsuite.baseline import storage
from perfsuite.errors import PerfsuiteError, RevisionError
from perfsuite.history.records import Accepted, accepted_of
from perfsuite.history.store import storable
from perfsuite.revisions import revision


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A version of a baseline file."""

    blob: str
    """Git's hash of the content."""
    path: Path | None = None
    """The file, for a version in the work tree; None for one in git."""


def head(folder: Path) -> str:
    """Return the hash of HEAD; empty outside git or without a commit."""
    try:
        return revision.git("rev-parse", "--verify", "--quiet", "HEAD", cwd=folder)
    except (RevisionError, OSError):
        return ""


def committed(folder: Path) -> list[Version]:
    """Return the versions of the baselines in `folder` from HEAD's history, the oldest first; none if git fails."""
    options = ("--raw", "--no-abbrev", "--no-renames", "--format=", "--")
    try:
        lines = revision.git("log", *options, ".", cwd=folder).splitlines()
    except (RevisionError, OSError):
        return []
    found = {
        change.split()[3]: None
        for change, _, name in (line.partition("\t") for line in lines)
        if name.endswith(".json") and len(change.split()) > 3
    }
    return [Version(blob=blob) for blob in reversed(found) if blob.strip("0")]


def present(folder: Path) -> list[Version]:
    """Return the versions of the baselines in `folder` from the work tree, without files that cannot be read."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        found.append(Version(blob=blob, path=path))
    return found


def figures(version: Version, folder: Path) -> Iterator[tuple[str, str, Accepted]]:
    """Yield (device, workload, figures) of each entry; nothing for a version in git that this perfsuite cannot parse.

    Raises BaselineError for a damaged file in the work tree.
    """
    if version.path is not None:
        found = storage.load(version.path)
    else:
        try:
            found = storage.parse(revision.git("cat-file", "blob", version.blob, cwd=folder))
        except (PerfsuiteError, RecursionError):
            return
    for id, entry in found.entries.items():
        made = accepted_of(entry)
        yield storable(found.machine.device), storable(id), replace(made, reason=storable(made.reason))
