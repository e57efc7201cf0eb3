"""The table and the plot of a calibration, from the figures of `analysis`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.calibration.analysis import thresholds
from experiments.calibration.figures import Analysis, Components, KindResult, Rate, percent
from experiments.calibration.record import KINDS, Recording
from experiments.calibration.resample import COPIES
from perfsuite.errors import PerfsuiteError
from perfsuite.report import files
from perfsuite.report.units import duration, seconds
from perfsuite.session.modes.accept import PROCESSES

REMEDY = "the plot needs matplotlib: pip install matplotlib, or leave it out with --no-plot"
ABSENT = "–"
KNOWN = 0.0025
"""Largest standard error at which the plot uses measured slowdowns. If one is larger, it uses the planted ones."""
COLOURS = {"gate": "#0b5394", "margin": "#cc4125", "stated": "#e69138", "do_bench": "#6aa84f"}
TOOLS = ("pytest-benchmark median", "pytest-benchmark min", "do_bench median")


def table(analysis: Analysis, recording: Recording, *, picture: str | None) -> str:
    """Return the whole page in Markdown. `picture` is the file name of the plot in the same folder, or None."""
    return "\n".join(_page(analysis, recording, picture)) + "\n"


def _page(a: Analysis, recording: Recording, picture: str | None) -> Iterator[str]:
    yield from _heading(a, recording, picture)
    yield from ("", "## The whole suite", "")
    yield from _suite(a)
    yield from ("", "## The gate, by kind and planted slowdown", "")
    yield from _gate(a)
    yield from ("", "## Other tools", "")
    yield from _others(a)
    yield from ("", "## Noise", "")
    yield from _noise(a)
    yield from ("", "## The rule's constants", "")
    yield from constants(a)
    yield from ("", "## Seconds", "")
    yield from _seconds(a, recording)
    yield from ("", "## What was timed", "")
    for k in a.kinds:
        yield f"* {k.kind}: {KINDS.get(k.kind, k.kind)}."


def _heading(a: Analysis, recording: Recording, picture: str | None) -> Iterator[str]:
    first = recording.sessions[0]
    yield f"# Calibration: {a.device_name}"
    yield ""
    yield (
        f"Written by `perfsuite calibrate` from {_many(a.processes, 'process', 'processes')} in "
        f"{_many(a.sessions, 'session')} ({', '.join(s.date[:10] for s in recording.sessions)}); "
        f"torch {first.torch}, CUDA {first.cuda or 'none'}, driver {first.driver or 'none'}. "
        "[How to read it](README.md)."
    )
    for line in a.warnings:
        yield from ("", f"**Note** {line}.")
    for line in a.left_out:
        yield from ("", f"**Left out** {line}.")
    if picture:
        yield from ("", f"![Share of planted slowdowns that are found, by kind of pair]({picture})")


def _suite(a: Analysis) -> Iterator[str]:
    yield (
        f"A suite of {a.suite} workloads (each kind {COPIES} times), accepted from {PROCESSES} processes a "
        f"workload and then gated, {a.suites} times with unchanged code. The gate's figures are resampled from "
        f"{_processes(a.kinds)}. 95% intervals in brackets."
    )
    yield ""
    yield from suite_table(a)
    yield ""
    yield (
        f"{_rate(a.red)} of the unchanged suites are red for any reason, NOISY included, "
        f"and {_rate(a.improved)} report a workload as IMPROVED."
    )


def _gate(a: Analysis) -> Iterator[str]:
    yield (
        "*planted* is the slowdown that was built in, and *measured* its median over all recorded ABBA rounds. "
        "*REGRESSED*: on the rows of 0% a false alarm, on the others a detection. *PASS* includes IMPROVED. "
        "*processes* and *seconds*: the mean of a workload; the seconds are those of timing both sides, without start, "
        "proof and warm-up."
    )
    yield ""
    yield from gate_table(a)


def _others(a: Analysis) -> Iterator[str]:
    yield (
        "How often they fail a new run of the same side, compared with a stored run of another process. "
        "pytest-benchmark takes thresholds in whole per cents: the margin is rounded up. Its own runner and its own "
        "check (`--benchmark-compare-fail`) gave the figures, on the host's clock with a synchronisation; do_bench "
        "is `triton.testing.do_bench` with `quantiles`."
    )
    yield ""
    yield from _rows(["kind", "planted", *(f"{tool} {at}" for tool in TOOLS for at in ("> margin", "> 5%"))])
    for k in a.kinds:
        found = {(c.rule, c.planted): _rate(c.flagged) for c in k.others}
        for g in k.gate:
            absent = "not available here" if g.planted == 0 else ABSENT
            cells = [found.get((f"{t}:{at}%", g.planted), absent) for t in TOOLS for at in thresholds(k.margin)]
            yield f"| {k.kind if g.planted == 0 else ''} | {percent(g.planted)} | {' | '.join(cells)} |"


def _noise(a: Analysis) -> Iterator[str]:
    yield (
        "The table gives standard deviations of a log-ratio. *process mean* is the mean of a process's block medians "
        "(on the wall clock of their middle half), with its 95% interval. *outliers* is the share of ABBA rounds far "
        "from their block's median. "
        "*bias* is the mean over all processes and its standard error. The gate compares two imports of one code."
    )
    yield ""
    yield from _rows(["kind", "ratio", "round", "outliers", "block", "process", "session", "process mean", "bias"], 2)
    for k in a.kinds:
        yield _noise_row(f"{k.kind}, {k.clock} clock, {seconds(k.seconds)}", "reference", k.to_reference, bias=False)
        yield _noise_row("", "two imports of one code", k.to_accepted, bias=True)


def _rows(heads: Sequence[str], left: int = 1) -> Iterator[str]:
    """Yield the heading of a table. The first `left` columns are aligned to the left, the others to the right."""
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join(['---'] * left + ['---:'] * (len(heads) - left))} |"


def suite_table(a: Analysis) -> Iterator[str]:
    """Yield the table of required error rates of the whole suite, and of the rates that were found."""
    yield from _rows(["over the whole suite", "wanted", "found", "reading"])
    for t in a.targets:
        wanted = f"{'≤' if t.at_most else '≥'} {_share(t.wanted)}"
        yield f"| {t.what} | {wanted} | **{_rate(t.found)}** | {'met' if t.met else 'missed'} |"


def constants(a: Analysis) -> Iterator[str]:
    """Yield the table of constants: assumed and measured."""
    yield from _rows(["constant", "assumed", "measured", "reading"], 4)
    for c in a.constants:
        yield f"| {c.name} | {c.assumed} | {c.measured} | {c.reading} |"


def gate_table(a: Analysis) -> Iterator[str]:
    """Yield the gate's verdicts, a row for each kind and planted slowdown."""
    yield from _rows(
        ["kind", "planted", "measured", "REGRESSED", "PASS", "NOISY", "processes", "seconds", "95% interval holds"]
    )
    for k in a.kinds:
        for g in k.gate:
            unchanged = g.planted == 0
            cells = [f"{k.kind} (margin {percent(k.margin)})" if unchanged else "", percent(g.planted)]
            cells += [f"{percent(g.measured)} ± {percent(g.error)}", f"**{_rate(g.regressed)}**"]
            cells += [_rate(g.passed), _rate(g.noisy), f"{g.processes:.2f}", f"{g.seconds:.2f}"]
            yield f"| {' | '.join(cells)} | {_rate(k.coverage) if unchanged else ''} |"


