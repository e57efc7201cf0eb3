"""Shuffled batches from persistent workers, prefetched into pinned memory (leak_cnn, technique 001.6)."""

import multiprocessing
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from perfsuite.errors import PerfsuiteError
from suite.batching import EpochSampler, check_batches

# The fork server imports torch once, so a worker starts in milliseconds; a spawned worker takes seconds. Neither
# inherits this process's threads, locks and CUDA context, which a forked worker would get and could not use.
CONTEXT = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = "torch.utils.data"
# Batches that a worker loads ahead: enough that one slow read does not leave the device idle.
PREFETCH = 4


class Loader:
    """Shuffled batches of a map-style data set whose examples are tuples of tensors.

    The workers start with the first epoch and run until `close`, the end of a `with` block, or the deletion of the
    loader. Workers help if reading an example takes longer than sending it to another process. For rows in memory, a
    few microseconds each, loading in this process is faster.

    dataset     sent to the workers, so it must be picklable
    batch_size  number of examples; the last batch of an epoch may be shorter, and is dropped if `drop_last`
    workers     number of loading processes; 0: this process loads
    seed        seed of the shuffling; each epoch has its own order
    prefetch    number of batches that each worker loads ahead
    context     how workers are started: "forkserver" or "spawn"

    If there is a GPU, batches are in pinned memory. Use one epoch at a time: starting another one invalidates it.

    PerfsuiteError if the data set is too small for a batch, or if workers, prefetch or context are out of range.

    Source: leak_cnn, technique 001.6; ups, 002.4; eigenstate_lm, 004.2.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        workers: int = 2,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = PREFETCH,
        context: str = CONTEXT,
    ) -> None:
        check_batches(len(dataset), batch_size, drop_last)
        if workers < 0:
            raise PerfsuiteError(f"workers: {workers} is out of range; give 0 or more")
        if prefetch < 1:
            raise PerfsuiteError(f"prefetch: {prefetch} is out of range; give 1 or more")
        self._sampler = EpochSampler(len(dataset), seed)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._sampler,
            num_workers=workers,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(seed),
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            prefetch_factor=prefetch if workers else None,
            multiprocessing_context=_context(context) if workers else None,
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._loader)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batches of an epoch."""
        self._sampler.epoch = number
        for batch in self._loader:
            yield tuple(batch)

    def close(self) -> None:
        """Stop the workers; another epoch would start new ones."""
        held, self._loader._iterator = self._loader._iterator, None
        if held is not None and self._loader.num_workers:
            held._shutdown_workers()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _context(name: str) -> Any:
    if name not in ("forkserver", "spawn") or name not in multiprocessing.get_all_start_methods():
        raise PerfsuiteError(f"context: workers cannot be started by {name!r} here; give {CONTEXT!r}")
    context = multiprocessing.get_context(name)
    if name == "forkserver":
        context.set_forkserver_preload([PRELOADED])  # no effect if the server is already running
    return context
