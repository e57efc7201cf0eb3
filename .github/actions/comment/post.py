"""Post a gate's report as the one comment of its pull request. Runs on `workflow_run`, with a token that may write.

Nothing of the pull request is run or believed. Its number comes from GitHub, by the commit that the event names. The
report is one JSON file of bounded size, whose texts `perfsuite.report.comment` makes harmless. Only the standard
library and GitHub's own `gh` are used.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perfsuite.errors import PerfsuiteError, printable
from perfsuite.report import comment, jsonfile

FILE = "report.json"
MOST_PACKED, MOST_BYTES = 16 << 20, 16 << 20
"""Most bytes of the artifact, and of the report in it."""
UNPACKING = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError)
"""Errors of zipfile for an archive that is damaged, encrypted or of another kind."""
AUTHOR = "github-actions[bot]"
"""Author whose comments are renewed. Others' are left alone, whatever they begin with."""


def main() -> None:
    """Post the comment, or say in one line why there is none."""
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    try:
        print(post(os.environ["GITHUB_REPOSITORY"], event["workflow_run"], os.environ["ARTIFACT"]))
    except PerfsuiteError as error:
        print(f"::error::{printable(error)}")
        sys.exit(1)


def post(repository: str, run: dict[str, Any], artifact: str) -> str:
    """Post or renew the comment, and return what was done in one line."""
    number = pull_request(repository, run)
    if number is None:
        return "no comment: no open pull request has the commit of this run as its head"
    packed = download(repository, int(run["id"]), artifact)
    if packed is None:
        return f"no comment: the run has no artifact {artifact}"
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    page = f"{server}/{repository}/actions/runs/{int(run['id'])}"
    body = json.dumps({"body": comment.text(jsonfile.parse(report_in(packed), FILE), page)})
    comments = api(f"repos/{repository}/issues/{number}/comments?per_page=100", "--paginate", "--slurp")
    own = [c["id"] for part in comments for c in part if is_own(c)]
    if own:
        api(f"repos/{repository}/issues/comments/{int(own[0])}", "--method", "PATCH", "--input", "-", given=body)
        return f"renewed the comment of pull request {number}"
    api(f"repos/{repository}/issues/{number}/comments", "--method", "POST", "--input", "-", given=body)
    return f"commented on pull request {number}"


def pull_request(repository: str, run: dict[str, Any]) -> int | None:
    """Return the number of the only open pull request whose head is the commit of the run; None without one."""
    head, branch, commit = run.get("head_repository"), run.get("head_branch"), run["head_sha"]
    if not head or not branch or not re.fullmatch("[0-9a-f]{40}", commit):
        return None
    where = quote(f"{head['owner']['login']}:{branch}", safe="")
    found = api(f"repos/{repository}/pulls?state=open&per_page=100&head={where}")
    numbers = {
        int(p["number"])
        for p in found
        if p["head"]["sha"] == commit and p["head"]["repo"] and p["head"]["repo"]["id"] == head["id"]
    }
    if len(numbers) > 1:  # one commit proposed to several branches; the event of a fork names none
        numbers &= {int(p["number"]) for p in run.get("pull_requests") or ()}
    return numbers.pop() if len(numbers) == 1 else None


def download(repository: str, run: int, artifact: str) -> bytes | None:
    """Return the newest artifact of that name, packed; None where the run has none. Raises PerfsuiteError for one that
    is too large."""
    listed = api(f"repos/{repository}/actions/runs/{run}/artifacts?per_page=100&name={quote(artifact, safe='')}")
    found = [a for a in listed["artifacts"] if a["name"] == artifact and not a["expired"]]
    if not found:
        return None
    newest = max(found, key=lambda a: int(a["id"]))
    if newest["size_in_bytes"] > MOST_PACKED:
        raise PerfsuiteError(f"the artifact {artifact} has {newest['size_in_bytes']} bytes, over {MOST_PACKED}")
    return gh(f"repos/{repository}/actions/artifacts/{int(newest['id'])}/zip")


def report_in(packed: bytes) -> str:
    """Return the text of the report in an artifact; nothing else of it is unpacked. Raises PerfsuiteError where there
    is none, or where it is too large."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive, archive.open(FILE) as file:
            data = file.read(MOST_BYTES + 1)  # whatever size its header claims
        if len(data) > MOST_BYTES:
            raise PerfsuiteError(f"{FILE} of the artifact is too large: more than {MOST_BYTES} bytes")
        return data.decode("utf-8")
    except KeyError:
        raise PerfsuiteError(f"the artifact has no {FILE}") from None
    except UNPACKING as error:
        raise PerfsuiteError(f"{FILE} of the artifact cannot be unpacked: {error}") from None


def is_own(found: dict[str, Any]) -> bool:
    """Return whether the comment is the one to renew."""
    user = found.get("user") or {}
    return user.get("login") == AUTHOR and str(found.get("body")).startswith(comment.MARKER)


def api(path: str, *arguments: str, given: str | None = None) -> Any:
    """Return the answer of GitHub's interface as JSON."""
    return json.loads(gh(path, *arguments, given=given) or b"null")


def gh(path: str, *arguments: str, given: str | None = None) -> bytes:
    """Return the answer of GitHub's interface. Raises PerfsuiteError in one line where it refuses."""
    try:
        done = subprocess.run(
            ["gh", "api", path, *arguments],
            input=given and given.encode(),
            capture_output=True,
            check=True,
            timeout=300,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
        raise PerfsuiteError(f"GitHub does not answer {path.partition('?')[0]}: {text}") from None
    return done.stdout


if __name__ == "__main__":
    main()
