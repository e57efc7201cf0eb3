"""Report what this machine can run, what is missing, and the remedy. Works even if torch does not import."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from rich.table import Table
from rich.text import Text

from perfsuite.errors import PerfsuiteError
from perfsuite.report import units
from perfsuite.system import device_nodes
from perfsuite.system.machine import has_gpu, identify, package_version, survey_gpus, why_no_gpu

State = Literal["ok", "warn", "missing"]

PROBE_LIMIT_S = 120
"""Time limit of a probe in seconds. A first import of torch from a cold network disk can take a minute."""

# The probes run in separate processes, because a torch built for another CPU or driver may crash when it is imported.
TORCH_PROBE = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "usable": False, "problem": None}
try:
    if torch.cuda.is_available():
        found["name"] = torch.cuda.get_device_name(0)
        found["sum"] = float(torch.ones(8, device="cuda").sum())
        found["usable"] = True
except Exception as error:
    found["problem"] = str(error).splitlines()[0]
print("\\n" + json.dumps(found))
"""
TRITON_PROBE = """
import json, triton, triton.language
print("\\n" + json.dumps({"version": triton.__version__}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check. "missing": `perfsuite run` does not work without it; "warn": some feature is lost."""

    name: str
    status: State
    detail: str
    remedy: str = ""
    """One line; empty if nothing needs to be done."""


def examine(folder: Path | None = None) -> list[Finding]:
    """Check the machine and the project in `folder` (default: the current one). It takes a few seconds."""
    folder = folder or Path.cwd()
    with contextlib.ExitStack() as running:
        torch_probe = _start(running, "torch", TORCH_PROBE)
        triton_probe = _start(running, "triton", TRITON_PROBE)
        torch, facts = _torch(torch_probe)
        on_gpu = bool(facts.get("usable"))
        return [
            _python(),
            torch,
            _gpu(facts),
            _nvml(),
            _triton(triton_probe, on_gpu),
            _nvcc(facts),
            _ninja(on_gpu),
            _compiler(),
            _package("pytest", "runs the items"),
            _package("pytest-benchmark", "stores the baseline"),
            _package("hypothesis", "draws the inputs"),
            *_rivals(on_gpu),
            _git(folder),
            _baseline(folder),
            _writable(folder / ".perfsuite", "reports"),
            _writable(folder / "baselines", "baselines"),
        ]


def table(findings: list[Finding]) -> Table:
    """Return the findings as a table for the terminal."""
    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "missing": ("✗", "red bold")}
    view = Table(box=None, padding=(0, 1), show_header=False)
    view.add_column(width=1)
    view.add_column(no_wrap=True, style="bold")
    view.add_column(overflow="fold")
    for finding in findings:
        mark, style = marks[finding.status]
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", style=style)
        view.add_row(Text(mark, style=style), finding.name, detail)
    return view


