"""Search with a trained geometry: the passages nearest to a text, and how often it finds a passage's other half."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from perfsuite.errors import PerfsuiteError
from suite import configuration, text, trainers
from suite.naming import shown
from suite.text import Data, Sequences
from suite.trainer2.config import TrainConfig

AT_ONCE = 64
"""Passages whose coordinates are computed at a time."""
MOST_COSTS = 1 << 24
"""Maximum number of distances that are computed at a time: 64 MiB in float32, and n times that for differences."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a search that finds each passage's second half by its first, among all passages' second halves."""

    passages: int
    first: float
    """Share of passages whose second half was the nearest."""
    among_ten: float
    """Share of passages whose second half was among the ten nearest."""
    reciprocal_rank: float
    """Mean of 1 / rank."""


def trainer_of(file: Path, state: Mapping[str, Any], device: torch.device, *, trained: bool = True) -> Any:
    """Return the reference trainer of a checkpoint, with its state or untrained; PerfsuiteError if it is damaged."""
    try:
        given = configuration.known(TrainConfig, state["config"])
        config = dataclasses.replace(TrainConfig(**given), use_cudagraphs=False)
        vocabulary = len(state["weights"]["embedding"])
        trainer: Any = trainers.build("trainer2", config, vocabulary, device, "reference")
        if trained:
            trainer.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(file)} is damaged: {error}; name another") from None
    return trainer


def data_of(recorded: Mapping[str, Any], fields: Sequence[str]) -> Data:
    """Return the data of a checkpoint's configuration, in which the command line's fields replace the recorded ones."""
    names = {f.name for f in dataclasses.fields(Data)}
    before = [f"--{name}={value}" for name, value in recorded.items() if name in names and value is not None]
    (data,) = configuration.read([Data], None, [*before, *fields])
    return cast("Data", data)


def coordinates(trainer: Any, sequences: Sequences) -> torch.Tensor:
    """Return the coordinates of each sequence in the geometry, [N, n], on the trainer's device."""
    parts = [
        trainer.coordinates(sequences.input_ids[at : at + AT_ONCE], sequences.attention_mask[at : at + AT_ONCE])
        for at in range(0, len(sequences), AT_ONCE)
    ]
    return torch.cat(parts)


def costs(trainer: Any, queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Compute the distances between A queries and N candidates in the learned metric, [A, N].

    Retrieval weights candidates by them, times the field's curvature. That common factor is left out here.
    """
    d = candidates[None] - queries[:, None]
    form = torch.einsum("abn,n->ab", d.square(), trainer.metric).clamp(min=0)
    return torch.sqrt(form + trainer.config.eps)


def scores_of(trainer: Any, sequences: Sequences) -> Scores:
    """Search for the second half of each sequence without padding by its first half.

    Half of the other candidates at the same distance as the right one count as nearer. PerfsuiteError if all sequences
    have padding, or if they have fewer than two tokens.
    """
    length = sequences.input_ids.shape[1]
    whole = sequences.of(sequences.attention_mask.bool().all(1))
    if length < 2 or not len(whole):
        raise PerfsuiteError("data: no held-out sequence has two halves; hold out more, e.g. --validation 256")
    first, second = (
        Sequences(input_ids=ids, attention_mask=mask, vocabulary=whole.vocabulary)
        for ids, mask in zip(
            whole.input_ids.tensor_split([length // 2], 1),
            whole.attention_mask.tensor_split([length // 2], 1),
            strict=True,
        )
    )
    queries, candidates = coordinates(trainer, first), coordinates(trainer, second)
    count = len(whole)
    ranks = []
    for rows in torch.arange(count, device=queries.device).split(max(1, MOST_COSTS // count)):
        found = costs(trainer, queries[rows], candidates)
        own = found.gather(1, rows[:, None])
        ranks.append(1 + (found < own).sum(1) + ((found == own).sum(1) - 1) / 2)
    rank = torch.cat(ranks).double()
    return Scores(
        passages=count,
        first=float((rank < 2).double().mean()),
        among_ten=float((rank <= 10).double().mean()),
        reciprocal_rank=float(rank.reciprocal().mean()),
    )


def by_chance(passages: int) -> Scores:
    """Return the expected scores of a random ranking."""
    ranks = torch.arange(1, passages + 1, dtype=torch.float64)
    return Scores(
        passages=passages,
        first=1 / passages,
        among_ten=min(1.0, 10 / passages),
        reciprocal_rank=float(ranks.reciprocal().mean()),
    )


class Passages:
    """At most `most` passages of a text, in the tokens of a geometry: its training text or another one.

    PerfsuiteError if the text's vocabulary does not have `vocabulary` tokens, or if the data are synthetic.
    """

    def __init__(self, data: Data, vocabulary: int, most: int) -> None:
        if data.synthetic:
            raise PerfsuiteError("synthetic: it was trained on random tokens, which have no text; train on a folder")
        found = text.corpus(data.data)
        tokens, size = text.tokens_of(found, data.vocabulary, Path(data.cache))
        if size != vocabulary:
            raise PerfsuiteError(
                f"data: the vocabulary of {found.where} has {size} tokens, that of the checkpoint {vocabulary}; "
                "name the text of its training with --data"
            )
        self._tokenizer = text.tokenizer_of(found, data.vocabulary, Path(data.cache))
        every = text.pack(tokens, data.sequence_length, size)
        self.sequences = every.of(text.spread(len(every), most)) if most < len(every) else every
        self.where = f"{len(self.sequences):,} of {len(every):,} passages of {found.where}"

    def encoded(self, query: str) -> Sequences:
        """Return a query's tokens, cut at the length of a passage; PerfsuiteError if it is not UTF-8 or has none."""
        try:
            ids = self._tokenizer.encode(query).ids[: self.sequences.input_ids.shape[1]]
        except TypeError:
            raise PerfsuiteError("the query is not UTF-8; give other text") from None
        if not ids:
            raise PerfsuiteError("the query is empty; give some text")
        tokens = torch.tensor([ids])
        return Sequences(
            input_ids=tokens, attention_mask=torch.ones(tokens.shape), vocabulary=self.sequences.vocabulary
        )

    def decoded(self, row: int) -> str:
        """Return the text of a passage."""
        kept = self.sequences.input_ids[row][self.sequences.attention_mask[row].bool()]
        return str(self._tokenizer.decode(kept.tolist()))
