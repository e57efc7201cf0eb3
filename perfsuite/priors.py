"""Priors for the variances of a workload, fitted to all accepted workloads of the suite."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from perfsuite.baseline import Entry
from perfsuite.statistics import DEFAULT_NOISE, PRIOR_WORKLOADS, Noise, fit_prior


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """The suite's accepted noise: of the ratio to the reference, and of two imports of one revision (A/A)."""

    ratio: Noise = DEFAULT_NOISE
    paired: Noise = DEFAULT_NOISE
    clocks: Mapping[str, Suite] = field(default_factory=dict)
    """Noise by clock, for the workloads of that clock. The host varies more than the device, above all between
    machines."""

    def of(self, clock: str) -> Suite:
        """Return the noise of workloads with this clock; of all where too few have it."""
        return self.clocks.get(clock, self)


def suite_noise(entries: Mapping[str, Entry]) -> Suite:
    """Return the noise priors that all accepted workloads of a device give."""
    clocks: dict[str, list[Entry]] = {}
    for entry in entries.values():
        clocks.setdefault(entry.clock, []).append(entry)
    enough = {clock: _fitted(those) for clock, those in clocks.items() if len(those) >= PRIOR_WORKLOADS}
    return replace(_fitted(entries.values()), clocks=enough)


def _fitted(entries: Collection[Entry]) -> Suite:
    paired = [means for e in entries if (means := e.process_means("accepted"))]
    ratio = fit_prior(e.process_means() for e in entries if "reference" not in e.few)
    return Suite(ratio=ratio, paired=fit_prior(paired) if paired else ratio)
