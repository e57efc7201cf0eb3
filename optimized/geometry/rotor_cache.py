"""Cache of rotated coordinates, which is recomputed only when theta changes (trainer2, technique 000.F4)."""

from collections.abc import Callable

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton
from optimized.rotor import check_even, load_columns, rotate, rotate_columns, rotate_into, serves

# Rows that a program of `write` stores, and slots that it compares them with at a time.
WRITE_BLOCK = tl.constexpr(32)
# The kernel compares every written slot with every other. Longer writes use the vectorised form, which is linear.
MAX_WRITE = 4096


class RotorCache:
    """Stored coordinates and their rotated copies.

    `set_theta` rotates all coordinates, and `write` only the new ones. Neither waits for the device. The cache never
    compares angles: call `set_theta` when theta has changed. With a CUDA graph, capture `write` and `rotated`, and call
    `set_theta` outside the graph: it rotates at once, and in the same memory.

    theta        [k], radians
    coordinates  [M, n], copied; n even, else ValueError
    """

    def __init__(self, theta: torch.Tensor, coordinates: torch.Tensor) -> None:
        check_even(coordinates.shape[-1])
        self._coordinates = coordinates.detach().clone(memory_format=torch.contiguous_format)
        self._rotated = torch.empty_like(self._coordinates)
        self._theta = torch.empty_like(theta, memory_format=torch.contiguous_format)
        self._kernels = use_triton(theta, coordinates)
        self.set_theta(theta)

    @torch.no_grad()
    def set_theta(self, theta: torch.Tensor) -> None:
        """Use these angles from now on. They are copied, so later changes of `theta` have no effect.

        Another number of angles needs new memory: capture a CUDA graph of `write` again.
        """
        if theta.shape != self._theta.shape:
            self._theta = self._theta.new_empty(theta.shape)
        self._theta.copy_(theta)
        if self._kernels and serves(self._theta, self._coordinates) and self._coordinates.numel():
            rotate_into(self._theta, self._coordinates, self._rotated)
        else:
            self._rotated.copy_(rotate(self._theta, self._coordinates))

    @torch.no_grad()
    def write(self, slots: torch.Tensor, coordinates: torch.Tensor) -> None:
        """Store `coordinates` [W, n] in `slots`, int64 [W], each in [0, M). A repeated slot gets its last row."""
        count = slots.shape[0]
        if not count or not coordinates.numel():
            return
        if self._kernels and serves(self._theta, self._coordinates) and count <= MAX_WRITE:
            with launching(coordinates):
                _write_kernel[(ceil_div(count, WRITE_BLOCK.value),)](
                    self._theta,
                    slots,
                    coordinates,
                    self._coordinates,
                    self._rotated,
                    count,
                    self._coordinates.shape[0],
                    slots.stride(0),
                    coordinates.stride(0),
                    coordinates.stride(1),
                    N=coordinates.shape[1],
                    K=self._theta.shape[0],
                    num_warps=1,
                )
            return
        # All rows of a repeated slot get the values of its last row, so the order of the stores does not matter.
        rows = torch.arange(count, device=slots.device)
        last = torch.full((self._coordinates.shape[0],), -1, dtype=torch.int64, device=slots.device)
        last = last.scatter_reduce_(0, slots, rows, "amax").index_select(0, slots)
        coordinates = coordinates.detach()[last]
        self._coordinates[slots] = coordinates
        self._rotated[slots] = rotate(self._theta, coordinates)

    def rotated(self) -> torch.Tensor:
        """Return the rotated coordinates, [M, n]. Do not write to them; they are valid until the next change.

        The result is the cache's own memory, whose address never changes. Clone it to keep it.
        """
        return self._rotated


class _TritonRotorCache(RotorCache):
    """A `RotorCache` that always uses the kernels, also on the CPU in Triton's interpreter."""

    def __init__(self, theta: torch.Tensor, coordinates: torch.Tensor) -> None:
        super().__init__(theta, coordinates)
        self._kernels = True
        self.set_theta(theta)


def rotor_cache(
    theta: torch.Tensor, coordinates: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Build `step(slots, written, theta=None)`, which sets theta if given, writes, and returns all rotated coordinates.

    A step returns the cache's own memory, valid until the next step; see `RotorCache`.

    Source: trainer2, technique 000.F4.
    """
    return _step(RotorCache(theta, coordinates))


def rotor_cache_triton(
    theta: torch.Tensor, coordinates: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Build `rotor_cache` with the kernels, in float32."""
    return _step(_TritonRotorCache(theta, coordinates))


def _step(cache: RotorCache) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    def step(slots: torch.Tensor, written: torch.Tensor, theta: torch.Tensor | None = None) -> torch.Tensor:
        if theta is not None:
            cache.set_theta(theta)
        cache.write(slots, written)
        return cache.rotated()

    return step


@jit
def _write_kernel(
    theta_ptr, slots_ptr, written_ptr, coordinates_ptr, rotated_ptr,
    count, capacity, stride_slot, stride_row, stride_column,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Store coordinates[slot] = x and rotated[slot] = R x for each written row x.

    A program stores WRITE_BLOCK rows. It compares their slots with all slots, WRITE_BLOCK at a time, and skips a row
    whose slot occurs again later.
    """
    row = tl.program_id(0) * WRITE_BLOCK + tl.arange(0, WRITE_BLOCK)
    slot = tl.load(slots_ptr + row.to(tl.int64) * stride_slot, mask=row < count, other=-1)
    # Only the last row of a slot is stored. Each program sees all slots, so programs may run in any order.
    last = tl.full((WRITE_BLOCK,), -1, dtype=tl.int32)
    for start in range(0, count, WRITE_BLOCK):
        other = start + tl.arange(0, WRITE_BLOCK)
        slots = tl.load(slots_ptr + other.to(tl.int64) * stride_slot, mask=other < count, other=-1)
        same = slots[None, :] == slot[:, None]
        last = tl.maximum(last, tl.max(tl.where(same, other[None, :], -1), axis=1))
    # A slot out of range would store out of bounds.
    stored = (row < count) & (last == row) & (slot >= 0) & (slot < capacity)
    columns = load_columns(written_ptr, row.to(tl.int64), stored, stride_row, stride_column, N)
    for m in tl.static_range(N):
        tl.store(coordinates_ptr + slot * N + m, columns[m], mask=stored)
    columns = rotate_columns(columns, theta_ptr, N, K)
    for m in tl.static_range(N):
        tl.store(rotated_ptr + slot * N + m, columns[m], mask=stored)
