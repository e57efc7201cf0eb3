"""Data-parallel training with DistributedDataParallel, run eagerly (trainer2, technique 000.F3)."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel


class Network(torch.nn.Module):
    """Linear layers without biases, with tanh between them; the parameters share the memory of the weights."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w.detach()) for w in weights])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers: [rows, in] → [rows, out]."""
        for i, w in enumerate(self.weights):
            x = (torch.tanh(x) if i else x) @ w.T
        return x


def graphed_ddp(
    weights: Sequence[torch.Tensor], lr: float = 0.1, momentum: float = 0.9
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Build `step(inputs, targets)`, a step of SGD with momentum on the mean squared error; all ranks call it.

    All ranks have the same weights. Each has its own part of the rows; the parts have the same size. The gradient is
    the mean over the ranks. The step returns the mean squared error of this rank's rows before the update, 0-d.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; changed in place
    inputs   [rows, in]
    targets  [rows, out]

    Source: trainer2, technique 000.F3.
    """
    network = Network(weights)
    device = weights[0].device
    parallel = DistributedDataParallel(network, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (parallel(inputs) - targets).square().mean()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step
