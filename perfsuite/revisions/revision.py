"""Get other revisions of the repository from git: extract their trees, and load a pair as one of them declares it."""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from perfsuite.declare import discovery
from perfsuite.declare.pair import Pair
from perfsuite.errors import RevisionError
from perfsuite.revisions import bytecode, second_import
from perfsuite.system.folders import own_folder

PLAIN = ("-c", "log.showSignature=false")
"""Options of every git command: `git log` must not print the check of a signature among its lines."""
APART = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.splitIndex=false"),
    *("-c", "submodule.recurse=false"),
)
"""Options of git for a temporary index instead of the repository's: no hook, daemon or shared index may be used."""
SHA256_DIGITS = 64
"""Length of a hash in a repository whose object format is SHA-256."""
LONGEST_RUN_S = 86400.0
"""Age in seconds above which a tree must have been left by a killed run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Files of a revision on disk, and the package under which they are imported (second_import.py)."""

    revision: str
    folder: str
    package: str
    top: str
    """The current work tree's top folder."""


def git(*arguments: str, cwd: Path, options: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> str:
    """Return the output of a git command, without the last line break. `options` precede the command. Raises
    RevisionError with git's reason if it fails."""
    if not options and "GIT_DIR" not in os.environ and _repository(cwd.absolute()) is None:
        # Every run calls this several times. Searching for .git takes a hundredth of the time of a process.
        raise RevisionError(f"git {arguments[0]}: not a git repository (or any of the parent directories): .git")
    environment = {**os.environ, **variables} if variables else None
    command = ["git", *PLAIN, *options, *arguments]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, env=environment)
    except FileNotFoundError:
        raise RevisionError("git is not installed") from None
    if done.returncode:
        raise RevisionError(f"git {arguments[0]}: {_reason(done.stderr.decode(errors='replace'))}")
    return done.stdout.decode(errors="replace").strip("\n")


def _reason(output: str) -> str:
    """Return why git failed, in one line, with the command that git suggests, if any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["failed"]
    fatal = next((line.removeprefix("fatal: ") for line in lines if line.startswith("fatal: ")), lines[-1])
    return f"{fatal}: {lines[-1]}" if lines[-1].startswith("git ") else fatal


def top_level(root: Path) -> Path:
    """Return the work tree's top folder. Raises RevisionError outside a git repository."""
    return Path(git("rev-parse", "--show-toplevel", cwd=root))


def top_or(root: Path) -> Path:
    """Return the work tree's top folder, or the folder itself if it is outside a git repository."""
    try:
        return top_level(root).resolve()
    except RevisionError:
        return root.resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State of a work tree according to git. `revision` is None outside a repository, and in one without a commit."""

    revision: str | None = None
    dirty: bool = False
    """Whether tracked files differ from the revision."""
    problem: str = ""
    """Reason why git does not know the tree; empty if it does."""


def state(root: Path, *, ignored: Path | None = None) -> State:
    """Return the revision of the tree at `root`, and whether tracked files have changed. Changes in `ignored` do not
    count.

    Raises RevisionError if there is a repository that git cannot read.
    """
    inside = ignored is not None and root.resolve() in ignored.resolve().parents
    others = [":(top)", f":(exclude){ignored.resolve()}"] if ignored and inside else []
    try:
        try:
            revision = git("rev-parse", "--verify", "--quiet", "HEAD", cwd=root)
        except RevisionError:
            top_level(root)
            return State(problem="its git repository has no commit yet")
        return State(
            revision=revision, dirty=bool(git("status", "--porcelain", "--untracked-files=no", "--", *others, cwd=root))
        )
    except RevisionError as error:
        if _repository(root) is None:
            return State(problem="it is not in a git repository")
        raise RevisionError(
            f"git cannot read the repository of {root}: {error}; repair it, or remove its .git folder"
        ) from None


def quiet_state(root: Path, *, ignored: Path | None = None) -> State:
    """Return the same as `state`, but never raise: if git cannot read the repository, the result has the reason."""
    try:
        return state(root, ignored=ignored)
    except RevisionError as error:
        return State(problem=str(error))


def _repository(root: Path) -> Path | None:
    """Return the nearest folder upward that contains `.git`, by git's own rules; None if there is none."""
    ceilings = {Path(c) for c in os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep) if c}
    for folder in (root, *root.parents):
        if folder in ceilings and folder != root:
            return None
        if (folder / ".git").exists():
            return folder
    return None


def added_since(revision: str, top: Path) -> frozenset[str] | None:
    """Return the Python files of the work tree that the revision does not have, relative to `top`; None if git
    fails."""
    python = ("-z", "--", "*.py")
    try:
        found = [
            git("diff", "--name-only", "--no-renames", "--diff-filter=A", revision, *python, cwd=top),
            git("ls-files", "--others", "--exclude-standard", *python, cwd=top),
        ]
    except RevisionError:
        return None
    return frozenset(name for names in found for name in names.split("\0") if name)


def blobs(revision: str, top: Path) -> dict[str, str]:
    """Return file relative to `top` → git's hash, for the files of a revision; empty if git fails."""
    try:
        lines = git("ls-tree", "-r", "-z", "--full-tree", revision, cwd=top).split("\0")
    except RevisionError:
        return {}
    return {name: about.split()[-1] for about, _, name in (line.partition("\t") for line in lines) if name}


