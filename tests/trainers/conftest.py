"""Fixtures of every trainer's tests."""

import pytest
import torch
from scale import FULL

from optimized.compilation import compiled_function


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: matrix products this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quickly_compiled(monkeypatch):
    """In a quick run, only trace functions; the C++ compiler would take seconds for each."""
    if not FULL:
        monkeypatch.setattr(compiled_function, "_inductor", lambda graph, inputs, options=None: graph)
