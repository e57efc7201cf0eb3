"""The ranks of the test that loads checkpoints with other numbers of ranks: `python reshard.py FOLDER`.

Four processes form groups of 4, 2 and 1 ranks in turn. Each group loads the checkpoints of all earlier groups, and at
the end four ranks load all checkpoints. A rank raises if a loaded checkpoint differs.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # otherwise each rank would import it by itself
import torch.distributed as dist
from torch import multiprocessing

from optimized.distributed import sharded_checkpoint as optimized
from reference.distributed import sharded_checkpoint as reference
from suite.runtime.errors import CheckpointError
from suite.sharded_network import ShardedNetwork

SIDES = {"reference": reference, "optimized": optimized}
RANKS = 4
SHAPES = ((5, 3), (2, 5))  # five rows on four ranks: two, two, one and none; two rows: one, one, none and none


def main(rank: int, folder: Path) -> None:
    """Run groups of 4, 2 and 1 ranks; then let four ranks load everything that was saved."""
    torch.set_num_threads(1)
    for number, ranks in enumerate((RANKS, 2, 1, RANKS)):
        if rank < ranks:
            store = dist.FileStore(str(folder / f"store-{number}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
            for name, side in SIDES.items():
                for saved in sorted(folder.glob(f"{name}-by-*")):
                    check(side, saved)
                if number < 3:
                    network = trained()
                    side.save(network.model, network.optimizer, folder / f"{name}-by-{ranks}")
                dist.barrier()
            if number == 1:
                check_damaged(optimized, folder / "optimized-by-2")
            dist.destroy_process_group()
        while not (folder / f"done-{number}").exists():  # the ranks outside of the group wait for this file
            if rank == 0:
                (folder / f"done-{number}").touch()
            time.sleep(0.01)


def trained() -> ShardedNetwork:
    """Return a network after three steps, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    network = ShardedNetwork([torch.randn(shape, generator=generator) for shape in SHAPES])
    for _ in range(3):
        network.step([torch.randn(shape, generator=generator) for shape in SHAPES])
    return network


def check(side: ModuleType, saved: Path) -> None:
    """Check that the loaded network has the trained one's shards, bit for bit, and trains on identically."""
    other, expected = ShardedNetwork([torch.zeros(shape) for shape in SHAPES]), trained()
    side.load(other.model, other.optimizer, saved)
    for steps in range(2):
        for name, shard in expected.shards().items():
            if not torch.equal(other.shards()[name], shard):
                raise AssertionError(
                    f"rank {dist.get_rank()} of {dist.get_world_size()}: {saved.name}, {name}, {steps}"
                )
        for network in (other, expected):
            for p in network.model.parameters():
                p.grad = torch.ones_like(p)
            network.optimizer.step()


def check_damaged(side: ModuleType, saved: Path) -> None:
    """Check that all ranks raise if one rank's file is truncated, and that the network stays unchanged."""
    network = trained()
    if dist.get_rank() == 0:
        os.truncate(saved / "__1_0.distcp", 100)
    dist.barrier()
    try:
        side.load(network.model, network.optimizer, saved)
    except CheckpointError as error:
        if str(error) != f"{saved / '__1_0.distcp'} is cut off; load another":
            raise
    else:
        raise AssertionError("a file that is cut off was loaded")
    if any(not torch.equal(shard, network.shards()[name]) for name, shard in trained().shards().items()):
        raise AssertionError("a network was changed by a checkpoint that is damaged")
    dist.barrier()
    side.save(network.model, network.optimizer, saved)


if __name__ == "__main__":
    # The ranks are forked, so that torch is imported only once.
    multiprocessing.start_processes(main, (Path(sys.argv[1]),), RANKS, start_method="fork")
