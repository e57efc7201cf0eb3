"""Fixtures for all tests of `suite`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training import Toy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with tensors of a few elements, more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary folder, so that no test writes into the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Toy:
    return Toy(tmp_path)
