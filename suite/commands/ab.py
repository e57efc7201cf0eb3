"""The command `perfsuite ab`."""

from __future__ import annotations

import datetime
import gc
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line, out_of_memory, writable
from suite.commands.with_fields import WithFields
from suite.naming import shown
from suite.terminal import tell
from suite.trainers import memory_remedy

if TYPE_CHECKING:
    from suite.ab import Arm, Name, Pair
    from suite.ab_report import Record
    from suite.runtime import Options
    from suite.runtime.stopping import Stopping
    from suite.trainers import Side

FOLDER = ".perfsuite/ab"
OF_A_TRAINING = {"batch_size", "accumulation", "steps", "epochs", "cache", "latents"}
"""Fields of the data that may differ between the sides: batch sizes, number of passes, and where data are cached."""
SIDES = click.Choice(["reference", "optimized"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One side of the comparison: its YAML file, its implementation and its configuration."""

    name: Name
    file: str
    side: Side
    config: Any
    options: Options
    data: Any

    def fields(self) -> dict[str, Any]:
        """Return all fields that affect the training, including the seed."""
        from suite.configuration import plain

        return cast("dict[str, Any]", plain({**asdict(self.data), **asdict(self.config), "seed": self.options.seed}))


@click.command(cls=WithFields)
@click.argument("name")
@click.option("--baseline", type=NamedPath(), help="YAML file of fields.")
@click.option("--optimized", type=NamedPath(), help="YAML file of fields.")
@click.option("--baseline-side", type=SIDES, default="reference", show_default=True, help="Its implementation.")
@click.option("--optimized-side", type=SIDES, default="optimized", show_default=True, help="Its implementation.")
@click.option("--epochs", metavar="N", help="Passes over the data, of a trainer that has the field epochs.")
@click.option("--windows", metavar="N", help="Windows (steps, epochs) of a side at most.")
@click.option("--seconds", metavar="S", help="End each pair of trainings after so many, without its warm-up.")
@click.option("--seed", "seeds", multiple=True, metavar="N", help="A pair of trainings. Repeatable.")
@click.option(
    "--slices",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    help="About so many are made of a training, and more of a long one.",
)
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.option("--out", type=NamedPath(), help=f"Folder of the result.  [default: {FOLDER}/NAME]")
@click.option("--overwrite", is_flag=True, help="Replace an earlier result in that folder.")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
def ab(
    name: str,
    baseline: str | None,
    optimized: str | None,
    baseline_side: str,
    optimized_side: str,
    epochs: str | None,
    windows: str | None,
    seconds: str | None,
    seeds: tuple[str, ...],
    slices: int,
    device: str | None,
    out: str | None,
    overwrite: bool,
    fields: tuple[str, ...],
) -> None:
    """Train two configurations of trainer NAME side by side, and compare time, loss, quality and memory.

    For example `perfsuite ab ups --baseline configs/ups/1gpu_baseline.yaml --optimized configs/ups/1gpu_optimized.yaml
    --data FOLDER --epochs 2`.

    Both sides train on the same data in alternating slices. Each side has its own random-number state. Both end after
    the same number of examples or tokens, as far as whole windows allow. Further fields apply to both configurations.
    The command writes ab.json and ab.md.

    Ctrl-C and SIGTERM finish the current window and write the results so far, marked as partial; the exit code is 130
    or 143. A loss that is not finite ends the command with exit code 1, wrong input with exit code 2.
    """
    with in_one_line("interrupted; nothing was written", memory_remedy(name)):
        folder = Path(out or f"{FOLDER}/{name}")
        with _input():
            pairs = _chosen(
                name,
                {"baseline": (baseline, baseline_side), "optimized": (optimized, optimized_side)},
                _lengths(name, epochs, windows, seconds, fields),
                seeds,
                fields,
            )
            _refuse(folder, overwrite=overwrite)
            writable(folder)
        code = _compare(name, pairs, slices, device, folder)
    sys.exit(code)


@contextmanager
def _input() -> Iterator[None]:
    """Re-raise every PerfsuiteError of the block as a ConfigurationError, which ends the command with exit code 2."""
    from suite.configuration import ConfigurationError

    try:
        yield
    except PerfsuiteError as error:
        raise ConfigurationError(str(error)) from None


def _lengths(
    name: str, epochs: str | None, windows: str | None, seconds: str | None, fields: Sequence[str]
) -> list[str]:
    """Return the fields that set the length of the training, as command-line arguments."""
    from suite import trainers
    from suite.configuration import ConfigurationError

    trainers.find(name)
    kinds = [trainers.config_of(name), trainers.data_config_of(name)]
    known = {field for kind in kinds for field in kind.__dataclass_fields__}
    found = []
    if epochs is not None:
        if "epochs" not in known:
            raise ConfigurationError(f"--epochs: {name} has no epochs; use --windows {epochs}, or --seconds")
        if windows is not None:
            raise ConfigurationError("--epochs and --windows both say how long to train; leave one out")
        if any(token.partition("=")[0] == "--steps" for token in fields):
            raise ConfigurationError("--epochs and --steps both say how long to train; leave one out")
        found += ["--epochs", epochs, *(["--steps", "null"] if "steps" in known else [])]
    if windows is not None:
        found += ["--windows", windows]
    if seconds is not None:
        found += ["--seconds", seconds]
    return found


def _chosen(
    name: str,
    arms: dict[Name, tuple[str | None, str]],
    lengths: list[str],
    seeds: Sequence[str],
    fields: Sequence[str],
) -> list[tuple[Chosen, Chosen]]:
    """Return (baseline, optimized) for each seed.

    ConfigurationError if the two sides do not train on the same data, or a seed is given twice.
    """
    from suite import trainers
    from suite.configuration import ConfigurationError, read
    from suite.runtime import Options

    kinds = [trainers.config_of(name), Options, trainers.data_config_of(name)]
    pairs: list[tuple[Chosen, Chosen]] = []
    for seed in seeds or (None,):
        arguments = [*fields, *lengths, *([] if seed is None else ["--seed", seed])]
        both = []
        for arm, (file, side) in arms.items():
            if file is None:
                raise ConfigurationError(f"--{arm}: name the YAML file of that side's fields")
            config, options, data = read(kinds, file, arguments)
            if options.windows == 0:
                raise ConfigurationError("windows: 0 is no training; give 1 or more")
            both.append(Chosen(name=arm, file=file, side=cast("Side", side), config=config, options=options, data=data))
        _same_data(*both)
        pairs.append((both[0], both[1]))
    taken = [first.options.seed for first, _ in pairs]
    if len(set(taken)) < len(taken):
        raise ConfigurationError("--seed: a seed is there twice, and would count twice; leave one out")
    return pairs


def _same_data(baseline: Chosen, optimized: Chosen) -> None:
    from suite.configuration import ConfigurationError

    a, b = asdict(baseline.data), asdict(optimized.data)
    a["seed"], b["seed"] = baseline.options.seed, optimized.options.seed
    for field in a:
        if field not in OF_A_TRAINING and a[field] != b[field]:
            raise ConfigurationError(
                f"{field} is {a[field]!r} in {baseline.file} and {b[field]!r} in {optimized.file}: both must train on "
                f"the same data; give one with --{field}"
            )


def _refuse(folder: Path, *, overwrite: bool) -> None:
    from suite.ab_report import FILE
    from suite.configuration import ConfigurationError

    if not overwrite and os.path.exists(folder / FILE):  # Path.exists raises for a name that is too long
        raise ConfigurationError(
            f"{shown(folder / FILE)} is there already; name another folder with --out, or replace it with --overwrite"
        )


def _compare(name: str, chosen: Sequence[tuple[Chosen, Chosen]], slices: int, device: str | None, folder: Path) -> int:
    """Train all pairs, and return the exit code.

    Results are also written if an error or a signal ends the training.
    """
    from suite.ab_report import save
    from suite.commands.train import device_called
    from suite.runtime.stopping import Stopping

    with _input():
        there = device_called(device)
    pairs: list[Pair] = []
    recorded = partial(_record, name, chosen[0], there, pairs)
    stop = Stopping(partial(tell, err=True))
    try:
        with stop:
            for number, both in enumerate(chosen):
                _train(name, both, there, slices, stop, pairs)
                if stop.signal is not None:
                    break
                if number + 1 < len(chosen):
                    save(recorded(f"{number + 1} of {len(chosen)} seeds"), folder)
    except Exception as error:
        reason = _reason(error)
        if reason is None or not pairs:
            raise
        save(recorded(reason), folder)
        kept = f"what was measured until then is in {shown(folder)}, marked as partial"
        if isinstance(error, PerfsuiteError):
            raise type(error)(f"{reason}; {kept}") from None
        tell(kept, err=True)
        raise
    ended = None if stop.signal is None else f"ended by {stop.signal.name}"
    if pairs:
        record = recorded(ended)
        save(record, folder)
        _show(record, folder)
    else:
        tell(f"{ended} before the first slice was whole; nothing was written", err=True)
    return 0 if stop.signal is None else 128 + int(stop.signal)


def _train(name: str, both: tuple[Chosen, Chosen], device: Any, slices: int, stop: Stopping, pairs: list[Pair]) -> None:
    """Train one pair, and append it to `pairs` if it has at least one slice, even if an error ends the training."""
    from suite.ab import Comparison

    limits = [chosen.options.seconds for chosen in both if chosen.options.seconds is not None]
    comparison = Comparison(
        [_arm(name, chosen, device) for chosen in both],
        seed=both[0].options.seed,
        device=device,
        slices=slices,
        seconds=min(limits, default=None),
        stopped=lambda: stop.signal is not None,
        progress=partial(tell, err=True),
    )
    try:
        comparison.run()
    finally:
        pair = comparison.pair()
        if pair.baseline.slices:
            pairs.append(pair)
        del comparison
        gc.collect()  # trainers hold graphs and processes in reference cycles, and the next seed needs their memory


def _arm(name: str, chosen: Chosen, device: Any) -> Arm:
    """Load the data of one side, and return the functions that build and evaluate its trainer."""
    from suite import trainers
    from suite.ab import Arm
    from suite.runtime.interface import Counted

    with _input():
        loaded = trainers.data_of(name)(chosen.data)
    if chosen.name == "baseline":  # the other side has the same data
        tell(loaded.summary, err=True)
    ends = [chosen.options.windows, loaded.batches.total if isinstance(loaded.batches, Counted) else None]
    quality = trainers.quality_of(name)
    return Arm(
        name=chosen.name,
        build=lambda: trainers.build(name, chosen.config, loaded.trainer_data, device, chosen.side),
        batches=loaded.batches,
        limit=min((end for end in ends if end is not None), default=None),
        quality=lambda trainer: quality(trainer, loaded.trainer_data),
    )


def _record(name: str, both: tuple[Chosen, Chosen], device: Any, pairs: Sequence[Pair], why: str | None) -> Record:
    import torch

    from suite.ab_report import Record, Setting
    from suite.commands.train import name_of

    settings = [Setting(file=shown(c.file), side=c.side, fields=c.fields()) for c in both]
    return Record(
        trainer=name,
        device=name_of(device),
        versions=f"torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        baseline=settings[0],
        optimized=settings[1],
        pairs=tuple(pairs),
        partial=why,
    )


def _reason(error: Exception) -> str | None:
    """Return in one line why the training ended; None for an error that the user cannot correct."""
    if isinstance(error, PerfsuiteError):
        return " ".join(str(error).split())
    return out_of_memory(error)


def _show(record: Record, folder: Path) -> None:
    from suite.ab_report import FILE, PAGE, table

    width = shutil.get_terminal_size((120, 24)).columns
    tell(table(record, max(width, 80)), nl=False)
    tell(f"wrote {shown(folder / FILE)} and {PAGE}" + ("; partial" if record.partial else ""), err=True)
