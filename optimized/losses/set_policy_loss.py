"""The loss of the set policy gradient, which makes polychromic's diversity objective differentiable. The forward pass
reads the logits once, and so does the backward pass.

**Derivation.** The source trains on L = CE - lambda * D, where D is the mean of 1 - cos(e_i, e_j) over the pairs i < j
of n sampled replies. There D is a Python float. Sampling tokens has no derivative, so the gradient of lambda * D is
zero, and the source trains on CE alone. The expectation of D, however, has a gradient. With p(set) = prod_i p(reply_i),
and with D(set) independent of the model's parameters once the replies are given,

    grad E[D] = sum over sets of D(set) grad p(set) = E[D(set) grad log p(set)] = E[D(set) sum_i grad log p(reply_i)].

E[grad log p(reply_i)] is zero, also given the other replies of all sets. So any baseline b_i that does not depend on
reply i can be subtracted from the factor of grad log p(reply_i) without changing the expectation:

    grad E[D] = E[sum_i (D(set) - b_i) grad log p(reply_i)],   b_i independent of reply i.

The advantage of reply i is D(set) - b_i. The following baselines leave the gradient unbiased. Those marked with * are
in `suite.polychromic.advantages`.

* The mean of D over the *other* sets of the same prompt (*). The mean over *all* sets of a prompt, as in the
  polychromic objective, contains the set's own D, which scales the gradient by (S - 1) / S with S sets. Without the own
  set, the advantage is S / (S - 1) times as large.
* A running mean over earlier steps, passed as an input (*), for prompts with one set.
* The diversity of the set without reply i (*), from n - 1 >= 2 replies. It needs neither several sets nor a state.
* The mean of D over the sets of other prompts. Diversity differs between prompts, so the advantages have an offset that
  depends on the prompt. This offset is noise.

**Requirements.** The logits must be those of the distribution that was sampled from: divided by the temperature, and
-inf outside the top-p nucleus. The set of tokens in the nucleus is treated as constant. Log-probabilities of other
logits give a different, biased gradient.
"""

import torch
from torch.nn import functional

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16)
BLOCK, NUM_WARPS = 4096, 8  # 16 logits a thread; not yet chosen by a sweep on an H200
FINISH_BLOCK = 1024


def set_policy_loss(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return minus the mean over sets of the sum over a set's replies of advantage times log p(reply), 0-d.

    The loss is in float32, and in float64 for float64. Logits where the mask is False are not read, and their gradient
    is 0 even if they are not finite.

    On CUDA, Triton kernels compute the loss for logits in float32 and bfloat16, with two launches forward and one
    backward. They are deterministic. The forward pass reads the logits once and saves two float32 numbers per position:
    the largest logit, and the sum of exponentials relative to it. A single log-sum-exp would lose digits if logits
    are large. The backward pass reads the logits again and writes their gradient, in their dtype, in one pass.
    There is no second derivative. A token outside the vocabulary makes the loss NaN.

    On other devices and in other dtypes, PyTorch operations compute the loss from a copy of the logits at the sampled
    positions. If all positions were sampled, this is slower than the reference, by up to half.

    logits      [sets · n, length, vocabulary]; the logits at position t predict `tokens[:, t]`. Any strides; they are
                read in place if the logits of a position are contiguous
    tokens      [sets · n, length] int64, below the vocabulary size, also where the mask is False
    mask        [sets · n, length] bool, True where the token was sampled, including the end-of-text token
    advantages  [sets, n], one for each reply; constants without a gradient. Reply i of set s is row s · n + i

    ValueError if the shape of `advantages` is not [sets, n] with sets · n rows.

    Source: polychromic, seed 003, objective L = CE - lambda * D.
    """
    return _loss(use_triton(logits, dtypes=DTYPES), logits, tokens, mask, advantages)


def set_policy_loss_torch(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """`set_policy_loss` in PyTorch operations."""
    return _loss(False, logits, tokens, mask, advantages)


def set_policy_loss_triton(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """`set_policy_loss` with the Triton kernels, in float32 and bfloat16."""
    return _loss(True, logits, tokens, mask, advantages)


def _loss(use_kernels, logits, tokens, mask, advantages):
    if advantages.dim() != 2 or advantages.numel() != len(logits):
        raise ValueError(f"advantages of shape {list(advantages.shape)} for {len(logits)} replies: give [sets, n]")
    if not tokens.numel():
        # The sum over no tokens is 0; the mean over no sets is NaN.
        return logits.sum(dtype=torch.promote_types(logits.dtype, torch.float32)) / len(advantages)
    return (_SetPolicyLoss.apply if use_kernels else _loss_torch)(logits, tokens, mask, advantages.detach())


def _loss_torch(logits, tokens, mask, advantages):
    """Compute the loss from the sampled positions only; the gradient of all other logits is 0."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    sampled_log_p = functional.log_softmax(logits[mask], -1, dtype=wide).gather(-1, tokens[mask][:, None]).squeeze(-1)
    log_p = torch.zeros(mask.shape, dtype=wide, device=mask.device).masked_scatter(mask, sampled_log_p)
    reply_log_p = log_p.sum(-1).reshape(advantages.shape)
    return -(advantages.to(wide) * reply_log_p).sum(-1).mean()


class _SetPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, mask, advantages):
        tokens, mask, advantages = tokens.contiguous(), mask.contiguous(), advantages.contiguous()
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        loss, top, total = _forward_triton(logits, tokens, mask, advantages)
        ctx.save_for_backward(logits, tokens, mask, advantages, top, total)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _backward_triton(grad, *ctx.saved_tensors), None, None, None


