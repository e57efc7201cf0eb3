"""Top-level pytest configuration: the sides' packages are found from the root, wherever pytest is started."""

from __future__ import annotations

pytest_plugins = ["perfsuite.plugin"]


def pytest_configure() -> None:
    """float32 is float32 in a convolution, too: torch lets cuDNN round it to TF32 unless told otherwise."""
    import torch

    torch.backends.cudnn.allow_tf32 = False
