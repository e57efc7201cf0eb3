"""Fuzzing of the baseline file: damaged copies of a real one, and writers killed while they replace it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from builders import MACHINE, entry, measurement, workload_id
from scale import FULLY, count
from scratch import ROOT

from perfsuite.baseline import storage as module
from perfsuite.baseline.accepted_entries import Baseline, Entry, merge
from perfsuite.baseline.priors import suite_noise
from perfsuite.baseline.storage import load, save, update
from perfsuite.codec import to_json
from perfsuite.errors import BaselineError
from perfsuite.gate import decision, estimates
from perfsuite.records import Measurement, SideRecord

REAL = ROOT / "baselines/nvidia-h200.json"
DAMAGED = count(quick=50, full=1000)
KEPT = 6
KILLS = count(quick=10, full=200)
REMEDIES = ("restore it from git", "upgrade perfsuite", "`git checkout`", "record a baseline with `perfsuite accept`")
LINE = 1000
"""Maximum number of characters of a readable line."""

Place: TypeAlias = tuple[str | int, ...]
"""Keys from the top of the JSON down to a value."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail a test that hangs."""

    def expire(*_: object) -> None:
        raise AssertionError(f"hangs: still at work after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- damages --------------------------------------------------------------------------------------------------------


def nodes(value: Any, here: Place = ()) -> Iterator[Place]:
    yield here
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from nodes(each, (*here, key))


class Sound:
    """An undamaged file, written to `path`, with every KEPT-th workload of the real file.

    It has the file's bytes, its lines, and the places in its JSON that can be damaged.
    """

    def __init__(self, path: Path) -> None:
        real = load(REAL)
        save(path, replace(real, entries=dict(sorted(real.entries.items())[::KEPT])))
        self.bytes = path.read_bytes()
        self.lines = self.bytes.splitlines(keepends=True)
        self.baseline = load(path)
        self.data: Any = json.loads(self.bytes)
        self.places = [p for p in nodes(self.data) if p]
        # 90% of the places are numbers in lists; fields should be damaged as often.
        self.fields = [p for p in self.places if isinstance(p[-1], str)]
        self.numbers = [p for p in self.places if type(self.at(p)) in (int, float)]
        self.lists = [p for p in self.places if isinstance(self.at(p), list) and self.at(p)]

    def at(self, place: Place) -> Any:
        value = self.data
        for key in place:
            value = value[key]
        return value

    def place(self, rng: random.Random) -> Place:
        return rng.choice(rng.choice((self.places, self.fields)))

    def written(self, place: Place, text: str) -> bytes:
        """Return the file with this text in place of a value."""
        data = json.loads(self.bytes)
        parent = data
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = "@@@"
        return json.dumps(data, indent=1).replace('"@@@"', text).encode("utf-8", "surrogatepass")

    def table_with(self, place: Place, change: Callable[[list[tuple[str, str]], int], object]) -> bytes:
        """Return the file after `change(fields, index)` of the table around `place`; a field is (name, text)."""
        *above, name = place
        table = self.at(tuple(above))
        fields = [(k, json.dumps(v)) for k, v in table.items()]
        change(fields, list(table).index(str(name)))
        text = "{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in fields) + "}"
        return self.written(tuple(above), text) if above else text.encode()


def truncated(sound: Sound, rng: random.Random) -> bytes:
    return sound.bytes[: rng.randrange(len(sound.bytes) - 2)]


def flipped(sound: Sound, rng: random.Random) -> bytes:
    data = bytearray(sound.bytes)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def without_lines(sound: Sound, rng: random.Random) -> bytes:
    first = rng.randrange(len(sound.lines))
    return b"".join(sound.lines[:first] + sound.lines[first + rng.choice((1, 1, 3, 40)) :])


def with_a_line_twice(sound: Sound, rng: random.Random) -> bytes:
    first = rng.randrange(len(sound.lines))
    return b"".join(sound.lines[: first + 1] + sound.lines[first:])


def with_lines_swapped(sound: Sound, rng: random.Random) -> bytes:
    lines = list(sound.lines)
    first = rng.randrange(len(lines) - 1)
    second = rng.choice((first + 1, rng.randrange(len(lines))))
    lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)


def of_another_type(sound: Sound, rng: random.Random) -> bytes:
    others = ("null", "true", "0", "-7", "1.5", '"x"', "[]", "{}", "[[1]]", '{"a": 1}', '"\\ud800"', '"\\u001b[2J"')
    return sound.written(sound.place(rng), rng.choice(others))


