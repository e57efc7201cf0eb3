"""Run the tests as `make test` does: run_tests.py [PYTEST'S ARGUMENTS]. Nothing is timed unless -m asks for it.

Tests run beside each other, by pytest-xdist where it is installed. With a GPU the proofs run first and without it: each
then has a process that is replaced after a fault of a kernel, and perfsuite uses all cores itself. In a worker of xdist
a fault would fail whatever that worker proves afterwards.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import pytest

from perfsuite import device_nodes

PLUGINS = ("-p", "perfsuite.plugin", "-p", "tools.rare_garbage")
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


def main() -> int:
    """Run each pass in a process of its own, also after a failed one."""
    installed = importlib.util.find_spec("xdist") is not None
    # A worker takes tests in their order, so that the proofs of a pair share what they know of its draws.
    beside = ("-n", "auto", "--dist", "worksteal") if installed else ()
    codes = []
    for own in passes(sys.argv[1:], on_gpu=device_nodes.are_visible(), beside=beside):
        code = subprocess.run([sys.executable, "-m", "pytest", *PLUGINS, *own], check=False).returncode
        if code == int(pytest.ExitCode.INTERRUPTED):
            return code
        codes.append(abs(code))  # negative: pytest was ended by a signal
    return worst(codes)


if __name__ == "__main__":
    sys.exit(main())
