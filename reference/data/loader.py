"""Shuffled batches from torch's DataLoader as it comes (leak_cnn, technique 001.6)."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from suite.batching import EpochSampler, check_batches


class Loader:
    """Shuffled batches of a map-style data set, each example a tuple of tensors.

    batch_size  examples; the last batch of an epoch may be shorter, or is left out if `drop_last`
    workers     processes that load; with 0 this one does. They are started as torch does, and anew at each epoch.
    seed        of the shuffling; each epoch has an order of its own

    PerfsuiteError where the data set does not make a batch.

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
        """Batches an epoch."""
        return len(self.loader)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of an epoch."""
        self.sampler.epoch = number
        for batch in self.loader:
            yield tuple(batch)

    def close(self) -> None:
        """Nothing is left to end between epochs."""
