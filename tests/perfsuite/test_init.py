"""`perfsuite init`: the files that it writes or keeps, and the commands that it prints, which end in a green gate."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from scale import FULLY
from scratch import Project, git, lines_with, times

from perfsuite import __version__
from perfsuite.baseline import waivers
from perfsuite.cli import main
from perfsuite.gate.exit_codes import COULD_NOT_BEGIN
from perfsuite.report import comment
from perfsuite.scaffold import COMMON, FILES, source
from perfsuite.scaffold.source import PLACEHOLDER, Source, parse

pytest_plugins = ["pytester"]

PAIR = "tests/test_perfsuite_pair.py"
FAST = "return (x * y).sum(-1)"
CPU = f"{PAIR}::row_dots::speed[cpu]"


def init(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", str(folder), *arguments])


def commands(done: Result) -> list[str]:
    """Return the commands that `perfsuite init` prints, as a user would copy them."""
    assert done.exit_code == 0, done.output
    return [line[2:] for line in done.stdout.splitlines() if line.startswith("  ")]


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ci", FILES)
def test_existing_files_are_kept_and_listed(tmp_path: Path, ci: str) -> None:
    kept = ["baselines/waivers.toml", next(iter(FILES[ci]))]
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    done = init(tmp_path, "--ci", ci)
    assert done.exit_code == 0, done.output
    for name in COMMON | FILES[ci]:
        assert lines_with(done.stdout, f"left {name} as it is" if name in kept else f"wrote {name}")
        assert ((tmp_path / name).read_text() == "mine") == (name in kept)
    again = init(tmp_path, "--ci", ci)
    assert "wrote" not in again.stdout
    assert not any("Add perfsuite" in command for command in commands(again))
    assert ("to your .gitlab-ci.yml" in again.stdout) == (ci == "gitlab")


def test_dangling_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / PAIR).symlink_to(tmp_path / "nowhere.py")
    assert lines_with(init(tmp_path).stdout, f"left {PAIR} as it is")
    assert not (tmp_path / "nowhere.py").exists()


def test_example_waiver_is_valid_once_uncommented(tmp_path: Path) -> None:
    init(tmp_path)
    path = tmp_path / "baselines/waivers.toml"
    known = {"tests/test_perfsuite_pair.py::row_dots::speed[gpu]"}
    today = date(2026, 12, 1)
    assert waivers.load(path, today=today, known_ids=known) == ()
    text = path.read_text()
    path.write_text(re.sub(r"(?m)^# ?", "", text[text.index("# [[") :]))
    (waiver,) = waivers.load(path, today=today, known_ids=known)
    assert waiver.owner == "Ada Lovelace"


def test_unusable_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/baselines").write_text("a file")
    (tmp_path / "repository/inner").mkdir(parents=True)
    git(tmp_path / "repository", "init")
    for name, said in (
        ("file", "is a file; name the top folder of a repository"),
        ("gone", "does not exist; name the top folder"),
        ("taken", "make its folder writable, and run this again"),
        ("repository/inner", f"is not the top of its repository, where CI looks; name {tmp_path / 'repository'}"),
        ("new\nline", "does not exist"),
    ):
        done = init(tmp_path / name)
        assert done.exit_code == COULD_NOT_BEGIN
        assert done.stderr.count("\n") == 1
        assert lines_with(done.stderr, "Error: ", said), done.stderr
    assert (tmp_path / "taken/baselines").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = init(tmp_path)
    tmp_path.chmod(0o700)
    assert done.exit_code == COULD_NOT_BEGIN
    assert lines_with(done.stderr, "Error: cannot write", "make its folder writable")


# --- the source of perfsuite ----------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("https://github.com/ada/perfsuite.git", ("github.com", "ada/perfsuite")),
        ("git@github.com:ada/perfsuite.git", ("github.com", "ada/perfsuite")),
        ("ssh://git@gitlab.example.org:2222/a/b/perfsuite", ("gitlab.example.org", "a/b/perfsuite")),
        ("https://token@github.com/ada/perfsuite/", ("github.com", "ada/perfsuite")),
        ("/srv/perfsuite", None),
        ("https://github.com/a b/c", None),
    ],
)
def test_repository_address_is_parsed(address: str, found: tuple[str, str] | None) -> None:
    assert parse(address, COMMIT) == (Source(*found, COMMIT) if found else None)
    assert parse(address, "main") is None


@pytest.mark.parametrize("ci", FILES)
def test_workflows_pin_the_commit_of_this_perfsuite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    known = Source("github.com", "ada/perfsuite", COMMIT)
    monkeypatch.setattr("perfsuite.scaffold.source", lambda: known)
    done = init(tmp_path, "--ci", ci)
    assert "Replace" not in done.stdout
    text = "".join((tmp_path / name).read_text() for name in FILES[ci])
    assert text.count(COMMIT) >= 2
    assert not re.search("OWNER|@REF|RAW|URL|BRANCH", text)


@pytest.mark.parametrize("ci", FILES)
def test_inserted_values_are_not_replaced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str) -> None:
    origin = Source("github.com" if ci == "github" else "gitlab.com", "URL/RAW-BRANCH", COMMIT)
    monkeypatch.setattr("perfsuite.scaffold.source", lambda: origin)
    init(tmp_path, "--ci", ci)
    texts = [(tmp_path / name).read_text() for name in FILES[ci]]
    addresses = {a for t in texts for a in re.findall(r"\S*URL\S*", t)}
    wanted = {
        "github": {f"URL/RAW-BRANCH@{COMMIT}", f"URL/RAW-BRANCH/.github/actions/comment@{COMMIT}"},
        "gitlab": {f"{origin.raw}/.gitlab/perfsuite.yml", f"git+{origin.url}@{COMMIT}"},
    }
    assert addresses == wanted[ci]


def test_placeholder_to_replace_is_named_if_the_repository_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gitlab = Source("gitlab.com", "ada/perfsuite", COMMIT)
    for place in (PLACEHOLDER, gitlab):  # GitHub cannot use an action of another server
        (tmp_path / place.host).mkdir()
        monkeypatch.setattr("perfsuite.scaffold.source", lambda place=place: place)
        done = init(tmp_path / place.host)
        assert lines_with(done.stdout, "Replace OWNER/perfsuite@v", "perfsuite.yml", "perfsuite-comment.yml")
    assert PLACEHOLDER.ref == f"v{__version__}"
    assert source() == PLACEHOLDER or re.fullmatch("[0-9a-f]{40}", source().ref)


# --- from an empty repository to a red gate -------------------------------------------------------------------------


def test_printed_commands_end_in_a_green_gate_and_a_slowdown_is_red(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are synthetic here; the next test measures them. Commands of git run as printed."""
    monkeypatch.chdir(project.path)
    git(project.path, "init")
    project.measured(times(speedup=50.0))
    ran = []
    for command in commands(init(project.path)):
        words = command.partition("  #")[0].strip()
        if words.startswith("perfsuite "):
            (given,) = re.findall(r'"(.*)"', words) or [""]
            arguments = words.replace(f'"{given}"', "REASON").split()[1:] if given else words.split()[1:]
            done = project.cli(*(given if a == "REASON" else a for a in arguments))
            assert done.exit_code == 0, done.output
        elif words.startswith("pytest "):
            project.run(*words.split()[1:], "--collect-only").assert_outcomes()
        else:
            run_in_shell(words, project.path)
        ran.append(words)
    assert ran[0] == "pytest -m correctness"
    assert ran[-1] == "perfsuite gate"
    assert lines_with(done.output, "1 PASS")

    project.measured(times(speedup=50.0, slower=0.5))
    done = project.cli("gate")
    assert done.exit_code == 1, done.output
    printed = project.cli("comment", ".perfsuite/report/report.json")
    assert printed.exit_code == 0
    first, second = printed.output.splitlines()[:2]
    assert first == comment.MARKER
    assert second.startswith("### ❌ perfsuite is red: ")
    assert "the optimized side is 50.0% slower than the accepted revision" in second
    assert lines_with(printed.output, f"- REGRESSED: `{CPU}`: ", "slower")


