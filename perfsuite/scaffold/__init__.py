"""`perfsuite init`: the first files of a repository that uses perfsuite, and the commands that come next."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from perfsuite.errors import PerfsuiteError, RevisionError, printable
from perfsuite.revisions.revision import git, top_level
from perfsuite.scaffold.source import PLACEHOLDER, Source, source

COMMON = {"tests/test_perfsuite_pair.py": "test_pair.py.txt", "baselines/waivers.toml": "waivers.toml"}
FILES = {
    "github": {
        ".github/workflows/perfsuite.yml": "github.yml",
        ".github/workflows/perfsuite-comment.yml": "comment.yml",
    },
    "gitlab": {".gitlab-ci.yml": "gitlab.yml"},
}
"""CI → path in the repository → template."""


def write(folder: Path, ci: str) -> Iterator[str]:
    """Write the files for a CI of `FILES` into a repository's top folder, and yield the lines to print.

    A path that exists is left unchanged. Raises PerfsuiteError in one line if `folder` is not a folder, is not the top
    of its repository, or cannot be written. Files that were written before the error stay.
    """
    top = _top(folder)
    origin, branch = source(), _branch(folder)
    if ci == "github" and origin.host != "github.com":
        origin = PLACEHOLDER
    written, left = [], []
    for path, template in (COMMON | FILES[ci]).items():
        text = importlib.resources.files(__package__).joinpath("templates", template).read_text("utf-8")
        if _new(folder / path, _filled(text, origin, branch)):
            written.append(path)
            yield f"wrote {path}"
        else:
            left.append(path)
            yield f"left {path} as it is: it exists"
    yield from _next(folder, ci, written, left, origin, has_git=top is not None)


def _top(folder: Path) -> Path | None:
    """Return the top folder of the repository; None outside git. Raises PerfsuiteError if that is not `folder`."""
    name = printable(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise PerfsuiteError(f"{name} {what}; name the top folder of a repository")
    try:
        top = top_level(folder)
    except RevisionError:
        return None
    if top.resolve() != folder.resolve():
        raise PerfsuiteError(f"{name} is not the top of its repository, where CI looks; name {printable(top)}")
    return top


def _branch(folder: Path) -> str:
    """Return the current branch if a workflow can name it without quotes; otherwise "main"."""
    try:
        branch = git("symbolic-ref", "--short", "HEAD", cwd=folder)
    except RevisionError:
        return "main"
    return branch if re.fullmatch(r"[A-Za-z][\w./-]*", branch, re.ASCII) else "main"


def _filled(text: str, origin: Source, branch: str) -> str:
    values = {
        "OWNER/perfsuite": origin.repository,
        "RAW": origin.raw,
        "URL": origin.url,
        "@REF": f"@{origin.ref}",
        "BRANCH": branch,
    }
    # In one pass, so that a name inside an inserted value stays.
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def _new(path: Path, text: str) -> bool:
    """Write a new file completely. Return False if its path exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
    except FileExistsError as error:
        if os.path.lexists(path):
            return False
        return _refuse(path, error)  # a parent of the path is a file
    except OSError as error:
        return _refuse(path, error)
    return True


def _refuse(path: Path, error: OSError) -> bool:
    raise PerfsuiteError(
        f"cannot write {printable(path)}: {error.strerror or error}; make its folder writable, and run this again"
    ) from None


def _next(
    folder: Path, ci: str, written: list[str], left: list[str], origin: Source, *, has_git: bool
) -> Iterator[str]:
    if left and ci == "gitlab" and ".gitlab-ci.yml" in left:
        yield "Add the lines that the README gives for GitLab to your .gitlab-ci.yml."
    ours = [path for path in written if path in FILES[ci]]
    if ours and origin.repository == PLACEHOLDER.repository:
        where = " and ".join(ours)
        yield f"Replace {origin.repository}@{origin.ref} in {where} by the address of perfsuite's repository."
    yield ""
    yield "Next, on the machine that is to be gated:"
    yield ""
    yield from (f"  {command}" for command in _commands(folder, written, has_git=has_git))


def _commands(folder: Path, written: list[str], *, has_git: bool) -> Iterator[str]:
    """Yield the commands that prove, commit, accept and gate the pair."""
    if folder.resolve() != Path.cwd():
        yield f"cd {shlex.quote(str(folder))}"
    if not has_git:
        yield "git init"
    yield "pytest -m correctness                       # proves the pair"
    if written:
        yield f"git add {shlex.join(written)}"
        yield 'git commit -m "Add perfsuite"'
    yield 'perfsuite accept --reason "first figures"   # times it here, and stores the figures; about a minute'
    yield "git add baselines"
    yield 'git commit -m "Accept the first figures"'
    yield "perfsuite gate                              # green; red once the optimized side is slower"
