"""Operators of Liger-Kernel (pip install liger-kernel) against plain PyTorch, by declaration alone.

Run on a GPU, with the package installed:  pytest -m correctness docs/foreign/test_liger.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from perfsuite import Pair, Side, Workload, constant, floats, integers, sampled, side, size, tensor

liger = pytest.importorskip(
    "liger_kernel.transformers.functional", reason="Liger-Kernel is not installed: pip install liger-kernel"
)

EPS = 1e-6
LOG_PROBABILITIES = floats(-8, 0)
PROBABILITIES = floats(0.001, 1)
ROWS = {"rows": size(1, 33), "columns": size(2, 129)}
NO_DOUBLE = {"double_backward": "its gradients count as constants: torch gives 0 for their derivatives"}


SCALED_IN_PLACE = "the first pass scales the gradients that it keeps in place"


def on_gpu(call: Callable[..., Any]) -> Side:
    return side(call, devices=("cuda",))


DENSE = ("contiguous", "offset")
"""Layouts for its losses: where the last dimension is not contiguous they scale other memory than the gradient."""
FINITE = floats(nonfinite=False)


def matrix(**options: Any) -> Any:
    return tensor("rows", "columns", **options)


def rows(**options: Any) -> Pair:
    """A pair on rows of a matrix."""
    return Pair(sizes=ROWS, workloads=[Workload("w", rows=4096, columns=4096)], **options)


# --- activations ----------------------------------------------------------------------------------------------------

swiglu = rows(
    reference=lambda a, b: functional.silu(a) * b,
    optimized=on_gpu(liger.liger_swiglu),
    inputs={"a": matrix(), "b": matrix()},
    consumes={"a", "b"},  # the backward pass writes the gradients over them
    unsupported=NO_DOUBLE,
)

geglu = rows(
    reference=lambda a, b: functional.gelu(a, approximate="tanh") * b,
    optimized=on_gpu(liger.liger_geglu),
    inputs={"a": matrix(), "b": matrix()},
    consumes={"a", "b"},
    unsupported=NO_DOUBLE,
)

relu_squared = rows(
    reference=lambda x: functional.relu(x).square(),
    optimized=on_gpu(liger.liger_relu_squared),
    inputs={"x": matrix(values=FINITE)},  # it makes 0 of NaN
)

softmax = rows(
    reference=lambda x: torch.softmax(x, -1),
    optimized=on_gpu(liger.liger_softmax),
    inputs={"x": matrix()},
)


def plain_sparsemax(x: torch.Tensor) -> torch.Tensor:
    """The projection of each row onto the probability simplex."""
    ordered = x.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    support = (counts * ordered > sums).sum(-1, keepdim=True)
    return functional.relu(x - sums.gather(-1, support - 1) / support)


sparsemax = rows(
    reference=plain_sparsemax,
    optimized=on_gpu(liger.liger_sparsemax),
    inputs={"x": matrix(values=floats(-4, 4))},
)

dyt = rows(
    reference=lambda x, alpha, gamma, beta: torch.tanh(alpha * x) * gamma + beta,
    optimized=on_gpu(liger.liger_dyt),
    inputs={
        "x": matrix(),
        "alpha": tensor(1, values=FINITE),  # the gradient of an infinite one is NaN
        "gamma": tensor("columns"),
        "beta": tensor("columns"),
    },
)

# --- norms ----------------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


rms_norm = rows(
    reference=lambda x, weight: normed(x) * weight,
    optimized=on_gpu(lambda x, weight: liger.liger_rms_norm(x, weight, EPS)),
    inputs={"x": matrix(), "weight": tensor("columns")},
    consumes={"grad_output"},
)

fused_add_rms_norm = rows(
    reference=lambda x, residual, weight: (normed(x + residual) * weight, x + residual),
    optimized=on_gpu(lambda x, residual, weight: liger.liger_fused_add_rms_norm(x, residual, weight, EPS)),
    inputs={"x": matrix(), "residual": matrix(), "weight": tensor("columns")},
    consumes={"grad_output"},
)

layer_norm = rows(
    reference=lambda x, weight, bias: functional.layer_norm(x, x.shape[-1:], weight, bias, EPS),
    optimized=on_gpu(lambda x, weight, bias: liger.liger_layer_norm(x, weight, bias, EPS)),
    inputs={"x": matrix(), "weight": tensor("columns"), "bias": tensor("columns")},
)

group_norm = Pair(
    reference=lambda x, weight, bias: functional.group_norm(x, 4, weight, bias, EPS),
    optimized=on_gpu(lambda x, weight, bias: liger.liger_group_norm(x, weight, bias, x.shape[1], 4, EPS)),
    # Of an infinite weight it makes infinities where the definition gives NaN. Its variance is of two sums.
    inputs={
        "x": tensor("batch", "4 * width", "n", values=floats(nonfinite=False, offset=False)),
        "weight": tensor("4 * width", values=FINITE),
        "bias": tensor("4 * width", values=FINITE),
    },
    sizes={"batch": size(1, 5), "width": size(1, 9), "n": size(2, 65)},
    workloads=[Workload("w", batch=32, width=32, n=1024)],
)


def plain_poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return weight[0] * normed(x**3) + weight[1] * normed(x**2) + weight[2] * normed(x) + bias


poly_norm = rows(
    reference=plain_poly_norm,
    optimized=on_gpu(lambda x, weight, bias: liger.liger_poly_norm(x, weight, bias, EPS)),
    inputs={"x": matrix(values=floats(-4, 4)), "weight": tensor(3), "bias": tensor()},
    consumes={"grad_output"},
)

# --- losses ---------------------------------------------------------------------------------------------------------

LABELS = tensor("rows", dtype="int64", values=integers(0, "columns", also=[-100]))

LOGITS = matrix(values=floats(-8, 8), layouts=DENSE)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the labels that count. Where none does, Liger gives 0, and torch's mean is NaN."""
    return functional.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


