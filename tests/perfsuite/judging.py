"""Helpers of the tests of `perfsuite judge`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scratch import ROOT

from perfsuite.judge import verdict
from perfsuite.judge.process import Nursery
from perfsuite.judge.verdict import Options


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def judged(nursery: Nursery, reference: Path, text: str, **options: Any) -> verdict.Verdict:
    """Return the verdict on a candidate with this text."""
    path = reference.with_name("own.py")
    path.write_text(f"REFERENCE_FILE = {str(reference)!r}\n{text}")
    asked = Options(**{"device": "cpu", "seconds": 0.5, "limit_s": 3.0, "compiled": False, **options})
    (found,) = verdict.judge(reference, [path], asked, nursery=nursery)
    return found


def documented() -> set[str]:
    """Return the first column of the tables in the judge's document."""
    lines = (ROOT / "docs/judge.md").read_text().splitlines()
    return {line.split("|")[1].strip() for line in lines if "|" in line}