def is_blob(data: bytes, hash: str) -> bool:
    """Return whether this is git's hash of a file with this content."""
    algorithm = "sha256" if len(hash) == SHA256_DIGITS else "sha1"
    return hashlib.new(algorithm, b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == hash


def resolve(revision: str, root: Path) -> str:
    """Return the full hash of a revision. Raises RevisionError if git does not know it."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", cwd=root)
    except RevisionError:
        shallow = git("rev-parse", "--is-shallow-repository", cwd=root) == "true"
        hint = "the clone is shallow: git fetch --unshallow" if shallow else "see git log for the revisions there are"
        raise RevisionError(f"revision {revision} is not in this repository; {hint}") from None


def snapshot(root: Path) -> str:
    """Return the hash of a commit of the work tree as it is, without untracked files. It is on no branch."""
    who = {f"GIT_{who}_{what}": "perfsuite" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return git("stash", "create", cwd=root, variables=who) or resolve("HEAD", root)


def extract(revision: str, root: Path, into: Path) -> Tree:
    """Write the revision's tree to a new folder below `into`. The repository is not changed.

    The tree is checked out through a temporary index. `git archive` would leave out files marked export-ignore, as
    tests are in many projects, and rewrite those marked export-subst.
    """
    full, top = resolve(revision, root), top_level(root).resolve()
    try:
        own_folder(into)
        folder = Path(tempfile.mkdtemp(prefix=f"{full[:12]}-", dir=into)).resolve()
        tree = folder / second_import.TREE
        tree.mkdir()
        with tempfile.TemporaryDirectory(prefix="index-", dir=into) as apart:
            git(
                *("read-tree", "-m", "-u", "--no-sparse-checkout", full),
                cwd=top,
                options=[f"--work-tree={tree}", *APART],
                variables={"GIT_INDEX_FILE": str(Path(apart, "index").resolve())},
            )
        package = second_import.write_package(folder, top)
    except (OSError, RevisionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RevisionError(
            f"revision {revision} cannot be unpacked into {into} ({reason}); make that folder writable, with space on "
            "it"
        ) from None
    return Tree(revision=full, folder=str(folder), package=package, top=str(top))


@contextmanager
def extracted(
    revisions: Iterable[str], root: Path, folder: Path
) -> Iterator[tuple[dict[str, Tree], dict[str, RevisionError]]]:
    """Yield (trees, refused): revision → its tree in `folder`, and revision → error for those that cannot be extracted.

    The trees are removed afterwards. Another run may have its own trees there. Trees that a killed run left are removed
    too.
    """
    trees: dict[str, Tree] = {}
    refused: dict[str, RevisionError] = {}
    own = folder / f"run-{secrets.token_hex(4)}"
    try:
        for revision in dict.fromkeys(revisions):
            try:
                trees[revision] = extract(revision, root, own)
            except RevisionError as error:
                refused[revision] = error
        yield trees, refused
    finally:
        _remove(own)
        with suppress(OSError):
            for left in folder.iterdir():
                if left.stat().st_mtime < time.time() - LONGEST_RUN_S:
                    _remove(left)
            folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a folder with trees, and the bytecode of their sources."""
    shutil.rmtree(folder, ignore_errors=True)
    bytecode.forget(folder)


def load_pair(pair: Pair, module: ModuleType, tree: Tree) -> Pair:
    """Return the same pair as the tree's revision declares it. Its sides are imported in addition to the current ones.

    Raises RevisionError, with a one-line message, if the tree lacks the pair or cannot be imported.
    """
    where = f"{module.__name__}::{pair.name}"
    if tree.folder not in sys.path:
        sys.path.append(tree.folder)
        importlib.invalidate_caches()
    name = f"{tree.package}.{module.__name__}"
    try:
        found = discovery.find(_imported(name, module, tree), pair.name)
    except (KeyboardInterrupt, RevisionError):
        raise
    except BaseException as error:  # a module may skip its tests or exit when it is imported
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(f"{tree.package}."):
            missing = str(error.name).removeprefix(f"{tree.package}.")
            if f"{module.__name__}.".startswith(f"{missing}."):
                raise RevisionError(f"there is no module {module.__name__} in the accepted revision") from None
            raise RevisionError(
                f"{where} of the accepted revision imports {missing}, which git does not hold at that revision; "
                "commit that module, and accept again"
            ) from None
        lines = str(error).replace(f"{tree.package}.", "").splitlines() or [""]
        raise RevisionError(
            f"{where} cannot be loaded from the accepted revision: {type(error).__name__}: {lines[0][:200]}"
        ) from None
    if found is None:
        raise RevisionError(f"{where} is no pair in the accepted revision")
    found.name = pair.name
    return found


def _imported(name: str, module: ModuleType, tree: Tree) -> ModuleType:
    """Return the tree's version of a test module. The folder that contains its top-level name need not be on
    sys.path."""
    inside = Path(str(module.__file__)).resolve().relative_to(tree.top)
    base = Path(tree.folder, second_import.TREE, inside).parents[module.__name__.count(".")]
    paths: list[str] = importlib.import_module(tree.package).__path__  # type: ignore[assignment]  # an installed list
    if str(base) not in paths:
        paths.append(str(base))
    found = importlib.import_module(name)
    if Path(str(found.__file__)) != Path(tree.folder, second_import.TREE, inside):
        raise RevisionError(f"{name} is {found.__file__} in the accepted revision, not {inside}")
    return found
