"""The text of eigenstate_lm: a file of packed tokens, its sequences, and the order in which steps use them."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from suite import packed_text, text, text_pack
from suite.batching import permutation
from suite.eigenstate_lm.model import VOCABULARY
from suite.packed_text import PackedText
from suite.progress import Bar
from suite.stepping import NumberedSteps, check_step
from suite.techniques import implementation

if TYPE_CHECKING:
    from suite.eigenstate_lm.config import TrainConfig


class Sequences(Protocol):
    """Token sequences, accessed by number."""

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [B, length] each, of the sequences `rows`, int64 [B], on their device."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The fields of a configuration that describe the data."""

    data: str | None = None
    """Folder made by `perfsuite data pack`; null: a pack of Python's standard library, which is made in `cache`."""
    synthetic: int = 0
    """If above 0, use this many random sequences instead, which needs no tokenizers library."""
    vocabulary: int = VOCABULARY
    """Vocabulary size of a pack that is made in `cache`."""
    sequence_length: int = 32768
    batch_size: int = 4
    accumulation: int = 4
    steps: int = 1000
    seed: int = 0
    """Seed of the order of the sequences."""
    validation: int = 0
    """Number of held-out sequences, evenly spaced in the text. They are not trained on."""
    cache: str = text.CACHE

    def __post_init__(self) -> None:
        for name, bound in {"synthetic": 0, "vocabulary": 3, "validation": 0}.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be {bound} or more, got {getattr(self, name)}")
        text.check_source(self.data, self.synthetic)


@dataclass(frozen=True)
class Text:
    """A trainer's data: a pack, cut into sequences of `length` tokens. The token after a sequence is its last label.

    PerfsuiteError if all sequences are held out, or if there is none.
    """

    pack: PackedText
    length: int
    held_out: int = 0
    """Number of sequences that are not trained on."""

    def __post_init__(self) -> None:
        count = self.pack.sequences(self.length)
        if self.held_out >= count:
            raise PerfsuiteError(
                f"validation: {self.held_out} sequences are held out, and {self.pack.path} has {count} of "
                f"{self.length} tokens; lower it, or pack more text"
            )

    def __len__(self) -> int:
        """Return the number of sequences to train on."""
        return len(self.training)

    @cached_property
    def validation(self) -> torch.Tensor:
        """Numbers of the held-out sequences, int64."""
        return text.spread(self.pack.sequences(self.length), self.held_out)

    @cached_property
    def training(self) -> torch.Tensor:
        """Numbers of the training sequences, which are all others, int64."""
        is_kept = torch.ones(self.pack.sequences(self.length), dtype=torch.bool)
        is_kept[self.validation] = False
        return is_kept.nonzero().flatten()

    @cached_property
    def validation_bytes(self) -> int:
        """Bytes of text in the held-out labels; 0 if the tokens are random.

        The token that ends a document counts as 0 bytes.
        """
        if not self.tokenizer:
            return 0
        library: Any = text.library().Tokenizer.from_str(self.tokenizer)
        # In a byte-level BPE, each character of a token represents one byte.
        sizes = [len(library.id_to_token(token) or "") for token in range(self.vocabulary)]
        sizes[text.END_ID] = 0
        counts = numpy.array(sizes, dtype=numpy.int64)
        starts = (self.validation * self.length + 1).tolist()
        return sum(int(counts[self.pack.row[start : start + self.length]].sum()) for start in starts)

    @property
    def vocabulary(self) -> int:
        return self.pack.vocabulary

    @cached_property
    def tokenizer(self) -> str:
        """JSON of the tokenizers library; empty if the tokens are random."""
        return (self.pack.path / packed_text.TOKENIZER).read_text(encoding="utf-8")

    def packed(self) -> Sequences:
        """Return the sequences of the memory-mapped file."""
        found: Sequences = implementation("data.packed_tokens", "PackedTokens", optimized=True)(
            self.pack.path, self.length
        )
        return found

    def encoded(self) -> Sequences:
        """Return sequences that are tokenized when they are needed. Random tokens are read from the pack."""
        if not self.tokenizer:
            return _Random(self)
        library: Any = text.library().Tokenizer.from_str(self.tokenizer)
        ends = numpy.load(self.pack.path / packed_text.ENDS).tolist()
        rows = [self.pack.row[begin : end - 1].tolist() for begin, end in itertools.pairwise([0, *ends])]
        texts: Sequence[str] = library.decode_batch(rows)
        found: Sequences = implementation("data.packed_tokens", "TokenSequences", optimized=False)(
            texts, library, self.length
        )
        return found


