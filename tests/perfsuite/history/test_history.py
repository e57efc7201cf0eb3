"""The history of runs: the files, their index, and the records that a run writes."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from histories import DOTS, figures, run, written
from scale import count
from scratch import ROOT, SMALL, TWO_LINES, Project, times

from perfsuite.errors import PerfsuiteError
from perfsuite.history import accepted, index, store
from perfsuite.history.index import Index
from perfsuite.history.records import Accepted, Run
from perfsuite.records import Status
from perfsuite.report.files import write as write_text
from perfsuite.report.workload_rows import Comparison

pytest_plugins = ["pytester"]

PAGE = 4096
"""Bytes of a page of SQLite."""


def look(root: Path, work: Callable[[Index], Any], **given: Any) -> Any:
    """Return the result of `work` on a project's index."""
    return index.using(store.folder_of(root), root / "baselines", work, **given)


def names(root: Path) -> list[str]:
    """Return the revisions of all runs in the index, the oldest first."""
    return look(root, lambda there: [(r.revision or "")[:7] for r, _ in there.series(DOTS)])


def problems(root: Path) -> list[str]:
    return look(root, lambda there: there.problems)


# --- the files ------------------------------------------------------------------------------------------------------


def test_run_read_from_its_file_equals_the_written_one(tmp_path: Path) -> None:
    whole = run(
        3,
        dirty=True,
        complete=False,
        workloads={
            DOTS: figures(
                accepted_s=1.1e-5,
                slowdown=-0.09,
                slowdown_low=-0.1,
                slowdown_high=-0.08,
                speedup=Comparison(value=10.0, low=9.0, high=11.0),
                least=True,
                baseline=Accepted(date="2026-10-01T00:00:00+00:00", optimized_s=1e-5, speedup=10.0, reason="µ"),
            ),
            "other": figures(None, verdict=Status.UNMEASURED),
            "bare": figures(verdict=None),
        },
    )
    (path,) = written(tmp_path, whole)
    assert store.read(path)[0] == whole
    assert path.name.startswith("20261104T120000Z-")
    assert (tmp_path / ".perfsuite/.gitignore").read_text() == "*\n"
    assert whole.counts() == {"PASS": 1, "UNMEASURED": 1, "measured": 1}


DAMAGED = {
    "": "it is damaged (Expecting value",
    '{"perfsuite_history":1,"ki': "it is damaged (Unterminated string",
    "[]": "it is no run of perfsuite",
    "{}": "it is no run of perfsuite",
    '{"perfsuite_history": 2}': "its format 2 is newer than this perfsuite knows (1); upgrade perfsuite",
    '{"perfsuite_history": 1}': "it is damaged (Run lacks 'kind')",
    "[" * 100_000: "it is damaged (",
}


