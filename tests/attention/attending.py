"""Inputs and rivals that the attention pairs share."""

import torch


def different(generator, shape, dtype):
    """Draw distinct keys: with equal keys the query's gradient is 0, and only rounding errors are compared."""
    return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1).to(dtype)


def flash_attn_reason():
    """Return why flash-attn cannot be used, or None."""
    try:
        import flash_attn  # noqa: F401  # a build for another torch is found, and fails only here
    except ImportError as error:
        return f"flash-attn cannot be imported ({error}); pip install flash-attn --no-build-isolation"
    return None


def by_flash_attn(q, k, v, causal=False):
    """Call flash-attn's kernel with tensors [B, heads, T, d]."""
    from flash_attn import flash_attn_func

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=bool(causal)).transpose(1, 2)
