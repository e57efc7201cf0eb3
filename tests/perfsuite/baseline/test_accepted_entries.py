"""The baseline file can be read by pytest-benchmark, is written atomically, and is rejected as a whole if damaged."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from builders import MACHINE, REVISION, counting, entry, few, measurement, workload_id
from scratch import ROOT

from perfsuite.baseline import accepted_entries as module
from perfsuite.baseline import storage
from perfsuite.baseline.accepted_entries import (
    Baseline,
    Entry,
    changes_since,
    compare_machines,
    describe_changes,
    entry_from,
    merge,
)
from perfsuite.baseline.storage import SCHEMA, load, save, update
from perfsuite.errors import BaselineError
from perfsuite.records import Counts, Limit, ProcessGroup, PromiseRecord, Ran

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
    """Return the message with which `load` refuses the file: one line that names the file."""
    with pytest.raises(BaselineError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# --- the round trip and the schema ---------------------------------------------------------------------------------


def test_saved_baseline_equals_the_loaded_one(path: Path) -> None:
    assert load(path) == book(make(2), make(0), make(1))


def test_process_group_is_stored(path: Path) -> None:
    of_rank = {"optimized": Counts(host_syncs=0, launches=3, peak_bytes=1 << 20), "reference": Counts()}
    group = ProcessGroup(
        ranks=2,
        backend="nccl",
        version="2.28.3",
        variables={"NCCL_NVLS_ENABLE": "0"},
        links={"0-1": "NVLink"},
        by_rank=(of_rank, of_rank),
    )
    made = dataclasses.replace(make(1), group=group)
    save(path, book(made))
    assert load(path).entries[made.id].group == group


def test_entry_summarises_its_measurements() -> None:
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
        (lambda m: [measurement(optimized_s=0.0, reference_s=1.0)], "not above 0"),
    ],
)
def test_inconsistent_or_incomplete_measurements_are_refused(damage: Callable[[Any], list[Any]], says: str) -> None:
    with pytest.raises(BaselineError, match=says):
        entry(damage(measurement()) or [[]])


def test_pytest_benchmark_compare_reads_the_file(path: Path, tmp_path: Path) -> None:
    csv = tmp_path / "out.csv"
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(path), f"--csv={csv}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    # For a file that it cannot load, it prints a warning and an empty table, so check the rows.
    for number in range(3):
        for side in ("reference", "optimized"):
            assert f"pair{number:03d}::speed[w]@{side}" in done.stdout
    assert csv.read_text().count("@optimized") == 3
    assert "Failed to load" not in done.stdout + done.stderr


def test_records_have_the_fields_of_pytest_benchmark(path: Path) -> None:
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


def test_accepting_one_workload_changes_only_its_lines(path: Path) -> None:
    before = path.read_text().splitlines()
    changed = dataclasses.replace(make(1, math.log(12.9)), accepted="2027-01-01T00:00:00+00:00")
    update(path, lambda old: merge(old, [changed], machine=MACHINE))
    after = path.read_text().splitlines()
    first, last = (next(i for i, line in enumerate(before) if workload_id(n) in line) for n in (1, 2))
    opcodes = [o for o in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if o[0] != "equal"]
    assert opcodes
    assert all(first - 2 <= start and stop <= last for _, start, stop, _, _ in opcodes)


def test_rewriting_the_same_entries_changes_no_byte(path: Path) -> None:
    before = path.read_bytes()
    update(path, lambda old: merge(old, [make(1)], machine=MACHINE))
    save(path, load(path))
    assert path.read_bytes() == before


def test_date_in_the_header_is_that_of_the_first_write(path: Path) -> None:
    first = json.loads(path.read_text())["datetime"]
    late = [dataclasses.replace(make(n), accepted="2030-01-01T00:00:00+00:00") for n in range(3)]
    update(path, lambda old: merge(old, late, machine=MACHINE))
    assert json.loads(path.read_text())["datetime"] == first != late[0].accepted


def test_unchanged_records_are_kept_if_pytest_benchmark_has_other_statistics(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_benchmark.stats import Stats

    before = path.read_text()
    monkeypatch.setattr(Stats, "fields", (*Stats.fields[:3],))
    update(path, lambda old: merge(old, [make(3)], machine=MACHINE))
    assert all(line.rstrip(",") in path.read_text() for line in before.splitlines())


def test_numbers_have_at_most_seven_significant_digits(path: Path) -> None:
    numbers = [float(n) for n in re.findall(r"(?<=[ \[])-?\d+\.\d+(?:e-?\d+)?(?=[,\]\n])", path.read_text())]
    assert len(numbers) > 100
    assert all(n == float(f"{n:.7g}") for n in numbers)


# --- merging -------------------------------------------------------------------------------------------------------


def test_merge_with_more_adds_a_session_to_an_unchanged_revision() -> None:
    old = book(make(0), make(1))
    again = dataclasses.replace(make(0, math.log(12.4)), accepted="2026-12-01T00:00:00+00:00", reason="another host")
    new = merge(old, [again], machine=MACHINE, more=True)
    entry_0 = new.entries[workload_id(0)]
    assert [len(s.processes) for s in entry_0.sessions] == [PROCESSES, PROCESSES]
    assert len(entry_0.blocks_s["optimized"]) == 2 * PROCESSES * 8
    assert entry_0.accepted == again.accepted
    assert entry_0.reason == f"{old.entries[workload_id(0)].reason}; another host"
    assert new.entries[workload_id(1)] == old.entries[workload_id(1)]
    assert "1 session more: 2 in all" in describe_changes(old, new)[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"revision": "f" * 40}, "accepted at revision 1a2b3c4, now at fffffff"),
        ({"revision": None}, "the current code has no revision"),
        ({"dirty": True}, "uncommitted"),
        ({"sizes": {"n": 4}}, "sizes were"),
        ({"clock": "wall"}, "clock was 'device', now 'wall'"),
        ({"dtype": "float16"}, "dtype was"),
        ({"id": "other"}, "no accepted entry"),
    ],
)
def test_merge_with_more_refuses_other_code_sizes_clock_or_dtype(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BaselineError, match=says):
        merge(book(make(0)), [dataclasses.replace(make(0), **fields)], machine=MACHINE, more=True)


def test_merge_refuses_another_device() -> None:
    other = dataclasses.replace(MACHINE, device="nvidia-a100", device_name="NVIDIA A100")
    with pytest.raises(BaselineError, match="device was nvidia-h200"):
        merge(book(make(0)), [make(1)], machine=other)


def test_changes_are_described() -> None:
    old = book(make(0), make(1), make(2))
    new = merge(old, [make(1, math.log(12.9)), make(3)], machine=MACHINE, drop=[workload_id(0)])
    lines = describe_changes(old, new)
    assert lines == [
        f"{workload_id(0)}: removed",
        f"{workload_id(1)}: changed from 12.3× to 12.9× (+4.9%)",
        f"{workload_id(3)}: added at 12.3×",
        "1 workload unchanged",
    ]
    promised = dataclasses.replace(make(2), promises=PromiseRecord(speedup=9.0))
    (line,) = describe_changes(book(make(2)), book(promised))
    assert "promised speedup 10.0 → 9.0, promised host_syncs 0 → None" in line
    assert describe_changes(None, book(make(0))) == [f"{workload_id(0)}: added at 12.3×"]


def test_tuple_and_list_in_sizes_are_equal() -> None:
    assert changes_since(make(0), measurement(sizes={"n": 3, "shape": (1, 2), "scale": 0.5})) is None
    assert changes_since(make(0), measurement(sizes={"n": 3, "shape": (1, 3), "scale": 0.5})) is not None


# --- machines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{"device": "x"}, {"device_name": "x"}, {"power_limit_w": 500.0}, {"power_limit_w": None}]
)
def test_another_device_is_an_error(fields: dict[str, Any]) -> None:
    errors, notes = compare_machines(MACHINE, dataclasses.replace(MACHINE, **fields))
    assert len(errors) == 1
    assert "perfsuite accept" in errors[0]
    assert notes == []


@pytest.mark.parametrize("name", ["count", "torch", "triton", "cuda", "driver", "python", "platform", "cpu", "cores"])
def test_other_software_or_number_of_devices_is_a_note(name: str) -> None:
    other = dataclasses.replace(MACHINE, **{name: 7 if name in ("count", "cores") else "x"})
    errors, notes = compare_machines(MACHINE, other)
    assert errors == []
    assert len(notes) == 1


def test_other_cpu_model_or_core_count_is_an_error_on_a_cpu() -> None:
    cpu = dataclasses.replace(MACHINE, device="cpu", device_name="CPU", power_limit_w=None)
    assert compare_machines(cpu, cpu) == ([], [])
    errors, _ = compare_machines(cpu, dataclasses.replace(cpu, cpu="AMD", cores=2))
    assert len(errors) == 2


def test_rounding_of_a_power_limit_is_ignored() -> None:
    assert compare_machines(MACHINE, dataclasses.replace(MACHINE, power_limit_w=700.01)) == ([], [])


# --- damaged files -------------------------------------------------------------------------------------------------


def test_missing_empty_and_unreadable_files_are_refused(path: Path) -> None:
    assert "perfsuite accept" in refused(path.with_name("other.json"))
    assert "cannot be read" in refused(path.parent)
    for text in ("", "  \n"):
        path.write_text(text)
        assert "empty" in refused(path)
    path.write_bytes(b"\xff\xfe{}")
    assert "not text" in refused(path)


def test_error_for_a_truncated_file_gives_line_and_column(path: Path) -> None:
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
        (f'{{"perfsuite": {{"schema": {SCHEMA + 1}}}}}', "newer than this perfsuite"),
        (f'{{"perfsuite": {{"schema": {SCHEMA - 1}}}}}', "older than this perfsuite's"),
        (f'{{"perfsuite": {{"schema": {SCHEMA}}}}}', "Machine is not a table"),
        (f'{{"perfsuite": {{"schema": {"7" * 5000}}}}}', "is out of range"),
    ],
)
def test_files_of_another_format_or_schema_are_refused(path: Path, text: str, says: str) -> None:
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
        (lambda d: first_process(d)["seconds"].pop("optimized"), "without seconds"),
        (lambda d: d["benchmarks"][1]["stats"]["data"].pop(), "digest"),
        (lambda d: d["benchmarks"][1]["stats"].pop("data"), "blocks_s"),
        (lambda d: d["benchmarks"][1]["stats"].update(median=1e-6), "digest"),
        (lambda d: d["benchmarks"][0]["stats"].update(mean=1e-6), "digest"),
        (lambda d: d["benchmarks"][0]["options"].update(clock="wall"), "digest"),
        (lambda d: d["benchmarks"][0]["extra_info"].update(note="x"), "digest"),
        (lambda d: d["benchmarks"][0]["stats"]["data"].__setitem__(0, -1.0), "not above 0"),
        (lambda d: d["benchmarks"][0]["stats"]["data"].__setitem__(0, 10**400), "out of range"),
        (lambda d: ours(d)["sides"]["optimized"].update(seconds=0.0), "not above 0"),
        (lambda d: d["benchmarks"][1]["extra_info"].pop("digest"), "digest"),
        (lambda d: d["benchmarks"][1].pop("extra_info"), "no perfsuite entry"),
        (lambda d: d["benchmarks"].append(d["benchmarks"][1]), "appears twice"),
        (lambda d: d["benchmarks"].pop(0), "one of its two records"),
        (lambda d: d["benchmarks"].append(3), "benchmark 7 is not a side"),
        (lambda d: d["benchmarks"][0].update(fullname="x@rival"), "benchmark 1 is not a side"),
        (lambda d: d.pop("benchmarks"), "no list of benchmarks"),
        (lambda d: d["perfsuite"]["machine"].update(count=2), "header was edited"),
        (lambda d: d["machine_info"].update(node="x"), "header was edited"),
        (lambda d: d.update(note="x"), "header was edited"),
        (lambda d: d["perfsuite"]["machine"].pop("cpu"), "lacks 'cpu'"),
    ],
)
def test_error_names_what_was_edited_by_hand(path: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    load(path)
    edit(path, change)
    message = refused(path)
    assert says in message
    assert "git" in message


def test_duplicate_field_and_number_out_of_range_are_refused(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"clock": "device",', '"clock": "device", "clock": "wall",'))
    assert "'clock' appears twice" in refused(path)
    path.write_text(re.sub(r'"seconds": [^{,]+,', '"seconds": 1e999,', text, count=1))
    assert "out of range" in refused(path)


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_failed_write_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, call, fail)
        with pytest.raises(BaselineError) as caught:
            update(path, lambda old: merge(old, [make(5)], machine=MACHINE))
    message = str(caught.value)
    assert str(path) in message
    assert f"({os.strerror(code)})" in message
    assert "writable" in message
    assert "\n" not in message
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == [".perfsuite", path.name]


def test_save_reports_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "baselines").write_text("")
    with pytest.raises(BaselineError, match="cannot be written"):
        save(tmp_path / "baselines" / "cpu.json", book(make(0)))


def test_failed_update_keeps_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(BaselineError, match="no accepted entry"):
        update(path, lambda old: merge(old, [make(7)], machine=MACHINE, more=True))
    path.write_text("{")
    with pytest.raises(BaselineError, match="cut short"):
        update(path, lambda old: merge(old, [make(7)], machine=MACHINE))
    assert path.read_text() == "{"
    path.write_bytes(before)
    load(path)


def test_new_file_has_mode_0644_and_an_existing_one_keeps_its_mode(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o644
    for mode in (0o600, 0o777):
        path.chmod(mode)
        update(path, lambda old: merge(old, [make(4)], machine=MACHINE))
        assert path.stat().st_mode & 0o777 == mode


def test_symbolic_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    update(link, lambda old: merge(old, [make(4)], machine=MACHINE))
    assert link.is_symlink()
    assert workload_id(4) in load(path).entries


def test_concurrent_updates_are_all_kept(tmp_path: Path) -> None:
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


def test_lock_held_by_another_writer_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOCK_SECONDS", 0.1)
    caught: list[str] = []

    def other() -> None:
        try:
            save(path, book(make(0)))
        except BaselineError as error:
            caught.append(str(error))

    with storage._locked(path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert len(caught) == 1
    assert "another process has been writing it" in caught[0]
    assert len(load(path).entries) == 3


def test_lock_file_that_cannot_be_created_is_reported(path: Path) -> None:
    before = path.read_bytes()
    shutil.rmtree(path.parent / ".perfsuite")
    (path.parent / ".perfsuite").write_text("a file in the place of the folder")
    with pytest.raises(BaselineError, match=r"cannot be written .*\.perfsuite.* make the folder writable") as caught:
        update(path, lambda old: merge(old, [make(4)], machine=MACHINE))
    assert "\n" not in str(caught.value)
    assert "[Errno" not in str(caught.value)
    assert path.read_bytes() == before


WRITER = """
import sys
from perfsuite.baseline.accepted_entries import merge
from perfsuite.baseline.storage import load, update

