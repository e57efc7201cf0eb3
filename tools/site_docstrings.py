"""An extension of griffe that renders the docstrings' lists of parameters as tables.

A list of parameters has this form:

name    description, which may
        continue on further lines
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"(?P<name>[\w*.]+(?:, [\w*.]+)*)\s{2,}(?P<text>\S.*)")


class ParameterTables(Extension):
    """Rewrites each docstring when it is loaded."""

    def on_object(self, *, obj: Object, **given: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_tables(obj.docstring.value)


def with_tables(text: str) -> str:
    """Return a docstring whose lists of parameters are Markdown tables."""
    return "\n\n".join(_table(part) or part for part in text.split("\n\n"))


def _table(paragraph: str) -> str:
    """Return the table of a list of parameters; empty for any other paragraph."""
    rows: list[list[str]] = []
    for line in paragraph.splitlines():
        entry = ENTRY.fullmatch(line)
        if entry:
            rows.append([entry["name"], entry["text"]])
        elif rows and line.startswith(" "):
            rows[-1][1] += f" {line.strip()}"
        else:
            return ""
    cells = "".join(f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n" for name, text in rows)
    return f"| parameter | meaning |\n| --- | --- |\n{cells}" if rows else ""
