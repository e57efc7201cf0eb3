"""A SQLite index over the runs' files. All of it can be rebuilt from the files and git.

`using` brings the index up to date. Each run does so too, with `add_last`, because indexing a long history takes
seconds. An index that is missing, damaged or of another version is rebuilt. One that cannot be written is built in
memory instead.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError, printable
from perfsuite.history import accepted, steps, store
from perfsuite.history.accepted import Version
from perfsuite.history.records import Accepted, Figures, Run, compact
from perfsuite.history.steps import Step, Timed

T = TypeVar("T")
NAME = "history.sqlite"
VERSION = 1
"""Version of the tables and of their contents."""
TABLES = """
CREATE TABLE runs (name TEXT PRIMARY KEY, size INTEGER, changed INTEGER, started REAL, device TEXT,
                   head TEXT, counts TEXT, problem TEXT) WITHOUT ROWID;
CREATE TABLE figures (workload TEXT, run TEXT, seconds REAL, conditions TEXT, data TEXT,
                      PRIMARY KEY (workload, run)) WITHOUT ROWID;
CREATE TABLE steps (workload TEXT PRIMARY KEY, rule INTEGER, data TEXT) WITHOUT ROWID;
CREATE TABLE versions (blob TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE accepted (workload TEXT, blob TEXT, device TEXT, data TEXT, PRIMARY KEY (workload, blob, device))
                   WITHOUT ROWID;
CREATE TABLE commits (folder TEXT PRIMARY KEY, head TEXT, blobs TEXT) WITHOUT ROWID;
"""
LOCKED = 10.0
"""Seconds to wait for another process that writes the index."""
BUSY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
)
"""SQLite errors that do not mean that the file is damaged."""
MANY = 20
"""Maximum number of files that are read without a message."""


class DamagedError(sqlite3.DatabaseError):
    """The index contains something that this version never writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run without its workloads, and how many of them have each verdict."""

    run: Run
    counts: Mapping[str, int]


def using(
    folder: Path, baselines: Path, work: Callable[[Index], T], say: Callable[[str], None] = lambda line: None
) -> T:
    """Return `work(index)` for the index over the runs in `folder`, after bringing the index up to date.

    `work` may be called again with a rebuilt index, so it should only read. `say` receives a line before a long update.
    """
    path = folder / NAME
    for _ in range(2):
        try:
            with _connected(str(path)) as connection:
                return work(Index(connection, folder, baselines, say))
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in BUSY:  # the extended codes have more bits
                break
            for suffix in ("", "-journal", "-wal", "-shm"):
                with suppress(OSError):
                    os.unlink(f"{path}{suffix}")
    with _connected(":memory:") as connection:
        return work(Index(connection, folder, baselines, say))


def add_last(folder: Path, baselines: Path) -> None:
    """Bring the index up to date after a run, with the steps of its workloads.

    If more than MANY runs or versions of the baselines are new, they are left to the next `using`. So is everything if
    the update fails: nothing is lost, because the run is in its file.
    """
    with suppress(sqlite3.DatabaseError, OSError), _connected(str(folder / NAME)) as connection:
        Index(connection, folder, baselines, lambda line: None, most=MANY).steps()


@contextmanager
def _connected(place: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(place, timeout=LOCKED, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # an index that a crash damages is rebuilt
        if not _is_ours(connection):
            with _writing(connection):
                if not _is_ours(connection):  # another process may have made the tables meanwhile
                    _make_tables(connection)
        (problem,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if problem != "ok":
            raise DamagedError(problem)
        yield connection


def _is_ours(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA user_version").fetchone()[0] == VERSION)


def _make_tables(connection: sqlite3.Connection) -> None:
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        connection.execute(f'DROP TABLE "{name}"')
    for statement in filter(str.strip, TABLES.split(";")):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


class Index:
    """The index, brought up to date with the files. Raises DamagedError if its contents cannot be read.

    most  maximum number of new files, and of new versions of the baselines, to read; if more are new, none is read
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        folder: Path,
        baselines: Path,
        say: Callable[[str], None],
        most: float = math.inf,
    ) -> None:
        self._connection, self._folder, self._baselines, self._say = connection, folder, baselines, say
        self._most = most
        self.problems: list[str] = []
        """A line for each file that cannot be read."""
        self._blobs: dict[str, int] = {}
        """Hash of each version of the baselines → its position, the oldest first."""
        self._heads: dict[str, Run] = {}
        self._read_runs()
        self._read_baselines()
        rows = self._rows("SELECT problem FROM runs WHERE problem IS NOT NULL ORDER BY name")
        self.problems += [problem for (problem,) in rows]

    # --- queries ----------------------------------------------------------------------------------------------------

    def count(self, device: str | None = None) -> int:
        """Return the number of runs, of all devices or of one."""
        where, parameters = _on(device)
        return int(self._rows(f"SELECT count(*) FROM runs WHERE problem IS NULL{where}", parameters)[0][0])

    def devices(self) -> dict[str, str]:
        """Return the devices of all runs: slug → name."""
        rows = self._rows("SELECT device, max(head) FROM runs WHERE problem IS NULL GROUP BY device ORDER BY device")
        return {device: self._record(Run, head).machine.device_name for device, head in rows}

    def runs(self, limit: int, device: str | None = None) -> list[ListedRun]:
        """Return the last runs, the newest first."""
        where, parameters = _on(device)
        query = f"SELECT head, counts FROM runs WHERE problem IS NULL{where} ORDER BY started DESC, name DESC LIMIT ?"
        rows = self._rows(query, (*parameters, limit))
        return [ListedRun(run=self._record(Run, head), counts=self._json(counts)) for head, counts in rows]

    def workloads(self) -> list[str]:
        """Return the ids of all workloads."""
        return [id for (id,) in self._rows("SELECT DISTINCT workload FROM figures ORDER BY workload")]

    def series(self, workload: str, device: str | None = None) -> list[tuple[Run, Figures]]:
        """Return the runs of a workload, the oldest first."""
        where, parameters = _on(device)
        query = (
            "SELECT head, data FROM figures JOIN runs ON runs.name = figures.run "
            f"WHERE workload = ?{where} ORDER BY started, name"
        )
        rows = self._rows(query, (workload, *parameters))
        return [(self._head(head), self._record(Figures, data)) for head, data in rows]

    def _timed(self, workload: str) -> list[Timed]:
        query = (
            "SELECT head, seconds, conditions FROM figures JOIN runs ON runs.name = figures.run "
            "WHERE workload = ? AND seconds IS NOT NULL ORDER BY started, name"
        )
        rows = self._rows(query, (workload,))
        return [Timed(run=self._head(head), seconds=seconds, conditions=kind) for head, seconds, kind in rows]

    def steps(self) -> dict[str, list[Step]]:
        """Return the steps of every workload that has one, on all devices; empty if ruptures is not installed.

        Steps are computed again only for workloads whose runs have changed.
        """
        if not steps.is_available():
            return {}
        query = "SELECT workload FROM figures EXCEPT SELECT workload FROM steps WHERE rule = ?"
        unknown = [id for (id,) in self._rows(query, (steps.RULE,))]
        if unknown:
            found = [(id, steps.RULE, _text([to_json(s) for s in steps.find(self._timed(id))])) for id in unknown]
            with _writing(self._connection):
                self._connection.executemany("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", found)
        rows = self._rows("SELECT workload, data FROM steps WHERE data != '[]' ORDER BY workload")
        return {id: [self._made(Step, step) for step in self._json(data)] for id, data in rows}

    def accepted(self, workload: str) -> dict[str, list[Accepted]]:
        """Return the accepted figures of a workload over time by device, the oldest first."""
        rows = self._rows("SELECT blob, device, data FROM accepted WHERE workload = ?", (workload,))
        rows = [row for row in rows if row[0] in self._blobs]
        found: dict[str, dict[str, Accepted]] = {}
        for _, device, data in sorted(rows, key=lambda row: self._blobs[row[0]]):
            made = self._record(Accepted, data)
            found.setdefault(device, {})[made.date] = made  # of versions with the same date, the latest counts
        return {device: [dated[date] for date in sorted(dated)] for device, dated in found.items()}

    # --- update -----------------------------------------------------------------------------------------------------

    def _read_runs(self) -> None:
        """Bring the runs up to date with the files."""
        there = self._files()
        rows = self._rows("SELECT name, size, changed FROM runs")
        known = {name: (size, changed) for name, size, changed in rows}
        gone = [name for name, about in known.items() if there.get(name) != about]
        new = sorted(name for name, about in there.items() if known.get(name) != about)
        if not (gone or new) or len(new) > self._most:
            return
        if len(new) > MANY:
            self._say(f"indexing {len(new)} runs")
        with _writing(self._connection):
            for name in gone:
                self._forget(name)
            for name in new:
                self._add(name, *there[name])

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the runs' files: name → (size in bytes, time of the last change in ns)."""
        found = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.name.endswith(store.SUFFIX) or entry.name.startswith("."):
                    continue
                if store.storable(entry.name) != entry.name:
                    self.problems.append(printable(f"{entry.path}: its name is not UTF-8; rename it"))
                    continue
                with suppress(OSError):  # a link to nothing, or a file that was just removed
                    about = entry.stat()
                    found[entry.name] = (about.st_size, about.st_mtime_ns)
        return found

    def _forget(self, name: str) -> None:
        run = "SELECT workload FROM figures WHERE run = ?"
        self._connection.execute(f"DELETE FROM steps WHERE workload IN ({run})", (name,))
        self._connection.execute("DELETE FROM figures WHERE run = ?", (name,))
        self._connection.execute("DELETE FROM runs WHERE name = ?", (name,))

    def _add(self, name: str, size: int, changed: int) -> None:
        insert = "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        try:
            run, data = store.read(self._folder / name)
        except PerfsuiteError as error:
            self._connection.execute(insert, (name, size, changed, None, None, None, None, str(error)))
            return
        head = _text(compact(replace(run, workloads={})))
        about = (run.when.timestamp(), run.machine.device, head, _text(run.counts()), None)
        self._connection.execute(insert, (name, size, changed, *about))
        figures = []
        for id, found in run.workloads.items():
            timed = (found.optimized_s, steps.conditions(run, found)) if steps.has_time(found) else (None, None)
            figures.append((id, name, *timed, _text(data["workloads"][id])))
        self._connection.executemany("INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?, ?)", figures)
        self._connection.executemany("DELETE FROM steps WHERE workload = ?", [(id,) for id in run.workloads])

    def _read_baselines(self) -> None:
        """Bring the accepted figures up to date with git and the work tree."""
        present = accepted.present(self._baselines)
        committed = self._committed()
        self._blobs = {blob: n for n, blob in enumerate([*committed, *(v.blob for v in present)])}
        known = {blob for (blob,) in self._rows("SELECT blob FROM versions")}
        every = {**{blob: Version(blob=blob) for blob in committed}, **{v.blob: v for v in present}}
        new = [version for blob, version in every.items() if blob not in known]
        if len(new) > self._most:
            return
        if len(new) > MANY:
            self._say(f"indexing {len(new)} versions of the baselines")
        for version in new:
            try:
                found = list(accepted.figures(version, self._baselines))
            except PerfsuiteError as error:
                self.problems.append(str(error))
                continue
            rows = [(id, version.blob, device, _text(compact(a))) for device, id, a in found]
            with _writing(self._connection):
                self._connection.executemany("INSERT OR REPLACE INTO accepted VALUES (?, ?, ?, ?)", rows)
                self._connection.execute("INSERT OR REPLACE INTO versions VALUES (?)", (version.blob,))

    def _committed(self) -> list[str]:
        """Return the hashes of the committed versions, the oldest first. Git's log is read once for each HEAD."""
        head = accepted.head(self._baselines)
        if not head:
            return []
        place = store.storable(str(self._baselines.resolve()))
        rows = self._rows("SELECT blobs FROM commits WHERE folder = ? AND head = ?", (place, head))
        if rows:
            blobs: list[str] = self._json(rows[0][0])
            return blobs
        found = [version.blob for version in accepted.committed(self._baselines)]
        with _writing(self._connection):
            self._connection.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?)", (place, head, _text(found)))
        return found

    # --- rows -------------------------------------------------------------------------------------------------------

    def _rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._connection.execute(query, parameters).fetchall()

    def _head(self, text: Any) -> Run:
        """Return a run without its workloads. It is parsed once, although all its workloads refer to it."""
        if text not in self._heads:
            self._heads[text] = self._record(Run, text)
        return self._heads[text]

    def _record(self, kind: type[T], text: Any) -> T:
        return self._made(kind, self._json(text))

    @staticmethod
    def _made(kind: type[T], data: Any) -> T:
        try:
            return from_json(kind, data)
        except PerfsuiteError as error:
            raise DamagedError(str(error)) from None

    @staticmethod
    def _json(text: Any) -> Any:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedError(str(error)) from None


def _on(device: str | None) -> tuple[str, tuple[str, ...]]:
    """Return (SQL condition, its parameters) for the runs of a device; both are empty for all devices."""
    return (" AND runs.device = ?", (device,)) if device else ("", ())


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
