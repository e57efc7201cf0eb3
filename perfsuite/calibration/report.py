"""The table and the plot of a calibration. They show; the figures come from `analysis`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perfsuite import gate, statistics
from perfsuite.calibration.analysis import Analysis, Components, Detection, KindResult, Rate, percent, thresholds
from perfsuite.calibration.record import KINDS, Recording, side_name
from perfsuite.calibration.resample import ACCEPT_PROCESSES, COPIES
from perfsuite.errors import PerfsuiteError
from perfsuite.report import files
from perfsuite.report.units import duration, seconds

REMEDY = "the plot needs matplotlib: pip install matplotlib, or leave it out with --no-plot"
ABSENT = "–"
KNOWN = 0.0025
"""A planted size known worse than this is shown where it was planted."""
COLOURS = {"gate": "#0b5394", "margin": "#cc4125", "stated": "#e69138", "do_bench": "#6aa84f"}


def table(analysis: Analysis, recording: Recording, *, picture: str | None) -> str:
    """The whole page in Markdown; `picture` is the plot's file name beside it."""
    return "\n".join(_page(analysis, recording, picture)) + "\n"


def _page(a: Analysis, recording: Recording, picture: str | None) -> Iterator[str]:
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
        yield ""
        yield f"**Note** {line}."
    for line in a.left_out:
        yield ""
        yield f"**Left out** {line}."
    if picture:
        yield ""
        yield f"![Share of planted slowdowns that are flagged, by kind of pair]({picture})"
    yield from ("", "## The gate's two errors", "")
    yield (
        f"Unchanged code, a suite of {a.suite} workloads (each kind {COPIES} times), {a.suites} resampled runs of the "
        f"whole gate: **{_rate(a.alarms)}** of the runs raise a false alarm (REGRESSED); {_rate(a.red)} are red "
        "for any reason."
    )
    yield ""
    yield (
        "*planted* and *measured*: the slowdown that was built in, and the median over all quads recorded. "
        "*REGRESSED*: on the rows of 0% a false alarm, elsewhere a detection. *undecided*: red as NOISY. "
        "*second look*: share that needed it. The gate's figures are resampled from "
        f"{_processes(a.kinds)}; those of the other tools compare each new run with each stored run of another "
        "process. 95% intervals in brackets."
    )
    yield ""
    yield from _errors(a)
    yield from ("", "## Noise", "")
    yield (
        "Standard deviations of a log-ratio. *process mean*: the gate's unit, the mean of a process's block medians, "
        "with its 95% interval. *outliers*: share of quads far from their block's median. "
        "*bias*: the mean over all processes and its standard error."
    )
    yield ""
    yield "| kind | ratio | quad | outliers | block | process | session | process mean | bias |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for k in a.kinds:
        yield _noise(f"{k.kind}, {k.clock} clock, {seconds(k.seconds)}", "reference", k.to_reference, bias=False)
        yield _noise("", "two imports of one code", k.to_accepted, bias=True)
    if a.sessions < 2:
        yield ""
        yield (
            f"Session shifts were not measured: one session. The resampled gates draw them with the rule's own "
            f"standard deviation of {percent(statistics.SESSION_SD)}."
        )
    yield from ("", "## Coverage of the 95% intervals", "")
    yield "How often the interval held the value that is known from all that was recorded, over the resampled gates."
    yield ""
    names = list(dict.fromkeys(n for k in a.kinds for n in k.coverage))
    yield f"| kind | {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * len(names)}"
    for k in a.kinds:
        cells = (f"{_rate(k.coverage[n])} of {k.coverage[n].of}" if n in k.coverage else ABSENT for n in names)
        yield f"| {k.kind} | {' | '.join(cells)} |"
    yield from ("", "## The rule's constants", "")
    yield from constants(a)
    yield from ("", "## Seconds", "")
    yield from _seconds(a, recording)
    yield from ("", "## What was timed", "")
    for k in a.kinds:
        yield f"* {k.kind}: {KINDS.get(k.kind, k.kind)}."


def constants(a: Analysis) -> Iterator[str]:
    """The table of constants: assumed against measured."""
    yield "| constant | assumed | measured | reading |"
    yield "| --- | --- | --- | --- |"
    for c in a.constants:
        yield f"| {c.name} | {c.assumed} | {c.measured} | {c.reading} |"


