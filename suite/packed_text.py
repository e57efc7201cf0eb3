"""Packed text: a folder with memory-mapped tokens, the documents' ends and the tokenizer.

tokens.bin      tokens of all documents, each followed by the end token; uint16, or int32 for vocabularies above 65,536
ends.npy        int64: number of tokens up to the end of each document
tokenizer.json  tokenizer in the tokenizers library's format
pack.json       description of the pack, and the digests of the other three files

source: eigenstate_lm, technique 004.10
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from suite.building import digest_of_file

FORMAT, VERSION = "packed-text", 1
TOKENS, ENDS, TOKENIZER, INDEX = "tokens.bin", "ends.npy", "tokenizer.json", "pack.json"
WORD = 1 << 16
AGAIN = "make it again with `perfsuite data pack --overwrite`"
Tokens = numpy.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """An open pack that was verified to be complete and undamaged."""

    path: Path
    vocabulary: int
    tokens: int
    documents: int
    digest: str
    """SHA-256 digest of the tokens."""
    recipe: str
    """Digest of everything that the pack was built from."""

    @cached_property
    def row(self) -> Tokens:
        """The tokens, memory-mapped and read-only."""
        return numpy.memmap(self.path / TOKENS, dtype=dtype_for(self.vocabulary), mode="r")

    def sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens, each of which is followed by at least one more token.

        PerfsuiteError if there is no such sequence, or `length` is below 1.
        """
        if length < 1:
            raise PerfsuiteError(f"sequence_length: {length} is out of range; give 1 or more")
        count = (self.tokens - 1) // length
        if count < 1:
            raise PerfsuiteError(
                f"sequence_length: {length} and the token after are more than the {self.tokens} tokens of {self.path}; "
                "lower it, or pack more text"
            )
        return count


def dtype_for(vocabulary: int) -> Any:
    """Return the dtype in which tokens of this vocabulary size are stored."""
    return numpy.dtype("<u2" if vocabulary <= WORD else "<i4")


def opened(path: str | Path, again: str | None = None) -> PackedText:
    """Open the pack in a folder; PerfsuiteError, with a one-line message, if it is missing or damaged.

    `again` replaces the remedy in these messages if `perfsuite data pack` does not apply.
    """
    path = Path(path)
    made, again = again or "make it with `perfsuite data pack`", again or AGAIN
    try:
        if not path.is_dir():
            raise PerfsuiteError(f"data: {path} is no folder of packed text; {made}")
    except OSError as error:
        raise unreadable("data", path, error) from None
    index = index_of(path)
    if index is None:
        if is_pack(path):
            reason = "damaged: it is no index of packed text" if (path / INDEX).exists() else "missing"
            raise PerfsuiteError(f"data: {path}: {INDEX} is {reason}; {again}")
        raise PerfsuiteError(f"data: {path} holds no packed text ({INDEX} is missing or damaged); {made}")
    if index.get("version") != VERSION:
        raise PerfsuiteError(f"data: {path} is of version {index.get('version')!r:.40}, not {VERSION}; {again}")
    try:
        digests = _digests(index)
        found = PackedText(
            path=path,
            vocabulary=_count(index, "vocabulary"),
            tokens=_count(index, "tokens"),
            documents=_count(index, "documents"),
            digest=digests[TOKENS],
            recipe=str(index["recipe"]),
        )
        _check_digest(path / ENDS, digests, again)
        _check_digest(path / TOKENIZER, digests, again)
        _confirm(found)  # against these two files; this confirms the third's size, too
        bytes_stated = found.tokens * dtype_for(found.vocabulary).itemsize
        bytes_found = (path / TOKENS).stat().st_size
        if bytes_found != bytes_stated:
            raise PerfsuiteError(f"data: {path / TOKENS} has {bytes_found} bytes and not {bytes_stated}; {again}")
        _check_digest(path / TOKENS, digests, again)
    except KeyError as error:
        raise PerfsuiteError(f"data: {path}: {INDEX} is damaged: {error} is missing; {again}") from None
    except (TypeError, ValueError, OverflowError, EOFError) as error:
        raise PerfsuiteError(f"data: {path}: {INDEX} is damaged: {error}; {again}") from None
    except FileNotFoundError as error:
        raise PerfsuiteError(f"data: {path}: {Path(error.filename).name} is missing; {again}") from None
    except OSError as error:
        raise unreadable("data", Path(error.filename or path), error) from None
    return found


