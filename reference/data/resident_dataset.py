"""Batches gathered on the host and copied to the device, one by one (leak_cnn)."""

from collections.abc import Iterator, Sequence

import torch

from suite.batching import bounds, check_batches, check_rows, permutation


class ResidentDataset:
    """Shuffled batches of a split that lies in the host's memory.

    tensors     one or more, with a row for every example
    batch_size  rows; the last batch of an epoch may be shorter, or is left out if `drop_last`
    device      where batches go
    seed        of the shuffling; each epoch has an order of its own

    PerfsuiteError where the tensors' rows differ in number, or do not make a batch.

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
        """Batches an epoch."""
        return len(self.bounds)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of an epoch, in the tensors' order; each is valid until the next one is asked for."""
        order = permutation(self.rows, self.seed, number, "cpu")
        for start, end in self.bounds:
            yield tuple(tensor[order[start:end]].to(self.device) for tensor in self.tensors)