def _errors(a: Analysis) -> Iterator[str]:
    tools = [
        ("pytest-benchmark median", "pytest-benchmark", "median"),
        ("pytest-benchmark min", "pytest-benchmark", "min"),
    ]
    tools += [("do_bench median", "do_bench", "median")]
    heads = ["kind", "planted", "measured", "gate: REGRESSED", "gate: undecided", "second look"]
    heads += [f"{label} {at}" for label, _, _ in tools for at in ("> margin", "> 5%")]
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    for k in a.kinds:
        at = thresholds(k.margin)
        for d in k.gate:
            measured, error = k.planted[side_name(d.planted)]
            name = f"{k.kind} (margin {percent(k.margin)})" if d.planted == 0 else ""
            assert d.undecided is not None
            cells = [name, percent(d.planted), f"{percent(measured)} ± {percent(error)}"]
            cells += [f"**{_rate(d.flagged)}**", _rate(d.undecided), percent(d.opened or 0.0)]
            for _, tool, field in tools:
                for threshold in (at[0], at[-1]):
                    found = _of(k, f"{tool} {field}:{threshold}%", d.planted)
                    cells.append(_rate(found.flagged) if found else "not available here" if d.planted == 0 else ABSENT)
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        "pytest-benchmark takes thresholds in whole per cents: the margin is rounded up. Its own runner and its own "
        "check (`--benchmark-compare-fail`) gave the figures, on the host's clock with a synchronisation; do_bench "
        "is `triton.testing.do_bench` with `quantiles`."
    )


def _of(kind: KindResult, rule: str, planted: float) -> Detection | None:
    return next((d for d in kind.others if d.rule == rule and d.planted == planted), None)


def _noise(name: str, ratio: str, c: Components, *, bias: bool) -> str:
    unit = f"{percent(c.unit.value)} ({percent(c.unit.low)} to {percent(c.unit.high)})"
    strays = f"{percent(c.bias)} ± {percent(c.bias_se)}" if bias else ABSENT
    session = ABSENT if c.session is None else percent(c.session)
    return (
        f"| {name} | {ratio} | {percent(c.quad)} | {percent(c.outliers)} | {percent(c.block)} | {percent(c.process)} | "
        f"{session} | {unit} | {strays} |"
    )


def _seconds(a: Analysis, recording: Recording) -> Iterator[str]:
    t = a.times
    yield "Medians over the recorded processes; the gate's by the sides that it would time, without proofs."
    yield ""
    yield "| what | seconds |"
    yield "| --- | ---: |"
    yield f"| one calibrating process | {duration(t.process)} |"
    yield f"| of it, until its first measurement | {duration(t.start)} |"
    for kind, s in t.sampling.items():
        yield f"| of it, {kind} | {duration(s)} |"
    kinds = _many(len(t.sampling), "workload")
    yield f"| a process of the gate's first look, {kinds} | {duration(t.first)} |"
    yield f"| a process of the second look, {kinds} | {duration(t.second)} |"
    yield f"| the gate, {gate.FIRST_PROCESSES} processes: all decided by the first look | {duration(t.gate)} |"
    for stage, s in zip(gate.STAGES, t.stages, strict=True):
        yield f"| the gate with {stage.processes} more for the second look | {duration(s)} |"
    for tool, s in t.tools.items():
        limit = f", at most {recording.sessions[0].benchmark_max_time:g} s a side" if tool == "pytest-benchmark" else ""
        yield f"| {tool}, one run of {kinds}{limit}, without start | {duration(s)} |"
    yield ""
    yield f"A baseline was taken to be one session of {ACCEPT_PROCESSES} processes, as `perfsuite accept` records it."


def _processes(kinds: Sequence[KindResult]) -> str:
    counts = sorted({k.processes for k in kinds})
    return f"{counts[0]} to {counts[-1]} recorded processes" if len(counts) > 1 else f"{counts[0]} recorded processes"


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _rate(rate: Rate) -> str:
    return f"{_share(rate.value)} ({_share(rate.low)}–{_share(rate.high)})"


def _share(value: float) -> str:
    """A share in per cent; below ten with a decimal, but 0 and 100 only where they are exact."""
    whole = f"{100 * value:.1f}"
    if value in (0.0, 1.0) or (10 <= 100 * value <= 90):
        return f"{100 * value:.0f}%"
    return f"{whole}%"


# --- the plot --------------------------------------------------------------------------------------------------------


