"""Shuffled batches of a data split, gathered on the host and copied to the device one by one (leak_cnn)."""

from collections.abc import Iterator, Sequence

import torch

from suite.batching import bounds, check_batches, check_rows, permutation


class ResidentDataset:
    """Shuffled batches of a split in the host's memory.

    tensors     one or more on the host, each with one row per example
    batch_size  number of rows; the last batch of an epoch may be shorter, and is dropped if `drop_last`
    device      device of the batches
    seed        seed of the shuffling; each epoch has its own order

    PerfsuiteError if the tensors differ in their number of rows, or if there are too few rows for a batch.

    Source: ours, for leak_cnn.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        batch_size: int,
        device: torch.device | str,
        *,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.rows = check_rows(tensors)
        check_batches(self.rows, batch_size, drop_last)
        self.tensors, self.device, self.seed = tuple(tensors), device, seed
        self.bounds = bounds(self.rows, batch_size, drop_last)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.bounds)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield an epoch's batches: a tuple with the rows of each tensor, valid until the next one."""
        order = permutation(self.rows, self.seed, number, "cpu")
        for start, end in self.bounds:
            yield tuple(tensor[order[start:end]].to(self.device) for tensor in self.tensors)
