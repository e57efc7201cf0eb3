"""Tables of tensor addresses on the device, for kernels that process many tensors in one launch."""

from collections.abc import Sequence

import torch

# Vector accesses need addresses that are multiples of this many bytes.
ALIGNMENT = 16


class Addresses:
    """A table of tensor addresses on a device, copied again only when an address has changed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sent: list[int] | None = None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Update `table` (int64) and `aligned` for these tensors."""
        addresses = [t.data_ptr() for t in tensors]
        if addresses == self.sent:
            return
        # Copy from pinned memory, so that the host does not wait. The allocator keeps it until the copy is done.
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.table = host.to(self.device, non_blocking=True)
        self.aligned = are_aligned(addresses)
        self.sent = addresses


def are_aligned(addresses: Sequence[int]) -> bool:
    """Return whether all addresses allow vector accesses."""
    return all(address % ALIGNMENT == 0 for address in addresses)
