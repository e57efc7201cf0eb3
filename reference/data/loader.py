"""Shuffled batches from a DataLoader with default options (leak_cnn, technique 001.6)."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from suite.batching import EpochSampler, check_batches


class Loader:
    """Shuffled batches of a map-style data set whose examples are tuples of tensors.

    batch_size  number of examples; the last batch of an epoch may be shorter, and is dropped if `drop_last`
    workers     number of loading processes, started anew for each epoch in torch's default way; 0: this process loads
    seed        seed of the shuffling; each epoch has its own order

    PerfsuiteError if the data set is too small for a batch.

    Source: leak_cnn, technique 001.6; ups, 002.4; eigenstate_lm, 004.2.
    """

    def __init__(
        self, dataset: Sized, batch_size: int, *, workers: int = 0, seed: int = 0, drop_last: bool = False
    ) -> None:
        check_batches(len(dataset), batch_size, drop_last)
        self.sampler = EpochSampler(len(dataset), seed)
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.sampler,
            num_workers=workers,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(seed),
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.loader)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches of an epoch."""
        self.sampler.epoch = number
        for batch in self.loader:
            yield tuple(batch)

    def close(self) -> None:
        """Do nothing: no workers are left between epochs."""