def _check_digest(path: Path, digests: Mapping[str, str], again: str) -> None:
    if digest_of_file(path) != digests[path.name]:
        raise PerfsuiteError(f"data: {path} is damaged: it is not what was written; {again}")


def _digests(index: Mapping[str, Any]) -> dict[str, str]:
    digests = index["sha256"]
    for name in (TOKENS, ENDS, TOKENIZER):
        if not isinstance(digests, dict) or not isinstance(digests.get(name), str):
            raise ValueError(f"sha256 does not tell that of {name}")
    return dict(digests)


def _count(index: Mapping[str, Any], name: str) -> int:
    value = index[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r:.40} and must be a whole number from 1")
    return value


def _confirm(found: PackedText) -> None:
    """Raise ValueError if the counts in `pack.json` differ from those of ends.npy and the tokenizer."""
    ends = numpy.load(found.path / ENDS)
    known = _vocabulary_of(found.path / TOKENIZER)
    for name, stated, counted, file in (
        ("documents", found.documents, len(ends), ENDS),
        ("tokens", found.tokens, int(ends[-1]) if len(ends) else 0, ENDS),
        ("vocabulary", found.vocabulary, found.vocabulary if known is None else known, TOKENIZER),
    ):
        if stated != counted:
            raise ValueError(f"{name} is {stated!r:.40}, and by {file} {counted}")


def _vocabulary_of(path: Path) -> int | None:
    """Count a tokenizer's tokens without the library; None if there is no tokenizer, as for random tokens."""
    content = path.read_bytes()
    found = json.loads(content) if content else {}
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        return None
    tokens, added = model["vocab"], found.get("added_tokens", [])  # {token: number}, or a list of [token, score]
    names = tokens.keys() if isinstance(tokens, dict) else {token for token, _ in tokens}
    return len(names | {token["content"] for token in added})


def unreadable(what: str, path: Path, error: OSError) -> PerfsuiteError:
    return PerfsuiteError(
        f"{what}: cannot read {path}: {error.strerror or error}; make it readable, or name something else"
    )


def index_of(path: Path) -> dict[str, Any] | None:
    """Read `pack.json`; None if it is missing or not an index of packed text, PerfsuiteError if it cannot be read."""
    try:
        found = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise unreadable("data", path / INDEX, error) from None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def is_pack(path: Path) -> bool:
    """Return True if a folder is packed text or contains only files of one, so that replacing it loses nothing else."""
    if index_of(path) is not None:
        return True
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise unreadable("data", path, error) from None
    return TOKENS in names and names <= {TOKENS, ENDS, TOKENIZER, INDEX}


def write(path: Path, tokens: Tokens, ends: Tokens, tokenizer: str, vocabulary: int, about: Mapping[str, Any]) -> None:
    """Write a pack into an empty folder. `pack.json` is written last, so an incomplete folder has none."""
    tokens.astype(dtype_for(vocabulary)).tofile(path / TOKENS)
    numpy.save(path / ENDS, ends.astype(numpy.int64))
    (path / TOKENIZER).write_text(tokenizer, encoding="utf-8")
    index = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "vocabulary": vocabulary,
        "tokens": len(tokens),
        "documents": len(ends),
        "sha256": {name: digest_of_file(path / name) for name in (TOKENS, ENDS, TOKENIZER)},
    }
    (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
