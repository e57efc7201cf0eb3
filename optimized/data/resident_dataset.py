"""Shuffled batches of a data split on the device, gathered there into one reused buffer (leak_cnn)."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import bounds, check_batches, check_rows, permutation


class ResidentDataset:
    """Shuffled batches of a split that is kept on the device, or is streamed to it if it does not fit.

    All batches share one buffer, `batch`; a shorter batch uses its beginning. So a step captured as a CUDA graph reads
    its batch in place, without a copy. If the split is on the device, a batch is gathered without allocating memory or
    waiting for the device.

    tensors      one or more on the host, each with one row per example
    batch_size   number of rows; the last batch of an epoch may be shorter, and is dropped if `drop_last`
    device       device of the batches
    seed         seed of the shuffling; each epoch has its own order, computed on the device if the split is there
    limit_bytes  device memory for rows, in bytes; None: no limit. A split that exceeds it is streamed in pieces of
                 several batches. The host gathers a piece into pinned memory; it is copied while the piece before it
                 is used.
    reason       attribute: why batches are streamed; None if the split is on the device

    PerfsuiteError if the tensors differ in their number of rows, if there are too few rows for a batch, or if the split
    is streamed and the limit is below three batches.

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
        limit_bytes: int | None = None,
    ) -> None:
        self.rows = check_rows(tensors)
        check_batches(self.rows, batch_size, drop_last)
        self.device, self.seed = torch.device(device), seed
        self.bounds = bounds(self.rows, batch_size, drop_last)
        self.batch_size = batch_size
        row_bytes = sum(t.nbytes for t in tensors) // self.rows
        batch_rows = min(batch_size, self.rows)
        needed = (self.rows + batch_rows) * row_bytes
        self.reason: str | None = None
        self._pieces: _Pieces | None = None
        if limit_bytes is None or needed <= limit_bytes:
            self._resident = [t.to(self.device) for t in tensors]
        else:
            rows = _piece_rows(limit_bytes, row_bytes, batch_rows)
            self._pieces = _Pieces(tensors, min(rows, self.rows), self.device)
            memory = "pinned memory" if self.device.type == "cuda" else "memory"
            self.reason = (
                f"the split takes {needed} bytes with a batch, more than limit_bytes={limit_bytes}: "
                f"batches are streamed from {memory}, {rows} rows at a time"
            )
        self.batch = tuple(torch.empty((batch_rows, *t.shape[1:]), dtype=t.dtype, device=self.device) for t in tensors)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.bounds)

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return an iterator over an epoch's batches: a tuple with the rows of each tensor, valid until the next one.

        Run one epoch at a time, since all epochs share the buffer.
        """
        return self._gathered(number) if self._pieces is None else self._streamed(number, self._pieces)

    def _gathered(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        order = permutation(self.rows, self.seed, number, self.device)
        for start, end in self.bounds:
            batch = self._batch(end - start)
            for tensor, out in zip(self._resident, batch, strict=True):
                torch.index_select(tensor, 0, order[start:end], out=out)
            yield batch

    def _streamed(self, number: int, pieces: "_Pieces") -> Iterator[tuple[torch.Tensor, ...]]:
        order = permutation(self.rows, self.seed, number, "cpu")[: self.bounds[-1][1]]
        parts = order.split(pieces.rows)
        pieces.begin()
        pieces.fetch(0, parts[0])
        for i, part in enumerate(parts):
            piece = pieces.ready(i)
            for start in range(0, len(part), self.batch_size):
                batch = self._batch(min(self.batch_size, len(part) - start))
                for tensor, out in zip(piece, batch, strict=True):
                    out.copy_(tensor[start : start + len(out)])
                if start + self.batch_size >= len(part):
                    pieces.release(i)
                yield batch
                # The device now has a batch to work on; meanwhile the host gathers the next piece.
                if start == 0 and i + 1 < len(parts):
                    pieces.fetch(i + 1, parts[i + 1])

    def _batch(self, rows: int) -> tuple[torch.Tensor, ...]:
        return self.batch if rows == len(self.batch[0]) else tuple(t[:rows] for t in self.batch)


class _Pieces:
    """Double buffer for streaming rows: two slots used in turn, each in pinned host memory and on the device."""

    def __init__(self, tensors: Sequence[torch.Tensor], rows: int, device: torch.device) -> None:
        self.tensors, self.rows, self.device = tuple(tensors), rows, device
        cuda = device.type == "cuda"

        def piece(**where: object) -> list[torch.Tensor]:
            return [torch.empty((rows, *t.shape[1:]), dtype=t.dtype, **where) for t in tensors]

        self.host = [piece(pin_memory=cuda) for _ in range(2)]
        self.there = [piece(device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.copied = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self.used = [torch.cuda.Event() for _ in range(2)] if cuda else []
        if self.stream is not None:
            for tensor in (*self.there[0], *self.there[1]):
                tensor.record_stream(self.stream)  # after an abandoned epoch, a copy may still run when they are freed

    def begin(self) -> None:
        """Begin an epoch: copies wait for all work launched so far, including an abandoned epoch's."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def fetch(self, number: int, rows: torch.Tensor) -> None:
        """Gather these rows on the host and start copying them to the device as piece `number`."""
        slot = number % 2
        if self.stream is not None:
            self.copied[slot].synchronize()  # until the host's slot is free; it usually is, unless a copy is slow
            self.stream.wait_event(self.used[slot])  # until the device's slot is free; the running step goes on
        for tensor, host, there in zip(self.tensors, self.host[slot], self.there[slot], strict=True):
            torch.index_select(tensor, 0, rows, out=host[: len(rows)])
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                there[: len(rows)].copy_(host[: len(rows)], non_blocking=True)
        if self.stream is not None:
            self.copied[slot].record(self.stream)

    def ready(self, number: int) -> list[torch.Tensor]:
        """Return piece `number` on the device; work launched from here on waits for its copy."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied[number % 2])
        return self.there[number % 2]

    def release(self, number: int) -> None:
        """Mark piece `number` as free once the work launched so far has run."""
        if self.stream is not None:
            self.used[number % 2].record(torch.cuda.current_stream(self.device))


def _piece_rows(limit_bytes: int, row_bytes: int, batch_size: int) -> int:
    """Return the number of rows in a piece, in whole batches: the limit covers two pieces and a batch."""
    batches = limit_bytes // max(1, row_bytes * batch_size)
    if batches < 3:
        raise PerfsuiteError(
            f"limit_bytes: {limit_bytes} is less than three batches of {row_bytes * batch_size} bytes; raise it, or "
            "lower batch_size"
        )
    return (batches - 1) // 2 * batch_size