def _noise_row(name: str, ratio: str, c: Components, *, bias: bool) -> str:
    unit = f"{percent(c.unit.value)} ({percent(c.unit.low)} to {percent(c.unit.high)})"
    strays = f"{percent(c.bias)} ± {percent(c.bias_se)}" if bias else ABSENT
    session = ABSENT if c.session is None else percent(c.session)
    return (
        f"| {name} | {ratio} | {percent(c.abba)} | {percent(c.outliers)} | {percent(c.block)} | {percent(c.process)} | "
        f"{session} | {unit} | {strays} |"
    )


def _seconds(a: Analysis, recording: Recording) -> Iterator[str]:
    t, kinds = a.times, _many(len(a.times.sampling), "kind")
    yield "Medians over the recorded processes. Those of the gate are means, without proof and warm-up."
    yield ""
    yield from _rows(["what", "seconds"])
    yield f"| one calibrating process | {duration(t.process)} |"
    yield f"| until its first measurement | {duration(t.start)} |"
    for kind, s in t.sampling.items():
        yield f"| its {len(recording.extras) + 2} sides of {kind} | {duration(s)} |"
    for extra, (rounds, s) in t.gate.items():
        code = f"{percent(extra)} slower" if extra else "unchanged"
        yield f"| the gate, {a.suite} workloads, {code}, {rounds:.1f} rounds | {duration(s)} |"
    longest = max(session.benchmark_max_time for session in recording.sessions)
    for tool, s in t.tools.items():
        limit = f", at most {longest:g} s a side" if tool == "pytest-benchmark" else ""
        yield f"| {tool}, one run of {kinds}{limit}, without start | {duration(s)} |"


def _processes(kinds: Sequence[KindResult]) -> str:
    counts = sorted({k.processes for k in kinds})
    return f"{counts[0]} to {counts[-1]} recorded processes" if len(counts) > 1 else f"{counts[0]} recorded processes"


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _rate(rate: Rate) -> str:
    return f"{_share(rate.value)} ({_share(rate.low)}–{_share(rate.high)})"


def _share(value: float) -> str:
    """Return a share in per cent: with one decimal below 10% and above 90%, but 0% and 100% without."""
    whole = f"{100 * value:.1f}"
    if value in (0.0, 1.0) or (10 <= 100 * value <= 90):
        return f"{100 * value:.0f}%"
    return f"{whole}%"


