"""Reading a report's metrics in one copy (trainer2, technique 000.1)."""

import torch


def metric_batching(
    lior_acc: torch.Tensor, R_acc: torch.Tensor, speed_acc: torch.Tensor, steps: int
) -> tuple[float, float, float]:
    """The means (lior, R_sc, speed) over `steps` steps, as Python floats, from their 0-d sums.

    From a device one copy of a 3-vector: exactly one host synchronisation. On the CPU a read waits for nothing, and
    the three are read as they are. Raises ZeroDivisionError when steps is 0.

    Source: trainer2, technique 000.1.
    """
    if lior_acc.is_cpu:
        return lior_acc.item() / steps, R_acc.item() / steps, speed_acc.item() / steps
    return metric_batching_stacked(lior_acc, R_acc, speed_acc, steps)


def metric_batching_stacked(
    lior_acc: torch.Tensor, R_acc: torch.Tensor, speed_acc: torch.Tensor, steps: int
) -> tuple[float, float, float]:
    """`metric_batching` by one copy, on any device."""
    # A pinned buffer with an event would need a wait of its own: tolist() copies and waits once. The division is
    # the host's, so that it costs no kernel and rounds as the reference's does.
    lior, r, speed = torch.stack((lior_acc, R_acc, speed_acc)).tolist()
    return lior / steps, r / steps, speed / steps