@pytest.mark.parametrize(("text", "words"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_damaged_file_is_reported_and_skipped(tmp_path: Path, text: str, words: str) -> None:
    written(tmp_path, run(0), run(1))
    bad = store.folder_of(tmp_path) / "20261101T000000Z-00000000.json"
    bad.write_text(text)
    for _ in range(2):  # the index remembers it
        (line,) = problems(tmp_path)
        assert line.startswith(f"{bad}: {words}")
        assert "\n" not in line
        assert names(tmp_path) == ["0000000", "0000001"]
    bad.unlink()
    assert problems(tmp_path) == []


def test_broken_link_does_not_hide_other_runs(tmp_path: Path) -> None:
    written(tmp_path, run(1))
    (tmp_path / ".perfsuite/history").mkdir(parents=True, exist_ok=True)
    folder = next(path.parent for path in tmp_path.rglob("*.json"))
    (folder / "gone.json").symlink_to("nowhere")
    assert len(names(tmp_path)) == 1


def test_start_time_before_year_1_is_damage(tmp_path: Path) -> None:
    (path,) = written(tmp_path, run(1))
    path.write_text(path.read_text().replace(run(1).started, "0001-01-01T00:00:00+14:00"))
    assert "which is no time of a run" in problems(tmp_path)[0]


def test_binary_file_or_date_without_a_time_zone_is_damaged(tmp_path: Path) -> None:
    good, bytes_ = written(tmp_path, run(0), run(1))
    bytes_.write_bytes(b"\xff\xfe")
    good.write_text(good.read_text().replace("+00:00", ""))
    assert len(problems(tmp_path)) == 2


def test_a_name_that_is_not_utf8_is_shown_with_escapes(tmp_path: Path) -> None:
    id = "tests/test_\udcff.py::dots::speed[w]"
    machine = {"device": "cpu-\ud800", "device_name": "CPU \ud800"}
    written(tmp_path, run(0, id, host="\ud800x", machine=machine), run(1))
    index.add_last(store.folder_of(tmp_path), tmp_path / "baselines")
    assert problems(tmp_path) == []
    shown = id.replace("\udcff", "\\udcff")
    assert look(tmp_path, Index.workloads) == sorted([shown, DOTS])
    assert look(tmp_path, Index.devices) == {"cpu-\\ud800": "CPU \\ud800", "nvidia-h200": "NVIDIA H200"}
    ((found, _),) = look(tmp_path, lambda there: there.series(shown, "cpu-\\ud800"))
    assert found.host == "\\ud800x"


def test_a_file_whose_name_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    (path,) = written(tmp_path, run(0))
    path.with_name("\udcff.json").write_text(path.read_text())
    (line,) = problems(tmp_path)
    assert line.endswith("\\udcff.json: its name is not UTF-8; rename it")
    assert names(tmp_path) == ["0000000"]


def test_run_that_cannot_be_written_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / ".perfsuite").write_text("a file")
    with pytest.raises(
        PerfsuiteError, match=r"cannot write .*json: .*; free space there, make its folder writable, or name another$"
    ):
        written(tmp_path, run())


# --- the index ------------------------------------------------------------------------------------------------------


def test_index_follows_changes_of_the_files(tmp_path: Path) -> None:
    first, second = written(tmp_path, run(0), run(1))
    assert names(tmp_path) == ["0000000", "0000001"]
    first.unlink()
    assert names(tmp_path) == ["0000001"]
    written(tmp_path, run(2))
    assert names(tmp_path) == ["0000001", "0000002"]
    write_text(second, second.read_text().replace("0000001", "abcdef1"))
    assert names(tmp_path) == ["abcdef1", "0000002"]
    os.rename(second, second.with_name("kept.txt"))
    assert names(tmp_path) == ["0000002"]


def test_index_reads_only_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, run(0), run(1))
    read: list[str] = []
    original = store.read
    monkeypatch.setattr(store, "read", lambda path: read.append(path.name) or original(path))
    names(tmp_path)
    assert len(read) == 2
    names(tmp_path)
    assert len(read) == 2
    (third,) = written(tmp_path, run(2))
    names(tmp_path)
    assert read[2:] == [third.name]


def damage(kind: str, path: Path) -> None:
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "text":
        path.write_text("no database at all, " * 100)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "zeros":
        path.write_bytes(data[:100] + bytes(len(data) - 100))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "missing":
        path.unlink()
    else:
        statement = {
            "version": "PRAGMA user_version = 99",
            "no table": "DROP TABLE figures",
            "column": "ALTER TABLE runs RENAME COLUMN head TO tail",
            "row": "UPDATE figures SET data = '{'",
            "record": """UPDATE runs SET head = '{"kind": 7}'""",
        }[kind]
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute(statement)
        connection.close()


KINDS = ("cut", "text", "empty", "zeros", "folder", "missing", "version", "no table", "column", "row", "record")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_index_is_rebuilt_with_all_runs(tmp_path: Path, kind: str) -> None:
    written(tmp_path, *(run(n) for n in range(30)))
    before = names(tmp_path)
    assert len(before) == 30
    damage(kind, store.folder_of(tmp_path) / index.NAME)
    assert names(tmp_path) == before
    assert names(tmp_path) == before


