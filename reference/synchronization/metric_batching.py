"""Reading of a report's metrics one at a time (trainer2, technique 000.1)."""

import torch


def metric_batching(
    lior_acc: torch.Tensor, R_acc: torch.Tensor, speed_acc: torch.Tensor, steps: int
) -> tuple[float, float, float]:
    """Return the means (lior, R_sc, speed) over `steps` steps, as Python floats, from their 0-d sums.

    It makes three device-to-host copies, and each of them waits for the device. Raises ZeroDivisionError if steps is 0.

    Source: trainer2, technique 000.1.
    """
    return lior_acc.item() / steps, R_acc.item() / steps, speed_acc.item() / steps
