"""Packed text: a folder whose tokens are mapped into memory, with where each document ends and the tokenizer.

tokens.bin      every document's tokens and its end's, one after the other; uint16, or int32 beyond 65,536 tokens
ends.npy        int64: after how many tokens each document ends
tokenizer.json  the tokenizers library's
pack.json       what it is, and the digests of the other three

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
Tokens = numpy.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """A pack that was opened: it is whole, and its bytes are those that were written."""

    path: Path
    vocabulary: int
    tokens: int
    documents: int
    digest: str
    """Of the tokens."""
    recipe: str
    """Of all that it was made from."""

    @cached_property
    def row(self) -> Tokens:
        """The tokens, mapped into memory and read-only."""
        return numpy.memmap(self.path / TOKENS, dtype=dtype_for(self.vocabulary), mode="r")

    def sequences(self, length: int) -> int:
        """How many sequences of so many tokens it has, each of which a token follows.

        PerfsuiteError where it has none.
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
    """Of the tokens in a file."""
    return numpy.dtype("<u2" if vocabulary <= WORD else "<i4")


def opened(path: str | Path) -> PackedText:
    """The pack in a folder; PerfsuiteError, in one line, where there is none or it is damaged."""
    path = Path(path)
    made, again = "make it with `perfsuite data pack`", "make it again with `perfsuite data pack --overwrite`"
    if not path.is_dir():
        raise PerfsuiteError(f"data: {path} is no folder of packed text; {made}")
    index = index_of(path)
    if index is None:
        raise PerfsuiteError(f"data: {path} holds no packed text ({INDEX} is missing or damaged); {made}")
    if index.get("version") != VERSION:
        raise PerfsuiteError(f"data: {path} is of version {index.get('version')}, not {VERSION}; {again}")
    try:
        found = PackedText(
            path=path,
            vocabulary=int(index["vocabulary"]),
            tokens=int(index["tokens"]),
            documents=int(index["documents"]),
            digest=str(index["sha256"][TOKENS]),
            recipe=str(index["recipe"]),
        )
        bytes_told = found.tokens * dtype_for(found.vocabulary).itemsize
        bytes_found = (path / TOKENS).stat().st_size
        if bytes_found != bytes_told:
            raise PerfsuiteError(f"data: {path / TOKENS} has {bytes_found} bytes and not {bytes_told}; {again}")
        for name, digest in index["sha256"].items():
            if digest_of_file(path / name) != digest:
                raise PerfsuiteError(f"data: {path / name} is damaged: it is not what was written; {again}")
    except (KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"data: {path / INDEX} is damaged ({error}); {again}") from None
    except OSError as error:
        raise PerfsuiteError(f"data: {path} is damaged: {error.strerror or error}; {again}") from None
    return found


def index_of(path: Path) -> dict[str, Any] | None:
    """What `pack.json` says; None where it says nothing of packed text."""
    try:
        found = json.loads((path / INDEX).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def write(path: Path, tokens: Tokens, ends: Tokens, tokenizer: str, vocabulary: int, about: Mapping[str, Any]) -> None:
    """Fill an empty folder; `pack.json` comes last, so that there is none in one that is not whole."""
    tokens.astype(dtype_for(vocabulary)).tofile(path / TOKENS)
    numpy.save(path / ENDS, ends.astype(numpy.int64))
    (path / TOKENIZER).write_text(tokenizer)
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
