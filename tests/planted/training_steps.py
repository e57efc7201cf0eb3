"""Fault 54: steps that are wrong only in ways of stepping that occur in training, not in a proof's usual steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from steps import Step, momentum, stepping

from perfsuite import Pair, floats, listof, module, size, stateful, tensor

VALUES = floats(-2, 2)


@fault(54, "a copy of the parameters", "where its tensors are written to between steps", stage="contexts")
def own_copy(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        own = p.clone()
        inner = momentum(own)

        def step(g: torch.Tensor) -> None:
            inner(g)
            p.copy_(own)

        return step

    return stepping(build)


@fault(
    54,
    "parameters in other memory after a step",
    "where its tensors are written to between steps",
    "it moves p to other memory",
    stage="contexts",
)
def other_memory(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        m = torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            m.mul_(0.9).add_(g)
            p.data = p.data - 0.01 * m

        return step

    return stepping(build)


@fault(54, "parameters written to with grad mode on", "where its tensors need gradients", stage="contexts")
def with_grad_mode(time: Time) -> Pair:
    return stepping(momentum, reference=without_gradients)


@honest(54, "parameters written to through data")
def through_data(time: Time) -> Pair:
    return stepping(lambda p: momentum(p.data), reference=without_gradients)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)


def averaged(average: torch.nn.Module) -> Callable[[torch.nn.Module], None]:
    """Return a step that moves the average of a model's parameters, and copies its buffers."""

    @torch.no_grad()
    def step(model: torch.nn.Module) -> None:
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p, 0.1)
        for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)

    return step


def of_models(optimized: Callable[..., Any]) -> Pair:
    return pair(
        stateful(optimized),
        reference=stateful(averaged),
        inputs={"average": module(Normed)},
        step_inputs={"model": module(Normed)},
        mutates={"average"},
        workloads=[],
    )


def detached(average: torch.nn.Module, *, buffers: bool) -> Callable[[torch.nn.Module], None]:
    means = [mean.detach() for mean in average.parameters()]

    def step(model: torch.nn.Module) -> None:
        torch._foreach_lerp_(means, [p.detach() for p in model.parameters()], 0.1)
        if buffers:
            torch._foreach_copy_(list(average.buffers()), list(model.buffers()))

    return step


@fault(54, "an average without buffers", "average.norm.running_", "of the optimized side is wrong", stage="equivalence")
def averages_no_buffers(time: Time) -> Pair:
    return of_models(lambda average: detached(average, buffers=False))


@honest(54, "buffers copied with grad mode on")
def copies_buffers(time: Time) -> Pair:
    return of_models(lambda average: detached(average, buffers=True))


