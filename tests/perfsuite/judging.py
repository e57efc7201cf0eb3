"""Helpers of the tests of `perfsuite judge`."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scratch import ROOT

from perfsuite.judge import problem, verdict
from perfsuite.judge.process import Nursery
from perfsuite.judge.trial import CandidateProof, Served, prove
from perfsuite.judge.verdict import Options

REFERENCE = """
    import torch


    class Model(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            y = self.linear(x)
            return torch.stack([row * torch.sigmoid(row) for row in y])


    def get_inputs():
        return [torch.rand(16, 64)]


    def get_init_inputs():
        return [64]
"""
HONEST = """
    import os, threading, time
    import torch
    from torch.nn import functional


    class ModelNew(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)
            self.calls = 0
            self.kept = {}

        def right(self, x):
            return functional.silu(self.linear(x))

        def forward(self, x):
            self.calls += 1
            return self.right(x)
"""


def candidate(body: str, before: str = "") -> str:
    """Return a candidate whose forward pass has this body; `before` runs when the file is imported."""
    own = textwrap.indent(textwrap.dedent(body).strip(), 12 * " ")
    text = textwrap.dedent(HONEST.replace("            return self.right(x)\n", own.removeprefix(0 * " ") + "\n"))
    return textwrap.dedent(before) + "\n" + text


PIPE = """
    import sys

    def held(name):
        frame = sys._getframe()
        while name not in frame.f_locals:
            frame = frame.f_back
        return frame.f_locals[name]

    def pipe():
        return held("replies_to")

    def memory():
        return held("served").memory.file
"""
"""Code that finds the descriptors in the frames of its callers."""


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


def proven(nursery: Nursery, reference: Path, text: str) -> CandidateProof:
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
