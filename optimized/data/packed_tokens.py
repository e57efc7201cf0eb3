"""Sequences of tokens from a file that is mapped into memory (eigenstate_lm, technique 004.10)."""

from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset

from perfsuite.errors import PerfsuiteError
from suite.packed_text import opened


class PackedTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Splits a pack into consecutive sequences of `length` tokens: a map-style data set, which also makes batches.

    Opening the pack verifies its digests. Pickling sends only the path and the length, so that each process opens and
    verifies the pack itself.

    path    a folder that `perfsuite data pack` made
    length  number of tokens of a sequence

    PerfsuiteError where the pack is damaged, or has no sequence of that length.

    Source: eigenstate_lm, technique 004.10.
    """

    def __init__(self, path: str | Path, length: int) -> None:
        self.pack = opened(path)
        self.length = length
        self.count = self.pack.sequences(length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [length] each: each label is the next token."""
        if not 0 <= row < self.count:
            raise IndexError(f"sequence {row} of {self.count}")
        start = row * self.length
        both = torch.from_numpy(self.pack.row[start : start + self.length + 1].astype(numpy.int64))
        return both[:-1], both[1:]

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [B, length] each, for the sequences with the indices `rows`, int64 [B], on
        their device.

        Tokens are copied to a GPU in the file's width: two bytes each, or four for a vocabulary above 65,536.
        """
        numbers = rows.cpu().numpy()
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.count):
            raise PerfsuiteError(f"rows: {numbers.min()} to {numbers.max()} is out of range; there are {self.count}")
        # Sent as int16 with the same bits, because CUDA has few operations on uint16.
        every = numbers[:, None] * self.length + numpy.arange(self.length + 1)
        found = self.pack.row[every]
        narrow = found.dtype.itemsize == 2
        both = torch.from_numpy(found.view(numpy.int16) if narrow else found).to(rows.device).long()
        if narrow:
            both &= 0xFFFF
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def __reduce__(self) -> tuple[type, tuple[Path, int]]:
        """Pickle the path and the length, not the mapped file."""
        return type(self), (self.pack.path, self.length)
