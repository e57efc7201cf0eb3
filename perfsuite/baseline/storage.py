"""`baselines/<device>.json`: the accepted entries, in pytest-benchmark's schema.

A workload is two benchmark records, `<id>@reference` and `<id>@optimized`. Their `stats` contain the block seconds, as
pytest-benchmark stores them. The rest of the `Entry` is `extra_info["perfsuite"]` of the optimized record. Next to it,
`extra_info["digest"]` is a digest of both records as they are written. The header has its own digest. The digests
reveal an edit by hand, even of a figure that only pytest-benchmark reads. Entries are sorted by id, and a record that
did not change is written back as it was, so accepting one workload changes only that workload's lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from perfsuite.baseline.accepted_entries import SIDES, Baseline, Entry, Process, rounded, significant
from perfsuite.codec import from_json, to_json
from perfsuite.errors import BaselineError, PerfsuiteError, printable
from perfsuite.records import Machine
from perfsuite.system.folders import SCRATCH, own_folder

SCHEMA = 2
"""Version of the file format. In version 2 the digests cover everything that is written. In version 1 they left out
pytest-benchmark's own fields."""
LOCK_SECONDS = 60.0
"""Seconds after which a lock counts as stuck. An acceptance writes in well under a second."""
ANEW = "move it away and record a baseline with `perfsuite accept`"
RESTORE = f"restore it from git, or {ANEW}"
INTEGER_MAX = 2**63
"""Bound on the absolute value of integers in a file. No count comes near it, and an arbitrarily large integer would
overflow when it is converted to a float."""
LONGEST_SHOWN = 160
"""Most characters of a name or value from a damaged file that a message shows. Such a text can have any length."""


