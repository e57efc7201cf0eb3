import dataclasses
import itertools

import pytest
import torch
from scale import draws
from torch.func import functional_call

from optimized.losses.inverse_losses import inverse_losses as optimized
from optimized.losses.query_sampling import query_sampling
from perfsuite import Pair, Workload, floats, integers, module, scalar, size, stateful, tensor
from reference.losses.inverse_losses import inverse_losses as reference
from suite.ups.losses import InverseTask
from suite.ups.trial import (
    BATCH,
    HEADS,
    LATENTS,
    LAYERS,
    LINE,
    line_decoder,
    line_encoder,
    plane_decoder,
    plane_encoder,
)

BOUNDED = floats(-2, 2)
UNIT = floats(0, 1)
PER = LINE // LATENTS["T"]
"""Grid points per latent token on the line."""
MIXED = {**LATENTS, "per": PER, "rows": 16, "columns": 8}
"""Sizes of a mixed batch; its plane has 128 · 16 points."""
SMALL = {"B": 2, "T": 8, "L": 8, "per": 4, "Q": 16, "heads": 2, "head_width": 8, "layers": 3, "clock": "wall"}


def line(values=BOUNDED):
    """Return the specs of a task's part of a batch on a line: latents, field, coordinates and query points."""
    return {
        "latents": tensor("B", "T", "L", values=values),
        "field": tensor("B", "per * T", 1, values=values, differentiable=False),
        "points": tensor("per * T", 1, values=UNIT, differentiable=False),
        "queries": tensor("Q", dtype="int64", values=integers(0, "per * T")),
    }


def plane(values=BOUNDED):
    """Return the specs of a task on a plane, with another number of examples."""
    return {
        "latents": tensor("C", "rows * columns", "L", values=values),
        "field": tensor("C", "per * rows", "2 * columns", 1, values=values, differentiable=False),
        "points": tensor("per * rows", "2 * columns", 2, values=UNIT, differentiable=False),
        "queries": tensor("Q", dtype="int64", values=integers(0, "2 * per * rows * columns")),
    }


def of_mixed_batch(call):
    def given(encoders, decoders, on_line, on_plane, batch, frequency):
        tasks = [
            InverseTask(encode=encode, decode=decode, **task)
            for encode, decode, task in zip(encoders, decoders, (on_line, on_plane), strict=True)
        ]
        return call(tasks, batch, frequency)

    return given


def decoded_apart(tasks, batch, frequency=1):
    """Decode for each of the two losses separately, as the source does."""
    return optimized(tasks, batch, frequency, query_sampling)


inverse_losses = Pair(
    reference=of_mixed_batch(reference),
    optimized=of_mixed_batch(optimized),
    rivals={"decoded_apart": of_mixed_batch(decoded_apart)},
    inputs={
        "encoders": [module(line_encoder), module(plane_encoder)],
        "decoders": [module(line_decoder), module(plane_decoder)],
        "on_line": line(),
        "on_plane": plane(),
        "batch": scalar(integers(0, 9)),
        "frequency": scalar(integers(1, 4)),
    },
    max_examples=draws(cpu=7, otherwise=12),
    sizes={
        "B": size(1, 3),
        "C": size(1, 3),
        "T": size(2, 4),  # attention to one token has gradients of 0, or rounding errors
        "L": size(1, 4),
        "per": size(1, 3),
        "rows": size(1, 3),
        "columns": size(1, 2),
        "Q": size(1, 5),
        "heads": size(1, 2),
        "head_width": size(4, 4),
        "layers": size(1, 1),
    },
    workloads=[
        # A batch whose losses are due, half of it from each task.
        Workload(
            "mixed",
            **HEADS,
            layers=LAYERS,
            **MIXED,
            B=BATCH // 2,
            C=BATCH // 2,
            Q=1024,
            batch=4,
            frequency=4,
            direction="both",
            device="cuda",
        ),
        Workload("cpu", **SMALL, C=2, rows=2, columns=4, batch=4, frequency=4, direction="both", device="cpu"),
    ],
)


def with_gradients(call):
    """Return a side whose step returns both losses of a task, and their sum's gradient for each module.

    The gradient is one vector for each module, because for the biases of the keys alone it is 0 up to rounding errors.
    """

    def make(encoder, decoder, frequency):
        count = itertools.count()

        @torch.enable_grad()
        def step(task):
            weights = [leaves_of(encoder), leaves_of(decoder)]
            encode, decode = with_weights(encoder, weights[0]), with_weights(decoder, weights[1])
            losses = call([InverseTask(encode=encode, decode=decode, **task)], next(count), frequency)
            total = losses[0] + losses[1]
            if not total.requires_grad:
                return losses, *(torch.zeros(elements(own), device=total.device, dtype=total.dtype) for own in weights)
            found = torch.autograd.grad(total, [leaf for own in weights for leaf in own.values()])
            first, vectors = len(weights[0]), [gradient.flatten() for gradient in found]
            return [loss.detach() for loss in losses], torch.cat(vectors[:first]), torch.cat(vectors[first:])

        return step

    return make


def leaves_of(module):
    return {name: p.detach().requires_grad_() for name, p in module.named_parameters()}


def elements(weights):
    return sum(weight.numel() for weight in weights.values())


