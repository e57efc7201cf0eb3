"""Network of the distributed techniques, as a module."""

from collections.abc import Sequence

import torch


class Layer(torch.nn.Module):
    """A linear layer without a bias."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, in] to [rows, out]."""
        return x @ self.weight.T


class TanhNetwork(torch.nn.Module):
    """Linear layers with tanh between them. The parameters share the memory of the weights, each [out, in]."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(w.detach()) for w in weights])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, in] to [rows, out]."""
        for i, layer in enumerate(self.layers):
            x = layer(torch.tanh(x) if i else x)
        return x