@FULLY
def test_printed_commands_run_on_this_machine(project: Project) -> None:
    """Real processes and times are used, from the proof to a planted slowdown."""
    git(project.path, "init")
    done = subprocess.run(
        project.command("perfsuite", "init"), cwd=project.path, capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("  "):
            run_in_shell(line, project.path)
    path = project.path / PAIR
    assert FAST in path.read_text()
    path.write_text(path.read_text().replace(FAST, f"return sum({FAST.removeprefix('return ')} for _ in range(8)) / 8"))
    assert project.process("perfsuite", "gate", timeout=900).returncode == 1
    printed = project.process("perfsuite", "comment", ".perfsuite/report/report.json").stdout
    assert re.match(rf"{re.escape(comment.MARKER)}\n### ❌ perfsuite is red: .+: the optimized side ", printed)
    assert lines_with(printed, "- REGRESSED: ", CPU) or lines_with(printed, "- BELOW_FLOOR: ", CPU)


def run_in_shell(command: str, folder: Path) -> None:
    """Run a command line unchanged, with a git identity and this Python's programs."""
    name = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    nowhere = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    programs = folder / ".perfsuite" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (folder / ".perfsuite/.gitignore").write_text("*\n")
    for program in ("pytest", "perfsuite"):
        script = programs / program
        script.write_text(f'#!/bin/sh\nexec {" ".join(Project.command(program))} "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, **name, **nowhere, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
