"""The command `perfsuite evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from perfsuite.report.files import write
from suite.commands.ending import in_one_line, writable
from suite.commands.with_fields import WithFields
from suite.naming import shown
from suite.terminal import tell

if TYPE_CHECKING:
    from suite.ups.evaluation import Weights

OPTIONS = {
    "rollout": ("--rollout", "ups"),
    "weights": ("--weights", "ups"),
    "split": ("--split", "leak_cnn"),
    "ngrams": ("--ngrams", "eigenstate_lm"),
}
"""Parameter → (option, the only trainer that has this option)."""


@click.command(cls=WithFields)
@click.argument("name")
@click.option("--checkpoint", type=NamedPath(), required=True, help="A file, or the folder of a run.")
@click.option("--out", type=NamedPath(), help="Folder of the results.  [default: evaluation, beside the checkpoint]")
@click.option(
    "--rollout", type=int, default=10, show_default=True, metavar="K", help="With ups: steps of advection at most."
)
@click.option(
    "--weights",
    type=click.Choice(["averages", "trained"]),
    default="averages",
    show_default=True,
    help="With ups: moving averages, which lag behind in the first 1000 steps or so, or the weights themselves.",
)
@click.option(
    "--split",
    type=click.Choice(["train", "validation", "test"]),
    help="With leak_cnn: the part of the data.  [default: test, or validation where there is none]",
)
@click.option(
    "--ngrams",
    type=click.IntRange(min=0, max=9),
    default=0,
    metavar="N",
    help="With eigenstate_lm: the loss of a Kneser-Ney model of N tokens, too, counted on the training sequences.",
)
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
@click.argument("fields", nargs=-1, type=click.UNPROCESSED, metavar="[--FIELD VALUE]...")
@click.pass_context
def evaluate(
    context: click.Context,
    name: str,
    checkpoint: str,
    out: str | None,
    rollout: int,
    weights: Weights,
    split: str | None,
    ngrams: int,
    device: str | None,
    fields: tuple[str, ...],
) -> None:
    """Evaluate a network that ups, leak_cnn, eigenstate_lm or trainer2 has trained on held-out data.

    For example `perfsuite evaluate ups --checkpoint .perfsuite/train/ups-optimized --data FOLDER`, or `perfsuite
    evaluate leak_cnn --checkpoint .perfsuite/train/leak_cnn-optimized --data leak.h5`.

    For ups the command writes the NRMSE by task and by rollout step, and a picture of each task. For leak_cnn it writes
    the accuracy, the macro-F1 and the confusion matrices of segments and files; for eigenstate_lm, the loss and the
    bits per byte. Both are evaluated with their best weights. For trainer2 it writes how often a passage's second half
    is found by its first half, before and after training; without data options it uses the data of the training. The
    data options are those of `perfsuite train`: --data, --advection, --darcy, --validation.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        from suite.configuration import ConfigurationError

        if name not in EVALUATED:
            raise ConfigurationError(f"{name}: only {', '.join(EVALUATED)} can be evaluated; name one")
        for parameter, (option, owner) in OPTIONS.items():
            if owner != name and context.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE:
                raise ConfigurationError(f"{option} is an option of {owner} alone; leave it out")
        given = {"rollout": rollout, "weights": weights, "split": split, "ngrams": ngrams}
        own = {parameter: given[parameter] for parameter, (_, owner) in OPTIONS.items() if owner == name}
        EVALUATED[name](checkpoint, out, device, fields, **own)


def _ups(
    checkpoint: str, out: str | None, device: str | None, fields: tuple[str, ...], rollout: int, weights: Weights
) -> None:
    from suite import configuration
    from suite.commands.train import device_called
    from suite.ups import evaluation
    from suite.ups.batches import Data, mixture_of
    from suite.ups.stages import opened

    if rollout < 1:
        raise configuration.ConfigurationError(f"--rollout {rollout}: give 1 or more")
    (data,) = configuration.read([Data], None, fields)
    there = device_called(device)
    file, found, config = opened(Path(checkpoint))
    folder = _folder_of(out, file)
    mixture = mixture_of(evaluation.data_for(config, data))
    networks, step = evaluation.loaded(config, mixture, found.trainer, there, weights)
    scores, examples = evaluation.evaluate(networks, mixture, there, rollout, step)
    same_data = found.trainer.get("data") == mixture.digest
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


