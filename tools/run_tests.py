"""Run the tests as `make test` does: run_tests.py [PYTEST'S ARGUMENTS]. Nothing is timed unless -m asks for it.

Tests run beside each other, by pytest-xdist where it is installed. With a GPU the proofs run first and without it: each
then has a process that is replaced after a fault of a kernel, and perfsuite uses all cores itself. In a worker of xdist
a fault would fail whatever that worker proves afterwards. The file that --junitxml names holds the tests of both runs.
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

from perfsuite import device_nodes

# pytest's own logging plugin visits each of torch's 50 loggers six times a test, which took a fortieth of all time.
PLUGINS = ("-p", "perfsuite.plugin", "-p", "tools.rare_garbage", "-p", "no:logging")
FOLDERS = ("perfsuite", "reference", "optimized", "suite", "tools")
NOTHING_TO_RUN = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def passes(arguments: Sequence[str], *, on_gpu: bool, beside: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each run of pytest.

    beside  xdist's options; the arguments come later, so that an `-n` among them counts
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks", default="not perf")
    found, rest = parser.parse_known_args(arguments)
    if not on_gpu:
        return [["-m", found.marks, *beside, *rest]]
    of_proofs, of_others = (f"({found.marks}) and {kind}" for kind in ("correctness", "not correctness"))
    return [["-m", of_proofs, *rest], ["-m", of_others, *beside, *rest]]


def worst(codes: Sequence[int]) -> int:
    """Return the exit code of all runs; one that had nothing to run does not count beside another."""
    ran = [code for code in codes if code != NOTHING_TO_RUN]
    return max(ran, default=NOTHING_TO_RUN)


def merge_junit(files: Sequence[Path], merged: Path) -> None:
    """Write one JUnit file with the test suites of these; a file that pytest did not write is left out."""
    root = ElementTree.Element("testsuites")
    for file in filter(Path.exists, files):
        root.extend(ElementTree.parse(file).getroot())
    merged.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(merged, encoding="utf-8", xml_declaration=True)


def compile_modules(arguments: Sequence[str]) -> None:
    """Compile the project's modules, and after a new clone also what the tests import, unless `arguments` name some of
    their files.

    Workers that begin together would each do it: pip leaves packages uncompiled (bootstrap.py), and pytest compiles
    tests in a way of its own, when it collects them.
    """
    for folder in FOLDERS:
        compileall.compile_dir(folder, quiet=2, workers=0)  # as many as there are cores
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
        process.wait()  # a file that cannot be collected is reported by the run itself


def main() -> int:
    """Run each pass in a process of its own, also after a failed one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--junitxml", "--junit-xml", type=Path)
    found, rest = parser.parse_known_args()
    installed = importlib.util.find_spec("xdist") is not None
    if installed and not sys.dont_write_bytecode:
        compile_modules(rest)
    # A worker takes tests in their order, so that the proofs of a pair share what they know of its draws.
    beside = ("-n", "auto", "--dist", "worksteal") if installed else ()
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for own in passes(rest, on_gpu=device_nodes.are_visible(), beside=beside):
            reports.append(Path(folder, f"{len(reports)}.xml"))
            written = [f"--junitxml={reports[-1]}"] if found.junitxml else []
            code = subprocess.run([sys.executable, "-m", "pytest", *PLUGINS, *own, *written], check=False).returncode
            codes.append(abs(code))  # negative: pytest was ended by a signal
            if code == int(pytest.ExitCode.INTERRUPTED):
                break
        if found.junitxml:
            merge_junit(reports, found.junitxml)
    return codes[-1] if codes[-1] == int(pytest.ExitCode.INTERRUPTED) else worst(codes)


if __name__ == "__main__":
    sys.exit(main())
