from scale import ranks

from optimized.distributed.fsdp2 import fsdp2 as optimized
from perfsuite import Pair, Workload, floats, size, stateful, tensor
from reference.distributed.fsdp2 import fsdp2 as reference

BOUNDED = floats(-2, 2)

fsdp2 = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={
        "weights": [
            tensor("hidden", "features", values=floats(-1, 1)),
            tensor("hidden", "hidden", values=floats(-1, 1)),
            tensor("outputs", "hidden", values=floats(-1, 1)),
        ]
    },
    step_inputs={
        "inputs": tensor("ranks * rows", "features", values=BOUNDED, by_rank=0),
        "targets": tensor("ranks * rows", "outputs", values=BOUNDED, by_rank=0),
    },
    sizes={"rows": size(1, 9), "features": size(1, 17), "hidden": size(1, 17), "outputs": size(1, 9)},
    steps=(1, 2, 7),
    ranks=ranks(2, 4),
    workloads=[
        Workload("dp2", ranks=2, rows=1024, features=1024, hidden=4096, outputs=1024, device="cuda"),
        Workload("cpu", rows=16, features=32, hidden=64, outputs=8, clock="wall", device="cpu"),
    ],
)
