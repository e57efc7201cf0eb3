"""Faults 47 and 48: wrong for what tests seldom draw; settings that change late, and marks that values do not show."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from torch.nn import functional

from perfsuite import Pair, floats, generator, size, tensor
from perfsuite.specs import Spec

LAYOUTS = ("contiguous", "rows", "permuted")
ROWS: dict[str, Spec] = {"x": tensor("b", "m", "n", values=floats(-2, 2), layouts=LAYOUTS)}
OF_ROWS = {"reference": lambda x: x.sin().contiguous(), "inputs": ROWS, "workloads": []}


# --- 47: layouts, values and inputs ---------------------------------------------------------------------------------


def memory_of(x: torch.Tensor, begin: int) -> torch.Tensor:
    """So many elements as x has, from where it begins, as far as its memory goes."""
    held = x.untyped_storage().nbytes() // x.element_size() - begin
    flat = x.new_zeros(x.numel())
    flat[: min(held, x.numel())] = x.as_strided((min(held, x.numel()),), (1,), begin)
    return flat.view(x.shape)


@fault(47, "rows of a wider tensor read as if they were whole", "wrong for rows x")
def wider_rows(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        apart = x.numel() and x.stride(-1) == 1 and x.stride(-2) > x.shape[-1]
        return (memory_of(x, x.storage_offset()) if apart else x).sin().contiguous()

    return pair(side, **OF_ROWS)


@honest(47, "rows of a wider tensor copied first")
def copied_rows(time: Time) -> Pair:
    return pair(lambda x: x.contiguous().sin(), **OF_ROWS)


@fault(47, "two dimensions taken to be in order", "wrong for permuted x")
def permuted(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        swapped = x.numel() and x.stride(-1) == 1 and x.stride(-2) > x.stride(-3) > 0
        return (memory_of(x, x.storage_offset()) if swapped else x).sin().contiguous()

    return pair(side, **OF_ROWS)


@fault(47, "halves rounded up", "wrong for halves ones")
def rounded_up(time: Time) -> Pair:
    return pair(lambda x: (x + 0.5).floor(), reference=torch.round)


@honest(47, "halves rounded to even")
def rounded_to_even(time: Time) -> Pair:
    return pair(lambda x: x.round(), reference=torch.round)


@fault(47, "zeros for the direction of a zero vector", "NaN and infinities must stand in the same places")
def normalized(time: Time) -> Pair:
    return pair(
        lambda x: functional.normalize(x, dim=-1),
        reference=lambda x: x / x.norm(dim=-1, keepdim=True),
        sizes={"n": size(2, 33)},
    )


BOTH: dict[str, Spec] = {"x": tensor("m", "n", values=floats(-2, 2)), "y": tensor("m", "n", values=floats(-2, 2))}


def kept_by(key: Any) -> Any:
    """A product whose answers are kept by a key of its inputs, values and all."""
    answers: dict[Any, torch.Tensor] = {}

    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = (*((tuple(t.shape), t.dtype, t.numpy(force=True).tobytes()) for t in key(x, y)), y.dtype)
        if found not in answers:
            answers[found] = x * y
        return answers[found].clone()

    return side


@fault(47, "an answer kept by one of two inputs", "differ from earlier ones in x alone", stage="integrity")
def by_one_input(time: Time) -> Pair:
    return pair(kept_by(lambda x, y: [x]), reference=torch.mul, inputs=BOTH)


@fault(47, "an answer kept by the other input", "differ from earlier ones in x alone", stage="integrity")
def by_the_other_input(time: Time) -> Pair:
    return pair(kept_by(lambda x, y: [y]), reference=torch.mul, inputs=BOTH)


@honest(47, "an answer kept by all of both inputs")
def by_both_inputs(time: Time) -> Pair:
    made = kept_by(lambda x, y: [x, y])
    return pair(made, reference=torch.mul, inputs=BOTH, unsupported={"autocast": "numpy reads its inputs"})


# --- 48: late, or unseen --------------------------------------------------------------------------------------------


@fault(48, "an output of inference mode", "is an inference tensor, which the reference's is not")
def inference_output(time: Time) -> Pair:
    return pair(torch.inference_mode()(torch.sin), reference=torch.sin)


@fault(48, "a view that negates its memory", "is a view that negates its memory, which the reference's is not")
def negated_view(time: Time) -> Pair:
    return pair(lambda x: torch.complex(x * 0, -x.sin()).conj().imag, reference=torch.sin, strides="any")


@honest(48, "the negation of a copy")
def negated_copy(time: Time) -> Pair:
    return pair(lambda x: -(-x).sin(), reference=torch.sin)


NUMBERS: dict[str, Spec] = {"x": tensor("m", "n", values=floats(-2, 2)), "source": generator()}


def with_noise(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=source, device=x.device)


@fault(48, "a generator that is put back", "leaves source as it was", stage="effects")
def put_back(time: Time) -> Pair:
    def side(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        before = source.get_state()
        made = with_noise(x, source)
        source.set_state(before)
        return made

    return pair(side, reference=with_noise, inputs=NUMBERS)


@honest(48, "a generator that goes on")
def goes_on(time: Time) -> Pair:
    return pair(
        lambda x, source: torch.rand(x.shape, generator=source, device=x.device).add_(x),
        reference=with_noise,
        inputs=NUMBERS,
    )


def setting_at(number: int) -> Any:
    """A side that switches off a library at this call of it."""
    calls = [0]

    def side(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == number:
            torch.backends.mkldnn.set_flags(_enabled=False)
        return x.sin()

    return side


@fault(48, "a library switched off at the fifth call", "sets torch's mkldnn enabled to False", stage="equivalence")
def fifth_call(time: Time) -> Pair:
    return pair(setting_at(5), reference=torch.sin)


@fault(48, "a library switched off at the tenth call", "sets torch's mkldnn enabled to False", stage="equivalence")
def tenth_call(time: Time) -> Pair:
    return pair(setting_at(10), reference=torch.sin)


@honest(48, "a library that stays on")
def stays_on(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        torch.backends.mkldnn.set_flags(_enabled=False)
        made = x.sin()
        torch.backends.mkldnn.set_flags(_enabled=True)
        return made

    return pair(side, reference=torch.sin)
