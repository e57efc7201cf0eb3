"""Operators of flash-linear-attention (pip install flash-linear-attention) against one plain recurrence.

Run on a GPU, with the package installed:  pytest -m correctness docs/foreign/test_fla.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfsuite import Pair, Workload, floats, side, size, tensor

fla = pytest.importorskip(
    "fla.ops", reason="flash-linear-attention is not installed: pip install flash-linear-attention"
)
hgrn_ops = pytest.importorskip("fla.ops.hgrn", reason="flash-linear-attention has no fla.ops.hgrn")
chunks = pytest.importorskip("fla.ops.common.chunk_o", reason="flash-linear-attention has no fla.ops.common.chunk_o")
refused = chunks.IS_NVIDIA_HOPPER and chunks.TRITON_ABOVE_3_4_0 and not chunks.TRITON_ABOVE_3_7_1

# Few heads, keys and values: each combination is tuned and compiled for itself.
SIZES = {"batch": size(1, 3), "length": size(1, 97), "heads": size(1, 2), "k": size(1, 2), "v": size(1, 2)}
TUNED = {"k": size(2, 2), "v": size(2, 2)}
"""Chunked kernels are tuned for minutes for each number of keys and of values."""
WORKLOAD = Workload("w", batch=4, length=2048, heads=16, k=4, v=4)
GATES = floats(-1, 0)
"""Logarithms of decays."""
SHARES = floats(0, 1)
UNSUPPORTED = {"autocast": "its output has the dtype of its inputs", "double_backward": "its gradients have none"}


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:
    """A state of keys × values for each head: it decays, takes in a key and a value, and is read by a query.

    q, k: batch, length, heads, keys; v: batch, length, heads, values. `decay`, in logarithms, is that of each step and
    head or of each key. With `beta`, the delta rule: what the state holds for the key is taken out of the value.
    """
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], device=v.device, dtype=v.dtype)
    out = []
    for t in range(q.shape[1]):
        if decay is not None:
            gate = decay[:, t].exp()
            state = state * gate.reshape(*gate.shape, *[1] * (4 - gate.dim()))
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * value[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(out, 1)


def heads(dim: str, **options: Any) -> Any:
    return tensor("batch", "length", "heads", f"16 * {dim}", values=options.pop("values", floats(-2, 2)), **options)


def by_head(values: Any) -> Any:
    return tensor("batch", "length", "heads", values=values)


def first(call: Callable[..., Any], **options: Any) -> Any:
    """The output alone, without the state."""
    return side(lambda *inputs: call(*inputs, **options)[0], devices=("cuda",))


LONGER = {"sizes": SIZES | {"length": size(2, 97)}}
"""The gradient of the first gate is 0. Computed as a difference of sums, of a single step it is rounding alone."""


def pair(reference: Callable[..., Any], optimized: Any, *, chunked: bool, **further: Any) -> Pair:
    """Chunked kernels multiply matrices on tensor cores; the others go step by step in float32."""
    keys = further.pop("keys", floats(-2, 2))
    options = {"sizes": SIZES} | ({"precision": "tf32"} if chunked else {}) | further.pop("options", {})
    options["sizes"] = options["sizes"] | (TUNED if chunked else {})
    return Pair(
        reference=reference,
        optimized=optimized,
        inputs={"q": heads("k"), "k": heads("k", values=keys), "v": heads("v"), **further},
        workloads=[WORKLOAD],
        strides="any",
        max_examples=15,
        time_limit=1200 if chunked else 300,  # s; most of it is tuning
        unsupported=UNSUPPORTED,
        **options,
    )


# --- linear attention -----------------------------------------------------------------------------------------------

recurrent_linear_attention = pair(recurrence, first(fla.fused_recurrent_linear_attn, normalize=False), chunked=False)
chunk_linear_attention = pair(recurrence, first(fla.chunk_linear_attn, normalize=False), chunked=True)

# --- retention: each head has a decay of its own --------------------------------------------------------------------


def retention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    number = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
    decay = torch.log1p(-(2.0 ** (-5 - number)))
    return recurrence(q, k, v, decay.expand(q.shape[:3]))


recurrent_retention = pair(retention, first(fla.fused_recurrent_retention), chunked=False)
chunk_retention = pair(retention, first(fla.chunk_retention), chunked=True)
parallel_retention = pair(retention, first(fla.parallel_retention), chunked=True)

# --- gated linear attention: a decay of each step and head, or of each key ------------------------------------------

NO_BACKWARD = {"gradients": False} if refused else LONGER
"""The backward passes of gated chunks refuse Triton 3.4 to 3.7.0 on Hopper, which makes wrong code of them."""

recurrent_simple_gla = pair(
    recurrence, first(fla.fused_recurrent_simple_gla), chunked=False, g=by_head(GATES), options=LONGER
)
chunk_simple_gla = pair(recurrence, first(fla.chunk_simple_gla), chunked=True, g=by_head(GATES), options=NO_BACKWARD)
recurrent_gla = pair(
    recurrence, first(fla.fused_recurrent_gla), chunked=False, g=heads("k", values=GATES), options=LONGER
)
chunk_gla = pair(recurrence, first(fla.chunk_gla), chunked=True, g=heads("k", values=GATES), options=LONGER)

# --- the delta rule -------------------------------------------------------------------------------------------------


def delta(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return recurrence(q, k, v, beta=beta)


SHORT = floats(-0.125, 0.125)
"""Keys whose norm is below 1: with longer ones the state grows without bound."""

recurrent_delta_rule = pair(
    delta, first(fla.fused_recurrent_delta_rule), chunked=False, keys=SHORT, beta=by_head(SHARES)
)
HALF: dict[str, Any] = {"dtypes": ("bfloat16",), "precision": None}
"""These refuse float32."""
chunk_delta_rule = pair(
    delta, first(fla.chunk_delta_rule), chunked=True, keys=SHORT, beta=by_head(SHARES), options=HALF
)
chunk_gated_delta_rule = pair(
    recurrence,
    first(fla.chunk_gated_delta_rule),
    chunked=True,
    keys=SHORT,
    g=by_head(GATES),
    beta=by_head(SHARES),
    options=HALF | NO_BACKWARD,
)
recurrent_gated_delta_rule = pair(
    recurrence,
    first(lambda q, k, v, g, beta: fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)),
    chunked=False,
    keys=SHORT,
    g=by_head(GATES),
    beta=by_head(SHARES),
    options={"gradients": False},  # it has no backward pass
)

# --- HGRN: a state of one number for each channel -------------------------------------------------------------------


def hgrn(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = g[:, t].exp() * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


def channels(**options: Any) -> Any:
    return tensor("batch", "length", "16 * k", **options)


HGRN = {
    "reference": hgrn,
    "inputs": {"x": channels(), "g": channels(values=GATES)},
    "sizes": {name: SIZES[name] for name in ("batch", "length", "k")},
    "workloads": [Workload("w", batch=4, length=2048, k=64)],
    "max_examples": 15,
    "unsupported": UNSUPPORTED,
}
recurrent_hgrn = Pair(optimized=first(hgrn_ops.fused_recurrent_hgrn), **HGRN)
chunk_hgrn = Pair(optimized=first(hgrn_ops.chunk_hgrn), **HGRN)