target, other, last = sys.argv[1:]
new = load(other)

def change(old):
    print("changing", flush=True)
    if not last:
        sys.stdin.read()
    return merge(old, list(new.entries.values()), machine=new.machine)

print("asks", flush=True)
update(target, change)
"""


def test_lock_works_between_processes_with_different_temporary_folders(path: Path, tmp_path: Path) -> None:
    """The second process reads the file only after the first has written it, so no entry is lost."""
    writers = []
    for number in (1, 2):
        other, temporary = tmp_path / f"other{number}.json", tmp_path / f"tmp{number}"
        save(other, book(make(number + 10)))
        temporary.mkdir()
        command = [sys.executable, "-c", WRITER, str(path), str(other), "last" if number == 2 else ""]
        writers.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(temporary)},
            )
        )
        assert writers[0].stdout is not None
        if number == 1:  # the first holds the lock before the second asks for it
            assert [writers[0].stdout.readline() for _ in range(2)] == ["asks\n", "changing\n"]
    first, second = writers
    assert second.stdout is not None
    assert second.stdout.readline() == "asks\n"
    first.communicate("", timeout=60)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert {workload_id(11), workload_id(12)} <= set(load(path).entries)


def test_git_ignores_the_lock_file(path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(path.parent)], check=True)
    save(path, book(make(0)))
    shown = ["git", "status", "--porcelain", "--untracked-files=all"]
    done = subprocess.run(shown, cwd=path.parent, capture_output=True, text=True, check=True)
    assert done.stdout == f"?? {path.name}\n"


def test_save_replaces_a_damaged_file(path: Path) -> None:
    """`save` does not read the old file, so a record edited by hand is not copied into the new one."""
    sound, before = load(path), path.read_bytes()
    for change in (
        lambda d: d["benchmarks"][0]["stats"].update(median=1e-6),
        lambda d: d.update(version="x"),
        lambda d: d.pop("perfsuite"),
        lambda d: d["benchmarks"].append(None),
        lambda d: d["benchmarks"][0]["stats"].update(median=10**400),
    ):
        edit(path, change)
        save(path, sound)
        assert path.read_bytes() == before


def test_reason_that_is_not_utf_8_is_stored_unchanged(path: Path) -> None:
    """A reason with surrogates, as from a command line that is not UTF-8, is stored unchanged."""
    odd = dataclasses.replace(make(0), reason="caf\udce9 \ud83d\x1b[2J\u2028")
    update(path, lambda old: merge(old, [odd], machine=MACHINE))
    path.read_bytes().decode()
    assert load(path).entries[odd.id] == odd


def test_integers_in_place_of_floats_are_saved_and_loaded(tmp_path: Path) -> None:
    """Integers in place of floats do not change the digest."""
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


# --- exact figures -------------------------------------------------------------------------------------------------


def test_constants_have_their_documented_values() -> None:
    assert (module.LOG_RATIO_DECIMALS, module.SECONDS_DIGITS) == (6, 6)
    assert (storage.LOCK_SECONDS, module.POWER_WATTS, storage.INTEGER_MAX) == (60.0, 1.0, 2**63)
    assert storage.LONGEST_SHOWN == 160


@pytest.mark.parametrize("record", [module.Process, module.Session, module.SideSummary, Entry, Baseline])
def test_records_are_frozen_named_and_slotted(record: type) -> None:
    fields = dataclasses.fields(record)
    made = record(**{f.name: 1.0 for f in fields})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, fields[0].name, 2.0)
    assert all(f.kw_only for f in fields)
    assert not hasattr(made, "__dict__")


def test_figures_of_an_entry_are_computed_and_rounded() -> None:
    def run(seconds: float, ratio: float, **counts: int | None) -> Any:
        return counting(measurement(optimized_s=seconds, ratio=ratio, accepted=0.5), **counts)

    limits = [None, *(Limit(seconds=s, by="memory", bytes=1.0, flops=2.0, ceiling=3.0) for s in (1.23456789e-7, 1.0))]
    runs = [
        dataclasses.replace(m, limit=limit)
        for m, limit in zip(
            [
                run(1e-4, 0.1234564, peak_bytes=5, host_syncs=None, launches=1),
                run(3.00000049e-4, 0.1234566, peak_bytes=7, host_syncs=None, launches=3),
                run(8e-4, 0.5, peak_bytes=6, host_syncs=None, launches=2),
            ],
            limits,
            strict=True,
        )
    ]
    made = entry(runs)
    optimized = made.sides["optimized"]
    assert (optimized.seconds, optimized.device_s) == (3e-4, 3e-4)
    assert (optimized.peak_bytes, optimized.host_syncs, optimized.launches) == (7, None, 3)
    assert made.limit == dataclasses.replace(limits[1], seconds=1.23457e-7)
    assert made.blocks_s["optimized"] == (*[1e-4] * 8, *[3e-4] * 8, *[8e-4] * 8)
    assert [p.log_ratios["reference"][0] for p in made.sessions[0].processes] == [0.123456, 0.123457, 0.5]
    assert [p.seconds["optimized"] for p in made.sessions[0].processes] == [1e-4, 3e-4, 8e-4]
    assert made.process_means() == [[pytest.approx(0.123456), pytest.approx(0.123457), pytest.approx(0.5)]]
    assert made.process_means("accepted") == [[0.5] * 3]
    assert made.process_means("rival") == []
    assert made.few == ()
    assert made.speedup("accepted") == pytest.approx(math.exp(0.5))


def test_sides_that_a_process_did_not_time_are_left_out() -> None:
    one = measurement()
    rival = dataclasses.replace(one.sides["optimized"], blocks_s=(2e-4,) * 8, device_s=None)
    never = dataclasses.replace(rival, blocks_s=())
    made = entry(
        [
            dataclasses.replace(one, sides={**one.sides, "rival": rival, "never": never}),
            dataclasses.replace(one, sides={**one.sides, "rival": never}),
        ]
    )
    assert list(made.sides) == ["optimized", "reference", "rival"]
    assert (made.sides["rival"].seconds, made.sides["rival"].device_s) == (2e-4, None)
    assert ["rival" in p.seconds for p in made.sessions[0].processes] == [True, False]


def test_merge_with_more_combines_the_figures_of_both_sessions() -> None:
    limit = Limit(seconds=1.0, by="memory", bytes=1.0, flops=2.0, ceiling=3.0)

    def session(seconds: list[float], launches: int, **fields: Any) -> Entry:
        runs = [counting(measurement(optimized_s=s, **fields), launches=launches, host_syncs=None) for s in seconds]
        return entry(runs)

    old = session([1e-4, 2e-4, 3e-4], 4, limit=limit)
    new = dataclasses.replace(
        session([9e-4, 8e-4], 3, few=("reference",)), promises=PromiseRecord(launches=5), accepted="2026-12-01"
    )
    made = merge(book(old), [new], machine=MACHINE, more=True).entries[workload_id(0)]
    side = made.sides["optimized"]
    assert (side.seconds, side.launches, side.host_syncs) == (3e-4, 4, None)
    assert side.device_s == pytest.approx((2e-4 + 8.5e-4) / 2)
    assert made.limit == limit
    assert made.few == ("reference",)
    assert made.promises == PromiseRecord(launches=5)
    assert made.blocks_s["optimized"] == (*old.blocks_s["optimized"], *new.blocks_s["optimized"])
    other = dataclasses.replace(limit, seconds=2.0)
    newer = merge(book(old), [dataclasses.replace(new, limit=other)], machine=MACHINE, more=True)
    assert newer.entries[workload_id(0)].limit == other


def test_merge_with_more_keeps_every_reason_once() -> None:
    made = book(dataclasses.replace(make(0), reason="driver 590; a new compiler"))
    for reason in ("driver", "compiler", "driver", "driver 590; a new compiler"):
        made = merge(made, [dataclasses.replace(make(0), reason=reason)], machine=MACHINE, more=True)
    assert made.entries[workload_id(0)].reason == "driver 590; a new compiler; driver; compiler"


def test_merge_with_more_refuses_a_dirty_tree_or_an_unknown_revision() -> None:
    for old, new in ((True, False), (False, True)):
        with pytest.raises(BaselineError, match="uncommitted"):
            merge(
                book(dataclasses.replace(make(0), dirty=old)),
                [dataclasses.replace(make(0), dirty=new)],
                machine=MACHINE,
                more=True,
            )
    unknown = make(0, revision=None)
    with pytest.raises(BaselineError, match="the current code has no revision: it is outside git"):
        merge(book(unknown), [unknown], machine=MACHINE, more=True)


def test_error_about_different_sizes_names_the_first_process_first() -> None:
    runs = [measurement(workload_id(0), sizes={"n": n}) for n in (3, 4)]
    with pytest.raises(BaselineError, match=r"measured sizes \{'n': 3\}, another \{'n': 4\}"):
        entry_from(
            runs,
            machine=MACHINE,
            promises=PromiseRecord(),
            revision=REVISION,
            dirty=False,
            reason="",
            accepted="2026-11-23T00:00:00",
        )


def test_merge_with_more_accepts_a_later_revision_only_with_the_same_code() -> None:
    ran = Ran(sources={"optimized/a.py": "1"}, data={"x.npy": "2"}, surroundings="old")
    old = dataclasses.replace(make(0), ran=ran)
    new = dataclasses.replace(old, revision="f" * 40, ran=dataclasses.replace(ran, surroundings="new"))
    made = merge(book(old), [new], machine=MACHINE, more=True).entries[workload_id(0)]
    assert len(made.sessions) == len(old.sessions) + len(new.sessions)
    assert (made.revision, made.ran) == (old.revision, new.ran)
    for other in (
        dataclasses.replace(ran, sources={"optimized/a.py": "3"}),
        dataclasses.replace(ran, data={"x.npy": "3"}),
        dataclasses.replace(ran, unknown="it reads through h5py"),
        None,
    ):
        for before, after in ((other, ran), (ran, other)):
            with pytest.raises(BaselineError, match="with other code; accept it without --more"):
                merge(
                    book(dataclasses.replace(old, ran=before)),
                    [dataclasses.replace(new, ran=after)],
                    machine=MACHINE,
                    more=True,
                )


def test_data_file_opened_in_only_one_session_does_not_count_as_other_code() -> None:
    ran = Ran(sources={"optimized/a.py": "1"}, data={"of_another_workload.npy": "2"})
    old = dataclasses.replace(make(0), ran=ran)
    new = dataclasses.replace(old, revision="f" * 40, ran=dataclasses.replace(ran, data={}))
    for before, after in ((old, new), (new, old)):
        made = merge(book(before), [dataclasses.replace(after, revision="e" * 40)], machine=MACHINE, more=True)
        assert len(made.entries[workload_id(0)].sessions) == 2 * len(old.sessions)


def test_dropping_an_unknown_workload_is_allowed() -> None:
    assert merge(book(make(0)), [], machine=MACHINE, drop=["other"]) == book(make(0))
    assert list(merge(book(make(2)), [make(1)], machine=MACHINE).entries) == [workload_id(1), workload_id(2)]


def test_description_counts_added_sessions_but_not_replaced_ones() -> None:
    def described(old: Entry, new: Entry) -> str:
        return describe_changes(book(old), book(new))[0].partition(": ")[2]

    one, other = make(0), make(0, math.log(12.9))
    two = dataclasses.replace(one, sessions=(*one.sessions, *other.sessions))
    three = dataclasses.replace(one, sessions=(*two.sessions, *other.sessions))
    assert described(one, two).endswith(", 1 session more: 2 in all")
    assert described(one, three).endswith(", 2 sessions more: 3 in all")
    replaced = dataclasses.replace(one, sessions=(*other.sessions, *other.sessions))
    assert described(one, replaced) == "changed from 12.3× to 12.9× (+4.9%)"
    assert described(two, one) == "changed from 12.6× to 12.3× (-2.4%)"


def test_change_of_promises_alone_is_not_described_as_a_session() -> None:
    promised = dataclasses.replace(make(2), promises=PromiseRecord(speedup=9.0, host_syncs=0))
    (line,) = describe_changes(book(make(2)), book(promised))
    assert line.endswith(": changed from 12.3× to 12.3× (+0.0%), promised speedup 10.0 → 9.0")


@pytest.mark.parametrize("info", [{}, {"perfsuite": 3}, [], "x", None])
def test_record_without_a_perfsuite_entry_is_refused(path: Path, info: object) -> None:
    edit(path, lambda d: d["benchmarks"][1].update(extra_info=info))
    assert "the optimized record has no perfsuite entry; restore it from git" in refused(path)


def test_short_revisions_and_cpu_names() -> None:
    assert module.short(REVISION) == REVISION[:7] == "1a2b3c4"
    assert [module.short(r) for r in (None, "")] == ["(unknown)", "(unknown)"]
    assert [module.is_cpu(d) for d in ("cpu", "cpu-amd-epyc", "cpux", "nvidia-cpu")] == [True, True, False, False]


@pytest.mark.parametrize("here", [701.0, 699.0, 701.1, 698.9])
def test_power_limits_within_one_watt_are_equal(here: float) -> None:
    errors, notes = compare_machines(MACHINE, dataclasses.replace(MACHINE, power_limit_w=here))
    assert notes == []
    assert len(errors) == (abs(here - 700) > 1)
    assert all(e.startswith(f"power limit was 700 W when accepted, is {here:g} W here; compare on") for e in errors)


def test_power_limit_that_becomes_unknown_is_an_error_and_the_reverse_a_note() -> None:
    unknown = dataclasses.replace(MACHINE, power_limit_w=None)
    (error,), notes = compare_machines(MACHINE, unknown)
    assert error.startswith("power limit was 700 W when accepted, is unknown here; ")
    assert notes == []
    assert compare_machines(unknown, MACHINE) == (
        [],
        ["power limit was unknown when accepted, is 700 W here"],
    )
    assert compare_machines(unknown, unknown) == ([], [])


def test_cpu_model_and_cores_are_errors_if_either_machine_is_a_cpu() -> None:
    other = dataclasses.replace(MACHINE, cores=2, cpu="AMD")
    assert len(compare_machines(dataclasses.replace(MACHINE, device="cpu"), other)[0]) == 3
    assert len(compare_machines(MACHINE, dataclasses.replace(other, device="cpu"))[0]) == 3
    errors, notes = compare_machines(MACHINE, other)
    assert (errors, len(notes)) == ([], 2)
    assert notes[1] == "CPU cores was 16 when accepted, is 2 here"


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[3].glob("baselines/*.json")), ids=lambda p: p.stem)
def test_baselines_of_this_repository_are_unchanged_by_load_and_save(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    stored = load(copy)
    assert stored.entries
    save(copy, stored)
    before, after = (json.loads(p.read_text()) for p in (file, copy))
    assert before["benchmarks"] == after["benchmarks"]


def test_json_layout_and_indentation() -> None:
    value = {"a": [1, 2.5, None], "b": {}, "c": [{"d": "é"}, []], "e": []}
    assert storage.laid_out(value, "") == (
        '{\n  "a": [1, 2.5, null],\n  "b": {},\n  "c": [\n    {\n      "d": "é"\n    },\n    []\n  ],\n  "e": []\n}'
    )
    assert storage.laid_out([[1], 2], "    ") == "[\n      [1],\n      2\n    ]"
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.laid_out([math.nan], "")


def test_digest_is_sha256_of_canonical_json() -> None:
    text = b'{"a":[1.5,null],"b":{"c":"\\u00e9","d":true}}'
    assert storage._hashed({"b": {"d": True, "c": "é"}, "a": (1.5, None)}) == hashlib.sha256(text).hexdigest()
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage._hashed(math.inf)


def test_contents_of_the_header_and_a_record(path: Path) -> None:
    data = json.loads(path.read_text())
    assert list(data) == ["perfsuite", "machine_info", "commit_info", "datetime", "version", "benchmarks"]
    assert data["perfsuite"]["schema"] == SCHEMA
    assert data["machine_info"] == {
        "node": "nvidia-h200",
        "machine": "Linux-6.1-x86_64",
        "system": "Linux",
        "python_implementation": "CPython",
        "python_version": "3.11.9",
        "device": "NVIDIA H200",
        "cpu": {"brand_raw": "Intel Xeon", "count": 16},
    }
    commit = {"id": "unversioned", "time": None, "dirty": False, "branch": None, "project": "perfsuite"}
    assert data["commit_info"] == commit
    assert data["datetime"] == "2026-11-01T12:00:00+00:00"
    reference, optimized = data["benchmarks"][:2]
    assert reference["name"] == "pair000::speed[w]@reference"
    assert (reference["group"], reference["fullname"]) == (workload_id(0), f"{workload_id(0)}@reference")
    assert (reference["params"], reference["param"], reference["extra_info"]) == (None, None, {})
    assert optimized["options"] == {"clock": "device", "direction": "forward", "dtype": "float32"}
    assert set(optimized["extra_info"]) == {"perfsuite", "digest"}
    assert "blocks_s" not in optimized["extra_info"]["perfsuite"]
    assert optimized["stats"]["data"] == list(make(0).blocks_s["optimized"])
    assert optimized["stats"]["mean"] == pytest.approx(fmean(make(0).blocks_s["optimized"]), rel=1e-5)


def test_date_in_the_header_is_the_earliest_acceptance_or_the_epoch(tmp_path: Path) -> None:
    late = dataclasses.replace(make(0), accepted="2030-01-01T00:00:00+00:00")
    for name, entries, date in (
        ("a", [late, make(1)], "2026-11-01T12:00:00+00:00"),
        ("b", [], "1970-01-01T00:00:00+00:00"),
    ):
        save(tmp_path / name, book(*entries))
        assert json.loads((tmp_path / name).read_text())["datetime"] == date
        assert load(tmp_path / name) == book(*entries)


def test_save_removes_temporary_files_of_killed_writers(path: Path) -> None:
    stale = path.parent / f".{path.name}.x.tmp"
    other = path.parent / ".other.json.x.tmp"
    for file in (stale, other):
        file.write_text("{")
    save(path, load(path))
    assert not stale.exists()
    assert other.exists()


def test_update_creates_missing_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "cpu.json"
    assert update(path, lambda old: merge(old, [make(0)], machine=MACHINE)) == (None, book(make(0)))
    old, new = update(path, lambda old: merge(old, [make(1)], machine=MACHINE))
    assert (old, new) == (book(make(0)), book(make(0), make(1)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1', "cut short or damaged at line 1, column 8"),
        ('{"a": "b', "cut short or damaged at line 1, column 7"),
        ('{"a": 1]', "cut short or damaged at line 1, column 8"),
        ('{"a": 1 2}', "not valid JSON at line 1, column 9"),
        ('{\n"a" 1}\n\n', "not valid JSON at line 2, column 5"),
        (f'{{"a": {"9" * 20}}}', "out of range"),
        (f'{{"a": {2**63}}}', "out of range"),
        (f'{{"a": -{2**63}}}', "out of range"),
        (f'{{"a": {2**63 - 1}}}', "not a baseline"),
        (f'{{"a": -{2**63 - 1}}}', "not a baseline"),
        ('{"a": 1e400}', "1e400 is out of range"),
        ('{"a": 1e308}', "not a baseline"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "field 'b' appears twice"),
        ('{"a": {"b": 1, "c": 2, "c": 3}}', "field 'c' appears twice"),
        ('{"a": }', "cut short or damaged at line 1, column 7"),
        (f'{{"a": 1.{"0" * 30}e999}}', f"(1.{'0' * 18}… is out of range)"),
        (f'{{"a": {"9" * 25}}}', f"({'9' * 20}… is out of range)"),
    ],
)
def test_json_errors_are_reported_with_their_place(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    assert says in refused(path)


def test_long_names_and_control_characters_are_shortened_for_messages() -> None:
    assert [len(storage._short("x" * n)) for n in (159, 160, 161, 1000)] == [159, 160, 161, 161]
    assert storage._short("abcdef", 3) == "abc…"
    assert storage._one_line("a\n b\x1b\u2028c\ud800") == "a b\\x1b c\\ud800"