def _leak_cnn(checkpoint: str, out: str | None, device: str | None, fields: tuple[str, ...], split: str | None) -> None:
    from suite import configuration
    from suite.commands.train import device_called
    from suite.finding import checkpoint_of
    from suite.leak_cnn.epochs import Data, audio_of
    from suite.leak_cnn.features import TEST
    from suite.leak_cnn.report import PICTURE, plot
    from suite.leak_cnn.trained import trained_of

    (data,) = configuration.read([Data], None, fields)
    there = device_called(device)
    file, found = checkpoint_of(checkpoint, "leak_cnn")
    folder = _folder_of(out, file)
    trained = trained_of(file, found.trainer, there)
    audio = audio_of(data)
    split = split or (TEST if TEST in audio.files else "validation")
    metrics = trained.evaluated(audio, split)
    same_data = isinstance(found.batches, dict) and found.batches.get("digest") == audio.digest
    values = {name.removeprefix("validation_"): value for name, value in metrics.metrics().items()}
    about = {"checkpoint": str(file), "epoch": trained.epoch, "split": split, "data_of_the_training": same_data}
    matrices = {"segments": metrics.segments.confusion, "files": metrics.files}
    tell(f"{split}: {metrics.summary}")
    if not same_data:
        tell("the data are not those of the training: these recordings may have been trained on", err=True)
    _saved(folder / "evaluation.json", {**about, **values, "confusion": matrices})
    plot(metrics, folder / PICTURE)
    tell(f"wrote {shown(folder / PICTURE)}", err=True)


def _eigenstate_lm(checkpoint: str, out: str | None, device: str | None, fields: tuple[str, ...], ngrams: int) -> None:
    import torch

    from suite import configuration, trainers
    from suite.commands.train import device_called
    from suite.eigenstate_lm.config import TrainConfig
    from suite.eigenstate_lm.data import Data, text_of
    from suite.eigenstate_lm.held_out import best_of, mean_loss, measures
    from suite.finding import checkpoint_of

    (data,) = configuration.read([Data], None, fields)
    there = device_called(device)
    file, found = checkpoint_of(checkpoint, "eigenstate_lm")
    folder = _folder_of(out, file)
    if type(known := found.configuration.get("vocabulary")) is int:  # no text of another vocabulary fits
        (data,) = configuration.read([Data], None, [f"--vocabulary={known}", *fields])
    state = found.trainer
    try:
        given = configuration.known(TrainConfig, state["config"])
        config = TrainConfig(**{**given, "use_compile": False, "loader": False})
        weights, step = best_of(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(file)} is damaged: {error}; name another") from None
    held_out = data.validation or _held_out(found.batches)
    if not held_out:
        raise PerfsuiteError("validation: no sequence is held out; say how many, e.g. --validation 16")
    text = text_of(replace(data, sequence_length=config.sequence_length, validation=held_out))
    trainer: Any = trainers.build("eigenstate_lm", config, text, there, "optimized")
    try:
        trainer.load_state_dict({**state, "weights": weights, "best": None})
    except (KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(file)} does not fit these data: {error}; name those of its training") from None
    loss = mean_loss(text, config.batch_size, text.packed(), torch.device(there), trainer.held_out_loss)
    values = measures(loss, text)
    same_data = isinstance(found.batches, Mapping) and all(
        found.batches.get(name) == value for name, value in (("digest", text.pack.digest), ("validation", held_out))
    )
    tell(f"held-out loss {_in_words(values)}, of {held_out} sequences, by the weights of step {step}")
    if ngrams:
        from suite.eigenstate_lm.ngrams import loss_of

        counted = measures(loss_of(text, ngrams), text)
        values |= {"ngrams": ngrams, **{f"ngram_{name}": value for name, value in counted.items()}}
        tell(f"a Kneser-Ney model of {ngrams} tokens, counted on the other sequences: {_in_words(counted)}")
    if not same_data:
        tell("the data are not those of the training: these sequences may have been trained on", err=True)
    about = {"checkpoint": str(file), "step": step, "sequences": held_out, "data_of_the_training": same_data, **values}
    _saved(folder / "evaluation.json", about)


