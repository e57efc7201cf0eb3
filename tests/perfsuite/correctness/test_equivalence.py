"""The rule of equivalence: correct kernels pass on every draw, faulty ones do not."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase
from scale import FULLY, count
from torch.nn import functional

from perfsuite import Pair, floats, generator, integers, listof, module, sampled, scalar, size, stateful, tensor
from perfsuite.correctness import equivalence, forms, incoming_gradients, rule, side_calls, truths
from perfsuite.correctness.tally import Tally
from perfsuite.declare.sides import Side
from perfsuite.draws.cases import case_line, cases
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case, InputCase

Call = Callable[..., Any]
FINITE = floats(nonfinite=False)
DRAWS = count(quick=100, full=200)


def drawn(pair: Pair, dtype: str, number: int, seed: int = 0) -> list[Case]:
    found: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases(pair, dtype))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def pair_of(reference: Any, optimized: Any, inputs: Mapping[str, Any], **options: Any) -> Pair:
    return Pair(reference=reference, optimized=optimized, inputs=inputs, **{"name": "pair", **options})


def case_of(dtype: str = "float32", seed: int = 0, inputs: Mapping[str, InputCase] | None = None, **sizes: Any) -> Case:
    return Case(dtype=dtype, sizes=sizes, inputs=inputs or {}, seed=seed)


def check(pair: Pair, case: Case, *, gradients: bool = False) -> Tally:
    tally = Tally()
    equivalence.check_case(pair, case, "cpu", gradients=gradients, tally=tally)
    return tally


def rejected(pair: Pair, match: str, case: Case, *, gradients: bool = False) -> str:
    with pytest.raises(NotEquivalent, match=match) as caught:
        check(pair, case, gradients=gradients)
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A reference, kernels as accurate as it and faulty kernels, all checked on the same draws."""

    reference: Any
    inputs: Mapping[str, Any]
    honest: Mapping[str, Any]
    faulty: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = True
    dtype: str = "float32"
    draws: int = DRAWS
    quick: int = 30
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        """Number of draws in this run."""
        return count(quick=min(self.quick, self.draws), full=self.draws)


def judge_family(family: Family, seed: int) -> tuple[dict[str, list[str]], dict[str, int], Tally]:
    """Return (false rejections, detections within the first 50 draws, tally)."""
    pair = pair_of(family.reference, family.reference, family.inputs, gradients=family.gradients, **family.options)
    wrong: dict[str, list[str]] = {name: [] for name in family.honest}
    caught = dict.fromkeys(family.faulty, 0)
    tally = Tally()
    for i, case in enumerate(drawn(pair, family.dtype, family.trials, seed)):
        tally.draws += 1
        try:
            truth = truths.establish(pair, case, "cpu", gradients=family.gradients)
        except truths.Discard:
            tally.discarded += 1
            continue
        tally.ill_conditioned += truth.ill_conditioned
        for name, call in {**family.honest, **(family.faulty if i < 50 else {})}.items():
            side = Side(call=call, stateful=pair.is_stateful)
            produced = side_calls.produce(pair, side, case, "cpu", gradients=family.gradients)
            try:
                equivalence.judge(pair, truth, produced, name=name, tally=tally if name in wrong else None)
            except NotEquivalent as error:
                if name in wrong:
                    wrong[name].append(f"{case_line(case)}: {error}")
                else:
                    caught[name] += 1
    return wrong, caught, tally


# --- kernels -------------------------------------------------------------------------------------------------


