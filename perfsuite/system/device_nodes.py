"""Check in microseconds whether this machine may have a usable GPU, by its device nodes and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os

NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def exist() -> bool:
    """Return whether this machine has an NVIDIA device node."""
    return any(os.path.exists(node) for node in NODES)


def are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1", "NoDevFiles")


def are_visible() -> bool:
    """Return whether there is a device node that CUDA_VISIBLE_DEVICES does not hide."""
    return exist() and not are_hidden()
