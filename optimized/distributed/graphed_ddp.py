"""Data-parallel training steps captured whole in a CUDA graph, all-reduce included (trainer2, technique 000.F3)."""

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from optimized.graphs.cuda_graph_step import CudaGraphStep, aside, cuda_graph_step
from optimized.process_groups import CAPTURED, group_with
from optimized.tanh_network import TanhNetwork

# DistributedDataParallel lays its buckets out anew after the first step, and times the first ten with events, which a
# graph cannot record: torch's notes on CUDA graphs ask for 11.
WARMUP = 11
# It times every so many steps after that, too. A capture must not be one of these.
TIMED_EVERY = 2**31 - 1


def graphed_ddp(weights: Sequence[torch.Tensor], lr: float = 0.1, momentum: float = 0.9) -> CudaGraphStep:
    """Build `step(inputs, targets)`: a step of SGD with momentum on the mean squared error, in all ranks together.

    Every rank has the same weights and its own part of the rows; the parts are of equal size. The gradient is the mean
    over the ranks. Returns the mean squared error of this rank's rows before the step, 0-d.

    For each shape of the rows 11 steps run eagerly on a side stream; the next one is captured, and replayed from then
    on: forward pass, backward pass with its all-reduces, and optimizer in one launch. All ranks must get the shapes in
    the same order. Weights may be changed in place between steps, but not replaced. Without a CUDA device each step
    runs eagerly, and `step.reason` says so.

    The all-reduces are in a process group of their own, without NCCL's watch for errors: where a rank is missing the
    others wait for ever. NCCL 2.9.6 or newer can be captured. Let go of the step before the process group is destroyed:
    NCCL waits for graphs that have its collectives.

    weights  of linear layers without biases, [out, in] each, with tanh between them; changed in place
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
            # All ranks have the same weights already.
            init_sync=False,
            # Gradients stay where they are, in the buckets.
            gradient_as_bucket_view=True,
        )

    # Its hooks must belong to the stream of the capture.
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
