"""Shuffled batches from workers that stay, ahead of time and in pinned memory (leak_cnn, technique 001.6)."""

import multiprocessing
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader

from perfsuite.errors import PerfsuiteError
from suite.batching import EpochSampler, check_batches

# A worker of a fork server begins with torch imported, in milliseconds where a spawned one takes seconds. Neither has
# the threads, the locks and the CUDA context of this process, which a forked one would find and could not use.
CONTEXT = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = "torch.utils.data"
# Batches a worker makes ahead: enough that one slow read does not leave the device without work.
PREFETCH = 4


class Loader:
    """Shuffled batches of a map-style data set, each example a tuple of tensors.

    Workers are started at the first epoch and stay until `close`, or until nobody holds the loader any more. It is a
    context manager, too. It pays where an example takes longer to read than to send: of rows that lie in memory, some
    microseconds each, a process makes a batch sooner than it gets one from another.

    dataset     goes to the workers, so that it has to be picklable
    batch_size  examples; the last batch of an epoch may be shorter, or is left out if `drop_last`
    workers     processes that load; with 0 this one does
    seed        of the shuffling; each epoch has an order of its own
    prefetch    batches that each worker makes ahead
    context     how workers are started: "forkserver" or "spawn"

    Where there is a GPU batches lie in pinned memory. One epoch at a time: the next ends the one before.

    PerfsuiteError where the data set does not make a batch, and for workers, prefetch and context out of range.

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
        """Batches an epoch."""
        return len(self._loader)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """The batches of an epoch."""
        self._sampler.epoch = number
        for batch in self._loader:
            yield tuple(batch)

    def close(self) -> None:
        """End the workers; the next epoch would start others."""
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
        context.set_forkserver_preload([PRELOADED])  # heeded by a server that has not been started yet
    return context
