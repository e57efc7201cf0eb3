"""Distributed training: the rank of this process, and decisions on which all ranks agree."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perfsuite.errors import PerfsuiteError, first_line
from suite.launching import GO_ON

RANKS_PER_CORE = 8
"""Most ranks on a CPU for each core. Each is a process of several hundred megabytes."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun and `perfsuite train --ranks` set for each process."""
LOST = re.compile(r"connection (closed|reset|refused)|peer|timed ?out|nccl|socket", re.IGNORECASE)
"""Pattern of the errors that a collective raises if another rank has ended."""
TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
"""Pattern of rank 0's error if another program listens on its port."""


class RankLostError(PerfsuiteError):
    """Another rank has ended, so this one cannot continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Rank of a process and the number of ranks."""

    rank: int = 0
    ranks: int = 1
    local: int = 0
    """Rank on this host, which is also the index of the GPU."""

    @property
    def first(self) -> bool:
        """True for rank 0, the only rank that writes files and prints for the user."""
        return self.rank == 0


ALONE = Place()


def place() -> Place:
    """Read this process's place from the environment; ALONE if no launcher has set it.

    PerfsuiteError if one of the variables is missing, not a number or out of range.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return ALONE
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise PerfsuiteError(f"RANK is set and {missing[0]} is not; start the ranks with --ranks N or with torchrun")
    try:
        rank, ranks, local = (int(os.environ[name]) for name in VARIABLES[:3])
    except ValueError:
        raise PerfsuiteError("RANK, WORLD_SIZE or LOCAL_RANK is no number; start the ranks with --ranks N") from None
    if not 0 <= rank < ranks or local < 0:
        raise PerfsuiteError(f"RANK={rank} of WORLD_SIZE={ranks} cannot be; start the ranks with --ranks N")
    return Place(rank=rank, ranks=ranks, local=local) if ranks > 1 else ALONE


def device_of(here: Place, name: str | None) -> str | None:
    """Choose the device of a rank: its own GPU, or the CPU. With one rank, return `name`.

    PerfsuiteError if GPUs or NCCL are missing, if there are too many ranks for the CPU, or if `name` gives a single
    GPU.
    """
    if here.ranks == 1:
        return name
    if name not in (None, "cpu", "cuda"):
        raise PerfsuiteError(f"--device {name}: each of {here.ranks} ranks has a GPU of its own; name cuda, or cpu")
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        cores = os.cpu_count() or 1
        if here.local >= (most := RANKS_PER_CORE * cores):
            raise PerfsuiteError(
                f"{here.ranks} ranks are too many for this machine's {cores} CPU cores; start at most {most}"
            )
        return "cpu"
    have = torch.cuda.device_count()
    if here.local >= have:
        raise PerfsuiteError(
            f"{here.ranks} ranks need as many GPUs, and this machine has {have}; start fewer, or name --device cpu"
        )
    if not dist.is_nccl_available():
        raise PerfsuiteError("ranks on GPUs need NCCL, which this PyTorch is built without; name --device cpu")
    return f"cuda:{here.local}"


@contextmanager
def joined(here: Place, device: torch.device) -> Iterator[None]:
    """Create the default process group of all ranks: NCCL for GPU tensors, gloo for CPU tensors; none for one rank.

    The group exists until `leave`. PerfsuiteError if the ranks run different versions of Python or torch.
    """
    if here.ranks == 1:
        yield
        return
    on_gpu = device.type == "cuda"
    with lost_ranks(here):
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        check_versions(here)
    yield


def leave(here: Place, code: int) -> None:
    """Wait until all ranks have called this function, then end the process with the exit code. Return if it is alone.

    The process groups are not destroyed: NCCL would wait for CUDA graphs that contain its collectives, and gloo's
    threads may abort a process that exits normally.
    """
    if here.ranks == 1:
        return
    with suppress(RuntimeError):  # another rank has already ended
        dist.all_reduce(torch.zeros(()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_versions(here: Place) -> None:
    """Raise PerfsuiteError if a rank's version of Python or torch differs from rank 0's."""
    own = {"python": platform.python_version(), "torch": torch.__version__}
    every: list[Any] = [None] * here.ranks
    dist.all_gather_object(every, own)
    for rank, found in enumerate(every):
        for name, version in found.items():
            if version != every[0][name]:
                raise PerfsuiteError(
                    f"rank {rank} runs {name} {version}, and rank 0 {every[0][name]}; install the same for all ranks"
                )


@contextmanager
def lost_ranks(here: Place) -> Iterator[None]:
    """Convert a collective's error to RankLostError if another rank has ended.

    PerfsuiteError if another program uses the port.
    """
    try:
        yield
    except RuntimeError as error:
        if here.ranks > 1 and TAKEN.search(str(error)):
            port = os.environ["MASTER_PORT"]
            raise PerfsuiteError(f"another program has port {port}; start again, or with another port") from None
        if here.ranks > 1 and LOST.search(str(error)):
            raise RankLostError(
                f"rank {here.rank}: another rank has ended, or does not answer ({first_line(error)}); {GO_ON}"
            ) from error
        raise


class Together:
    """Decisions that must be the same on all ranks."""

    def __init__(self, here: Place = ALONE) -> None:
        self.here = here
        self._wish = torch.zeros((), dtype=torch.int64)
        self._under_way: Any = None

    def ends(self, wish: int) -> int:
        """Return the largest stop request of all ranks; 0 if there is none. Called once before each window.

        With several ranks, the result is that of the previous call's requests, so that no rank waits for another.
        """
        if self.here.ranks == 1:
            return wish
        if self._under_way is not None:
            self._under_way.wait()
            if found := int(self._wish):
                return found
        self._wish.fill_(wish)
        self._under_way = dist.all_reduce(self._wish, op=dist.ReduceOp.MAX, async_op=True)
        return 0

    def by_first(self, value: bool) -> bool:
        """Return rank 0's value on all ranks."""
        if self.here.ranks == 1:
            return value
        given = torch.tensor(int(value))
        dist.broadcast(given, 0)
        return bool(given)

    def check_begin(self, windows: int) -> None:
        """Raise PerfsuiteError if a rank resumes after a different number of windows than rank 0."""
        if self.here.ranks == 1:
            return
        every: list[Any] = [None] * self.here.ranks
        dist.all_gather_object(every, windows)
        for rank, found in enumerate(every):
            if found != every[0]:
                raise PerfsuiteError(
                    f"rank {rank} goes on from a checkpoint of {found} windows, and rank 0 from one of {every[0]}; "
                    "copy the same to all machines, and name its file with --resume"
                )

    def first_alone(self) -> None:
        """Wait for all ranks. Rank 0 calls this after work that must come first, the other ranks before their work."""
        if self.here.ranks > 1:
            dist.all_reduce(torch.zeros(()))  # on the host, since an NCCL barrier would wait on the device
