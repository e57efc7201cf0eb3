"""Addresses of tensors on the device, for kernels that work on many tensors in one launch."""

from collections.abc import Sequence

import torch

# Vector accesses need addresses that are multiples of this many bytes.
ALIGNMENT = 16


class Addresses:
    """A table of addresses on a device, sent again only when a tensor has moved."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sent: list[int] | None = None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring `table` (int64) and `aligned` up to date with these tensors."""
        addresses = [t.data_ptr() for t in tensors]
        if addresses == self.sent:
            return
        # From pinned memory, which the allocator keeps until the copy is done: the host does not wait.
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.table = host.to(self.device, non_blocking=True)
        self.aligned = are_aligned(addresses)
        self.sent = addresses


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether vector accesses may begin at all of them."""
    return all(address % ALIGNMENT == 0 for address in addresses)
