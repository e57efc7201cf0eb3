"""Fixtures of every trainer's tests."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
