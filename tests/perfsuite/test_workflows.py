"""Workflows, actions and templates have least permissions and pinned actions, and the comment runs no code of the pull
request."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from scratch import ROOT, lines_with
from test_comment import EXAMPLE

from perfsuite.cli import main
from perfsuite.history.store import FOLDER
from perfsuite.report import comment, jsonfile
from perfsuite.scaffold import FILES, Source
from perfsuite.system.folders import SCRATCH

yaml = pytest.importorskip("yaml")

SOURCE = Source("github.com", "ada/perfsuite", "0123456789abcdef0123456789abcdef01234567")
ACTIONS = ("action.yml", ".github/actions/comment/action.yml")
PINNED = re.compile(r"actions/[\w/-]+@v\d+|ada/perfsuite(/[\w./-]+)?@[0-9a-f]{40}|\./\.github/actions/comment")
POST = ROOT / ".github/actions/comment/post.py"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what `perfsuite init` writes for each CI."""
    monkeypatch.setattr("perfsuite.scaffold.source", lambda: SOURCE)
    for ci in FILES:
        assert CliRunner().invoke(main, ["init", str(tmp_path), "--ci", ci]).exit_code == 0
    return tmp_path


def parsed(path: Path) -> Any:
    (document,) = yaml.safe_load_all(path.read_text())
    return document


def workflows(written: Path) -> list[Path]:
    found = sorted((ROOT / ".github/workflows").glob("*.yml"))
    return [*found, *(written / name for name in FILES["github"])]


def jobs(workflow: Any) -> list[dict[str, Any]]:
    return list(workflow["jobs"].values())


def steps(document: Any) -> list[dict[str, Any]]:
    return [step for job in (jobs(document) if "jobs" in document else [document["runs"]]) for step in job["steps"]]


# --- workflows and actions ------------------------------------------------------------------------------------------


def test_every_workflow_has_least_permissions_and_pinned_actions(written: Path) -> None:
    for path in [*workflows(written), *(ROOT / name for name in ACTIONS)]:
        document = parsed(path)
        for step in steps(document):
            assert ("uses" in step) != ("run" in step), path
            assert PINNED.fullmatch(step.get("uses", "actions/x@v1")), f"{path}: {step['uses']}"
            # Text that others choose (a branch's name, a title) would be run as code in a script.
            assert "${{" not in step.get("run", ""), path
        if "jobs" not in document:
            continue
        assert document["permissions"] in ({}, {"contents": "read"}), path
        assert "pull_request_target" not in path.read_text()
        for job in jobs(document):
            assert "timeout-minutes" in job, path
            writing = {k for k, v in job.get("permissions", {}).items() if v != "read"}
            assert writing == ({"pull-requests"} if is_posting(document) else set()), path


def is_posting(document: Any) -> bool:
    return "workflow_run" in document.get(True, {})  # YAML 1.1 reads the key `on` as true


def test_the_posting_workflows_run_no_code_of_the_pull_request(written: Path) -> None:
    posting = [path for path in workflows(written) if is_posting(parsed(path))]
    assert [path.name for path in posting] == ["comment.yml", "perfsuite-comment.yml"]
    named = {parsed(path)["name"] for path in workflows(written)}
    for path in posting:
        document = parsed(path)
        assert set(document[True]) == {"workflow_run"}
        assert set(document[True]["workflow_run"]["workflows"]) <= named
        (job,) = jobs(document)
        assert job["if"] == "github.event.workflow_run.event == 'pull_request'"
        assert job["permissions"]["actions"] == "read"
        assert set(job["permissions"]) <= {"actions", "pull-requests", "contents"}
        assert not any("run" in step for step in job["steps"])
        for step in job["steps"]:
            if step["uses"].startswith("actions/checkout"):
                assert step["with"]["ref"] == "${{ github.event.repository.default_branch }}"
                assert step["with"]["persist-credentials"] is False
            else:
                assert step["uses"].partition("@")[0].endswith(".github/actions/comment")
    (step,) = parsed(ROOT / ACTIONS[1])["runs"]["steps"]
    assert step["run"] == 'PYTHONPATH="$GITHUB_ACTION_PATH/../../.." python3 "$GITHUB_ACTION_PATH/post.py"'


def test_the_gate_of_the_users_workflow_fits_the_action(written: Path) -> None:
    document = parsed(written / ".github/workflows/perfsuite.yml")
    inputs = parsed(ROOT / "action.yml")["inputs"]
    for job in jobs(document):
        assert set(job["steps"][-1]["with"]) <= set(inputs)
    gate = document["jobs"]["gate"]
    assert gate["steps"][0]["with"]["fetch-depth"] == 0
    assert "github.event.pull_request.head.repo.full_name == github.repository" in gate["if"]
    artifact = parsed(ROOT / ACTIONS[1])["inputs"]["artifact"]["default"]
    assert inputs["artifact"]["default"] == artifact
    assert artifact in (ROOT / ".github/workflows/gate.yml").read_text()


