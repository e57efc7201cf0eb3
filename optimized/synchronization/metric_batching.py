"""Reading a report's metrics in one copy (trainer2, technique 000.1)."""

import torch


def metric_batching(
    lior_acc: torch.Tensor, R_acc: torch.Tensor, speed_acc: torch.Tensor, steps: int
) -> tuple[float, float, float]:
    """The means (lior, R_sc, speed) over `steps` steps, as Python floats, from their 0-d sums.

    One device-to-host copy of a 3-vector: exactly one host synchronisation. Raises ZeroDivisionError when steps
    is 0.

    Source: trainer2, technique 000.1.
    """
    # A pinned buffer with an event would need a wait of its own: tolist() copies and waits once. The division is
    # the host's, so that it costs no kernel and rounds as the reference's does.
    lior, r, speed = torch.stack((lior_acc, R_acc, speed_acc)).tolist()
    return lior / steps, r / steps, speed / steps