@cache
def requirements() -> Mapping[str, Requirement]:
    """Return perfsuite's own requirements and those of its extras, by name; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires("perfsuite") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, Requirement] = {}
    for line in lines:
        with contextlib.suppress(InvalidRequirement):
            requirement = Requirement(line)
            found.setdefault(requirement.name.lower(), requirement)
    return found


def _wanted(name: str) -> str:
    """Return the argument for `pip install`: the requirement with its version range."""
    requirement = requirements().get(name)
    return f"'{name}{requirement.specifier}'" if requirement and str(requirement.specifier) else name


def _fits(name: str, version: str) -> bool:
    requirement = requirements().get(name)
    return requirement is None or requirement.specifier.contains(version, prereleases=True)


def _python() -> Finding:
    version, detail = platform.python_version(), f"{platform.python_version()} at {sys.executable}"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        minor = ".".join(version.split(".")[:2])
        return Finding(
            name="Python",
            status="warn",
            detail=f"{detail}; no Python.h, which Triton and torch.compile build against",
            remedy=f"install the headers, e.g. apt-get install python{minor}-dev",
        )
    return Finding(name="Python", status="ok", detail=detail)


def _package(name: str, purpose: str) -> Finding:
    version = package_version(name)
    install = f"{_interpreter()} -m pip install {_wanted(name)}"
    if version is None:
        return Finding(name=name, status="missing", detail=f"not installed ({purpose})", remedy=install)
    if not _fits(name, version):
        detail = f"{version} is outside the tested range {requirements()[name].specifier}"
        return Finding(name=name, status="warn", detail=detail, remedy=install)
    if name == "pytest-benchmark" and _numbers(version) < (5, 3) and _numbers(package_version("pytest")) >= (9, 2):
        detail = f"{version} fails with pytest {package_version('pytest')}"
        remedy = f"{_interpreter()} -m pip install 'pytest-benchmark>=5.3,<6'"
        return Finding(name=name, status="warn", detail=detail, remedy=remedy)
    return Finding(name=name, status="ok", detail=f"{version} ({purpose})")


def _torch(probe: _Probe | None) -> tuple[Finding, dict[str, Any]]:
    install = f"{_interpreter()} -m pip install {_wanted('torch')}"
    if probe is None:
        return Finding(name="torch", status="missing", detail="not installed", remedy=install), {}
    facts, problem = probe()
    if problem:
        detail = f"{package_version('torch') or 'installed'}, but {problem}"
        return Finding(name="torch", status="missing", detail=detail, remedy=f"reinstall it: {install}"), {}
    build = f"CUDA {facts['cuda']} build" if facts["cuda"] else "CPU build"
    if not _fits("torch", facts["version"].partition("+")[0]):
        detail = f"{facts['version']} ({build}) is outside the tested range {requirements()['torch'].specifier}"
        return Finding(name="torch", status="warn", detail=detail, remedy=install), facts
    return Finding(name="torch", status="ok", detail=f"{facts['version']} ({build})"), facts


def _gpu(torch: Mapping[str, Any]) -> Finding:
    if not has_gpu():
        lost = "CPU workloads only" if torch else "none"
        remedy = why_no_gpu()
        present = device_nodes.exist()
        return Finding(
            name="GPU",
            status="warn",
            detail=f"{'not usable' if present else 'none'}: {lost}; Triton kernels run in its interpreter",
            remedy=remedy,
        )
    survey = survey_gpus()
    if not survey.gpus:
        remedy = "repair the NVIDIA driver until nvidia-smi lists the GPU"
        return Finding(name="GPU", status="missing", detail=survey.problem or "no GPU is visible", remedy=remedy)
    detail = f"{len(survey.gpus)} × {survey.gpus[0].name}, driver {survey.driver}"
    if survey.cuda:
        detail += f" (CUDA up to {survey.cuda})"
    if len({g.name for g in survey.gpus}) > 1:
        remedy = "choose one with CUDA_VISIBLE_DEVICES"
        return Finding(name="GPU", status="warn", detail=f"{detail}; of several kinds", remedy=remedy)
    if torch and not torch.get("usable"):
        why = torch.get("problem") or "torch.cuda.is_available() is False"
        remedy = "match torch's CUDA build to the driver, or update the driver"
        return Finding(name="GPU", status="missing", detail=f"{detail}; torch cannot use it: {why}", remedy=remedy)
    return Finding(name="GPU", status="ok", detail=detail)


def _nvml() -> Finding:
    if not has_gpu():
        return Finding(name="NVML", status="ok", detail="not needed without a GPU")
    survey = survey_gpus()
    if survey.source == "NVML" and survey.problem is None:
        return Finding(name="NVML", status="ok", detail="clocks and throttle reasons are recorded")
    if package_version("nvidia-ml-py") is None:
        remedy = f"{_interpreter()} -m pip install {_wanted('nvidia-ml-py')}"
    else:
        remedy = "make libnvidia-ml.so.1 of the driver visible to the loader (LD_LIBRARY_PATH, container runtime)"
    detail = f"{survey.problem}; clocks and throttling are not seen"
    return Finding(name="NVML", status="warn", detail=detail, remedy=remedy)


def _triton(probe: _Probe | None, on_gpu: bool) -> Finding:
    if platform.system() != "Linux":
        return Finding(name="triton", status="warn", detail="runs on Linux only", remedy="use Linux for Triton kernels")
    install = f"{_interpreter()} -m pip install {_wanted('triton')}"
    if probe is None:
        detail = "not installed: Triton kernels are neither run nor compiled"
        return Finding(name="triton", status="warn", detail=detail, remedy=install)
    facts, problem = probe()
    if problem:
        detail = f"{package_version('triton') or 'installed'}, but {problem}"
        return Finding(name="triton", status="warn", detail=detail, remedy=f"reinstall it: {install}")
    version = facts["version"]
    if not _fits("triton", version.partition("+")[0]):
        detail = f"{version} is outside the tested range {requirements()['triton'].specifier}"
        # torch's CUDA builds pin their triton, so another version would break torch.
        return Finding(name="triton", status="warn", detail=detail, remedy="install the triton that torch asks for")
    if on_gpu and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        detail = f"{version}; TRITON_INTERPRET is set: kernels run in the interpreter although there is a GPU"
        return Finding(name="triton", status="warn", detail=detail, remedy="unset TRITON_INTERPRET")
    if on_gpu:
        return Finding(name="triton", status="ok", detail=f"{version}; kernels run on the GPU")
    detail = f"{version}; kernels run in the interpreter, and are compiled for sm_90 without being run"
    return Finding(name="triton", status="ok", detail=detail)


def _nvcc(torch: Mapping[str, Any]) -> Finding:
    on_gpu, built_for = bool(torch.get("usable")), torch.get("cuda")
    path = _find_nvcc()
    if path is None:
        if not on_gpu:
            return Finding(name="nvcc", status="ok", detail="not found; needed with a GPU only")
        remedy = f"install the CUDA toolkit {built_for or ''}".rstrip() + " and put nvcc on PATH, or set CUDA_HOME"
        detail = "not found: CUDA C++ extensions fall back to their plain form"
        return Finding(name="nvcc", status="warn", detail=detail, remedy=remedy)
    release = re.search(r"release ([\d.]+)", _output([path, "--version"]))
    version = release.group(1) if release else "of unknown version"
    detail = f"{version} at {path}"
    if on_gpu and built_for and release and version.split(".")[0] != built_for.split(".")[0]:
        remedy = f"install the CUDA toolkit {built_for}, or set CUDA_HOME to it"
        detail += f", but torch was built for CUDA {built_for}: extensions will not build"
        return Finding(name="nvcc", status="warn", detail=detail, remedy=remedy)
    return Finding(name="nvcc", status="ok", detail=detail)


def _find_nvcc() -> str | None:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    # CUDA_HOME before PATH, as in torch's extension builder.
    for home in homes[:2]:
        if home and os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
            return os.path.join(home, "bin", "nvcc")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(str(homes[2]), "bin"))


def _ninja(on_gpu: bool) -> Finding:
    path = shutil.which("ninja")
    if path:
        return Finding(name="ninja", status="ok", detail=f"{_output([path, '--version'])} at {path}")
    if (Path(sys.executable).parent / "ninja").exists():
        remedy = f"export PATH={Path(sys.executable).parent}:$PATH"
        return Finding(name="ninja", status="warn", detail="installed beside Python, not on PATH", remedy=remedy)
    if not on_gpu:
        return Finding(name="ninja", status="ok", detail="not found; needed for CUDA C++ extensions only")
    remedy = f"{_interpreter()} -m pip install {_wanted('ninja')}"
    return Finding(name="ninja", status="warn", detail="not found: CUDA C++ extensions do not build", remedy=remedy)


def _compiler() -> Finding:
    # torch.compile calls CXX or g++ on the CPU; Triton builds its launcher with CC, gcc or clang.
    cxx = next((p for c in (os.environ.get("CXX"), "g++", "clang++") if c and (p := shutil.which(c))), None)
    cc = next((p for c in (os.environ.get("CC"), "gcc", "clang", "cc") if c and (p := shutil.which(c))), None)
    if cxx and cc:
        return Finding(name="C compiler", status="ok", detail=f"{_first_line(_output([cxx, '--version']))} at {cxx}")
    lacks = "C++ compiler (torch.compile on the CPU)" if cc else "C compiler (torch.compile and Triton)"
    remedy = "apt-get install build-essential, or set CC and CXX"
    return Finding(name="C compiler", status="warn", detail=f"no {lacks}", remedy=remedy)


RIVALS = (
    ("flash-attn", "attention", "flash-attn --no-build-isolation"),
    ("torchao", "low-bit optimizers and quantisation", None),
    ("liger-kernel", "fused Triton layers", None),
)


def _rivals(on_gpu: bool) -> list[Finding]:
    found = []
    for name, purpose, wanted in RIVALS:
        version = package_version(name)
        if version is not None:
            finding = Finding(name=name, status="ok", detail=f"{version} (rival: {purpose})")
        elif not on_gpu:
            finding = Finding(name=name, status="ok", detail=f"not installed; a rival on GPUs only ({purpose})")
        else:
            remedy = f"{_interpreter()} -m pip install {wanted or _wanted(name)}"
            detail = f"not installed: its rivals are skipped ({purpose})"
            finding = Finding(name=name, status="warn", detail=detail, remedy=remedy)
        found.append(finding)
    return found


def _git(folder: Path) -> Finding:
    git = shutil.which("git")
    lost = "the gate cannot load the accepted revision"
    if git is None:
        return Finding(name="git", status="warn", detail=f"not found: {lost}", remedy="apt-get install git")
    inside = _output([git, "-C", str(folder), "rev-parse", "--is-inside-work-tree", "--is-shallow-repository"])
    if not inside.startswith("true"):
        # Git refuses a checkout that belongs to another user, as in containers, until it is marked as safe.
        remedy = f"git init, or git config --global --add safe.directory {folder}"
        return Finding(name="git", status="warn", detail=f"{folder} is no repository: {lost}", remedy=remedy)
    if inside.split()[-1] == "true":
        return Finding(
            name="git",
            status="warn",
            detail=f"a shallow clone: {lost}",
            remedy="git fetch --unshallow (fetch-depth: 0)",
        )
    return Finding(name="git", status="ok", detail=_first_line(_output([git, "--version"])))


def _baseline(folder: Path) -> Finding:
    try:
        device = identify().device
    except PerfsuiteError as error:
        return Finding(name="baseline", status="warn", detail=f"device unknown: {error}", remedy="see GPU above")
    name, path = f"baselines/{device}.json", folder / "baselines" / f"{device}.json"
    if not path.exists():
        detail = f"{name} does not exist: the gate has nothing to compare with on this device"
        return Finding(name="baseline", status="warn", detail=detail, remedy="perfsuite accept --reason '…'")
    further = sorted(path.name for path in path.parent.glob(f"{device}-x*.json"))
    try:
        # Each side of a workload has its own record, in pytest-benchmark's schema.
        ids = {entry["fullname"].rpartition("@")[0] for entry in json.loads(path.read_text())["benchmarks"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"{name} cannot be read: {_first_line(str(error)) or type(error).__name__}"
        return Finding(name="baseline", status="warn", detail=detail, remedy=f"git checkout -- {name}")
    others = f"; for several processes {', '.join(further)}" if further else ""
    return Finding(name="baseline", status="ok", detail=f"{name}, {units.count(len(ids), 'workload')}{others}")


def _writable(folder: Path, purpose: str) -> Finding:
    name, existing = f"{folder.name}/", folder
    while not existing.exists():
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding(name=name, status="ok", detail=f"writable ({purpose})")
    remedy = f"chmod u+w {existing}, or mount it writable" if existing.is_dir() else f"remove the file {existing}"
    return Finding(name=name, status="missing", detail=f"{folder} cannot be written ({purpose})", remedy=remedy)


_Probe = Callable[[], tuple[dict[str, Any], str]]


def _start(running: contextlib.ExitStack, module: str, code: str) -> _Probe | None:
    """Start `code` in a separate Python process. Return a function that waits for it; None if `module` is not
    installed."""
    if importlib.util.find_spec(module) is None:
        return None
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    running.callback(process.wait)
    running.callback(process.kill)

    def wait() -> tuple[dict[str, Any], str]:
        try:
            out, err = process.communicate(timeout=PROBE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return {}, f"importing it takes more than {PROBE_LIMIT_S} s"
        return read_probe(process.returncode, out, err)

    return wait


def read_probe(code: int, out: str, err: str) -> tuple[dict[str, Any], str]:
    """Return (facts, "") from a probe's output, or ({}, why it failed)."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return {}, f"importing it crashes Python with {signal.Signals(-code).name}"
        return {}, f"importing it crashes Python with signal {-code}"
    if code > 0:
        return {}, f"importing it fails: {_last_line(err) or f'exit status {code}'}"
    try:
        return json.loads(_last_line(out)), ""
    except ValueError:
        return {}, "importing it ends Python without a word"


def _interpreter() -> str:
    return os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd() + os.sep) else sys.executable


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])


def _output(command: list[str]) -> str:
    """Return the output of a command; empty if it fails or takes longer than 20 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()
