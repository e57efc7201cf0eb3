"""The plugin is loaded in every pytest run of an environment, and imports nothing heavy until a pair is collected.

`tools/plugin_cost.py` measures the time that it adds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scratch import ROOT

HEAVY = ("torch", "numpy", "hypothesis", "scipy", "rich", "jinja2", "triton", "click", "pynvml", "pytest_benchmark")
LATER = (
    "perfsuite.session.modes.base",
    "perfsuite.session.pytest_items",
    "perfsuite.system.machine",
    "perfsuite.records",
)

REPORT = """
import sys


def pytest_unconfigure():
    print("LOADED", *[name for name in {names} if name in sys.modules])
"""


def loaded(folder: Path, *arguments: str) -> list[str]:
    """Return the modules of HEAVY and LATER that a pytest run in a new process imports; other plugins are disabled."""
    (folder / "names.py").write_text(REPORT.format(names=(*HEAVY, *LATER)))
    others = ["-p", "names", "-p", "perfsuite.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *others, *arguments],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return line.split()[1:]


@pytest.mark.parametrize("module", ["perfsuite", "perfsuite.plugin", "perfsuite.cli"])
def test_import_loads_no_heavy_package(module: str) -> None:
    code = f"import {module}, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = ["rich", "click"] if module == "perfsuite.cli" else []
    assert done.stdout.strip() == str(expected)


@pytest.mark.parametrize("arguments", [[], ["-m", "not perf"], ["--collect-only"]])
def test_unrelated_test_suite_loads_nothing_of_perfsuite(tmp_path: Path, arguments: list[str]) -> None:
    text = "import pytest\n\n\n" + "".join(f"def test_{n}(): pass\n\n\n" for n in range(5))
    (tmp_path / "test_plain.py").write_text(text)
    assert loaded(tmp_path, *arguments) == []


def test_unrelated_test_suite_with_the_gpu_marker_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    assert not set(loaded(tmp_path)) & {"torch", "numpy", "hypothesis", "scipy", "rich", "jinja2"}
