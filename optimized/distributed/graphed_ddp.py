"""Data-parallel training steps captured in one CUDA graph with their all-reduces (trainer2, technique 000.F3)."""

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from optimized.graphs.cuda_graph_step import CudaGraphStep, aside, cuda_graph_step
from optimized.process_groups import CAPTURED, group_with
from optimized.tanh_network import TanhNetwork

# DistributedDataParallel rebuilds its buckets after the first step and times the first ten steps with events, which a
# graph cannot record. PyTorch's notes on CUDA graphs ask for 11 warm-up steps.
WARMUP = 11
# DistributedDataParallel later times one step in every TIMED_EVERY. The largest value keeps it off captured steps.
TIMED_EVERY = 2**31 - 1


def graphed_ddp(weights: Sequence[torch.Tensor], lr: float = 0.1, momentum: float = 0.9) -> CudaGraphStep:
    """Build `step(inputs, targets)`, a step of SGD with momentum on the mean squared error; all ranks call it.

    All ranks have the same weights. Each has its own part of the rows; the parts have the same size. The gradient is
    the mean over the ranks. The step returns the mean squared error of this rank's rows before the update, 0-d.

    For each input shape, 11 steps run eagerly on a side stream. The next one is captured and then replayed: forward
    pass, backward pass with its all-reduces, and optimizer in one launch. All ranks must get the shapes in the same
    order. Weights may be changed in place between steps, but not replaced. Without a CUDA device each step runs
    eagerly, and `step.reason` says so.

    The all-reduces use a separate process group without NCCL's error handling: if a rank is missing, the others wait
    forever. Capture needs NCCL 2.9.6 or newer. Delete the step before you destroy the process group, because NCCL waits
    for graphs that contain its collectives.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; changed in place
    inputs   [rows, in]
    targets  [rows, out]

    Source: trainer2, technique 000.F3; torch's notes on CUDA graphs, "Usage with DistributedDataParallel".
    """
    network = TanhNetwork(weights)
    device = weights[0].device

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(
            network,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group_with(CAPTURED, device),
            # All ranks already have the same weights.
            init_sync=False,
            # Gradients stay at the same addresses, in the buckets.
            gradient_as_bucket_view=True,
        )

    # Construction registers hooks, which must belong to the stream of the capture.
    parallel = aside(wrapped, device) if device.type == "cuda" else wrapped()
    parallel._set_ddp_runtime_logging_sample_rate(TIMED_EVERY)  # type: ignore[no-untyped-call]  # torch has not typed it
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        with torch.enable_grad():
            loss = (parallel(inputs) - targets).square().mean()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return cuda_graph_step(step, warmup=WARMUP)
