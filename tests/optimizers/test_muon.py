import functools

import torch

from optimized.kernels import triton_reason
from optimized.optimizers.muon import muon as optimized
from optimized.optimizers.muon import muon_torch, muon_triton
from perfsuite import Cost, Pair, Workload, compiled, floats, listof, side, size, stateful, tensor
from reference.optimizers.muon import ITERATIONS
from reference.optimizers.muon import muon as reference


def muon_of_torch(params, lr=1.4e-3, momentum=0.95, weight_decay=0.03):
    """What PyTorch has."""
    kept = [p for p in params if p.numel()]
    optimizer = torch.optim.Muon(kept, lr=lr, momentum=momentum, weight_decay=weight_decay) if kept else None

    def step(grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        if optimizer is not None:
            optimizer.step()

    return step


def in_float32(make):
    return functools.partial(make, dtype=torch.float32)


def products(rows, columns):
    """Operations of the products, with those of symmetric results counted once."""
    least, most = sorted((rows, columns))
    return ITERATIONS * (least * least * most + least**3 + 2 * least * least * most)


RIVALS = {
    "torch": stateful(muon_of_torch),
    "compile": compiled(stateful(side(muon_torch, devices=("cuda",)))),
}
# g, m and p read, m and p written.
BYTES_PER_PARAMETER = 20

muon = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"params": listof("count", tensor("rows", "columns", values=floats(-1, 1)))},
    step_inputs={"grads": listof("count", tensor("rows", "columns", values=floats(-4, 4)))},
    mutates={"params"},
    sizes={"count": size(0, 3), "rows": size(0, 49), "columns": size(0, 49)},
    steps=(1, 2, 5),
    rivals=RIVALS,
    variants={"triton": stateful(side(muon_triton, available=triton_reason))},
    workloads=[
        Workload("matrices200", count=200, rows=512, columns=512, device="cuda", speedup=25.0, host_syncs=0),
        Workload("cpu", count=16, rows=32, columns=32, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda count, rows, columns: BYTES_PER_PARAMETER * count * rows * columns,
        flops=lambda count, rows, columns: count * products(rows, columns),
        precision="bfloat16",
    ),
)


# In bfloat16 the reference's own error is up to a third of the update. In float32, with the same code but for the dtype
# of a tile, a coefficient that is wrong by a thousandth is found.
muon_float32 = Pair(
    reference=stateful(in_float32(reference)),
    optimized=stateful(in_float32(optimized)),
    inputs=muon.inputs,
    step_inputs=muon.step_inputs,
    mutates=muon.mutates,
    sizes=muon.sizes,
    steps=muon.steps,
    variants={
        "triton": stateful(side(in_float32(muon_triton), available=triton_reason)),
        "batched": stateful(in_float32(muon_torch)),
    },
    workloads=[Workload("cpu", count=16, rows=32, columns=32, clock="wall", device="cpu")],
)


def of_blocks(make):
    """Takes the matrices of each transformer block together, as `operator_blocks` has them."""

    def made(blocks):
        step = make([matrix for block in blocks for matrix in block])
        return lambda grads: step([matrix for block in grads for matrix in block])

    return made


def operator_blocks(values):
    """The projections into and out of attention, and the two of the FFN."""
    shapes = (("3 * width", "width"), ("width", "width"), ("4 * width", "width"), ("width", "4 * width"))
    return listof("depth", [tensor(*shape, values=values) for shape in shapes])


muon_operator = Pair(
    reference=stateful(of_blocks(reference)),
    optimized=stateful(of_blocks(optimized)),
    inputs={"params": operator_blocks(floats(-1, 1))},
    step_inputs={"grads": operator_blocks(floats(-4, 4))},
    mutates={"params"},
    sizes={"depth": size(0, 2), "width": size(0, 17)},
    steps=(1, 2, 5),
    rivals={name: stateful(of_blocks(muon_of_torch)) for name in ("torch",)},
    workloads=[
        Workload("ups", depth=12, width=384, device="cuda", speedup=5.0, host_syncs=0),
        Workload("cpu", depth=2, width=32, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda depth, width: BYTES_PER_PARAMETER * depth * 12 * width**2,
        flops=lambda depth, width: depth * sum(products(width, n * width) for n in (1, 3, 4, 4)),
        precision="bfloat16",
    ),
)
