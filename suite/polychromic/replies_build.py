"""Builds the data set of prompts and replies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from perfsuite.report import files
from suite.naming import shown
from suite.polychromic import replies


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """Summary of a data set that was written. `kept` is True if the file already had the same bytes."""

    examples: int
    prompts: int
    repeated: int
    source: str
    sha256: str
    kept: bool


def build(out: Path, sources: Sequence[Path], *, overwrite: bool) -> Built:
    """Write the distinct examples of `sources`, or of chatterbot-corpus, into the file `out`."""
    found = [example for path in sources for example in replies.read(path)] if sources else replies.chatterbot()
    examples = replies.distinct(found)
    content = "".join(replies.lines_of(examples))
    kept = _write(out, content, overwrite=overwrite)
    return Built(
        examples=len(examples),
        prompts=len({example.prompt for example in examples}),
        repeated=len(found) - len(examples),
        source=", ".join(map(shown, sources)) if sources else "the package chatterbot-corpus",
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        kept=kept,
    )


def _write(out: Path, content: str, *, overwrite: bool) -> bool:
    """Write the file completely or not at all. Return True if it already had this content."""
    try:
        if out.is_file() and out.read_bytes() == content.encode():
            return True
    except OSError as error:
        raise PerfsuiteError(f"cannot read {shown(out)}: {error.strerror or error}") from None
    if out.exists() and not overwrite:
        raise PerfsuiteError(f"{shown(out)} exists and has another content; name another file, or add --overwrite")
    if out.is_dir():
        raise PerfsuiteError(f"{shown(out)} is a folder; name a file")
    files.write(out, content)
    return False
