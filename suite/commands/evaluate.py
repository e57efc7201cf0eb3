"""`perfsuite evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from suite.commands.ending import in_one_line
from suite.naming import shown
from suite.terminal import tell

if TYPE_CHECKING:
    from suite.ups.evaluation import Weights

TRAINER = "ups"


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.option("--checkpoint", type=click.Path(), required=True, help="A file, or the folder of a run.")
@click.option("--out", type=click.Path(), help="Folder of the results.  [default: evaluation, beside the checkpoint]")
@click.option("--rollout", type=int, default=10, show_default=True, metavar="K", help="Steps of advection at most.")
@click.option(
    "--weights",
    type=click.Choice(["averages", "trained"]),
    default="averages",
    show_default=True,
    help="Moving averages, which lag behind in the first 1000 steps or so, or the weights themselves.",
)
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
def evaluate(
    name: str,
    checkpoint: str,
    out: str | None,
    rollout: int,
    weights: Weights,
    device: str | None,
    fields: tuple[str, ...],
) -> None:
    """Compare the predictions of a network that ups has trained with the fields of the validation samples.

    For example `perfsuite evaluate ups --checkpoint .perfsuite/train/ups-optimized --data FOLDER`.

    Writes the NRMSE by task and by step of the rollout as JSON and Markdown, and a picture of each task. The data are
    named as `perfsuite train ups` does: --data, --advection, --darcy, --validation.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        from suite import configuration
        from suite.commands.train import device_called
        from suite.ups import evaluation
        from suite.ups.batches import Data, mixture_of
        from suite.ups.stages import opened

        if name != TRAINER:
            raise configuration.ConfigurationError(f"{name}: only {TRAINER} can be evaluated; name it")
        if rollout < 1:
            raise configuration.ConfigurationError(f"--rollout {rollout}: give 1 or more")
        (data,) = configuration.read([Data], None, fields)
        there = device_called(device)
        file, found, config = opened(Path(checkpoint))
        given = mixture_of(evaluation.data_for(config, data))
        networks, step = evaluation.loaded(config, given, found.trainer, there, weights)
        scores, examples = evaluation.evaluate(networks, given, there, rollout, step)
        folder = Path(out) if out is not None else file.parent / "evaluation"
        same_data = found.trainer.get("data") == given.digest
        about = {
            "checkpoint": str(file),
            "weights": weights,
            "windows": found.windows,
            "data_of_the_training": same_data,
        }
        tell(evaluation.as_markdown(scores, shown(file), weights), nl=False)
        if not same_data:
            tell("the data are not those of the training: validation samples may have been trained on", err=True)
        for path in evaluation.save(scores, examples, folder, about):
            tell(f"wrote {shown(path)}", err=True)
