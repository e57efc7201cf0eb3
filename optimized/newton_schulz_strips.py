"""Products of `optimized.newton_schulz` in strips, for Hopper GPUs (ups, technique 002.8).

Memory delivers the operands of tiles, and accepts their results, more slowly than tensor cores multiply. This kernel
therefore moves less data. A multiprocessor computes a strip, which is a row of adjacent tiles. It loads the left
operand of the strip once and keeps it in shared memory. No transpose is stored: of a symmetric matrix, only the tiles
on and above the diagonal exist. Where a product needs another panel of it, the kernel loads the panel's mirror image
and reads it by rows instead of columns. Such a panel is called turned. If x is the right operand, all of its panels are
turned.

One warp loads operands. Two groups of four warps compute tiles alternately: while one group stores a tile, the other
multiplies. The kernel is written in Gluon, the level of Triton with explicit shared memory and barriers.
"""

import functools

import torch

from optimized.kernels import HOPPER, INTERPRETED

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

# Rows and columns of a tile, and columns of a panel, whose rows have 128 bytes.
ROWS_OF_TILE, COLUMNS_OF_PANEL = 128, 64
# Left and right panels of 128 rows that fit in shared memory, next to one result panel for each group.
LEFT, RIGHT = 8, 4
# Most tiles of a strip: LONGEST if a step has at least ROWS_EACH rows of tiles for each program, else SHORTER. Longer
# strips would leave multiprocessors idle. Two tiles are enough for both groups of a multiprocessor to have work.
LONGEST, SHORTER, ROWS_EACH = 8, 2, 4
# int32 fields of a strip.
NUMBERS = 18
# Registers per thread: at the start of the kernel, in the multiplying groups, and in the loading warp.
REGISTERS, MULTIPLYING, LOADING = 168, 232, 40
# Bits of a strip's flags.
DIAGONAL, SHARED, TURNING = 1, 2, 4


def reason() -> str | None:
    """Return None if the strip kernel can run here, or be compiled ahead of time for a Hopper GPU; else the reason."""
    if gluon is None:
        return "Triton has no Gluon; pip install 'triton>=3.6,<3.8' (Linux only)"
    if INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER:
        return "the kernel is for GPUs of compute capability 9.0"
    return None


def serves(device: torch.device, dtype: torch.dtype, tile: int) -> bool:
    """Return whether the strip kernel supports these tiles: 128 rows, in half precision, on a Hopper GPU."""
    if reason() is not None or dtype.itemsize != 2 or tile != ROWS_OF_TILE:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER


