"""Describe this machine, and the state of its GPU during a measurement. Never imports torch; works without NVML."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import statistics
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from perfsuite.errors import MachineError
from perfsuite.records import Condition, Machine
from perfsuite.system import device_nodes
from perfsuite.system.host import as_slug, cpu_info, cpu_model, cpu_slug, memory_bytes, usable_cores

# NVML's clocks event reasons. The bits are part of its ABI. They are named here because pynvml renamed the constants.
REASONS = {
    0x0001: "idle",
    0x0002: "application clocks",
    0x0004: "SW power cap",
    0x0008: "HW slowdown",
    0x0010: "sync boost",
    0x0020: "SW thermal",
    0x0040: "HW thermal",
    0x0080: "HW power brake",
    0x0100: "display clock",
    0x0200: "board limit",
    0x0400: "reliability",
}

# Reasons that make a sample unfit: they halve the clock rate, or change it at a time that is unrelated to the code. The
# software power cap is not one of them: a large matmul draws the board's whole power budget, so the cap is active
# whenever such a kernel runs, for both sides alike. Discarding such samples would leave nothing to time.
UNFIT = frozenset({"HW slowdown", "SW thermal", "HW thermal", "HW power brake"})


# NVML's fields that accumulate the time for which a reason was active. A reading just after a kernel, when the GPU is
# idle again, would miss a reason that was active during the kernel.
COUNTERS = {74: "SW power cap", 269: "SW thermal", 270: "HW thermal", 271: "HW power brake"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that CUDA_VISIBLE_DEVICES leaves visible."""

    name: str
    memory_bytes: int | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Information from the driver. `problem` is a one-line reason why NVML's information is missing."""

    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    source: str = "NVML"
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading of a GPU. A figure is None if the GPU does not report it.

    `reasons` are those that are active now, or that were active at some time since the previous reading.
    """

    sm_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    reasons: frozenset[str]


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU that torch could use. It takes less than 1 ms if there is none."""
    if not device_nodes.are_visible():
        return False
    version = package_version("torch")
    return version is None or not version.endswith("+cpu")


def identify(*, prefer: str | None = None) -> Machine:
    """Return this machine: its GPU if it has one that torch can use, otherwise its CPU.

    `prefer="cpu"` describes the CPU of a machine that has a GPU. Raises MachineError with `prefer="cuda"` if there is
    no usable GPU, and if there is a GPU whose name cannot be found.
    """
    survey = _preferred(prefer)
    cpu = cpu_model()
    first = survey.gpus[0] if survey.gpus else None
    return Machine(
        device=gpu_slug(first.name) if first else cpu_slug(cpu, cpu_info()),
        device_name=first.name if first else cpu,
        count=len(survey.gpus),
        cpu=cpu,
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        driver=survey.driver,
        cuda=(torch_cuda() or survey.cuda) if first else None,
        power_limit_w=first.power_limit_w if first else None,
        python=platform.python_version(),
        torch=package_version("torch"),
        triton=package_version("triton"),
        platform=f"{platform.system()}-{platform.release()}-{platform.machine()}",
    )


def _preferred(prefer: str | None) -> Survey:
    """Return the survey of the GPUs; an empty one if the CPU is to be described. Raises MachineError as `identify`."""
    if prefer not in (None, "cpu", "cuda"):
        raise MachineError(f"device {prefer!r} is not one of cpu, cuda")
    gpu = prefer != "cpu" and has_gpu()
    if prefer == "cuda" and not gpu:
        raise MachineError(f"no usable GPU: {why_no_gpu()}")
    survey = survey_gpus() if gpu else Survey()
    if gpu and not survey.gpus:
        raise MachineError(
            f"there is a GPU here, but which is not known: {survey.problem}; "
            "fix that, or set CUDA_VISIBLE_DEVICES= to measure the CPU"
        )
    return survey


def why_no_gpu() -> str:
    """Return why `has_gpu` is False, with the remedy."""
    if not device_nodes.exist():
        return "no NVIDIA device node in /dev; run on a machine, or in a container, with a GPU (docker run --gpus all)"
    if device_nodes.are_hidden():
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides it; unset it"
    version = package_version("torch")
    return f"torch {version} is a CPU build; install a CUDA build of torch"


def measured_devices(device: str) -> tuple[str, ...]:
    """Return names of the devices that are the same in every run on this machine: the UUIDs of the visible GPUs, "gpu"
    if these are not known, or "cpu"."""
    if device == "cpu":
        return ("cpu",)
    try:
        with _nvml() as nvml:
            uuids = [_asked(nvml, "nvmlDeviceGetUUID", as_text, h) for h in _visible_handles(nvml)]
    except Exception:  # as in survey_gpus
        uuids = []
    return tuple(filter(None, uuids)) or ("gpu",)


