"""Fixtures and hooks shared by the tests of several domains."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from scale import FULLY, in_full


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "interpreted: runs kernels in Triton's interpreter; skipped where there is none."
    )


SLOW_TO_COMPILE = {
    # C++ is compiled for each of them:
    "compiled_function::contexts",
    "compiled_function::effects",
    "compiled_function::gradients[float32]",
    "compiled_function::outside",
    "fullgraph_model::contexts",
    "fullgraph_model::effects",
    "fullgraph_model::gradients[float32]",
    "fullgraph_model::outside",
    # Two kernels, whose loops are unrolled, for 20 s:
    "eigenstate_scan::kernels[sm_90]",
    # Kernels, or variants of them, that another pair compiles:
    "batched_generation::kernels[sm_90]",
    "fused_adamw_cnn::kernels[sm_90]",
    "fused_lora_without_dropout::kernels[sm_90]",
    "lior_and_speed_diagonal::kernels[sm_90]",
    "muon_float32::kernels[sm_90]",
    "retrieval::kernels[sm_90]",  # and `retrieval_diagonal` takes a third of its time
    "retrieval_batched::kernels[sm_90]",
    "rotor_cache_turning::kernels[sm_90]",
    "set_policy_loss_bfloat16::kernels[sm_90]",
}
"""Items that `make test` leaves out on a CPU, because compiling with empty caches takes long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not in_full():
        for item in items:
            if item.nodeid.partition("::")[2] in SLOW_TO_COMPILE:
                item.add_marker(FULLY)
    if hasattr(config, "workerinput"):
        # xdist gives neighbours to one worker, so only that one starts the server whose forks compile kernels.
        items.sort(key=lambda item: not item.name.startswith("kernels["))


def pytest_collection_finish() -> None:
    """Freeze the objects of torch and the collection, so that garbage collections in tests need not traverse them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreted") is not None:
        from optimized.kernels import triton_reason  # imports Triton, which must already be set to interpret

        if triton_reason() is not None or torch.cuda.is_available():
            pytest.skip("needs Triton's interpreter")


FENCE = 16
"""Number of elements in a fence: a multiple of every alignment that matters."""


class Fences:
    """Tensors inside longer ones, so that a store beyond an end is detected."""

    def __init__(self) -> None:
        self.wholes: list[tuple[torch.Tensor, int]] = []

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor, with its values and strides, between two fences."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        whole = torch.full((extent + 2 * FENCE,), 7, dtype=tensor.dtype, device=tensor.device)
        self.wholes.append((whole, extent))
        return whole.as_strided(tensor.shape, tensor.stride(), FENCE).copy_(tensor)

    def intact(self) -> bool:
        """Return whether no fence was overwritten; NaN counts as overwritten."""
        return all(bool((w[:FENCE] == 7).all() and (w[FENCE + n :] == 7).all()) for w, n in self.wholes)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Fences:
    """Put fences around every tensor that `torch.empty`, `empty_like` and `zeros_like` allocate from now on."""
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
    """Return the factory of a context in which an operation that waits for the GPU raises RuntimeError."""
    return _no_host_sync