def blocks_of(room: torch.Tensor) -> "list[TensorDescriptor]":
    """Return the tensor descriptors for loads and stores of panels, and of half panels, of `room`."""
    element = gl.bfloat16 if room.dtype == torch.bfloat16 else gl.float16
    shapes = [[rows, COLUMNS_OF_PANEL] for rows in (ROWS_OF_TILE, ROWS_OF_TILE // 2)]
    layouts = [gl.NVMMASharedLayout.get_default_for(shape, element) for shape in shapes]
    return [TensorDescriptor.from_tensor(room, *block) for block in zip(shapes, layouts, strict=True)]


@functools.cache
def programs(device: torch.device) -> int:
    """Return the number of programs that run at once: one on each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def longest(device: torch.device, rows: int) -> int:
    """Return the most tiles of a strip, for a step with `rows` rows of tiles."""
    return LONGEST if rows >= ROWS_EACH * programs(device) else SHORTER


def iterate(
    blocks: "list[TensorDescriptor]",
    tasks: torch.Tensor,
    counters: torch.Tensor,
    sums: torch.Tensor,
    sums_padded: int,
) -> None:
    """Compute all strips of `tasks`, int32 [strips, NUMBERS].

    counters     zeros at first: the next strip, and for each matrix the number of tiles that are done
    sums         float32 [matrices, n]; the sum of row i is the squared norm of matrix i
    sums_padded  a power of two, at least n
    """
    iterate_kernel[(min(programs(tasks.device), len(tasks)),)](
        *blocks,
        tasks,
        len(tasks),
        counters,
        sums,
        sums.shape[1],
        SUMS=sums_padded,
        num_warps=4,
        maxnreg=REGISTERS,
    )


if gluon is not None:
    TILE, PANEL = gl.constexpr(ROWS_OF_TILE), gl.constexpr(COLUMNS_OF_PANEL)
    LEFT_SLOTS, RIGHT_SLOTS, TASK_SLOTS = gl.constexpr(LEFT), gl.constexpr(RIGHT), gl.constexpr(2)
    FIELDS, BYTES = gl.constexpr(NUMBERS), gl.constexpr(ROWS_OF_TILE * COLUMNS_OF_PANEL * 2)
    MULTIPLYING_REGISTERS, LOADING_REGISTERS = gl.constexpr(MULTIPLYING), gl.constexpr(LOADING)
    IS_DIAGONAL, IS_SHARED, IS_TURNING = gl.constexpr(DIAGONAL), gl.constexpr(SHARED), gl.constexpr(TURNING)
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name until Triton 3.6

    @gluon.jit
    def _fence_global():
        """Order stores of other programs before loads by the tensor memory accelerator (TMA)."""
        gl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)

    @gluon.jit
    def _wait_for_stores():
        """Wait until the TMA's stores are visible; `tma.store_wait` waits only until the TMA has read their source."""
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)

    @gluon.jit
    def _load(tensors, shared, rows, height, is_turned, slot, number, SLOTS: gl.constexpr):
        """Load a panel, the `number`th of the left or right operands, as soon as its slot is free.

        rows       (first row of the panel, first row of its mirror image)
        is_turned  load the mirror image instead: PANEL rows of two panels
        """
        blocks, halves = tensors
        operands, full, empty = shared
        row, turned_row = rows
        at = number % SLOTS
        mbarrier.wait(empty.index(at), (number // SLOTS & 1) ^ 1)
        mbarrier.expect(full.index(at), BYTES)
        to = operands.index(slot + at)
        if is_turned:
            tma.async_copy_global_to_shared(halves, [turned_row, 0], full.index(at), to.slice(0, PANEL))
            tma.async_copy_global_to_shared(halves, [turned_row + height, 0], full.index(at), to.slice(PANEL, PANEL))
        else:
            tma.async_copy_global_to_shared(blocks, [row, 0], full.index(at), to)

    @gluon.jit
    def _loader(listed, shared):
        """Take strips from the list, pass their numbers to the multiplying groups, and load their operands."""
        tensors, tasks_ptr, count, counters_ptr = listed
        operands, strips, barriers = shared
        left_full, left_empty, right_full, right_empty, strip_full, strip_empty, _ = barriers
        left_shared, right_shared = (operands, left_full, left_empty), (operands, right_full, right_empty)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        lefts = 0
        rights = 0
        number = 0
        live = True
        while live:
            task = gl.atomic_add(counters_ptr, 1, sem="relaxed")
            live = task < count
            task_ptr = tasks_ptr + FIELDS * task
            if live:
                done_ptr = counters_ptr + 1 + gl.load(task_ptr + 10)
                needed = gl.load(task_ptr + 11)
                while gl.atomic_add(done_ptr, 0, sem="acquire") < needed:
                    pass
            slot = number % TASK_SLOTS
            mbarrier.wait(strip_empty.index(slot), (number // TASK_SLOTS & 1) ^ 1)
            strips.index(slot).store(gl.full([1], task, gl.int32, layout))
            mbarrier.arrive(strip_full.index(slot), count=1)
            number += 1
            if live:
                left, left_turned, left_turns = gl.load(task_ptr), gl.load(task_ptr + 1), gl.load(task_ptr + 2)
                right, right_turned, right_turns = gl.load(task_ptr + 3), gl.load(task_ptr + 4), gl.load(task_ptr + 5)
                height, panels = gl.load(task_ptr + 6), gl.load(task_ptr + 7)
                tiles, flags = gl.load(task_ptr + 8), gl.load(task_ptr + 9)
                _fence_global()
                for tile in range(tiles):
                    turns = right_turns + gl.where((flags & IS_TURNING) > 0, 2 * tile, 0)
                    for k in range(panels):
                        if tile == 0:
                            rows = (left + k * height, left_turned + k * PANEL)
                            _load(tensors, left_shared, rows, height, k < left_turns, 0, lefts, LEFT_SLOTS)
                            lefts += 1
                        if (tile > 0) | ((flags & IS_SHARED) == 0):
                            row = right + tile * TILE + k * height
                            rows = (row, right_turned + 2 * tile * height + k * PANEL)
                            _load(tensors, right_shared, rows, height, k < turns, LEFT_SLOTS, rights, RIGHT_SLOTS)
                            rights += 1

    @gluon.jit
    def _scale_of(sums_ptr, matrix, sums_of_each, SUMS: gl.constexpr):
        """Return 1 / norm of a matrix, as in `newton_schulz`."""
        at = gl.arange(0, SUMS, gl.BlockedLayout([1], [32], [4], [0]))
        sums = gl.load(sums_ptr + matrix * sums_of_each + at, mask=at < sums_of_each, other=0.0)
        return 1.0 / gl.maximum(gl.sqrt_rn(gl.sum(sums, 0)), 1e-7)

    @gluon.jit
    def _diagonal(first: gl.constexpr, value, layout: gl.constexpr):
        """Return the panel from column `first` of a tile on, with `value` on the tile's diagonal and 0 elsewhere."""
        rows = gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
        columns = first + gl.arange(0, PANEL, gl.SliceLayout(0, layout))[None, :]
        return gl.where(rows == columns, value, 0.0)

    @gluon.jit
    def _store(blocks, row, out, value):
        """Start to store a panel of a result, as soon as `out` is free."""
        tma.store_wait(0)
        out.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(blocks, [row, 0], out)

    @gluon.jit
    def _turned(operand):
        """View a turned panel in the shape of its mirror image, [PANEL, TILE]."""
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        return operand._reinterpret(operand.dtype, [PANEL, TILE], layout)

    @gluon.jit
    def _multiply(loaded, left, right, k, freed, total, LEFT: gl.constexpr, RIGHT: gl.constexpr):
        """Start to add the product of two panels as soon as they are loaded, and wait for the previous product.

        LEFT, RIGHT  whether the left and the right panel are turned
        """
        operands, left_full, left_empty, right_full, right_empty = loaded
        of_left, of_right = freed
        at = (left + k) % LEFT_SLOTS
        to = (right + k) % RIGHT_SLOTS
        mbarrier.wait(left_full.index(at), (left + k) // LEFT_SLOTS & 1)
        mbarrier.wait(right_full.index(to), (right + k) // RIGHT_SLOTS & 1, pred=of_right)
        one, other = operands.index(at), operands.index(gl.where(of_right, LEFT_SLOTS + to, at))
        one = _turned(one).permute((1, 0)) if LEFT else one
        other = _turned(other) if RIGHT else other.permute((1, 0))
        total = warpgroup_mma(one, other, total, is_async=True)
        total = warpgroup_mma_init(warpgroup_mma_wait(1, (total,)))
        _free(left_empty, right_empty, left + k - 1, right + k - 1, of_left & (k > 0), of_right & (k > 0))
        return total

    @gluon.jit
    def _free(left_empty, right_empty, left, right, of_left, of_right):
        """Mark two panels as read, so that their slots can be reused."""
        mbarrier.arrive(left_empty.index(left % LEFT_SLOTS), count=1, pred=of_left)
        mbarrier.arrive(right_empty.index(right % RIGHT_SLOTS), count=1, pred=of_right)

    @gluon.jit
    def _sum(loaded, left, right, turns, panels, freed, next_turn):
        """Return a tile's product, and let the other group begin while the last panels are being multiplied."""
        _, _, left_empty, _, right_empty = loaded
        left_turns, right_turns = turns
        mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
        total = warpgroup_mma_init(gl.zeros([TILE, TILE], gl.float32, mma))
        # The right operand has at least as many turned panels as the left operand.
        for k in range(left_turns):
            total = _multiply(loaded, left, right, k, freed, total, True, True)
        for k in range(left_turns, right_turns):
            total = _multiply(loaded, left, right, k, freed, total, False, True)
        for k in range(right_turns, panels):
            total = _multiply(loaded, left, right, k, freed, total, False, False)
        mbarrier.arrive(next_turn, count=1)
        result = warpgroup_mma_wait(0, (total,))
        _free(left_empty, right_empty, left + panels - 1, right + panels - 1, *freed)
        return result

    @gluon.jit
    def _multiplier(OWN: gl.constexpr, listed, summed, shared, out, added_full, SUMS: gl.constexpr):
        """Compute every second tile, as group number `OWN` (0 or 1)."""
        tensors, tasks_ptr, count, counters_ptr = listed
        blocks, _ = tensors
        sums_ptr, sums_of_each = summed
        operands, strips, barriers = shared
        left_full, left_empty, right_full, right_empty, strip_full, strip_empty, turns = barriers
        loaded = (operands, left_full, left_empty, right_full, right_empty)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        # Counts before this strip: loaded left panels, loaded right panels, strips, tiles, added panels.
        lefts = 0
        rights = 0
        number = 0
        sequence = 0
        addeds = 0
        live = True
        while live:
            slot = number % TASK_SLOTS
            mbarrier.wait(strip_full.index(slot), number // TASK_SLOTS & 1)
            task = gl.max(strips.index(slot).load(layout), 0)
            mbarrier.arrive(strip_empty.index(slot), count=1)
            number += 1
            live = task < count
            if live:
                task_ptr = tasks_ptr + FIELDS * task
                left_turns, right_turns = gl.load(task_ptr + 2), gl.load(task_ptr + 5)
                height, panels = gl.load(task_ptr + 6), gl.load(task_ptr + 7)
                tiles, flags, matrix = gl.load(task_ptr + 8), gl.load(task_ptr + 9), gl.load(task_ptr + 10)
                out_row, added_row, power = gl.load(task_ptr + 12), gl.load(task_ptr + 13), gl.load(task_ptr + 14)
                factor = gl.load(task_ptr + 15).to(gl.float32, bitcast=True)
                plus = gl.load(task_ptr + 16).to(gl.float32, bitcast=True)
                diagonal = gl.load(task_ptr + 17).to(gl.float32, bitcast=True)
                if power > 0:
                    scale = _scale_of(sums_ptr, matrix, sums_of_each, SUMS)
                    factor *= gl.where(power > 1, scale * scale, scale)
                # The group frees the left operand with the last of its tiles, or at once if it has no tile.
                last = tiles - 1 - (sequence + tiles - 1 + OWN) % 2
                if last < 0:
                    for k in range(panels):
                        at = (lefts + k) % LEFT_SLOTS
                        mbarrier.wait(left_full.index(at), (lefts + k) // LEFT_SLOTS & 1)
                        mbarrier.arrive(left_empty.index(at), count=1)
                for tile in range(tiles):
                    is_diagonal = (tile == 0) & ((flags & IS_DIAGONAL) > 0)
                    is_shared = (tile == 0) & ((flags & IS_SHARED) > 0)
                    if (sequence + tile) % 2 == OWN:
                        if added_row >= 0:
                            _fence_global()
                            fence_async_shared()
                            mbarrier.expect(added_full, BYTES)
                            row = added_row + tile * 2 * height
                            tma.async_copy_global_to_shared(blocks, [row, 0], added_full, out)
                        # A barrier distinguishes only two consecutive phases, so the groups wait for right operands in
                        # order.
                        mbarrier.wait(turns.index(OWN), ((sequence + tile) // 2 & 1) ^ (1 - OWN))
                        freed = (tile == last, not is_shared)
                        # Computed from `tile`, not added up from tile to tile: Triton 3.6 and 3.7 treat a sum that an
                        # outer loop carries, and that bounds an inner loop, as a constant.
                        turns_of = (left_turns, right_turns + gl.where((flags & IS_TURNING) > 0, 2 * tile, 0))
                        result = _sum(loaded, lefts, rights, turns_of, panels, freed, turns.index(1 - OWN)) * factor
                        low, high = gl.split(gl.permute(gl.reshape(result, [TILE, 2, PANEL]), [0, 2, 1]))
                        half: gl.constexpr = low.type.layout
                        if added_row >= 0:
                            mbarrier.wait(added_full, addeds & 1)
                            low += plus * out.load(half).to(gl.float32)
                            fence_async_shared()
                            mbarrier.expect(added_full, BYTES)
                            row = added_row + tile * 2 * height + height
                            tma.async_copy_global_to_shared(blocks, [row, 0], added_full, out)
                            mbarrier.wait(added_full, (addeds & 1) ^ 1)
                            high += plus * out.load(half).to(gl.float32)
                            addeds += 2
                            if is_diagonal:
                                low += _diagonal(0, diagonal, half)
                                high += _diagonal(PANEL, diagonal, half)
                        low, high = low.to(blocks.dtype), high.to(blocks.dtype)
                        row = out_row + tile * 2 * height
                        _store(blocks, row, out, low)
                        _store(blocks, row + height, out, high)
                        _wait_for_stores()
                        _fence_global()
                        # One thread counts the tile as done, after all threads of the group have stored.
                        barrier()
                        gl.atomic_add(counters_ptr + 1 + matrix, 1, sem="release")
                    rights += gl.where(is_shared, 0, panels)
                lefts += panels
                sequence += tiles

    @gluon.jit
    def _second_multiplier(listed, summed, shared, out, added_full, SUMS: gl.constexpr):
        _multiplier(1, listed, summed, shared, out, added_full, SUMS)

    @gluon.jit
    def _barriers(SLOTS: gl.constexpr, arrivals: gl.constexpr):
        """Return SLOTS barriers that complete a phase after `arrivals` arrivals."""
        made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(made.index(i), count=arrivals)
        return made

    @gluon.jit
    def iterate_kernel(blocks, halves, tasks_ptr, count, counters_ptr, sums_ptr, sums_of_each, SUMS: gl.constexpr):
        """Compute out = factor * left right' + plus * added + diagonal * I for each strip of [TILE, TILE] tiles.

        Each program takes the next strip until none is left. Its loading warp and its two multiplying groups share
        LEFT_SLOTS + RIGHT_SLOTS panels of [TILE, PANEL] in shared memory, and each group has one panel for results.
        """
        operands = gl.allocate_shared_memory(blocks.dtype, [LEFT_SLOTS + RIGHT_SLOTS, TILE, PANEL], blocks.layout)
        outs = gl.allocate_shared_memory(blocks.dtype, [2, TILE, PANEL], blocks.layout)
        strips = gl.allocate_shared_memory(gl.int32, [TASK_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # Both groups must free a left operand and a strip's number; only the group that reads it frees a right operand.
        barriers = (
            _barriers(LEFT_SLOTS, 1),
            _barriers(LEFT_SLOTS, 2),
            _barriers(RIGHT_SLOTS, 1),
            _barriers(RIGHT_SLOTS, 1),
            _barriers(TASK_SLOTS, 1),
            _barriers(TASK_SLOTS, 2),
            _barriers(2, 1),
        )
        added_full = _barriers(2, 1)
        listed, shared = ((blocks, halves), tasks_ptr, count, counters_ptr), (operands, strips, barriers)
        summed = (sums_ptr, sums_of_each)
        gl.warp_specialize(
            [
                (_multiplier, (0, listed, summed, shared, outs.index(0), added_full.index(0), SUMS)),
                (_second_multiplier, (listed, summed, shared, outs.index(1), added_full.index(1), SUMS)),
                (_loader, (listed, shared)),
            ],
            [4, 1],
            [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
        )