cross_entropy = rows(
    reference=mean_loss,
    optimized=on_gpu(liger.liger_cross_entropy),
    inputs={"logits": LOGITS, "labels": LABELS},
    consumes={"logits"},  # the forward pass writes the gradient over it
    unsupported={"no_gradient_needed": "the logits are used up in the forward pass"} | NO_DOUBLE,
)

cross_entropy_smoothed = rows(
    reference=lambda logits, labels: functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum"),
    optimized=on_gpu(
        lambda logits, labels: liger.liger_cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    ),
    inputs={"logits": LOGITS, "labels": LABELS},
    consumes={"logits"},
    unsupported=NO_DOUBLE,
)

fused_linear_cross_entropy = Pair(
    reference=lambda x, weight, labels: mean_loss(x @ weight.T, labels),
    optimized=on_gpu(liger.liger_fused_linear_cross_entropy),
    # Its loss is a logarithm of a sum minus a logit, which loses its digits where the loss is far smaller than both.
    inputs={
        "x": tensor("rows", "hidden", values=floats(nonfinite=False, offset=False)),
        "weight": tensor("columns", "hidden", values=floats(nonfinite=False, offset=False)),
        "labels": LABELS,
    },
    sizes={"rows": size(1, 33), "columns": size(2, 65), "hidden": size(1, 33)},
    workloads=[Workload("w", rows=1024, columns=32000, hidden=1024)],
    unsupported={
        "one_gradient_needed": "without a gradient of x it computes none of the weight",
        "second_backward": SCALED_IN_PLACE,
    }
    | NO_DOUBLE,
)

kl_div = rows(
    reference=lambda x, target: functional.kl_div(x, target, reduction="batchmean"),
    optimized=on_gpu(lambda x, target: liger.liger_kl_div(x, target, reduction="batchmean")),
    inputs={"x": matrix(values=LOG_PROBABILITIES), "target": matrix(values=PROBABILITIES, differentiable=False)},
)