def with_weights(module, weights):
    return lambda *arguments: functional_call(module, weights, arguments)


inverse_losses_schedule = Pair(
    reference=stateful(with_gradients(reference)),
    optimized=stateful(with_gradients(optimized)),
    inputs={"encoder": module(line_encoder), "decoder": module(line_decoder), "frequency": scalar(integers(1, 5))},
    step_inputs={"task": line()},
    sizes={
        "B": size(1, 2),
        "T": size(2, 4),
        "L": size(2, 4),
        "per": size(2, 3),
        "Q": size(2, 5),
        "heads": size(1, 2),
        "head_width": size(8, 8),
        "layers": size(1, 1),
    },
    steps=(1, 5),
    max_examples=4,
    rivals={"decoded_apart": stateful(with_gradients(decoded_apart))},
    workloads=[
        # Four batches are one period of the schedule.
        Workload(
            "advection1d",
            **LATENTS,
            **HEADS,
            layers=LAYERS,
            B=BATCH,
            per=PER,
            Q=1024,
            frequency=4,
            repeat=4,
            clock="wall",
            device="cuda",
            speedup=2.5,
        ),
        Workload("cpu", **SMALL, frequency=4, repeat=4, device="cpu"),
    ],
)


SIDES = [reference, optimized, decoded_apart]


def grid_mean(decoded, points):
    """Encode the field to one token, its mean."""
    return decoded.mean(1, keepdim=True)


def at_coordinates(latents, points):
    """Decode to the latents' first value times the coordinate of each point."""
    return latents[:, :1, :1] * points


def by_hand(values, field, queries=(1,)):
    return InverseTask(
        encode=grid_mean,
        decode=at_coordinates,
        latents=torch.tensor(values, requires_grad=True)[:, None, None],
        field=torch.tensor(field)[..., None],
        points=torch.tensor([[0.0], [2.0]]),
        queries=torch.tensor(queries),
    )


@pytest.mark.parametrize("call", SIDES)
def test_both_losses_match_hand_computation(call):
    # The latents 1 and 3 are decoded to (0, 2) and (0, 6), and encoded to 1 and 3 again.
    assert torch.stack(call([by_hand([1.0, 3.0], [[0.0, 2.0], [9.0, 2.0]])], 0)).tolist() == [(0 + 16) / 2, 0]
    task = dataclasses.replace(by_hand([1.0], [[0.0, 3.0]], (0, 1)), encode=lambda *field: 3 * grid_mean(*field))
    assert torch.stack(call([task], 0)).tolist() == [0.5, 4.0]


@pytest.mark.parametrize("call", SIDES)
def test_latents_as_a_target_have_no_gradient(call):
    latents = torch.tensor([[[1.0]]], requires_grad=True)
    task = dataclasses.replace(by_hand([1.0], [[0.0, 3.0]]), latents=latents, encode=lambda *f: 3 * grid_mean(*f))
    (gradient,) = torch.autograd.grad(call([task], 0)[1], latents)
    # (3 z - stop(z))² has the gradient 2 (3 z - z) · 3.
    assert gradient.item() == 12.0


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(("frequency", "due"), [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6]), (4, [0, 4])])
def test_losses_are_computed_once_every_frequency_batches(call, frequency, due):
    found = [call([by_hand([1.0], [[0.0, 3.0]])], batch, frequency) for batch in range(8)]
    assert [batch for batch, (first, _) in enumerate(found) if first.item() == 1.0] == due
    assert [batch for batch, (first, _) in enumerate(found) if first.requires_grad] == due
    assert all(loss.item() == 0 for batch, losses in enumerate(found) if batch not in due for loss in losses)


def test_a_batch_that_is_not_due_decodes_nothing():
    task = dataclasses.replace(by_hand([1.0], [[0.0, 3.0]]), decode=None, encode=None)
    assert torch.stack(optimized([task], 3, 4)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("call", SIDES)
def test_mixed_batch_averages_the_losses_over_all_examples(call):
    tasks = [by_hand([1.0], [[0.0, 5.0]]), by_hand([1.0, 1.0, 1.0], [[0.0, 3.0]] * 3)]
    alone = [call([task], 0)[0].item() for task in tasks]
    mixed, _ = call(tasks, 0)
    assert alone == [9.0, 1.0]
    # Every example has the same weight.
    assert mixed.item() == (9.0 + 3 * 1.0) / 4


@pytest.mark.parametrize("call", SIDES)
def test_every_task_of_a_mixed_batch_trains_its_encoder_and_its_decoder(call):
    torch.manual_seed(0)
    parts = [
        (line_encoder(3, 2), line_decoder(3, 1, 4, 2), (4,)),
        (plane_encoder(3, 2, 1), plane_decoder(3, 1, 4, 2), (2, 4)),
    ]
    tasks = [
        InverseTask(
            encode=encode,
            decode=decode,
            latents=torch.randn(2, 2, 3),
            field=torch.randn(2, *grid, 1),
            points=torch.rand(*grid, len(grid)),
            queries=torch.tensor([0, 3]),
        )
        for encode, decode, grid in parts
    ]
    first, second = call(tasks, 4, 4)
    (first + second).backward()
    for encode, decode, _ in parts:
        for module_ in (encode, decode):
            assert all(p.grad is not None and p.grad.any() for p in module_.parameters())
