"""`--sanitize` runs pytest under compute-sanitizer, whose findings fail the item that was running."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from scale import FULLY

from perfsuite.errors import PerfsuiteError
from perfsuite.system import machine, sanitizer

READ = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _forward_kernel+0x1f0 in lior.py:12
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000001004 is out of bounds
=========         Host Frame: cuLaunchKernel [0x1] in libcuda.so.1
"""
RACE = """\
========= Error: Race reported between Write access at _sum+0x80 in k.py:3
=========     and Read access at _sum+0xa0 in k.py:4 [16 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
========= ERROR SUMMARY: 1 error
"""
TOOL = """#!{python}
import os, subprocess, sys
at = sys.argv.index({python!r})
print("options:", *(a for a in sys.argv[1:at] if a.startswith("--")))
sys.exit(subprocess.run(sys.argv[at:]).returncode or ({code} if {code} else 0))
"""
MODULE = """
import os

def test_sound():
    pass

def test_reads_outside():
    with open(os.environ["PERFSUITE_SANITIZER_LOG"], "a") as log:
        log.write({read!r})

def test_sound_too():
    pass
"""
TIMED = """
import pytest

@pytest.mark.perf
def test_timed():
    assert False
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a fake compute-sanitizer on the PATH, which writes nothing by itself."""
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable, code=0))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    # This affects the process that starts the tool; the process under it does not ask again.
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text("from perfsuite.system import machine\nmachine.has_gpu = lambda: True\n")
    return folder


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--rootdir={folder}", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_finding_fails_the_item_that_was_running(project: Path) -> None:
    (project / "test_it.py").write_text(MODULE.format(read=READ))
    done = pytest_in(project, "--sanitize")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "options: --tool --log-file --error-exitcode" in done.stdout
    assert (
        "test_reads_outside: compute-sanitizer: Invalid __global__ read of size 4 bytes at _forward_kernel+0x1f0 in "
        "lior.py:12" in done.stdout
    )
    assert "1 failed, 2 passed" in done.stdout
    assert "compute-sanitizer memcheck: 1 error\n" in done.stdout


def test_a_run_without_findings_passes_and_times_nothing(project: Path) -> None:
    (project / "test_it.py").write_text(MODULE.format(read="========= ERROR SUMMARY: 0 errors\n") + TIMED)
    done = pytest_in(project, "--sanitize", "--sanitize-tool=racecheck")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 1 deselected" in done.stdout
    assert "compute-sanitizer racecheck: 0 errors\n" in done.stdout


@FULLY
def test_a_finding_between_items_fails_the_run(project: Path) -> None:
    (project / "test_it.py").write_text("def test_sound():\n    pass\n")
    late = "def pytest_unconfigure():\n    import os\n    log = os.environ.get('PERFSUITE_SANITIZER_LOG')\n"
    late += f"    if log:\n        open(log, 'a').write({READ!r})\n"
    with (project / "conftest.py").open("a") as conftest:
        conftest.write(late)
    done = pytest_in(project, "--sanitize")
    assert done.returncode == 1
    assert "  Invalid __global__ read of size 4 bytes at _forward_kernel" in done.stdout


@FULLY
def test_a_device_that_the_tool_does_not_support_is_an_error(project: Path) -> None:
    (project / "test_it.py").write_text(MODULE.format(read='========= Error: Device not supported. Please refer to"\n'))
    done = pytest_in(project, "--sanitize")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "ERROR: --sanitize: compute-sanitizer says 'Device not supported. Please refer to" in done.stderr
    assert "nothing was checked" in done.stderr


@pytest.mark.parametrize("arguments", [["-n", "2"], ["-n2"], ["--numprocesses=2"]])
def test_sanitize_is_refused_with_xdist(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    with pytest.raises(PerfsuiteError, match="leave -n out"):
        sanitizer.run("memcheck", arguments)


def test_error_without_a_gpu_or_the_tool_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine.has_gpu():
        done = pytest_in(tmp_path, "--sanitize")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "ERROR: --sanitize needs a GPU: " in done.stderr
        assert "Traceback" not in done.stderr
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(PerfsuiteError, match="needs compute-sanitizer: install the CUDA toolkit"):
        sanitizer.program()


def test_findings_are_deduplicated_and_read_from_the_last_offset(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(READ + READ)
    found, end = sanitizer.findings(log, 0)
    assert found == ["Invalid __global__ read of size 4 bytes at _forward_kernel+0x1f0 in lior.py:12"]
    assert sanitizer.findings(log, end) == ([], end)
    with log.open("a") as stream:
        stream.write(RACE)
    assert sanitizer.findings(log, end)[0] == ["Race reported between Write access at _sum+0x80 in k.py:3"]


PLANTED = """
import torch, triton, triton.language as tl
from perfsuite import Pair, Workload, tensor

@triton.jit
def double(x, out, n, more: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n + more, other=0.0)
    tl.store(out + i, value * 2, mask=i < n)

def launched(x, more):
    out = torch.empty_like(x)
    if x.numel():
        double[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), more, 64)
    return out

def reference(x):
    return x * 2

def honest(x):
    return launched(x.contiguous(), 0)

def outside(x):
    return launched(x.contiguous(), 64)

sides = dict(reference=reference, inputs={"x": tensor("n")}, workloads=[Workload("w", n=1024)])
sound = Pair(optimized=honest, **sides)
reads_outside = Pair(optimized=outside, **sides)
"""


@pytest.mark.gpu
def test_an_out_of_bounds_read_is_found_on_a_gpu(tmp_path: Path) -> None:
    try:
        sanitizer.program()
    except PerfsuiteError as error:
        pytest.skip(str(error))
    (tmp_path / "test_it.py").write_text(PLANTED)
    done = pytest_in(tmp_path, "-m", "correctness", "-k", "equivalence", "--sanitize")
    message = done.stdout + done.stderr
    if sanitizer.REFUSED in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 1, message
    assert "1 failed, 1 passed" in message
    assert "reads_outside" in message.partition("FAILURES")[2], message
    assert "Invalid __global__ read of size 4 bytes" in message