def test_index_with_a_damaged_page_has_all_runs(tmp_path: Path) -> None:
    """Each page is replaced by invalid bytes, and by other pages."""
    written(tmp_path, *(run(n) for n in range(60)))
    before = names(tmp_path)
    path = store.folder_of(tmp_path) / index.NAME
    whole = path.read_bytes()
    pages = [whole[start : start + PAGE] for start in range(0, len(whole), PAGE)]
    every = [(n, other) for n in range(len(pages)) for other in (b"\x5a" * PAGE, *pages) if other != pages[n]]
    for n, other in every[:: max(1, len(every) // count(quick=25, full=len(every)))]:
        path.write_bytes(b"".join([*pages[:n], other, *pages[n + 1 :]]))
        assert names(tmp_path) == before, n


def test_locked_index_is_built_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, run(0), run(1))
    path = store.folder_of(tmp_path) / index.NAME
    names(tmp_path)
    monkeypatch.setattr(index, "LOCKED", 0.01)
    written(tmp_path, run(2))
    before = path.read_bytes()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert names(tmp_path) == ["0000000", "0000001", "0000002"]
    other.execute("ROLLBACK")
    other.close()
    assert path.read_bytes() == before  # a locked index is not replaced
    names(tmp_path)
    assert path.read_bytes() != before


WRITER = """
import sys
from histories import run, written
from pathlib import Path

for n in range(int(sys.argv[2]), int(sys.argv[3])):
    written(Path(sys.argv[1]), run(n % 3, seconds=1e-5 + n * 1e-9))
"""


def test_parallel_writers_and_readers_lose_no_run(tmp_path: Path) -> None:
    """Several processes write runs of the same second while threads update the index."""
    each = count(quick=20, full=200)
    folders = f"{ROOT}:{Path(__file__).parents[1]}"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(n * each), str((n + 1) * each)],
            env={**os.environ, "PYTHONPATH": folders},
        )
        for n in range(2)
    ]
    store.folder_of(tmp_path).mkdir(parents=True)
    seen = []
    with ThreadPoolExecutor(2) as readers:
        while any(w.poll() is None for w in writers):
            seen += list(readers.map(lambda _: len(names(tmp_path)), range(2)))
    assert [w.wait() for w in writers] == [0, 0]
    assert len(names(tmp_path)) == 2 * each
    assert problems(tmp_path) == []
    seconds = look(tmp_path, lambda there: {f.optimized_s for _, f in there.series(DOTS)})
    assert len(seconds) == 2 * each


def test_long_index_update_is_announced(tmp_path: Path) -> None:
    written(tmp_path, *(run(n) for n in range(index.MANY + 1)))
    said: list[str] = []
    look(tmp_path, lambda there: None, say=said.append)
    look(tmp_path, lambda there: None, say=said.append)
    assert said == [f"indexing {index.MANY + 1} runs"]


def test_add_last_indexes_the_latest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run indexes itself, so that opening a long history is fast."""
    folder = store.folder_of(tmp_path)
    for number in range(3):
        written(tmp_path, run(number))
        index.add_last(folder, tmp_path / "baselines")
    monkeypatch.setattr(store, "read", lambda path: pytest.fail(f"{path} is read again"))
    assert len(names(tmp_path)) == 3


def test_add_last_does_not_index_a_long_history(tmp_path: Path) -> None:
    written(tmp_path, *(run(n) for n in range(index.MANY + 1)))
    index.add_last(store.folder_of(tmp_path), tmp_path / "baselines")
    said: list[str] = []
    look(tmp_path, lambda there: None, say=said.append)
    assert said == [f"indexing {index.MANY + 1} runs"]


@pytest.mark.parametrize("content", [b"no database", b""])
def test_add_last_leaves_a_damaged_index_to_the_next_opening(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, run(0))
    (store.folder_of(tmp_path) / index.NAME).write_bytes(content)
    index.add_last(store.folder_of(tmp_path), tmp_path / "baselines")
    assert len(names(tmp_path)) == 1


# --- records of a run -----------------------------------------------------------------------------------------------


@pytest.fixture
def scale(project: Project) -> Project:
    project.write("test_scale.py", TWO_LINES)
    project.measured(times())
    return project


def kept(project: Project) -> list[Run]:
    """Return the runs in the project's history, the oldest first."""
    runs = [store.read(path)[0] for path in store.folder_of(project.path).glob("*.json")]
    return sorted(runs, key=lambda one: (one.started, one.kind != "accept"))


def test_every_kind_of_run_is_recorded(scale: Project) -> None:
    commit = scale.commit()
    assert scale.run("-m", "perf").ret == 0
    (first,) = kept(scale)
    assert (first.kind, first.revision, first.dirty, first.complete) == ("pytest", commit, False, True)
    assert first.host
    assert first.machine.torch
    (figure,) = first.workloads.values()
    assert figure.verdict is None
    assert (figure.optimized_s, figure.reference_s) == (1e-5, 2e-5)
    assert figure.speedup is not None
    assert (figure.costs.peak_bytes, figure.costs.host_syncs, figure.costs.launches) == (1024, 0, 1)
    scale.accept()
    scale.measured(times(slower=0.5))
    assert scale.cli("gate").exit_code == 1
    assert scale.cli("run").exit_code == 0
    assert sorted(one.kind for one in kept(scale)) == ["accept", "gate", "pytest", "run"]
    (gated,) = (one for one in kept(scale) if one.kind == "gate")
    figure = gated.workloads[SMALL]
    assert figure.verdict is Status.REGRESSED
    assert figure.slowdown == pytest.approx(0.5, abs=0.01)
    assert figure.slowdown_low is not None
    assert figure.slowdown_low < 0.5
    assert figure.baseline is not None
    assert (figure.baseline.revision, figure.baseline.optimized_s) == (commit, 1e-5)


