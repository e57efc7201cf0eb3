"""Helpers of the tests of `perfsuite judge`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scratch import ROOT

from perfsuite.judge import problem, verdict
from perfsuite.judge.process import Nursery
from perfsuite.judge.trial import Proof, Served, prove
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


def proven(nursery: Nursery, reference: Path, text: str) -> Proof:
    """Prove a candidate with this text, without timing it."""
    path = reference.with_name("own.py")
    path.write_text(text)
    loaded = problem.load(reference, "cpu", 5)
    with contextlib.closing(Served.start(nursery, loaded, path, problem.CANDIDATE, 10.0)) as served:
        return prove(loaded, served)


def documented() -> set[str]:
    """Return the first column of the tables in the judge's document."""
    lines = (ROOT / "docs/judge.md").read_text().splitlines()
    return {line.split("|")[1].strip() for line in lines if "|" in line}
