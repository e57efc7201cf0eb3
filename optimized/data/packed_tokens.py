"""Sequences of tokens from a memory-mapped file (eigenstate_lm, technique 004.10)."""

from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset

from perfsuite.errors import PerfsuiteError
from suite.packed_text import opened


class PackedTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Map-style data set of a pack's consecutive sequences of `length` tokens, which also returns batches.

    Opening the pack verifies its digests. Pickling sends only the path and the length, so each process opens and
    verifies the pack itself.

    path    folder that `perfsuite data pack` wrote
    length  number of tokens in a sequence

    PerfsuiteError if the pack is missing or damaged, or is too short for a sequence of that length.

    Source: eigenstate_lm, technique 004.10.
    """

    def __init__(self, path: str | Path, length: int) -> None:
        self.pack = opened(path)
        self.length = length
        self.count = self.pack.sequences(length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [length] each; a label is the token after its input."""
        if not 0 <= row < self.count:
            raise IndexError(f"sequence {row} of {self.count}")
        start = row * self.length
        both = torch.from_numpy(self.pack.row[start : start + self.length + 1].astype(numpy.int64))
        return both[:-1], both[1:]

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [B, length] each, on the device of `rows`, int64 [B]: the sequences' indices.

        Tokens are copied to a GPU as the file stores them: two bytes each, or four for a vocabulary above 65,536.
        PerfsuiteError if an index is out of range.
        """
        numbers = rows.cpu().numpy()
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.count):
            raise PerfsuiteError(f"rows: {numbers.min()} to {numbers.max()} is out of range; there are {self.count}")
        # uint16 is sent as int16 with the same bits, because PyTorch has few CUDA operations on uint16.
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
