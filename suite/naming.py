"""Names of files in messages: in one line, whatever bytes they are of."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: str | Path) -> str:
    """A path with what cannot be printed escaped: `a\\nb`, `\\xff`."""
    try:
        return escaped(os.fsencode(path).decode("utf-8", "backslashreplace"))
    except UnicodeEncodeError:  # a lone surrogate, which no file's name has
        return escaped(str(path))


def escaped(text: str) -> str:
    """Text with line breaks, control characters and lone surrogates escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