# --- the plot --------------------------------------------------------------------------------------------------------


def plot(analysis: Analysis, path: Path) -> Path:
    """Plot the share that is flagged against the slowdown, a panel for each kind. `path` ends in .svg or .png.

    Raises PerfsuiteError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PerfsuiteError(REMEDY) from None
    import io

    import matplotlib as mpl

    form = path.suffix.removeprefix(".")
    buffer = io.BytesIO()
    # A fixed salt and no date, so that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "perfsuite", "font.size": 9.5}):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, analysis)
        figure.savefig(buffer, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    if form == "svg":
        text = "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines())
        return files.write(path, text + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def _draw(figure: Any, analysis: Analysis) -> None:
    """Draw a panel for each kind, and one legend for all."""
    count = len(analysis.kinds)
    columns = 2 if count > 1 else 1
    rows = (count + columns - 1) // columns
    figure.set_size_inches(5.0 * columns, 3.3 * rows + 1.1)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axis, kind in zip(axes, analysis.kinds, strict=False):
        _panel(axis, kind)
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("workloads flagged")
    for axis in axes[max(count - columns, 0) : count]:
        axis.set_xlabel("planted slowdown (%), as measured")
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        f"{analysis.device_name}: slowdowns flagged; at 0, false alarms\n"
        f"gate resampled from {_processes(analysis.kinds)}; bars: 95% intervals",
        fontsize=10.5,
    )


def _panel(axis: Any, kind: KindResult) -> None:
    where = _slowdowns(kind)
    axis.fill_between(
        list(where.values()),
        [100 * g.regressed.value for g in kind.gate],
        [100 * (g.regressed.value + g.noisy.value) for g in kind.gate],
        color=COLOURS["gate"],
        alpha=0.13,
        linewidth=0,
        label="perfsuite gate, red as NOISY",
    )
    for number, curve in enumerate(_curves(kind)):
        if curve.rates:
            # Moved apart, so that bars at one slowdown do not cover each other.
            _plot_curve(axis, curve, [where[planted] + 0.05 * (number - 1) for planted in curve.rates])
    axis.set_xlim(min(0.0, *where.values()) - 0.25, max(where.values()) + 0.35)
    if 100 * kind.margin <= max(where.values()):
        axis.axvline(100 * kind.margin, color="0.45", linewidth=1, linestyle=(0, (4, 3)), label="margin", zorder=1)
    title = f"{kind.kind}: {seconds(kind.seconds)} on the {kind.clock} clock, margin {percent(kind.margin)}"
    axis.set_title(title, fontsize=9.5)
    axis.set_ylim(-4, 104)
    axis.set_yticks(range(0, 101, 25), [f"{v}%" for v in range(0, 101, 25)])
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _slowdowns(kind: KindResult) -> dict[float, float]:
    """Return planted slowdown → where it is plotted, in per cent."""
    # If noise hides the size of a planted slowdown, the planted size is the better estimate.
    known = all(g.error <= KNOWN for g in kind.gate)
    return {g.planted: 100 * (g.measured if known else g.planted) for g in kind.gate}


@dataclass(frozen=True, slots=True)
class _Curve:
    """How often one rule flags each planted slowdown."""

    label: str
    colour: str
    rates: Mapping[float, Rate]
    style: Mapping[str, Any]


def _curves(kind: KindResult) -> Iterator[_Curve]:
    low, high = thresholds(kind.margin)
    thick = {"linewidth": 2.2, "marker": "o", "markersize": 5, "zorder": 5}
    yield _Curve("perfsuite gate, REGRESSED", "gate", {g.planted: g.regressed for g in kind.gate}, thick)
    for label, rule, colour, dashes in (
        ("pytest-benchmark, median > margin", f"pytest-benchmark median:{low}%", "margin", "--"),
        (f"pytest-benchmark, median > {high}%", f"pytest-benchmark median:{high}%", "stated", ":"),
        ("do_bench, median > margin", f"do_bench median:{low}%", "do_bench", "-."),
    ):
        thin = {"linewidth": 1.4, "linestyle": dashes, "marker": "s", "markersize": 3.5}
        yield _Curve(label, colour, {c.planted: c.flagged for c in kind.others if c.rule == rule}, thin)


def _plot_curve(axis: Any, curve: _Curve, x: Sequence[float]) -> None:
    rates = list(curve.rates.values())
    y = [100 * r.value for r in rates]
    axis.plot(x, y, color=COLOURS[curve.colour], label=curve.label, **curve.style)
    strong = curve.colour == "gate"
    axis.errorbar(
        x,
        y,
        yerr=[[100 * (r.value - r.low) for r in rates], [100 * (r.high - r.value) for r in rates]],
        fmt="none",
        ecolor=COLOURS[curve.colour],
        elinewidth=1.6 if strong else 0.8,
        capsize=3 if strong else 1.5,
        alpha=0.9 if strong else 0.4,
        zorder=4 if strong else 2,
    )
