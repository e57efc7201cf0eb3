"""`perfsuite gate --changed`: find the accepted workloads that run the same code and data as when they were accepted.
No torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from perfsuite.baseline.accepted_entries import Entry, short
from perfsuite.records import Machine, Ran, Status, Verdict
from perfsuite.report import units
from perfsuite.revisions import digests, revision


@dataclass(slots=True)
class Found:
    """Result of the search: unchanged workload → why it need not be measured, changed workload → what has changed."""

    unchanged: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Changed workload → the sources that differ. Only workloads for which nothing else differs."""


Added: TypeAlias = Callable[[str, Path], Collection[str] | None]
"""Signature of `revision.added_since`."""


def unchanged(
    entries: Mapping[str, Entry],
    top: Path,
    machine: Machine,
    added: Added = revision.added_since,
    settings: Mapping[str, str] | None = None,
) -> Found:
    """Compare what each entry ran with the present files, software and environment.

    settings  pytest's present settings (`digests.settings`); None if they are not compared
    """
    found, present = Found(), _Present(top, added)
    for id, entry in entries.items():
        difference = _elsewhere(entry, machine, settings) or present.other_files(entry)
        sources = [] if difference else present.other_sources(entry)
        if difference or sources:
            found.changed[id] = difference or f"{', '.join(sources[:3])}{', …' * (len(sources) > 3)}"
            if not difference:
                found.sources[id] = sources
        else:
            found.unchanged[id] = f"nothing that it runs has changed since {short(entry.revision)}"
    return found


def other_code(
    entries: Mapping[str, Entry], top: Path, machine: Machine, added: Added = revision.added_since
) -> dict[str, str]:
    """Return workload → why its accepted figures may be of other code than the present. Other workloads are left
    out."""
    present = _Present(top, added)
    return {i: why for i, entry in entries.items() if (why := _other_code(entry, machine, present))}


def differences(
    entries: Mapping[str, Entry],
    top: Path,
    machine: Machine,
    added: Added = revision.added_since,
    settings: Mapping[str, str] | None = None,
) -> dict[str, tuple[list[str], str]]:
    """Return workload → (the sources that differ, the first difference of another kind).

    Only workloads for which it is known what they ran when they were accepted.
    """
    present = _Present(top, added)
    found = {}
    for id, entry in entries.items():
        if not _unknown(entry):
            sources = [] if _other_python(entry, machine) else present.other_sources(entry)
            found[id] = sources, _elsewhere(entry, machine, settings) or present.other_files(entry)
    return found


def _other_code(entry: Entry, machine: Machine, present: _Present) -> str:
    if reason := _unknown(entry):
        return reason
    if reason := _other_python(entry, machine):
        return reason
    if reason := present.other_files(entry):
        return reason
    what = ", ".join(present.other_sources(entry)[:3])
    return f"{what} changed since it was accepted at {short(entry.revision)}" if what else ""


def _other_python(entry: Entry, machine: Machine) -> str:
    """Return how the version of Python differs; empty if it does not. Digests of sources depend on that version."""
    before, now = (version.rpartition(".")[0] for version in (entry.sessions[-1].python, machine.python))
    return f"it was accepted with Python {before}, and this is {now}" if before != now else ""


def launched(entry: Entry) -> str:
    """Return the digest of what the workload launched when it was accepted; empty if it is unknown or not sufficient.

    It is not sufficient on the wall clock, where the host's code matters too.
    """
    return entry.ran.launched if entry.ran is not None and entry.clock == "device" else ""


def launches_the_same(launched: str, sources: Collection[str], now: str, own: Collection[str]) -> bool:
    """Return whether only sources of the optimized side differ, and it launches what it launched when it was accepted.

    `launched` and `now` are digests of what the optimized side launched then and launches now, empty if unknown. `own`
    are the sources that only the optimized side runs. A changed reference or declaration of the pair has to be proven,
    since the launches of the optimized side do not depend on it.
    """
    return bool(launched) and launched == now and set(sources) <= set(own)


def verdict(id: str, entry: Entry, reason: str) -> Verdict:
    """Return the verdict UNCHANGED, with the figures that were accepted."""
    return Verdict(
        id=id,
        status=Status.UNCHANGED,
        message=f"{Status.UNCHANGED} {id}: {reason}",
        accepted_speedup=entry.speedup(),
        compared=f"what was accepted at {short(entry.revision)}",
    )