class _Random:
    def __init__(self, corpus: Text) -> None:
        self.corpus = corpus

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = self.corpus.length
        parts = [self.corpus.pack.row[r * length : (r + 1) * length + 1].astype(numpy.int64) for r in rows.tolist()]
        both = torch.from_numpy(numpy.stack(parts)).to(rows.device)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def rows_of(step: int, sequences: int, count: int, seed: int) -> torch.Tensor:
    """Return the numbers of the `count` sequences that a step, counted from 0, uses: int64 [count] on the CPU.

    An epoch is a permutation of all sequences. An incomplete step at its end is left out; other epochs leave out other
    sequences.
    """
    epoch, place = divmod(step, sequences // count)
    return _order(sequences, seed, epoch)[place * count : (place + 1) * count]


@functools.lru_cache(maxsize=2)
def _order(sequences: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation of an epoch. It is cached, so that it is not computed in each of its steps."""
    return permutation(sequences, seed, epoch, "cpu")


def next_rows(config: TrainConfig, corpus: Text, step: int, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers of the sequences of a trainer's next step; ValueError if `batch["step"]` is another step."""
    check_step(batch, step)
    return corpus.training[rows_of(step, len(corpus), config.sequences, config.seed)]


class Steps(NumberedSteps):
    """Batches that hold only the number of the step.

    The number and the seed determine the sequences of a step (`rows_of`), so each trainer computes them itself.
    PerfsuiteError if there are fewer sequences than a step uses.
    """

    unit = "tokens"

    def __init__(self, corpus: Text, count: int, total: int, seed: int) -> None:
        super().__init__(total)
        self.corpus, self.count, self.seed = corpus, count, seed
        if len(corpus) < count:
            raise PerfsuiteError(
                f"batch_size: a step takes {count} sequences (batch_size x accumulation), and {corpus.pack.path} has "
                f"{len(corpus)} of {corpus.length} tokens to train on; lower accumulation, batch_size or "
                "sequence_length, or pack more text"
            )

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of tokens that a step trains on."""
        return self.count * self.corpus.length

    def identity(self) -> dict[str, Any]:
        return {
            "validation": self.corpus.held_out,
            "sequence_length": self.corpus.length,
            "batch_size x accumulation": self.count,
            "seed": self.seed,
            "digest": self.corpus.pack.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position. PerfsuiteError if it belongs to other data, ValueError if it is invalid."""
        super().load_state_dict({"validation": 0, **state})  # older checkpoints had no held-out sequences


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The batches and the text for a trainer, and a line that describes them."""

    batches: Steps
    trainer_data: Text
    summary: str


def load(data: Data) -> Loaded:
    """Load the text that `data` describes; PerfsuiteError if it does not exist or is too short."""
    corpus = text_of(data)
    pack = corpus.pack
    summary = (
        f"data: {pack.tokens:,} tokens of {pack.path}, {len(corpus)} sequences of {corpus.length} tokens, "
        f"{f'{corpus.held_out} more held out, ' if corpus.held_out else ''}"
        f"vocabulary {pack.vocabulary:,}"
    )
    if pack.vocabulary != data.vocabulary:
        summary += f" (the pack's own; vocabulary={data.vocabulary:,} is for what is made here)"
    summary += f"; a unigram model's loss is {unigram_loss(pack):.3f}"
    steps = Steps(corpus, data.batch_size * data.accumulation, data.steps, data.seed)
    return Loaded(batches=steps, trainer_data=corpus, summary=summary)


def unigram_loss(pack: PackedText) -> float:
    """Return the mean cross-entropy of a unigram model, which knows only the token frequencies, in nats."""
    counts = numpy.bincount(pack.row, minlength=pack.vocabulary)
    shares = counts[counts > 0] / len(pack.row)
    return float(-(shares * numpy.log(shares)).sum())


def text_of(data: Data) -> Text:
    """Open the text. If no folder is given, use the default text, and pack it first if it is not in the cache."""
    if data.synthetic:
        return Text(_random(data), data.sequence_length, data.validation)
    if data.data is not None:
        return Text(packed_text.opened(data.data), data.sequence_length, data.validation)
    text.check_cache(Path(data.cache))
    with Bar() as bar:
        recipe = text_pack.Recipe(vocabulary=data.vocabulary)
        made = text_pack.pack(Path(data.cache) / f"library-{data.vocabulary}", recipe, bar, cached=True)
    return Text(made.pack, data.sequence_length, data.validation)


def _random(data: Data) -> PackedText:
    """Open the pack of random tokens in the cache; make it first if it does not exist."""
    name = f"random-{data.vocabulary}-{data.sequence_length}-{data.synthetic}"
    path = Path(data.cache) / name
    again = f"delete {path}; it is made again"
    text.check_cache(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    if packed_text.index_of(path) is None:
        drawn = text.synthetic(data.vocabulary, data.sequence_length, data.synthetic).input_ids.flatten().numpy()
        tokens = numpy.append(drawn, text.END_ID)
        try:
            whole = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{name}."))
            ends = numpy.array([len(tokens)])
            packed_text.write(whole, tokens, ends, "", data.vocabulary, {"recipe": "random"})
            try:
                os.replace(whole, path)
            except OSError:  # another process has made it in the meantime
                shutil.rmtree(whole, ignore_errors=True)
        except OSError as error:
            raise _unwritable(path, error) from None
    found = packed_text.opened(path, again)
    if found.vocabulary != data.vocabulary:  # there is no tokenizer to check it against
        reason = f"{packed_text.INDEX} is damaged: vocabulary is {found.vocabulary} and must be {data.vocabulary}"
        raise PerfsuiteError(f"data: {path}: {reason}; {again}")
    return found


def _unwritable(path: Path, error: OSError) -> PerfsuiteError:
    return PerfsuiteError(f"cannot write {path}: {error.strerror or error}; name another folder with --cache")


def for_ablation(
    config: TrainConfig, data: Data, device: torch.device
) -> tuple[Text, Iterator[Mapping[str, torch.Tensor]]]:
    """Return (text, endless iterator of empty batches), for `perfsuite ablate`. Each trainer counts its own steps."""
    corpus = text_of(data)
    Steps(corpus, config.sequences, config.steps, config.seed)
    return corpus, itertools.repeat({})
