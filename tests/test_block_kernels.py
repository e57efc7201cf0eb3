import pytest
import torch
from torch.nn import functional

from optimized.block_kernels import gated, gated_triton, normed, normed_triton, turned, turned_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, tensor
from suite.polychromic.llama import RMSNorm, rotated

EPS = 1e-5
HALF = ("float32", "bfloat16")
CPU = {"clock": "wall", "direction": "both", "device": "cpu"}
CUDA = {"dtype": "bfloat16", "direction": "both", "device": "cuda"}


def norm_of(weight):
    made = RMSNorm(len(weight), EPS)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


def by(call):
    return lambda x, weight: call(norm_of(weight), x)


def plain_norm(x, weight):
    return norm_of(weight)(x)


block_norm = Pair(
    reference=plain_norm,
    optimized=by(normed),
    inputs={"x": tensor("tokens", "width"), "weight": tensor("width", values=floats(-2, 2), differentiable=False)},
    sizes={"tokens": size(0, 9), "width": size(1, 40)},
    dtypes=HALF,
    max_examples=10,
    unsupported={"double_backward": "frozen weights are trained around"},
    rivals={"compile": compiled(side(plain_norm, devices=("cuda",)))},
    variants={"triton": side(by(normed_triton), available=triton_reason)},
    workloads=[Workload("llama8b", tokens=512, width=4096, **CUDA), Workload("cpu", tokens=64, width=64, **CPU)],
    cost=Cost(bytes=lambda tokens, width, **_: 2 * 5 * tokens * width),
)


def plain_turn(x, angles):
    cos, sin = (part.to(x.dtype) for part in pairs(angles))
    return rotated(x.transpose(1, 2), cos, sin).transpose(1, 2)


def pairs(angles):
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


def turning(call):
    return lambda x, angles: call(x, *(part.to(x.dtype) for part in pairs(angles)))


block_rotation = Pair(
    reference=plain_turn,
    optimized=turning(turned),
    inputs={
        "x": tensor("B", "T", "heads", "2 * half"),
        "angles": tensor("T", "half", dtype="float32", values=floats(-4, 4), differentiable=False),
    },
    sizes={"B": size(1, 2), "T": size(1, 7), "heads": size(1, 3), "half": size(1, 5)},
    dtypes=HALF,
    max_examples=10,
    unsupported={"double_backward": "frozen weights are trained around"},
    rivals={"compile": compiled(side(plain_turn, devices=("cuda",)))},
    variants={"triton": side(turning(turned_triton), available=triton_reason)},
    workloads=[
        Workload("llama8b", B=1, T=512, heads=32, half=64, **CUDA),
        Workload("cpu", B=2, T=16, heads=4, half=8, **CPU),
    ],
    cost=Cost(bytes=lambda B, T, heads, half, **_: 2 * 4 * B * T * heads * 2 * half),
)


def plain_gate(gate, up):
    return functional.silu(gate) * up


block_gate = Pair(
    reference=plain_gate,
    optimized=gated,
    inputs={"gate": tensor("tokens", "width"), "up": tensor("tokens", "width")},
    sizes={"tokens": size(0, 9), "width": size(1, 40)},
    dtypes=HALF,
    max_examples=10,
    unsupported={"double_backward": "frozen weights are trained around"},
    rivals={"compile": compiled(side(plain_gate, devices=("cuda",)))},
    variants={"triton": side(gated_triton, available=triton_reason)},
    workloads=[Workload("llama8b", tokens=512, width=14336, **CUDA), Workload("cpu", tokens=64, width=64, **CPU)],
    cost=Cost(bytes=lambda tokens, width, **_: 2 * 8 * tokens * width),
)


@pytest.mark.interpreted
def test_norm_weight_gets_no_gradient():
    norm = RMSNorm(8, EPS)
    x = torch.randn(3, 8, requires_grad=True)
    assert normed_triton(norm, x).sum().requires_grad
    assert torch.autograd.grad(normed_triton(norm, x).sum(), norm.weight, allow_unused=True) == (None,)
