"""tools/bootstrap.py: how it chooses a Python, and that it never changes an installed torch. No network."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "bootstrap.py"
PROJECT = """
[build-system]
requires = ["setuptools>=70"]
[project]
name = "perfsuite"
dependencies = ["click>=8", "torch>=2.11,<2.14", "rich>=13"]
[project.optional-dependencies]
test = ["triton>=3.6; platform_system == 'Linux'", "ruff>=0.9", "pywin32; platform_system == 'Windows'"]
"""
# Neither pytest.importorskip nor find_spec: once a process has looked for pip, it can no longer import setuptools, and
# so not torch.utils.cpp_extension.
NEEDS_PIP = pytest.mark.skipif(
    not any(True for _ in importlib.metadata.distributions(name="pip")), reason="no pip in this environment"
)


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script as a module that works on a project in a temporary folder."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "constraints.txt").write_text("# why\nclick==8.5.1\nrich==15.0.0\nruff==0.17.5\n")
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "VENV", root / ".venv")
    monkeypatch.delenv("PERFSUITE_PYTHON", raising=False)
    return module


@pytest.fixture
def pips(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record every call of pip without running it; constraints files are replaced by their text."""
    calls: list[list[str]] = []

    def pip(venv: Path, log: Path, arguments: list[str]) -> str | None:
        calls.append([Path(a).read_text() if a.endswith("constraints.txt") else a for a in arguments])
        return answers.pop(0) if answers else None

    answers: list[str | None] = []
    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.answers = answers  # type: ignore[attr-defined]
    return calls


def facts(**changes: Any) -> dict[str, Any]:
    """Return an inspection's result for an environment that has torch, but lacks ruff and rich."""
    return {
        "lacking": {"rich": "rich>=13", "ruff": "ruff>=0.9"},
        "installed": {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.5.2", "click": "8.1.0"},
        "can_build": True,
        **changes,
    }


def inspected(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
    done = subprocess.CompletedProcess([], 0, bootstrap.json.dumps(found))
    monkeypatch.setattr(bootstrap, "run", lambda command: done)


def test_script_parses_as_python_3_8() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_script_imports_only_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} <= sys.stdlib_module_names


def test_old_python_is_refused_in_one_line(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 8, 10))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="1"):
        bootstrap.main()
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err == (
        "bootstrap: Python 3.8 is too old; install Python 3.11 or newer, or name one in PERFSUITE_PYTHON\n"
    )


