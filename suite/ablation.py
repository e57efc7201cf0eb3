"""Ablation of a trainer's techniques: they are switched on one after another, and each one is switched off alone.

    trainer → arms → rounds of timed windows, in random order → Record (JSON) → table and waterfall

Rounds are interleaved: each round times every arm once, so machine drift affects all arms. Ratios of two arms are
computed within a round, and their intervals over the rounds (Student's t of the log-ratios).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import reprlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from perfsuite.errors import PerfsuiteError
from perfsuite.report import units
from perfsuite.report.files import write
from suite import plotting as plots
from suite.naming import shown

if TYPE_CHECKING:
    import torch

SCHEMA = 1
VOCABULARY = 32000
BATCHES = 8
"""Number of different batches. They are on the device before timing starts."""
REFERENCE, NONE, ALL = "reference", "none", "all"
WIDE = 20
"""Ratio of the longest to the shortest bar above which the axis is logarithmic, so that short bars stay visible."""
SHORTEST_S, LONGEST_S = 1e-12, 1e12
"""Bounds of a window's seconds. A recorded time outside them is invalid."""
Batches = Iterator[Mapping[str, Any]]
Short = Callable[[Any], tuple[Any, Any, int] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A trainer to time: the reference, or the optimized trainer with the techniques `on`."""

    name: str
    on: tuple[str, ...] | None
    """Techniques that are on; None for the reference trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Measurements of an arm. Counts and memory are None on a CPU."""

    name: str
    seconds: tuple[float, ...]
    """Seconds per window, by round."""
    peak_bytes: int | None = None
    """Peak memory of a window in bytes, including the trainer's tensors, excluding memory of CUDA graphs."""
    host_syncs: int | None = None
    """Host synchronisations per window."""
    launches: int | None = None
    notes: tuple[str, ...] = ()
    """Warnings that were raised during build and warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A complete ablation."""

    trainer: str
    device: str
    versions: str
    date: str
    config: Mapping[str, Any]
    techniques: tuple[str, ...]
    claims: Mapping[str, str]
    windows: int
    """Windows that are timed together, per round and arm."""
    arms: tuple[Timed, ...]
    always: tuple[str, ...] = ()
    """Techniques that are on in every arm and not in `techniques`. If there are any, the reference was not timed."""

    @property
    def begin(self) -> str:
        """Name of the arm that the total speedup is relative to."""
        return NONE if self.always else REFERENCE

    def arm(self, name: str) -> Timed:
        return next(a for a in self.arms if a.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Ratio of two arms' times, with its 95% interval."""

    value: float
    low: float
    high: float


def arms(techniques: Sequence[str], always: Sequence[str] = ()) -> list[Arm]:
    """Return the arms: the reference, the techniques switched on one after another, and each one off alone.

    If techniques are `always` on, the reference is omitted, since it may take too long.
    """
    found = [] if always else [Arm(name=REFERENCE, on=None)]
    found.append(Arm(name=NONE, on=(*always,)))
    for count in range(1, len(techniques)):
        found.append(Arm(name=f"+{techniques[count - 1]}", on=(*always, *techniques[:count])))
    found.append(Arm(name=ALL, on=(*always, *techniques)))
    for off in techniques[:-1]:  # the last technique off alone is the arm before "all"
        found.append(Arm(name=f"-{off}", on=(*always, *(t for t in techniques if t != off))))
    return found


def whole_periods(windows: int, config: object) -> int:
    """Return the number of windows, rounded up to a multiple of the configuration's `schedule_period`.

    Otherwise an arm might be timed on windows that do less work than others.
    """
    period: int = getattr(config, "schedule_period", 1)
    return -(-windows // period) * period


def measure(
    build: Callable[[Arm], Any],
    chosen: Sequence[Arm],
    batches: Batches,
    *,
    device: torch.device,
    rounds: int,
    windows: int,
    seed: int = 0,
    short: Short = lambda config: None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Timed, ...]:
    """Time every arm in each of `rounds` rounds; `build` builds an arm's trainer.

    short  function of a trainer's configuration for windows of many equal steps, for which the profiler would record
           millions of events. It returns None, or (configuration of a short window, configuration of a window that is
           one step longer, number of steps that the full window has beyond the short one). Launches and syncs of the
           full window are extrapolated from these two windows.
    """
    import torch

    from perfsuite.timing.profiler_counts import COUNTED_S

    cuda = device.type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else _nothing
    trainers: dict[str, Any] = {}
    notes: dict[str, list[str]] = {}
    peaks: dict[str, int | None] = {}
    quick: dict[str, Any] = {}
    for arm in chosen:
        progress(f"warming up {arm.name}")
        with noting(notes.setdefault(arm.name, [])):
            peaks[arm.name], took = _warm(arm, build, batches, trainers, wait, cuda)
        if took <= COUNTED_S or short(trainers[arm.name].config) is not None:
            quick[arm.name] = trainers[arm.name]
    counts = _counted(quick, next(batches), short, progress) if cuda else {}
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in chosen}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for arm in rng.sample(list(chosen), len(chosen)):
            given = [next(batches) for _ in range(windows)]
            wait()
            began = time.perf_counter()
            for batch in given:
                trainers[arm.name].train_window(batch)
            wait()
            seconds[arm.name].append((time.perf_counter() - began) / windows)
    return tuple(
        Timed(
            name=arm.name,
            seconds=tuple(seconds[arm.name]),
            peak_bytes=peaks[arm.name],
            host_syncs=counts[arm.name][0] if arm.name in counts else None,
            launches=counts[arm.name][1] if arm.name in counts else None,
            notes=tuple(dict.fromkeys(notes[arm.name])),
        )
        for arm in chosen
    )


def _warm(
    arm: Arm,
    build: Callable[[Arm], Any],
    batches: Batches,
    trainers: dict[str, Any],
    wait: Callable[[], object],
    cuda: bool,
) -> tuple[int | None, float]:
    """Build and warm up an arm. Return (peak memory in bytes, seconds) of its first window after it has settled."""
    import torch

    before = torch.cuda.memory_allocated() if cuda else 0
    trainers[arm.name] = build(arm)
    for _ in range(getattr(trainers[arm.name], "settles", 1)):
        trainers[arm.name].train_window(next(batches))
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainers[arm.name].train_window(next(batches))
    wait()
    took = time.perf_counter() - began
    return torch.cuda.max_memory_allocated() - before if cuda else None, took


@contextlib.contextmanager
def noting(found: list[str]) -> Iterator[None]:
    """Append each RuntimeWarning that the block raises to `found`, as one line. Other warnings are dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        yield
    found += [" ".join(str(w.message).split()) for w in caught if issubclass(w.category, RuntimeWarning)]


def _counted(
    trainers: Mapping[str, Any], batch: Mapping[str, torch.Tensor], short: Short, progress: Callable[[str], None]
) -> dict[str, tuple[int, int]]:
    from perfsuite.timing.profiler_counts import count_calls

    progress("counting launches and syncs")
    lengths = {name: short(t.config) for name, t in trainers.items()}

    def window(name: str, which: int) -> None:
        trainer, length = trainers[name], lengths[name]
        whole = trainer.config
        if length is not None:
            trainer.config = length[which]
        trainer.train_window(batch)
        trainer.config = whole

    def counted(which: int, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        return count_calls({name: (_nothing, partial(window, name, which)) for name in names})

    first = counted(0, trainers)
    shortened = {name: length[2] for name, length in lengths.items() if length is not None}
    longer = counted(1, shortened) if shortened else {}
    for name, steps in shortened.items():
        (syncs, launches), (more_syncs, more_launches) = first[name], longer[name]
        first[name] = syncs + steps * (more_syncs - syncs), launches + steps * (more_launches - launches)
    return first


def _nothing() -> None:
    """Do nothing. Each window continues from the previous one, so nothing needs a reset."""


def ratio(record: Record, slower: str, faster: str) -> Ratio:
    """Return the ratio of the arm `slower`'s time to the arm `faster`'s."""
    return paired(record.arm(slower).seconds, record.arm(faster).seconds)


def paired(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Return the geometric mean, with its 95% interval, of the per-round ratios of two arms' seconds."""
    middle, half = mean([math.log(a / b) for a, b in zip(slower, faster, strict=True)])
    return Ratio(value=math.exp(middle), low=math.exp(middle - half), high=math.exp(min(middle + half, 700.0)))


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half-width of its 95% interval by Student's t). The half-width of a single value is infinite."""
    from scipy import stats

    count = len(values)
    half = stats.t.ppf(0.975, count - 1) * stdev(values) / math.sqrt(count) if count > 1 else math.inf
    return fmean(values), half


def random_batches(config: Any, device: torch.device) -> Batches:
    """Return an infinite cycle of a few batches of random tokens, with the config's batch_size and sequence_length."""
    from suite import text

    sequences = text.synthetic(VOCABULARY, config.sequence_length, BATCHES * config.batch_size)
    given = itertools.islice(text.Batches(sequences, config.batch_size, seed=0), BATCHES)
    return itertools.cycle([{k: v.to(device) for k, v in batch.items()} for batch in given])


def save(record: Record, path: Path) -> None:
    """Write the record as JSON, completely or not at all."""
    write(path, json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1) + "\n")


def load(path: Path) -> Record:
    """Read a record that `save` wrote; PerfsuiteError if the file is missing or invalid."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would block
        raise PerfsuiteError(f"{shown(path)} is no file; name the .json of an ablation")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if schema != SCHEMA:
            has = "it has none" if schema is None else f"it has {reprlib.repr(schema)}"
            raise ValueError(f"its schema must be {SCHEMA}, {has}")
        timed = tuple(
            Timed(**{**a, "seconds": tuple(a["seconds"]), "notes": tuple(a["notes"])}) for a in data.pop("arms")
        )
        named = {"techniques": _names(data.pop("techniques")), "always": _names(data.pop("always", []))}
        if set(named["techniques"]) & set(named["always"]):
            raise ValueError("a technique is always on and switched, too")
        return _whole(_typed(Record(**{**data, **named}, arms=timed)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else None  # the message is the key alone
        reason = lacks or getattr(error, "strerror", None) or str(error)[:200]
        raise PerfsuiteError(f"{shown(path)} is no ablation ({reason}); measure one with `perfsuite ablate`") from None


def _typed(record: Record) -> Record:
    """Return the record; ValueError if a field has a wrong type, which JSON does not check."""
    for name in ("trainer", "device", "versions", "date"):
        if not isinstance(getattr(record, name), str):
            raise ValueError(f"{name} is no text")
    if not isinstance(record.config, dict) or not isinstance(record.claims, dict):
        raise ValueError("config and claims are mappings")
    if type(record.windows) is not int or record.windows < 1:
        raise ValueError("windows is no count")
    for arm in record.arms:
        counts = (arm.peak_bytes, arm.host_syncs, arm.launches)
        if not isinstance(arm.name, str) or not all(c is None or type(c) in (int, float) for c in counts):
            raise ValueError(f"arm {str(arm.name)[:50]!r} has a count that is none")
    return record


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"techniques are a list of names, not {reprlib.repr(names)}")
    return tuple(names)


def _whole(record: Record) -> Record:
    """Return the record; ValueError if an arm or a round is missing, or a time is invalid."""
    timed = {a.name: a.seconds for a in record.arms}
    rounds = len(timed.get(record.begin, ()))
    for arm in arms(record.techniques, record.always):
        seconds = timed.get(arm.name, ())
        if len(seconds) != rounds or rounds < 2:
            raise ValueError(f"arm {arm.name!r} was timed in {len(seconds)} rounds")
        if not all(type(s) in (int, float) and SHORTEST_S < s < LONGEST_S for s in seconds):
            raise ValueError(f"arm {arm.name!r} has a time that is none")
    return record


# --- the output -----------------------------------------------------------------------------------------------------


def table(record: Record, picture: str | None = None) -> str:
    """Return the record as a page of Markdown; `picture` is the file name of its plot."""
    return "\n".join(_lines(record, picture)) + "\n"


def _lines(record: Record, picture: str | None) -> Iterator[str]:
    total = ratio(record, record.begin, ALL)
    always = " and ".join(record.always)
    beginning = f"with {always} alone" if always else "in the reference trainer"
    end = "with all techniques" if always else "in the optimized one"
    yield f"# What each technique brings to {record.trainer}"
    yield ""
    yield f"Written by `perfsuite ablate {record.trainer}`: {record.device}, {record.versions}, {record.date}."
    yield ""
    count = len(record.arm(ALL).seconds)
    yield (
        f"A window takes {typical(record.arm(record.begin))} {beginning} and {typical(record.arm(ALL))} {end}: "
        f"**{_times(total)}**. Every arm was timed in each of {count} interleaved rounds, "
        f"{record.windows} window{'s' * (record.windows > 1)} at a time; ratios are taken within a round, intervals "
        "are 95%."
    )
    yield ""
    if len(record.techniques) > 1:
        rest = ratio(record, record.begin, f"+{record.techniques[-2]}")
        yield f"Without {record.techniques[-1]}, the last one, it is {_times(rest)}."
        yield ""
    if always:
        yield f"On in every arm: {always}. The reference trainer was not timed."
        yield ""
    if picture:
        yield f"![Seconds a window, one technique after another]({picture})"
        yield ""
    yield "*switched on*: seconds before over seconds after, those above it being on. *alone off*: how much longer a"
    yield "window takes without it, all others being on. *claimed*: by the source; a claim is no measurement."
    yield ""
    yield "| technique | claimed | switched on | alone off | a window | peak memory | host syncs | launches |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    before = NONE
    if not always:
        yield f"| *the reference trainer* | | | | {_figures(record.arm(REFERENCE))}"
    yield f"| *the optimized one, {f'{always} alone' if always else 'all off'}* | | | | {_figures(record.arm(NONE))}"
    for technique in record.techniques:
        last = technique == record.techniques[-1]
        after = ALL if last else f"+{technique}"
        without = before if last else f"-{technique}"
        on, off = ratio(record, before, after), ratio(record, without, ALL)
        claim = record.claims.get(technique, "–")
        yield f"| {technique} | {claim} | {_times(on)} | {_percent(off)} | {_figures(record.arm(after))}"
        before = after
    notes = [(a.name, note) for a in record.arms for note in a.notes]
    if notes:
        yield ""
        yield from (f"* {name}: {note}" for name, note in notes)
    yield ""
    yield "Configuration: " + ", ".join(f"{k} {v}" for k, v in record.config.items()) + "."


def plotting() -> Any:
    """Import matplotlib's pyplot; PerfsuiteError if it is not installed."""
    return plots.pyplot("the plot needs matplotlib; pip install 'perfsuite[test]', or use --no-plot")


def plot(record: Record, path: Path) -> None:
    """Plot the waterfall chart as SVG."""
    pyplot = plotting()
    names = [NONE, *(f"+{t}" for t in record.techniques[:-1]), ALL]
    labels = ["all off", *(f"+ {t}" for t in record.techniques)]
    if record.always:
        labels[0] = record.always[0] if len(record.always) == 1 else f"{len(record.always)} always on"
    else:
        names, labels = [REFERENCE, *names], ["reference", *labels]
    ms = [1e3 * median(record.arm(n).seconds) for n in names]
    first, last = names.index(NONE), len(ms) - 1
    with plots.style(pyplot):
        figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(names) + 1.2), layout="constrained")
        wide = max(ms) > WIDE * min(ms)
        if wide:
            axes.set_xscale("log")
        for row, value in enumerate(ms):
            whole = row <= first or row == last
            if whole:
                axes.barh(row, value, color="#4c72b0")
            else:
                gain = ms[row - 1] - value
                axes.barh(row, gain, left=value, color="#55a868" if gain >= 0 else "#c44e52")
            axes.text(value if whole else max(value, ms[row - 1]), row, f" {units.seconds(value / 1e3)}", va="center")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a window" + wide * ", logarithmic")
        axes.set_xlim(min(ms) / 2 if wide else 0, max(ms) * (2 if wide else 1.15))
        axes.spines[["top", "right"]].set_visible(False)
        plots.save(pyplot, figure, path)


def _figures(arm: Timed) -> str:
    memory = "–" if arm.peak_bytes is None else f"{arm.peak_bytes / 2**20:.0f} MiB"
    counts = ["–" if c is None else str(c) for c in (arm.host_syncs, arm.launches)]
    return f"{typical(arm)} | {memory} | {counts[0]} | {counts[1]} |"


def typical(arm: Timed) -> str:
    """Format the time per window, the median over the rounds."""
    return units.seconds(median(arm.seconds))


def _times(r: Ratio) -> str:
    value, low, high = map(units.significant, (r.value, r.low, r.high))
    return f"{value}× ({low}–{high})"


def _percent(r: Ratio) -> str:
    low, high = 100 * (r.low - 1), 100 * (r.high - 1)
    return f"{100 * (r.value - 1):+.1f}% ({low:+.1f} to {high:+.1f})"
