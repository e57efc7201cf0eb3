"""Base classes of the dispatch modes that observe calls."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class PlainMode(TorchDispatchMode):
    """Dispatch mode whose first operation does not import torch._dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that import takes two seconds, and its wrapper slows each operation

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it


class OutsideCompiled(PlainMode):
    """Dispatch mode that does not apply inside compiled functions."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile traces into the mode