def summary(found: Found) -> str:
    """Return a line that says what is measured, and why."""
    text = f"{units.count(len(found.unchanged), 'workload')} unchanged"
    if found.changed:
        first, why = next(iter(found.changed.items()))
        text += f"; {len(found.changed)} to be measured, e.g. {first.partition('::')[2]}: {why}"
    return text


def _unknown(entry: Entry) -> str:
    """Return why it is not known what the workload ran when it was accepted; empty if it is known."""
    if entry.ran is None:
        return "what it ran was not noted when it was accepted"
    return entry.ran.unknown or ("it was accepted with uncommitted changes" if entry.dirty else "")


def _elsewhere(entry: Entry, machine: Machine, settings: Mapping[str, str] | None) -> str:
    """Return how the software, the environment or pytest's settings differ from those of the acceptance; empty if they
    do not."""
    if reason := _unknown(entry):
        return reason
    assert entry.ran is not None
    session = entry.sessions[-1]
    for name in ("driver", "cuda", "torch", "triton", "python"):
        before, now = getattr(session, name), getattr(machine, name)
        if before != now:
            return f"{name} was {before}, is {now}"
    if entry.ran.surroundings != digests.surroundings():
        return _surroundings(entry.ran)
    return _other_build(entry.ran) or _other_value("pytest setting", entry.ran.settings, settings)


def _surroundings(ran: Ran) -> str:
    """Return which environment variable or installed package differs, as far as the acceptance recorded them."""
    if ran.variables is None:
        return "an installed package, or an environment variable that matters to speed"
    if reason := _other_value("environment variable", ran.variables, digests.variables()):
        return reason
    if ran.packages is None:
        return "an installed package"
    before, now = _versions(ran.packages), _versions(digests.packages())
    different = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if not different:
        return "an installed package"
    name, more = different[0], f", and {len(different) - 1} more" * (len(different) > 1)
    was, is_ = (", ".join(sorted(v.get(name, ())) or ["not installed"]) for v in (before, now))
    return f"package {name} was {was}, is {is_}{more}"


