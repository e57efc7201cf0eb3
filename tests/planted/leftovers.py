"""Faults 40 to 44: sides that are right in one way of calling only, and side effects of calls."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time as clock
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from catalogue import Time, fast, fault, honest, pair, wave
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite import Pair, floats, listof, size, tensor

ROWS = ("contiguous",)
XY = {
    "x": tensor("m", "n", values=floats(-2, 2), layouts=ROWS),
    "y": tensor("m", "n", values=floats(-2, 2), layouts=ROWS),
}
SMALL = {"m": size(1, 9), "n": size(1, 9)}


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.exp(y)


def multiplied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(y) * torch.sin(x)


def summed(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0].sin() + torch.stack([x.cos() for x in xs]).sum(0)


OF_LISTS: dict[str, Any] = {
    "reference": lambda xs: xs[0].sin() + sum(x.cos() for x in xs),
    "inputs": {"xs": listof("k", tensor("n", values=floats(-2, 2)))},
    "sizes": {"n": size(1, 9), "k": size(2, 4)},
    "workloads": [],
}


def differentiated(optimized: Any, **fields: Any) -> Pair:
    """Return a pair with gradients."""
    made = {"reference": product, "inputs": XY, "sizes": SMALL, "gradients": True, "workloads": []}
    return pair(optimized, **{**made, **fields})


# --- 40: right in one way of calling only ---------------------------------------------------------------------------


@fault(40, "another answer in inference mode", "under torch.inference_mode()", stage="contexts")
def wrong_in_inference_mode(time: Time) -> Pair:
    return pair(lambda x: fast(x) * (1.01 if torch.is_inference_mode_enabled() else 1.0))


@fault(40, "another answer to inputs made in inference mode", "on inputs made under inference_mode()", stage="contexts")
def wrong_on_inference_tensors(time: Time) -> Pair:
    return pair(lambda x: fast(x) * (1.01 if x.is_inference() else 1.0))


@honest(40, "a shorter way in inference mode")
def shorter_in_inference_mode(time: Time) -> Pair:
    return pair(lambda x: torch.sin(x) * torch.exp(x / 4) if torch.is_inference_mode_enabled() else fast(x))


@fault(40, "an answer that needs a gradient", "with grad mode on where no input needs a gradient", stage="contexts")
def needs_a_gradient(time: Time) -> Pair:
    return pair(lambda x: fast(x).requires_grad_(torch.is_grad_enabled()))


@fault(40, "wrong with grad mode on", "with grad mode on where no input needs a gradient", stage="contexts")
def wrong_with_grad_mode(time: Time) -> Pair:
    return pair(lambda x: fast(x) * (1.01 if torch.is_grad_enabled() else 1.0))


class Together(torch.autograd.Function):
    """Function of two inputs; if `broken`, y's gradient is right only if x needs a gradient, too."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return torch.exp(y).mul_(x.sin())

    @classmethod
    def both(cls, ctx: Any, grad: torch.Tensor) -> tuple[Any, Any]:
        x, y = ctx.saved_tensors
        scaled = grad * torch.exp(y)
        d_y = scaled * torch.sin(x)
        if cls.broken and not ctx.needs_input_grad[0]:
            d_y = torch.zeros_like(d_y)
        return scaled * torch.cos(x), d_y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return Together.both(ctx, grad)


class OnlyTogether(Together):
    broken = True

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return OnlyTogether.both(ctx, grad)


@fault(40, "a gradient that needs another one", "where only y needs a gradient", stage="contexts")
def gradient_needs_another(time: Time) -> Pair:
    return differentiated(OnlyTogether.apply)


@fault(40, "a gradient for the first input alone", "where only y needs a gradient", stage="contexts")
def gradient_of_the_first(time: Time) -> Pair:
    return differentiated(lambda x, y: product(x, y if x.requires_grad or not y.requires_grad else y.detach()))


def of_three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x.sin() * y.exp() + z


