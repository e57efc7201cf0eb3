"""Report of a comparison of two configurations: a table for the terminal, a page of Markdown, and JSON.

Speedups and their 95% intervals are over pairs of slices. Intervals of the other figures are over seeds (Student's t).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from perfsuite.report import units
from perfsuite.report.files import write
from suite.ab import Pair, Run, Slice
from suite.ablation import mean, paired

SCHEMA = 1
FILE, PAGE = "ab.json", "ab.md"
NONE = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One side's configuration."""

    file: str
    side: str
    """Implementation: reference or optimized."""
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A complete comparison."""

    trainer: str
    device: str
    versions: str
    date: str
    baseline: Setting
    optimized: Setting
    pairs: tuple[Pair, ...]
    """One per seed, at least one."""
    partial: str | None = None
    """Reason why the comparison is incomplete; None if it is complete."""

    @property
    def item(self) -> str:
        """Plural unit of the items."""
        return self.pairs[0].item

    @property
    def noun(self) -> str:
        """The trainer's word for a window."""
        return self.pairs[0].noun

    def runs(self, name: str) -> list[Run]:
        """Return a side's runs, one per seed."""
        return [getattr(pair, name) for pair in self.pairs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value with its 95% interval. A single observation has no interval."""

    value: float
    low: float | None
    high: float | None
    count: int
    """Number of observations: pairs of slices, or seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A formatted figure of both sides."""

    name: str
    baseline: str
    optimized: str
    compared: str


def speedup(pairs: Sequence[Pair]) -> Estimate | None:
    """Estimate the optimized side's items per second relative to the baseline's; None if no slice was timed."""
    timed = [both for pair in pairs for both in pair.timed()]
    if not timed:
        return None
    found = paired([a.seconds / a.items for a, _ in timed], [b.seconds / b.items for _, b in timed])
    known = len(timed) > 1
    return Estimate(
        value=found.value, low=found.low if known else None, high=found.high if known else None, count=len(timed)
    )


def difference(pairs: Sequence[tuple[float | None, float | None]]) -> Estimate | None:
    """Estimate optimized minus baseline from (baseline, optimized) per seed; None if no seed has both."""
    found = [b - a for a, b in pairs if a is not None and b is not None]
    if not found:
        return None
    middle, half = mean(found)
    known = math.isfinite(half)
    return Estimate(
        value=middle, low=middle - half if known else None, high=middle + half if known else None, count=len(found)
    )


def differing(record: Record) -> dict[str, tuple[Any, Any]]:
    """Return field → (baseline, optimized) for the fields in which the configurations differ."""
    a, b = ({"side": s.side, **_flat(s.fields)} for s in (record.baseline, record.optimized))
    names = dict.fromkeys([*a, *b])
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def rows(record: Record) -> list[Row]:
    """Return all figures in the table's order."""
    a, b = record.runs("baseline"), record.runs("optimized")
    timed = [both for pair in record.pairs for both in pair.timed()]
    first, second = [x for x, _ in timed], [y for _, y in timed]
    ratio = speedup(record.pairs)
    found = [
        Row(
            name=f"{record.item} a second",
            baseline=_rate(first),
            optimized=_rate(second),
            compared=NONE if ratio is None else _times(ratio),
        ),
        Row(
            name=f"time per {record.noun}",
            baseline=_window(first, record.item),
            optimized=_window(second, record.item),
            compared="",
        ),
        Row(
            name="time of all timed slices",
            baseline=_seconds([s.seconds for s in first]),
            optimized=_seconds([s.seconds for s in second]),
            compared="",
        ),
        Row(
            name="first slices, not timed",
            baseline=_seconds(_first(record, "baseline")),
            optimized=_seconds(_first(record, "optimized")),
            compared="",
        ),
        Row(
            name="time to build",
            baseline=_seconds([r.build_s for r in a]),
            optimized=_seconds([r.build_s for r in b]),
            compared="",
        ),
        _compared(_at(record), [r.loss for r in a], [r.loss for r in b]),
    ]
    for name in dict.fromkeys(name for run in (*a, *b) for name in run.quality):
        found.append(_compared(name, [r.quality.get(name) for r in a], [r.quality.get(name) for r in b]))
    found.append(_memory([r.peak_bytes for r in a], [r.peak_bytes for r in b]))
    return found


def table(record: Record, width: int) -> str:
    """Return the figures as a table for a terminal of `width` columns."""
    from rich.console import Console
    from rich.table import Table

    title = f"{record.trainer}: {_files(record)}" + (f"; partial: {record.partial}" if record.partial else "")
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for head in ("baseline", "optimized", "optimized against baseline (95%)"):
        shown.add_column(head, justify="right")
    for row in rows(record):
        shown.add_row(row.name, row.baseline, row.optimized, row.compared)
    out = StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    console.print(shown)
    console.print("\n".join(_remarks(record)), soft_wrap=True)
    return out.getvalue()


def page(record: Record) -> str:
    """Return the complete comparison as Markdown."""
    return "\n".join(_lines(record)) + "\n"


def save(record: Record, folder: Path) -> None:
    """Write ab.json and ab.md, each completely or not at all."""
    write(folder / FILE, json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    write(folder / PAGE, page(record))


def _plain(record: Record) -> dict[str, Any]:
    """Return the record and its derived figures as values that JSON can represent."""
    a, b = record.runs("baseline"), record.runs("optimized")
    names = dict.fromkeys(name for run in (*a, *b) for name in run.quality)
    quality = {n: difference([(x.quality.get(n), y.quality.get(n)) for x, y in zip(a, b, strict=True)]) for n in names}
    found = {
        "schema": SCHEMA,
        "item": record.item,
        "noun": record.noun,
        **dataclasses.asdict(record),
        "differing": {name: list(both) for name, both in differing(record).items()},
        "speedup": _dict(speedup(record.pairs)),
        "loss_difference": _dict(difference([(x.loss, y.loss) for x, y in zip(a, b, strict=True)])),
        "quality_difference": {name: _dict(estimate) for name, estimate in quality.items()},
    }
    for pair, entry in zip(record.pairs, found["pairs"], strict=True):
        entry |= {"warm_up": pair.warm_up, "speedup": _dict(speedup([pair]))}
        for name in ("baseline", "optimized"):
            run = getattr(pair, name)
            entry[name] |= {"items": run.items, "loss": run.loss}
    whole = _finite(found)
    assert isinstance(whole, dict)
    return whole


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dict(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else dataclasses.asdict(estimate)


def _lines(record: Record) -> Iterator[str]:
    yield f"# {record.trainer}: two configurations side by side"
    yield ""
    yield f"Written by `perfsuite ab {record.trainer}`: {record.device}, {record.versions}, {record.date}."
    yield ""
    if record.partial:
        yield f"**Partial**: {record.partial}."
        yield ""
    yield f"* baseline: {record.baseline.file}, the {record.baseline.side} trainer"
    yield f"* optimized: {record.optimized.file}, the {record.optimized.side} trainer"
    yield ""
    yield "| | baseline | optimized | optimized against baseline (95%) |"
    yield "| --- | ---: | ---: | ---: |"
    yield from (f"| {r.name} | {r.baseline} | {r.optimized} | {r.compared} |" for r in rows(record))
    yield ""
    yield from _remarks(record)
    yield from _seeds(record)
    yield from _losses(record)
    yield ""
    yield "## Fields that differ"
    yield ""
    found = differing(record)
    if not found:
        yield "None."
        return
    yield "| field | baseline | optimized |"
    yield "| --- | --- | --- |"
    yield from (f"| {name} | {_value(a)} | {_value(b)} |" for name, (a, b) in found.items())


def _seeds(record: Record) -> Iterator[str]:
    yield ""
    yield "## By seed"
    yield ""
    names = dict.fromkeys(name for pair in record.pairs for name in (*pair.baseline.quality, *pair.optimized.quality))
    heads = [f"{record.item}", "timed pairs", "speedup", "loss", *names]
    yield f"| seed | {' | '.join(heads)} |"
    yield "| ---: |" + " ---: |" * len(heads)
    for pair in record.pairs:
        ratio, a, b = speedup([pair]), pair.baseline, pair.optimized
        cells = [_both(a.items, b.items), len(pair.timed()), NONE if ratio is None else _times(ratio)]
        cells += [f"{_number(a.loss)}, {_number(b.loss)}"]
        cells += [f"{_number(a.quality.get(n))}, {_number(b.quality.get(n))}" for n in names]
        yield f"| {pair.seed} | {' | '.join(map(str, cells))} |"
    yield ""
    yield "Of two figures in a cell the first is the baseline's."


def _losses(record: Record) -> Iterator[str]:
    yield ""
    yield f"## Losses after the same number of {record.item}"
    yield ""
    yield f"| seed | {record.item} | baseline | optimized |"
    yield "| ---: | ---: | ---: | ---: |"
    for pair in record.pairs:
        seen = [0, 0]
        for a, b in zip(pair.baseline.slices, pair.optimized.slices, strict=True):
            seen = [seen[0] + a.items, seen[1] + b.items]
            yield f"| {pair.seed} | {_both(*seen)} | {_number(a.loss)} | {_number(b.loss)} |"


def _remarks(record: Record) -> Iterator[str]:
    """Yield notes on how to read the figures."""
    ratio = speedup(record.pairs)
    count = len(record.pairs)
    if ratio is None:
        yield "No slice was timed: the training was too short for more than its warm-up."
    elif ratio.low is None:
        yield "Only one pair of slices was timed, so that the speedup has no interval: train longer."
    else:
        yield f"The interval of the speedup is over {ratio.count} pairs of slices, which alternated."
    if count == 1:
        yield "Losses and metrics are of one seed and have no interval: repeat --seed for one."
    else:
        yield f"Intervals of losses and metrics are over {count} seeds."
    for name in ("baseline", "optimized"):
        for note in dict.fromkeys(note for run in record.runs(name) for note in run.notes):
            yield f"{name}: {note}"


def _compared(name: str, a: Sequence[float | None], b: Sequence[float | None]) -> Row:
    found = difference(list(zip(a, b, strict=True)))
    if found is None:
        compared = NONE
    elif found.low is None or found.high is None:
        compared = f"{found.value:+.4g}"
    else:
        compared = f"{found.value:+.4g} ({found.low:+.4g} to {found.high:+.4g})"
    return Row(name=name, baseline=_number(_mean(a)), optimized=_number(_mean(b)), compared=compared)


def _memory(a: Sequence[int | None], b: Sequence[int | None]) -> Row:
    first, second = (max((p for p in peaks if p is not None), default=None) for peaks in (a, b))
    if first is None or second is None:
        return Row(name="peak GPU memory", baseline=NONE, optimized=NONE, compared="not measured: ran on a CPU")
    ratio = f"{units.significant(second / first)}×" if first else NONE
    return Row(name="peak GPU memory", baseline=units.bytes_(first), optimized=units.bytes_(second), compared=ratio)


def _at(record: Record) -> str:
    """Return the loss's row name, with the number of items if it is the same for all runs."""
    items = {run.items for name in ("baseline", "optimized") for run in record.runs(name)}
    return f"loss after {next(iter(items)):,} {record.item}" if len(items) == 1 else "loss at the end"


def _first(record: Record, name: str) -> list[float]:
    """Return the seconds of the slices that are excluded from the throughput."""
    return [s.seconds for pair in record.pairs for s in getattr(pair, name).slices[: pair.warm_up]]


def _rate(slices: Sequence[Slice]) -> str:
    return units.significant(_items(slices) / math.fsum(s.seconds for s in slices)) if slices else NONE


def _window(slices: Sequence[Slice], item: str) -> str:
    windows = sum(s.windows for s in slices)
    if not windows:
        return NONE
    return f"{units.seconds(math.fsum(s.seconds for s in slices) / windows)} ({_items(slices) // windows:,} {item})"


def _items(slices: Sequence[Slice]) -> int:
    return sum(s.items for s in slices)


def _seconds(values: Sequence[float]) -> str:
    return units.seconds(math.fsum(values)) if values else NONE


def _times(ratio: Estimate) -> str:
    """Format a speedup with its interval."""
    text = units.ratio(ratio.value)
    return text if ratio.low is None else f"{text} ({units.interval(ratio.low, ratio.high)})"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.5g}"


def _both(a: int, b: int) -> str:
    return f"{a:,}" if a == b else f"{a:,}, {b:,}"


def _files(record: Record) -> str:
    return f"{record.baseline.file} ({record.baseline.side}), {record.optimized.file} ({record.optimized.side})"


def _value(value: Any) -> str:
    """Format a field's value for a cell of a Markdown table: strings as they are, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|")


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested fields as a flat dict with dotted names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
