"""Communication among the ranks that time the same workload."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from perfsuite.draws import rank_parts
from perfsuite.timing.peers import Peers

T = TypeVar("T")
WAIT_S = 20.0
"""Timeout in seconds of a collective of this module. It is longer than that of a side's own collectives, whose errors
say more."""


class RankPeers(Peers):
    """Peers that communicate over a gloo group of their own. They use no group of a side, and its GPU only in
    `line_up`."""

    def __init__(self, rank: int, ranks: int, device: str) -> None:
        self.rank, self.ranks = rank, ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_S))
        self._devices: Any = None
        if device == "cuda":
            self._devices = dist.new_group(backend="nccl")
            self._flag = torch.zeros(1, device="cuda")
            self.line_up()  # NCCL creates the communicator of a group in its first collective
            torch.cuda.synchronize()

    def bits(self, count: int) -> int:
        return self.same(secrets.randbits(count))

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        most = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return cast("list[float]", most.tolist())

    def work(self, seconds: list[float], calls: int) -> list[float]:
        return [] if self.any(len(seconds) < calls) else self.slowest(seconds)

    def all(self, flag: bool) -> bool:
        return not self.any(not flag)

    def any(self, flag: bool) -> bool:
        return self.slowest([float(flag)])[0] > 0

    def same(self, value: T) -> T:
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def meet(self) -> None:
        dist.barrier(group=self._group)

    def line_up(self) -> None:
        dist.all_reduce(self._flag, group=self._devices)

    def part(self, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return rank_parts.of_rank(specs, values, self.rank, self.ranks)
