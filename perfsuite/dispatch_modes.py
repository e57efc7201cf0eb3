"""Bases of the dispatch modes by which calls are watched."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class PlainMode(TorchDispatchMode):
    """A dispatch mode whose first operation does not import torch._dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else that takes two seconds, and each operation pays for its wrapper

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it


class OutsideCompiled(PlainMode):
    """A mode that leaves compiled functions as they are: they run outside of it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would trace into the mode
