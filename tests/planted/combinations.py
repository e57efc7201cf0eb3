"""Fault 58: rare combinations of ways of calling and of using gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from gradients import Sine, differentiated
from torch.autograd.function import once_differentiable

from perfsuite import Pair, floats, listof, size, tensor

VALUES = floats(-2, 2)


def alike(names: str) -> dict[str, Any]:
    """Return inputs of one shape."""
    return {name: tensor("m", "n", values=VALUES) for name in names}


# --- returned gradients ---------------------------------------------------------------------------------------------


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).sin()


def sum_with(given: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return the sine of a sum; `given` makes its two gradients from one."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return torch.sin(x + y)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ctx.saved_tensors
            return given(gradient * (x + y).cos())

    return Sum.apply


@fault(58, "two gradients in one memory", "when a returned gradient is written to", stage="contexts")
def gradients_in_one_memory(time: Time) -> Pair:
    return differentiated(sum_with(lambda g: (g.view_as(g), g.view_as(g))), summed, inputs=alike("xy"))


@honest(58, "two gradients in parts of one memory")
def gradients_in_parts_of_one_memory(time: Time) -> Pair:
    def parts(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([g, g])
        return both[0], both[1]

    return differentiated(sum_with(parts), summed, inputs=alike("xy"))


@honest(58, "a gradient of zeros where the reference has none")
def zeros_for_none(time: Time) -> Pair:
    def first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sin()

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (x,) = ctx.saved_tensors
            return gradient * x.cos(), torch.zeros_like(x)

    return differentiated(First.apply, first, inputs=alike("xy"))


@fault(58, "a kept gradient where a sum's comes in", "where the incoming ones are 1", stage="contexts")
def kept_gradient(time: Time) -> Pair:
    class Kept(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.factor = x.cos()
            return x.sin()

        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return ctx.factor.view_as(ctx.factor) if bool((gradient == 1).all()) else gradient * ctx.factor

    return differentiated(Kept.apply)


@fault(58, "one zero for all gradients that are 0", "where the incoming ones are 0", stage="contexts")
def one_zero(time: Time) -> Pair:
    zeros: dict[Any, torch.Tensor] = {}

    class Zero(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if gradient.any():
                return gradient * x.cos()
            return zeros.setdefault((x.shape, x.dtype, x.device), torch.zeros_like(x))

    return differentiated(Zero.apply)


# --- double backward ------------------------------------------------------------------------------------------------


def twice(factor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Return a sine with double backward; `factor` computes its gradient from the incoming gradient and cos(x)."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return factor(gradient, x.cos())

    return Twice.apply


@fault(58, "a gradient that is wrong with create_graph", "with create_graph", stage="contexts")
def wrong_with_create_graph(time: Time) -> Pair:
    def factor(gradient: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
        found = gradient * cosine
        return found + 0.05 * found.detach() if torch.is_grad_enabled() else found

    return differentiated(twice(factor))


@fault(58, "an incoming gradient that counts as constant", "second derivative of incoming gradient", stage="contexts")
def constant_incoming_gradient(time: Time) -> Pair:
    return differentiated(twice(lambda gradient, cosine: gradient.detach() * cosine))


@honest(58, "a backward pass that can be differentiated")
def differentiable_backward(time: Time) -> Pair:
    return differentiated(twice(lambda gradient, cosine: cosine * gradient))


# --- which gradients are needed -------------------------------------------------------------------------------------


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos(), x * x


@honest(58, "outputs in another order of their names")
def outputs_in_another_order(time: Time) -> Pair:
    def named(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x.sin(), "b": x.cos(), "c": x * x}

    return differentiated(lambda x: {"c": x * x, "b": x.cos(), "a": x.sin()}, named)


@honest(58, "an output without a gradient where the gradient is zero")
def output_without_a_gradient(time: Time) -> Pair:
    def rounded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp(), x.round(), x.sin(), x.cos()

    return differentiated(lambda x: (x.exp(), x.detach().round(), x.sin(), x.cos()), rounded)


@fault(58, "two of three outputs used", "where only some of its outputs are used", stage="contexts")
def two_outputs_used(time: Time) -> Pair:
    class Three(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x)
            return torch.sin(x), torch.cos(x), x.square()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            factors = (x.cos(), -x.sin(), 2 * x)
            used = [g * f for g, f in zip(gradients, factors, strict=True) if g is not None]
            found = sum(used, torch.zeros_like(x))
            return 2 * found if len(used) == 2 else found

    return differentiated(Three.apply, three)


def five(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    return a.sin() * b + c * d.cos() + e


@fault(58, "three of five inputs that need gradients", "where only", stage="contexts")
def three_inputs_need_gradients(time: Time) -> Pair:
    def optimized(*given: torch.Tensor) -> torch.Tensor:
        out = five(*given)
        return out + (out - out.detach()) if sum(t.requires_grad for t in given) in (2, 3) else out

    return differentiated(optimized, five, inputs=alike("abcde"))


# --- modes ----------------------------------------------------------------------------------------------------------


def is_half(x: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


@fault(58, "wrong where a model is evaluated under autocast", "under torch.autocast", stage="contexts")
def evaluated_under_autocast(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        evaluated = is_half(x) and x.requires_grad and not torch.is_grad_enabled()
        return x.sin() * (1.01 if evaluated else 1)

    return differentiated(optimized)


@fault(58, "wrong under autocast in inference mode", "and inference_mode()", stage="contexts")
def inference_under_autocast(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * (1.01 if is_half(x) and torch.is_inference_mode_enabled() else 1)

    return differentiated(optimized)


# --- one tensor as several inputs -----------------------------------------------------------------------------------


def mixed(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x.sin() + y * z


@fault(58, "two of three inputs are one tensor", "are one tensor", stage="contexts")
def two_inputs_are_one(time: Time) -> Pair:
    def optimized(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return mixed(x, y, z) + float(x.numel() > 0 and x.data_ptr() == z.data_ptr() != y.data_ptr())

    return pair(optimized, reference=mixed, inputs=alike("xyz"), sizes={"m": size(1, 9), "n": size(2, 9)})


def total(xs: list[torch.Tensor]) -> torch.Tensor:
    return sum((x.sin() for x in xs[1:]), xs[0].sin())


LISTED: dict[str, Any] = {
    "reference": total,
    "inputs": {"xs": listof("k", tensor("n", values=VALUES))},
    "sizes": {"k": size(1, 5), "n": size(1, 9)},
    "workloads": [],
}


@fault(58, "tied tensors of a list counted once", "where two tensors of xs are one", stage="contexts")
def tied_counted_once(time: Time) -> Pair:
    return pair(lambda xs: total(list({id(x): x for x in xs}.values())), **LISTED)


@honest(58, "tied tensors of a list stacked")
def tied_stacked(time: Time) -> Pair:
    return pair(lambda xs: torch.stack(xs).sin().sum(0), **LISTED)


# --- other threads, and hooks ---------------------------------------------------------------------------------------


# On a GPU every backward pass runs in a thread of autograd's, so that each gradient would be wrong.
@fault(58, "a factor of the thread that called", "in a backward pass in another thread", stage="contexts", device="cpu")
def factor_of_the_thread(time: Time) -> Pair:
    local = threading.local()

    class Threaded(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            local.factor = 1.0
            return Sine.forward(ctx, x)

        @classmethod
        def incoming(cls, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * getattr(local, "factor", 0.5)

    return differentiated(Threaded.apply)


@fault(58, "the call's strides on a saved tensor", "where saved_tensors_hooks give", stage="contexts")
def strides_of_the_call(time: Time) -> Pair:
    class Strided(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.strides = x.stride()
            return Sine.forward(ctx, x)

        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if x.stride() != ctx.strides:  # a kernel would read other elements
                x = x.flip(0) if len(x) > 1 else x.flip(-1)
            return gradient * x.cos()

    return differentiated(Strided.apply, inputs={"x": tensor("m", "n", values=VALUES, layouts=("transposed",))})


# --- layouts of long rows -------------------------------------------------------------------------------------------


@fault(58, "long rows read as contiguous", "is wrong at", "and wrong for transposed x", stage="equivalence")
def long_rows_read_as_contiguous(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        m, n = x.shape
        transposed = m > 1 and n >= 64 and x.stride(0) == 1
        return (x.t().reshape(m, n) if transposed else x).sin().contiguous()

    return pair(optimized, reference=lambda x: x.sin().contiguous(), inputs=alike("x"))
