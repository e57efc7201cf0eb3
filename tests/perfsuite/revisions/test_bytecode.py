"""Bytecode is cached in .perfsuite if Python may not write it beside the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scale import FULLY
from scratch import TWO_LINES, Project, times

from perfsuite.revisions import bytecode
from perfsuite.system import device_nodes

pytest_plugins = ["pytester"]


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbid Python to write bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv(bytecode.FORBIDDEN, "1")
    monkeypatch.delenv(bytecode.PLACE, raising=False)
    yield
    monkeypatch.delenv(bytecode.PLACE, raising=False)


def settings() -> tuple[object, ...]:
    return sys.dont_write_bytecode, sys.pycache_prefix, *map(os.environ.get, (bytecode.FORBIDDEN, bytecode.PLACE))


def test_bytecode_is_kept_in_a_folder_that_git_ignores(forbidden: None, tmp_path: Path) -> None:
    before = settings()
    undo = bytecode.keep(tmp_path)
    assert undo is not None
    folder = tmp_path / ".perfsuite/bytecode"
    assert settings() == (False, str(folder), None, str(folder))
    assert (tmp_path / ".perfsuite/.gitignore").read_text() == "*\n"
    (tmp_path / "kept.py").write_text("x = 1\n")
    subprocess.run([sys.executable, "-c", "import kept"], cwd=tmp_path, check=True)
    copies = folder.joinpath(*tmp_path.parts[1:])
    assert [p.name.partition(".")[0] for p in copies.iterdir()] == ["kept"]
    assert not (tmp_path / "__pycache__").exists()
    bytecode.forget(tmp_path)
    assert not copies.exists()
    undo()
    assert settings() == before


def test_old_bytecode_is_reused_only_for_unchanged_sources_and_installed_packages(
    forbidden: None, tmp_path: Path
) -> None:
    """A tool that sets times may leave a changed source with the size and time that identify its bytecode."""
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    for folder in ("", "lib/site-packages"):
        (tmp_path / folder / "tile.py").write_text("size = 64\n")

    def sizes() -> list[str]:
        undo = bytecode.keep(tmp_path)
        assert undo is not None
        code = "import sys; sys.path.insert(0, sys.argv[1]); import tile; print(tile.size)"
        found = []
        for folder in ("", "lib/site-packages"):
            os.utime(tmp_path / folder / "tile.py", (1e9, 1e9))
            command = [sys.executable, "-c", code, str(tmp_path / folder)]
            found.append(subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout.strip())
        undo()
        return found

    copies = tmp_path.joinpath(".perfsuite/bytecode", *tmp_path.parts[1:])
    written = []
    for _ in range(4):
        assert sizes() == ["64", "64"]
        written.append(next(copies.glob("tile.*")).stat().st_mtime_ns)
    assert written[0] != written[1] == written[2] == written[3], "at the first run's start it was not there yet"
    for folder in ("", "lib/site-packages"):
        (tmp_path / folder / "tile.py").write_text("size = 32\n")
    assert sizes() == ["32", "64"]
    assert sizes() == ["32", "64"]
    (tmp_path / "tile.py").write_text("size = 64\n")
    assert sizes() == ["64", "64"]
    (tmp_path / ".perfsuite/bytecode" / bytecode.HASHES).write_text("[1]")
    (tmp_path / "tile.py").write_text("size = 16\n")
    assert sizes() == ["16", "64"]
    (tmp_path / "tile.py").unlink()
    (tmp_path / "tile").mkdir()
    undo = bytecode.keep(tmp_path)
    assert undo is not None
    undo()
    assert not list(copies.glob("tile.*")), "its source is gone"


def test_keep_does_nothing_if_bytecode_can_be_written_or_has_a_place(
    forbidden: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> bool:
        undo = bytecode.keep(tmp_path)
        if undo is not None:
            undo()
        return undo is not None

    assert kept()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        assert not kept()
    with monkeypatch.context() as patch:
        patch.setenv(bytecode.PLACE, "/elsewhere")
        assert not kept()
    (tmp_path / "file").write_text("")
    assert bytecode.keep(tmp_path / "file") is None  # no folder can be made there
    assert settings() == (True, None, "1", None)


def test_gate_keeps_bytecode_only_while_it_runs(forbidden: None, project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.write("conftest.py", "import sys\nprefix = sys.pycache_prefix\nprint('prefix', prefix)\n")
    project.accept()
    project.measured(times())
    before = settings()
    done = project.cli("gate")
    assert done.exit_code == 0, done.output
    assert settings() == before
    assert list((project.path / ".perfsuite/bytecode").rglob("conftest*.pyc"))
    assert not list(project.path.glob("__pycache__"))


@FULLY
def test_isolated_proofs_keep_bytecode_and_later_runs_use_the_folder(
    forbidden: None, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.write("conftest.py", "import sys\nprefix = sys.pycache_prefix\nprint('prefix', prefix)\n")
    before = settings()
    plain = "-m", "correctness", "-k", "equivalence"
    for isolate, kept in (("never", False), ("always", True)):
        done = project.run(f"--perfsuite-isolate={isolate}", *plain)
        done.assert_outcomes(passed=1)
        assert settings() == before
        assert bool(list(project.path.glob(".perfsuite/bytecode/**/conftest*.pyc"))) is kept
    assert not list(project.path.glob("__pycache__"))
    for nodes, kept in (((), False), ((os.devnull,), True)):
        monkeypatch.setattr(device_nodes, "NODES", nodes)
        seen = project.run(*plain, "-s").stdout.str()
        assert ("prefix None" not in seen) is kept


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("tile.cpython-311.pyc", "tile"),
        ("test_a.b.cpython-311-pytest-9.2.0.pyc", "test_a.b"),
        ("tile.cpython-313.opt-1.pyc", "tile"),
        ("tile.cpython-311.pyc.140123", "tile"),
        ("tile.pypy310.pyc", "tile"),
    ],
)
def test_stem_of_a_bytecode_file_is_that_of_its_source(name: str, stem: str) -> None:
    assert bytecode._stem(name) == stem