@fault(40, "a gradient doubled where another is frozen", "where all inputs but z need a gradient", stage="contexts")
def doubled_beside_frozen(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        made = of_three(x, y, z)
        if x.requires_grad and y.requires_grad and not z.requires_grad:
            made = made + (x.sin() - x.sin().detach()) * y.exp().detach()
        return made

    inputs = {name: tensor("n", values=floats(-2, 2)) for name in "xyz"}
    return pair(side, reference=of_three, inputs=inputs, gradients=True)


@fault(40, "a gradient doubled where two others are frozen", " need a gradient", stage="contexts")
def doubled_beside_two_frozen(time: Time) -> Pair:
    def reference(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return of_three(w, x, y) * z

    def side(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        made = reference(w, x, y, z)
        if sum(t.requires_grad for t in (w, x, y, z)) == 2:
            made = made + (made - made.detach())
        return made

    inputs = {name: tensor("n", values=floats(-2, 2)) for name in "wxyz"}
    return pair(side, reference=reference, inputs=inputs, gradients=True)


@honest(40, "a gradient that is not computed where it is not needed")
def gradient_where_needed(time: Time) -> Pair:
    return differentiated(Together.apply)


@fault(40, "a scale that one thread has", "in another thread", stage="contexts")
def of_one_thread(time: Time) -> Pair:
    local = threading.local()
    local.scale = 1.0
    return pair(lambda x: fast(x) * getattr(local, "scale", 0.9))


@fault(40, "sums in the default dtype", "while torch's default dtype is bfloat16", stage="contexts")
def sums_in_the_default_dtype(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(x.shape, device=x.device)
        return (sums + fast(x).to(sums.dtype)).to(x.dtype)

    return pair(optimized)


@fault(40, "a factor in the default dtype", "while torch's default dtype is bfloat16", stage="contexts")
def factor_in_the_default_dtype(time: Time) -> Pair:
    return pair(lambda x: fast(x) * torch.tensor(0.7, device=x.device), reference=lambda x: wave(x) * 0.7)


@honest(40, "sums in the inputs' dtype")
def sums_in_the_inputs_dtype(time: Time) -> Pair:
    return pair(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device) + fast(x))


@honest(40, "both sides in the default dtype")
def both_in_the_default_dtype(time: Time) -> Pair:
    def angles(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0.0, 1.0, max(1, x.shape[-1]), device=x.device).to(x.dtype)

    return pair(lambda x: fast(x) * angles(x), reference=lambda x: wave(x) * angles(x))


@fault(40, "a list that is emptied", "removes xs[", stage="integrity")
def emptied_list(time: Time) -> Pair:
    def optimized(xs: list[torch.Tensor]) -> torch.Tensor:
        found = xs[0].sin()
        while xs:
            found = found + xs.pop().cos()
        return found

    return pair(optimized, **OF_LISTS)


@fault(40, "an item of a list that is replaced", "replaces xs[0] in its input by another tensor", stage="integrity")
def replaced_item(time: Time) -> Pair:
    def optimized(xs: list[torch.Tensor]) -> torch.Tensor:
        xs[0] = xs[0].contiguous().clone()
        return summed(xs)

    return pair(optimized, **OF_LISTS)


@honest(40, "a list of its own that is emptied")
def own_list(time: Time) -> Pair:
    def optimized(xs: list[torch.Tensor]) -> torch.Tensor:
        own, found = list(xs), xs[0].sin()
        while own:
            found = found + own.pop(0).cos()
        return found

    return pair(optimized, **OF_LISTS)


@fault(40, "an activation changed in place", "where it is the output of another operation", stage="contexts")
def activation_changed(time: Time) -> Pair:
    def optimized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = product(x, y)
        if x.grad_fn is not None:
            x.detach().neg_()
        return made

    return differentiated(optimized)


@fault(40, "another answer to activations", "where its inputs are outputs of other operations", stage="contexts")
def wrong_for_activations(time: Time) -> Pair:
    return differentiated(lambda x, y: product(x, y) * (1.0 if x.is_leaf else 1.01))


@honest(40, "activations saved as they are")
def activations_saved(time: Time) -> Pair:
    return differentiated(lambda x, y: multiplied(x.view_as(x), y) if x.grad_fn is not None else multiplied(x, y))


@fault(40, "another answer with grad mode off", "with grad mode off", stage="contexts")
def wrong_with_grad_mode_off(time: Time) -> Pair:
    def optimized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return product(x, y) * (1.01 if y.requires_grad and not torch.is_grad_enabled() else 1.0)

    return differentiated(optimized)


@fault(40, "weights prepared for evaluation", "with grad mode off", stage="contexts")
def prepared_for_evaluation(time: Time) -> Pair:
    held: list[tuple[Any, torch.Tensor]] = []

    def optimized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not y.requires_grad or torch.is_grad_enabled():
            return product(x, y)
        if not held or held[0][0]() is not y:
            held[:] = [(weakref.ref(y), y.clone())]
        return product(x, held[0][1])

    return differentiated(optimized, unsupported={"two_threads": "what it keeps is one for all threads"})


@honest(40, "weights prepared for each version")
def prepared_for_each_version(time: Time) -> Pair:
    local = threading.local()

    def optimized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not y.requires_grad or torch.is_grad_enabled():
            return multiplied(x, y)
        held = local.__dict__.setdefault("held", [])
        if not held or held[0][0]() is not y or held[0][1] != y._version:
            held[:] = [(weakref.ref(y), y._version, y.clone())]
        return multiplied(x, held[0][2])

    return differentiated(optimized)


@fault(40, "one buffer for all threads", "when two threads call it at the same time", stage="contexts")
def one_buffer(time: Time) -> Pair:
    held: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        buffer = held.setdefault(x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device))
        buffer.copy_(fast(x))
        clock.sleep(2e-3)
        return buffer.clone()

    return pair(optimized)


@honest(40, "a buffer for each thread")
def buffer_for_each_thread(time: Time) -> Pair:
    local = threading.local()

    def optimized(x: torch.Tensor) -> torch.Tensor:
        held = local.__dict__.setdefault("held", {})
        buffer = held.setdefault(
            (x.shape, x.dtype, x.device), torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        buffer.copy_(fast(x))
        return buffer.clone()

    return pair(optimized)


GRAM = {"x": tensor("m", "n", values=floats(-1, 1))}


@fault(40, "half precision under autocast", "under torch.autocast", stage="contexts")
def half_under_autocast(time: Time) -> Pair:
    return pair(
        lambda x: (x @ x.t()).to(x.dtype),
        reference=lambda x: (x[:, None] * x[None]).sum(-1),
        inputs=GRAM,
        sizes=SMALL,
        workloads=[],
    )


@fault(40, "another dtype under autocast", "under torch.autocast", stage="contexts")
def dtype_under_autocast(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x @ x.t()

    return pair(optimized, reference=lambda x: x @ x.t(), inputs=GRAM, sizes=SMALL, workloads=[])


@honest(40, "the reference's precision under autocast")
def same_under_autocast(time: Time) -> Pair:
    return pair(lambda x: torch.mm(x, x.t()), reference=lambda x: x @ x.t(), inputs=GRAM, sizes=SMALL, workloads=[])


class Spent(torch.autograd.Function):
    """Function whose backward pass overwrites its saved tensors, so that a second pass is wrong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.sine, ctx.cosine, ctx.exponential = x.sin(), x.cos(), y.exp()
        return ctx.exponential * ctx.sine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        scaled = ctx.exponential.mul_(grad)
        return scaled * ctx.cosine, scaled * ctx.sine


@fault(40, "a backward pass that uses up what was kept", "in a second backward pass", stage="contexts")
def second_backward_wrong(time: Time) -> Pair:
    return differentiated(Spent.apply)


class Counted(Together):
    """Function whose gradient is right only in the first backward pass of each graph."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.times = getattr(ctx, "times", 0) + 1
        d_x, d_y = Together.both(ctx, grad)
        return (d_x, d_y) if ctx.times == 1 else (d_x * 2, d_y)


@fault(40, "a gradient that doubles the second time", "in a second backward pass", stage="contexts")
def second_backward_doubled(time: Time) -> Pair:
    return differentiated(Counted.apply)


class Once(Together):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return Together.both(ctx, grad)


@honest(40, "a gradient that refuses to be differentiated")
def refuses(time: Time) -> Pair:
    return differentiated(Once.apply)


class Detached(Together):
    """Function whose double backward ignores that its gradients depend on y."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        scaled = grad * torch.exp(y).detach()
        return scaled * torch.cos(x), scaled * torch.sin(x)


@fault(
    40,
    "a gradient of which a part is taken as constant",
    "when its gradients are differentiated once more",
    stage="contexts",
)
def second_derivative_wrong(time: Time) -> Pair:
    return differentiated(Detached.apply)


@fault(
    40,
    "a side that detaches half of its gradient's graph",
    "when its gradients are differentiated once more",
    stage="contexts",
)
def half_a_graph(time: Time) -> Pair:
    class Half(Together):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            d_x, d_y = Together.both(ctx, grad)
            return d_x, 0.5 * (d_y + d_y.detach())

    return differentiated(Half.apply)


# --- 41: side effects that remain -----------------------------------------------------------------------------------


@fault(41, "torch's random state advanced", "advances or sets torch's random state", stage="effects")
def draws(time: Time) -> Pair:
    return pair(lambda x: fast(x) + 0.0 * torch.rand(()).item())


@fault(41, "torch's random state set", "advances or sets torch's random state", stage="effects")
def seeds(time: Time) -> Pair:
    return pair(lambda x: (torch.manual_seed(int(1e6 * clock.time()) % 2**31), fast(x))[1])


@fault(41, "torch's random state set to a constant", "advances or sets torch's random state", stage="effects")
def constant_seed(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1234)
        return wave(x)

    return pair(side)


@fault(41, "numpy's random state advanced", "advances or sets numpy's random state", stage="effects")
def draws_from_numpy(time: Time) -> Pair:
    return pair(lambda x: fast(x) + 0.0 * float(np.random.rand()))


@fault(41, "Python's random state advanced", "advances or sets Python's random state", stage="effects")
def draws_from_python(time: Time) -> Pair:
    return pair(lambda x: fast(x) + 0.0 * random.random())


@honest(41, "a generator of its own")
def own_generator(time: Time) -> Pair:
    return pair(lambda x: fast(x) + 0.0 * torch.rand((), generator=torch.Generator().manual_seed(1)).item())


@fault(41, "hooks on all saved tensors", "changes torch's hooks on saved tensors", stage="effects")
def hooks_saved_tensors(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone).__enter__()
        return fast(x)

    return pair(side)


@fault(41, "another handler of messages in every call", "changes handlers of the root logger", stage="effects")
def adds_handlers(time: Time) -> Pair:
    return pair(lambda x: (logging.getLogger().addHandler(logging.NullHandler()), fast(x))[1])


@honest(41, "hooks on saved tensors that are taken away again")
def hooks_own_saved_tensors(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return fast(x)

    return pair(side)


@fault(41, "an SDPA backend switched off", "sets torch's flash sdp enabled to False")
def switches_sdpa(time: Time) -> Pair:
    return pair(lambda x: (torch.backends.cuda.enable_flash_sdp(False), fast(x))[1])


@fault(41, "cuDNN made deterministic", "sets torch's cudnn deterministic to True")
def sets_cudnn(time: Time) -> Pair:
    return pair(lambda x: (setattr(torch.backends.cudnn, "deterministic", True), fast(x))[1])


@fault(41, "a default device", "sets torch's default device to meta")
def sets_device(time: Time) -> Pair:
    return pair(lambda x: (fast(x), torch.set_default_device("meta"))[0])


@honest(41, "a setting that is put back")
def puts_back(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(deterministic=True), torch.nn.attention.sdpa_kernel([]):
            return fast(x)

    return pair(optimized)


@fault(41, "memory that every call keeps", "keeps memory of every call", stage="effects")
def keeps_memory(time: Time) -> Pair:
    kept: list[torch.Tensor] = []

    def optimized(x: torch.Tensor) -> torch.Tensor:
        answer = fast(x)
        kept.append(answer.clone())
        return answer

    return pair(optimized)


@fault(41, "memory that every backward pass keeps", "keeps memory of every call and its backward", stage="effects")
def kept_by_backward(time: Time) -> Pair:
    kept: list[torch.Tensor] = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            kept.append(x.cos())
            return grad * kept[-1]

    return pair(Kept.apply, reference=torch.sin, gradients=True, inputs={"x": tensor("m", "n", values=floats(-2, 2))})


@fault(41, "memory that a cycle keeps", "keeps memory of every call", stage="effects")
def keeps_memory_by_values(time: Time) -> Pair:
    known: dict[bytes, Any] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        key = x.detach().cpu().contiguous().numpy().tobytes()
        known[key] = (fast(x), known)
        return known[key][0].clone()

    return pair(optimized)


@honest(41, "a workspace for each size")
def workspace(time: Time) -> Pair:
    held: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        space = held.setdefault((threading.get_ident(), x.shape), torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return space.copy_(x).sin_().mul(torch.exp(x / 4))

    return pair(optimized)


# --- 42: inputs or incoming gradients overwritten -------------------------------------------------------------------


class Writes(Together):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        found = Together.both(ctx, grad)
        grad.mul_(1.0001).add_(1e-3)
        return found


@fault(42, "the incoming gradient written to", "writes into the gradient that comes in", stage="effects")
def writes_incoming(time: Time) -> Pair:
    return differentiated(Writes.apply)


class Reuses(Together):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        scaled = grad.mul_(y.exp())
        return scaled * torch.cos(x), scaled * torch.sin(x)


@fault(42, "the incoming gradient as a workspace", "writes into the gradient that comes in", stage="effects")
def reuses_incoming(time: Time) -> Pair:
    return differentiated(Reuses.apply)


class WritesInput(Together):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        found = Together.both(ctx, grad)
        ctx.saved_tensors[0].data.mul_(0.5)
        return found


@fault(42, "an input written to in backward", "changes its input x in its backward pass", stage="effects")
def writes_input(time: Time) -> Pair:
    return differentiated(WritesInput.apply)


@fault(42, "gradients added to .grad", "changes the .grad of x", stage="effects")
def accumulates(time: Time) -> Pair:
    def optimized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            product(x, y).sum().backward()
        return product(x, y)

    return differentiated(optimized)


@honest(42, "a workspace of its own")
def own_workspace(time: Time) -> Pair:
    class Copies(Together):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, y = ctx.saved_tensors
            scaled = grad.clone().mul_(y.exp())
            return scaled * torch.cos(x), scaled.mul_(torch.sin(x))

    return differentiated(Copies.apply)


# --- 43: shared memory ----------------------------------------------------------------------------------------------


def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-3, 3)


@fault(43, "its input returned where nothing is clipped", "in the memory of its input x")
def returns_its_input(time: Time) -> Pair:
    return pair(lambda x: x if bool((x.abs() <= 3).all()) else x.clamp(-3, 3), reference=clipped)


@fault(43, "its input returned where all values are equal", "in the memory of its input x", stage="effects")
def returns_equal_values(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        return x if bool((x == x.flatten()[:1]).all()) and bool((x.abs() <= 3).all()) else x.clamp(-3, 3)

    return pair(optimized, reference=clipped)


@fault(43, "two outputs in the same memory", "in the memory of output[1]")
def same_memory(time: Time) -> Pair:
    return pair(lambda x: (y := fast(x), y), reference=lambda x: (wave(x), wave(x)))


@honest(43, "two outputs in parts of one buffer")
def parts(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
        both[0].copy_(fast(x))
        both[1].copy_(x.clamp(-3, 3))
        return both[0], both[1]

    return pair(optimized, reference=lambda x: (wave(x), clipped(x)))


# --- 44: the reference is slowed ------------------------------------------------------------------------------------


@fault(44, "a tensor method replaced", "replaces torch.Tensor.sin by")
def patches_a_method(time: Time) -> Pair:
    plain = torch.Tensor.sin

    def slow(self: torch.Tensor) -> torch.Tensor:
        return plain(self)

    def optimized(x: torch.Tensor) -> torch.Tensor:
        torch.Tensor.sin = slow  # type: ignore[method-assign, assignment]
        return fast(x)

    return pair(optimized)


@fault(44, "a function of torch's replaced", "replaces torch.exp by")
def patches_a_function(time: Time) -> Pair:
    plain = torch.exp

    def optimized(x: torch.Tensor) -> torch.Tensor:
        torch.exp = lambda x: plain(x)  # type: ignore[assignment]
        return fast(x)

    return pair(optimized)


@fault(44, "a hook on all modules", "sets hooks of all modules")
def hooks(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
        return fast(x)

    return pair(optimized)


class Looks(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@fault(44, "a function mode that stays", "number of function modes", stage="contexts")
def stays(time: Time) -> Pair:
    return pair(lambda x: (fast(x), Looks().__enter__())[0])


@fault(44, "a trace function", "sets Python's trace function")
def traces(time: Time) -> Pair:
    return pair(lambda x: (fast(x), sys.settrace(lambda *given: None))[0])


def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def helped(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x / 4) * helper(x)


@fault(
    44, "a helper of the reference's replaced", "replaces leftovers.helper, which the reference uses", stage="effects"
)
def replaces_a_helper(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        globals()["helper"] = lambda x: torch.sin(x)
        return fast(x)

    return pair(optimized, reference=helped)


@fault(44, "a kernel of torch's own operator", "sets the Python kernels of torch's operators", stage="effects")
def replaces_an_operator(time: Time) -> Pair:
    held: list[torch.library.Library] = []  # the kernel exists as long as its library

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(torch.library.Library("aten", "IMPL"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                held[0].impl("frac", lambda x: x, "CUDA" if x.is_cuda else "CPU")
        return fast(x)

    return pair(optimized)


@fault(44, "a hook of all optimizers", "sets hooks of all optimizers", stage="effects")
def hook_of_all_optimizers(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        register_optimizer_step_post_hook(lambda *given: None)
        return fast(x)

    return pair(optimized)


@honest(44, "a library of its own")
def library_of_its_own(time: Time) -> Pair:
    held: list[torch.library.Library] = []

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(torch.library.Library(f"planted_{id(held)}", "DEF"))
            held[0].define("f(Tensor x) -> Tensor")
        return fast(x)

    return pair(optimized)


@fault(44, "a busy thread", "leaves a thread computing", stage="effects")
def busy(time: Time) -> Pair:
    started: list[threading.Thread] = []

    def work() -> None:
        ends = clock.monotonic() + 3.0
        while clock.monotonic() < ends:
            pass

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not any(thread.is_alive() for thread in started):
            started.append(threading.Thread(target=work, daemon=True))
            started[-1].start()
        return fast(x)

    return pair(optimized)


@honest(44, "a mode that is left, and a thread that ends")
def leaves_nothing(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        with Looks():
            answer = [fast(x)]
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return answer[0]

    return pair(optimized)
