"""Inspect another Python interpreter: the packages that it has, and whether perfsuite can measure in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError, printable

DESCRIBE = """
import importlib.metadata, json, platform, re, sys
found = {}
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    if name:
        found.setdefault(re.sub("[-_.]+", "-", name).lower(), distribution.version)
needed, missing = {}, {}
for name in sys.argv[1:]:
    try:
        module = __import__(name)
        needed[name] = getattr(module, "__version__", "")
    except Exception as error:
        missing[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"python": platform.python_version(), "packages": found, "needed": needed, "missing": missing}))
"""
NEEDED = ("perfsuite", "pytest", "torch")
"""Modules that an environment must have to measure."""
LIMIT_S = 120.0
"""Seconds that an interpreter may take to import torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """An interpreter and its packages."""

    path: str
    python: str
    """Its version."""
    harness: str
    """The version of perfsuite that it imports."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Normalised name of each installed package (PEP 503) → its version."""


def located(path: str) -> str:
    """Return the file of an interpreter, given its path or a command.

    Raises PerfsuiteError, with a message of one line, if there is none.
    """
    shown, found = printable(path), path
    if os.sep not in path:
        found = shutil.which(path) or ""
        if not found:
            raise PerfsuiteError(f"--python {shown}: there is no such command; give the path of an interpreter")
    if not os.path.isfile(found):
        raise PerfsuiteError(
            f"--python {shown}: no such file; give the path of an interpreter, for instance .venv-new/bin/python"
        )
    return os.path.abspath(found)  # without resolving links: a virtual environment's interpreter is one


def describe(path: str, root: Path) -> Interpreter:
    """Return an interpreter with its packages, as a process that is started in `root` finds them.

    Raises PerfsuiteError, with a message of one line, if it cannot be run or cannot measure.
    """
    return _described(located(path), printable(path), root, NEEDED)


def here(root: Path) -> Interpreter:
    """Return this process's own interpreter. It is known to be able to measure, so torch is not imported again."""
    return _described(sys.executable, sys.executable, root, NEEDED[:1])


def _described(file: str, shown: str, root: Path, wanted: Sequence[str]) -> Interpreter:
    """Return what DESCRIBE finds in this interpreter. It imports the modules `wanted`, which include perfsuite."""
    command = [file, "-c", DESCRIBE, *wanted]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False
        )
        about: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        needed, missing = about["needed"], about["missing"]
        python, packages = about["python"], about["packages"]
    except OSError as error:
        raise PerfsuiteError(f"--python {shown}: it cannot be run ({error.strerror}); give another") from None
    except subprocess.TimeoutExpired:
        raise PerfsuiteError(f"--python {shown}: it did not answer within {LIMIT_S:g} s; give another") from None
    except (ValueError, IndexError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PerfsuiteError(
            f"--python {shown}: it is not a working Python interpreter ({printable(last)}); give the path of one, for "
            "instance .venv-new/bin/python"
        ) from None
    if missing:
        why = printable(next(iter(missing.values())))
        raise PerfsuiteError(
            f"--python {shown}: {' and '.join(missing)} cannot be imported there ({why}); install the project with its "
            "test dependencies in that environment"
        )
    return Interpreter(path=file, python=python, harness=needed["perfsuite"], packages=packages)


def check(here: Interpreter, there: Interpreter) -> None:
    """Raise PerfsuiteError unless both measure with the same version of perfsuite."""
    if there.harness != here.harness:
        raise PerfsuiteError(
            f"--python {printable(there.path)}: it has perfsuite {there.harness}, and this is {here.harness}; install "
            "the same version in both"
        )


def differences(one: Interpreter, other: Interpreter) -> list[str]:
    """Return what differs between two environments, a line for each package: "torch 2.10.0 → 2.11.0"."""
    every = {"python": (one.python, other.python)}
    for name in sorted({*one.packages, *other.packages}):
        every[name] = (one.packages.get(name, "absent"), other.packages.get(name, "absent"))
    return [f"{name} {before} → {after}" for name, (before, after) in every.items() if before != after]