def links(count: int) -> dict[str, str]:
    """Return how the first visible GPUs are connected in pairs, as {"0-1": "NVLink"}; empty if NVML does not know."""
    found: dict[str, str] = {}
    try:
        with _nvml() as nvml:
            handles = _visible_handles(nvml)[:count]
            for (i, one), (j, other) in itertools.combinations(enumerate(handles), 2):
                by_nvlink = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                found[f"{i}-{j}"] = "NVLink" if by_nvlink == nvml.NVML_P2P_STATUS_OK else "PCIe or host"
    except Exception:  # as in survey_gpus
        return {}
    return found


def cores_near_gpus() -> tuple[frozenset[int], ...]:
    """Return the cores of each visible GPU's NUMA node: an empty set where NVML does not know, and an empty tuple if
    NVML fails."""
    words, bits = -(-(os.cpu_count() or 1) // 64), range(64)

    def numbers(mask: Any) -> frozenset[int]:
        return frozenset(64 * n + bit for n, word in enumerate(mask) for bit in bits if int(word) >> bit & 1)

    try:
        with _nvml() as nvml:
            near = [_asked(nvml, "nvmlDeviceGetCpuAffinity", numbers, h, words) for h in _visible_handles(nvml)]
    except Exception:  # as in survey_gpus
        return ()
    return tuple(cores or frozenset() for cores in near)


def survey_gpus() -> Survey:
    """Return the visible GPUs in CUDA's order, and the driver, from NVML or, if that fails, from nvidia-smi."""
    try:
        with _nvml() as nvml:
            handles = _visible_handles(nvml)
            if not handles:
                names = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
                return Survey(problem=f"{names} names none of its {nvml.nvmlDeviceGetCount()} GPUs")
            return Survey(
                driver=_asked(nvml, "nvmlSystemGetDriverVersion", as_text),
                cuda=_asked(nvml, "nvmlSystemGetCudaDriverVersion", lambda v: f"{v // 1000}.{v % 1000 // 10}"),
                gpus=tuple(
                    Gpu(
                        name=_asked(nvml, "nvmlDeviceGetName", as_text, handle) or "NVIDIA GPU",
                        memory_bytes=_asked(nvml, "nvmlDeviceGetMemoryInfo", lambda m: int(m.total), handle),
                        power_limit_w=_asked(nvml, "nvmlDeviceGetEnforcedPowerLimit", lambda mw: mw / 1000, handle),
                    )
                    for handle in handles
                ),
            )
    except Exception as error:  # pynvml's errors are its own classes, and it may not be installed at all
        problem = _one_line(error)
    return _survey_smi(problem)


def gpu_memory_bytes() -> int | None:
    """Return the memory of the smallest visible GPU in bytes; None if it is not known."""
    memory = [gpu.memory_bytes for gpu in survey_gpus().gpus]
    known = [m for m in memory if m is not None]
    return min(known) if known and len(known) == len(memory) else None


class Monitor:
    """Monitor of one GPU's state during a measurement: `with Monitor(0) as m: m.sample(); …; m.condition()`.

    `index` is torch's, among the visible GPUs. Readings have no figures if `index` is None, without a GPU or without
    NVML, and lack those figures that NVML does not support. They never raise.
    """

    def __init__(self, index: int | None = 0) -> None:
        self.index = index
        self.samples: list[Sample] = []
        self._stack = contextlib.ExitStack()
        self._nvml: Any = None
        self._handle: Any = None
        self._counters: dict[int, int] = {}

    def __enter__(self) -> Monitor:
        if self.index is None or not has_gpu():
            return self
        try:
            nvml = self._stack.enter_context(_nvml())
            self._handle = _visible_handles(nvml)[self.index]
            self._nvml = nvml
            self._counters = self._count()
        except Exception:  # as in survey_gpus; `perfsuite doctor` reports a broken NVML
            self._stack.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml = self._handle = None
        self._stack.close()

    def sample(self) -> Sample:
        """Read the GPU now, which takes about 0.1 ms, and keep the reading for `condition`."""
        reading = self._read()
        self.samples.append(reading)
        return reading

    def throttled(self) -> bool:
        """Return whether the clock rate was reduced for a reason in UNFIT between the last two samples."""
        return bool(self.samples) and not UNFIT.isdisjoint(self.samples[-1].reasons)

    def condition(self, set_aside: int = 0) -> Condition:
        """Return a summary of all samples: median and lowest clock rate, median power, highest temperature, every
        reason."""
        # An idle GPU lowers its clock rate, so readings between kernels say nothing about the kernels.
        busy = [s for s in self.samples if "idle" not in s.reasons] or self.samples
        clocks = [s.sm_clock_mhz for s in busy if s.sm_clock_mhz is not None]
        powers = [s.power_w for s in busy if s.power_w is not None]
        temperatures = [s.temperature_c for s in busy if s.temperature_c is not None]
        reasons: set[str] = set().union(*(s.reasons for s in self.samples))
        return Condition(
            sm_clock_mhz=statistics.median(clocks) if clocks else None,
            sm_clock_min_mhz=min(clocks, default=None),
            temperature_c=max(temperatures, default=None),
            power_w=round(statistics.median(powers), 1) if powers else None,
            throttle=tuple(sorted(reasons - {"idle"})),
            set_aside=set_aside,
        )

    def _read(self) -> Sample:
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return Sample(sm_clock_mhz=None, temperature_c=None, power_w=None, reasons=frozenset())
        # Constants by value (SM clock 1, GPU sensor 0), for the same reason as REASONS.
        mask = _asked(nvml, "nvmlDeviceGetCurrentClocksEventReasons", int, handle)
        if mask is None:
            mask = _asked(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", int, handle)
        return Sample(
            sm_clock_mhz=_asked(nvml, "nvmlDeviceGetClockInfo", float, handle, 1),
            temperature_c=_asked(nvml, "nvmlDeviceGetTemperature", float, handle, 0),
            power_w=_asked(nvml, "nvmlDeviceGetPowerUsage", lambda mw: mw / 1000, handle),
            reasons=reason_names(mask or 0) | self._held(),
        )

    def _held(self) -> frozenset[str]:
        before, self._counters = self._counters, self._count()
        return frozenset(COUNTERS[f] for f, value in self._counters.items() if value > before.get(f, value))

    def _count(self) -> dict[int, int]:
        fields = _asked(self._nvml, "nvmlDeviceGetFieldValues", list, self._handle, list(COUNTERS)) or []
        # The value is a C union. Its type selects the member: 1 unsigned int, 2 unsigned long, 3 unsigned long long.
        members = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
        return {
            int(f.fieldId): int(getattr(f.value, members[f.valueType]))
            for f in fields
            if f.nvmlReturn == 0 and f.valueType in members
        }


def reason_names(mask: int) -> frozenset[str]:
    """Return the names of the clocks event reasons in an NVML mask. A bit without a name is shown as hexadecimal."""
    bits = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]
    return frozenset(REASONS.get(bit, hex(bit)) for bit in bits)


def gpu_slug(name: str) -> str:
    """Return the slug of a GPU: "NVIDIA H200" → "nvidia-h200".

    A name without "NVIDIA" gets that prefix too, so that each device has only one slug.
    """
    slug = as_slug(name)
    return slug if slug.startswith("nvidia-") else f"nvidia-{slug}"


@cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, read from its version.py; None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def as_text(value: Any) -> str:
    """Return a string from NVML as text. Older versions of pynvml return bytes, newer ones text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old distribution called pynvml warns when it is imported
        nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def _asked(nvml: Any, function: str, read: Callable[[Any], Any], *arguments: Any) -> Any:
    """Return `read` applied to the result of an NVML function; None if this NVML, driver or GPU does not support it."""
    try:
        return read(getattr(nvml, function)(*arguments))
    except Exception:
        return None


def _visible_handles(nvml: Any) -> list[Any]:
    """Return the NVML handles of the GPUs that are visible to CUDA, in CUDA's order.

    NVML orders by PCI address, and CUDA by speed unless CUDA_DEVICE_ORDER is set. The two agree if all GPUs are of the
    same model, as in a benchmark machine.
    """
    every = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return every
    handles: list[Any] = []
    for token in (t.strip() for t in visible.split(",")):
        handle = _handle_of(nvml, token, every)
        if handle is None:  # as in CUDA, the first unknown name ends the list
            break
        handles.append(handle)
    return handles


def _handle_of(nvml: Any, token: str, every: list[Any]) -> Any:
    if token.isdigit():
        return every[int(token)] if int(token) < len(every) else None
    if token.startswith("GPU-"):  # CUDA accepts an abbreviated UUID, NVML does not
        return next((h for h in every if (_asked(nvml, "nvmlDeviceGetUUID", as_text, h) or "").startswith(token)), None)
    if token.startswith("MIG-"):
        return _asked(nvml, "nvmlDeviceGetHandleByUUID", lambda h: h, token)
    return None


def _survey_smi(problem: str) -> Survey:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Survey(problem=f"NVML: {problem}; nvidia-smi is not on PATH")
    query = [command, "--query-gpu=index,uuid,name,driver_version,power.limit", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Survey(problem=f"NVML: {problem}; nvidia-smi: {_one_line(error)}")
    rows = _visible_rows(done.stdout)
    gpus = tuple(Gpu(name=name, power_limit_w=_number(limit)) for _, _, name, _, limit in rows)
    if not gpus:
        return Survey(problem=f"NVML: {problem}; nvidia-smi names no visible GPU")
    return Survey(driver=rows[0][3], gpus=gpus, source="nvidia-smi", problem=f"NVML: {problem}")


def _visible_rows(output: str) -> list[list[str]]:
    """Return the cells that nvidia-smi printed for each GPU that is visible to CUDA, in CUDA's order."""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.count(",") == 4]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return rows
    tokens = [t.strip() for t in shown.split(",")]
    return [r for t in tokens for r in rows if t == r[0] or (t.startswith("GPU-") and r[1].startswith(t))]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
