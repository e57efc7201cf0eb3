"""Find which code a side runs, and check that it is from its own tree, so that no revision is compared with itself.

Python's profile hook observes one call of a side, and the building of its step if it has one. torch.compile falls back
to eager, so that every Python function is seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import PACKAGE
from perfsuite.records import Case
from perfsuite.revisions.observed_files import SOURCE_FOLDERS
from perfsuite.revisions.revision import Tree
from perfsuite.revisions.second_import import HARNESS, INSTALLED, TREE, is_first_party, missing
from perfsuite.state.process_state import set_profile

OPERATORS = "torch/_ops.py"


@dataclass(slots=True)
class Executed:
    """Source files of the Python functions that were called, and modules of the C functions."""

    files: set[str] = field(default_factory=set)
    compiled: set[str] = field(default_factory=set)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        """Record a call. This is a profile function for `sys.setprofile`."""
        if event == "call":
            self.files.add(frame.f_code.co_filename)
        elif event == "c_call" and isinstance(module := getattr(argument, "__module__", None), str):
            self.compiled.add(module)


@contextmanager
def watched(executed: Executed) -> Iterator[None]:
    """Record the functions that are called in the block: in this thread, in threads started in the block, and since
    Python 3.12 in all others.

    Afterwards this thread has its profiler again, and the others have the one that `threading.setprofile` gave them.
    """
    everywhere: Any = getattr(threading, "setprofile_all_threads", threading.setprofile)
    before, of_threads = sys.getprofile(), threading.getprofile()
    everywhere(executed.note)
    sys.setprofile(executed.note)
    try:
        yield
    finally:
        everywhere(of_threads)
        set_profile(before)


def run(pair: Pair, side: Side, master: dict[str, Any], case: Case, device: str, *, gradients: bool) -> Executed:
    """Return the code that one call of the side executes, on a copy of these inputs."""
    executed = Executed()
    values = make.clone(master)
    steps = make.build_step(pair, case, device, 1) if pair.is_stateful else {}
    call = replace(side, compile=None).call
    with _eager(), execution.quiet(side), execution.settings_kept(), watched(executed):
        if pair.is_stateful:
            execution.run_steps(call, pair, values, (1,), lambda i: steps)
        else:
            execution.run(call, pair, values, gradients=gradients, seed=case.seed)
    return executed


@contextmanager
def _eager() -> Iterator[None]:
    """Make compiled functions run their Python code in the block, including those that are first compiled there.

    The compiler takes seconds to import, and only compiled functions need it.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            return
        compile_, set_ = torch.compile, False

        def compile(*arguments: Any, **options: Any) -> Any:
            nonlocal set_
            if not set_:
                set_ = True
                with _unwatched():
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
            return compile_(*arguments, **options)

        torch.compile = compile
        try:
            yield
        finally:
            torch.compile = compile_


@contextmanager
def _unwatched() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        set_profile(before)


def problem(accepted: Executed, current: Executed, tree: Tree) -> str:
    """Return why this would not be a comparison of two revisions; empty if each side runs its own code."""
    top, inside = Path(tree.top), Path(tree.folder, TREE)
    ours = [p for p in _files(accepted) if not _is_harness(p)]
    for path in ours:
        if inside not in path.parents and is_first_party(path, top):
            return f"the accepted revision runs {path.relative_to(top)} of the current tree"
        if (copy := _installed(path, inside)) and (inside / copy).exists():
            package = Path(_below_installed(path)[0]).stem
            return f"{package} is installed as a copy in {path.parent}, not from the work tree: pip install -e ."
    for path in _extensions(accepted):
        copy = _installed(path, inside)
        if is_first_party(path, top) or (copy and len(copy.parts) > 1 and (inside / copy.parent).is_dir()):
            return f"both revisions share the compiled extension {path.name}"
    for path in _extensions(current):
        if is_first_party(path, top) and not (inside / path.relative_to(top)).exists():
            return f"the current side runs the compiled extension {path.name}, which git does not hold"
    if lacking := missing(tree.package):
        return f"the accepted revision asks for the module {lacking[0]}, which git does not hold at that revision"
    shared = next((p for p in _files(current) if inside in p.parents), None)
    if shared is not None:
        return f"the current side runs {shared.relative_to(inside)} of the accepted tree: both register the same name"
    if not any(inside in path.parents for path in ours):
        return "none of the code that it runs is in the repository, so both revisions run the same"
    return ""


def _files(executed: Executed) -> list[Path]:
    """Return the resolved paths of the files whose functions were called."""
    return [Path(f).resolve() for f in sorted(executed.files) if os.path.isabs(f)]


def _is_harness(path: Path) -> bool:
    return PACKAGE.resolve() in path.parents


def _installed(path: Path, tree: Path) -> Path | None:
    """Return the path in the tree that the source of an installed file would have; None if the file is not installed or
    the tree does not have its package."""
    inside = _below_installed(path)
    if not inside or inside[0] == HARNESS:
        return None
    return next((Path(f, *inside) for f in SOURCE_FOLDERS if (tree / f / inside[0]).exists()), None)


def _below_installed(path: Path) -> tuple[str, ...]:
    """Return the parts of a path below the folder of installed packages; empty if it is not in such a folder."""
    places = [n for n, part in enumerate(path.parts) if part in INSTALLED]
    return path.parts[places[-1] + 1 :] if places else ()


def _extensions(executed: Executed) -> list[Path]:
    """Return the files of the compiled modules whose functions were called and, if an operator was called, of the
    loaded libraries of operators."""
    modules = [sys.modules.get(name) for name in sorted(executed.compiled)]
    files = [f for m in modules if isinstance(f := getattr(m, "__file__", None), str) and not f.endswith(".py")]
    if any(f.endswith(OPERATORS) for f in executed.files):
        files += sorted(torch.ops.loaded_libraries)
    return [Path(f).resolve() for f in files]
