from scale import draws, ranks

from optimized.distributed.ddp import ddp as optimized
from perfsuite import Pair, Workload, floats, size, stateful, tensor
from reference.distributed.ddp import ddp as reference

BOUNDED = floats(-2, 2)


def weight(*dims):
    """Return the spec of a parameter; it is contiguous, because DistributedDataParallel warns about other layouts."""
    return tensor(*dims, values=floats(-1, 1), layouts=("contiguous",))


ddp = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={
        "weights": [
            weight("hidden", "features"),
            weight("hidden", "hidden"),
            weight("outputs", "hidden"),
        ]
    },
    step_inputs={
        "inputs": tensor("micro", "ranks * rows", "features", values=BOUNDED, by_rank=1),
        "targets": tensor("micro", "ranks * rows", "outputs", values=BOUNDED, by_rank=1),
    },
    mutates={"weights"},
    sizes={
        "micro": size(1, 3),
        "rows": size(1, 9),
        "features": size(1, 17),
        "hidden": size(1, 17),
        "outputs": size(1, 9),
    },
    steps=(1, 2, 7),
    ranks=ranks(2, 4),
    max_examples=draws(cpu=7),
    workloads=[
        Workload("cpu", micro=2, rows=16, features=32, hidden=64, outputs=8, clock="wall", device="cpu"),
        # In some calls DistributedDataParallel waits for its own timers' events.
        Workload(
            "dp2", ranks=2, micro=8, rows=256, features=1024, hidden=4096, outputs=1024, clock="wall", device="cuda"
        ),
        Workload("cpu2", ranks=2, micro=2, rows=16, features=32, hidden=64, outputs=8, clock="wall", device="cpu"),
    ],
)
