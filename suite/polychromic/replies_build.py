"""Makes the data set of prompts and replies."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from suite.naming import shown
from suite.polychromic import replies


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What was made; `kept` where the file had the same bytes before."""

    examples: int
    prompts: int
    repeated: int
    source: str
    sha256: str
    kept: bool


def build(out: Path, sources: Sequence[Path], *, overwrite: bool) -> Built:
    """Write the examples of these files, or those of chatterbot-corpus, into the file `out`, without repetitions."""
    found = [example for path in sources for example in replies.read(path)] if sources else replies.chatterbot()
    examples = replies.distinct(found)
    content = "".join(replies.lines_of(examples)).encode()
    kept = _write(out, content, overwrite=overwrite)
    return Built(
        examples=len(examples),
        prompts=len({example.prompt for example in examples}),
        repeated=len(found) - len(examples),
        source=", ".join(map(shown, sources)) if sources else "the package chatterbot-corpus",
        sha256=hashlib.sha256(content).hexdigest(),
        kept=kept,
    )


def _write(out: Path, content: bytes, *, overwrite: bool) -> bool:
    """Write the file as a whole or not at all; return whether it had this content before."""
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        if out.is_file() and out.read_bytes() == content:
            return True
        if out.exists() and not overwrite:
            raise PerfsuiteError(f"{shown(out)} exists and has another content; name another file, or add --overwrite")
        if out.is_dir():
            raise PerfsuiteError(f"{shown(out)} is a folder; name a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, out)
    except OSError as error:
        raise PerfsuiteError(f"cannot write {shown(out)}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return False
