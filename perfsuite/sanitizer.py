"""`pytest -m correctness --sanitize`: the proofs once more under NVIDIA's compute-sanitizer.

It sees each access of each kernel, and so finds faults that canaries cannot: reads outside a tensor, races in shared
memory, barriers that not all threads reach. pytest runs itself under the tool; each item fails with what the tool wrote
while it ran. Each tensor has an allocation of its own meanwhile, for in a caching allocator's pool a neighbour is not
outside. Ten to fifty times slower: select with -k.
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

from perfsuite import machine
from perfsuite.errors import PerfsuiteError

LOG = "PERFSUITE_SANITIZER_LOG"
"""Environment variable with the path that the tool writes to, in the process that runs under it."""
PROGRAM = "compute-sanitizer"
SLOWER = 50.0
FOUND = 99
"""The tool's own exit code where it found something."""
REFUSED = "Device not supported"
_HEAD = re.compile(r"^=========(?: (?:Error|Warning):)? (?!COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Target|\s)(?P<what>.+)$")
_PLACE = re.compile(r"^=========\s+at (?P<where>.+)$")


def slower() -> float:
    """Return the factor by which an item of this process may take longer than without the tool."""
    return SLOWER if LOG in os.environ else 1.0


def run(tool: str, arguments: Sequence[str]) -> int:
    """Run pytest with these arguments under the tool. Return its exit code, or 1 where only the tool found something.

    Raises PerfsuiteError where there is no GPU or no tool, or where the tool refuses the GPU.
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
    """Return the tool's path. Raises PerfsuiteError where it is not installed."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise PerfsuiteError(f"--sanitize needs {PROGRAM}: install the CUDA toolkit, or put its bin folder on the PATH")
    return found


def command(found: str, tool: str, log: Path, arguments: Sequence[str]) -> list[str]:
    """Return the whole command line."""
    options = ["--tool", tool, "--log-file", str(log), "--error-exitcode", str(FOUND)]
    # Torch asks the driver for things that may fail, and the work after a bad kernel is to run, too.
    options += ["--target-processes", "application-only", "--report-api-errors", "no", "--print-limit", "100000"]
    if tool == "memcheck":
        options += ["--destroy-on-device-error", "kernel"]
    return [found, *options, sys.executable, "-m", "pytest", *arguments]


def findings(log: Path, position: int) -> tuple[list[str], int]:
    """Return what the tool wrote from `position` on, a line for each error, each once, and the position where the log
    ends now."""
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
    """Plugin of the process under the tool: an error that the tool writes while an item runs fails that item."""

    def __init__(self) -> None:
        self.log = Path(os.environ[LOG])
        self.position = 0

    def after_item(self) -> str | None:
        """Return what is wrong with the item that has just run, or None."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found, self.position = findings(self.log, self.position)
        if not found:
            return None
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{PROGRAM}: {found[0]}{more}"
