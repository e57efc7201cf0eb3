"""Data set of tensors in a file, read row by row. It can be pickled to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from perfsuite.errors import PerfsuiteError
from suite.batching import check_rows


class TensorFile(Dataset[tuple[torch.Tensor, ...]]):
    """Data set of the rows of tensors in a file written by `write`.

    Each process memory-maps the file when it first reads. PerfsuiteError if the file is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._tensors: list[torch.Tensor] | None = None
        self._rows = check_rows(self._opened())

    @staticmethod
    def write(path: str | Path, tensors: Sequence[torch.Tensor]) -> TensorFile:
        """Save tensors with equal numbers of rows, and return their data set. PerfsuiteError if the numbers differ."""
        check_rows(tensors)
        torch.save([t.detach().cpu().contiguous().clone() for t in tensors], path)
        return TensorFile(path)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[row] for tensor in self._opened())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": None}

    def _opened(self) -> list[torch.Tensor]:
        if self._tensors is None:
            try:
                self._tensors = torch.load(self.path, mmap=True, weights_only=True)
            except FileNotFoundError:
                raise PerfsuiteError(
                    f"data: there is no file {self.path}; write it with suite.tensor_file.TensorFile.write"
                ) from None
        return self._tensors
