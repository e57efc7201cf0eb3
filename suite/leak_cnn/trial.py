"""Parts shared by the pairs that run the whole network: inputs, its weights as a module, and gradient jumps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite import floats, integers, module, size, tensor
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.model import POOLED_ROWS, Weights, head, pool

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Bound on the rounding error of a float32 sum, relative to the sum of the absolute values of its terms."""


class Network(torch.nn.Module):
    """Module that holds the 12 weight tensors of the network by name, for any number of channels."""

    def __init__(self, c1: int, c2: int, c3: int, h: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, c1, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(c1, c2, 3, padding=1)
        self.conv3 = torch.nn.Conv2d(c2, c3, 3, padding=1)
        self.hidden = torch.nn.Linear(POOLED_ROWS * c3, h)
        self.classes = torch.nn.Linear(h, len(CLASSES))
        self.leak = torch.nn.Linear(h, 1)


INPUTS: Mapping[str, Any] = {
    "network": module(Network),
    "segments": tensor("N", 1, "H", 1, values=floats(-3, 3), differentiable=False),
    "labels": tensor("N", dtype="int64", values=integers(0, len(CLASSES))),
    "class_weights": tensor(len(CLASSES), values=floats(0.5, 2), differentiable=False),
}
"""Inputs of a pair that runs the network. Their sizes are drawn from `SIZES`."""
SIZES = {
    "N": size(1, 9),
    "H": size(4, 33),
    "c1": size(1, 5),
    "c2": size(1, 5),
    "c3": size(1, 5),
    "h": size(1, 9),
}
"""Range of each size of the inputs."""
FEW = {"N": 2, "H": 32, "c1": 4, "c2": 4, "c3": 4, "h": 8}
"""Small sizes: with so few values, one is rarely within rounding error of a ReLU's kink at 0 or of a pooling tie."""


def drawn() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights of a small network, segments, labels, class weights), the same in each call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        weights: dict[str, torch.Tensor] = dict(Network(3, 4, 5, 6).named_parameters())
        return weights, torch.randn(6, 1, 32, 1), torch.tensor([0, 1, 2, 3, 4, 2]), torch.ones(5)


class Seen(TorchDispatchMode):
    """Dispatch mode that records `note(arguments)` for each operation."""

    def __init__(self, note: Callable[[tuple[Any, ...]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.note, self.seen = note, list[tuple[str, object]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.overloadpacket.__name__, self.note(args)))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[object]:
        """Return the records of all operations with this name."""
        return [noted for operation, noted in self.seen if operation == name]


def on_network(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call`, whose first argument is a mapping of weights, to accept a `Network` instead."""

    def on_weights(network: Network, *arguments: torch.Tensor) -> Any:
        return call(dict(network.named_parameters()), *arguments)

    return on_weights


def near_a_threshold(
    network: Network, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return gradient name → whether float32 rounding may make the gradient jump, bool 0-d.

    A gradient jumps where a ReLU input is near 0 or a pooling has nearly equal inputs. The value is the same for all
    gradients: True if any segment is near such a threshold.
    """
    weights = dict(network.named_parameters())
    with torch.no_grad():
        near = _near(weights, segments).any()
    # Names of the gradients that the harness computes, and of those that a step returns.
    names = [*(f"gradient of network.{name}" for name in weights), *(f"output[1]['{name}']" for name in weights)]
    return dict.fromkeys(names, near)


def off_thresholds(network: Network, segments: torch.Tensor, *_: torch.Tensor) -> None:
    """Overwrite segments whose gradients may jump with segments whose gradients cannot, in place.

    A large batch has thousands of segments. A jump in one of them would change every weight gradient by more than its
    rounding error.
    """
    write_over(segments, _near({name: w.double() for name, w in network.named_parameters()}, segments.double()))


def write_over(items: torch.Tensor, where: torch.Tensor) -> None:
    """Overwrite finite items [N, …] whose `where` [N] is True with finite items whose `where` is False, in place."""
    finite = items.isfinite().flatten(1).all(1)
    at, others = (finite & where).nonzero().flatten(), (finite & ~where).nonzero().flatten()
    if len(others):
        items[at] = items[others[torch.arange(len(at), device=at.device) % len(others)]]


def _near(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Return whether each segment is within rounding error of a ReLU's kink or of a pooling tie, bool [N]."""
    near = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for name in ("conv1", "conv2", "conv3"):
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        before = functional.conv2d(x, weight, bias, padding=1)
        within = ROUNDING * functional.conv2d(x.abs(), weight.abs(), bias.abs(), padding=1)
        near |= (before.abs() <= within).flatten(1).any(1)
        x = functional.relu(before)
        if name != "conv1":
            pairs = x[:, :, : x.shape[2] // 2 * 2].unflatten(2, (-1, 2))
            gap = (pairs[:, :, :, 0] - pairs[:, :, :, 1]).abs()
            top, tolerance = pairs.amax(3), within[:, :, : x.shape[2] // 2 * 2].unflatten(2, (-1, 2)).amax(3)
            near |= ((gap <= tolerance) & (top > 0)).flatten(1).any(1)
            x = pool(x)
    hidden: list[torch.Tensor] = []

    def kept(before: torch.Tensor) -> torch.Tensor:
        hidden.append(before)
        return functional.relu(before)

    head(weights, x, activation=kept)
    scale = hidden[0].abs().max() if hidden[0].numel() else 0.0
    return near | (hidden[0].abs() <= ROUNDING * scale).any(1)
