"""Token sequences from text: files → byte-level BPE → packed sequences → batches, identical on every machine.

`synthetic` generates sequences of the same form without the tokenizers library.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy
import torch
from filelock import FileLock

from perfsuite.errors import PerfsuiteError
from suite.batching import check_identity, whole
from suite.naming import shown

SUFFIXES = (".txt", ".md", ".rst", ".py")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders next to the standard library that do not belong to it, or contain neither prose nor programs."""
PAD, END = "<pad>", "<end>"
PAD_ID, END_ID = 0, 1
BYTES = 256
LARGEST = 1 << 24
"""Largest vocabulary. The library allocates memory for it at once, and aborts the process if there is too little."""
Tokens = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
CACHE = ".perfsuite/cache"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Configuration fields that describe the text."""

    data: str | None = None
    """Folder of *.txt, *.md, *.rst and *.py files; null: the sources of Python's standard library on this machine."""
    synthetic: int = 0
    """If above 0, number of random sequences to use instead; this does not need the tokenizers library."""
    vocabulary: int = 32000
    sequence_length: int = 256
    batch_size: int = 32
    seed: int = 0
    validation: int = 0
    """Number of sequences held out from training, evenly spaced over the text."""
    cache: str = CACHE

    def __post_init__(self) -> None:
        least = {"synthetic": 0, "vocabulary": 3, "sequence_length": 1, "batch_size": 1, "seed": 0, "validation": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be {bound} or more, got {getattr(self, name)}")
        check_source(self.data, self.synthetic)


def check_source(data: str | None, synthetic: int) -> None:
    """Raise ValueError if a configuration gives both the data and a number of synthetic examples."""
    if data is not None and synthetic:
        raise ValueError(f"synthetic: {synthetic} takes the place of data: {shown(data)}; leave data out, or use 0")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts in a fixed order, and the numbers of skipped files."""

    where: str
    texts: tuple[str, ...]
    damaged: int
    empty: int
    unreadable: int = 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of every text and its length."""
        digest = hashlib.sha256()
        for text in self.texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


class Searched(NamedTuple):
    """The text files under a folder, sorted by path, and its unreadable subfolders with the errors."""

    root: Path
    paths: list[Path]
    unreadable: list[tuple[Path, OSError]]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """`input_ids` int64 [N, T] and `attention_mask` float32 [N, T], which is 0 at padding and 1 elsewhere."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    vocabulary: int

    def __len__(self) -> int:
        return len(self.input_ids)

    def of(self, rows: torch.Tensor) -> Sequences:
        """Return the given rows, selected by a mask or by indices."""
        return Sequences(
            input_ids=self.input_ids[rows], attention_mask=self.attention_mask[rows], vocabulary=self.vocabulary
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the tokens."""
        return hashlib.sha256(self.input_ids.contiguous().numpy().data).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Data for a trainer, and a line that describes the source."""

    batches: Batches
    trainer_data: int
    """Size of the vocabulary."""
    summary: str


def load(data: Data) -> Loaded:
    """Load the batches that the fields of `data` describe."""
    sequences, source = sequences_of(data)
    if data.validation:
        sequences = divided(sequences, data.validation)[0]
        source += f", {data.validation} of them held out"
    return Loaded(
        batches=Batches(sequences, data.batch_size, data.seed),
        trainer_data=sequences.vocabulary,
        summary=f"data: {source}",
    )


def sequences_of(data: Data) -> tuple[Sequences, str]:
    """Return (all sequences that `data` describes, including held-out ones; description of the source)."""
    if data.synthetic:
        sequences = synthetic(data.vocabulary, data.sequence_length, data.synthetic, data.seed)
        source = f"{len(sequences)} random sequences"
    else:
        found = corpus(data.data)
        tokens, vocabulary = tokens_of(found, data.vocabulary, Path(data.cache))
        sequences = pack(tokens, data.sequence_length, vocabulary)
        source = f"{len(found.texts)} files of {found.where}, {len(sequences)} sequences"
        kinds = ((found.damaged, "not UTF-8"), (found.empty, "empty"), (found.unreadable, "unreadable"))
        left = [f"{n} {what}" for n, what in kinds if n]
        source += f" (left out: {', '.join(left)})" if left else ""
    return sequences, f"{source} of {data.sequence_length} tokens, vocabulary {sequences.vocabulary}"


def divided(sequences: Sequences, held_out: int) -> tuple[Sequences, Sequences]:
    """Return (training, evenly spaced held-out) sequences; PerfsuiteError if none are left for training."""
    count = len(sequences)
    if held_out >= count:
        raise PerfsuiteError(f"validation: {held_out} of {count} sequences would leave none to train on; lower it")
    out = torch.zeros(count, dtype=torch.bool)
    out[spread(count, held_out)] = True
    return sequences.of(~out), sequences.of(out)


def spread(count: int, chosen: int) -> torch.Tensor:
    """Return evenly spaced row indices, int64 [chosen]; they are distinct if `chosen` is at most `count`."""
    return (2 * torch.arange(chosen) + 1) * count // max(1, 2 * chosen)


def corpus(folder: str | Path | None = None) -> Corpus:
    """Read the texts under a folder by path; PerfsuiteError if there are none. None: Python's standard library."""
    root, paths, left_out = searched(folder)
    texts = []
    damaged, empty, unreadable = 0, 0, len(left_out)
    for path in paths:
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            damaged += 1
            continue
        except OSError:
            unreadable += 1
            continue
        if text.strip():
            texts.append(text)
        else:
            empty += 1
    if not texts:
        seen = f"; {damaged} damaged and {empty} empty files were left out" if damaged or empty else ""
        seen += f"; {unreadable} could not be read" if unreadable else ""
        raise PerfsuiteError(f"data: no text under {root}{seen}; it must hold {', '.join(SUFFIXES)} files")
    return Corpus(where=str(root), texts=tuple(texts), damaged=damaged, empty=empty, unreadable=unreadable)


def searched(folder: str | Path | None, suffixes: tuple[str, ...] = SUFFIXES) -> Searched:
    """Find the text files under a folder. None: Python's standard library.

    PerfsuiteError if it is not a folder, or cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else Path(folder)
    try:
        if not root.is_dir():
            raise PerfsuiteError(f"data: {root} is no folder; name one that holds {', '.join(suffixes)} files")
        with os.scandir(root):  # unreadable subfolders are only skipped
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"data: cannot read {root}: {reason}; make it readable, or name another folder") from None
    unreadable: list[OSError] = []
    paths = _files(root, LEFT_OUT if folder is None else set(), unreadable.append, suffixes)
    return Searched(root, paths, [(Path(error.filename), error) for error in unreadable])


def _files(
    root: Path,
    left_out: set[str],
    unreadable: Callable[[OSError], object] | None = None,
    suffixes: tuple[str, ...] = SUFFIXES,
) -> list[Path]:
    found = []
    for folder, inner, names in os.walk(root, onerror=unreadable):
        inner[:] = [name for name in inner if name not in left_out]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted((p for p in found if _may_be_read(p)), key=lambda p: p.relative_to(root).parts)


def _may_be_read(path: Path) -> bool:
    """Return True if a path is a regular file, not e.g. a pipe.

    Also return True if permissions prevent the check. Reading the file then reports the error.
    """
    try:
        return path.is_file()
    except OSError:
        return True


def tokens_of(found: Corpus, vocabulary: int = 32000, cache: Path = Path(CACHE)) -> tuple[Tokens, int]:
    """Return (tokens of the corpus, vocabulary size), from the cache if possible. An end token follows each text.

    The vocabulary is that of a byte-level BPE trained on the corpus. It is smaller than requested if the text has no
    more pairs to merge.
    """
    key = _key(found, vocabulary)
    path = cache / f"tokens-{key}.npz"
    with _only_one(path):
        with (
            suppress(Exception),
            numpy.load(BytesIO(path.read_bytes())) as stored,
        ):  # missing or damaged
            return stored["tokens"].astype(numpy.int64), int(stored["vocabulary"])
        tokenizer = tokenizer_of(found, vocabulary, cache)
        parts = [numpy.asarray(ids, dtype=numpy.int64) for ids in encode(tokenizer, found.texts)]
        tokens = numpy.concatenate(parts)
        size = int(tokenizer.get_vocab_size())
        _write(path, lambda file: numpy.savez(file, tokens=tokens.astype(numpy.int32), vocabulary=size))
        return tokens, size


def tokenizer_of(found: Corpus, vocabulary: int = 32000, cache: Path = Path(CACHE)) -> Any:
    """Return a byte-level BPE trained on the corpus, from the cache if possible."""
    path = cache / f"bpe-{_key(found, vocabulary)}.json"
    tokenizers = library()
    with _only_one(path):
        with suppress(Exception):  # missing or damaged; the library raises a bare Exception
            return tokenizers.Tokenizer.from_file(str(path))
        made = trained(found.texts, vocabulary)
        _write(path, lambda file: file.write(made.to_str().encode()))
        return made


def library() -> Any:
    """Import tokenizers; PerfsuiteError if it is not installed."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise PerfsuiteError(
            "text needs the package tokenizers, which is not installed; pip install 'perfsuite[train]', "
            "or train on random tokens with --synthetic 4096"
        ) from None
    return tokenizers


