"""Cross-entropy in chunks of rows: the logits of all rows never exist at once (eigenstate_lm, technique 004.11)."""

import torch
from torch.nn import functional

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = -100
ROWS = 4096
"""Rows whose logits are computed at a time. With a vocabulary of 50,257 they take 0.4 GB in bfloat16, and the matrix
products are large enough."""
BLOCK, NUM_WARPS = 4096, 8
"""Logits of a row that the kernel loads at a time, and its warps."""
COLUMNS = 64
"""On CUDA the columns of the logits are padded to a multiple of this. A product with an odd number of columns, such as
50,257, takes five times as long."""


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int = ROWS
) -> torch.Tensor:
    """Compute the mean cross-entropy of `hidden @ weight.T` against the labels, 0-d; labels of −100 are ignored.

    The loss has the dtype of `hidden`, and float32 under autocast. If all labels are ignored, it is NaN. There is no
    second derivative.

    The logits are computed once, for `rows` rows at a time. The forward pass also computes the required gradients from
    them, except for the incoming gradient as a factor. Computing the logits again in the backward pass, as the source
    does, would need a fourth matrix product of the same size. The losses and the gradient of the weight are accumulated
    in float32, or in float64 for float64.

    On CUDA, in float32, bfloat16 and float16, a Triton kernel computes each row's loss in float32 and overwrites the
    logits with their gradient. There the weight is padded to a multiple of 64 rows. All other inputs use PyTorch
    operations.

    hidden  [N, D]
    weight  [V, D]
    labels  [N] int64, below V; a negative label other than −100 makes the loss NaN
    rows    number of rows whose logits are computed at a time

    ValueError if `rows` is below 1.

    Source: eigenstate_lm, technique 004.11, which expects 13 to 26 GB less memory.
    """
    return _with(None, hidden, weight, labels, rows)


def chunked_cross_entropy_torch(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int = ROWS
) -> torch.Tensor:
    """Compute `chunked_cross_entropy` in PyTorch operations."""
    return _with(_rows_torch, hidden, weight, labels, rows)


def chunked_cross_entropy_triton(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int = ROWS
) -> torch.Tensor:
    """Compute `chunked_cross_entropy` with the Triton kernel, which does not support float64."""
    return _with(_rows_triton, hidden, weight, labels, rows)


def _with(by, hidden, weight, labels, rows):
    if rows < 1:
        raise ValueError(f"rows={rows}: at least one row is looked at at a time")
    # Cast as autocast would for functional.linear; it leaves float64 unchanged.
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    if autocast:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if by is None:
        by = _rows_triton if use_triton(hidden, weight, dtypes=DTYPES) else _rows_torch
    loss = _ChunkedCrossEntropy.apply(hidden, weight, labels, rows, by, torch.is_grad_enabled())
    return loss if autocast else loss.to(hidden.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, by, differentiated):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        V = len(weight)
        if by is _rows_triton and V % COLUMNS:
            weight = functional.pad(weight, (0, 0, 0, -V % COLUMNS))
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        wanted = [needed and differentiated for needed in ctx.needs_input_grad[:2]]
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                logits = hidden[part] @ weight.T
                d_logits = by(logits, V, labels[part], losses[part], any(wanted))
                if d_hidden is not None:
                    torch.mm(d_logits, weight, out=d_hidden[part])
                if d_weight is not None:
                    d_weight += _widened_product(d_logits.T, hidden[part])
        count = (labels != IGNORED).sum()
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight[:V], count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return losses.sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        *found, count = ctx.saved_tensors
        share = torch.where(count > 0, grad / count, 0.0)
        # Multiply in the wider dtype: in a lower precision the share itself would be rounded, or underflow to 0.
        scaled = [
            None if d is None else (d.to(share.dtype) * share).to(dtype)
            for d, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _widened_product(a, b):
    """Compute a @ b in float32, or in float64 for float64: a sum over thousands of rows may overflow float16."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.device.type == "cuda" and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _rows_torch(logits, V, labels, losses, wanted):
    """Write each row's loss to `losses`. Return the gradient of the logits in their dtype, or None if not `wanted`."""
    counted, place = (labels != IGNORED)[:, None], labels.clamp(min=0)[:, None]
    exponents = logits.to(losses.dtype)
    exponents = exponents - exponents.amax(1, keepdim=True)
    own = exponents.gather(1, place)
    sums = exponents.exp_().sum(1, keepdim=True)
    losses.copy_(torch.where(counted, sums.log() - own, 0.0).squeeze(1))
    losses.masked_fill_((labels < 0) & (labels != IGNORED), torch.nan)
    if not wanted:
        return None
    d_logits = exponents.div_(sums).scatter_add_(1, place, torch.full_like(own, -1.0))
    return d_logits.masked_fill_(~counted, 0.0).to(logits.dtype)


def _rows_triton(logits, V, labels, losses, wanted):
    """Compute `_rows_torch` for the first V columns. The gradient overwrites the logits, with 0 in the others."""
    count, columns = logits.shape
    with launching(logits):
        _rows_kernel[(count,)](
            logits,
            labels.contiguous(),
            losses,
            V,
            columns,
            ceil_div(columns, BLOCK),
            IGNORED=IGNORED,
            WANTED=wanted,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return logits if wanted else None


@jit
def _rows_kernel(
    logits_ptr, labels_ptr, losses_ptr,
    V, columns, blocks,
    IGNORED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute loss = log(sum_j exp(x_j)) − x_label and, if WANTED, overwrite x_j by softmax(x)_j − [j = label].

    One program processes one row of the contiguous logits [rows, columns], in blocks of BLOCK columns. The first pass
    computes the largest logit and the sum of exponentials relative to it (online softmax), the second the gradient. The
    columns from V on are padding: they are not read, and their gradient is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counted = label != IGNORED
    valid = (label >= 0) & (label < V)
    place = tl.where(valid, label, 0)
    logits_ptr += row * columns
    own = tl.load(logits_ptr + place).to(tl.float32)
    top = own
    total = tl.full([], 0.0, tl.float32)
    at = tl.arange(0, BLOCK)
    for block in range(blocks):
        here = block * BLOCK + at
        x = tl.load(logits_ptr + here, mask=here < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = higher
    loss = tl.where(valid, tl.log(total) - (own - top), float("nan"))
    tl.store(losses_ptr + row, tl.where(counted, loss, 0.0))
    if WANTED:
        share = tl.where(counted, 1.0 / total, 0.0)
        for block in range(blocks):
            here = block * BLOCK + at
            x = tl.load(logits_ptr + here, mask=here < V, other=-float("inf")).to(tl.float32)
            d = tl.exp(x - top) * share - tl.where((here == place) & counted, 1.0, 0.0)
            # The gradient of an ignored row is 0, even if its logits are not finite.
            d = tl.where(counted & (here < V), d, 0.0)
            tl.store(logits_ptr + here, d.to(logits_ptr.dtype.element_ty), mask=here < columns)
