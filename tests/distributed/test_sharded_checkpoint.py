import contextlib
import tempfile
from pathlib import Path

import torch.distributed as dist

from optimized.distributed import sharded_checkpoint as optimized
from perfsuite import Pair, Workload, floats, size, stateful, tensor
from reference.distributed import sharded_checkpoint as reference
from suite.sharded_network import ShardedNetwork


@contextlib.contextmanager
def shared_folder():
    """A new folder of rank 0's that all ranks know."""
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(tempfile.TemporaryDirectory())] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()  # before rank 0 removes it


def checkpointed(side):
    """Steps of a network, each of which is saved and loaded into another network; returned is what that one has."""

    def make(weights):
        network = ShardedNetwork(weights)
        other = ShardedNetwork([w.new_zeros(w.shape) for w in weights])

        def step(gradients):
            network.step(gradients)
            with shared_folder() as folder:
                side.save(network.model, network.optimizer, folder / "checkpoint")
                side.load(other.model, other.optimizer, folder / "checkpoint")
            return other.shards()

        return step

    return make


def layers(bound):
    return [tensor(*shape, values=floats(-bound, bound)) for shape in (("hidden", "features"), ("outputs", "hidden"))]


sharded_checkpoint = Pair(
    reference=stateful(checkpointed(reference)),
    optimized=stateful(checkpointed(optimized)),
    inputs={"weights": layers(1)},
    step_inputs={"gradients": layers(4)},
    sizes={"features": size(1, 17), "hidden": size(1, 17), "outputs": size(1, 9)},
    steps=(1, 2),
    gradients=False,
    max_examples=2,
    ranks=(2, 4),
    workloads=[Workload("cpu", features=256, hidden=512, outputs=64, clock="wall", device="cpu")],
)
