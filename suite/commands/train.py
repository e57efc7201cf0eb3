"""The command `perfsuite train`."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from perfsuite.errors import PerfsuiteError, first_line
from perfsuite.option_types import NamedPath
from perfsuite.system import orphans
from suite.commands.ending import in_one_line
from suite.commands.with_fields import WithFields
from suite.terminal import tell
from suite.trainers import memory_remedy

if TYPE_CHECKING:
    from suite.runtime import Options
    from suite.runtime.checkpoints import Start
    from suite.runtime.together import Place

FOLDER = ".perfsuite/train"


@click.command(cls=WithFields)
@click.argument("name")
@click.option("--config", type=NamedPath(), help="YAML file of fields.  [default: the fields' own defaults]")
@click.option(
    "--side",
    type=click.Choice(["reference", "optimized"]),
    default="optimized",
    show_default=True,
    help="Which of the two implementations.",
)
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Processes that train together on this machine, each on a GPU of its own; torchrun may start them, too.",
)
@click.option("--resume", metavar="PATH|latest", help="Go on from this checkpoint, or from the run's last one.")
@click.option("--overwrite", is_flag=True, help="Begin anew in a folder that holds checkpoints.")
@click.option("--show", is_flag=True, help="Print every field and its value as YAML; train nothing.")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
def train(
    name: str,
    config: str | None,
    side: str,
    device: str | None,
    ranks: int | None,
    resume: str | None,
    overwrite: bool,
    show: bool,
    fields: tuple[str, ...],
) -> None:
    """Train one of the repository's trainers, with checkpoints.

    For example `perfsuite train trainer2 --config FILE --windows 500 --eta_update 0.02`.

    Every field of the configuration is an option; `--show` lists them. Every trainer has --data PATH, --windows N
    (epochs for leak_cnn), --seconds S, --folder DIR, --checkpoint_every N, --tensorboard true, --timing_debug true and
    --profile FILE.

    Ctrl-C and SIGTERM finish the current window and save a checkpoint; the exit code is 130 or 143. A loss that is not
    finite ends the command with exit code 1, a wrong configuration with exit code 2.
    """
    with in_one_line("interrupted", memory_remedy(name)):  # before the first window, or after the last save
        if ranks is not None and "RANK" in os.environ:
            raise PerfsuiteError(f"--ranks {ranks}: torchrun has started the ranks already; leave out --ranks")
        if ranks is not None and ranks > 1 and not show:
            code = _launched(name, config, side, device, ranks, resume, overwrite, fields)
        else:
            code = _train(name, config, side, device, resume, overwrite, show, fields)
    sys.exit(code)


def _launched(
    name: str,
    config: str | None,
    side: str,
    device: str | None,
    ranks: int,
    resume: str | None,
    overwrite: bool,
    fields: tuple[str, ...],
) -> int:
    """Check the command line, start the ranks, and return the exit code."""
    from suite import configuration, launching, trainers
    from suite.runtime import together

    _check_ranks(name, trainers)
    configuration.read([trainers.config_of(name), _options(), trainers.data_config_of(name)], config, fields)
    together.device_of(together.Place(rank=ranks - 1, ranks=ranks, local=ranks - 1), device)
    passed = {"--config": config, "--side": side, "--device": device, "--resume": resume}
    options = [word for option, value in passed.items() if value is not None for word in (option, value)]
    command = launching.command_of("train", name, *options, *(["--overwrite"] if overwrite else []), *fields)
    try:
        return launching.launch(command, ranks)
    except launching.RankFailedError as ended:
        if str(ended):
            tell(f"Error: {ended}", err=True)
        return ended.code


def _check_ranks(name: str, trainers: Any) -> None:
    if not trainers.find(name).ranks:
        several = ", ".join(known for known, entry in trainers.TRAINERS.items() if entry.ranks)
        raise PerfsuiteError(f"trainer {name} trains in one process; these train in several ranks: {several}")


def _options() -> type[Any]:
    from suite.runtime import Options

    return Options


def _train(
    name: str,
    config: str | None,
    side: str,
    device: str | None,
    resume: str | None,
    overwrite: bool,
    show: bool,
    fields: tuple[str, ...],
) -> int:
    # Importing torch takes a second, so check as much of the command line as possible without it.
    from suite import trainers

    trainers.find(name)
    from suite import configuration
    from suite.runtime import Options, together
    from suite.runtime.loop import held

    kinds = [trainers.config_of(name), Options, trainers.data_config_of(name)]
    chosen, options, data = configuration.read(kinds, config, fields)
    if show:
        tell(configuration.as_yaml([chosen, options, data]), nl=False)
        return 0
    here = together.place()
    if here.ranks > 1:
        _check_ranks(name, trainers)
        orphans.die_with_parent()
    options = replace(options, folder=options.folder or f"{FOLDER}/{name}-{side}")
    try:
        with held(options) if here.first else nullcontext():  # from before the first write until after the last
            code = _trained(name, chosen, options, data, side, device, resume, overwrite, here)
    except BaseException as error:
        if here.ranks > 1:
            _leave(error, here, name)
        raise
    together.leave(here, code)
    return code


def _leave(error: BaseException, here: Place, name: str) -> NoReturn:
    """End a failed rank at once: cleaning up could wait forever for the other ranks."""
    from suite import launching
    from suite.runtime.together import RankLostError

    code = 1
    try:
        with in_one_line("interrupted", memory_remedy(name)):
            raise error
    except click.ClickException as shown:
        code = shown.exit_code
        if isinstance(error, RankLostError) and launching.LAUNCHED in os.environ:
            code = launching.LOST
        if code != launching.LOST or not here.first:  # the launcher chooses which error of the other ranks it prints
            shown.show()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _trained(
    name: str,
    chosen: Any,
    options: Options,
    data: Any,
    side: str,
    device: str | None,
    resume: str | None,
    overwrite: bool,
    here: Place,
) -> int:
    from suite import configuration, trainers
    from suite.ablation import noting
    from suite.runtime import Store, fit, together

    if resume is not None and overwrite:
        raise configuration.ConfigurationError("--resume goes on with a run, and --overwrite begins anew; give one")
    if resume is not None and not resume.strip():
        raise configuration.ConfigurationError("--resume wants a checkpoint, a folder that has some, or latest")
    folder = options.folder or FOLDER
    if resume is None and not overwrite and here.first:  # before loading the data, which may take a minute
        Store(folder).refuse_others()
    start = _start(resume, folder, name)  # also before loading the data
    there = device_called(together.device_of(here, device))
    _seed(options.seed)
    with together.lost_ranks(here), together.joined(here, there):
        loaded = _loaded(name, data, here)
        tell_user = partial(tell, err=True) if here.first else _nothing
        tell_user(loaded.summary)
        notes: list[str] = []
        with noting(notes):
            trainer = trainers.build(name, chosen, loaded.trainer_data, there, cast("trainers.Side", side))
        for note in notes:
            tell_user(note)
        recorded = configuration.plain({"side": side, **asdict(data), **asdict(chosen), "seed": options.seed})
        outcome = fit(
            trainer,
            loaded.batches,
            options,
            name=name,
            device=there,
            configuration=recorded,
            resume=start,
            overwrite=overwrite,
            place=here,
        )
        left = trainers.finish_of(name)(trainer, Path(folder)) if outcome.windows and here.first else None
    if left is not None:
        tell_user(left)
    return outcome.exit_code


def _nothing(text: str) -> None:
    """Print nothing: rank 0 prints the message."""


def _loaded(name: str, data: Any, here: Place) -> Any:
    """Load the data. Rank 0 loads them first, since it may write files next to them."""
    from suite import trainers
    from suite.runtime.together import Together

    load = trainers.data_of(name)
    if here.ranks == 1:
        return load(data)
    loaded = load(data, here.rank, here.ranks) if here.first else None
    Together(here).first_alone()
    return loaded if here.first else load(data, here.rank, here.ranks)


def _start(resume: str | None, folder: str, name: str) -> Start | None:
    """Read the checkpoint that --resume names: a file, the latest of a folder, or the run's latest for "latest"."""
    from suite.runtime import Store, checkpoints

    if resume is None:
        return None
    path = Path(folder if resume == "latest" else resume)
    if resume == "latest" or os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        path = Store(path).latest()
    return checkpoints.Start(path, checkpoints.load(path, name))


def device_called(name: str | None) -> Any:
    """Return the device of that name; without a name, the GPU if there is one, else the CPU.

    A GPU with an index becomes the current device, on which streams, events, kernels and counters are created by
    default. PerfsuiteError if the device cannot be used.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if name.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError("only cpu and cuda are trained on")
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except Exception as error:  # the class depends on the build: RuntimeError, AssertionError and others
        reason = first_line(error) or type(error).__name__
        raise PerfsuiteError(f"--device {name}: {reason}; `perfsuite doctor` says what this machine has") from None
    return device


def name_of(device: Any) -> str:
    """Return the model name of the GPU, or of the CPU."""
    import torch

    from perfsuite.system import host

    return torch.cuda.get_device_name(device) if device.type == "cuda" else host.cpu_model()


def _seed(seed: int) -> None:
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
