"""Escaping of untrusted text for GitHub's Markdown: the text is shown literally and has no effect."""

from __future__ import annotations

import re

from perfsuite.errors import printable

BREAK = "&#8203;"
"""Zero-width space, which keeps GitHub from recognising a mention, reference, URL, emoji or link."""

CODE = re.compile(r"[^`|<>]*(?:::|://)[^`|<>]*")
"""Words that are shown as code: ids, so that they can be copied, and URLs, so that they do not become links."""

SPECIAL = re.compile(
    r"[\\`*\[\]|~&<>$@#]|(?<![^\W_])_|_(?![^\W_])|GH-|www(?=\.)|:(?=//)|:(?!\d\d:)(?=[\w+-]+:)", re.IGNORECASE
)
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "#": rf"\#{BREAK}"}
ESCAPED = r"\`*[]|~_"


def escape(text: str, most: int | None = None) -> str:
    """Return the text as one line of Markdown, for use inside or outside a table cell.

    The result has no markup, no link, no emoji and no mention of a person or an issue. Non-printable characters appear
    as Python escapes. A text longer than `most` characters is cut there and ends with "…".
    """
    if most is not None and len(text) > most:
        text = f"{text[:most]}…"
    line = " ".join(_word(printable(word)) for word in text.split())
    return re.sub(r"^(?:(\d+)([.)])|([-+=]))", r"\1\\\2\3", line)  # would begin a list or a rule


def _word(word: str) -> str:
    core = word.rstrip(",;:.")
    if CODE.fullmatch(core):
        return f"`{core}`{word[len(core) :]}"
    return SPECIAL.sub(_special, word)


def _special(found: re.Match[str]) -> str:
    text = found[0]
    if text in ENTITIES:
        return ENTITIES[text]
    return f"\\{text}" if text in ESCAPED else f"{text}{BREAK}"
