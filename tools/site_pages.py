"""A hook of mkdocs for pages outside docs/, links between the documents, and the help of the commands.

The documents are written to be read in the repository, with links by path. On the site, a link to another page of the
site points to that page, and a link to any other file of the repository becomes its name.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from perfsuite.cli import main  # noqa: E402

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "baselines/README.md": "baselines.md"}
"""File outside docs/ → the page that it becomes."""
LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^()\s]+)\)")
COMMANDS = "<!-- commands -->"
"""Marker that is replaced by the help of every command."""
CODE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with its links rewritten."""
    uri = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == uri), f"docs/{uri}")
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda match: _link(match, source, uri), text) for text in parts[::2]]
    return "".join(parts).replace(COMMANDS, _commands())


def _link(match: re.Match[str], source: str, uri: str) -> str:
    """Return a link of the file `source` as it must be on the page `uri`."""
    target, _, anchor = match["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return match[0]
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not os.path.exists(ROOT / place):
        return match[0]  # mkdocs warns about it
    page = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else "")
    if not page:
        text = match["text"][1:-1]
        return text if place in text else f"{text} (`{place}`)"
    relative = posixpath.relpath(page, posixpath.dirname(uri) or ".")
    return f"{match['text']}({relative}{'#' * bool(anchor)}{anchor})"


def _commands() -> str:
    """Return the help of every command of the installed package, one section per command."""
    above = click.Context(main, info_name="perfsuite")
    sections = []
    for name in main.list_commands(above):
        command = main.get_command(above, name)
        if command is None or command.context_settings.get("allow_extra_args"):  # a command that cannot be loaded
            continue
        text = click.Context(command, info_name=name, parent=above, max_content_width=100).get_help()
        sections.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)
