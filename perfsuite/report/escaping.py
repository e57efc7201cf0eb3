"""Text of others in GitHub's Markdown: it shows as it is, and does nothing."""

from __future__ import annotations

import re

from perfsuite.errors import printable

BREAK = "&#8203;"
"""Zero-width space, behind which GitHub sees no mention, reference, address, emoji or link."""

CODE = re.compile(r"[^`|<>]*(?:::|://)[^`|<>]*")
"""Words that show as code: ids, so that they can be copied, and addresses, so that they are no links."""

SPECIAL = re.compile(
    r"[\\`*\[\]|~&<>$@#]|(?<![^\W_])_|_(?![^\W_])|GH-|www(?=\.)|:(?=//)|:(?!\d\d:)(?=[\w+-]+:)", re.IGNORECASE
)
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "#": rf"\#{BREAK}"}
ESCAPED = r"\`*[]|~_"


def escape(text: str, most: int | None = None) -> str:
    """Return the text in one line of Markdown, in or outside of a table cell: no markup, no link, no mention of a
    person, an issue or an emoji. Characters that cannot be printed show as Python escapes them.

    A text is cut after `most` characters, and ends with "…".
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
