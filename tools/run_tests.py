"""Run the tests as `make test` does: run_tests.py [PYTEST'S ARGUMENTS]. Nothing is timed unless -m asks for it.

Tests run in parallel with pytest-xdist if it is installed. On a machine with a GPU the proofs run first, without xdist.
Each proof then has a process that is replaced after a kernel fault, and perfsuite itself uses all cores. In an xdist
worker, a fault would fail everything that the worker proves afterwards. The file that --junitxml names holds the tests
of both runs.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perfsuite.system import device_nodes

# pytest's own logging plugin visits each of torch's 50 loggers six times per test, which took 1/40 of the total time.
PLUGINS = ("-p", "perfsuite.plugin", "-p", "tools.rare_garbage", "-p", "no:logging")
FOLDERS = ("perfsuite", "reference", "optimized", "suite", "tools")
NOTHING_TO_RUN = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def passes(arguments: Sequence[str], *, on_gpu: bool, beside: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each run of pytest.

    beside  xdist's options; they come before `arguments`, so that an `-n` among these has priority
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks", default="not perf")
    found, rest = parser.parse_known_args(arguments)
    if not on_gpu:
        return [["-m", found.marks, *beside, *rest]]
    of_proofs, of_others = (f"({found.marks}) and {kind}" for kind in ("correctness", "not correctness"))
    return [["-m", of_proofs, *rest], ["-m", of_others, *beside, *rest]]


def worst(codes: Sequence[int]) -> int:
    """Return the exit code for all runs. A run that collected no tests counts only if no other run did."""
    ran = [code for code in codes if code != NOTHING_TO_RUN]
    return max(ran, default=NOTHING_TO_RUN)


def merge_junit(files: Sequence[Path], merged: Path) -> None:
    """Write one JUnit file with the test suites of these files; skip a file that pytest did not write."""
    root = ElementTree.Element("testsuites")
    for file in filter(Path.exists, files):
        root.extend(ElementTree.parse(file).getroot())
    merged.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(merged, encoding="utf-8", xml_declaration=True)


def compile_modules(arguments: Sequence[str]) -> None:
    """Compile the project's modules and, after a new clone, everything that the tests import.

    The second part is skipped if `arguments` name existing files. Without this, workers that start together would each
    compile the same modules: pip leaves packages uncompiled (bootstrap.py), and pytest compiles tests itself when it
    collects them.
    """
    for folder in FOLDERS:
        compileall.compile_dir(folder, quiet=2, workers=0)  # one worker per core
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    if named or any(Path("tests").rglob("*-pytest-*.pyc")):
        return
    options = ("--collect-only", "-qq", "-p", "no:cacheprovider")
    parts = (["tests/perfsuite"], ["tests", "--ignore=tests/perfsuite"])
    collecting = [
        subprocess.Popen([sys.executable, "-m", "pytest", *PLUGINS, *options, *part], stdout=subprocess.DEVNULL)
        for part in parts
    ]
    for process in collecting:
        process.wait()  # the run itself reports a file that cannot be collected


def main() -> int:
    """Run each pass in a process of its own, also after a failed one, but not after an interrupted one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--junitxml", "--junit-xml", type=Path)
    found, rest = parser.parse_known_args()
    installed = importlib.util.find_spec("xdist") is not None
    if installed and not sys.dont_write_bytecode:
        compile_modules(rest)
    # worksteal gives each worker tests in their order, so that the proofs of a pair share what they know of its draws.
    beside = ("-n", "auto", "--dist", "worksteal") if installed else ()
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for own in passes(rest, on_gpu=device_nodes.are_visible(), beside=beside):
            reports.append(Path(folder, f"{len(reports)}.xml"))
            written = [f"--junitxml={reports[-1]}"] if found.junitxml else []
            code = subprocess.run([sys.executable, "-m", "pytest", *PLUGINS, *own, *written], check=False).returncode
            codes.append(abs(code))  # negative: a signal ended pytest
            if code == int(pytest.ExitCode.INTERRUPTED):
                break
        if found.junitxml:
            merge_junit(reports, found.junitxml)
    return codes[-1] if codes[-1] == int(pytest.ExitCode.INTERRUPTED) else worst(codes)


if __name__ == "__main__":
    sys.exit(main())
