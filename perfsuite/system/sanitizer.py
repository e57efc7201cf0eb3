"""`pytest -m correctness --sanitize`: run the proofs under NVIDIA's compute-sanitizer.

The tool checks each memory access of each kernel, so it finds faults that canaries cannot find: reads outside a tensor,
races in shared memory, barriers that not all threads reach. pytest runs itself under the tool. An item fails with the
errors that the tool reports while it runs. Each tensor has its own allocation, because in the pool of a caching
allocator, an access to a neighbouring tensor is not an error. The proofs run 10 to 50 times slower, so select some with
-k.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from perfsuite.system import machine

LOG = "PERFSUITE_SANITIZER_LOG"
"""Environment variable of the process under the tool: the path to which the tool writes."""
PROGRAM = "compute-sanitizer"
SLOWER = 50.0
FOUND = 99
"""Exit code of the tool if it found an error."""
REFUSED = "Device not supported"
_HEAD = re.compile(r"^=========(?: (?:Error|Warning):)? (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Target|\s)(?P<what>.+)$")
_PLACE = re.compile(r"^=========\s+at (?P<where>.+)$")


def slower() -> float:
    """Return the factor by which an item of this process may take longer than without the tool."""
    return SLOWER if LOG in os.environ else 1.0


def run(tool: str, arguments: Sequence[str]) -> int:
    """Run pytest with these arguments under the tool. Return its exit code, or 1 if only the tool found an error.

    Raises PerfsuiteError if there is no GPU, if the tool is not installed, or if it does not support the GPU.
    """
    if not machine.has_gpu():
        raise PerfsuiteError(f"--sanitize needs a GPU: {machine.why_no_gpu()}")
    if any(a in ("-n", "--numprocesses", "--dist") or re.match(r"-n\w|--numprocesses=", a) for a in arguments):
        raise PerfsuiteError("--sanitize runs one process, to tell which item did what; leave -n out")
    with tempfile.TemporaryDirectory(prefix="perfsuite-sanitizer-") as folder:
        log = Path(folder) / "log"
        log.touch()
        environment = {**os.environ, LOG: str(log), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code = subprocess.run(command(program(), tool, log, arguments), env=environment, check=False).returncode
        found, _ = findings(log, 0)
    if refused := next((line for line in found if REFUSED in line), None):
        raise PerfsuiteError(
            f"--sanitize: {PROGRAM} says {refused!r}, so that nothing was checked; use a driver and a GPU that it "
            f"supports (a sandboxed container may hide them)"
        )
    print(f"{PROGRAM} {tool}: {len(found)} error{'s' * (len(found) != 1)}")
    for line in [] if code not in (0, FOUND) else found[:10]:
        print(f"  {line}")
    return 1 if code == FOUND or (found and code == 0) else code


def program() -> str:
    """Return the tool's path. Raises PerfsuiteError if it is not installed."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise PerfsuiteError(f"--sanitize needs {PROGRAM}: install the CUDA toolkit, or put its bin folder on the PATH")
    return found


def command(found: str, tool: str, log: Path, arguments: Sequence[str]) -> list[str]:
    """Return the whole command line."""
    options = ["--tool", tool, "--log-file", str(log), "--error-exitcode", str(FOUND)]
    # torch makes driver calls that may fail, and work after a faulty kernel must still run.
    options += ["--target-processes", "application-only", "--report-api-errors", "no", "--print-limit", "100000"]
    if tool == "memcheck":
        options += ["--destroy-on-device-error", "kernel"]
    return [found, *options, sys.executable, "-m", "pytest", *arguments]


def findings(log: Path, position: int) -> tuple[list[str], int]:
    """Return (errors in the log from `position` on, one line each, without duplicates; position of the log's end)."""
    text = log.read_bytes()
    lines = text[position:].decode(errors="replace").splitlines()
    found = []
    for i, line in enumerate(lines):
        head = _HEAD.match(line)
        if head:
            place = _PLACE.match(lines[i + 1]) if i + 1 < len(lines) else None
            found.append(head["what"] + (f" at {place['where']}" if place else ""))
    return list(dict.fromkeys(found)), len(text)


class Watch:
    """Reader of the tool's log, in the process under the tool. An item fails if the tool reports an error while it
    runs."""

    def __init__(self) -> None:
        self.log = Path(os.environ[LOG])
        self.position = 0

    def after_item(self) -> str | None:
        """Return the tool's errors for the item that has just run; None if there are none."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found, self.position = findings(self.log, self.position)
        if not found:
            return None
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{PROGRAM}: {found[0]}{more}"