def test_runs_that_measure_nothing_are_not_recorded(scale: Project) -> None:
    assert scale.run("-m", "correctness", "--perfsuite-isolate=always").ret == 0
    scale.cli("list")
    scale.commit()
    scale.cli("compare", "HEAD")
    assert kept(scale) == []


@pytest.mark.parametrize("reason", ["File exists", "No space left on device"])
def test_history_that_cannot_be_written_does_not_change_the_exit_code(scale: Project, reason: str) -> None:
    folder = store.folder_of(scale.path)
    if reason == "File exists":
        folder.parent.mkdir()
        folder.write_text("a file, in the way of the folder")
    else:
        scale.monkeypatch.setattr("perfsuite.report.files.os.replace", full)
    done = scale.run("-m", "perf")
    assert done.ret == 0
    (line,) = [line for line in done.outlines if line.startswith("the run is not in the history: cannot write ")]
    assert reason in line
    assert not list(folder.glob("*"))


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_uncommitted_baseline_does_not_make_a_run_dirty(scale: Project) -> None:
    scale.write(".gitignore", "__pycache__/\n.perfsuite/\n.hypothesis/\n.benchmarks/\n")
    scale.git("init")
    scale.commit()
    scale.accept()
    scale.commit("accepted")
    scale.replace("test_scale.py", "3 * x", "x * 3")
    scale.commit()
    scale.accept(times(speedup=3.0))
    assert [one.dirty for one in kept(scale)] == [False, False]
    scale.replace("test_scale.py", "x * 3", "3 * x")
    scale.run("-m", "perf")
    assert [one.dirty for one in kept(scale)].count(True) == 1


# --- accepted figures -----------------------------------------------------------------------------------------------


def test_accepted_figures_come_from_all_committed_versions_of_the_baseline(scale: Project) -> None:
    scale.write(".gitignore", "__pycache__/\n.perfsuite/\n.hypothesis/\n.benchmarks/\n")
    scale.git("init")
    scale.commit()
    path = scale.accept()
    scale.commit("accept once")
    path.write_text(path.read_text().replace('"reason": "the first"', '"reason": "edited by hand"'))
    scale.commit("a version that is not read")
    scale.git("checkout", "HEAD~1", "--", "baselines")
    scale.commit("as it was")
    scale.accept(times(speedup=4.0))
    entries = json.loads(path.read_text())["benchmarks"]
    last = entries[1]["extra_info"]["perfsuite"]["accepted"]

    def speedups() -> list[float]:
        found = look(scale.path, lambda there: there.accepted(SMALL))
        ((device, dated),) = found.items()
        assert device == path.stem
        return [round(a.speedup, 1) for a in dated]

    if last != entries[1]["extra_info"]["perfsuite"]["sessions"][0]["date"]:
        pytest.fail("the date of an acceptance is that of its session")
    assert speedups()[-1] == 4.0
    assert len(speedups()) <= 2  # acceptances within one second share a date
    scale.git("checkout", "--", "baselines")
    assert speedups() == [2.0]
    path.write_text("{")
    assert "cut short or damaged" in problems(scale.path)[0]
    assert speedups() == [2.0]


def test_history_without_git_has_no_accepted_figures(tmp_path: Path) -> None:
    assert accepted.head(tmp_path) == ""
    assert accepted.committed(tmp_path / "missing") == []
    written(tmp_path, run())
    assert look(tmp_path, lambda there: there.accepted(DOTS)) == {}


def test_search_for_a_history_ends_at_the_repository(tmp_path: Path) -> None:
    written(tmp_path, run())
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    assert store.find(inner) == tmp_path
    (tmp_path / "project" / ".git").mkdir()
    assert store.find(inner) is None
    written(inner, replace(run(), kind="run"))
    assert store.find(inner) == inner