def _other_value(kind: str, before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str:
    """Return the first of these named values that differs; empty if none does, or if one side was not recorded."""
    if before is None or now is None:
        return ""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            was, is_ = (f"{v[name]!r}" if name in v else "not set" for v in (before, now))
            return f"{kind} {name} was {was}, is {is_}"
    return ""


def _other_build(ran: Ran) -> str:
    """Return the first package of the same version that has other files; empty if none has, or if the acceptance did
    not record the packages' builds."""
    before, now = _builds(ran.packages or ()), _builds(digests.packages())
    different = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    if not different:
        return ""
    name, _, version = different[0].partition("==")
    return f"package {name} is another build of {version}{f', and {len(different) - 1} more' * (len(different) > 1)}"


def _builds(packages: Iterable[str]) -> dict[str, set[str]]:
    """Return package, as `name==version` → its builds, for each package whose build is known."""
    found: dict[str, set[str]] = {}
    for package in packages:
        name, _, build = package.partition(digests.BUILD)
        if build:
            found.setdefault(name, set()).add(build)
    return found


def _versions(packages: Iterable[str]) -> dict[str, set[str]]:
    """Return package → its versions. A package in two places of sys.path can have two."""
    found: dict[str, set[str]] = {}
    for package in packages:
        name, _, version = package.partition("==")
        found.setdefault(name, set()).add(version.partition(digests.BUILD)[0])
    return found


class _Present:
    """Files as they are now. Git and each file are read once for all workloads, and parsed only if necessary."""

    def __init__(self, top: Path, added: Added) -> None:
        self.top = top
        self.added = functools.cache(added)
        self.blobs = functools.cache(lambda accepted: revision.blobs(accepted, top))
        self.content = functools.cache(self._content)
        self.beside = functools.cache(self._beside)
        self.imports = functools.cache(self._imports)
        self.digest_of_data = functools.cache(lambda path: digests.of_data(top / path))
        self.digest_of_source = functools.cache(lambda path: digests.of_file(top / path))

    def other_files(self, entry: Entry) -> str:
        """Return a reason if a file other than the entry's sources differs, or is new and would run; empty if none
        is."""
        what = self.other_data(entry.ran) or self.other_beside(entry)
        if what:
            return f"{what} changed since it was accepted at {short(entry.revision)}"
        return self.added_since(entry)

    def other_data(self, ran: Ran | None) -> str:
        """Return the first file that differs of those that the workload read or loaded, or the first folder outside the
        repository from which it imported; empty if none does."""
        for path, digest in ran.data.items() if ran else ():
            if self.digest_of_data(path) != digest:
                return f"{'folder' if (self.top / path).is_dir() else 'data file'} {path}"
        return ""

    def other_sources(self, entry: Entry) -> list[str]:
        """Return the sources that differ."""
        different = []
        for path, digest in entry.ran.sources.items() if entry.ran else ():
            # A package of the same name would be imported instead of the module.
            package = (self.top / path).with_suffix("") / "__init__.py"
            same = self._is_committed(path, entry) or self.digest_of_source(path) == digest
            if not same or package.exists():
                different.append(path)
        return different

    def _is_committed(self, path: str, entry: Entry) -> bool:
        """Return whether the file is byte for byte that of the accepted revision."""
        blob = self.blobs(entry.revision).get(path) if entry.revision else None
        return blob is not None and self._is_blob(path, blob)

    def _is_blob(self, path: str, blob: str) -> bool:
        content = self.content(path)
        return content is not None and revision.is_blob(content, blob)

    def other_beside(self, entry: Entry) -> str:
        """Return the first file next to the entry's sources that is not Python and differs; empty if none does. The
        code may read such a file without being observed."""
        folders = dict.fromkeys(Path(name).parent for name in entry.ran.sources) if entry.ran else ()
        others = (p for folder in folders for p in self.beside(entry.revision, folder) if not p.endswith(".py"))
        return next((f"{path} beside its sources" for path in others), "")

    def _beside(self, accepted: str | None, folder: Path) -> list[str]:
        """Return the files of a folder that the accepted revision does not have or has with other content, and those
        that were removed since.

        Documents are left out. Files that git ignores are included. Python files have digests, so only new ones are
        included. The list is empty for the top folder, where every tool keeps files, and for a revision that git does
        not know.
        """
        blobs = self.blobs(accepted) if accepted and folder.parts else {}
        names = os.listdir(self.top / folder) if blobs and (self.top / folder).is_dir() else []
        paths = [str(folder / n) for n in sorted(names) if digests.matters(n)]
        files = [p for p in paths if (self.top / p).is_file()]
        differ = [p for p in files if p not in blobs or not (p.endswith(".py") or self._is_blob(p, blobs[p]))]
        here = [p for p in blobs if p.rpartition("/")[0] == folder.as_posix()]
        gone = [p for p in here if digests.matters(Path(p).name) and not os.path.lexists(self.top / p)]
        return [*differ, *(p for p in gone if not p.endswith(".py"))]

    def added_since(self, entry: Entry) -> str:
        """Return a reason if a file that would run now was added since the acceptance, or if this cannot be known;
        empty if not."""
        since = short(entry.revision)
        files = self.added(entry.revision, self.top) if entry.revision else None
        if files is None:
            return f"git does not know what was added since {since}"
        sources = [Path(name) for name in entry.ran.sources] if entry.ran else []
        folders = {folder for source in sources for folder in source.parents}
        files = {*files, *(p for s in sources for p in self.beside(entry.revision, s.parent) if p.endswith(".py"))}
        # A source that imports a new module contains its name, or is below it.
        new = {(path.parent if path.stem == "__init__" else path).stem for path in map(Path, files)}
        concerned = [
            s for s in sources if any(n in s.parts or n.encode() in (self.content(str(s)) or b"") for n in new)
        ]
        wanted = {name for source in concerned for name in self.imports(source)}
        for name in sorted(files):
            path = Path(name)
            if path.name in ("conftest.py", "__init__.py") and path.parent in folders:
                return f"{name} was added since {since}"
            # This import failed or found another module when it was accepted.
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            if any(f".{module}.".endswith(f".{w}.") or f"{w}.".startswith(f"{module}.") for w in wanted):
                return f"{name} was added since {since}"
        return ""

    def _content(self, path: str) -> bytes | None:
        """Return the file's bytes; None if it cannot be read."""
        try:
            return (self.top / path).read_bytes()
        except OSError:
            return None

    def _imports(self, source: Path) -> frozenset[str]:
        return frozenset(digests.imported_by(self.top / source, ".".join(source.parent.parts)))