def _key(found: Corpus, vocabulary: int) -> str:
    """Return a digest of everything that the tokens depend on."""
    check_vocabulary(vocabulary)
    settings = {"corpus": found.digest, "vocabulary": vocabulary, "library": library().__version__, "form": 1}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def check_vocabulary(vocabulary: int) -> None:
    """Raise PerfsuiteError if a vocabulary is too small for all bytes, padding and end, or is above `LARGEST`."""
    if vocabulary < BYTES + 2:
        raise PerfsuiteError(f"vocabulary: {vocabulary} is too small for bytes; it must be {BYTES + 2} or more")
    if vocabulary > LARGEST:
        raise PerfsuiteError(f"vocabulary: {vocabulary} is too large; it must be {LARGEST} or less")


def check_cache(cache: Path) -> None:
    """Raise PerfsuiteError if the cache folder is a file."""
    if os.path.isfile(cache):
        raise PerfsuiteError(f"cache: {cache} is a file; name a folder with --cache")


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Lock the creation of a file. Other processes that need the file wait, and then find it."""
    check_cache(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write {path}: {reason}; name another folder with --cache") from None


def trained(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE on texts. It is smaller than requested if they have no more pairs to merge."""
    tokenizers = library()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def _write(path: Path, content: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            content(file)
        os.chmod(temporary, 0o644)  # a cache may be shared; mkstemp gives 0600
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def encode(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the tokens of each text, followed by the end token."""
    tokenizer.encode_special_tokens = True  # otherwise "<end>" in a text would become the end token
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 256:  # bounds the memory; the library encodes a batch in parallel
            yield from _encoded(tokenizer, batch)
            batch = []
    yield from _encoded(tokenizer, batch)


def _encoded(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        yield [*encoding.ids, END_ID]


def pack(tokens: Tokens, length: int, vocabulary: int) -> Sequences:
    """Split a 1-D array of tokens into sequences of `length` tokens, and pad the last one."""
    count = -(-len(tokens) // length)
    ids = numpy.full(count * length, PAD_ID, dtype=numpy.int64)
    ids[: len(tokens)] = tokens
    mask = numpy.zeros(count * length, dtype=numpy.float32)
    mask[: len(tokens)] = 1
    return Sequences(
        input_ids=torch.from_numpy(ids).view(count, length),
        attention_mask=torch.from_numpy(mask).view(count, length),
        vocabulary=vocabulary,
    )


def synthetic(vocabulary: int, T: int, N: int, seed: int = 0) -> Sequences:
    """Generate random sequences in the format of `pack`. The last third of the last sequence is padding.

    With probability 3/4 a token is determined by the previous one, so that there is something to learn.
    """
    generator = numpy.random.default_rng(seed)
    step = generator.integers(2, vocabulary, size=vocabulary)
    drawn = generator.integers(2, vocabulary, size=(N, T))
    follows = generator.random((N, T)) < 0.75
    for t in range(1, T):
        drawn[:, t] = numpy.where(follows[:, t], step[drawn[:, t - 1]], drawn[:, t])
    mask = numpy.ones((N, T), dtype=numpy.float32)
    if N and T > 2:
        drawn[-1, T - T // 3 :] = PAD_ID
        mask[-1, T - T // 3 :] = 0
    return Sequences(
        input_ids=torch.from_numpy(drawn.astype(numpy.int64)),
        attention_mask=torch.from_numpy(mask),
        vocabulary=vocabulary,
    )


class Batches:
    """Infinite iterator over batches {"input_ids", "attention_mask"}. An incomplete last batch of an epoch is dropped.

    Rows are reshuffled each epoch. The order depends only on seed and epoch, so a position is two numbers.
    """

    def __init__(self, sequences: Sequences, batch_size: int, seed: int = 0) -> None:
        if len(sequences) < batch_size:
            raise PerfsuiteError(
                f"batch_size: {batch_size} is more than the {len(sequences)} sequences that the data has; "
                "lower it or sequence_length, or give more text"
            )
        self.sequences = sequences
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order: Any = None
        self._next: dict[str, torch.Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self.sequences) // self.batch_size

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = self.peek()
        self._next = None
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return batch

    def peek(self) -> dict[str, torch.Tensor]:
        """Return the next batch without advancing the position. The batch is created only once."""
        if self._next is None:
            if self._order is None:
                self._order = numpy.random.default_rng([self.seed, self.epoch]).permutation(len(self.sequences))
            rows = self._order[self.position * self.batch_size : (self.position + 1) * self.batch_size]
            self._next = {
                name: torch.from_numpy(getattr(self.sequences, name).numpy()[rows])  # torch would wake its threads
                for name in ("input_ids", "attention_mask")
            }
        return self._next

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and a description of the data and settings to which it belongs."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; PerfsuiteError if it belongs to other data, ValueError if it is invalid."""
        check_identity(state, self._identity())
        self.epoch, self.position = whole(state, "epoch"), whole(state, "position", most=len(self) - 1)
        self._order = self._next = None

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self.seed, "digest": self.sequences.digest}
