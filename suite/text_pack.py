"""Builds packed text: files → byte-level BPE → tokens in one file with an index.

The output depends only on the files' contents, their order and the recipe: equal inputs give equal bytes. Finished
parts are stored next to the output folder until it is complete, so that a killed run can be resumed.
source: eigenstate_lm, technique 004.10
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import probe
from suite import json_lines, packed_text, text
from suite.building import Parts, Watcher, digest_of, parts_beside
from suite.packed_text import PackedText

BLOCK_BYTES = 4 << 20
"""Bytes of text per part, which is encoded and stored as a unit while the pack is built."""
NAMED = 10
"""Maximum number of skipped files that are named; the others are only counted."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines a pack."""

    folder: Path | None = None
    """Folder of texts, or a JSON-lines file; None: Python's standard library on this machine."""
    field: str | None = None
    """Field of a JSON line that contains the text; None: JSON-lines files in a folder are ignored."""
    vocabulary: int = 50257
    """Vocabulary size of the tokenizer that is trained on the texts."""
    tokenizer: Path | None = None
    """Tokenizer file of the tokenizers library, to use instead of training one."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A finished pack."""

    pack: PackedText
    source: str
    kept: bool
    """True if the pack existed already."""


@dataclass
class _Found:
    """Text files, sorted by path, each with its digest, size in bytes and number of documents."""

    root: Path
    field: str | None = None
    paths: list[Path] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    documents: list[int] = dataclasses.field(default_factory=list)
    left_out: int = 0
    """Number of files that are empty or not UTF-8."""
    unreadable: int = 0

    @property
    def has_json_lines(self) -> bool:
        return self.field is not None and any(path.suffix == json_lines.SUFFIX for path in self.paths)

    @property
    def left_out_text(self) -> str:
        kinds = ((self.left_out, "not UTF-8 or empty"), (self.unreadable, "unreadable"))
        return ", ".join(f"{count} {kind}" for count, kind in kinds if count)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each range of files that are encoded together."""
        first = size = 0
        for i, more in enumerate(self.sizes):
            if size and size + more > BLOCK_BYTES:
                yield first, i
                first, size = i, 0
            size += more
        yield first, len(self.sizes)

    def texts(self, first: int, end: int) -> Iterator[str]:
        for path, digest in zip(self.paths[first:end], self.digests[first:end], strict=True):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise packed_text.unreadable("data", path, error) from None
            if hashlib.sha256(content).hexdigest() != digest:
                raise PerfsuiteError(f"data: {path} was changed while it was read; run the command again")
            yield from self.documents_of(path, content)

    def documents_of(self, path: Path, content: bytes) -> list[str]:
        """Return the non-empty documents of a file; UnicodeDecodeError if it is not UTF-8."""
        decoded = content.decode()
        if self.field is not None and path.suffix == json_lines.SUFFIX:
            return json_lines.documents(decoded, path, self.field)
        return [decoded] if decoded.strip() else []


def pack(out: Path, recipe: Recipe, watcher: Watcher, *, overwrite: bool = False, cached: bool = False) -> Packed:
    """Build the pack in the folder `out`; PerfsuiteError if that fails, or if `out` exists and is not this pack.

    cached  whether `out` is in the cache, so that the user did not name it: messages then say that it may be deleted,
            and that --cache selects another folder
    """
    again = f"delete {out}; it is made again" if cached else None
    elsewhere = "name another folder with --cache" if cached else "name another folder"
    tokenizers = text.library()
    text.check_vocabulary(recipe.vocabulary)
    searched, recipe = _searched(recipe)
    tokenizer = None if recipe.tokenizer is None else _opened_tokenizer(tokenizers, recipe.tokenizer)
    _refuse(out, overwrite, again, elsewhere)
    try:
        with parts_beside(out) as parts:
            found = _read(searched, recipe.field, watcher)
            key = digest_of(
                {
                    "version": packed_text.VERSION,
                    "texts": found.digests,
                    "vocabulary": None if tokenizer else recipe.vocabulary,
                    "tokenizer": None if tokenizer is None else hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
                    "library": tokenizers.__version__,
                    **({"field": found.field} if found.has_json_lines else {}),
                }
            )
            index = None if overwrite else packed_text.index_of(out)
            if index is None:
                _made(out, recipe, found, tokenizer, key, parts, watcher)
            elif index.get("recipe") != key:
                raise PerfsuiteError(
                    f"{out} exists and is packed from other texts or with another tokenizer; "
                    f"{again or 'name another folder, or give --overwrite'}"
                )
            parts.clear()
        left = f" (left out: {found.left_out_text})" if found.left_out_text else ""
        source = f"{len(found.paths)} files of {found.root}{left}"
        return Packed(pack=packed_text.opened(out, again), source=source, kept=index is not None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write {out}: {reason}; {elsewhere}, or make room") from None


def _refuse(out: Path, overwrite: bool, again: str | None, elsewhere: str) -> None:
    """Raise PerfsuiteError if `out` cannot be built, before minutes are spent on it.

    It cannot if it is not packed text, if it is damaged and must not be overwritten, or if its parent is not writable.
    """
    if out.name in ("", ".."):
        raise PerfsuiteError(f"{out} cannot be replaced as a whole; name a folder in it")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            if not out.is_dir() or not packed_text.is_pack(out):
                raise PerfsuiteError(f"{out} exists and is no packed text; {elsewhere}, or move it away")
            if not overwrite:
                packed_text.opened(out, again)
        probe(out.parent)
    except OSError as error:
        raise PerfsuiteError(f"cannot write {out}: {error.strerror or error}; {elsewhere}") from None


def _opened_tokenizer(tokenizers: Any, path: Path) -> Any:
    try:
        if not path.is_file():
            raise PerfsuiteError(f"tokenizer: there is no file {path}; name a tokenizer.json of the tokenizers library")
        content = path.read_bytes()
    except OSError as error:
        raise packed_text.unreadable("tokenizer", path, error) from None
    try:
        found = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises a bare Exception
        reason = " ".join(str(error).split())
        raise PerfsuiteError(f"tokenizer: {path} is none of the tokenizers library: {reason}") from None
    if found.token_to_id(text.END) != text.END_ID:
        raise PerfsuiteError(
            f"tokenizer: {path} has no token {text.END} of number {text.END_ID}, by which documents end; "
            "take one that `perfsuite data pack` made"
        )
    return found


def _searched(recipe: Recipe) -> tuple[text.Searched, Recipe]:
    """Return the text files and the recipe.

    For a single JSON-lines file, the recipe's field defaults to "text".
    """
    folder = recipe.folder
    if folder is None or (recipe.field is None and folder.suffix != json_lines.SUFFIX):
        return text.searched(folder), recipe
    if os.path.isfile(folder) and folder.suffix == json_lines.SUFFIX:
        return text.Searched(folder.parent, [folder], []), dataclasses.replace(recipe, field=recipe.field or "text")
    return text.searched(folder, (*text.SUFFIXES, json_lines.SUFFIX)), recipe


def _read(searched: text.Searched, field: str | None, watcher: Watcher) -> _Found:
    root, paths, unreadable = searched
    found = _Found(root, field)

    def leave_out(path: Path, reason: str) -> None:
        if found.left_out + found.unreadable <= NAMED:
            watcher.say(f"left out: {path.relative_to(root)}: {reason}")

    for path, error in unreadable:
        found.unreadable += 1
        leave_out(path, error.strerror or str(error))
    for i, path in enumerate(paths):
        watcher.progress("reading", i, len(paths))
        try:
            content = path.read_bytes()
            documents = len(found.documents_of(path, content))
            reason = "empty"
        except UnicodeDecodeError:
            documents, reason = 0, "not UTF-8"
        except OSError as error:
            found.unreadable += 1
            leave_out(path, error.strerror or str(error))
            continue
        if documents:
            found.documents.append(documents)
            found.paths.append(path)
            found.digests.append(hashlib.sha256(content).hexdigest())
            found.sizes.append(len(content))
            continue
        found.left_out += 1
        leave_out(path, reason)
    if not found.paths:
        seen = f" (left out: {found.left_out_text})" if found.left_out_text else ""
        lines = "" if field is not None else f", or, with --field, {json_lines.SUFFIX} files"
        raise PerfsuiteError(f"data: no text under {root}{seen}; it must hold {', '.join(text.SUFFIXES)} files{lines}")
    return found


def _made(out: Path, recipe: Recipe, found: _Found, tokenizer: Any, key: str, parts: Parts, watcher: Watcher) -> None:
    tokenizer = tokenizer or _trained(recipe, found, key, parts, watcher)
    blocks: list[tuple[Any, Any]] = []
    for first, end in found.blocks():
        watcher.progress("packing", first, len(found.paths))
        blocks.append(_block(tokenizer, found, first, end, key, parts))
    watcher.progress("packing", len(found.paths), len(found.paths))
    tokens = numpy.concatenate([block for block, _ in blocks])
    ends = numpy.cumsum(numpy.concatenate([lengths for _, lengths in blocks]))
    whole, old = parts.folder / "part-whole", parts.folder / "part-old"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    about = {"recipe": key, "library": text.library().__version__}
    packed_text.write(whole, tokens, ends, tokenizer.to_str(), int(tokenizer.get_vocab_size()), about)
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(out, old)
    os.replace(whole, out)


def _trained(recipe: Recipe, found: _Found, key: str, parts: Parts, watcher: Watcher) -> Any:
    name = f"part-tokenizer-{key[:32]}"
    kept = parts.load(name)
    if kept is not None:
        return text.library().Tokenizer.from_str(bytes(kept).decode())

    def texts() -> Iterator[str]:
        for i, content in enumerate(found.texts(0, len(found.paths))):
            watcher.progress("learning", i, sum(found.documents))
            yield content

    made = text.trained(texts(), recipe.vocabulary)
    parts.save(name, numpy.frombuffer(made.to_str().encode(), dtype=numpy.uint8))
    return made


def _block(tokenizer: Any, found: _Found, first: int, end: int, key: str, parts: Parts) -> tuple[Any, Any]:
    """Return (tokens of the files `first` to `end` - 1, number of tokens of each document)."""
    name = f"part-{{}}-{key[:32]}-{first}-{end}"
    kept: Sequence[Any] = [parts.load(name.format(what)) for what in ("tokens", "lengths")]
    if any(k is None for k in kept) or len(kept[1]) != sum(found.documents[first:end]) or len(kept[0]) != kept[1].sum():
        rows = list(text.encode(tokenizer, found.texts(first, end)))
        kept = [
            numpy.concatenate([numpy.asarray(row, dtype=numpy.int32) for row in rows]),
            numpy.array([len(row) for row in rows], dtype=numpy.int64),
        ]
        parts.save(name.format("tokens"), kept[0])
        parts.save(name.format("lengths"), kept[1])
    return kept[0], kept[1]