def sequential_sum(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    return total


def pairwise_sum(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    if n == 0:
        return torch.zeros(x.shape[:-1], dtype=x.dtype)
    return pairwise_sum(x[..., : n // 2]) + pairwise_sum(x[..., n // 2 :]) if n > 1 else x[..., 0].clone()


def chunked_sum(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for chunk in x.split(16, dim=-1):
        total = total + chunk.sum(-1)
    return total


def kahan_sum(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    lost = torch.zeros_like(total)
    for i in range(x.shape[-1]):
        term = x[..., i] - lost
        following = total + term
        lost = (following - total) - term
        total = following
    return total


def torch_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x - x.detach().amax(-1, keepdim=True)


def softmax_unfused(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(shifted(x))
    return (e / e.sum(-1, keepdim=True)).contiguous()


def softmax_exp2(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp2(shifted(x) * math.log2(math.e))
    return (e * (1 / chunked_sum(e))[..., None]).contiguous()


def softmax_online(x: torch.Tensor) -> torch.Tensor:
    top = torch.full(x.shape[:-1], -math.inf, dtype=x.dtype)
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for part in x.split(8, dim=-1):
        higher = torch.maximum(top, part.detach().amax(-1))
        total = total * torch.exp(top - higher) + torch.exp(part - higher[..., None]).sum(-1)
        top = higher
    return (torch.exp(x - top[..., None]) / total[..., None]).contiguous()


def logsumexp_unfused(x: torch.Tensor) -> torch.Tensor:
    top = x.detach().amax(-1)
    return top + torch.log(torch.exp(x - top[..., None]).sum(-1))


def layernorm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w + b


def layernorm_rsqrt(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    centred = x - chunked_sum(x)[..., None] / x.shape[-1]
    return centred * torch.rsqrt(chunked_sum(centred * centred)[..., None] / x.shape[-1] + 1e-5) * w + b


def layernorm_welford(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mean = torch.zeros(x.shape[:-1], dtype=x.dtype)
    m2 = torch.zeros_like(mean)
    for i in range(x.shape[-1]):
        delta = x[..., i] - mean
        mean = mean + delta / (i + 1)
        m2 = m2 + delta * (x[..., i] - mean)
    return (x - mean[..., None]) * torch.rsqrt(m2[..., None] / x.shape[-1] + 1e-5) * w + b


def blocked_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(0, a.shape[1], 16):
        total = total + a[:, i : i + 16] @ b[i : i + 16]
    return total


def outer_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for i in range(a.shape[1]):
        total = total + a[:, i : i + 1] * b[i : i + 1]
    return total


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Keep the 10 bits of mantissa that TF32 has."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


def accumulated_in(dtype: torch.dtype) -> Call:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
        for i in range(a.shape[1]):
            total = total + (a[:, i : i + 1] * b[i : i + 1]).to(dtype)
        return total.to(a.dtype)

    return matmul


def in_float32(call: Call) -> Call:
    """Run the call in float32 and round once at the end, as a half-precision kernel does."""

    def kernel(*args: Any) -> Any:
        wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return call(*wide).to(args[0].dtype)

    return kernel


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    top = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    total = torch.zeros_like(top)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for i in range(0, k.shape[-2], 8):
        score = q @ k[..., i : i + 8, :].transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        higher = torch.maximum(top, score.detach().amax(-1))
        p, scale = torch.exp(score - higher[..., None]), torch.exp(top - higher)
        total = total * scale + p.sum(-1)
        out = out * scale[..., None] + p @ v[..., i : i + 8, :]
        top = higher
    return out / total[..., None]


def cosine_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def cosine_distance_fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 1 - chunked_sum(x * y) * torch.rsqrt(chunked_sum(x * x) * chunked_sum(y * y))


def wrap(theta: torch.Tensor) -> torch.Tensor:
    return torch.remainder(theta + math.pi, 2 * math.pi) - math.pi


def turn(theta: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return theta.copy_(wrap(theta + delta))


def turn_by_atan2(theta: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return theta.copy_(torch.atan2(torch.sin(theta + delta), torch.cos(theta + delta)))


def spoiled(at: Callable[[torch.Tensor], None]) -> Call:
    """Return exp with a result that `at` spoils in place."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        out = torch.exp(x).clone()
        at(out)
        return out

    return kernel


def last_row(out: torch.Tensor) -> None:
    out[-1:] = 0


def tile_tail(out: torch.Tensor) -> None:
    out[out.shape[0] // 16 * 16 :] = 0


def at_seventeen(out: torch.Tensor) -> None:
    if out.shape[0] == 17:
        out[16] = out[15] + 1


def blind_to_strides(x: torch.Tensor) -> torch.Tensor:
    """Read the memory as if it were contiguous, like a kernel without stride arguments."""
    reach = x.storage_offset() + x.numel() <= x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided(x.shape, (max(1, x.shape[1]), 1)).clone() if reach else x.contiguous()


class HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.exp(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 0.5 * grad * ctx.saved_tensors[0]


ROWS = {"x": tensor("m", "n")}
FINITE_ROWS = {"x": tensor("m", "n", values=FINITE)}
SOME = {"n": size(1, 129)}
NEAR = {"x": tensor("n", values=floats(-4, 4))}
PRODUCT = {"a": tensor("m", "k", values=FINITE), "b": tensor("k", "n", values=FINITE)}
NORMED = {
    "x": tensor("m", "n", values=floats(-8, 8)),
    "w": tensor("n", values=floats(-2, 2)),
    "b": tensor("n", values=floats(-2, 2)),
}
HEADS = {
    "q": tensor("b", "t", "d", values=floats(-4, 4)),
    "k": tensor("b", "s", "d", values=floats(-4, 4)),
    "v": tensor("b", "s", "d", values=floats(-4, 4)),
}
HEAD_SIZES = {"b": size(0, 3), "d": size(1, 17), "s": size(1, 33), "t": size(0, 17)}
SUMS = {
    "torch": torch_sum,
    "sequential": sequential_sum,
    "pairwise": pairwise_sum,
    "chunked": chunked_sum,
    "kahan": kahan_sum,
    "backwards": lambda x: sequential_sum(x.flip(-1)),
}
BRIEF = {"n": size(0, 65)}


def other_sums(but: str) -> dict[str, Call]:
    return {name: call for name, call in SUMS.items() if name != but}


FAMILIES = {
    "sum": Family(
        reference=torch_sum,
        inputs=FINITE_ROWS,
        honest=other_sums("torch"),
        faulty={
            "scaled": lambda x: torch_sum(x) * (1 + 1e-4),
            "without the last": lambda x: torch_sum(x[..., :-1]),
            "in bfloat16": lambda x: x.bfloat16().sum(-1).float() if x.dtype == torch.float32 else torch_sum(x),
            "zeros": lambda x: torch.zeros(x.shape[:-1], dtype=x.dtype),
        },
        gradients=False,
    ),
    "sum one after another": Family(
        reference=sequential_sum, inputs=FINITE_ROWS, honest=other_sums("sequential"), gradients=False, draws=100
    ),
    "sum to one number": Family(
        reference=torch_sum,
        inputs={"x": tensor("n")},
        honest={k: v for k, v in other_sums("torch").items() if k != "kahan"},  # which turns ±inf into NaN
        faulty={"scaled": lambda x: torch_sum(x) * (1 + 1e-4)},
        gradients=False,
        options={"sizes": BRIEF},
    ),
    "mean": Family(
        reference=lambda x: x.mean(-1),
        inputs=ROWS,
        honest={
            "chunked": lambda x: chunked_sum(x) / x.shape[-1],
            "scaled before": lambda x: (x / x.shape[-1]).sum(-1),
        },
        faulty={"one too few": lambda x: chunked_sum(x) / (x.shape[-1] - 1 + 1e-9)},
        options={"sizes": SOME},
        draws=100,
    ),
    "softmax": Family(
        reference=softmax,
        inputs=ROWS,
        honest={"unfused": softmax_unfused, "exp2": softmax_exp2, "online": softmax_online},
        faulty={
            "scaled": lambda x: softmax(x) * (1 + 1e-4),
            "no maximum": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
            "NaN swallowed": lambda x: torch.nan_to_num(softmax(x)),
            "no gradient": lambda x: softmax(x.detach()) + 0 * x,
        },
        options={"sizes": SOME},
    ),
    "softmax, unfused": Family(
        reference=softmax_unfused,
        inputs=FINITE_ROWS,
        honest={"fused": softmax, "exp2": softmax_exp2, "online": softmax_online},
        options={"sizes": SOME},
        draws=100,
    ),
    "logsumexp": Family(
        reference=lambda x: torch.logsumexp(x, -1),
        inputs=FINITE_ROWS,
        honest={"unfused": logsumexp_unfused},
        faulty={"log2": lambda x: logsumexp_unfused(x) * 1.0001},
        options={"sizes": SOME},
    ),
    "cross entropy": Family(
        reference=functional.cross_entropy,
        inputs={"x": tensor("m", "n", values=FINITE), "y": tensor("m", dtype="int64", values=integers(0, "n"))},
        honest={"by hand": lambda x, y: (logsumexp_unfused(x) - x.gather(-1, y[:, None])[:, 0]).mean()},
        faulty={
            "sum": lambda x, y: functional.cross_entropy(x, y, reduction="sum"),
            "wrong label": lambda x, y: functional.cross_entropy(x, (y - 1) % x.shape[-1]),
        },
        options={"sizes": {"m": size(1, 33), "n": size(1, 129)}},
        draws=100,
    ),
    "layernorm": Family(
        reference=layernorm,
        inputs=NORMED,
        honest={"rsqrt": layernorm_rsqrt, "Welford": layernorm_welford},
        faulty={
            "no epsilon": lambda x, w, b: layernorm(x * 1e4, w, b),
            "n − 1": lambda x, w, b: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * w + b,
            "epsilon outside": lambda x, w, b: (
                (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + 1e-5) * w + b
            ),
        },
        options={"sizes": {"m": size(1, 33), "n": size(2, 129)}},
    ),
    "layernorm, fused": Family(
        reference=lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        inputs=NORMED,
        honest={"unfused": lambda *a: layernorm(*a).contiguous(), "rsqrt": lambda *a: layernorm_rsqrt(*a).contiguous()},
        options={"sizes": {"n": size(1, 129)}},
        draws=100,
    ),
    "matmul": Family(
        reference=torch.matmul,
        inputs=PRODUCT,
        honest={
            "blocks": blocked_matmul,
            "outer": outer_matmul,
            "split k": lambda a, b: a[:, ::2] @ b[::2] + a[:, 1::2] @ b[1::2],
            "einsum": lambda a, b: torch.einsum("mk,kn->mn", a, b),
            "elementwise": lambda a, b: (a[:, :, None] * b[None]).sum(1),
        },
        faulty={
            "TF32": lambda a, b: tf32(a) @ tf32(b),
            "float16 accumulator": accumulated_in(torch.float16),
            "bfloat16 accumulator": accumulated_in(torch.bfloat16),
            "bfloat16 inputs": lambda a, b: (a.bfloat16().float() @ b.bfloat16().float()).to(a.dtype),
            "scaled": lambda a, b: a @ b * (1 + 1e-4),
            "zeros": lambda a, b: torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype),
            "last k": lambda a, b: a[:, :-1] @ b[:-1],
        },
        gradients=False,
    ),
    "matmul of NaN and ±inf": Family(
        reference=outer_matmul,
        inputs={"a": tensor("m", "k"), "b": tensor("k", "n")},
        honest={"torch": torch.matmul, "blocks": blocked_matmul},
        faulty={"infinities bounded": lambda a, b: torch.matmul(a, b).clamp(-3e38, 3e38)},
        gradients=False,
        draws=100,
    ),
    "attention": Family(
        reference=attention,
        inputs=HEADS,
        honest={"flash": flash_attention, "torch": functional.scaled_dot_product_attention},
        faulty={
            "TF32": lambda q, k, v: (
                torch.softmax(tf32(q.detach()) @ tf32(k.detach()).mT / math.sqrt(q.shape[-1]), -1) @ v
            ),
            "no scale": lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
        },
        options={"sizes": HEAD_SIZES},
    ),
    "exp": Family(
        quick=50,
        reference=torch.exp,
        inputs=NEAR,
        honest={"exp2": lambda x: torch.exp2(x * math.log2(math.e)), "square": lambda x: torch.exp(x / 2).square()},
        faulty={
            "scaled": lambda x: torch.exp(x) * (1 + 1e-4),
            "of half": lambda x: torch.exp(x.half().float()) if x.dtype == torch.float32 else torch.exp(x),
            "last row": spoiled(last_row),
            "tile tail": spoiled(tile_tail),
            "n = 17": spoiled(at_seventeen),
            "gradient halved": HalvedGradient.apply,
            "gradient of the mean": lambda x: torch.exp(x).detach() + (x - x.detach()) * torch.exp(x.detach()).mean(),
        },
    ),
    "exp of everything": Family(
        reference=torch.exp,
        inputs={"x": tensor("n")},
        honest={"exp2": lambda x: torch.exp2(x * math.log2(math.e))},
        faulty={
            "NaN swallowed": lambda x: torch.nan_to_num(torch.exp(x), nan=0.0, posinf=math.inf),
            "infinity bounded": lambda x: torch.exp(x).clamp(max=3.4e38),
        },
        gradients=False,
    ),
    "1 − cos": Family(
        reference=lambda x: 1 - torch.cos(x),
        inputs={"x": tensor("n", values=floats(-4, 4))},
        honest={"by sin": lambda x: 2 * torch.sin(x / 2).square()},
        faulty={"scaled": lambda x: (1 - torch.cos(x)) * (1 + 1e-4)},
    ),
    "cosine distance": Family(
        reference=cosine_distance,
        inputs={"x": tensor("m", "n", values=floats(0.1, 4)), "y": tensor("m", "n", values=floats(0.1, 4))},
        honest={"fused": cosine_distance_fused},
        faulty={
            "TF32": lambda x, y: cosine_distance_fused(tf32(x), tf32(y)),
            "scaled": lambda x, y: cosine_distance(x, y) * (1 + 1e-3),
        },
        gradients=False,
        options={"sizes": {"n": size(1, 65)}},
    ),
    "distance to oneself": Family(
        reference=lambda x: cosine_distance(x, x),
        inputs={"x": tensor("m", "n", values=floats(0.1, 4))},
        honest={"fused": lambda x: cosine_distance_fused(x, x)},
        gradients=False,
        options={"sizes": {"n": size(1, 65)}},
        draws=100,
    ),
    "exp(x) − 1": Family(
        reference=lambda x: torch.exp(x) - 1,
        inputs=NEAR,
        honest={"expm1": torch.expm1},
        faulty={"scaled": lambda x: torch.expm1(x) * (1 + 1e-4)},
        draws=100,
    ),
    "gelu": Family(
        reference=lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        inputs={"x": tensor("n", values=floats(-6, 6))},
        honest={"fused": functional.gelu},
        faulty={"tanh": lambda x: functional.gelu(x, approximate="tanh")},
        draws=100,
    ),
    "gated": Family(
        reference=lambda x, y: functional.silu(x) * y,
        inputs={"x": tensor("n", values=floats(-30, 30)), "y": tensor("n", values=floats(-30, 30))},
        honest={"unfused": lambda x, y: x * y / (1 + torch.exp(-x))},
        faulty={
            "second use": lambda x, y: x * torch.sigmoid(x.detach()) * y,
            "gradient of y missing": lambda x, y: functional.silu(x) * y.detach(),
        },
        draws=100,
    ),
    "fused multiply-add": Family(
        reference=lambda a, b, c: a * b - c,
        inputs={name: tensor("n", values=FINITE) for name in "abc"},
        honest={"fused": lambda a, b, c: (a.double() * b.double() - c.double()).to(a.dtype)},
        faulty={"one term": lambda a, b, c: a * b * (1 + 1e-4) - c},
        draws=100,
    ),
    "reciprocal root": Family(
        reference=lambda x: 1 / torch.sqrt(x),
        inputs={"x": tensor("n", values=floats(1e-3, 100))},
        honest={"rsqrt": torch.rsqrt, "power": lambda x: x**-0.5},
        faulty={"one Newton step": lambda x: (r := torch.rsqrt(x).bfloat16().to(x)) * (1.5 - 0.5 * x * r * r)},
        draws=100,
    ),
    "division": Family(
        reference=lambda a, b: a / b,
        inputs={"a": tensor("n", values=floats(-4, 4)), "b": tensor("n", values=floats(0.1, 4))},
        honest={"by the reciprocal": lambda a, b: a * (1 / b)},
        draws=100,
    ),
    "circle": Family(
        reference=turn,
        inputs={
            "theta": tensor("n", values=floats(-4, 4), period=2 * math.pi),
            "delta": tensor("n", values=floats(-4, 4)),
        },
        honest={"atan2": turn_by_atan2, "half a turn on": lambda t, d: t.copy_(wrap(t + d + 2 * math.pi))},
        faulty={
            "a little more": lambda t, d: t.copy_(wrap(t + d * 1.001)),
            "half a turn": lambda t, d: t.copy_(wrap(t + d + math.pi)),
        },
        gradients=False,
        options={"mutates": {"theta"}},
    ),
    "copy": Family(
        reference=lambda x: x.contiguous().clone(),
        inputs={"x": tensor("m", "n")},
        honest={"times one": lambda x: (x * 1.0).contiguous()},
        faulty={"blind to strides": blind_to_strides, "zeros": torch.zeros_like, "absolute": lambda x: x.abs()},
        gradients=False,
    ),
    "softmax in bfloat16": Family(
        reference=softmax_unfused,
        inputs=FINITE_ROWS,
        honest={"fused": softmax, "float32 inside": in_float32(softmax_online)},
        faulty={"zeros": lambda x: torch.zeros_like(softmax(x)), "scaled": lambda x: softmax(x) * 1.05},
        dtype="bfloat16",
        options={"sizes": SOME},
    ),
    "layernorm in float16": Family(
        reference=layernorm,
        inputs=NORMED,
        honest={"float32 inside": in_float32(layernorm_rsqrt)},
        faulty={"no epsilon": lambda x, w, b: layernorm(x * 100, w, b), "scaled": lambda *a: layernorm(*a) * 1.02},
        dtype="float16",
        options={"sizes": {"m": size(1, 33), "n": size(2, 129)}},
        draws=100,
    ),
    "matmul in bfloat16": Family(
        reference=torch.matmul,
        inputs=PRODUCT,
        honest={"float32 inside": in_float32(blocked_matmul)},
        faulty={
            "scaled": lambda a, b: a @ b * 1.06,
            "bfloat16 accumulator": lambda a, b: accumulated_in(a.dtype)(a, b),
        },
        gradients=False,
        dtype="bfloat16",
        options={"sizes": {"k": size(2048, 2300), "m": size(1, 9), "n": size(1, 9)}},
        draws=50,
    ),
    "attention in float16": Family(
        reference=attention,
        inputs=HEADS,
        honest={"float32 inside": in_float32(flash_attention)},
        faulty={"scaled": lambda *a: attention(*a) * 1.02},
        dtype="float16",
        options={"sizes": HEAD_SIZES},
        draws=100,
    ),
    "layernorm in float64": Family(
        reference=layernorm,
        inputs=NORMED,
        honest={"rsqrt": layernorm_rsqrt, "Welford": layernorm_welford},
        faulty={"in float32": lambda *a: layernorm(*(v.float() for v in a)).double()},
        dtype="float64",
        options={"sizes": {"m": size(1, 33), "n": size(2, 129)}},
        draws=100,
    ),
}


def families() -> list[Any]:
    """Return one precision of each family; make test-all runs the others, too."""
    other = ("in float16", "in bfloat16", "in float64", ", fused", ", unfused", "one after another", "of NaN")
    return [pytest.param(name, marks=FULLY if any(words in name for words in other) else ()) for name in FAMILIES]


@pytest.mark.parametrize("name", families())
def test_correct_kernels_pass_and_faulty_ones_are_detected(name: str) -> None:
    family = FAMILIES[name]
    wrong, caught, tally = judge_family(family, seed=1)
    assert not any(wrong.values()), "\n".join(m for messages in wrong.values() for m in messages[:2])
    missed = sorted(k for k, times in caught.items() if not times)
    assert not missed
    if name == "distance to oneself":  # its truth is 0, and rounding errors alone prove nothing
        assert tally.ill_conditioned > family.trials / 4
        return
    evidence = tally.evidence(pair_of(torch.exp, torch.exp, {}), family.dtype, "cpu")
    assert evidence.draws == family.trials
    assert evidence.elements > 100 or name.startswith("sum")
    assert evidence.worst > 0 or name == "copy"


# --- stateful ------------------------------------------------------------------------------------------------


def adamw(params: list[torch.Tensor], beta2: float = 0.999, decay: float = 1e-2, moments: Any = None) -> Call:
    first = [torch.zeros_like(p, dtype=moments) for p in params]
    second = [torch.zeros_like(p, dtype=moments) for p in params]
    taken = 0

    def step(grads: list[torch.Tensor]) -> None:
        nonlocal taken
        taken += 1
        for p, g, m, v in zip(params, grads, first, second, strict=True):
            p.mul_(1 - 1e-3 * decay)
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            p.sub_(1e-3 * (m / (1 - 0.9**taken)) / ((v / (1 - beta2**taken)).sqrt() + 1e-8))

    return step


def adamw_fused(params: list[torch.Tensor]) -> Call:
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    taken = 0

    def step(grads: list[torch.Tensor]) -> None:
        nonlocal taken
        taken += 1
        for p, g, m, v in zip(params, grads, first, second, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            p.mul_(1 - 1e-5)
            p.addcdiv_(m, v.sqrt() / math.sqrt(1 - 0.999**taken) + 1e-8, value=-1e-3 / (1 - 0.9**taken))

    return step


def adamw_foreach(params: list[torch.Tensor]) -> Call:
    made: list[torch.optim.AdamW] = []

    def step(grads: list[torch.Tensor]) -> None:
        if not made:
            made.append(torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2, foreach=True))
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        made[0].step()

    return step


def momentum(params: list[torch.Tensor]) -> Call:
    speed = [torch.zeros_like(p) for p in params]

    def step(grads: list[torch.Tensor]) -> None:
        for p, g, v in zip(params, grads, speed, strict=True):
            v.mul_(0.9).add_(g)
            p.sub_(0.1 * v)

    return step


def momentum_fused(params: list[torch.Tensor]) -> Call:
    speed = [torch.zeros_like(p) for p in params]

    def step(grads: list[torch.Tensor]) -> None:
        for p, g, v in zip(params, grads, speed, strict=True):
            v.copy_(torch.add(g, v, alpha=0.9))
            p.add_(v, alpha=-0.1)

    return step


def drifting(params: list[torch.Tensor]) -> Call:
    step, taken = momentum(params), 0

    def drift(grads: list[torch.Tensor]) -> None:
        nonlocal taken
        taken += 1
        step(grads)
        if taken == 90:
            for p in params:
                p.mul_(1.001)

    return drift


OPTIMIZED = {
    "mutates": {"params"},
    "step_inputs": {"grads": listof("l", tensor("m", "n", values=floats(-4, 4)))},
    "sizes": {"l": size(1, 3), "m": size(0, 9), "n": size(0, 9)},
}
PARAMS = {"params": listof("l", tensor("m", "n", values=FINITE))}
STATEFUL = {
    "AdamW": Family(
        reference=stateful(adamw),
        inputs=PARAMS,
        honest={"fused": adamw_fused, "foreach": adamw_foreach},
        faulty={
            "no decay": lambda p: adamw(p, decay=0.0),
            "bfloat16 moments": lambda p: adamw(p, moments=torch.bfloat16 if p[0].dtype != torch.float64 else None),
            "another beta": lambda p: adamw(p, beta2=0.99),
        },
        gradients=False,
        draws=8,
        options=OPTIMIZED,
    ),
    "momentum": Family(
        reference=stateful(momentum),
        inputs=PARAMS,
        honest={"fused": momentum_fused},
        faulty={"drifts late": drifting},
        gradients=False,
        draws=8,
        options=OPTIMIZED,
    ),
    "momentum in bfloat16": Family(
        reference=stateful(momentum),
        inputs=PARAMS,
        honest={"fused": momentum_fused},
        gradients=False,
        dtype="bfloat16",
        draws=4,
        options=OPTIMIZED,
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "momentum" else FULLY) for name in STATEFUL])
def test_correct_optimizers_pass_and_faulty_ones_are_detected(name: str) -> None:
    wrong, caught, _ = judge_family(STATEFUL[name], seed=2)
    assert not any(wrong.values()), "\n".join(m for messages in wrong.values() for m in messages[:2])
    assert all(caught.values()), caught


def test_error_of_a_late_step_is_reported_with_its_step() -> None:
    pair = pair_of(stateful(momentum), stateful(drifting), PARAMS, **OPTIMIZED)
    message = rejected(pair, "after 100 steps of the optimized side is wrong", case_of(l=1, m=3, n=3))
    assert "params[0] (in place)" in message


def test_allowed_error_of_a_state_never_decreases_with_the_steps() -> None:
    pair = pair_of(stateful(momentum), stateful(momentum), PARAMS, **OPTIMIZED)
    truth = truths.establish(pair, case_of(l=1, m=3, n=3), "cpu", gradients=False)
    errors = [truth.errors[f"params[0] (in place) after {i} step{'s' * (i > 1)}"] for i in (1, 2, 17, 100)]
    for before, after in itertools.pairwise(errors):
        assert bool((after >= before).all())


# --- form: shape, dtype, strides, structure ------------------------------------------------------------------

X34 = case_of(m=3, n=4)
FORMS: dict[str, tuple[Call, Call, str]] = {
    "dtype": (torch.exp, lambda x: torch.exp(x).double(), "has dtype torch.float64 where the reference has torch.fl"),
    "shape": (torch.exp, lambda x: torch.exp(x)[None], r"has shape \(1, 3, 4\) where the reference has \(3, 4\)"),
    "device": (torch.exp, lambda x: torch.exp(x).to("meta"), "has device meta where the reference has cpu"),
    "strides": (
        torch.exp,
        lambda x: torch.exp(x).T.contiguous().T,
        "is permuted in memory where the reference is cont",
    ),
    "broadcast": (lambda x: x * 0 + 1, lambda x: torch.ones(1).expand(3, 4), "is overlapping in memory"),
    "a number for a tensor": (lambda x: x.sum(), lambda x: float(x.sum()), "where the reference has a tensor of torch"),
    "a tensor for a number": (lambda x: 1.0, lambda x: torch.ones(()), "is a tensor of torch.float32 where the"),
    "a whole number": (lambda x: float(len(x)), lambda x: len(x), "is 3, of type int, where the reference has a float"),
    "a bool": (lambda x: len(x) > 2, lambda x: int(len(x) > 2), "is 1, of type int, where the reference has a bool"),
    "None": (torch.exp, lambda x: None, "is None where the reference has a value"),
    "not None": (lambda x: None, torch.exp, "is a tensor where the reference has None"),
    "too few": (lambda x: (x * 1, x * 2), lambda x: (x * 1,), "returns 1 output where the reference returns 2"),
    "too many": (lambda x: x * 1, lambda x: (x * 1, x * 2), "returns 2 outputs where the reference returns 1"),
    "another key": (
        lambda x: {"a": x * 1},
        lambda x: {"b": x * 1},
        r"arranged otherwise than the reference's: only the reference has output\['a'\]$",
    ),
    "an added key": (lambda x: [x * 1], lambda x: {"b": x * 1}, r"only the reference has output\[0\]$"),
    "order": (lambda x: (x * 1, x * 2), lambda x: (x * 2, x * 1), r"output\[0\] of the optimized side is wrong"),
    "whole number": (lambda x: x.argmax(), lambda x: x.argmax() + 1, "whole numbers and bools must be equal"),
    "bool": (lambda x: x > 0, lambda x: x >= -1, "whole numbers and bools must be equal"),
    "Python number": (lambda x: x.shape[0], lambda x: x.shape[0] + 1, "is 4 instead of 3"),
    "float of the wrong size": (lambda x: 0.1, lambda x: 0.2, "is wrong"),
}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_of_another_form_or_wrong_values_are_rejected(name: str) -> None:
    reference, optimized, match = FORMS[name]
    inputs = {"x": tensor("m", "n", values=FINITE)}
    message = rejected(pair_of(reference, optimized, inputs, gradients=False), match, X34)
    assert message.startswith("pair: ")
    assert "\n" not in message


def test_empty_outputs_must_have_the_right_shape_and_dtype() -> None:
    inputs = {"x": tensor("m", "n")}
    check(pair_of(torch.exp, torch.exp, inputs), case_of(m=0, n=5), gradients=True)
    rejected(pair_of(torch.exp, lambda x: torch.exp(x)[:, :1], inputs), "has shape", case_of(m=0, n=5))
    rejected(pair_of(torch.exp, lambda x: torch.exp(x).half(), inputs), "has dtype", case_of(m=0, n=5))


def test_output_strides_for_non_contiguous_inputs() -> None:
    case = case_of(m=3, n=4, inputs={"x": InputCase(layout="transposed")})
    inputs = {"x": tensor("m", "n")}
    stronger = pair_of(torch.exp, lambda x: torch.exp(x).contiguous(), inputs)
    check(stronger, case)
    kept = pair_of(lambda x: torch.exp(x).contiguous(), torch.exp, inputs)
    check(kept, case)
    weaker = pair_of(torch.exp, lambda x: torch.exp(x).repeat_interleave(2, -1)[..., ::2], inputs)
    rejected(weaker, "is strided in memory where the reference is permuted", case)
    other = pair_of(torch.exp, lambda x: torch.exp(x).T.contiguous().T, inputs)
    rejected(other, "permuted in memory", X34)
    check(replace(other, strides="any"), X34)
    with pytest.raises(PairError, match="strides='some' is not one of reference, any"):
        replace(other, strides="some")


@pytest.mark.parametrize(
    ("shape", "stride", "name"),
    [
        ((2, 3), (3, 1), "contiguous"),
        ((2, 3), (1, 2), "permuted"),
        ((2, 3), (6, 2), "strided"),
        ((2, 3), (0, 1), "overlapping"),
        ((2, 3, 4, 5), (60, 1, 15, 3), "channels last"),
        ((1, 3), (77, 1), "contiguous"),
        ((0, 3), (5, 9), "contiguous"),
    ],
)
def test_strides_are_classified(shape: tuple[int, ...], stride: tuple[int, ...], name: str) -> None:
    assert forms.strides_class(torch.empty_strided(shape, stride)) == name


def test_one_wrong_element_in_a_million_is_detected() -> None:
    def one_wrong(x: torch.Tensor) -> torch.Tensor:
        out = torch.exp(x)
        if out.numel():
            out[out.argmax()] *= 1 + 1e-4
        return out

    pair = pair_of(torch.exp, one_wrong, NEAR)
    message = rejected(pair, r"wrong at \[\d+\].*\(1 of 1000000 elements beyond budget\)", case_of(n=10**6))
    assert "truth" in message
    assert "reference" in message


@pytest.mark.parametrize(
    ("reference", "optimized", "match"),
    [
        (lambda a, b: a * b, lambda a, b: a * b.detach(), "gradient of b of the optimized side is None"),
        (lambda a, b: a * b, lambda a, b: (a * b).detach(), "gradient of a of the optimized side is None"),
        (lambda a, b: a * a * b, lambda a, b: a * a.detach() * b, "gradient of a of the optimized side is wrong"),
        (lambda a, b: a * 1, lambda a, b: a + (b - b.detach()), "gradient of b .* is a tensor where the reference"),
    ],
    ids=["one missing", "all missing", "second use", "one too many"],
)
def test_missing_wrong_and_extra_gradients_are_rejected(reference: Call, optimized: Call, match: str) -> None:
    inputs = {"a": tensor("n", values=floats(1, 4)), "b": tensor("n", values=floats(1, 4))}
    rejected(pair_of(reference, optimized, inputs), match, case_of(n=5), gradients=True)


@pytest.mark.parametrize("seed", range(3))
def test_complex_outputs_and_their_gradients_are_compared(seed: int) -> None:
    inputs = {"r": tensor("n", values=floats(0, 3)), "t": tensor("n", values=floats(-3, 3))}

    def polar(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.complex(r * t.cos(), r * t.sin())

    same = pair_of(lambda r, t: r * torch.exp(1j * t), polar, inputs)
    check(same, case_of(n=16, seed=seed), gradients=True)
    turned = replace(same, optimized=lambda r, t: polar(r, -t))
    rejected(turned, "output of the optimized side", case_of(n=16, seed=seed))
    frozen = replace(same, optimized=lambda r, t: polar(r, t.detach()))
    rejected(frozen, "gradient of t", case_of(n=16, seed=seed), gradients=True)


def _complex_normal(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype)


def _product(of_gradient: Call) -> Call:
    """Return the product of two complex tensors whose backward pass multiplies of_gradient(incoming, factor)."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return of_gradient(g, y), of_gradient(g, x)

    return lambda x, y: Product.apply(x, y)


def test_gradients_of_complex_inputs_are_compared() -> None:
    normal = tensor("n", dtype="complex64", values=sampled(_complex_normal))
    pair = pair_of(lambda x, y: x * y, None, {"x": normal, "y": normal})
    right = _product(lambda g, factor: g * factor.conj())
    turned = _product(lambda g, factor: g * factor)
    real_alone = _product(lambda g, factor: g.real * factor.conj())  # right where the incoming gradients are real
    case = case_of(n=9)
    for seed in range(len(incoming_gradients.DRAWN)):
        check(replace(pair, optimized=right), replace(case, seed=seed), gradients=True)
    for wrong in (turned, real_alone):
        check(replace(pair, optimized=wrong), case)
        rejected(replace(pair, optimized=wrong), "gradient of x of the optimized side is wrong", case, gradients=True)
    frozen = {name: replace(normal, differentiable=False) for name in pair.inputs}
    check(replace(pair, optimized=turned, inputs=frozen), case, gradients=True)


def test_gradients_are_not_compared_where_a_complex_input_is_nan() -> None:
    def holed(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = _complex_normal(generator, shape, dtype)
        made[::3] = complex(math.nan, 1.0)
        return made

    inputs = {"x": tensor("n", dtype="complex64", values=sampled(holed))}
    same = pair_of(lambda x: x * x.conj(), lambda x: x * x.conj() * 1.0, inputs)
    truth = truths.establish(same, case_of(n=7), "cpu", gradients=True)
    assert truth.undefined["gradient of x"].tolist() == [[number % 3 == 0] * 2 for number in range(7)]
    check(same, case_of(n=7), gradients=True)


def test_gradients_of_complex_parameters_are_compared() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
            self.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(self.weight.dtype) @ self.weight + self.bias

    inputs = {"layer": module(Layer), "x": tensor("m", 3, values=FINITE)}
    same = pair_of(lambda net, x: net(x), lambda net, x: net.bias + x.to(net.weight.dtype) @ net.weight, inputs)
    check(same, case_of(m=4), gradients=True)
    turned = replace(same, optimized=lambda net, x: net(x).conj().resolve_conj())
    rejected(turned, "output of the optimized side is wrong", case_of(m=4))
    frozen = replace(same, optimized=lambda net, x: x.to(net.weight.dtype) @ net.weight + net.bias.detach())
    rejected(frozen, "gradient of layer.bias of the optimized side is None", case_of(m=4), gradients=True)


@pytest.mark.parametrize("seed", range(len(incoming_gradients.DRAWN)))
def test_the_order_of_the_keys_of_a_dict_does_not_matter(seed: int) -> None:
    inputs = {"x": tensor("n", values=floats(-4, 4))}
    same = pair_of(lambda x: {"a": x.sin(), "b": 2 * x}, lambda x: {"b": x + x, "a": x.sin()}, inputs)
    check(same, case_of(n=5, seed=seed), gradients=True)
    exchanged = replace(same, optimized=lambda x: {"b": x.sin(), "a": x + x})
    rejected(exchanged, r"output\['a'\] of the optimized side is wrong", case_of(n=5, seed=seed))


def test_gradient_of_zeros_equals_a_missing_gradient() -> None:
    inputs = {"a": tensor("n"), "b": tensor("n")}
    pair = pair_of(lambda a, b: a * 1, lambda a, b: a + (b - b.detach()) * 0, inputs)
    check(pair, case_of(n=5), gradients=True)
    check(pair_of(pair.optimized, pair.reference, inputs), case_of(n=5), gradients=True)


def test_gradients_of_modules_are_compared() -> None:
    def build(n: int) -> torch.nn.Module:
        return torch.nn.Linear(n, 3)

    inputs = {"layer": module(build), "x": tensor("m", "n", values=FINITE)}
    same = pair_of(lambda net, x: net(x), lambda net, x: x @ net.weight.T + net.bias, inputs)
    check(same, case_of(m=4, n=6), gradients=True)
    frozen = pair_of(lambda net, x: net(x), lambda net, x: x @ net.weight.T + net.bias.detach(), inputs)
    rejected(frozen, r"gradient of layer.bias of the optimized side is None", case_of(m=4, n=6), gradients=True)


def test_gradient_with_a_truth_of_zero_does_not_discard_the_draw() -> None:
    """The gradient of a bias before a softmax consists only of rounding errors."""
    inputs = {"x": tensor("m", "n", values=floats(-4, 4)), "b": tensor(values=floats(-4, 4))}
    pair = pair_of(lambda x, b: softmax(x + b), lambda x, b: softmax_unfused(x + b), inputs)
    tally = check(pair, case_of(m=6, n=17), gradients=True)
    assert tally.ill_conditioned == 0


# --- dtypes --------------------------------------------------------------------------------------------------


def test_input_with_a_declared_dtype_keeps_it() -> None:
    def mixed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() * scale.float()).to(x.dtype) if x.dtype != torch.float64 else x * scale

    inputs = {"x": tensor("n", values=FINITE), "scale": tensor("n", dtype="float32", values=floats(1, 2))}
    kept: list[torch.dtype] = []

    def reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        kept.append(scale.dtype)
        return mixed(x, scale)

    check(pair_of(reference, mixed, inputs, dtypes=("bfloat16",)), case_of("bfloat16", n=64))
    assert set(kept) == {torch.float32, torch.float64}


def test_budget_follows_the_declared_precision() -> None:
    inputs = {"a": tensor("m", "k", values=floats(-2, 2)), "b": tensor("k", "n", values=floats(-2, 2))}

    def in_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.bfloat16() @ b.bfloat16()).to(a.dtype)

    case = case_of(m=16, k=32, n=16)
    rejected(pair_of(torch.matmul, in_bfloat16, inputs), "wrong", case)
    check(pair_of(torch.matmul, in_bfloat16, inputs, precision="bfloat16"), case)
    check(pair_of(torch.matmul, lambda a, b: a.bfloat16() @ b.bfloat16(), inputs, precision="bfloat16"), case)
    worse = pair_of(torch.matmul, lambda a, b: in_bfloat16(a, b) * 1.05, inputs, precision="bfloat16")
    rejected(worse, "wrong|inaccurate", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_outputs_may_be_flushed_to_zero(dtype: str) -> None:
    def flushing(x: torch.Tensor) -> torch.Tensor:
        out = x * 1
        return torch.where(out.abs() < torch.finfo(out.dtype).tiny, torch.zeros_like(out), out)

    case = case_of(dtype, n=33, inputs={"x": InputCase(regime="denormal")})
    inputs = {"x": tensor("n")}
    check(pair_of(lambda x: x * 1, flushing, inputs), case)
    rejected(pair_of(torch.log, lambda x: torch.log(flushing(x)), inputs), "inf at", case)


def test_tf32_may_truncate_subnormal_numbers() -> None:
    inputs = {"a": tensor("m", "k"), "b": tensor("k", "n")}
    drawn = {"a": InputCase(regime="denormal"), "b": InputCase(regime="mixed")}
    pair = pair_of(torch.matmul, lambda a, b: tf32(a) @ tf32(b), inputs, precision="tf32")
    for seed in range(8):
        check(pair, case_of(m=5, k=13, n=7, inputs=drawn, seed=seed))
    inaccurate = pair_of(torch.matmul, lambda a, b: tf32(a) @ b * 1.02, inputs, precision="tf32")
    rejected(inaccurate, "wrong|inaccurate", case_of(m=5, k=13, n=7))


def test_float16_subnormals_may_not_be_flushed() -> None:
    case = case_of("float16", n=33, inputs={"x": InputCase(regime="denormal")})
    rejected(pair_of(lambda x: x * 1, torch.zeros_like, {"x": tensor("n")}), "wrong", case)


# --- excuses, discards, and the amount of proof --------------------------------------------------------------


def threshold(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.5, 1.0, 0.0).to(x.dtype)


def near_half(x: torch.Tensor) -> torch.Tensor:
    return (x - 0.5).abs() < 1e-6


def grid(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw values in [0, 1), of which the first 0.3% equal the threshold 0.5."""
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    x[: max(1, int(0.003 * x.numel()))] = 0.5
    return x.to(dtype)


@pytest.mark.parametrize("whole", [False, True])
def test_elements_near_a_declared_threshold_are_excused_and_counted(whole: bool) -> None:
    def cut(at: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        return lambda x: at(x) if whole else at(x).to(x.dtype)

    inputs = {"x": tensor("n", values=sampled(grid))}
    reference, optimized = cut(lambda x: x > 0.5), cut(lambda x: x >= 0.5)
    case = case_of(n=1000)
    rejected(pair_of(reference, optimized, inputs), "differs at|wrong", case)
    tally = check(pair_of(reference, optimized, inputs, excuse=near_half), case)
    assert (tally.excused, tally.elements) == (3, 1000)
    tally.evidence(pair_of(reference, optimized, inputs), "float32", "cpu")
    elsewhere = pair_of(reference, cut(lambda x: x > 0.6), inputs, excuse=near_half)
    rejected(elsewhere, "differs at|wrong", case)
    many = check(pair_of(reference, optimized, inputs, excuse=near_half), case_of(n=10))
    with pytest.raises(NotEquivalent, match=r"1 of 10 elements were excused.*more than 1%; narrow `excuse`"):
        many.evidence(pair_of(reference, optimized, inputs), "float32", "cpu")


def test_excuse_applies_only_to_outputs_of_its_shape_or_name() -> None:
    inputs = {"x": tensor("m", "n", values=floats(-1, 1))}
    pair = pair_of(
        lambda x: (threshold(x), x.sum(0)),
        lambda x: (threshold(x), x.sum(0) * 1.01),
        inputs,
        excuse=lambda x: torch.ones_like(x, dtype=torch.bool),
    )
    rejected(pair, r"output\[1\] .* is wrong", case_of(m=7, n=5))
    named = pair_of(
        lambda x: (x * 1, x * 2),
        lambda x: (x * 1.5, x * 2.5),
        inputs,
        excuse=lambda x: {"output[0]": torch.ones_like(x, dtype=torch.bool)},
    )
    rejected(named, r"output\[1\] .* is wrong", case_of(m=7, n=5))


def test_draw_on_which_the_reference_overflows_is_discarded_and_counted() -> None:
    pair = pair_of(lambda x: x.exp() * 1e30 * 1e30, torch.zeros_like, NEAR)
    tally = check(pair, case_of(n=9))
    assert (tally.draws, tally.discarded, tally.elements) == (1, 1, 0)
    with pytest.raises(NotEquivalent, match=r"1 of 1 draws were discarded.*bound the inputs with values=floats"):
        tally.evidence(pair, "float32", "cpu")


def test_random_numbers_that_depend_on_the_dtype_are_named() -> None:
    inputs = {"x": tensor("n", values=floats(1, 2)), "source": generator()}

    def drop(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=source, dtype=x.dtype)

    pair = pair_of(drop, drop, inputs)
    tally = check(pair, case_of(n=9))
    with pytest.raises(NotEquivalent, match="let it draw the same random numbers in every dtype"):
        tally.evidence(pair, "float32", "cpu")


def test_an_output_that_cancels_to_zero_in_the_reference_may_be_more_accurate() -> None:
    """For -7.6, 1 + tanh is exactly 0 in the reference, and the right value is 1e-19."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.sigmoid(1.5957691216057308 * (y + 0.044715 * y**3))).to(x.dtype)

    inputs = {"x": tensor("n", values=floats(-8, -7.5))}
    pair = pair_of(lambda x: functional.gelu(x, approximate="tanh"), gelu, inputs, dtypes=("bfloat16",))
    for seed in (4, 21, 29, 37, 72, 90):  # each was beyond its budget by few replicas
        check(pair, case_of("bfloat16", seed=seed, n=1))
    rejected(replace(pair, optimized=lambda x: gelu(x) - 1e-3), "is wrong", case_of("bfloat16", n=1))


def test_too_few_conclusive_draws_are_a_failure() -> None:
    pair = pair_of(torch.exp, torch.exp, NEAR)
    with pytest.raises(NotEquivalent, match="too little is proven"):
        Tally().evidence(pair, "float32", "cpu")
    with pytest.raises(NotEquivalent, match="30 are ill-conditioned in float32"):
        Tally(draws=50, discarded=10, ill_conditioned=30).evidence(pair, "float32", "cpu")
    evidence = Tally(draws=50, discarded=10, ill_conditioned=20, elements=1).evidence(pair, "float32", "cpu")
    assert (evidence.draws, evidence.discarded) == (50, 30)


def test_ill_conditioned_draw_is_checked_but_counts_as_no_proof() -> None:
    def cancels(x: torch.Tensor) -> torch.Tensor:
        return (x + 1e6) - 1e6

    tally = check(pair_of(cancels, cancels, NEAR), case_of(n=64))
    assert tally.ill_conditioned == 1
    rejected(pair_of(cancels, lambda x: cancels(x) + 4, NEAR), "wrong", case_of(n=64))


def test_gradient_at_a_tie_must_go_to_the_right_element() -> None:
    """At a tie the gradient of a maximum may jump within a few ulp, but must still go to the right elements."""
    case = case_of(m=4, n=8, inputs={"x": InputCase(layout="expanded", regime="repeated")})
    inputs = {"x": tensor("m", "n", values=floats(1, 2))}

    def first_only(x: torch.Tensor) -> torch.Tensor:
        return x.gather(0, x.argmax(0, keepdim=True))[0]

    even = pair_of(lambda x: x.amax(0), lambda x: x.amax(0) * 1.0, inputs)
    check(even, case, gradients=True)
    rejected(pair_of(lambda x: x.amax(0), first_only, inputs), "gradient of x .* is wrong", case, gradients=True)


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        (lambda x: x.half().double() if x.dtype == torch.float64 else x.half(), None),
        (lambda x: x[:1] if x.dtype == torch.float64 else x * 1, "has another shape in float64"),
        (lambda x: (x * 1,) if x.dtype == torch.float64 else x * 1, "returns other outputs in float64"),
        (lambda x: x > 0 if x.dtype == torch.float64 else x * 1, "is of another kind in float64; take out its casts"),
    ],
)
def test_reference_with_other_outputs_in_float64_is_an_error(reference: Call, match: str | None) -> None:
    pair = pair_of(reference, reference, NEAR)
    if match is None:
        check(pair, case_of(n=5))
        return
    with pytest.raises(PairError, match=match):
        check(pair, case_of(n=5))


# --- a cheaper truth -----------------------------------------------------------------------------------------


def test_cheaper_truth_passes_check_truth() -> None:
    pair = pair_of(sequential_sum, sequential_sum, ROWS, truth=torch_sum)
    for case in drawn(pair, "float64", 25):
        equivalence.check_truth(pair, case, "cpu")


@pytest.mark.parametrize(
    "truth",
    [
        lambda x: torch_sum(x) * (1 + 1e-9),
        lambda x: torch_sum(x.float()).double(),
        lambda x: torch_sum(x) * math.nan,
        lambda x: torch.zeros(x.shape[:-1], dtype=x.dtype),
        lambda x: (torch_sum(x), torch_sum(x)),
        lambda x: torch_sum(x)[None],
    ],
    ids=["scaled", "float32", "NaN", "zeros", "two", "shape"],
)
def test_wrong_truth_is_rejected(truth: Call) -> None:
    pair = pair_of(sequential_sum, sequential_sum, ROWS, truth=truth)
    with pytest.raises(NotEquivalent, match=r"truth= must compute the same function as the reference"):
        equivalence.check_truth(pair, case_of(m=5, n=17), "cpu")


def test_cheaper_truth_is_called_in_float64_only() -> None:
    called: list[torch.dtype] = []

    def truth(x: torch.Tensor) -> torch.Tensor:
        called.append(x.dtype)
        return torch_sum(x)

    check(pair_of(sequential_sum, torch_sum, ROWS, truth=truth), case_of(m=5, n=17))
    assert set(called) == {torch.float64}


# --- the reference's own error -------------------------------------------------------------------------------


def test_a_small_output_gets_more_replicas() -> None:
    runs: list[torch.dtype] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.dtype)
        return x.sum()

    pair = pair_of(counted, counted, {"x": tensor("n", values=FINITE)})
    truths.establish(pair, case_of(n=9), "cpu", gradients=False)
    assert runs.count(torch.float32) == 1 + rule.MAX_REPLICAS
    runs.clear()
    truths.establish(pair, case_of(n=9), "cpu", gradients=False, replicas=0)
    assert runs.count(torch.float32) == 1 + 2
    runs.clear()
    wide = pair_of(lambda x: counted(x) * 0 + x, torch.exp, {"x": tensor("n", values=FINITE)})
    truths.establish(wide, case_of(n=1000), "cpu", gradients=False, replicas=0)
    assert runs.count(torch.float32) == 1 + 1


def test_kernel_may_sum_sequentially_where_the_reference_sums_in_a_tree() -> None:
    inputs = {"a": tensor("m", "k", values=FINITE), "b": tensor("k", "n", values=FINITE)}
    pair = pair_of(lambda a, b: (a[:, None] * b.T[None]).sum(-1), outer_matmul, inputs, gradients=False)
    truth = truths.establish(pair, case := case_of(m=32, k=2048, n=32), "cpu", gradients=False, replicas=0)
    equivalence.judge(pair, truth, side_calls.produce(pair, Side(call=outer_matmul), case, "cpu", gradients=False))
    rounded = side_calls.produce(pair, Side(call=lambda a, b: tf32(a) @ tf32(b)), case, "cpu", gradients=False)
    with pytest.raises(NotEquivalent, match="wrong"):
        equivalence.judge(pair, truth, rounded)


def test_reference_without_error_does_not_make_the_budget_zero() -> None:
    """The reference of 1 − cos(x, x) may be exactly 0, while another order of operations is off by an ulp."""
    inputs = {"x": tensor("n", values=floats(1, 2))}
    pair = pair_of(lambda x: cosine_distance(x, x), lambda x: cosine_distance(x, x) + 6e-8, inputs)
    for seed in range(20):
        check(pair, case_of(n=1, seed=seed))
    rejected(pair_of(pair.reference, lambda x: cosine_distance(x, x) + 1e-5, inputs), "wrong", case_of(n=1))


def test_scalars_are_passed_as_numbers() -> None:
    inputs = {"x": tensor("n", values=FINITE), "scale": scalar(floats(1, 2))}
    pair = pair_of(lambda x, s: x * s, lambda x, s: x * s, inputs)
    check(pair, case_of(n=5, scale=1.5))
    rejected(pair_of(lambda x, s: x * s, lambda x, s: x * 1.2, inputs), "wrong", case_of(n=5, scale=1.5))


@pytest.mark.parametrize("raised", [pytest.skip.Exception("x"), hypothesis.errors.UnsatisfiedAssumption()])
def test_side_that_raises_skip_or_unsatisfied_is_an_error(raised: BaseException) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        raise raised

    made = Pair(reference=lambda x: x + 1, optimized=picky, inputs={"x": tensor("n")}, name="p")
    with pytest.raises(PairError, match=f"a side raises {type(raised).__name__}, which would make the test runner"):
        equivalence.check_case(made, Case(dtype="float32", sizes={"n": 3}, inputs={}, seed=0), "cpu")


def test_order_of_dict_keys_is_ignored() -> None:
    made = Pair(
        reference=lambda x: {"a": x + 1, "b": x * 2},
        optimized=lambda x: {"b": x * 2, "a": x + 1},
        inputs={"x": tensor("n")},
        name="p",
    )
    equivalence.check_case(made, Case(dtype="float32", sizes={"n": 3}, inputs={}, seed=0), "cpu")


# --- gradients that do not exist -----------------------------------------------------------------------------------


def clamped(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < -1, -1.0, torch.where(x > 1, 1.0, x))


def variance(x: torch.Tensor) -> torch.Tensor:
    shifted = x - x[..., :1]
    return (shifted - shifted.mean(-1, keepdim=True)).square().mean(-1)


@pytest.mark.parametrize(
    ("reference", "optimized"),
    [(lambda x: x.clamp(-1, 1), clamped), (lambda x: x.var(-1, correction=0), variance)],
    ids=["of NaN", "infinite"],
)
def test_gradient_that_does_not_exist_is_not_compared(reference: Call, optimized: Call) -> None:
    of = pair_of(reference, optimized, {"x": tensor("m", "n", least=1)}, sizes={"n": size(2, 17)}, strides="any")
    for case in drawn(of, "float32", 150):
        with contextlib.suppress(truths.Discard):
            equivalence.check_case(of, case, "cpu", gradients=True)


def test_gradients_of_finite_elements_are_compared_beside_nonfinite_ones() -> None:
    of = pair_of(lambda x: x.clamp(-1, 1), lambda x: 2 * clamped(x) - clamped(x).detach(), {"x": tensor("m", "n")})
    case = case_of(inputs={"x": InputCase(regime="nonfinite")}, m=9, n=9)
    with pytest.raises(NotEquivalent, match="is wrong"):
        equivalence.check_case(of, case, "cpu", gradients=True)


def contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    of_a, of_b = (functional.normalize(x, dim=-1) for x in (a, b))
    return functional.cross_entropy(10 * of_a @ of_b.mT, torch.arange(len(a)))


def fused_contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    of_a, of_b = (1 / x.square().sum(-1).sqrt() for x in (a, b))
    logits = (a @ b.mT) * (10 * of_a)[:, None] * of_b
    return (torch.logsumexp(logits, -1) - logits.diagonal()).mean()


def test_gradient_whose_terms_cancel_may_have_their_rounding_errors() -> None:
    inputs = {name: tensor("n", "d", values=floats(0.1, 2)) for name in ("a", "b")}
    of = pair_of(contrastive, fused_contrastive, inputs)
    for seed in range(30):
        equivalence.check_case(of, case_of(seed=8 * seed, n=7, d=1), "cpu", gradients=True)
    wrong = pair_of(contrastive, lambda a, b: fused_contrastive(a, b) + 1e-4 * (b - b.detach()).sum(), inputs)
    with pytest.raises(NotEquivalent, match="gradient of b of the optimized side is wrong"):
        equivalence.check_case(wrong, case_of(n=7, d=1), "cpu", gradients=True)


class WeightedByOneKey(torch.autograd.Function):
    """`scores.softmax(-1) @ values`, whose gradient of the scores is the difference of two sums over the width."""

    @staticmethod
    def forward(ctx, scores, values):
        weights = scores.softmax(-1)
        output = weights @ values
        ctx.save_for_backward(weights, values, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        weights, values, output = ctx.saved_tensors
        of_output = functools.reduce(torch.add, (gradient * output).split(1, -1))
        return weights * (gradient @ values.mT - of_output), weights.mT @ gradient


def test_cancelled_gradient_may_have_the_rounding_errors_of_a_sum_of_equal_incoming_gradients() -> None:
    of = pair_of(
        lambda scores, values: scores.softmax(-1) @ values,
        WeightedByOneKey.apply,
        {"scores": tensor("n", 1, values=floats(-1, 1)), "values": tensor(1, "d", values=floats(-2, 2))},
    )
    inputs = {"values": InputCase(regime="sorted")}  # its sums are small differences of larger ones
    for number in range(20):
        seed = len(incoming_gradients.DRAWN) * number + incoming_gradients.DRAWN.index("expanded")
        case = case_of(seed=seed, inputs=inputs, n=5, d=128)
        assert incoming_gradients.kind_of(case) == "expanded"
        equivalence.check_case(of, case, "cpu", gradients=True)


def test_state_of_zeros_still_allows_errors_from_the_step_inputs() -> None:
    of = pair_of(
        stateful(lambda m: lambda x: x.var(0, correction=0)),
        stateful(lambda m: lambda x: (x - x.mean(0)).square().mean(0)),
        {"m": tensor("d", values=floats(-2, 2))},
        step_inputs={"x": tensor("b", "d", values=floats(-2, 2), least=1)},
        steps=(1,),
    )
    inputs = {"m": InputCase(regime="zeros"), "x": InputCase(regime="repeated")}
    for seed in range(60):
        equivalence.check_case(of, case_of(seed=seed, inputs=inputs, b=7, d=3), "cpu")


def test_error_near_the_budget_is_reported_only_after_more_replicas() -> None:
    asked: list[int] = []
    of = pair_of(torch.exp, torch.exp, {"x": tensor("n", values=floats(-2, 2))})
    case = case_of(n=rule.REPLICAS_UP_TO + 1)

    def known(replicas: int) -> truths.Truth:
        asked.append(replicas)
        return truths.establish(of, case, "cpu", gradients=False, replicas=replicas)

    right = side_calls.produce(of, Side(call=torch.exp), case, "cpu", gradients=False)
    equivalence.hold(of, known, right)
    with pytest.raises(NotEquivalent):
        equivalence.hold(of, known, {"output": right["output"] * 1.01})
    assert rule.CAREFUL not in asked
    near = right["output"].clone()
    near[7] *= 1 + 60 * torch.finfo(torch.float32).eps
    with pytest.raises(NotEquivalent):
        equivalence.hold(of, known, {"output": near})
    assert asked[-1] == rule.CAREFUL


def test_few_replicas_may_be_enough_for_a_side_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    of = pair_of(torch.exp, torch.exp, {"x": tensor("n", values=floats(-2, 2))})
    case = case_of(n=3)
    begun = truths.by_replicas(of, case, "cpu", most=1, gradients=False)
    monkeypatch.setattr(equivalence, "_surely", lambda *unused: False)

    def known(replicas: int) -> truths.Truth:
        asked.append(replicas)
        return begun(replicas)

    right = side_calls.produce(of, Side(call=torch.exp), case, "cpu", gradients=False)
    assert equivalence.hold(of, known, right, enough=rule.FEW).replicas == 2
    assert equivalence.hold(of, known, right).replicas == rule.MAX_REPLICAS
    with pytest.raises(NotEquivalent):
        equivalence.hold(of, known, {"output": right["output"] * 1.01}, enough=rule.FEW)
    assert rule.CAREFUL not in asked
    near = {"output": right["output"] * (1 + 30 * torch.finfo(torch.float32).eps)}
    with pytest.raises(NotEquivalent):
        equivalence.hold(of, known, near, enough=rule.FEW)
    assert asked[-1] == rule.CAREFUL, "before a side fails whose error is near its budget"
