"""What the tests of several domains share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "interpreted: runs kernels in Triton's interpreter; skipped where there is none."
    )


def pytest_collection_finish() -> None:
    """What torch and the collection have made stays: a test that collects garbage need not pass over it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreted") is not None:
        from optimized.kernels import triton_reason  # imports Triton, which then must know that it is to interpret

        if triton_reason() is not None or torch.cuda.is_available():
            pytest.skip("needs Triton's interpreter")


FENCE = 16
"""Elements before and behind: a multiple of every alignment that matters."""


class Fences:
    """Tensors that lie within longer ones, so that a store beyond an end is seen instead of lost."""

    def __init__(self) -> None:
        self.wholes: list[tuple[torch.Tensor, int]] = []

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values and strides with a fence on either side."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        whole = torch.full((extent + 2 * FENCE,), 7, dtype=tensor.dtype, device=tensor.device)
        self.wholes.append((whole, extent))
        return whole.as_strided(tensor.shape, tensor.stride(), FENCE).copy_(tensor)

    def intact(self) -> bool:
        """Whether no fence was written to; NaN counts as written."""
        return all(bool((w[:FENCE] == 7).all() and (w[FENCE + n :] == 7).all()) for w, n in self.wholes)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Fences:
    """Fences around whatever is allocated by `torch.empty`, `empty_like` and `zeros_like` from here on."""
    made = Fences()

    def fenced(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **options: made.around(allocate(*arguments, **options).detach())

    for name in ("empty", "empty_like", "zeros_like"):
        monkeypatch.setattr(torch, name, fenced(getattr(torch, name)))
    return made


@contextmanager
def _no_host_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_host_sync() -> Callable[[], AbstractContextManager[None]]:
    """A context in which an operation that waits for the GPU raises RuntimeError."""
    return _no_host_sync
