"""The site builds without a warning, the tutorial's commands print what it shows, and all documented commands
exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from scale import FULL, FULLY
from scratch import ROOT, Project, times

from perfsuite import cli
from perfsuite.gate.exit_codes import CODE_AT_FAULT

pytest_plugins = ["pytester"]

TUTORIAL = ROOT / "docs/tutorial.md"
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r'^```(?P<kind>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
OWN_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(?:href|src)="([^"]+)"')


# --- the site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, which takes 10 s; a warning is an error."""
    if not FULL:
        pytest.skip("the site is built in make test-all; the documents' own links are tested in each run")
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


def test_every_link_of_the_site_has_a_target(site: Path) -> None:
    missing = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are absolute
            continue
        for target in LINK.findall(page.read_text()):
            path = target.partition("#")[0].partition("?")[0]
            if path and not re.match(r"[a-z]+:|//", path) and not (page.parent / path).exists():
                missing.add(f"{page.relative_to(site)}: {target}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_has_a_target(document: Path) -> None:
    """Anchors must match a heading, by the rule of GitHub and of the site."""
    missing = []
    for target in OWN_LINK.findall(re.sub(r"`[^`\n]*`", "", FENCED.sub("", document.read_text()))):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            missing.append(target)
    assert not missing


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "]", heading)) for heading in headings)
    return {word.strip().lower().replace(" ", "-") for word in words}


def test_trust_states_the_mutation_rates_that_were_measured() -> None:
    stated = re.findall(r"(\d+)(?: to (\d+))?% of\s+`(\w+)`'", (ROOT / "docs/trust.md").read_text())
    rows = (ROOT / "docs/mutation.md").read_text().splitlines()
    assert {module for *_, module in stated} >= {"decision", "accepted_entries", "hierarchical"}
    for *rates, module in stated:
        row = next(r for r in rows if re.match(rf"\| perfsuite/\w+/{module}\.py", r))
        assert {int(rate) for rate in rates if rate} <= {int(rate) for rate in re.findall(r"(\d+)%", row)}, row


def test_site_loads_nothing_from_other_servers(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//')
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text())]


def test_reference_pages_contain_every_public_name_and_command(site: Path) -> None:
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
    """A command line after `$`, and its expected output."""

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
    """Return a pattern for a line of the tutorial: … matches anything, and columns may be wider."""
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
    """Run a command of the tutorial with synthetic times, in which the current side takes `slower` times as long."""
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


@FULLY  # three runs of pytest and three of the gate
def test_tutorial_commands_print_what_it_shows(project: Project) -> None:
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
    assert code == CODE_AT_FAULT  # the tutorial's last gate is red
    assert [line for line in ran if not line.startswith("git")] == [
        "pytest -m correctness -q",
        "pytest -m correctness -q",
        "pytest -m perf -q",
        "perfsuite accept",
        "perfsuite gate",
        "perfsuite gate",
    ]


# --- the commands of all documents ----------------------------------------------------------------------------------

SHELLS = ("", "sh", "bash", "console")


def commands_of(document: Path) -> Iterator[list[str]]:
    """Yield the words of each line of a document's code blocks that runs perfsuite or a file of Python."""
    for block in BLOCK.finditer(document.read_text()):
        if block["kind"] not in SHELLS:
            continue
        for line in block["text"].replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ")
            if re.match(r"(perfsuite|python3?) ", words):
                yield shlex.split(words, comments=True)


def refusal(words: list[str]) -> str:
    """Return why the command line is refused, without running it; empty if it is valid."""
    program, *arguments = words
    if program != "perfsuite":
        file = next((a for a in arguments if a.endswith(".py") and a.startswith("tools/")), None)
        return "" if file is None or (ROOT / file).is_file() else f"there is no {file}"
    if arguments[0] == "train":
        shown = CliRunner().invoke(cli.main, [*arguments, "--show"])
        return shown.output if shown.exit_code else ""
    command: click.Command = cli.main
    context: click.Context | None = None
    try:
        while isinstance(command, click.Group):
            context = click.Context(command, parent=context, **command.context_settings)
            name, *arguments = arguments
            found = command.get_command(context, name)
            if found is None:
                return f"there is no command {name}"
            command = found
        command.make_context(command.name, arguments, parent=context)
    except click.exceptions.Exit:  # --help
        return ""
    except click.UsageError as error:
        message = error.format_message()
        return "" if "does not exist" in message else message  # a file of the reader's
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_document_is_valid(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(ROOT)
    refused = {shlex.join(words): why for words in commands_of(document) if (why := refusal(words))}
    assert not refused


def test_invalid_commands_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(ROOT)
    assert "no_field" in refusal(["perfsuite", "train", "ups", "--no_field", "3"])
    assert "--no-option" in refusal(["perfsuite", "gate", "--no-option"])
    assert "no command wrong" in refusal(["perfsuite", "wrong"])
    assert "no tools/wrong.py" in refusal(["python", "tools/wrong.py"])
