"""Sequences of tokens from a file that is mapped into memory (eigenstate_lm, technique 004.10)."""

from pathlib import Path

import numpy
import torch
from torch.utils.data import Dataset

from perfsuite.errors import PerfsuiteError
from suite.packed_text import opened


class PackedTokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each `length` tokens of a pack, one after the other: a map-style data set, and batches at once.

    The pack is held against its digests once, when it is opened. To another process goes its path alone.

    path    of a folder that `perfsuite data pack` made
    length  tokens of a sequence

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
        """(inputs, labels), int64 [length] each: a label is the token after."""
        if not 0 <= row < self.count:
            raise IndexError(f"sequence {row} of {self.count}")
        start = row * self.length
        both = torch.from_numpy(self.pack.row[start : start + self.length + 1].astype(numpy.int64))
        return both[:-1], both[1:]

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels), int64 [B, length] each, of the sequences of these numbers, int64 [B], on their device.

        They cross to a GPU as the file has them, two bytes a token.
        """
        numbers = rows.cpu().numpy()
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.count):
            raise PerfsuiteError(f"rows: {numbers.min()} to {numbers.max()} is out of range; there are {self.count}")
        # numpy has no unsigned words in torch: the same bits go as signed ones.
        every = numbers[:, None] * self.length + numpy.arange(self.length + 1)
        found = self.pack.row[every]
        narrow = found.dtype.itemsize == 2
        both = torch.from_numpy(found.view(numpy.int16) if narrow else found).to(rows.device).long()
        if narrow:
            both &= 0xFFFF
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def __reduce__(self) -> tuple[type, tuple[Path, int]]:
        """Without what is mapped."""
        return type(self), (self.pack.path, self.length)