def load(path: str | os.PathLike[str]) -> Baseline:
    """Return the baseline in a file.

    Raises BaselineError, with a one-line message that contains the remedy, if the file is damaged or is not a baseline
    of perfsuite.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BaselineError(
            f"{path}: there is no baseline for this device; record one with `perfsuite accept`"
        ) from None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: not text (byte {error.start}); {RESTORE}") from None
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    try:
        return parse(text)
    except PerfsuiteError as error:
        raise BaselineError(f"{path}: {_one_line(str(error))}") from None
    except RecursionError:
        # json's C parser allows deeper nesting than the code that reads its result.
        raise BaselineError(f"{path}: not valid JSON (nested too deeply); {RESTORE}") from None


def parse(text: str) -> Baseline:
    """Return the baseline in a file's text.

    Raises PerfsuiteError, with a one-line message without the file's name, if the text is damaged or is not a baseline
    of perfsuite.
    """
    data = _json(text)
    ours = data.get("perfsuite")
    if not isinstance(ours, dict):
        whose = "a pytest-benchmark file that perfsuite did not write" if "benchmarks" in data else "not a baseline"
        raise BaselineError(f"{whose}; {ANEW}")
    _check_schema(ours.get("schema"))
    try:
        machine = from_json(Machine, ours.get("machine"))
    except PerfsuiteError as error:
        raise BaselineError(f"{_short(error)}; {RESTORE}") from None
    if ours.get("digest") != _header_digest(data):
        raise BaselineError(f"the header was edited by hand (its digest does not match); {RESTORE}")
    return Baseline(machine=machine, entries=_parse_entries(data.get("benchmarks")))


def _json(text: str) -> dict[str, Any]:
    if not text.strip():
        raise BaselineError(f"the file is empty; {RESTORE}")
    try:
        data = json.loads(
            text,
            parse_constant=_not_finite,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_without_duplicates,
        )
    except json.JSONDecodeError as error:
        ends = text.rstrip()
        # For a file that ends inside a string, the error is at the beginning of the string, not at the end of the file.
        what = "cut short or damaged" if error.pos >= len(ends) - 1 or not ends.endswith("}") else "not valid JSON"
        raise BaselineError(f"{what} at line {error.lineno}, column {error.colno}; {RESTORE}") from None
    except ValueError as error:
        raise BaselineError(f"not valid JSON ({_short(error)}); {RESTORE}") from None
    if not isinstance(data, dict):
        raise BaselineError(f"holds a {type(data).__name__}, not a table; {RESTORE}")
    return data


def _check_schema(schema: Any) -> None:
    if type(schema) is not int or schema < 1:
        raise BaselineError(f"schema {_short(repr(schema))} is unknown; {RESTORE}")
    if schema > SCHEMA:
        raise BaselineError(f"schema {schema} is newer than this perfsuite knows ({SCHEMA}); upgrade perfsuite")
    if schema < SCHEMA:
        raise BaselineError(f"schema {schema} is older than this perfsuite's ({SCHEMA}); {ANEW}")


def _parse_entries(benchmarks: Any) -> dict[str, Entry]:
    if not isinstance(benchmarks, list):
        raise BaselineError(f"has no list of benchmarks; {RESTORE}")
    records: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    for number, record in enumerate(benchmarks, 1):
        name = record.get("fullname") if isinstance(record, dict) else None
        key, _, side = name.rpartition("@") if isinstance(name, str) else ("", "", "")
        if not key or side not in records:
            raise BaselineError(f"benchmark {number} is not a side of a workload ({_short(repr(name))}); {RESTORE}")
        if key in records[side]:
            raise BaselineError(
                f"{_short(key)} appears twice; remove one of the two records by `git checkout` or accept it again"
            )
        records[side][key] = record
    for key in sorted(set(records["reference"]) ^ set(records["optimized"])):
        raise BaselineError(f"{_short(key)} has one of its two records only; {RESTORE}")
    entries = {}
    for key in sorted(records["optimized"]):
        try:
            entries[key] = _parse_entry(key, {side: records[side][key] for side in SIDES})
        except PerfsuiteError as error:
            raise BaselineError(f"{_short(key)}: {_short(error)}; {RESTORE}") from None
    return entries


def _parse_entry(key: str, records: Mapping[str, Any]) -> Entry:
    info = records["optimized"].get("extra_info")
    data = info.get("perfsuite") if isinstance(info, dict) else None
    if not isinstance(info, dict) or not isinstance(data, dict):
        raise BaselineError("the optimized record has no perfsuite entry")
    entry = _entry_in(records, data)
    if entry.id != key:
        raise BaselineError(f"holds the entry of {entry.id!r}")
    _check_entry(entry)
    if info.get("digest") != _digest(records):
        raise BaselineError("was edited by hand (its digest does not match)")
    return entry


def _entry_in(records: Mapping[str, Any], data: Mapping[str, Any]) -> Entry:
    blocks = {}
    for side, record in records.items():
        stats = record.get("stats")
        blocks[side] = stats.get("data") if isinstance(stats, dict) else None
    return from_json(Entry, {**data, "blocks_s": blocks})


def _check_entry(entry: Entry) -> None:
    if not entry.sessions or not all(s.processes for s in entry.sessions):
        raise BaselineError("has a session without processes, or none")
    for session in entry.sessions:
        for process in session.processes:
            _check_process(process)
    for side in SIDES:
        if side not in entry.sides or not entry.blocks_s.get(side):
            raise BaselineError(f"has no summary or no block seconds of the {side} side")
        if not all(s > 0 for s in (entry.sides[side].seconds, *entry.blocks_s[side])):
            raise BaselineError(f"has a time of the {side} side that is not above 0")
    try:
        datetime.fromisoformat(entry.accepted)
    except ValueError:
        raise BaselineError(f"accepted is {entry.accepted!r}, not a date") from None


def _check_process(process: Process) -> None:
    if "reference" not in process.log_ratios:
        raise BaselineError("has a process without log_ratios to the reference")
    for other, values in process.log_ratios.items():
        if not values:
            raise BaselineError(f"log_ratios to {other} are empty")
    for side in SIDES:
        if not process.seconds.get(side, 0) > 0:
            raise BaselineError(f"has a process without seconds of the {side} side")
    if not all(s > 0 for s in process.anchors.values()):
        raise BaselineError("has a control kernel's time that is not above 0")


def update(
    path: str | os.PathLike[str], change: Callable[[Baseline | None], Baseline]
) -> tuple[Baseline | None, Baseline]:
    """Read, change and write a baseline under its lock. Return (old, new). `change` gets None if there is no file.

    The replacement is atomic. Raises BaselineError as `load` and `save` do. An error that `change` raises propagates
    and leaves the file as it was.
    """
    path = Path(path)
    with _locked(path):
        old = load(path) if path.exists() else None
        new = change(old)
        _write(path, new)
    return old, new


def save(path: str | os.PathLike[str], baseline: Baseline) -> None:
    """Write the baseline atomically, under its lock. Raises BaselineError if the folder cannot be written."""
    path = Path(path)
    with _locked(path):
        _write(path, baseline)


def check_writable(path: Path) -> None:
    """Raise BaselineError if its folder, or the nearest one above it that exists, cannot be written."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be written ({error.strerror or error}); make the folder writable, and accept again"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    # Next to the file, because the temporary folder may differ between processes.
    place = path.resolve()
    lock = FileLock(place.parent / SCRATCH / f"{place.name}.lock", mode=0o666)
    try:
        own_folder(Path(lock.lock_file).parent)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise BaselineError(
            f"{path}: another process has been writing it for {LOCK_SECONDS:.0f} s; end it, then accept again"
        ) from None
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be written ({error.filename}: {error.strerror or error}); make the folder writable, and "
            "accept again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, baseline: Baseline) -> None:
    path = path.resolve()
    temporary: str | None = None
    try:
        text = _render(baseline, _raw_records(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            stale.unlink()  # left by a writer that was killed; the lock excludes a running one
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        # A reason from a command line may contain surrogates, which JSON escapes in the same way.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed: make the folder writable, "
            "with space on it, and accept again"
        ) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _raw_records(path: Path) -> dict[str, Any]:
    """Return the raw content of the file: the date of its header and, by entry, the records whose digest matches. Empty
    if the file is damaged."""
    try:
        data = json.loads(path.read_bytes())
        if data["perfsuite"]["digest"] != _header_digest(data):
            return {}
        pairs: dict[str, dict[str, Any]] = {}
        for record in data["benchmarks"]:
            key, _, side = record["fullname"].rpartition("@")
            pairs.setdefault(key, {})[side] = record
        infos = {key: pair["optimized"]["extra_info"] for key, pair in pairs.items()}
        sound = [(infos[k]["perfsuite"], pair) for k, pair in pairs.items() if infos[k]["digest"] == _digest(pair)]
        return {"datetime": data["datetime"], "records": {_canonical(_entry_in(p, own)): p for own, p in sound}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, PerfsuiteError):
        return {}


def _render(baseline: Baseline, old: Mapping[str, Any]) -> str:
    entries = [rounded(baseline.entries[key]) for key in sorted(baseline.entries)]
    records = []
    for entry in entries:
        pair = old.get("records", {}).get(_canonical(entry)) or _records(entry)
        records += [pair[side] for side in SIDES]
    machine = baseline.machine
    header: dict[str, Any] = {
        "perfsuite": {"schema": SCHEMA, "machine": to_json(machine)},
        "machine_info": {
            "node": machine.device,
            "machine": machine.platform,
            "system": machine.platform.split("-")[0],
            "python_implementation": "CPython",
            "python_version": machine.python,
            "device": machine.device_name,
            "cpu": {"brand_raw": machine.cpu, "count": machine.cores},
        },
        # Each workload was accepted at its own revision and date, which are in its extra_info.
        "commit_info": {"id": "unversioned", "time": None, "dirty": False, "branch": None, "project": "perfsuite"},
        # Date of the first write: a date that changed with each acceptance would cause a conflict in every merge.
        "datetime": old.get("datetime") or min((e.accepted for e in entries), default="1970-01-01T00:00:00+00:00"),
        "version": _benchmark_version(),
    }
    header["perfsuite"]["digest"] = _header_digest(header)
    return laid_out({**header, "benchmarks": records}, "") + "\n"


def _benchmark_version() -> str:
    import pytest_benchmark

    return str(pytest_benchmark.__version__)


def _records(entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the entry's two records, with their digest in the optimized one."""
    from pytest_benchmark import stats as theirs

    data = to_json(entry)
    del data["blocks_s"]
    records: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        stats: Any = theirs.Stats()  # type: ignore[no-untyped-call]  # pytest-benchmark has no types
        for seconds in entry.blocks_s[side]:
            stats.update(seconds)
        figures = {k: significant(v) if isinstance(v, float) else v for k, v in stats.as_dict().items()}
        records[side] = {
            "name": f"{entry.id.partition('::')[2] or entry.id}@{side}",
            "fullname": f"{entry.id}@{side}",
            "group": entry.id,
            "params": None,
            "param": None,
            "options": {"clock": entry.clock, "direction": entry.direction, "dtype": entry.dtype},
            "extra_info": {"perfsuite": data} if side == "optimized" else {},
            "stats": {**figures, "iterations": 1, "data": list(entry.blocks_s[side])},
        }
    records["optimized"]["extra_info"]["digest"] = _digest(records)
    return records


def _digest(records: Mapping[str, Any]) -> str:
    """Return the digest of a workload's two records, over every field except the digest itself."""
    optimized = records["optimized"]
    info = {k: v for k, v in optimized["extra_info"].items() if k != "digest"}
    return _hashed({**records, "optimized": {**optimized, "extra_info": info}})


def _header_digest(data: Mapping[str, Any]) -> str:
    """Return the digest of a file's header, over every field except the digest itself and the benchmarks, which have
    their own."""
    header = {k: v for k, v in data.items() if k != "benchmarks"}
    return _hashed({**header, "perfsuite": {k: v for k, v in data["perfsuite"].items() if k != "digest"}})


def _hashed(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def laid_out(value: Any, indent: str, step: int = 2) -> str:
    """Return JSON with each field of a dict on its own line and each list of numbers on one line, so that diffs are
    readable. Each level is indented by `step` more spaces."""
    inner = indent + " " * step
    if isinstance(value, dict) and value:
        fields = (f"{inner}{json.dumps(str(k))}: {laid_out(v, inner, step)}" for k, v in value.items())
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        return "[\n" + ",\n".join(inner + laid_out(v, inner, step) for v in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _not_finite(token: str) -> float:
    raise ValueError(f"{token} is not a number")


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{_short(token, 20)} is out of range")
    return value


def _whole(token: str) -> int:
    # Python does not parse integers of more than a few thousand digits, and its message is about Python's own limit.
    if len(token) > 20 or abs(int(token)) >= INTEGER_MAX:
        raise ValueError(f"{_short(token, 20)} is out of range")
    return int(token)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(k for k, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"field {_short(repr(twice))} appears twice")
    return table


def _short(value: object, most: int = LONGEST_SHOWN) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _one_line(text: str) -> str:
    """Return text from a damaged file in a form that a terminal can show: without line breaks, escape characters or
    surrogates."""
    return printable(" ".join(text.split()))