def test_python_named_in_the_environment_is_used_without_a_venv(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERFSUITE_PYTHON", sys.executable)
    bootstrap.main()
    assert capsys.readouterr() == (f"{sys.executable}\n", "")
    assert not bootstrap.VENV.exists()


@pytest.mark.parametrize(("name", "message"), [("/nonexistent/python", "not an executable"), ("false", "is Python ?")])
def test_named_python_that_does_not_run_is_refused(
    name: str, message: str, bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERFSUITE_PYTHON", name)
    with pytest.raises(SystemExit):
        bootstrap.main()
    assert message in capsys.readouterr().err


def test_venv_is_ready_until_the_requirements_change(bootstrap: ModuleType) -> None:
    python = bootstrap.python_of(bootstrap.VENV)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert not bootstrap.is_ready(bootstrap.VENV), "no stamp yet"
    (bootstrap.VENV / bootstrap.STAMP).write_text(bootstrap.stamp())
    assert bootstrap.is_ready(bootstrap.VENV)
    with (bootstrap.ROOT / "constraints.txt").open("a") as file:
        file.write("click==9\n")
    assert not bootstrap.is_ready(bootstrap.VENV)


def test_venv_without_its_python_is_not_ready(bootstrap: ModuleType) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / bootstrap.STAMP).write_text(bootstrap.stamp())
    assert not bootstrap.is_ready(bootstrap.VENV)


def test_venv_made_by_another_tool_is_never_cleared(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bootstrap.VENV.mkdir()
    (bootstrap.VENV / "precious").write_text("")
    with pytest.raises(SystemExit):
        bootstrap.create(bootstrap.VENV, inherit=False)
    assert "remove it and try again" in capsys.readouterr().err
    assert (bootstrap.VENV / "precious").exists()


@NEEDS_PIP
def test_inspection_finds_missing_packages(bootstrap: ModuleType) -> None:
    done = bootstrap.run([sys.executable, "-c", bootstrap.INSPECT, str(bootstrap.ROOT / "pyproject.toml")])
    assert done.returncode == 0, done.stdout
    found = bootstrap.json.loads(bootstrap.last_line(done.stdout))
    assert "pywin32" not in found["lacking"], "for another system"
    assert found["installed"]["click"]
    (bootstrap.ROOT / "pyproject.toml").write_text(PROJECT.replace("click>=8", "click>=99"))
    done = bootstrap.run([sys.executable, "-c", bootstrap.INSPECT, str(bootstrap.ROOT / "pyproject.toml")])
    assert bootstrap.json.loads(bootstrap.last_line(done.stdout))["lacking"]["click"] == "click>=99"


def test_only_missing_packages_are_installed_beside_torch(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, pips: list[list[str]]
) -> None:
    inspected(bootstrap, monkeypatch, facts())
    bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    first, last = pips
    assert first[-2:] == ["rich>=13", "ruff>=0.9"]
    pins = first[first.index("-c") + 1].splitlines()
    assert pins == [
        "torch==2.11.0", "triton==3.6.0", "numpy==2.5.2", "click==8.1.0", "rich==15.0.0", "ruff==0.17.5"
    ]  # fmt: skip
    assert last[-4:] == ["--no-deps", "--no-build-isolation", "-e", str(bootstrap.ROOT)]


def test_torch_outside_the_version_range_is_kept(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    pips: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspected(bootstrap, monkeypatch, facts(lacking={"torch": "torch<2.14,>=2.11"}))
    bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    assert len(pips) == 1, "nothing but perfsuite itself"
    assert "torch 2.11.0+cu130 is kept, though perfsuite was tested with torch<2.14,>=2.11" in capsys.readouterr().err


def test_missing_linters_are_tolerated_without_a_network(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    pips: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspected(bootstrap, monkeypatch, facts(lacking={"ruff": "ruff>=0.9"}))
    bootstrap.answers += ["the package index cannot be reached"] * 2
    bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    assert (
        "not installed (the package index cannot be reached): ruff; tests that need them are skipped"
        in capsys.readouterr().err
    )
    assert pips[-1][-1] == str(bootstrap.ROOT)


def test_missing_required_package_without_a_network_is_an_error(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    pips: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspected(bootstrap, monkeypatch, facts())
    bootstrap.answers += ["the package index cannot be reached"] * 2
    with pytest.raises(SystemExit):
        bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    message = capsys.readouterr().err.splitlines()
    last_line = "bootstrap: pip failed: the package index cannot be reached; install rich where this Python finds it"
    assert message[-1].startswith(last_line)
    assert len(pips) == 2, "each try takes a minute"
    kept = pips[1][pips[1].index("-c") + 1].splitlines()
    assert kept[:2] == ["torch==2.11.0", "triton==3.6.0"], "the second try may move the rest, never these"


def test_unavailable_optional_package_does_not_prevent_other_installs(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    pips: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspected(bootstrap, monkeypatch, facts(lacking={"rich": "rich>=13", "h5py": "h5py>=3.11"}))
    bootstrap.answers += ["No matching distribution found for h5py"] * 2
    bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    message = capsys.readouterr().err
    assert "not installed (No matching distribution found for h5py): h5py; tests that need them are skipped" in message
    assert "rich>=13" in pips[2]
    assert "h5py>=3.11" not in pips[2]


@NEEDS_PIP
def test_inspection_includes_the_train_extra(bootstrap: ModuleType) -> None:
    (bootstrap.ROOT / "pyproject.toml").write_text(PROJECT + 'train = ["no-such-library>=1"]\n')
    done = bootstrap.run([sys.executable, "-c", bootstrap.INSPECT, str(bootstrap.ROOT / "pyproject.toml")])
    found = bootstrap.json.loads(bootstrap.last_line(done.stdout))
    assert found["lacking"]["no-such-library"] == "no-such-library>=1"


def test_optional_packages_match_the_extras_of_pyproject(bootstrap: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {line.partition(">")[0] for extra in bootstrap.EXTRAS.split(",") for line in extras[extra]}
    assert names - {"triton"} == bootstrap.OPTIONAL


def test_pth_file_is_written_if_the_package_cannot_be_built(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    pips: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    inspected(bootstrap, monkeypatch, facts(lacking={}, can_build=False))
    monkeypatch.setattr(bootstrap, "site_packages", lambda venv: tmp_path)
    bootstrap.answers += ["no setuptools"]
    bootstrap.complete_inherited(bootstrap.VENV, Path("log"))
    assert (tmp_path / "perfsuite.pth").read_text() == f"{bootstrap.ROOT}\n"
    assert "-p perfsuite.plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "ERROR: Could not find x\nERROR: No matching distribution found for x",
            "No matching distribution found for x",
        ),
        ("ERROR: Cannot install a\nERROR: ResolutionImpossible: for help visit the manual", "Cannot install a"),
        ("Retrying after NewConnectionError\nERROR: No matching", "the package index cannot be reached"),
        ("No module named pip", "No module named pip"),
        ("", "exit 1"),
    ],
)
def test_pip_failure_is_summarised_in_one_line(
    output: str, message: str, bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "run", lambda command: subprocess.CompletedProcess([], 1, output))
    assert bootstrap.pip(bootstrap.VENV, tmp_path / "log", ["x"]) == message
    assert "$ pip install x" in (tmp_path / "log").read_text()


def test_new_environment_upgrades_pip_before_installing(
    bootstrap: ModuleType, pips: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to upgrade pip is ignored: without it the installation only takes longer."""
    monkeypatch.setattr(bootstrap, "has_torch", lambda python: False)
    monkeypatch.setattr(bootstrap, "inherits_torch", lambda python: False)
    monkeypatch.setattr(bootstrap, "create", lambda venv, inherit: venv.mkdir())
    bootstrap.answers.append("no network")  # type: ignore[attr-defined]
    bootstrap.set_up(bootstrap.VENV)
    assert [call[-2:] for call in pips] == [["--upgrade", "pip"], ["-e", f"{bootstrap.ROOT}[{bootstrap.EXTRAS}]"]]
    assert all("-c" in call for call in pips)
    assert (bootstrap.VENV / bootstrap.STAMP).read_text() == bootstrap.stamp()


def test_pip_environment_variables_are_removed(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    done = bootstrap.run([sys.executable, "-c", "import os; print('PIP_TARGET' in os.environ)"])
    assert done.stdout.strip() == "False"


def test_venv_inherits_an_outer_environment_with_torch(bootstrap: ModuleType, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(outer)], check=True)
    torch = bootstrap.site_packages(outer) / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise SystemExit('looked up, never imported')")
    assert bootstrap.has_torch(outer / "bin" / "python")
    # Do what `create` does if it is started by the outer environment's Python.
    code = (
        f"import importlib.util, pathlib; s = importlib.util.spec_from_file_location('b', {str(SCRIPT)!r}); "
        "b = importlib.util.module_from_spec(s); s.loader.exec_module(b); import subprocess, sys; "
        "subprocess.run([sys.executable, '-m', 'venv', '--without-pip', '--system-site-packages', sys.argv[1]]); "
        "b.inherit_environment(pathlib.Path(sys.argv[1]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([outer / "bin" / "python", "-c", code, bootstrap.VENV], check=True, env=environment)
    assert bootstrap.inherits_torch(bootstrap.python_of(bootstrap.VENV))
    assert not bootstrap.inherits_torch(outer / "bin" / "python"), "its own"


def test_these_tests_do_not_import_pip() -> None:
    assert "pip" not in sys.modules
