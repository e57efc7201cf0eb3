"""Asynchronous transfer of window reports from the device to the host, which need not wait for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

R = TypeVar("R")


@dataclass
class _Sent(Generic[R]):
    buffer: torch.Tensor
    event: torch.cuda.Event | None
    moment: float
    """Time of sending on the host's clock, in seconds."""
    read: Callable[[torch.Tensor], R]


class Reports(Generic[R]):
    """Reports in transit: each is a tensor that is copied to the host, and a function that interprets it there.

    From a GPU, the copy goes to pinned memory.

    stays  function that returns True if a report remains the latest even when later ones arrive, e.g. because its loss
           is not finite

    Attribute `seconds`: time between the last two reports, on the device's clock if it is a GPU; None before there are
    two.
    """

    def __init__(self, device: torch.device, stays: Callable[[R], bool] = lambda report: False) -> None:
        self._cuda = device.type == "cuda"
        self._stays = stays
        self._sent: deque[_Sent[R]] = deque()
        self._free: list[torch.Tensor] = []
        self._latest: R | None = None
        self._last: _Sent[R] | None = None
        self.seconds: float | None = None

    def send(self, whole: torch.Tensor, read: Callable[[torch.Tensor], R]) -> None:
        """Queue the copy of a report; `read` interprets it after it has arrived."""
        fit = [i for i, b in enumerate(self._free) if b.shape == whole.shape and b.dtype == whole.dtype]
        buffer = self._free.pop(fit[0]) if fit else torch.empty(whole.shape, dtype=whole.dtype, pin_memory=self._cuda)
        buffer.copy_(whole, non_blocking=self._cuda)
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._sent.append(_Sent(buffer, event, time.perf_counter(), read))

    def latest(self) -> R | None:
        """Return the latest report that has arrived, without waiting; None if there is none."""
        while self._sent and ((event := self._sent[0].event) is None or event.query()):
            sent = self._sent.popleft()
            report = sent.read(sent.buffer)
            self._free.append(sent.buffer)
            self.seconds = self._since_last(sent)
            if self._latest is None or not self._stays(self._latest):  # two may arrive at once
                self._latest = report
        return self._latest

    def wait(self, ahead: int = 0) -> R | None:
        """Wait until at most `ahead` reports are in transit, then return the latest report."""
        if len(self._sent) > ahead and (event := self._sent[-1 - ahead].event) is not None:
            event.synchronize()
        return self.latest()

    def _since_last(self, sent: _Sent[R]) -> float | None:
        last, self._last = self._last, sent
        if last is None:
            return None
        if last.event is not None and sent.event is not None:
            return float(last.event.elapsed_time(sent.event)) / 1e3
        return sent.moment - last.moment
