"""Measure how much longer pytest collects a suite without pairs if the plugin is loaded; print medians and difference.

    python tools/plugin_cost.py [repeats]

Fresh processes collect 200 trivial tests in 10 modules with and without the plugin, in turn, so that drift of the
machine affects both. pytest-benchmark and Hypothesis are installed with perfsuite but are separate plugins: they are
off in both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES, TESTS = 10, 20
REPEATS = 15
SIDES = {"with": "perfsuite.plugin", "without": "no:perfsuite.plugin"}


def collect_ms(folder: Path, plugin: str) -> float:
    """Return the milliseconds from start to end of a process that collects the suite in `folder`."""
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "--collect-only", "-qq"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module in range(MODULES):
            text = "".join(f"def test_{n}():\n    assert True\n\n\n" for n in range(TESTS))
            (folder / f"test_plain_{module}.py").write_text(text)
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for plugin in SIDES.values():
            collect_ms(folder, plugin)  # fills the bytecode caches
        for repeat in range(repeats):
            for side in sorted(SIDES, reverse=bool(repeat % 2)):
                times[side].append(collect_ms(folder, SIDES[side]))
    medians = {side: statistics.median(values) for side, values in times.items()}
    added = [a - b for a, b in zip(times["with"], times["without"], strict=True)]
    low, middle, high = statistics.quantiles(added, n=4)
    for side, value in medians.items():
        print(f"{side:>7} the plugin: {value:6.1f} ms  (median of {repeats})")
    print(f"          added: {middle:6.1f} ms  (median difference; half lie in {low:.1f}–{high:.1f})")


if __name__ == "__main__":
    main()