def trained(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters = list(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = model(x).square().mean()
            found = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, found, strict=True):
                p.sub_(0.1 * (g + 0.01 * p))
        return loss.detach()

    return step


def by_sgd(
    model: torch.nn.Module, *, decayed: Callable[[torch.Tensor], bool]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of SGD, with weight decay of the parameters that are `decayed`."""
    groups = [{"params": [p], "weight_decay": 0.01 if decayed(p) else 0.0} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def of_training(optimized: Callable[..., Any]) -> Pair:
    return pair(
        stateful(optimized),
        reference=stateful(trained),
        inputs={"model": module(lambda: torch.nn.Linear(3, 2))},
        step_inputs={"x": tensor("b", 3, values=VALUES)},
        mutates={"model"},
        sizes={"b": size(1, 17)},
        unsupported={"autocast": "it trains in float32"},
        workloads=[],
    )


@fault(54, "a bias that does not decay", "model.bias (in place)", "of the optimized side is wrong", stage="equivalence")
def decays_no_bias(time: Time) -> Pair:
    return of_training(lambda model: by_sgd(model, decayed=lambda p: p.dim() > 1))


@honest(54, "a backward pass in the step")
def backward_in_the_step(time: Time) -> Pair:
    return of_training(lambda model: by_sgd(model, decayed=lambda p: True))


def with_gradients_left(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    inner = by_sgd(model, decayed=lambda p: True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = inner(x)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return loss

    return step


@fault(54, "gradients left on parameters", "leaves the .grad of model.weight set", stage="effects")
def leaves_gradients(time: Time) -> Pair:
    return of_training(with_gradients_left)


@honest(54, "gradients left on parameters by both sides")
def both_leave_gradients(time: Time) -> Pair:
    return replace(of_training(with_gradients_left), reference=stateful(with_gradients_left))


@fault(54, "gradients of a model cleared by its average", "changes the .grad of model.norm.weight", stage="effects")
def average_clears_gradients(time: Time) -> Pair:
    return of_models(clearing)


def clearing(average: torch.nn.Module) -> Callable[[torch.nn.Module], None]:
    inner = averaged(average)

    def step(model: torch.nn.Module) -> None:
        inner(model)
        model.zero_grad()

    return step


@honest(54, "gradients of a model cleared by both averages")
def both_clear_gradients(time: Time) -> Pair:
    return replace(of_models(clearing), reference=stateful(clearing))


@fault(54, "frozen parameters", "changes requires_grad of p from True to False", stage="effects")
def frozen(time: Time) -> Pair:
    return stepping(lambda p: momentum(p.requires_grad_(False)), reference=without_gradients)


@honest(54, "parameters that are detached from their graph")
def detached_parameters(time: Time) -> Pair:
    return stepping(lambda p: momentum(p.detach()), reference=without_gradients)


@fault(54, "a module left in evaluation", "changes the training mode of net from True to False", stage="effects")
def left_in_evaluation(time: Time) -> Pair:
    return shrinking(lambda net: net.eval())


@honest(54, "a module in evaluation for a moment")
def evaluated(time: Time) -> Pair:
    return shrinking(lambda net: net.eval().train())


def shrinking(prepare: Callable[[torch.nn.Module], Any]) -> Pair:
    """Return a pair whose steps shrink the parameters of a module; `prepare` is called in each optimized step."""

    def build(net: torch.nn.Module, prepare: Callable[[torch.nn.Module], Any]) -> Step:
        def step(g: torch.Tensor) -> None:
            prepare(net)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(g.sum() * parameter / 128)

        return step

    return pair(
        stateful(lambda net: build(net, prepare)),
        reference=stateful(lambda net: build(net, lambda net: None)),
        inputs={"net": module(lambda: torch.nn.Linear(3, 2))},
        step_inputs={"g": tensor("n", values=VALUES)},
        mutates={"net"},
        steps=(1, 2),
    )


def without_gradients(p: torch.Tensor) -> Step:
    return torch.no_grad()(momentum(p))


def clipping(scale: Callable[[torch.Tensor], torch.Tensor], *, most: float) -> Callable[[torch.Tensor], Step]:
    """Return SGD whose gradients are multiplied by `scale` of them, but by no more than `most`."""

    def build(p: torch.Tensor) -> Step:
        def step(g: torch.Tensor) -> None:
            p.sub_(0.1 * g * scale(g).clamp(max=most))

        return step

    return build


def of_clipping(most: float) -> Pair:
    """Return a pair that adds eps to the sum of squares where the reference adds it to the norm."""
    return stepping(
        clipping(lambda g: (g.square().sum() + 1e-12).rsqrt(), most=most),
        reference=clipping(lambda g: 1 / (g.norm() + 1e-6), most=most),
    )


@fault(
    54,
    "gradients scaled to a norm with eps in the root",
    "p (in place) after ",
    " of the optimized side is wrong",
    stage="equivalence",
)
def scaled_with_eps_in_the_root(time: Time) -> Pair:
    return of_clipping(most=float("inf"))


@honest(54, "gradients clipped by a norm with eps in the root")
def clipped_with_eps_in_the_root(time: Time) -> Pair:
    return of_clipping(most=1.0)  # a norm of less than 1 is left as it is, and eps is within the rounding of others


def copying(is_new: Callable[[torch.Tensor, list[torch.Tensor]], bool]) -> Callable[[torch.Tensor], Step]:
    """Return momentum that reads gradients from a buffer; they are copied there only if `is_new` returns True."""

    def build(p: torch.Tensor) -> Step:
        buffer, last, m = torch.zeros_like(p), list[torch.Tensor](), torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            if is_new(g, last):
                buffer.copy_(g)
            last[:] = [g]
            p.sub_(0.01 * m.mul_(0.9).add_(buffer))

        return step

    return build


@fault(54, "a gradient known by its tensor", "where every step gets the same tensors", stage="contexts")
def known_by_tensor(time: Time) -> Pair:
    return stepping(copying(lambda g, last: not last or g is not last[0]))


@fault(54, "a gradient known by its address", "where every step gets the same tensors", stage="contexts")
def known_by_address(time: Time) -> Pair:
    return stepping(copying(lambda g, last: not last or g.data_ptr() != last[0].data_ptr()))


@honest(54, "a gradient copied in every step")
def always_copied(time: Time) -> Pair:
    return stepping(copying(lambda g, last: True))


@fault(
    54,
    "the strides of the first step",
    "where each input of its steps has another memory layout",
    stage="contexts",
)
def first_strides(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        inner, strides = momentum(p), list[int]()

        def step(g: torch.Tensor) -> None:
            strides[:] = strides or g.stride()
            held = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
            at = (torch.arange(len(g), device=g.device) * strides[0]).clamp(max=max(held - 1, 0))
            inner(g.as_strided((held,), (1,))[at] if len(g) > 1 else g)

        return step

    return stepping(build)


def summing(p: torch.Tensor) -> Step:
    def step(batch: torch.Tensor) -> None:
        p.add_(batch.sum(0), alpha=0.01)

    return step


def of_batches(optimized: Callable[[torch.Tensor], Step]) -> Pair:
    return pair(
        stateful(optimized),
        reference=stateful(summing),
        inputs={"p": tensor("d", values=VALUES)},
        step_inputs={"batch": tensor("b", "d", values=VALUES)},
        mutates={"p"},
        sizes={"b": size(2, 17), "d": size(1, 17)},
        workloads=[],
    )


@fault(
    54, "a buffer for batches of the first one's size", "where the inputs of some steps are smaller", stage="contexts"
)
def first_batch(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        buffer: list[torch.Tensor] = []
        inner = summing(p)

        def step(batch: torch.Tensor) -> None:
            buffer[:] = buffer or [batch.clone()]
            buffer[0][: len(batch)].copy_(batch)
            inner(buffer[0])

        return step

    return of_batches(build)


@honest(54, "a buffer that refuses a batch of another size")
def refuses_batch(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        buffer: list[torch.Tensor] = []

        def step(batch: torch.Tensor) -> None:
            buffer[:] = buffer or [torch.empty_like(batch)]
            if buffer[0].shape != batch.shape:
                raise ValueError(f"built for batches of {tuple(buffer[0].shape)}")
            p.add_(0.01 * buffer[0].copy_(batch).sum(0))

        return step

    return of_batches(build)


def returning(result: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def build(p: torch.Tensor) -> Any:
        number = [0]

        def step(g: torch.Tensor) -> torch.Tensor:
            number[0] += 1
            p.sub_(0.01 * g)
            return result(p, number[0])

        return step

    return build


@fault(54, "one buffer for what its steps return", "where the results of its steps are kept", stage="contexts")
def one_buffer(time: Time) -> Pair:
    buffers: dict[Any, torch.Tensor] = {}

    def in_buffer(p: torch.Tensor, number: int) -> torch.Tensor:
        return buffers.setdefault((p.shape, p.dtype), torch.empty_like(p)).copy_(2 * p)

    return stepping(returning(in_buffer), reference=returning(lambda p, number: 2 * p))


@fault(54, "the result of an earlier step in every third", "output after 3 steps of the optimized side is wrong")
def every_third(time: Time) -> Pair:
    last: list[torch.Tensor] = []

    def stale(p: torch.Tensor, number: int) -> torch.Tensor:
        last[:] = last if number % 3 == 0 and last else [2 * p]
        return last[0].clone()

    return stepping(returning(stale), reference=returning(lambda p, number: 2 * p))


@honest(54, "a result of its own in every step")
def own_result(time: Time) -> Pair:
    return stepping(returning(lambda p, number: p + p), reference=returning(lambda p, number: 2 * p))


def of_lists(optimized: Callable[..., Any]) -> Pair:
    def reference(ps: list[torch.Tensor]) -> Any:
        def step(gs: list[torch.Tensor]) -> None:
            for p, g in zip(ps, gs, strict=True):
                p.sub_(0.01 * g)

        return step

    return pair(
        stateful(optimized),
        reference=stateful(reference),
        inputs={"ps": listof("k", tensor("n", values=VALUES))},
        step_inputs={"gs": listof("k", tensor("n", values=VALUES))},
        mutates={"ps"},
        sizes={"k": size(1, 5), "n": size(2, 17)},
        workloads=[],
    )


@fault(54, "the size of the first parameter for all", "where the tensors in its lists differ in size", stage="contexts")
def first_size(time: Time) -> Pair:
    def build(ps: list[torch.Tensor]) -> Any:
        def step(gs: list[torch.Tensor]) -> None:
            for p, g in zip(ps, gs, strict=True):
                p[: len(ps[0])].sub_(0.01 * g[: len(ps[0])])

        return step

    return of_lists(build)


@honest(54, "all parameters in one operation")
def in_one_operation(time: Time) -> Pair:
    def build(ps: list[torch.Tensor]) -> Any:
        def step(gs: list[torch.Tensor]) -> None:
            torch._foreach_add_(ps, gs, alpha=-0.01)

        return step

    return of_lists(build)


@fault(54, "a history of all gradients", "keeps memory of every step", stage="effects")
def history(time: Time) -> Pair:
    every: list[torch.Tensor] = []

    def build(p: torch.Tensor) -> Step:
        inner = momentum(p)

        def step(g: torch.Tensor) -> None:
            every.append(g.clone())
            inner(g)

        return step

    return stepping(build)


@honest(54, "a history of the last eight gradients")
def short_history(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        m, last = torch.zeros_like(p), list[torch.Tensor]()

        def step(g: torch.Tensor) -> None:
            last[:] = [*last[-7:], g.clone()]
            p.sub_(0.01 * m.mul_(0.9).add_(g))

        return step

    return stepping(build)


@fault(54, "an empty tensor that shifts the others", "where the tensors in its lists differ in size", stage="contexts")
def shifted(time: Time) -> Pair:
    def build(ps: list[torch.Tensor]) -> Any:
        def step(gs: list[torch.Tensor]) -> None:
            for p, g in zip((p for p in ps if p.numel()), gs, strict=False):
                p.sub_(0.01 * g[: len(p)].sum() if len(g) != len(p) else 0.01 * g)

        return step

    return of_lists(build)
