"""The casts of autocast, for operations that PyTorch does not know."""

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in autocast's dtype if autocast is on, else unchanged; autocast does not cast float64."""
    first = tensors[0]
    if not torch.is_autocast_enabled(first.device.type) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(tensor.to(dtype) for tensor in tensors)
