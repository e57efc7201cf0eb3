"""The command `perfsuite reply`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line
from suite.commands.generate import show
from suite.naming import shown, typed
from suite.terminal import tell

TRAINER = "polychromic"


@click.command()
@click.argument("checkpoint", type=NamedPath())
@click.option("--prompt", required=True, metavar="TEXT", help="What is replied to.")
@click.option("--n", "count", type=click.IntRange(1), default=5, show_default=True, help="Number of replies.")
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="Most tokens of a reply.  [default: as trained]")
@click.option("--temperature", type=float, metavar="T", help="Higher is more varied.  [default: as trained]")
@click.option(
    "--top-p", type=float, metavar="P", help="Draw of the likeliest tokens that make up P.  [default: as trained]"
)
@click.option("--untrained", is_flag=True, help="Reply with the model as it was before the training.")
@click.option("--model", metavar="FOLDER", help="Where the model is now.  [default: where it was when it was trained]")
@click.option("--encoder", metavar="FOLDER", help="Where the sentence encoder is now.  [default: likewise]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random draws.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
def reply(checkpoint: str, **arguments: Any) -> None:
    """Reply to a prompt several times with a model that polychromic has trained, and print how much the replies differ.

    CHECKPOINT is one of its files, or the folder of a run, whose latest checkpoint is used. Each reply follows its
    number: [1], [2] and so on.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        _reply(checkpoint, **arguments)


def _reply(
    checkpoint: str,
    prompt: str,
    count: int,
    tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    untrained: bool,
    model: str | None,
    encoder: str | None,
    seed: int,
    device: str | None,
) -> None:
    from suite import trainers
    from suite.commands.train import device_called
    from suite.finding import checkpoint_of
    from suite.polychromic.chat import Encoded
    from suite.polychromic.data import check_fits
    from suite.polychromic.evaluation import distances_of, replies_to
    from suite.polychromic.objective import texts

    there = device_called(device)
    path, found = checkpoint_of(checkpoint, TRAINER)
    state = found.trainer
    config, trainer_data = _trainer_data(path, state, model, encoder)
    changes = {"new_tokens": tokens, "temperature": temperature, "top_p": top_p}
    if count == 1:
        changes["diversity"] = 0.0  # without diversity the encoder is not loaded
    try:
        config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    except ValueError as error:
        raise PerfsuiteError(str(error)) from None
    asked = _encoded(prompt, trainer_data, config.new_tokens)
    example = Encoded(tuple(asked), len(asked))
    check_fits(replace(trainer_data, training=(example,)), 1, config.new_tokens)
    try:
        trainer: Any = trainers.build(TRAINER, config, trainer_data, there, "optimized")
        if not untrained:
            trainer.load_state_dict(state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(path)} does not fit the model {trainer_data.model}: {_said(error)}") from None
    if not all(bool(weight.isfinite().all()) for weight in trainer.weights.values()):
        raise PerfsuiteError(f"{shown(path)} has weights that are no finite numbers; name an earlier one")
    end = trainer_data.chat.end
    _, drawn = replies_to(
        trainer.model, [example], count, config.new_tokens, config.temperature, config.top_p, end, seed
    )
    said = texts(trainer_data.chat, drawn)
    for number, text in enumerate(said, 1):
        show(f"[{number}] {text.strip()}\n")
    if count > 1:
        tell(f"diversity: {distances_of(trainer.sentences, said, count, there)[0]:.3f}", err=True)


def _encoded(prompt: str, trainer_data: Any, new_tokens: int) -> list[int]:
    """Return the tokens of the prompt; PerfsuiteError if it is empty, not UTF-8, or too long for the model."""
    from suite.polychromic.replies import USER, Message

    if not prompt.strip():
        raise PerfsuiteError("--prompt: it is empty; say something")
    try:
        asked: list[int] = trainer_data.chat.prompt([Message(USER, typed(prompt).strip())])
    except (TypeError, UnicodeError):
        raise PerfsuiteError("--prompt: it is not UTF-8; give other text") from None
    positions = trainer_data.shape.positions
    room = positions - new_tokens
    if room < 1:
        raise PerfsuiteError(f"--tokens {new_tokens}: the model has {positions} positions; lower it")
    if len(asked) > room:
        raise PerfsuiteError(f"--prompt: it has {len(asked)} tokens, and the model has room for {room}; shorten it")
    return asked


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _trainer_data(path: Path, state: Any, model: str | None, encoder: str | None) -> tuple[Any, Any]:
    """Return (configuration, trainer input) of a checkpoint."""
    from suite.polychromic import drawn
    from suite.polychromic.chat import Chat
    from suite.polychromic.config import TrainConfig
    from suite.polychromic.data import TrainerData

    model = model if model is not None else state.get("model")
    encoder = encoder if encoder is not None else state.get("encoder")
    if not isinstance(model, str) or not isinstance(encoder, str):
        raise PerfsuiteError(f"{shown(path)} is damaged: it names no model; name another")
    try:
        config = TrainConfig(**state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(path)} is damaged: its configuration is none ({error}); name another") from None
    if model not in drawn.SHAPES and not os.path.isdir(model):
        raise PerfsuiteError(f"the model is not in {shown(model)} any more; name its folder with --model")
    if encoder and not os.path.isdir(encoder):
        raise PerfsuiteError(f"the sentence encoder is not in {shown(encoder)} any more; name it with --encoder")
    chat = drawn.chat() if model in drawn.SHAPES else Chat(Path(model))
    trainer_data = TrainerData(
        chat=chat, model=model, encoder=Path(encoder) if encoder else None, training=(), validation=()
    )
    return config, trainer_data
