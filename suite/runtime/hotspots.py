"""Summary of a trace: seconds per phase, the most expensive operations, and advice on where to start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from perfsuite.report import units
from suite.runtime.ranges import OUTER, PREFIX

LARGEST = 5
BUSY = 0.7
"""The host is the bottleneck if the GPU is busy for less than this fraction of the time."""
WIDEST = 60
"""Maximum characters of an operation's name."""


@dataclass(frozen=True, slots=True)
class Hotspots:
    """Time of the traced windows in seconds: per phase, on host and GPU, and per operation.

    phases      name → (calls, host seconds, GPU seconds)
    operations  name → (calls, seconds): GPU kernels, copies and fills if there are any, otherwise PyTorch's operations
                by self time
    launches    number of launched GPU kernels, copies and fills
    """

    windows: int
    seconds: float
    phases: dict[str, tuple[int, float, float]]
    operations: dict[str, tuple[int, float]]
    launches: int

    def table(self) -> Table:
        """Return a table of the phases and the most expensive operations, per window."""
        title = f"a window of {units.seconds(self.seconds / self.windows)}, over {self.windows} traced windows"
        table = Table(title=title, title_justify="left")
        for head in ("phase or operation", "calls", "host", "GPU", "share"):
            table.add_column(head, justify="left" if head.startswith("phase") else "right")
        for name, (calls, host, device) in sorted(self.phases.items(), key=lambda item: -self._weight(item[1])):
            share = self._weight((calls, host, device)) / self.seconds
            times = [units.seconds(t / self.windows) if t else "–" for t in (host, device)]
            table.add_row(name, f"{calls / self.windows:g}", *times, f"{share:.0%}")
        table.add_section()
        for name, (calls, seconds) in self._largest():
            time = units.seconds(seconds / self.windows)
            own = ["–", time] if self.launches else [time, "–"]
            table.add_row(name[:WIDEST], f"{calls / self.windows:g}", *own, f"{seconds / self.seconds:.0%}")
        return table

    def advice(self) -> str:
        """Return one line that says where to start."""
        busy = sum(seconds for _, seconds in self.operations.values()) / self.seconds
        if self.launches and busy < BUSY:
            return (
                f"The GPU works {busy:.0%} of the time: the host is the limit, with {self.launches / self.windows:.0f} "
                "launches a window. First make these fewer: CUDA graphs, torch.compile, larger batches."
            )
        if not self.operations:
            return "Nothing was recorded."
        name, (_, seconds) = self._largest()[0]
        largest = f"the largest operation is {name[:WIDEST]}, {seconds / self.seconds:.0%} of the time"
        if not self.phases:
            return f"First look at the operations: {largest}."
        own = [phase for phase in self.phases if phase not in OUTER] or list(self.phases)
        first = max(own, key=lambda phase: self._weight(self.phases[phase]))
        share = self._weight(self.phases[first]) / self.seconds
        return f"First look at the phase {first}, {share:.0%} of the time; {largest}."

    def _weight(self, phase: tuple[int, float, float]) -> float:
        return phase[2] if self.launches else phase[1]

    def _largest(self) -> list[tuple[str, tuple[int, float]]]:
        return sorted(self.operations.items(), key=lambda item: -item[1][1])[:LARGEST]


def hotspots(events: Iterable[Any], windows: int, seconds: float) -> Hotspots:
    """Summarise a profiler's `torch.profiler.profile.key_averages()`.

    windows  number of traced windows
    seconds  their total time
    """
    phases, operations, kernels = {}, {}, {}
    for event in events:
        on_device = "CUDA" in str(event.device_type)
        if event.key.startswith(PREFIX):
            if not on_device:
                times = event.cpu_time_total / 1e6, event.device_time_total / 1e6
                phases[event.key.removeprefix(PREFIX)] = (event.count, *times)
        elif on_device:
            if not event.is_user_annotation:
                kernels[event.key] = (event.count, event.self_device_time_total / 1e6)
        elif not event.is_user_annotation:
            operations[event.key] = (event.count, event.self_cpu_time_total / 1e6)
    launches = sum(calls for calls, _ in kernels.values())
    return Hotspots(windows, seconds, phases, kernels or operations, launches)
