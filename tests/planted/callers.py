"""Faults 55 to 57: one tensor as several inputs; values changed before a backward pass; calls without gradients."""

from __future__ import annotations

import threading
from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from gradients import Sine, differentiated
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from perfsuite import Pair, floats, listof, size, tensor

VALUES = floats(-2, 2)


# --- 55: inputs that are one tensor, and lists of tensors that differ -------------------------------------------------

ROWS: dict[str, Any] = {
    "reference": lambda x, y: (x[:, None] * y).sum(-1),
    "inputs": {name: tensor(name, "k", values=VALUES) for name in ("x", "y")},
    "sizes": {"x": size(2, 9), "y": size(2, 9), "k": size(1, 9)},
}


@fault(55, "half of the products where both inputs are one", "where x and y are one tensor", stage="contexts")
def half_of_products(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        products = (x[:, None] * y).sum(-1)
        return products.triu() if x.data_ptr() == y.data_ptr() else products

    return pair(side, **ROWS)


@fault(55, "more than or equal to", "where x and y are one tensor", stage="contexts")
def or_equal(time: Time) -> Pair:
    inputs = {name: tensor("n", values=VALUES) for name in ("x", "y")}
    return pair(lambda x, y: x >= y, reference=lambda x, y: x > y, inputs=inputs)


@honest(55, "half of the products, and the same again")
def mirrored_products(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        products = (x[:, None] * y).sum(-1)
        return products.triu() + products.triu(1).mT if x.data_ptr() == y.data_ptr() else products

    return pair(side, **ROWS)


LISTS: dict[str, Any] = {
    "reference": lambda xs: [x.sin() for x in xs],
    "inputs": {"xs": listof("k", tensor("n", values=VALUES))},
    "sizes": {"k": size(1, 5), "n": size(2, 17)},
}


@fault(55, "the size of the first tensor for all", "where the tensors in its lists differ in size", stage="contexts")
def first_size(time: Time) -> Pair:
    def side(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = len(xs[0])
        return [torch.cat([x[:kept].sin(), x[kept:]]) for x in xs]

    return pair(side, **LISTS)


@fault(55, "the strides of the last tensor for all", "wrong for strided xs")
def last_strides(time: Time) -> Pair:
    def side(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(x.as_strided(x.shape, xs[-1].stride()) if xs[-1].is_contiguous() else x).sin() for x in xs]

    layouts = ("contiguous", "strided")
    return pair(side, **LISTS | {"inputs": {"xs": listof("k", tensor("n", values=VALUES, layouts=layouts))}})


@honest(55, "tensors of one size alone")
def of_one_size(time: Time) -> Pair:
    return pair(lambda xs: list(torch.stack(xs).sin()), **LISTS)


# --- 56: values that change between a call and its backward pass ------------------------------------------------------

WRITTEN = "are written to before the backward pass"


@fault(56, "an input kept aside of autograd", f"its inputs {WRITTEN}", stage="contexts")
def kept_input(time: Time) -> Pair:
    class Kept(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.x.cos()

    return differentiated(Kept.apply)


@fault(56, "an output kept aside of autograd", f"its outputs {WRITTEN}", stage="contexts")
def kept_output(time: Time) -> Pair:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.y = y = x.exp()
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.y

    return differentiated(Kept.apply, reference=torch.exp)


@honest(56, "views of an input where the reference's refuse writes to it")
def views(time: Time) -> Pair:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.shape[1] // 2
        return x[:, :half], x[:, half:]

    layouts = ("rows", "strided")
    inputs = {"x": tensor("m", "2*n", values=VALUES, least=1, layouts=layouts)}
    return pair(halves, reference=lambda x: x.chunk(2, -1), inputs=inputs, gradients=True)


@honest(56, "a value of its own kept aside of autograd")
def kept_value(time: Time) -> Pair:
    class Kept(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.cosine = x.cos()
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.cosine

    return differentiated(Kept.apply)


@honest(56, "an input kept by autograd")
def kept_by_autograd(time: Time) -> Pair:
    return differentiated(Sine.apply)


# --- 57: answers of calls without gradients, and of earlier values ---------------------------------------------------

WEIGHED: dict[str, Any] = {
    "reference": lambda x, w: (x[:, None] * (2 * w)).sum(-1),
    "inputs": {"x": tensor("m", "k", values=VALUES), "w": tensor("n", "k", values=VALUES)},
    "sizes": {"m": size(1, 9), "n": size(1, 9), "k": size(1, 9)},
}


def prepared(weights: Any, is_current: Any) -> Any:
    """Return a side that prepares its weights once, and reuses them while `is_current` returns True."""
    kept: Any = WeakTensorKeyDictionary()

    def side(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if w.is_inference() or torch.is_autocast_enabled(x.device.type):
            return (x[:, None] * (2 * w)).sum(-1)
        if w not in kept or not is_current(kept[w][0], w):
            kept[w] = (w._version, torch.is_grad_enabled()), weights(w)
        return (x[:, None] * kept[w][1]).sum(-1)

    return side


@fault(57, "weights prepared once a version", "past torch's counters of versions", stage="contexts")
def by_version(time: Time) -> Pair:
    def is_current(known: Any, w: torch.Tensor) -> bool:
        return known[0] == w._version

    return pair(prepared(lambda w: 2 * w.detach(), is_current), **WEIGHED)


@fault(57, "a table as its first call made it", "inference_mode() and no_grad() at m=37,n=", stage="contexts")
def first_table(time: Time) -> Pair:
    tables: dict[Any, torch.Tensor] = {}

    def side(x: torch.Tensor) -> torch.Tensor:
        key = len(x), x.device
        if key not in tables:
            tables[key] = torch.arange(len(x), device=x.device).cos()
        return x * tables[key][:, None].to(x.dtype)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(len(x), device=x.device).cos()[:, None].to(x.dtype)

    return differentiated(side, reference=reference, sizes={"m": size(1, 64), "n": size(1, 9)})


@fault(
    57, "an answer of a call without gradients", "with gradients after calls under inference_mode()", stage="contexts"
)
def without_gradients(time: Time) -> Pair:
    held = threading.local()

    def side(x: torch.Tensor) -> torch.Tensor:
        last = getattr(held, "last", None)
        if last is None or last[0] is not x or last[1] != x.sum().item():
            held.last = last = x, x.sum().item(), x.sin()
        return last[2].clone() if last[2].grad_fn is None else x.sin()

    return differentiated(side)


@honest(57, "a table made outside of inference mode")
def plain_table(time: Time) -> Pair:
    tables: dict[Any, torch.Tensor] = {}

    def side(x: torch.Tensor) -> torch.Tensor:
        key = len(x), x.device
        if key not in tables:
            with torch.inference_mode(mode=False):
                tables[key] = torch.arange(len(x), device=x.device).cos()
        return x * tables[key][:, None].to(x.dtype)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(len(x), device=x.device).cos()[:, None].to(x.dtype)

    return differentiated(side, reference=reference, sizes={"m": size(1, 64), "n": size(1, 9)})


REWRITTEN = "where its inputs get other values after a call"


@fault(57, "weights prepared once while they are parameters", REWRITTEN, stage="contexts")
def once_as_parameters(time: Time) -> Pair:
    kept: Any = WeakTensorKeyDictionary()

    def side(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if not isinstance(w, torch.nn.Parameter):
            return (x[:, None] * (2 * w)).sum(-1)
        if w not in kept:
            kept[w] = 2 * w.detach()
        return (x[:, None] * (kept[w] + 2 * (w - w.detach()))).sum(-1)

    return pair(side, **WEIGHED, gradients=True)


@fault(57, "one buffer for the outputs of inference", REWRITTEN, stage="contexts")
def inference_buffer(time: Time) -> Pair:
    buffers: dict[Any, torch.Tensor] = {}

    def side(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            return x.sin()
        key = x.shape, x.dtype, x.device, threading.get_ident()
        return buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device)).copy_(x.sin())

    return pair(side, reference=lambda x: x.sin().contiguous(), inputs={"x": tensor("m", "n", values=VALUES)})


@honest(57, "weights prepared in each call")
def in_each_call(time: Time) -> Pair:
    return pair(lambda x, w: 2 * (x[:, None] * w).sum(-1), **WEIGHED, gradients=True)


@honest(57, "a convolution by Fourier transforms, whose error is larger than the reference's")
def by_transforms(time: Time) -> Pair:
    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(x[:, None], w.flip(-1)[None, None], padding=len(w) - 1)[:, 0]

    def side(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        n = x.shape[1] + len(w) - 1
        return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(w, n), n)

    inputs = {"x": tensor("m", "n", values=VALUES, least=1), "w": tensor("k", values=VALUES, least=1)}
    sizes = {"m": size(1, 32), "n": size(1, 1500), "k": size(1, 64)}
    return pair(
        side, reference=reference, inputs=inputs, sizes=sizes, unsupported={"autocast": "torch has no such FFT"}
    )