def test_the_history_is_cached_between_runs() -> None:
    """The action restores the latest history before the gate, and saves it with the run's own file, whatever came of
    the gate. A cache is never overwritten, so that each run has a key of its own."""
    every = steps(parsed(ROOT / "action.yml"))
    (restore,) = [s for s in every if s.get("uses", "").startswith("actions/cache/restore@")]
    (save,) = [s for s in every if s.get("uses", "").startswith("actions/cache/save@")]
    gate = next(s for s in every if "perfsuite gate" in s.get("run", ""))
    assert every.index(restore) < every.index(gate) < every.index(save)
    assert save["if"].startswith("always()")
    assert restore["with"]["path"] == save["with"]["path"] == f"{SCRATCH}/{FOLDER}/"
    assert restore["with"]["key"] == save["with"]["key"]
    assert "github.run_id" in save["with"]["key"]
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"])
    _, template = yaml.safe_load_all((ROOT / ".gitlab/perfsuite.yml").read_text())
    cache = template["perfsuite gate"]["cache"]
    assert (cache["paths"], cache["when"]) == ([f"{SCRATCH}/{FOLDER}/"], "always")


def test_the_gitlab_template_uses_its_inputs_and_excludes_forks() -> None:
    header, template = yaml.safe_load_all((ROOT / ".gitlab/perfsuite.yml").read_text())
    text = (ROOT / ".gitlab/perfsuite.yml").read_text()
    assert set(re.findall(r"\$\[\[ inputs\.(\w+) \]\]", text)) == set(header["spec"]["inputs"])
    gate = template["perfsuite gate"]
    assert gate["variables"]["GIT_DEPTH"] == "0"
    assert gate["artifacts"]["reports"]["junit"].startswith(gate["artifacts"]["paths"][0])
    never = [rule["if"] for rule in gate["rules"] if rule.get("when") == "never"]
    assert any("SOURCE_PROJECT_ID" in condition for condition in never)  # no code of a fork runs on one's own runner


def test_init_includes_the_gitlab_template_with_known_inputs(written: Path) -> None:
    (included,) = parsed(written / ".gitlab-ci.yml")["include"]
    header, _ = yaml.safe_load_all((ROOT / ".gitlab/perfsuite.yml").read_text())
    assert set(included["inputs"]) <= set(header["spec"]["inputs"])
    assert included["remote"].endswith("ada/perfsuite/" + SOURCE.ref + "/.gitlab/perfsuite.yml")


def test_the_ci_snippets_of_the_readme_are_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    github, gitlab = blocks
    assert len(github.splitlines()) == len(gitlab.splitlines()) == 5
    *_, last = yaml.safe_load(github)
    assert last == {"uses": "OWNER/perfsuite@v0.1.0"}
    (included,) = yaml.safe_load(gitlab)["include"]
    header, _ = yaml.safe_load_all((ROOT / ".gitlab/perfsuite.yml").read_text())
    assert set(included["inputs"]) <= set(header["spec"]["inputs"])


# --- the comment is posted ------------------------------------------------------------------------------------------

GH = """
import json, sys
from pathlib import Path

folder = Path(__file__).parent
answers = json.loads((folder / "answers.json").read_text())
arguments = sys.argv[1:]
given = sys.stdin.read() if "--input" in arguments else ""
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([arguments, given]) + "\\n")
path = arguments[1].partition("?")[0]
if path.endswith("/zip"):
    sys.stdout.buffer.write((folder / "artifact.zip").read_bytes())
elif path in answers:
    print(json.dumps(answers[path]))
else:
    sys.exit(f"gh: not found: {path} (HTTP 404)")
"""
HEAD = "a" * 40
FORK = {"id": 77, "full_name": "eve/dots", "owner": {"login": "eve"}}
RUN = {"id": 5, "event": "pull_request", "head_sha": HEAD, "head_branch": "x&y", "head_repository": FORK}
PULL = {"number": 12, "head": {"sha": HEAD, "repo": FORK}}
ARTIFACT = {"id": 9, "name": "perfsuite-report", "expired": False, "size_in_bytes": 1000}
POSTED = "repos/ada/dots/issues/12/comments"


