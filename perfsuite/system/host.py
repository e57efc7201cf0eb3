"""Describe the host from what the operating system reports: its CPU, cores, memory and load. Never imports torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """Return the CPU's name as reported by the operating system."""
    info = cpu_info()
    if "model name" in info:
        return " ".join(info["model name"].split())
    if "CPU part" in info:  # Arm reports only numbers
        return f"{platform.machine()} implementer {info.get('CPU implementer', '?')} part {info['CPU part']}"
    return platform.processor() or platform.machine() or "unknown"


def cpu_slug(model: str, info: Mapping[str, str]) -> str:
    """Return the slug of a CPU: "Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz" → "cpu-intel-xeon-gold-6338".

    Clouds often hide the model ("Intel(R) Xeon(R) Processor"). Family and model numbers are then added.
    """
    text = re.sub(r"\((R|TM|C)\)", " ", model, flags=re.IGNORECASE)
    text = re.sub(r"@.*$|\b\d+-Core\b|\bCPU\b|\bProcessor\b|\bwith .* Graphics\b", " ", text, flags=re.IGNORECASE)
    slug = as_slug(text) or "unknown"
    if not any(c.isdigit() for c in slug) and "cpu family" in info and "model" in info:
        slug += f"-f{info['cpu family']}m{info['model']}"
    return f"cpu-{slug}"


@cache
def cpu_info() -> dict[str, str]:
    """Return the first processor's entries in /proc/cpuinfo; empty if that file does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    info: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found:
            info.setdefault(key.strip(), value.strip())
    return info


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the host's memory in bytes, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


@contextlib.contextmanager
def used_elsewhere() -> Iterator[Callable[[], float]]:
    """Yield a function that returns, after the block, how many cores other processes kept busy: 0.5 is half a core.

    Uses /proc/stat, with a resolution of 0.01 s. The function returns 0 if that file does not exist.
    """
    began, busy, own = time.monotonic(), _busy_s(), time.process_time()
    shares: list[float] = []
    try:
        yield lambda: shares[0] if shares else 0.0
    finally:
        seconds = time.monotonic() - began
        after = _busy_s()
        if busy is not None and after is not None and seconds > 0:
            shares.append(max(0.0, after - busy - (time.process_time() - own)) / seconds)


def _busy_s() -> float | None:
    """Return the total seconds for which cores have been busy, or stolen by the hypervisor, since the machine started;
    None without /proc/stat."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = fields[:8]
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def as_slug(text: str) -> str:
    """Return the text in lower case, with each run of other characters than letters and digits as one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