def plain_jsd(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The Jensen-Shannon divergence of two rows of log-probabilities, a mean over the rows."""
    mixed = torch.logaddexp(x, target) - math.log(2)  # finite, also where both probabilities are 0
    each = target.exp() * (target - mixed) + x.exp() * (x - mixed)
    return 0.5 * each.sum() / x.shape[0]


jsd = rows(
    reference=plain_jsd,
    optimized=on_gpu(liger.liger_jsd),
    inputs={"x": matrix(values=LOG_PROBABILITIES), "target": matrix(values=LOG_PROBABILITIES, differentiable=False)},
)

fused_linear_jsd = Pair(
    reference=lambda x, weight, y, other: plain_jsd(
        functional.log_softmax(x @ weight.T, -1), functional.log_softmax(y @ other.T, -1)
    ),
    optimized=on_gpu(liger.liger_fused_linear_jsd),
    inputs={
        # Where a logit is infinite it gives a number, and the definition NaN.
        "x": tensor("rows", "hidden", layouts=DENSE, values=FINITE),
        "weight": tensor("columns", "hidden", layouts=DENSE, values=FINITE),
        "y": tensor("rows", "hidden", differentiable=False, values=FINITE),
        "other": tensor("columns", "hidden", differentiable=False, values=FINITE),
    },
    sizes={"rows": size(1, 33), "columns": size(2, 65), "hidden": size(1, 33)},
    workloads=[Workload("w", rows=1024, columns=32000, hidden=1024)],
    unsupported={"second_backward": SCALED_IN_PLACE},
)

tvd = rows(
    reference=lambda p, q: 0.5 * (p - q).abs().sum() / p.shape[0],
    optimized=on_gpu(lambda p, q: liger.liger_tvd(p, q, reduction="batchmean")),
    inputs={"p": matrix(values=PROBABILITIES), "q": matrix(values=PROBABILITIES, differentiable=False)},
)

# --- attention ------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)


def table(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Cosines or sines: the second half of a head turns as the first."""
    half = torch.rand((*shape[:-1], shape[-1] // 2), generator=generator, device=generator.device, dtype=dtype)
    return torch.cat([half, half], -1)


def angles(*shape: Any) -> Any:
    return tensor(*shape, values=sampled(table), differentiable=False)


# Of sequences of one position it turns the first of the batch alone.
HEADS = {"batch": size(1, 3), "heads": size(1, 5), "kv": size(1, 3), "length": size(2, 33), "half": size(1, 33)}

rope = Pair(
    reference=lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
    optimized=on_gpu(liger.liger_rope),
    inputs={
        "q": tensor("batch", "heads", "length", "2 * half"),
        "k": tensor("batch", "kv", "length", "2 * half"),
        "cos": angles(1, "length", "2 * half"),
        "sin": angles(1, "length", "2 * half"),
    },
    sizes=HEADS,
    workloads=[Workload("w", batch=4, heads=32, kv=8, length=2048, half=64)],
    consumes={"q", "k", "grad_output"},  # it turns them in place, and returns them
    strides="any",
)

multi_token_attention = Pair(
    reference=lambda scores, weight: plain_multi_token_attention(scores, weight),
    optimized=on_gpu(lambda scores, weight: liger.liger_multi_token_attention(scores, weight, padding=1)),
    inputs={
        "scores": tensor("batch", "heads", "length", "length", values=floats(-4, 4)),
        "weight": tensor("heads", "heads", 3, 3, values=floats(-1, 1)),
    },
    sizes={"batch": size(1, 3), "heads": size(1, 5), "length": size(1, 33)},
    workloads=[Workload("w", batch=2, heads=8, length=512)],
    unsupported={"autocast": "its backward pass raises: the probabilities are bfloat16 there, and the weight float32"},
)


def plain_multi_token_attention(scores: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal scores, their softmax, a convolution over queries, keys and heads, and the causal mask again."""
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    probabilities = torch.softmax(scores.masked_fill(~causal, float("-inf")), -1)
    return functional.conv2d(probabilities, weight, padding=1).masked_fill(~causal, 0.0)


def plain_neighborhood_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each position to those at most 3 away."""
    at = torch.arange(q.shape[-2], device=q.device)
    near = (at[:, None] - at[None]).abs() <= 3
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~near, float("-inf")), -1) @ v


neighborhood_attention = Pair(
    reference=plain_neighborhood_attention,
    optimized=on_gpu(lambda q, k, v: liger.liger_fused_neighborhood_attention(q, k, v, kernel_size=7)),
    inputs={name: tensor("batch", "heads", "length", "2 * half") for name in "qkv"},
    sizes={"batch": size(1, 3), "heads": size(1, 3), "length": size(1, 33), "half": size(4, 17)},
    workloads=[Workload("w", batch=2, heads=8, length=1024, half=32)],
    precision="tf32",
    unsupported={"autocast": "its output has the dtype of its inputs"},
)

mrope = Pair(
    reference=lambda q, k, cos, sin, section: plain_mrope(q, k, cos, sin, section),
    optimized=on_gpu(liger.liger_qwen2vl_mrope),
    inputs={
        "q": tensor("batch", "heads", "length", 32),
        "k": tensor("batch", "kv", "length", 32),
        "cos": angles(3, "batch", "length", 32),
        "sin": angles(3, "batch", "length", 32),
        "section": constant([4, 6, 6]),
    },
    sizes={name: HEADS[name] for name in ("batch", "heads", "kv", "length")},
    workloads=[Workload("w", batch=4, heads=32, kv=8, length=2048)],
    consumes={"q", "k", "grad_output"},
    strides="any",
)


def plain_mrope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, section: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding whose parts of the head turn by time, height and width."""
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(table.split(section * 2, -1))], -1) for table in (cos, sin)
    )
    return rotated(q, cos, sin), rotated(k, cos, sin)
