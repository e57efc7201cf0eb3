"""Launch ranks on the CPU: torch's elastic launcher forks them from a process that has imported torch.

Started by `python -m perfsuite.correctness.ranks.forked RANKS SOCKET STACKS DEVICE SECONDS`, where RANKS is the number
of ranks, and the others are the arguments of each rank (process.py). On a machine with a GPU ranks are not forked.
There perfsuite and sides may use CUDA, even for tensors on the CPU, and a fork of a process that has counted its GPUs
cannot use CUDA.
"""

from __future__ import annotations

import gc
import signal
import sys
import uuid

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from perfsuite.correctness.ranks import process


def main() -> None:
    """Run the ranks until they end."""
    ranks = int(sys.argv.pop(1))
    # The settings of `torchrun --standalone`.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    gc.collect()
    gc.freeze()
    elastic_launch(config, _rank)()


def _rank() -> None:
    """Run one rank, with the default signal handlers instead of the launcher's."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process.main()


if __name__ == "__main__":
    main()