def plot(analysis: Analysis, path: Path) -> Path:
    """Detection against slowdown, a panel a kind: `path` ends in .svg or .png. PerfsuiteError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PerfsuiteError(REMEDY) from None
    import io

    import matplotlib as mpl

    columns = 2 if len(analysis.kinds) > 1 else 1
    rows = (len(analysis.kinds) + columns - 1) // columns
    # The salt and the missing date keep the file the same for the same figures.
    with mpl.rc_context({"svg.hashsalt": "perfsuite", "font.size": 9.5}):
        figure = Figure(figsize=(5.0 * columns, 3.3 * rows + 1.1), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        for axis, kind in zip(axes, analysis.kinds, strict=False):
            _panel(axis, kind)
        for axis in axes[len(analysis.kinds) :]:
            axis.set_visible(False)
        for axis in axes[::columns]:
            axis.set_ylabel("runs that flag it")
        for axis in axes[max(len(analysis.kinds) - columns, 0) : len(analysis.kinds)]:
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
        buffer = io.BytesIO()
        form = path.suffix.removeprefix(".")
        figure.savefig(buffer, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    if form == "svg":
        text = "\n".join(line.rstrip() for line in buffer.getvalue().decode().splitlines())
        return files.write(path, text + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def _panel(axis: Any, kind: KindResult) -> None:
    low, high = thresholds(kind.margin)[0], thresholds(kind.margin)[-1]
    lines: list[tuple[str, str, Sequence[Detection], dict[str, Any]]] = [
        (
            "perfsuite gate, REGRESSED",
            "gate",
            kind.gate,
            {"linewidth": 2.2, "marker": "o", "markersize": 5, "zorder": 5},
        ),
    ]
    for label, rule, colour, style in (
        ("pytest-benchmark, median > margin", f"pytest-benchmark median:{low}%", "margin", "--"),
        (f"pytest-benchmark, median > {high}%", f"pytest-benchmark median:{high}%", "stated", ":"),
        ("do_bench, median > margin", f"do_bench median:{low}%", "do_bench", "-."),
    ):
        found = [d for d in kind.others if d.rule == rule]
        lines.append((label, colour, found, {"linewidth": 1.4, "linestyle": style, "marker": "s", "markersize": 3.5}))
    # Where the planted size drowns in the noise, what was planted is the better guess.
    known = all(error <= KNOWN for _, error in kind.planted.values())
    where = [100 * (d.measured if known else d.planted) for d in kind.gate]
    red = [100 * (d.flagged.value + (d.undecided.value if d.undecided else 0.0)) for d in kind.gate]
    axis.fill_between(
        where,
        [100 * d.flagged.value for d in kind.gate],
        red,
        color=COLOURS["gate"],
        alpha=0.13,
        linewidth=0,
        label="perfsuite gate, red as NOISY",
    )
    for number, (label, colour, points, look) in enumerate(lines):
        if not points:
            continue
        # Side by side, so that bars at one slowdown do not lie upon each other.
        x = [100 * (d.measured if known else d.planted) + 0.05 * (number - 1) for d in points]
        y = [100 * d.flagged.value for d in points]
        axis.plot(x, y, color=COLOURS[colour], label=label, **look)
        below = [100 * (d.flagged.value - d.flagged.low) for d in points]
        above = [100 * (d.flagged.high - d.flagged.value) for d in points]
        strong = colour == "gate"
        axis.errorbar(
            x,
            y,
            yerr=[below, above],
            fmt="none",
            ecolor=COLOURS[colour],
            elinewidth=1.6 if strong else 0.8,
            capsize=3 if strong else 1.5,
            alpha=0.9 if strong else 0.4,
            zorder=4 if strong else 2,
        )
    axis.set_xlim(min(0.0, *where) - 0.25, max(where) + 0.35)
    if 100 * kind.margin <= max(where):
        axis.axvline(100 * kind.margin, color="0.45", linewidth=1, linestyle=(0, (4, 3)), label="margin", zorder=1)
    noisy = "" if kind.margin <= gate.MARGIN_MAX else ": too noisy"
    title = f"{kind.kind}: {seconds(kind.seconds)} on the {kind.clock} clock, margin {percent(kind.margin)}{noisy}"
    axis.set_title(title, fontsize=9.5)
    axis.set_ylim(-4, 104)
    axis.set_yticks(range(0, 101, 25), [f"{v}%" for v in range(0, 101, 25)])
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