def _trainer2(checkpoint: str, out: str | None, device: str | None, fields: tuple[str, ...]) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from suite import text
    from suite.commands.train import device_called
    from suite.finding import checkpoint_of
    from suite.trainer2 import search

    there = device_called(device)
    file, found = checkpoint_of(checkpoint, "trainer2")
    folder = _folder_of(out, file)
    trainer = search.trainer_of(file, found.trainer, there)
    data = search.data_of(found.configuration, fields)
    if not data.validation:
        raise PerfsuiteError("validation: no sequence is held out; say how many, e.g. --validation 256")
    sequences, _ = text.sequences_of(data)
    if sequences.vocabulary != len(trainer.weights["embedding"]):
        raise PerfsuiteError(
            f"data: its vocabulary has {sequences.vocabulary} tokens, that of {shown(file)} "
            f"{len(trainer.weights['embedding'])}; name the data of its training"
        )
    trained_on, held_out = text.divided(sequences, data.validation)
    same_data = isinstance(found.batches, Mapping) and found.batches.get("digest") == trained_on.digest
    before = search.trainer_of(file, found.trainer, there, trained=False)
    scores = {"before": search.scores_of(before, held_out), "after": search.scores_of(trainer, held_out)}
    scores["by chance"] = search.by_chance(scores["after"].passages)
    table = Table("", "nearest", "among ten", "mean of 1 / rank")
    for name, row in scores.items():
        table.add_row(name, f"{row.first:.2%}", f"{row.among_ten:.2%}", f"{row.reciprocal_rank:.4f}")
    tell(f"the second halves of {scores['after'].passages} held-out passages, looked for by the first:")
    Console(width=100).print(table)
    if not same_data:
        tell("the data are not those of the training: these passages may have been trained on", err=True)
    about = {"checkpoint": str(file), "windows": found.windows, "data_of_the_training": same_data}
    _saved(folder / "evaluation.json", {**about, **{name: asdict(row) for name, row in scores.items()}})


def _folder_of(out: str | None, file: Path) -> Path:
    """Return the folder of the results, and create it; PerfsuiteError before the evaluation if it is not writable."""
    folder = Path(out) if out is not None else file.parent / "evaluation"
    writable(folder)
    return folder


def _in_words(values: Mapping[str, float]) -> str:
    """Format a loss in nats per token, and in bits per byte if the bytes of the text are known."""
    bits = f", {values['bits_per_byte']:.4f} bits a byte" if "bits_per_byte" in values else ""
    return f"{values['validation_loss']:.4f} nats a token{bits}"


def _held_out(batches: object) -> int:
    """Return the number of sequences that the training of a checkpoint held out; 0 if it does not say."""
    count = batches.get("validation", 0) if isinstance(batches, Mapping) else 0
    return count if isinstance(count, int) else 0


def _saved(path: Path, content: Mapping[str, Any]) -> None:
    try:
        write(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise PerfsuiteError(f"cannot write {shown(path)}: {reason}; name another folder with --out") from None
    tell(f"wrote {shown(path)}", err=True)


EVALUATED: Mapping[str, Callable[..., None]] = {
    "ups": _ups,
    "leak_cnn": _leak_cnn,
    "eigenstate_lm": _eigenstate_lm,
    "trainer2": _trainer2,
}
