"""Fit priors for the variances of a workload to all accepted workloads of the suite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.statistics.hierarchical import DEFAULT_NOISE, PRIOR_WORKLOADS, Noise, Sessions, fit_prior, within


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteNoise:
    """Accepted noise of the suite: of the ratio to the reference, and of two imports of one revision (A/A)."""

    ratio: Noise = DEFAULT_NOISE
    paired: Noise = DEFAULT_NOISE
    clocks: Mapping[str, SuiteNoise] = field(default_factory=dict)
    """Noise by clock, for the workloads of that clock. The host varies more than the device, above all between
    machines."""

    def of(self, clock: str) -> SuiteNoise:
        """Return the noise of workloads with this clock, or of all workloads if too few have it."""
        return self.clocks.get(clock, self)


def suite_noise(entries: Mapping[str, Entry]) -> SuiteNoise:
    """Return the noise priors that are fitted to all accepted workloads of a device."""
    clocks: dict[str, list[Entry]] = {}
    for entry in entries.values():
        clocks.setdefault(entry.clock, []).append(entry)
    ratio, paired = _means(entries.values())
    fitted = fit_prior(ratio)
    every = SuiteNoise(ratio=fitted, paired=fit_prior(paired) if paired else fitted)
    fits = {clock: _of_clock(those, every) for clock, those in clocks.items()}
    return replace(every, clocks={clock: suite for clock, suite in fits.items() if suite is not None})


def _of_clock(entries: Collection[Entry], every: SuiteNoise) -> SuiteNoise | None:
    """Return the noise of the workloads of one clock. A part to which too few of them contribute is taken from `every`;
    None if this holds for both parts."""
    ratio, paired = _means(entries)
    if not _enough(ratio) and not _enough(paired):
        return None
    return SuiteNoise(
        ratio=fit_prior(ratio) if _enough(ratio) else every.ratio,
        paired=fit_prior(paired) if _enough(paired) else every.paired,
    )


def _enough(workloads: Sequence[Sessions]) -> bool:
    return sum(within(means)[1] > 0 for means in workloads) >= PRIOR_WORKLOADS


def _means(entries: Collection[Entry]) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """Return the process means of each workload: (of the ratio to the reference, of the ratio to the accepted side)."""
    ratio = [e.process_means() for e in entries if "reference" not in e.few]
    return ratio, [means for e in entries if (means := e.process_means("accepted"))]