def _forward_triton(logits, tokens, mask, advantages):
    rows, length, V = logits.shape
    log_p, top, total = torch.empty((3, rows, length), dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    with launching(logits):
        _forward_kernel[(rows * length,)](
            logits,
            tokens,
            mask,
            log_p,
            top,
            total,
            length,
            V,
            logits.stride(0),
            logits.stride(1),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        _finish_kernel[(1,)](
            log_p, advantages, loss, rows * length, length, len(advantages), BLOCK=FINISH_BLOCK, num_warps=8
        )
    return loss, top, total


def _backward_triton(grad, logits, tokens, mask, advantages, top, total):
    rows, length, V = logits.shape
    d_logits = torch.empty((rows, length, V), dtype=logits.dtype, device=logits.device)
    with launching(logits):
        _backward_kernel[(rows * length, ceil_div(V, BLOCK))](
            logits,
            tokens,
            mask,
            advantages,
            top,
            total,
            grad,
            d_logits,
            length,
            V,
            logits.stride(0),
            logits.stride(1),
            len(advantages),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return d_logits


@jit
def _forward_kernel(
    logits_ptr, tokens_ptr, mask_ptr, log_p_ptr, top_ptr, total_ptr,
    length, V, stride_row, stride_at,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute log p = (x_token − top) − log(total), with top = max_j x_j and total = sum_j exp(x_j − top).

    One program processes one position (reply, t), in blocks of BLOCK logits, in one pass (online softmax). Where the
    mask is False, log p is 0 and no logit is read.
    """
    at = tl.program_id(0).to(tl.int64)
    counted = tl.load(mask_ptr + at) != 0
    token = tl.load(tokens_ptr + at)
    valid = (token >= 0) & (token < V)
    logits_ptr += at // length * stride_row + at % length * stride_at
    own = tl.load(logits_ptr + token, mask=counted & valid, other=0.0).to(tl.float32)
    top = tl.full([], -float("inf"), tl.float32)
    # One sum for each column of a block. They are added up after the loop, so that an iteration has one reduction over
    # the threads (the largest logit) and not two.
    totals = tl.zeros((BLOCK,), dtype=tl.float32)
    columns = tl.arange(0, BLOCK)
    for start in range(0, tl.where(counted, V, 0), BLOCK):
        here = start + columns
        x = tl.load(logits_ptr + here, mask=here < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        totals = totals * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    total = tl.sum(totals, 0)
    log_p = tl.where(valid, (own - top) - tl.log(total), float("nan"))
    tl.store(log_p_ptr + at, tl.where(counted, log_p, 0.0))
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, total)


@jit
def _finish_kernel(log_p_ptr, advantages_ptr, loss_ptr, count, length, sets, BLOCK: tl.constexpr):
    """Compute loss = −sum(advantage · log p) / sets.

    One program adds up all positions, BLOCK at a time, so the order of the sums is fixed.
    """
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        log_p = tl.load(log_p_ptr + at, mask=at < count, other=0.0)
        advantage = tl.load(advantages_ptr + at // length, mask=at < count, other=0.0).to(tl.float32)
        sums += advantage * log_p
    tl.store(loss_ptr, -tl.sum(sums, 0) / sets)


@jit
def _backward_kernel(
    logits_ptr, tokens_ptr, mask_ptr, advantages_ptr, top_ptr, total_ptr, grad_ptr, d_ptr,
    length, V, stride_row, stride_at, sets,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute d_j = grad · advantage / sets · (p_j − [j = token]), and 0 where the mask is False.

    Program (position, block) computes BLOCK logits of one position; `d_ptr` is contiguous [positions, V].
    """
    at = tl.program_id(0).to(tl.int64)
    here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counted = tl.load(mask_ptr + at) != 0
    row = at // length
    logits_ptr += row * stride_row + at % length * stride_at
    x = tl.load(logits_ptr + here, mask=(here < V) & counted, other=-float("inf")).to(tl.float32)
    weight = tl.load(advantages_ptr + row).to(tl.float32) * (tl.load(grad_ptr).to(tl.float32) / sets)
    share = weight / tl.load(total_ptr + at)
    d = tl.exp(x - tl.load(top_ptr + at)) * share - tl.where(here == tl.load(tokens_ptr + at), weight, 0.0)
    d = tl.where(counted, d, 0.0)
    tl.store(d_ptr + at * V + here, d.to(d_ptr.dtype.element_ty), mask=here < V)
