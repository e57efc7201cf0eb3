"""Search by a trained geometry: the passages nearest to a text, and how often a passage's other half is found."""

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
"""Passages that the network reads together."""
MOST_COSTS = 1 << 24
"""Costs that are computed together: 64 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a search for each passage's second half by its first, among the second halves of all passages."""

    passages: int
    first: float
    """Share of passages whose second half was the nearest."""
    among_ten: float
    """Share of passages whose second half was among the ten nearest."""
    reciprocal_rank: float
    """Mean of 1 / rank."""


def trainer_of(file: Path, state: Mapping[str, Any], device: torch.device, *, trained: bool = True) -> Any:
    """Return the reference trainer with a checkpoint's state, or untrained; PerfsuiteError if the state is damaged."""
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
    """Return the data of a checkpoint's configuration, with the fields of the command line in place of its own."""
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
    """Return the distances in the learned metric, [A, N], of A queries and N candidates, by which retrieval weighs.

    The field's curvature, a common factor, is left out.
    """
    d = candidates[None] - queries[:, None]
    form = torch.einsum("abn,n->ab", d.square(), trainer.metric).clamp(min=0)
    return torch.sqrt(form + trainer.config.eps)


def scores_of(trainer: Any, sequences: Sequences) -> Scores:
    """Search for each whole sequence's second half by its first; PerfsuiteError if no sequence is whole.

    Half of the other candidates at the same distance as the right one count as nearer.
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
    """Return the average scores of a random ranking."""
    ranks = torch.arange(1, passages + 1, dtype=torch.float64)
    return Scores(
        passages=passages,
        first=1 / passages,
        among_ten=min(1.0, 10 / passages),
        reciprocal_rank=float(ranks.reciprocal().mean()),
    )


class Passages:
    """Passages of the text that a geometry was trained on, or of another, in the same tokens.

    PerfsuiteError if the text's vocabulary has another size than the geometry's, or the data are synthetic.
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
        """Return a query's tokens, at most as many as a passage has; PerfsuiteError if it has none."""
        ids = self._tokenizer.encode(query).ids[: self.sequences.input_ids.shape[1]]
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
