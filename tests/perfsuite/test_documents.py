"""The documents: the site builds without a warning, and the tutorial's files and commands do what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from scratch import ROOT, Project, times

from perfsuite.exit_codes import CODE_AT_FAULT

pytest_plugins = ["pytester"]

TUTORIAL = ROOT / "docs/tutorial.md"
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(?:href|src)="([^"]+)"')


# --- the site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning is an error."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'perfsuite[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'perfsuite[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    missing = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are absolute
            continue
        for target in LINK.findall(page.read_text()):
            path = target.partition("#")[0].partition("?")[0]
            if path and not re.match(r"[a-z]+:|//", path) and not (page.parent / path).exists():
                missing.add(f"{page.relative_to(site)}: {target}")
    assert not missing


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//')
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text())]


def test_the_reference_has_every_public_name_and_command(site: Path) -> None:
    import perfsuite
    from perfsuite.cli import main

    declarations = (site / "reference/declarations.html").read_text()
    assert [name for name in perfsuite.__all__ if f'id="perfsuite.{name}"' not in declarations] == []
    assert "<code>time_limit</code></td>" in declarations  # parameters are tables
    commands = (site / "reference/commands.html").read_text()
    assert [name for name in main.commands if f"Usage: perfsuite {name}" not in commands] == []


# --- the tutorial ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line after `$`, and what it prints."""

    line: str
    expected: tuple[str, ...]


def steps() -> Iterator[tuple[str, str] | Command]:
    """Yield the tutorial's files, as (name, text), and its commands, in order."""
    for block in BLOCK.finditer(TUTORIAL.read_text()):
        if block["kind"] == "python":
            assert block["title"], "a file of the tutorial has no name"
            yield block["title"], block["text"]
            continue
        assert block["kind"] == "console", f"nothing runs a block of {block['kind']}"
        for part in block["text"].split("$ ")[1:]:
            line, *expected = part.splitlines()
            yield Command(line, tuple(expected))


def pattern(line: str) -> re.Pattern[str]:
    """Return what matches a line of the tutorial: … stands for anything, and columns may be wider."""
    parts = (r"\s+".join(map(re.escape, part.split(" "))) for part in line.strip().split("…"))
    return re.compile(".*".join(parts))


def write(project: Project, title: str, text: str) -> None:
    """Write a file of the tutorial, or replace a function of one: "fast in test_softmax.py"."""
    function, _, name = title.rpartition(" in ")
    if function:
        whole = (project.path / name).read_text()
        text, replaced = re.subn(rf"def {function}\(.*?\n\n\n", f"{text}\n\n", whole, flags=re.DOTALL)
        assert replaced == 1
    project.write(name, text)


def output_of(project: Project, line: str, *, slower: float) -> tuple[int, str]:
    """Run a command of the tutorial; times are made up, a current side that is `slower` by a factor."""
    program, *arguments = shlex.split(line)
    if program == "git":
        project.git(*arguments)
        return 0, ""
    if program == "pytest" and "perf" not in arguments:
        done = project.run(*arguments)
        return int(done.ret), done.stdout.str()
    made_up = times(slower=slower - 1, sizes={"rows": 64, "columns": 4096}, speedup=3.0)
    with project.pretending(made_up):
        if program == "pytest":
            done = project.run(*arguments)
            return int(done.ret), done.stdout.str()
        assert program == "perfsuite"
        result = project.cli(*arguments)
        return result.exit_code, result.output


def test_the_tutorial(project: Project) -> None:
    project.write(".gitignore", "__pycache__/\n.perfsuite/\n.hypothesis/\n.benchmarks/")
    slower, ran = 1.0, []
    for step in steps():
        if not isinstance(step, Command):
            name, text = step
            write(project, name, text)
            slower = 4.0 if ".double()" in text else 1.0
            continue
        for line in step.line.split(" && "):
            code, output = output_of(project, line, slower=slower)
            ran.append(line.partition(" --reason")[0])
        for expected in step.expected:
            assert pattern(expected).search(output), f"{step.line} does not print {expected!r}:\n{output}"
    assert code == CODE_AT_FAULT  # as the tutorial says of the last gate
    assert [line for line in ran if not line.startswith("git")] == [
        "pytest -m correctness -q",
        "pytest -m correctness -q",
        "pytest -m perf -q",
        "perfsuite accept",
        "perfsuite gate",
        "perfsuite gate",
    ]