class GitHub:
    """Simulates GitHub's answers to `gh api`, and records the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, Any] = dict(RUN)
        self.answers: dict[str, Any] = {
            "repos/ada/dots/pulls": [PULL],
            "repos/ada/dots/actions/runs/5/artifacts": {"artifacts": [ARTIFACT]},
            POSTED: [[]],
            "repos/ada/dots/issues/comments/31": {},
        }
        self.pack({"report.json": jsonfile.document(EXAMPLE)})

    def pack(self, files: dict[str, str]) -> None:
        with zipfile.ZipFile(self.folder / "artifact.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in files.items():
                archive.writestr(name, text)

    def post(self) -> SimpleNamespace:
        """Run the action's script in this process, with this GitHub."""
        output, code = io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
            for name, value in self.environment().items():
                patch.setenv(name, value)
            try:
                runpy.run_path(str(POST), run_name="__main__")
            except SystemExit as ended:
                code = int(str(ended.code))
        return SimpleNamespace(returncode=code, stdout=output.getvalue())

    def environment(self) -> dict[str, str]:
        """Return the variables that the action sets; the answers so far are those that the script gets."""
        (self.folder / "gh").write_text(f"#!{sys.executable} -S\n{GH}")
        (self.folder / "gh").chmod(0o755)
        (self.folder / "answers.json").write_text(json.dumps(self.answers))
        (self.folder / "event.json").write_text(json.dumps({"workflow_run": self.run}))
        return {
            "PATH": f"{self.folder}{os.pathsep}/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_REPOSITORY": "ada/dots",
            "GITHUB_SERVER_URL": "https://github.com",
            "ARTIFACT": "perfsuite-report",
        }

    def sent(self) -> list[tuple[str, str, str]]:
        """Return (method, path, body) of what was written."""
        calls = [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return [(a[a.index("--method") + 1], a[1], json.loads(text)["body"]) for a, text in calls if "--method" in a]


@pytest.fixture
def github(tmp_path: Path) -> GitHub:
    return GitHub(tmp_path)


def test_the_first_comment_is_posted(github: GitHub) -> None:
    """The script needs only the standard library."""
    done = subprocess.run(
        [sys.executable, "-S", str(POST)], env=github.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "commented on pull request 12\n"), done.stderr
    expected = comment.text(EXAMPLE, "https://github.com/ada/dots/actions/runs/5")
    assert github.sent() == [("POST", POSTED, expected)]
    calls = (github.folder / "calls").read_text()
    assert "repos/ada/dots/pulls?state=open&per_page=100&head=eve%3Ax%26y" in calls


def test_an_existing_comment_is_renewed(github: GitHub) -> None:
    """A comment of somebody else is left, even if it begins with the marker."""
    bot, eve = {"login": "github-actions[bot]"}, {"login": "eve"}
    body = f"{comment.MARKER}\nold"
    others = [{"id": 29, "user": eve, "body": body}, {"id": 30, "user": bot, "body": "of another workflow"}]
    github.answers[POSTED] = [others, [{"id": 31, "user": bot, "body": body}]]
    assert github.post().stdout == "renewed the comment of pull request 12\n"
    assert [call[:2] for call in github.sent()] == [("PATCH", "repos/ada/dots/issues/comments/31")]


OTHER = {"number": 13, "head": {"sha": HEAD, "repo": FORK}}


@pytest.mark.parametrize(
    ("pulls", "run"),
    [
        ([], {}),
        ([{"number": 12, "head": {"sha": "b" * 40, "repo": FORK}}], {}),  # there are newer commits
        ([{"number": 12, "head": {"sha": HEAD, "repo": {"id": 1}}}], {}),
        ([{"number": 12, "head": {"sha": HEAD, "repo": None}}], {}),
        ([PULL, OTHER], {}),
        ([PULL], {"head_repository": None}),
        ([PULL], {"head_sha": "HEAD"}),
    ],
)
def test_a_run_that_is_no_pull_requests_head_gets_no_comment(
    github: GitHub, pulls: list[Any], run: dict[str, Any]
) -> None:
    github.answers["repos/ada/dots/pulls"] = pulls
    github.run |= run
    done = github.post()
    assert (done.returncode, github.sent() if (github.folder / "calls").exists() else []) == (0, [])
    assert done.stdout.startswith("no comment: no open pull request has the commit of this run as its head")


def test_the_pull_request_that_the_event_names_gets_the_comment(github: GitHub) -> None:
    github.answers["repos/ada/dots/pulls"] = [OTHER, PULL]
    github.run["pull_requests"] = [{"number": 12}]
    assert github.post().stdout == "commented on pull request 12\n"


def test_a_run_without_a_report_gets_no_comment(github: GitHub) -> None:
    github.answers["repos/ada/dots/actions/runs/5/artifacts"] = {"artifacts": [ARTIFACT | {"expired": True}]}
    done = github.post()
    assert (done.returncode, done.stdout) == (0, "no comment: the run has no artifact perfsuite-report\n")


def test_an_artifact_without_a_valid_report_gives_a_one_line_error(github: GitHub) -> None:
    large = {"artifacts": [ARTIFACT | {"size_in_bytes": 10**9}]}
    for files, said in (
        ({"other.json": ""}, "the artifact has no report.json"),
        ({"report.json": "{}"}, "report.json is no perfsuite report"),
        ({"report.json": " " * (17 << 20)}, "too large"),
        (None, "cannot be unpacked"),
        (large, "has 1000000000 bytes"),
    ):
        if files is None:
            (github.folder / "artifact.zip").write_bytes(b"PK\x03\x04 no archive")
        elif files is large:
            github.answers["repos/ada/dots/actions/runs/5/artifacts"] = large
        else:
            github.pack(files)
        done = github.post()
        assert done.returncode == 1, done.stdout
        assert lines_with(done.stdout, "::error::", said), done.stdout
        assert done.stdout.count("\n") == 1
    assert github.sent() == []


def test_a_refusal_of_github_gives_a_one_line_error(github: GitHub) -> None:
    del github.answers[POSTED]
    done = github.post()
    assert done.returncode == 1
    assert lines_with(done.stdout, "::error::GitHub does not answer", POSTED, "HTTP 404")
