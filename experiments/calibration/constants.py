"""Compare the constants that the gate's rule assumes with what was measured. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from experiments.calibration.figures import (
    LEVEL,
    Components,
    Constant,
    Deviation,
    KindResult,
    deviation,
    percent,
    share,
)
from experiments.calibration.resample import Simulation, Tally
from perfsuite.gate import estimates, planning, stages
from perfsuite.records import OPTIMIZED, Status
from perfsuite.statistics import hierarchical as rule


def compare(kinds: Sequence[KindResult], whole: Simulation) -> Iterator[Constant]:
    """Yield each constant of the rule, as assumed and as measured."""
    yield _process_sd("PROCESS_SD", [k.to_accepted.unit for k in kinds])
    yield _process_dof({k.kind: k.to_accepted.unit for k in kinds})
    yield _process_sd("PROCESS_SD, to the reference", [k.to_reference.unit for k in kinds])
    yield from _sessions(kinds)
    yield _import_bias({k.kind: k.to_accepted for k in kinds})
    yield _margin_min(kinds)
    unchanged = {k: t[OPTIMIZED] for k, t in whole.tallies.items()}
    yield _of_unchanged(
        unchanged,
        "TARGET_SHARE",
        f"{planning.TARGET_SHARE:g} of the margin: one process decides nearly always",
        lambda t: share(t.first, t.unsampled),
        least=0.5,
    )
    yield _of_unchanged(
        unchanged,
        "STAGES",
        f"{stages.STAGES[-1]} processes decide what is left",
        lambda t: 1 - share(t.statuses[Status.NOISY], t.runs),
        least=0.95,
    )


def _process_sd(name: str, units: Sequence[Deviation]) -> Constant:
    dof = sum(u.dof for u in units)
    pooled = deviation(math.sqrt(sum(u.value**2 * u.dof for u in units) / dof), dof)
    return Constant(
        name=name,
        assumed=percent(rule.PROCESS_SD),
        measured=_interval(pooled),
        reading=_reading(rule.PROCESS_SD, pooled),
    )


def _process_dof(units: Mapping[str, Deviation]) -> Constant:
    low, high = _prior_range(rule.PROCESS_SD, rule.PROCESS_DOF)
    outside = [k for k, u in units.items() if u.high < low or u.low > high]
    return Constant(
        name="PROCESS_DOF",
        assumed=f"{rule.PROCESS_DOF:g}: kinds differ from {percent(low)} to {percent(high)}",
        measured=", ".join(f"{k} {percent(u.value)}" for k, u in units.items()),
        reading=f"outside of it: {', '.join(outside)}" if outside else "agrees",
    )


def _margin_min(kinds: Sequence[KindResult]) -> Constant:
    wide = [k.kind for k in kinds if k.margin > estimates.MARGIN_MIN[k.clock]]
    return Constant(
        name="MARGIN_MIN",
        assumed=", ".join(f"{percent(least)} on the {clock} clock" for clock, least in estimates.MARGIN_MIN.items()),
        measured="; ".join(f"{k.kind}: margin {percent(k.margin)}, {_found(k)}" for k in kinds),
        reading=f"resolved only above it: {', '.join(wide)}" if wide else "agrees",
    )


def _of_unchanged(
    tallies: Mapping[str, Tally], name: str, assumed: str, read: Callable[[Tally], float], *, least: float
) -> Constant:
    """Return a constant that affects how many unchanged workloads are decided, with the decided share of each kind."""
    shares = {k: read(t) for k, t in tallies.items()}
    weak = [k for k, s in shares.items() if s < least]
    return Constant(
        name=name,
        assumed=assumed,
        measured="unchanged and decided: " + ", ".join(f"{k} {percent(s)}" for k, s in shares.items()),
        reading=f"less than {least:.0%}: {', '.join(weak)}" if weak else "agrees",
    )


def _import_bias(biases: Mapping[str, Components]) -> Constant:
    # Each kind's mean is its bias plus its own error. The sum follows a χ² distribution if the bias is as assumed.
    total = sum(b.bias**2 / (b.bias_se**2 + rule.IMPORT_BIAS**2) for b in biases.values())
    agrees = _chi2_survival(total, len(biases)) > 1 - LEVEL
    known = min(b.bias_se for b in biases.values()) <= 2 * rule.IMPORT_BIAS
    return Constant(
        name="IMPORT_BIAS",
        assumed=percent(rule.IMPORT_BIAS),
        measured=", ".join(f"{k} {percent(b.bias)} ± {percent(b.bias_se)}" for k, b in biases.items()),
        reading=("agrees" if known else "agrees, but measured less precisely") if agrees else "assumed too small here",
    )


def _sessions(kinds: Sequence[KindResult]) -> Iterator[Constant]:
    known = {k.kind: s for k in kinds if (s := k.to_reference.session) is not None}
    if not known:
        text = "not measured: one session was recorded; add one with --more"
        for name, value in (("SESSION_SD", percent(rule.SESSION_SD)), ("SESSION_DOF", f"{rule.SESSION_DOF:g}")):
            yield Constant(name=name, assumed=value, measured=text, reading="not known")
        return
    dof = sum(k.to_reference.sessions - 1 for k in kinds if k.kind in known)
    pooled = deviation(math.sqrt(fmean(s**2 for s in known.values())), dof)
    yield Constant(
        name="SESSION_SD",
        assumed=percent(rule.SESSION_SD),
        measured=_interval(pooled),
        reading=_reading(rule.SESSION_SD, pooled),
    )
    low, high = _prior_range(rule.SESSION_SD, rule.SESSION_DOF)
    yield Constant(
        name="SESSION_DOF",
        assumed=f"{rule.SESSION_DOF:g}: kinds differ from {percent(low)} to {percent(high)}",
        measured=", ".join(f"{k} {percent(s)}" for k, s in known.items()),
        reading="agrees" if all(s <= high for s in known.values()) else "kinds differ by more",
    )


def _chi2_survival(value: float, dof: int) -> float:
    from scipy import special

    return float(special.chdtrc(dof, value))


def _prior_range(sd: float, dof: float) -> tuple[float, float]:
    """Return the range of 95% of the true standard deviations, under a scaled inverse χ² prior."""
    from scipy import special

    low, high = (float(special.chdtri(dof, p)) for p in (0.025, 0.975))
    return sd * math.sqrt(dof / low), sd * math.sqrt(dof / high)


def _interval(found: Deviation) -> str:
    return f"{percent(found.value)} ({percent(found.low)} to {percent(found.high)}) over the kinds"


def _reading(assumed: float, found: Deviation) -> str:
    if assumed < found.low:
        return "assumed too small here"
    return "agrees" if assumed <= found.high else "cautious: less was measured"


def _found(kind: KindResult) -> str:
    found = [g for g in kind.gate if g.planted > 0 and g.regressed.value >= estimates.POWER]
    power = f"{estimates.POWER:.0%}"
    return f"{power} found from {percent(min(g.measured for g in found))}" if found else f"none found at {power}"
