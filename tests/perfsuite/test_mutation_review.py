"""The reviewed mutants in tests/mutation/equivalent.toml are still where the file says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRIES: list[dict[str, Any]] = [
    entry
    for entries in tomllib.loads((ROOT / "tests/mutation/equivalent.toml").read_text()).values()
    for entry in entries
]


@pytest.mark.parametrize("module", sorted({entry["module"] for entry in ENTRIES}))
def test_each_line_is_still_in_its_module(module: str) -> None:
    text = (ROOT / module).read_text()
    lines = {line.strip() for line in text.splitlines()}
    for entry in ENTRIES:
        if entry["module"] == module:
            assert entry.get("line", "").strip() in {"", *lines}, entry
            assert entry.get("within", "").rpartition(".")[2] in text, entry
