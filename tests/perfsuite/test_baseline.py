"""The baseline file: readable by pytest-benchmark, written whole or not at all, and never half believed."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import MACHINE, REVISION, counting, entry, few, measurement, workload_id

from perfsuite import baseline as module
from perfsuite.baseline import (
    Baseline,
    Entry,
    changes_since,
    compare_machines,
    describe_changes,
    entry_from,
    load,
    merge,
    save,
    update,
)
from perfsuite.errors import BaselineError
from perfsuite.records import Limit, PromiseRecord

PROCESSES = 3


def make(number: int, ratio: float = math.log(12.3), revision: str | None = REVISION) -> Entry:
    rng = random.Random(number)
    limit = Limit(seconds=1 / 3e5, by="memory", bytes=1e6, flops=0.0, ceiling=4.2512345678e12)
    runs = [
        measurement(
            workload_id(number),
            ratio=[ratio + rng.gauss(0, 0.003) for _ in range(8)],
            optimized_s=rng.uniform(1e-5, 1e-3),
            limit=limit,
            sizes={"n": 3 + number, "shape": (1, 2), "scale": 0.5},
        )
        for _ in range(PROCESSES)
    ]
    return entry(runs, promises=PromiseRecord(speedup=10.0, host_syncs=0), revision=revision)


def book(*entries: Entry) -> Baseline:
    return merge(None, entries, machine=MACHINE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "baselines" / "nvidia-h200.json"
    save(path, book(make(0), make(1), make(2)))
    return path


def refused(path: Path) -> str:
    """The message that `load` refuses the file with: one line that names the file."""
    with pytest.raises(BaselineError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# --- the round trip and the schema ---------------------------------------------------------------------------------


def test_round_trip(path: Path) -> None:
    assert load(path) == book(make(2), make(0), make(1))


def test_entry_has_what_was_measured() -> None:
    runs = [measurement(ratio=math.log(2.0), optimized_s=s) for s in (1e-4, 3e-4, 2e-4)]
    runs[1] = few(counting(runs[1], launches=5, peak_bytes=None))
    made = entry(runs)
    assert made.sides["optimized"].seconds == 2e-4
    assert made.sides["optimized"].launches == 5
    assert made.sides["optimized"].peak_bytes == 1024
    assert made.few == ("reference",)
    assert made.speedup() == pytest.approx(2.0, rel=1e-5)
    assert made.process_means() == [[pytest.approx(math.log(2.0), abs=1e-6)] * 3]
    assert made.sessions[0].torch == MACHINE.torch


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda m: [], "nothing was measured"),
        (lambda m: [m, dataclasses.replace(m, clock="wall")], "clock"),
        (lambda m: [m, dataclasses.replace(m, sizes={"n": 1})], "sizes"),
        (lambda m: [dataclasses.replace(m, log_ratios={})], "no ratio to the reference"),
        (lambda m: [dataclasses.replace(m, log_ratios={"reference": ()})], "empty or non-finite"),
        (lambda m: [dataclasses.replace(m, log_ratios={"reference": (math.nan,)})], "empty or non-finite"),
        (lambda m: [dataclasses.replace(m, sides={"reference": m.sides["reference"]})], "no time of the optimized"),
    ],
)
def test_what_is_not_a_measurement_is_not_accepted(damage: Callable[[Any], list[Any]], says: str) -> None:
    with pytest.raises(BaselineError, match=says):
        entry(damage(measurement()) or [[]])


def test_pytest_benchmark_s_own_command_reads_it(path: Path, tmp_path: Path) -> None:
    csv = tmp_path / "out.csv"
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(path), f"--csv={csv}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    # A file that it cannot load is a warning and an empty table to it: look for the rows.
    for number in range(3):
        for side in ("reference", "optimized"):
            assert f"pair{number:03d}::speed[w]@{side}" in done.stdout
    assert csv.read_text().count("@optimized") == 3
    assert "Failed to load" not in done.stdout + done.stderr


def test_records_have_pytest_benchmark_s_fields(path: Path) -> None:
    data = json.loads(path.read_text())
    assert {"machine_info", "commit_info", "benchmarks", "datetime", "version"} <= set(data)
    names = [b["fullname"] for b in data["benchmarks"]]
    assert names == [f"{workload_id(n)}@{s}" for n in range(3) for s in ("reference", "optimized")]
    for record in data["benchmarks"]:
        assert {"group", "name", "fullname", "params", "param", "extra_info", "options", "stats"} <= set(record)
        stats = record["stats"]
        assert stats["rounds"] == len(stats["data"]) == 8 * PROCESSES
        assert stats["min"] <= stats["median"] <= stats["max"]
        assert stats["iterations"] == 1


# --- diffs ---------------------------------------------------------------------------------------------------------


def test_accepting_one_workload_changes_its_lines_only(path: Path) -> None:
    before = path.read_text().splitlines()
    changed = dataclasses.replace(make(1, math.log(12.9)), accepted="2027-01-01T00:00:00+00:00")
    update(path, lambda old: merge(old, [changed], machine=MACHINE))
    after = path.read_text().splitlines()
    first, last = (next(i for i, line in enumerate(before) if workload_id(n) in line) for n in (1, 2))
    opcodes = [o for o in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if o[0] != "equal"]
    assert opcodes
    assert all(first - 2 <= start and stop <= last for _, start, stop, _, _ in opcodes)


def test_writing_the_same_again_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    update(path, lambda old: merge(old, [make(1)], machine=MACHINE))
    save(path, load(path))
    assert path.read_bytes() == before


def test_the_header_s_date_is_the_file_s_first_writing(path: Path) -> None:
    first = json.loads(path.read_text())["datetime"]
    late = [dataclasses.replace(make(n), accepted="2030-01-01T00:00:00+00:00") for n in range(3)]
    update(path, lambda old: merge(old, late, machine=MACHINE))
    assert json.loads(path.read_text())["datetime"] == first != late[0].accepted


def test_an_unchanged_record_survives_another_version_s_statistics(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_benchmark.stats import Stats

    before = path.read_text()
    monkeypatch.setattr(Stats, "fields", (*Stats.fields[:3],))
    update(path, lambda old: merge(old, [make(3)], machine=MACHINE))
    assert all(line.rstrip(",") in path.read_text() for line in before.splitlines())


def test_numbers_are_short(path: Path) -> None:
    numbers = [float(n) for n in re.findall(r"(?<=[ \[])-?\d+\.\d+(?:e-?\d+)?(?=[,\]\n])", path.read_text())]
    assert len(numbers) > 100
    assert all(n == float(f"{n:.7g}") for n in numbers)


# --- merging -------------------------------------------------------------------------------------------------------


def test_more_adds_a_session_to_an_unchanged_revision() -> None:
    old = book(make(0), make(1))
    again = dataclasses.replace(make(0, math.log(12.4)), accepted="2026-12-01T00:00:00+00:00")
    new = merge(old, [again], machine=MACHINE, more=True)
    entry_0 = new.entries[workload_id(0)]
    assert [len(s.processes) for s in entry_0.sessions] == [PROCESSES, PROCESSES]
    assert len(entry_0.blocks_s["optimized"]) == 2 * PROCESSES * 8
    assert entry_0.accepted == old.entries[workload_id(0)].accepted
    assert new.entries[workload_id(1)] == old.entries[workload_id(1)]
    assert "1 session more: 2 in all" in describe_changes(old, new)[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"revision": "f" * 40}, "accepted at revision 1a2b3c4, now at fffffff"),
        ({"revision": None}, r"now at \(unknown\)"),
        ({"dirty": True}, "uncommitted"),
        ({"sizes": {"n": 4}}, "sizes were"),
        ({"clock": "wall"}, "clock was 'device', now 'wall'"),
        ({"dtype": "float16"}, "dtype was"),
        ({"id": "other"}, "no accepted entry"),
    ],
)
def test_more_is_refused_for_anything_else(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BaselineError, match=says):
        merge(book(make(0)), [dataclasses.replace(make(0), **fields)], machine=MACHINE, more=True)


def test_another_machine_is_refused() -> None:
    other = dataclasses.replace(MACHINE, device="nvidia-a100", device_name="NVIDIA A100")
    with pytest.raises(BaselineError, match="device was nvidia-h200"):
        merge(book(make(0)), [make(1)], machine=other)


def test_changes_are_described() -> None:
    old = book(make(0), make(1), make(2))
    new = merge(old, [make(1, math.log(12.9)), make(3)], machine=MACHINE, drop=[workload_id(0)])
    lines = describe_changes(old, new)
    assert [line.partition(": ")[2] for line in lines] == [
        "removed",
        "changed from 12.3× to 12.9× (+4.9%)",
        "unchanged at 12.3×",
        "added at 12.3×",
    ]
    promised = dataclasses.replace(make(2), promises=PromiseRecord(speedup=9.0))
    (line,) = describe_changes(book(make(2)), book(promised))
    assert "promised speedup 10.0 → 9.0, promised host_syncs 0 → None" in line
    assert describe_changes(None, book(make(0))) == [f"{workload_id(0)}: added at 12.3×"]


def test_a_tuple_in_the_sizes_is_not_a_change() -> None:
    assert changes_since(make(0), measurement(sizes={"n": 3, "shape": (1, 2), "scale": 0.5})) is None
    assert changes_since(make(0), measurement(sizes={"n": 3, "shape": (1, 3), "scale": 0.5})) is not None


# --- machines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"device": "x"}, {"device_name": "x"}, {"count": 2}, {"power_limit_w": 500.0}, {"power_limit_w": None}]
)
def test_another_device_is_an_error(fields: dict[str, Any]) -> None:
    errors, notes = compare_machines(MACHINE, dataclasses.replace(MACHINE, **fields))
    assert len(errors) == 1
    assert "perfsuite accept" in errors[0]
    assert notes == []


@pytest.mark.parametrize("name", ["torch", "triton", "cuda", "driver", "python", "platform", "cpu", "cores"])
def test_another_stack_is_a_note(name: str) -> None:
    other = dataclasses.replace(MACHINE, **{name: 7 if name == "cores" else "x"})
    errors, notes = compare_machines(MACHINE, other)
    assert errors == []
    assert len(notes) == 1


def test_on_a_cpu_its_model_and_cores_matter() -> None:
    cpu = dataclasses.replace(MACHINE, device="cpu", device_name="CPU", power_limit_w=None)
    assert compare_machines(cpu, cpu) == ([], [])
    errors, _ = compare_machines(cpu, dataclasses.replace(cpu, cpu="AMD", cores=2))
    assert len(errors) == 2


def test_rounding_of_a_power_limit_is_no_difference() -> None:
    assert compare_machines(MACHINE, dataclasses.replace(MACHINE, power_limit_w=700.01)) == ([], [])


# --- damaged files -------------------------------------------------------------------------------------------------


def test_missing_empty_and_unreadable(path: Path) -> None:
    assert "perfsuite accept" in refused(path.with_name("other.json"))
    assert "cannot be read" in refused(path.parent)
    for text in ("", "  \n"):
        path.write_text(text)
        assert "empty" in refused(path)
    path.write_bytes(b"\xff\xfe{}")
    assert "not text" in refused(path)


def test_truncated_says_where(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:100]))
    assert re.search(r"cut short or damaged at line \d+, column \d+; restore it from git", refused(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "not a table"),
        ("3", "not a table"),
        ("{}", "not a baseline"),
        ('{"benchmarks": [], "version": "5.3"}', "pytest-benchmark file that perfsuite did not write"),
        ("[" * 100_000, "not valid JSON"),
        ("{'a': 1}", "not valid JSON at line 1, column 2"),
        ('{"perfsuite": {}}', "schema None is unknown"),
        ('{"perfsuite": {"schema": true}}', "schema True is unknown"),
        ('{"perfsuite": {"schema": "1"}}', "schema '1' is unknown"),
        ('{"perfsuite": {"schema": 0}}', "schema 0 is unknown"),
        ('{"perfsuite": {"schema": 2}}', "newer than this perfsuite"),
        ('{"perfsuite": {"schema": 1}}', "Machine is not a table"),
    ],
)
def test_foreign_files(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    assert says in refused(path)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def ours(data: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = data["benchmarks"][1]["extra_info"]["perfsuite"]
    return result


def first_process(data: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = ours(data)["sessions"][0]["processes"][0]
    return result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: ours(d).pop("clock"), "lacks 'clock'"),
        (lambda d: ours(d).update(note="x"), "unknown field 'note'"),
        (lambda d: ours(d).update(clock=3), "Entry.clock is 3"),
        (lambda d: ours(d).update(clock="wall"), "digest"),
        (lambda d: ours(d).update(accepted="soon"), "not a date"),
        (lambda d: ours(d).update(id="x"), "holds the entry of 'x'"),
        (lambda d: ours(d).update(sessions=[]), "session without processes"),
        (lambda d: ours(d)["promises"].update(speedup=1.0), "digest"),
        (lambda d: first_process(d)["log_ratios"].update(reference=[]), "log_ratios to reference are empty"),
        (lambda d: first_process(d)["log_ratios"].pop("reference"), "without log_ratios"),
        (lambda d: first_process(d)["log_ratios"]["reference"].__setitem__(0, 2.6), "digest"),
        (lambda d: first_process(d)["log_ratios"]["reference"].__setitem__(0, math.nan), "NaN"),
        (lambda d: first_process(d)["seconds"].update(optimized=0.0), "without seconds"),
        (lambda d: d["benchmarks"][1]["stats"]["data"].pop(), "digest"),
        (lambda d: d["benchmarks"][1]["stats"].pop("data"), "blocks_s"),
        (lambda d: d["benchmarks"][1]["extra_info"].pop("digest"), "digest"),
        (lambda d: d["benchmarks"][1].pop("extra_info"), "no perfsuite entry"),
        (lambda d: d["benchmarks"].append(d["benchmarks"][1]), "appears twice"),
        (lambda d: d["benchmarks"].pop(0), "one of its two records"),
        (lambda d: d["benchmarks"].append(3), "benchmark 7 is not a side"),
        (lambda d: d["benchmarks"][0].update(fullname="x@rival"), "benchmark 1 is not a side"),
        (lambda d: d.pop("benchmarks"), "no list of benchmarks"),
        (lambda d: d["perfsuite"]["machine"].update(count=2), "machine record was edited"),
        (lambda d: d["perfsuite"]["machine"].pop("cpu"), "lacks 'cpu'"),
    ],
)
def test_an_edit_by_hand_is_named(path: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    load(path)
    edit(path, change)
    message = refused(path)
    assert says in message
    assert "git" in message


def test_a_field_twice_and_a_number_out_of_range(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"clock": "device",', '"clock": "device", "clock": "wall",'))
    assert "'clock' appears twice" in refused(path)
    path.write_text(re.sub(r'"seconds": [^{,]+,', '"seconds": 1e999,', text, count=1))
    assert "out of range" in refused(path)


def test_fuzz_every_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """Truncations and flipped bits: one clear error, or (whitespace, others' fields) the very same baseline."""
    path = tmp_path / "nvidia-h200.json"
    save(path, book(make(0)))
    sound, whole = load(path), path.read_bytes()
    rng = random.Random(3)
    messages = []
    equal = 0
    for number in range(500):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[rng.randrange(len(data) - 2) :]
        else:
            for _ in range(rng.choice((1, 1, 4))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            result = load(path)
        except BaselineError as error:
            messages.append(str(error))
        else:
            assert result == sound
            equal += 1
    assert all(m.startswith(f"{path}: ") and "\n" not in m for m in messages)
    assert len(messages) > 300
    assert equal > 0


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, call, fail)
        with pytest.raises(BaselineError) as caught:
            update(path, lambda old: merge(old, [make(5)], machine=MACHINE))
    message = str(caught.value)
    assert str(path) in message
    assert os.strerror(code) in message
    assert "writable" in message
    assert "\n" not in message
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "baselines").write_text("")
    with pytest.raises(BaselineError, match="cannot be written"):
        save(tmp_path / "baselines" / "cpu.json", book(make(0)))


