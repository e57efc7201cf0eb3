"""Run what is proven on a GPU before a release: python -m tools.prove_on_gpu [GROUP ...] [-n N] [--seconds S].

Each group is one run of pytest with N processes; the groups run one after the other. Prints the seconds and the last
line of each, and at the end the failures. Logs and JUnit files are in --out. Exits with 1 if a group failed or did not
end within the seconds given for all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_PAIRS = ("perfsuite", "planted", "suite", "mutation", "__pycache__")
PAIRS = sorted(str(path) for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in WITHOUT_PAIRS)
CORRECTNESS, EVERYTHING = ("-m", "correctness"), ("-m", "not perf")
GROUPS: dict[str, tuple[str, ...]] = {
    "pairs": (*CORRECTNESS, *PAIRS),
    "planted": (*EVERYTHING, "tests/planted/test_planted.py", "tests/planted/test_harness.py"),
    "timed": ("-m", "gpu and not perf", "tests/planted/test_planted.py"),
    "ranks": (*EVERYTHING, "tests/planted/test_rank_faults.py", "tests/distributed"),
    "judge": (*EVERYTHING, "tests/perfsuite/judge", "tests/perfsuite/session"),
    "liger": (*CORRECTNESS, "docs/foreign/test_liger.py"),
    "flash": (*CORRECTNESS, "docs/foreign/test_flash_attn.py"),
    "fla": (*CORRECTNESS, "docs/foreign/test_fla.py"),
    "kernelbench": (*CORRECTNESS, "docs/foreign/test_kernelbench.py"),
}
ONE_PROCESS = ("timed",)
"""Groups whose tests measure time on the GPU, so that nothing may run beside them."""
SHUTDOWN_S = 15
"""Time in which a group that is cut off writes its JUnit file."""


def run(name: str, processes: int, seconds: float, out: Path) -> bool:
    """Run a group and print its result; return whether all its tests passed."""
    log, began = out / f"{name}.log", time.monotonic()
    parallel = ("-p", "no:xdist") if name in ONE_PROCESS else ("-n", str(processes), "--dist", "worksteal")
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={out / name}.xml")
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "pytest", *options, *parallel, *GROUPS[name]]
    with log.open("w") as text:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=text,
            stderr=subprocess.STDOUT,
            env={**environment, "PERFSUITE_TEST_SCALE": "full"},
        )
        try:
            code = process.wait(max(seconds - SHUTDOWN_S, 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
            code = -1
    lines = log.read_text(errors="replace").splitlines() or ["no output"]
    print(f"{name}: {time.monotonic() - began:.0f} s, {'cut off, ' if code == -1 else ''}{lines[-1]}", flush=True)
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"  {line[:240]}")
    return code == 0


def main() -> int:
    """Run the groups; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"one of {', '.join(GROUPS)}; all, if none is given")
    parser.add_argument("-n", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes, one a core")
    parser.add_argument("--seconds", type=float, default=86400, help="time for all groups together")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder for logs and JUnit files")
    given = parser.parse_args()
    if unknown := [name for name in given.groups if name not in GROUPS]:
        parser.error(f"unknown group {unknown[0]!r}; choose from {', '.join(GROUPS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    # Every group runs, also after one that failed.
    passed = [run(name, given.n, end - time.monotonic(), given.out) for name in given.groups or GROUPS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
