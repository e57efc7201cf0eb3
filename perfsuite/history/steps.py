"""Steps in a workload's times from run to run, by change-point detection (the library ruptures)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.codec import to_json
from perfsuite.history.records import Figures, Run
from perfsuite.records import Status
from perfsuite.report import units

RULE = 1
"""Version of the rule. Steps that another version found are computed again."""
SIZE = 4
"""Minimum number of runs on each side of a step."""
PENALTY, BY_LENGTH = 10.0, 2.0
"""Penalty for a step in variances of the noise: PENALTY + BY_LENGTH · log(number of runs), because a longer series has
more chances to show a step in pure noise."""
LEAST = 0.01
"""Smallest step in log seconds: the gate resolves none below 1% either."""
ALPHA, USUAL = 0.01, 60
"""Significance level of the rank test between the runs on both sides, so that outliers do not count as a step. A series
of n > USUAL runs, in which several outliers may come together, uses ALPHA · USUAL / n."""
FLOOR = 0.002
"""Minimum noise in log seconds that is assumed, because times may repeat exactly."""
WINDOW, CLIP = 5, 3.0
"""Log times are clipped at CLIP standard deviations of the noise from the median of the WINDOW runs around them."""
MEANINGLESS = (Status.NOT_EQUIVALENT, Status.NOT_PROVEN, Status.NOT_TIMED, Status.UNMEASURED, Status.WRONG_MACHINE)
"""Verdicts with which a time means nothing."""
MISSING = "to find steps, install the library ruptures (the extra `history`): pip install ruptures"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A workload's time in one run."""

    run: Run
    seconds: float
    conditions: str
    """Digest of what must be equal for times to be comparable: device, software stack and workload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A lasting change of a workload's time on one device and stack."""

    device: str
    started: str
    """ISO date-time of the first run after it."""
    revision: str | None
    """Revision of that run."""
    last: str | None
    """Revision of the run before."""
    change: float
    """Relative change of the median time (0.04 = 4% slower)."""
    before: int
    """Number of runs since the previous step, or since the first run."""
    after: int
    dirty: bool = False
    """Whether either run had uncommitted changes."""
    hosts: str = ""
    """"a → b" if the two runs were on different hosts."""

    @property
    def shown(self) -> str:
        """The step in one line."""
        change = f"{100 * self.change:.1f}% slower" if self.change > 0 else f"{-100 * self.change:.1f}% faster"
        runs = f"{units.count(self.before, 'run')} before, {self.after} after"
        revision = self.revision[:7] if self.revision else "no revision"
        host = f"; on another host: {self.hosts}" if self.hosts else ""
        return f"since {self.started[:10]}, {revision}: {change} ({runs}){host}"


def is_available() -> bool:
    """Return whether ruptures is installed."""
    return importlib.util.find_spec("ruptures") is not None


def has_time(figures: Figures) -> bool:
    """Return whether the run has a meaningful time of the workload."""
    return figures.optimized_s is not None and figures.optimized_s > 0 and figures.verdict not in MEANINGLESS


def find(series: Sequence[Timed]) -> list[Step]:
    """Return the steps in a workload's runs, which are in order of time. Each device and stack is its own series."""
    groups: dict[str, list[Timed]] = {}
    for one in series:
        groups.setdefault(one.conditions, []).append(one)
    found = [step for group in groups.values() for step in _steps(group)]
    return sorted(found, key=lambda step: step.started)


def conditions(run: Run, figures: Figures) -> str:
    """Return the digest in `Timed.conditions`."""
    m, f = run.machine, figures
    stack = [m.device, m.power_limit_w, m.driver, m.cuda, m.torch, m.triton, m.python]
    every = json.dumps([*stack, f.clock, f.direction, f.dtype, to_json(f.sizes)], sort_keys=True)
    return hashlib.sha256(every.encode()).hexdigest()[:16]


def _steps(group: Sequence[Timed]) -> Iterable[Step]:
    times = [math.log(one.seconds) for one in group]
    bounds = [0, *changes(times), len(times)]
    for begin, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        last, first = group[middle - 1].run, group[middle].run
        yield Step(
            device=first.machine.device,
            started=first.started,
            revision=first.revision,
            last=last.revision,
            change=math.exp(_difference(times[begin:middle], times[middle:end])) - 1,
            before=middle - begin,
            after=end - middle,
            dirty=first.dirty or last.dirty,
            hosts=f"{last.host} → {first.host}" if last.host != first.host else "",
        )


def _difference(before: Sequence[float], after: Sequence[float]) -> float:
    return statistics.median(after) - statistics.median(before)


def changes(times: Sequence[float]) -> list[int]:
    """Return the positions at which the level of a series of log seconds changes.

    Outliers are clipped, then ruptures proposes the changes of the mean that explain more than their penalty. Changes
    that the medians and ranks of both sides do not confirm are dropped, the least significant first.
    """
    if len(times) < 2 * SIZE:
        return []
    import numpy as np
    import ruptures
    from scipy.ndimage import median_filter
    from scipy.stats import median_abs_deviation

    values = np.asarray(times)
    noise = max(float(median_abs_deviation(np.diff(values), scale="normal")) / math.sqrt(2), FLOOR)
    middle = median_filter(values, WINDOW, mode="mirror")
    clipped = np.clip(values, middle - CLIP * noise, middle + CLIP * noise)
    penalty = (PENALTY + BY_LENGTH * math.log(len(times))) * noise**2
    search: Any = ruptures.KernelCPD(kernel="linear", min_size=SIZE)
    bounds = [0, *search.fit(clipped.reshape(-1, 1)).predict(pen=penalty)]
    while len(bounds) > 2:
        chances = [_chance(times[a:b], times[b:c]) for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False)]
        weakest = max(range(len(chances)), key=chances.__getitem__)
        if chances[weakest] <= ALPHA * min(1.0, USUAL / len(times)):
            break
        del bounds[weakest + 1]
    return [int(b) for b in bounds[1:-1]]


def _chance(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the Mann-Whitney p-value for equal levels of both sides; 1 if the medians differ by less than LEAST."""
    from scipy.stats import mannwhitneyu

    if abs(_difference(before, after)) < LEAST:
        return 1.0
    return float(mannwhitneyu(before, after).pvalue)