def not_finite(sound: Sound, rng: random.Random) -> bytes:
    return sound.written(rng.choice(sound.numbers), rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999")))


def of_another_size(sound: Sound, rng: random.Random) -> bytes:
    place = rng.choice(sound.numbers)
    value = sound.at(place)
    return sound.written(place, rng.choice((repr(-value or -1), "0", "0.0", "1e300", "1e-300", repr(value * 1.01 + 1))))


def a_huge_integer(sound: Sound, rng: random.Random) -> bytes:
    digits = rng.choice((19, 25, 309, 400, 4300, 4301, 20_000))
    return sound.written(sound.place(rng), rng.choice(("", "-")) + "9" * digits)


def renamed(sound: Sound, rng: random.Random) -> bytes:
    names = ("", "x", "digest", "id", "accepted ", "\ud800", "\x00", "n" * 10_000)

    def change(fields: list[tuple[str, str]], index: int) -> None:
        fields[index] = (rng.choice(names), fields[index][1])

    return sound.table_with(rng.choice(sound.fields), change)


def without_a_field(sound: Sound, rng: random.Random) -> bytes:
    return sound.table_with(rng.choice(sound.fields), lambda fields, index: fields.pop(index))


def with_a_field_twice(sound: Sound, rng: random.Random) -> bytes:
    value = rng.choice(("null", "1.5", None))

    def change(fields: list[tuple[str, str]], index: int) -> None:
        name, text = fields[index]
        fields.append((name, value or text))

    return sound.table_with(rng.choice(sound.fields), change)


def nested(sound: Sound, rng: random.Random) -> bytes:
    depth = rng.choice((2, 100, 300, 450, 600, 800, 950, 3000, 100_000))
    begin, end = rng.choice((("[", "]"), ('{"a": ', "}")))
    return sound.written(sound.place(rng), begin * depth + "1" + end * depth)


def not_utf_8(sound: Sound, rng: random.Random) -> bytes:
    place = rng.randrange(len(sound.bytes))
    bad = rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x80", b"\x00", b"\xfe\xff"))
    return sound.bytes[:place] + bad + sound.bytes[place:]


def of_another_schema(sound: Sound, rng: random.Random) -> bytes:
    schemas = ("0", "-1", "1", "3", "99", "2.0", "true", "null", '"2"', "[2]", "9" * 18, '{"a": "' + "x" * 5000 + '"}')
    return sound.written(("perfsuite", "schema"), rng.choice(schemas))


def with_an_empty_list(sound: Sound, rng: random.Random) -> bytes:
    return sound.written(rng.choice(sound.lists), "[]")


DAMAGES: tuple[Callable[[Sound, random.Random], bytes], ...] = (
    truncated,
    truncated,
    flipped,
    flipped,
    without_lines,
    with_a_line_twice,
    with_lines_swapped,
    of_another_type,
    not_finite,
    of_another_size,
    a_huge_integer,
    renamed,
    without_a_field,
    with_a_field_twice,
    nested,
    not_utf_8,
    of_another_schema,
    with_an_empty_list,
)


# --- what is loaded from a damaged file -----------------------------------------------------------------------------


def figures(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from figures(each)
    elif isinstance(value, list):
        for each in value:
            yield from figures(each)
    elif isinstance(value, (int, float)):
        yield value


def runs_of(accepted: Entry) -> tuple[Measurement, ...]:
    """Return the measurements of a gate in which nothing has changed since the entry was accepted."""
    fields = {
        name: getattr(accepted, name)
        for name in ("id", "pair", "workload", "device", "clock", "direction", "dtype", "sizes", "few")
    }
    made = []
    for process in accepted.sessions[0].processes[:2]:
        sides = {
            name: SideRecord(
                device_s=summary.device_s,
                wall_s=None,
                blocks_s=(summary.seconds,),
                peak_bytes=summary.peak_bytes,
                host_syncs=summary.host_syncs,
                launches=summary.launches,
            )
            for name, summary in accepted.sides.items()
        }
        ratios = {**process.log_ratios, "accepted": (0.0,) * len(process.log_ratios["reference"])}
        made.append(Measurement(seed=0, sides=sides, log_ratios=ratios, **fields))
    return tuple(made)


def assert_wholly_valid(left: Baseline, sound: Baseline) -> None:
    """Assert that all loaded entries equal the accepted ones; whole workloads may be missing."""
    assert left.machine == sound.machine
    assert all(sound.entries.get(key) == value for key, value in left.entries.items())
    assert all(math.isfinite(f) for f in figures(to_json(left)))
    for accepted in left.entries.values():
        processes = [p for s in accepted.sessions for p in s.processes]
        assert processes
        assert all(s > 0 for p in processes for s in p.seconds.values())
        assert all(s > 0 for blocks in accepted.blocks_s.values() for s in blocks)
    subjects = [
        estimates.Subject(id=key, runs=runs_of(e), entry=e, promises=e.promises, against="itself")
        for key, e in left.entries.items()
    ]
    answers = decision.analyse(subjects, suite_noise(left.entries), selected=max(1, len(left.entries)))
    assert set(answers) == set(left.entries)
    assert all(isinstance(a, decision.Undecided) or a.status.green for a in answers.values())


def test_damaged_files_are_refused_or_load_only_accepted_entries(tmp_path: Path) -> None:
    path = tmp_path / REAL.name
    sound = Sound(path)
    assert len(sound.baseline.entries) > 1
    assert_wholly_valid(sound.baseline, sound.baseline)
    refused: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    with at_most(300):
        for number in range(DAMAGED):
            damage = DAMAGES[number % len(DAMAGES)]
            name = f"{damage.__name__} {number}"
            data = damage(sound, random.Random(number))
            path.write_bytes(data)
            try:
                left = load(path)
            except BaselineError as error:
                message = str(error)
                assert message.startswith(f"{path}: "), name
                assert len(message.splitlines()) == 1, name
                assert message.isprintable(), name
                assert len(message) < LINE, name
                assert any(r in message for r in REMEDIES), (name, message)
                refused[damage.__name__] += 1
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            else:
                assert_wholly_valid(left, sound.baseline)
                loaded[damage.__name__] += 1
    print(f"refused {refused.total()}, loaded {loaded.total()}: {dict(loaded)}")
    assert refused.total() + loaded.total() == DAMAGED
    assert refused.total() > 0.95 * DAMAGED
    assert set(refused) == {d.__name__ for d in DAMAGES}


def test_a_changed_digit_anywhere_is_refused(tmp_path: Path) -> None:
    """A changed digit leaves a plausible figure, which only a digest can detect."""
    path, rng = tmp_path / REAL.name, random.Random(11)
    sound = Sound(path)
    text = sound.bytes.decode()
    digits = [m.start() for m in re.finditer(r"\d", text)]
    for at in rng.sample(digits, count(quick=30, full=100)):
        path.write_text(text[:at] + str((int(text[at]) + 1) % 9 + 1) + text[at + 1 :])
        with pytest.raises(BaselineError, match=r"restore it from git|upgrade perfsuite"):
            load(path)


def test_white_space_does_not_change_the_loaded_baseline(tmp_path: Path) -> None:
    path = tmp_path / REAL.name
    sound = Sound(path)
    for indent in (None, 0, 3):
        path.write_text(json.dumps(sound.data, indent=indent, ensure_ascii=indent is None))
        assert load(path) == sound.baseline


def test_removed_workloads_and_another_order_are_valid(tmp_path: Path) -> None:
    path = tmp_path / REAL.name
    sound = Sound(path)
    data = json.loads(sound.bytes)
    data["benchmarks"].reverse()
    path.write_text(json.dumps(data))
    assert load(path) == sound.baseline
    del data["benchmarks"][:2]
    path.write_text(json.dumps(data))
    assert_wholly_valid(load(path), sound.baseline)
    assert len(load(path).entries) == len(sound.baseline.entries) - 1


# --- writers that are killed ----------------------------------------------------------------------------------------

WRITERS = """
# A writer for each line of input, forked so that it starts at once, and killed; its exit status for an answer.
import io, json, os, signal, sys, tempfile, time
sys.path[:0] = {paths!r}
from perfsuite.baseline.accepted_entries import merge
from perfsuite.baseline.storage import load, update
import filelock, pytest_benchmark.stats

path, *versions = sys.argv[1:]
baselines = [load(v) for v in versions]


def write(number):
    new = baselines[number % len(baselines)]
    update(path, lambda old: merge(old, list(new.entries.values()), machine=new.machine))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner, name, when, nth):
    real, calls = getattr(owner, name), 0

    def call(*arguments, **given):
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            die()
        result = real(*arguments, **given)
        if calls == nth and when == "half":
            result.write = lambda text, write=result.write: (write(text[: len(text) // 2]), result.flush(), die())
        if calls == nth and when == "after":
            die()
        return result

    setattr(owner, name, call)


for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            if "point" in order:
                module, name, when, nth = order["point"]
                die_at(dict(os=os, tempfile=tempfile)[module], name, when, nth)
                write(order["first"])
            else:
                for number in range(order["first"], 10**9):
                    write(number)
        finally:
            os._exit(1)
    if "after" in order:
        time.sleep(order["after"])
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Writers:
    """Process that starts writers and kills them."""

    def __init__(self, path: Path, versions: Sequence[Path]) -> None:
        code = WRITERS.format(paths=[str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(path), *map(str, versions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self, **order: Any) -> None:
        """Assert that one writer began and was killed by SIGKILL, and did not end by an error of its own."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer == f"{int(signal.SIGKILL)}\n", answer

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Write four files that differ in one of three workloads; each later one overwrites a copy of the first."""
    made = []
    others = [entry([measurement(workload_id(n)) for _ in range(3)]) for n in (1, 2)]
    for number in range(4):
        changed = [measurement(workload_id(0), optimized_s=1e-4 * (number + 1)) for _ in range(3)]
        path = tmp_path / f"version{number}" / "nvidia-h200.json"
        path.parent.mkdir()
        if made:
            shutil.copy(made[0], path)
        save(path, merge(None, [*others, replace(entry(changed), reason=f"version {number}")], machine=MACHINE))
        made.append(path)
    return made


@pytest.fixture
def place(tmp_path: Path, versions: Sequence[Path]) -> Path:
    """Return the path that the writers write to; it holds version 0."""
    path = tmp_path / "baselines" / "nvidia-h200.json"
    path.parent.mkdir()
    shutil.copy(versions[0], path)
    return path


def write_version(place: Path, version: Path) -> None:
    """Assert that a later update is not blocked, writes the expected bytes, and leaves no other file."""
    new = load(version)
    update(place, lambda old: merge(old, list(new.entries.values()), machine=new.machine))
    assert place.read_bytes() == version.read_bytes()
    assert sorted(os.listdir(place.parent)) == [".perfsuite", place.name]


def test_writer_killed_at_any_moment_leaves_a_complete_file(
    place: Path, versions: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 20.0)
    rng = random.Random(7)
    whole = [v.read_bytes() for v in versions]
    assert len(set(whole)) == len(whole)
    found: Counter[int] = Counter()
    stale = 0
    with at_most(300), Writers(place, versions) as writers:
        for number in range(KILLS):
            writers.killed(first=number + 1, after=rng.uniform(0, 0.06))
            found[whole.index(place.read_bytes())] += 1
            assert set(load(place).entries) == {workload_id(n) for n in range(3)}
            stale += len(list(place.parent.glob(f".{place.name}.*")))
            write_version(place, versions[number % len(versions)])
    print(f"versions found {dict(found)}, temporary files left by {stale} of {KILLS}")
    assert found.total() == KILLS


@pytest.mark.parametrize(
    ("point", "now"),
    [
        pytest.param(("tempfile", "mkstemp", "before", 1), "old", marks=FULLY),
        pytest.param(("tempfile", "mkstemp", "after", 1), "old", marks=FULLY),
        (("os", "fdopen", "half", 1), "old"),
        pytest.param(("os", "fsync", "before", 1), "old", marks=FULLY),
        pytest.param(("os", "fsync", "after", 1), "old", marks=FULLY),
        pytest.param(("os", "chmod", "before", 1), "old", marks=FULLY),
        (("os", "replace", "before", 1), "old"),
        (("os", "replace", "after", 1), "new"),
        pytest.param(("os", "fsync", "before", 2), "new", marks=FULLY),
        (("os", "fsync", "after", 2), "new"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_writer_killed_at_a_given_call_leaves_the_old_or_the_new_file(
    place: Path, versions: Sequence[Path], point: tuple[str, str, str, int], now: str
) -> None:
    began = time.monotonic()
    with at_most(120), Writers(place, versions) as writers:
        writers.killed(first=1, point=point)
        assert place.read_bytes() == versions[1 if now == "new" else 0].read_bytes()
        load(place)
        write_version(place, versions[2])
        writers.killed(first=3, point=("os", "replace", "after", 1))
        assert place.read_bytes() == versions[3].read_bytes()
    assert time.monotonic() - began < module.LOCK_SECONDS