def test_a_failed_change_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(BaselineError, match="no accepted entry"):
        update(path, lambda old: merge(old, [make(7)], machine=MACHINE, more=True))
    path.write_text("{")
    with pytest.raises(BaselineError, match="cut short"):
        update(path, lambda old: merge(old, [make(7)], machine=MACHINE))
    assert path.read_text() == "{"
    path.write_bytes(before)
    load(path)


def test_a_new_file_is_readable_by_all_and_an_old_one_keeps_its_mode(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    update(path, lambda old: merge(old, [make(4)], machine=MACHINE))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    update(link, lambda old: merge(old, [make(4)], machine=MACHINE))
    assert link.is_symlink()
    assert workload_id(4) in load(path).entries


def test_concurrent_acceptances_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    threads = [
        threading.Thread(target=lambda n=n: update(path, lambda old: merge(old, [make(n)], machine=MACHINE)))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(load(path).entries) == {workload_id(n) for n in range(6)}


def test_a_held_lock_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    caught: list[str] = []

    def other() -> None:
        try:
            save(path, book(make(0)))
        except BaselineError as error:
            caught.append(str(error))

    with module._locked(path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert len(caught) == 1
    assert "another process has been writing it" in caught[0]
    assert len(load(path).entries) == 3


WRITER = """
import sys
sys.path[:0] = {paths!r}
from builders import MACHINE
from perfsuite.baseline import load, merge, update
import dataclasses
path = sys.argv[1]
entry = next(iter(load(path).entries.values()))
print("ready", flush=True)
for number in range(10**9):
    changed = dataclasses.replace(entry, reason=f"round {{number}}")
    update(path, lambda old: merge(old, [changed], machine=MACHINE))
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_a_whole_file(path: Path) -> None:
    here = Path(__file__).parent
    code = WRITER.format(paths=[str(here), str(here.parents[1])])
    rng = random.Random(5)
    written = set()
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        entries = load(path).entries
        assert set(entries) == {workload_id(n) for n in range(3)}
        written.add(entries[workload_id(0)].reason)
    assert written != {"first acceptance"}
    save(path, load(path))
    assert os.listdir(path.parent) == [path.name]


def test_entries_of_the_front_door_round_trip(tmp_path: Path) -> None:
    """Whole numbers where floats belong, as a caller may give them, do not upset the digest."""
    m = measurement(ratio=2, optimized_s=1)
    made = entry_from(
        [m],
        machine=MACHINE,
        promises=PromiseRecord(speedup=3),
        revision=None,
        dirty=True,
        reason="étude ×2",
        accepted="2026-11-21T12:00:00+00:00",
    )
    save(tmp_path / "cpu.json", book(made))
    assert load(tmp_path / "cpu.json").entries == {m.id: made}
