"""The command `perfsuite ablate`."""

from __future__ import annotations

import dataclasses
import datetime
import reprlib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line, writable
from suite.commands.with_fields import WithFields
from suite.naming import shown
from suite.terminal import tell
from suite.trainers import memory_remedy

FOLDER = ".perfsuite/ablation"


@click.command(cls=WithFields)
@click.argument("name")
@click.option("--config", type=NamedPath(), help="YAML file of fields.  [default: the fields' own defaults]")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.option("--rounds", type=click.IntRange(2), default=7, show_default=True, help="Interleaved rounds.")
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Timed together, a round and arm; rounded up to whole periods of a trainer's schedule.",
)
@click.option(
    "--always",
    multiple=True,
    metavar="TECHNIQUE",
    help="Leave it on, and the reference out: for windows that take too long without it. Repeatable.",
)
@click.option("--out", type=NamedPath(), default=FOLDER, show_default=True, help="Folder of the result.")
@click.option(
    "--from",
    "source",
    type=NamedPath(),
    help="Show this recording; measure nothing, and write nothing but into a given --out.",
)
@click.option("--no-plot", is_flag=True, help="The table alone.")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
def ablate(
    name: str,
    config: str | None,
    device: str | None,
    rounds: int,
    windows: int,
    always: tuple[str, ...],
    out: str,
    source: str | None,
    no_plot: bool,
    fields: tuple[str, ...],
) -> None:
    """Measure the effect of each technique of trainer NAME.

    The techniques are switched on one after another, and each is switched off alone. The command writes NAME.json,
    NAME.md and NAME.svg. trainer2 is measured on random tokens, which cost the same as real ones. leak_cnn is measured
    on its own data (`--data FILE`), and a window is an epoch. eigenstate_lm is also measured on its own data (`--data
    FOLDER`, or `--synthetic 16` for random tokens). It does not matter which techniques the configuration switches on:
    each technique is measured both on and off.
    """
    named = click.get_current_context().get_parameter_source("out") is not ParameterSource.DEFAULT
    # The default folder may hold the page of another measurement, which must not be overwritten.
    folder = Path(out) if source is None or named else None
    with in_one_line("interrupted; nothing was written", memory_remedy(name)):
        from perfsuite.report.files import write
        from suite import ablation
        from suite.configuration import ConfigurationError

        plots = not no_plot and folder is not None
        if plots:
            ablation.plotting()  # fail now and not after minutes of measurement
        if source is None:
            assert folder is not None
            record = _measured(name, config, device, rounds, windows, always, folder, fields)
            ablation.save(record, folder / f"{name}.json")
        elif given := [*_given_to_measure(), *fields]:
            raise ConfigurationError(
                f"--from shows a recording and measures nothing; leave out {' '.join(given)}, or --from"
            )
        else:
            record = ablation.load(Path(source))
            if record.trainer != name:
                raise PerfsuiteError(
                    f"{shown(source)} is of the trainer {reprlib.repr(record.trainer)}, not of {name!r}; name that one"
                )
        page = ablation.table(record, f"{name}.svg" if plots else None)
        tell(page)
        if folder is None:
            return
        if plots:
            ablation.plot(record, folder / f"{name}.svg")
        write(folder / f"{name}.md", page)
        tell(f"wrote {shown(folder / name)}.md", err=True)


def _given_to_measure() -> list[str]:
    """Return the options on the command line that only a measurement reads."""
    source = click.get_current_context().get_parameter_source
    options = ("config", "device", "rounds", "windows", "always")
    return [f"--{name}" for name in options if source(name) is not ParameterSource.DEFAULT]


def _measured(
    name: str,
    config: str | None,
    device: str | None,
    rounds: int,
    windows: int,
    always: tuple[str, ...],
    out: Path,
    fields: tuple[str, ...],
) -> Any:
    from suite import trainers

    trainers.find(name)
    import torch

    from suite import ablation, configuration
    from suite.commands.train import device_called, name_of
    from suite.runtime import Options

    # Accept the same fields as `perfsuite train`; those that control how a run is saved have no effect.
    kinds = [trainers.config_of(name), Options, trainers.data_config_of(name)]
    chosen, _, data = configuration.read(kinds, config, fields)
    switches = trainers.techniques_of(name)
    techniques = _others(always, switches)
    always = tuple(t for t in switches if t in always)
    there = device_called(device)
    arms = ablation.arms(techniques, always)
    switched = {arm: _switched(chosen, arm, switches) for arm in arms}
    writable(out)
    trainer_data, batches = _data(name, chosen, data, there)

    def build(arm: ablation.Arm) -> Any:
        side: trainers.Side = "reference" if arm.on is None else "optimized"
        return trainers.build(name, switched[arm], trainer_data, there, side)

    windows = ablation.whole_periods(windows, chosen)
    timed = ablation.measure(
        build,
        arms,
        batches,
        device=there,
        rounds=rounds,
        windows=windows,
        short=trainers.short_of(name),
        progress=lambda what: tell(what, err=True),
    )
    return ablation.Record(
        trainer=name,
        device=name_of(there),
        versions=f"torch {torch.__version__}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        config={k: v for k, v in configuration.plain(dataclasses.asdict(chosen)).items() if k not in switches},
        techniques=techniques,
        always=always,
        claims=dict(trainers.claims_of(name)),
        windows=windows,
        arms=timed,
    )


def _data(name: str, config: Any, data: Any, device: Any) -> tuple[Any, Any]:
    """Return the trainer's input and the batches that are timed."""
    from suite import ablation, trainers

    ablated = trainers.ablated_of(name)
    if ablated is None:
        return ablation.VOCABULARY, ablation.random_batches(config, device)
    return ablated(config, data, device)


def _switched(config: Any, arm: Any, switches: tuple[str, ...]) -> Any:
    """Return the configuration with an arm's techniques on; ConfigurationError if the other fields do not allow it."""
    from suite.configuration import ConfigurationError

    try:
        return dataclasses.replace(config, **{t: arm.on is not None and t in arm.on for t in switches})
    except ValueError as error:
        message = f"each technique is switched on in turn, which these fields do not allow: {error}"
        raise ConfigurationError(message) from None


def _others(always: tuple[str, ...], switches: tuple[str, ...]) -> tuple[str, ...]:
    """Return the techniques that are switched on and off.

    PerfsuiteError if none is left, or `always` names an unknown technique.
    """
    for technique in always:
        if technique not in switches:
            raise PerfsuiteError(f"--always {technique}: no technique of this trainer, which has {', '.join(switches)}")
    others = tuple(t for t in switches if t not in always)
    if not others:
        raise PerfsuiteError("--always names every technique, so that nothing is left to measure; leave one out")
    return others
