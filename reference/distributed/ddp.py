"""Data-parallel training with an all-reduce for each gradient of each micro-batch (eigenstate_lm, 004.15)."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def ddp(weights: Sequence[torch.Tensor], lr: float = 0.1) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Build `step(inputs, targets)`, which takes one SGD step on a network's mean squared error; all ranks call it.

    All ranks have the same weights. Each has its own part of every micro-batch; the parts have the same size. The
    gradient is the mean over micro-batches and ranks.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; changed in place
    inputs   [micro-batches, rows, in]
    targets  [micro-batches, rows, out]

    Source: eigenstate_lm, technique 004.15.
    """

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        gradients = [torch.zeros_like(w) for w in weights]
        for x, target in zip(inputs, targets, strict=True):
            leaves = [w.detach().requires_grad_() for w in weights]
            with torch.enable_grad():
                loss = (network(leaves, x) - target).square().mean()
            for total, gradient in zip(gradients, torch.autograd.grad(loss, leaves), strict=True):
                dist.all_reduce(gradient)
                total.add_(gradient / (dist.get_world_size() * len(inputs)))
        with torch.no_grad():
            for w, gradient in zip(weights, gradients, strict=True):
                w.sub_(lr * gradient)

    return step


def network(weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply linear layers with tanh between them: [rows, in] → [rows, out]."""
    for i, w in enumerate(weights):
        x = (torch.tanh(x) if i else x) @ w.T
    return x
