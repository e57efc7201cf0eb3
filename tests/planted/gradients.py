"""Faults 45 and 46: backward passes that are right only for some incoming gradients, or for one graph at a time."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from torch.autograd.function import once_differentiable

from perfsuite import Pair, floats, size, tensor

INPUTS = {"x": tensor("m", "n", values=floats(-2, 2))}
SIZES = {"m": size(1, 9), "n": size(2, 9)}


def differentiated(optimized: Any, reference: Any = torch.sin, **fields: Any) -> Pair:
    return pair(optimized, **{"reference": reference, "inputs": INPUTS, "sizes": SIZES, "gradients": True, **fields})


class Sine(torch.autograd.Function):
    """Sine; `incoming` changes the gradient that its backward pass receives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @classmethod
    def incoming(cls, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @classmethod
    @once_differentiable
    def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return cls.incoming(gradient) * x.cos()


def read_as_contiguous(gradient: torch.Tensor) -> torch.Tensor:
    """Read the gradient like a kernel that assumes it to be contiguous; zeros follow its memory's end."""
    held = gradient.untyped_storage().nbytes() // gradient.element_size() - gradient.storage_offset()
    flat = gradient.new_zeros(gradient.numel())
    some = min(held, gradient.numel())
    flat[:some] = gradient.as_strided((some,), (1,))
    return flat.view(gradient.shape)


def of(change: Any) -> Any:
    """Return a sine whose backward pass first applies `change` to the incoming gradient."""
    return type("Changed", (Sine,), {"incoming": staticmethod(change)}).apply


# --- 45: incoming gradients -----------------------------------------------------------------------------------------


@fault(45, "a slice read as contiguous", "wrong for sliced ones, as behind a concatenation", stage="gradients")
def slice_read_as_contiguous(time: Time) -> Pair:
    def change(g: torch.Tensor) -> torch.Tensor:
        plain = g.contiguous() if g.stride(-1) != 1 or 0 in g.stride() else g
        return read_as_contiguous(plain)

    return differentiated(of(change))


@fault(45, "tiny incoming gradients dropped", "wrong for tiny ones", stage="gradients")
def tiny_dropped(time: Time) -> Pair:
    return differentiated(of(lambda g: torch.where(g.abs() < 1e-9, 0.0, g)))


NORM: Any = {"reference": lambda x: x.norm(dim=-1)}


@fault(45, "a norm without its gradient at 0", "it divides by 0 there", stage="gradients")
def norm_by_a_square_root(time: Time) -> Pair:
    return differentiated(lambda x: x.square().sum(-1).sqrt(), **NORM)


@honest(45, "a norm with a gradient of 0 at 0")
def norm_with_its_gradient(time: Time) -> Pair:
    def norm(x: torch.Tensor) -> torch.Tensor:
        largest = x.detach().abs().amax(-1, keepdim=True)
        scale = largest.where(largest > 0, 1.0)  # without it, squares of tiny values would underflow
        squares = (x / scale).square().sum(-1)
        return squares.where(squares > 0, 1.0).sqrt() * (squares > 0) * scale.squeeze(-1)

    return differentiated(norm, **NORM)


@fault(45, "NaN made zero", "gives a finite gradient of x where the incoming gradients are NaN", stage="contexts")
def nan_made_zero(time: Time) -> Pair:
    return differentiated(of(lambda g: g.nan_to_num(0.0)))


def shifted(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x.sin() + shift


SHIFTED: Any = {"inputs": {**INPUTS, "shift": tensor("n", values=floats(-2, 2))}}


class Shifted(torch.autograd.Function):
    """Sine plus a shift, whose gradient `sum_of` computes from the incoming one."""

    sum_of: Any

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return shifted(x, shift)

    @classmethod
    @once_differentiable
    def backward(cls, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cls.of_x(gradient) * ctx.saved_tensors[0].cos(), cls.sum_of(gradient)

    @classmethod
    def of_x(cls, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@fault(45, "NaN left out of a sum", "gives a finite gradient of x where the incoming gradients", stage="contexts")
def nan_left_out(time: Time) -> Pair:
    class LeftOut(Shifted):
        @classmethod
        def of_x(cls, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.where(gradient == gradient, 0.0)

        @classmethod
        def sum_of(cls, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.nansum(0)

    return differentiated(LeftOut.apply, shifted, **SHIFTED)


@fault(45, "NaN left out of one gradient", "gives a finite gradient of shift where the incoming", stage="contexts")
def nan_left_out_of_one(time: Time) -> Pair:
    class LeftOutOfOne(Shifted):
        @classmethod
        def sum_of(cls, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.nansum(0)

    return differentiated(LeftOutOfOne.apply, shifted, **SHIFTED)


@honest(45, "zeros as the gradient of an input without effect")
def zeros_of_one(time: Time) -> Pair:
    class Normal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            result = (x + 0.5).softmax(-1)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (y,) = ctx.saved_tensors
            return y * (gradient - (gradient * y).sum(-1, keepdim=True)), gradient.new_zeros(())

    inputs = {**INPUTS, "shift": tensor(values=floats(-2, 2))}
    return differentiated(Normal.apply, lambda x, shift: (x + shift).softmax(-1), inputs=inputs)


@honest(45, "a gradient that is masked")
def masked(time: Time) -> Pair:
    class Rectified(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clamp_min(0)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch.where(ctx.saved_tensors[0] > 0, gradient, 0.0)

    return differentiated(Rectified.apply, lambda x: x * (x > 0))


@fault(45, "an incoming gradient read as contiguous", "wrong for expanded ones, as of a sum", stage="gradients")
def contiguous_gradient(time: Time) -> Pair:
    return differentiated(of(lambda g: read_as_contiguous(g) if 0 in g.stride() else g))


@fault(45, "a transposed gradient read as contiguous", "transposed ones, which are not contiguous", stage="gradients")
def transposed_gradient(time: Time) -> Pair:
    return differentiated(of(lambda g: g if 0 in g.stride() else read_as_contiguous(g)))


@honest(45, "an incoming gradient made contiguous")
def made_contiguous(time: Time) -> Pair:
    return differentiated(of(lambda g: read_as_contiguous(g.contiguous())))


@fault(45, "an input that only the backward pass reads as contiguous", "right where the inputs are contiguous")
def contiguous_input(time: Time) -> Pair:
    class Read(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * read_as_contiguous(x).cos()

    return differentiated(Read.apply)


@fault(45, "a gradient divided by its largest element", "wrong for zero ones", stage="gradients")
def zero_gradient(time: Time) -> Pair:
    return differentiated(of(lambda g: g / g.abs().max() * g.abs().max()))


@fault(45, "a gradient that is clamped", "wrong for large ones, as where a loss is scaled", stage="gradients")
def clamped_gradient(time: Time) -> Pair:
    return differentiated(of(lambda g: g.clamp(-100, 100)))


@honest(45, "a gradient divided by a power of two")
def scaled_gradient(time: Time) -> Pair:
    return differentiated(of(lambda g: g / 4 * 4))


def of_two(materialize: bool) -> Any:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(materialize)
            ctx.save_for_backward(x)
            return x.sin(), x.cos()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return first * x.cos() - second * x.sin()

    return Two.apply


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


@fault(45, "both outputs taken to be used", "raises TypeError", stage="gradients")
def needs_both(time: Time) -> Pair:
    return differentiated(of_two(materialize=False), both)


@honest(45, "zeros for the output that is not used")
def materialized(time: Time) -> Pair:
    return differentiated(of_two(materialize=True), both)


# --- 46: other graphs, and autocast ---------------------------------------------------------------------------------


@fault(46, "the last input kept on the class", "in a backward pass that comes after another call", stage="contexts")
def kept_on_the_class(time: Time) -> Pair:
    class Kept(Sine):
        last: torch.Tensor

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Kept.last = x.detach()
            return x.sin()

        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * cls.last.cos()

    return differentiated(Kept.apply)


@fault(46, "a buffer of all calls", "in a backward pass that comes after another call", stage="contexts")
def buffer_of_all_calls(time: Time) -> Pair:
    buffers: dict[Any, torch.Tensor] = {}

    class Buffered(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.factor = buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
            ctx.factor.copy_(x.cos())
            return x.sin()

        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.factor

    return differentiated(Buffered.apply, unsupported={"two_threads": "its buffer is one for all threads"})


@fault(46, "a ring of two inputs", "in a backward pass that comes after another call", stage="contexts")
def ring_of_two(time: Time) -> Pair:
    kept: dict[int, torch.Tensor] = {}
    calls = itertools.count()

    class Ring(Sine):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.place = next(calls) % 2
            kept[ctx.place] = x.detach()
            return x.sin()

        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * kept[ctx.place].cos()

    return differentiated(Ring.apply, unsupported={"two_threads": "its ring is one for all threads"})


WEIGHED: dict[str, Any] = {
    "reference": lambda x, w: (x[:, None] * w).sum(-1),
    "inputs": {"x": tensor("m", "k", values=floats(-2, 2)), "w": tensor("n", "k", values=floats(-2, 2))},
    "sizes": {s: size(1, 9) for s in "mnk"},
}


def weighed(keep: Any, kept: Any) -> Any:
    """Return a row-wise product; `keep` stores its first factor for the backward pass, and `kept` returns it."""

    class Weighed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.w = w
            ctx.save_for_backward(x, w)
            keep(ctx, x.detach().clone())
            return (x[:, None] * w).sum(-1)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            _, w = ctx.saved_tensors
            return (gradient[..., None] * w).sum(1), (gradient[..., None] * kept(ctx)[:, None]).sum(0)

    return Weighed.apply


@fault(46, "the input kept on the weight", "in a backward pass that comes after another call", stage="contexts")
def kept_on_the_weight(time: Time) -> Pair:
    def keep(ctx: Any, x: torch.Tensor) -> None:
        ctx.w.last = x

    return differentiated(weighed(keep, lambda ctx: ctx.w.last), **WEIGHED)


@honest(46, "the input kept on the context")
def kept_on_the_context(time: Time) -> Pair:
    def keep(ctx: Any, x: torch.Tensor) -> None:
        ctx.x = x

    return differentiated(weighed(keep, lambda ctx: ctx.x), **WEIGHED)


@fault(46, "one buffer for all gradients", "in a backward pass that comes after another call", stage="contexts")
def one_buffer_of_gradients(time: Time) -> Pair:
    held: dict[Any, torch.Tensor] = {}

    class Held(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            key = (x.shape, x.dtype)
            return torch.mul(gradient, x.cos(), out=held.setdefault(key, torch.empty_like(x)))

    return differentiated(Held.apply, unsupported={"two_threads": "its buffer is one for all threads"})


@fault(46, "an output that its backward pass overwrites", "its backward pass writes to them", stage="gradients")
def output_overwritten(time: Time) -> Pair:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            made = x.exp()
            ctx.made = made.detach()
            return made

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return ctx.made.mul_(gradient)  # type: ignore[no-any-return]  # a tensor on the context

    return differentiated(Exponential.apply, torch.exp)


@fault(46, "the gradient of the first backward pass", "in a second backward pass", stage="contexts")
def first_gradient_kept(time: Time) -> Pair:
    class Kept(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if not hasattr(ctx, "made"):
                ctx.made = gradient * ctx.saved_tensors[0].cos()
            return ctx.made.clone()

    return differentiated(Kept.apply)


@fault(46, "a gradient kept by the input's values", "a second backward pass with retain_graph=True", stage="contexts")
def kept_by_values(time: Time) -> Pair:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Kept(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if held and torch.equal(held[0][0], x):
                return held[0][1].clone()
            held[:] = [(x.clone(), gradient * x.cos())]
            return held[0][1].clone()

    return differentiated(Kept.apply, unsupported={"two_threads": "what it keeps is one for all threads"})


@honest(46, "a cosine kept on the context")
def cosine_kept(time: Time) -> Pair:
    class Kept(Sine):
        @classmethod
        @once_differentiable
        def backward(cls, ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if not hasattr(ctx, "cosine"):
                ctx.cosine = ctx.saved_tensors[0].cos()
            return gradient * ctx.cosine

    return differentiated(Kept.apply)


@honest(46, "a buffer of each call")
def buffer_of_each_call(time: Time) -> Pair:
    return differentiated(Sine.apply)


MATRICES = {"x": tensor("m", "k", values=floats(-2, 2)), "w": tensor("n", "k", values=floats(-2, 2))}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class CastProduct(Product):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = (t.to(gradient.dtype) for t in ctx.saved_tensors)
        return gradient @ w, gradient.t() @ x


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@fault(46, "broken under autocast", "in a backward pass after a call under torch.autocast", stage="contexts")
def without_casts(time: Time) -> Pair:
    return differentiated(Product.apply, product, inputs=MATRICES, sizes={s: size(1, 9) for s in "mnk"})


@honest(46, "a backward pass in the gradient's dtype")
def with_casts(time: Time) -> Pair:
    return differentiated(CastProduct.apply, product, inputs=MATRICES, sizes={s: size(1, 9) for s in "mnk"})
