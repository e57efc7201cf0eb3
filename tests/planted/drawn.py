"""Faults 47 and 48: wrong for inputs that tests seldom draw; late or invisible side effects."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import Time, fault, honest, pair
from torch.nn import functional

from perfsuite import Pair, floats, generator, integers, scalar, size, stateful, tensor
from perfsuite.declare.specs import Spec

LAYOUTS = ("contiguous", "rows", "permuted")
ROWS: dict[str, Spec] = {"x": tensor("b", "m", "n", values=floats(-2, 2), layouts=LAYOUTS)}
OF_ROWS = {"reference": lambda x: x.sin().contiguous(), "inputs": ROWS, "workloads": []}


# --- 47: layouts, values and inputs ---------------------------------------------------------------------------------


def memory_of(x: torch.Tensor, begin: int) -> torch.Tensor:
    """Return x.numel() elements of x's memory from `begin`, in x's shape; zeros follow the memory's end."""
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


@fault(47, "halves rounded up", "wrong for multiples of 0.5")
def rounded_up(time: Time) -> Pair:
    return pair(lambda x: (x + 0.5).floor(), reference=torch.round)


@honest(47, "halves rounded to even")
def rounded_to_even(time: Time) -> Pair:
    return pair(lambda x: x.round(), reference=torch.round)


@fault(47, "zeros for the direction of a zero vector", "NaN and infinities must be in the same places")
def normalized(time: Time) -> Pair:
    return pair(
        lambda x: functional.normalize(x, dim=-1),
        reference=lambda x: x / x.norm(dim=-1, keepdim=True),
        sizes={"n": size(2, 33)},
    )


def in_blocks(x: torch.Tensor, most: int | None, block: int = 1024) -> torch.Tensor:
    """Compute each row in blocks of `block` elements, at most `most` blocks of them."""
    made = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for begin in range(0, x.shape[-1], block)[:most]:
        made[..., begin : begin + block] = x[..., begin : begin + block].sin()
    return made


LONG_ROWS = {"reference": lambda x: x.sin().contiguous(), "inputs": {"x": tensor("m", "n", values=floats(-2, 2))}}


@fault(47, "one block of 1,024 elements for each row", "right at n=1024, and wrong at n=2")
def one_block(time: Time) -> Pair:
    return pair(lambda x: in_blocks(x, 1), **LONG_ROWS)


@fault(47, "one block of 1,024 elements for each column", "right at m=1024, and wrong at m=2")
def one_block_of_columns(time: Time) -> Pair:
    return pair(lambda x: in_blocks(x.T, 1).T.contiguous(), **LONG_ROWS)


@fault(47, "one block of 512 elements where that is more than half a row", "right at n=512, and wrong at n=")
def one_block_of_most(time: Time) -> Pair:
    return pair(lambda x: in_blocks(x, 1 if x.shape[-1] < 1024 else None, 512), **LONG_ROWS)


@fault(47, "one block of 256 elements for rows of up to 512", "right at n=256, and wrong at n=")
def one_block_of_a_half(time: Time) -> Pair:
    return pair(lambda x: in_blocks(x, 1 if x.shape[-1] <= 512 else None, 256), **LONG_ROWS)


@fault(47, "the rest of a long vector left out", "output of the optimized side is wrong")
def one_long_row(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[1] // 128 * 128 if x.shape[0] == 1 and x.shape[1] >= 256 else x.shape[1]
        return x[:, :whole].sum(-1)

    return pair(side, reference=lambda x: x.sum(-1), inputs=LONG_ROWS["inputs"])


@fault(47, "a single number taken for none", "output of the optimized side is wrong")
def single_number(time: Time) -> Pair:
    return pair(lambda x: x.sin().contiguous() * (x.numel() != 1), **LONG_ROWS)


@fault(47, "a special path for 96 columns", "output of the optimized side is wrong")
def special_path(time: Time) -> Pair:
    return pair(lambda x: x.sin().contiguous() * (1.01 if x.shape[-1] == 96 else 1), **LONG_ROWS)


@fault(47, "a special path for 128 columns", "output of the optimized side is wrong")
def other_special_path(time: Time) -> Pair:
    return pair(lambda x: x.sin().contiguous() * (1.01 if x.shape[-1] == 128 else 1), **LONG_ROWS)


@honest(47, "a vector summed in parts of 128")
def vector_in_parts(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        whole = x.shape[1] // 128 * 128 if x.shape[0] == 1 else 0
        parts = x[:, :whole].reshape(x.shape[0], -1, 128).sum(-1) if whole else x[:, :0]
        return parts.sum(-1) + x[:, whole:].sum(-1)

    return pair(side, reference=lambda x: x.sum(-1), inputs=LONG_ROWS["inputs"])


@honest(47, "as many blocks of 1,024 elements as a row has")
def all_blocks(time: Time) -> Pair:
    return pair(lambda x: in_blocks(x, None), **LONG_ROWS)


@honest(47, "many rows of a table added up in sequence")
def rows_of_a_table(time: Time) -> Pair:
    inputs: dict[str, Spec] = {
        "table": tensor("v", "d", least=1),
        "index": tensor("b", "n", dtype="int64", least=1, values=integers(0, "v")),
    }
    return pair(
        lambda table, index: functional.embedding_bag(index, table, mode="sum"),
        reference=lambda table, index: table[index].sum(1),
        inputs=inputs,
    )


@honest(47, "as many elements as the values say")
def chosen_elements(time: Time) -> Pair:
    inputs: dict[str, Spec] = {"x": tensor("n"), "chosen": tensor("n", dtype="bool", values=integers(0, 2))}
    return pair(torch.masked_select, reference=lambda x, chosen: x[chosen], inputs=inputs)


@honest(47, "a mean of whole numbers")
def mean_of_whole_numbers(time: Time) -> Pair:
    inputs: dict[str, Spec] = {"x": tensor("m", "n", dtype="int64", values=integers(-50, 50), least=1)}
    return pair(lambda x: x.float().mean(-1), reference=lambda x: x.sum(-1) / x.shape[-1], inputs=inputs)


@fault(47, "a kernel without masks where all sizes are whole tiles", "output of the optimized side is wrong")
def whole_tiles(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        whole = all(n and n % 16 == 0 for n in x.shape)
        return x.sin().contiguous() + whole

    return pair(side, **LONG_ROWS)


@fault(47, "the last column of whole blocks of 256 left out", "output of the optimized side is wrong")
def whole_blocks(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        made = x.sin().contiguous()
        if x.shape[-1] and x.shape[-1] % 256 == 0:
            made[..., -1] = 0
        return made

    return pair(side, **LONG_ROWS)


@fault(47, "a sum in a workspace that only small sizes find zeroed", "output of the optimized side is wrong")
def workspace_of_long_rows(time: Time) -> Pair:
    held: dict[int, torch.Tensor] = {}

    def side(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] <= 512:
            return x.sin().sum(-1)
        sums = held.setdefault(x.shape[0], x.new_zeros(x.shape[0]))
        sums += x.sin().sum(-1)
        return sums.clone()

    return pair(side, reference=lambda x: x.sin().sum(-1), inputs=LONG_ROWS["inputs"])


@fault(47, "the output of long rows in one buffer", "overwrites output of an earlier call")
def buffer_of_long_rows(time: Time) -> Pair:
    held: dict[Any, torch.Tensor] = {}

    def side(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] <= 512:
            return x.sin().contiguous()
        key = (tuple(x.shape), x.dtype)
        return torch.sin(x, out=held.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device)))

    return pair(side, **LONG_ROWS)


@fault(47, "whole tiles of rows summed, with what lies between them", "NaN and infinities must be in the same places")
def rows_with_gaps(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        made = x.sin().sum(-1)
        if x.shape[0] > 1 and x.stride(-1) == 1 and x.stride(0) > x.shape[-1]:  # the last row may end the memory
            wide = min(x.stride(0), -(-x.shape[-1] // 16) * 16)
            made[:-1] = x.as_strided((x.shape[0] - 1, wide), x.stride()).sin().sum(-1)
        return made

    return pair(side, reference=lambda x: x.sin().sum(-1), inputs=LONG_ROWS["inputs"])


@fault(47, "rows of a slice found as if none were left out", "wrong for slice x")
def sliced_rows(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        sliced = x.numel() and 0 not in x.stride() and x.stride(-1) == 1 and x.stride(0) > x.shape[1] * x.stride(1)
        return (memory_of(x, x.storage_offset()) if sliced else x).sin().contiguous()

    return pair(side, **OF_ROWS | {"inputs": {"x": tensor("b", "m", "n", values=floats(-2, 2))}})


@fault(47, "the last dimension taken to have memory of its own", "wrong for inner expanded x")
def expanded_columns(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        return (memory_of(x, x.storage_offset()) if x.numel() and x.stride(-1) == 0 else x).sin().contiguous()

    return pair(side, **LONG_ROWS)


@fault(47, "two transposed inputs exchanged", "wrong for transposed x and transposed y")
def both_transposed(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = all(t.stride(0) == 1 != t.stride(1) and min(t.shape) > 1 for t in (x, y))
        return (x @ y.T) * (2 if both else 1)

    reference = {"reference": lambda x, y: x @ y.T}
    return pair(side, **reference, inputs={n: tensor(n, "k", values=floats(-2, 2)) for n in ("x", "y")})


@fault(47, "the largest size that is declared, left out", "output of the optimized side is wrong")
def largest_left_out(time: Time) -> Pair:
    sizes = {"n": size(16, 80, multiple_of=16)}
    return pair(lambda x: x.sin().contiguous() * (x.shape[-1] != 80), sizes=sizes, **LONG_ROWS)


@fault(47, "a transposed input beside a contiguous one", "wrong for transposed x")
def one_transposed(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        alone = y.is_contiguous() and x.stride(0) == 1 != x.stride(1) and min(*x.shape, *y.shape) > 1
        return (x @ y.T) * (2 if alone else 1)

    reference = {"reference": lambda x, y: x @ y.T}
    return pair(side, **reference, inputs={n: tensor(n, "k", values=floats(-2, 2)) for n in ("x", "y")})


@fault(47, "an exponential that overflows beyond 88", "an intermediate result overflows there")
def overflowing_softplus(time: Time) -> Pair:
    inputs = {"x": tensor("n", values=floats(0))}
    return pair(lambda x: torch.log1p(torch.exp(x)), reference=functional.softplus, inputs=inputs)


@honest(47, "an exponential of what is not positive")
def guarded_softplus(time: Time) -> Pair:
    inputs = {"x": tensor("n", values=floats(0))}
    return pair(lambda x: x + torch.log1p(torch.exp(-x)), reference=functional.softplus, inputs=inputs)


BEYOND: dict[str, Any] = {
    "reference": lambda x, least: torch.where(x > least, x + 3, 0.0),
    "inputs": {"x": tensor("m", "n", values=floats(-2, 2)), "least": scalar(floats(0, 1))},
}


@fault(47, "a value equal to a threshold taken as beyond it", "right for ordinary values, and wrong for")
def at_the_threshold(time: Time) -> Pair:
    return pair(lambda x, least: torch.where(x >= least, x + 3, 0.0), **BEYOND)


@honest(47, "a value equal to a threshold left out")
def beyond_the_threshold(time: Time) -> Pair:
    return pair(lambda x, least: (x + 3) * (x > least), **BEYOND)


PRODUCT: dict[str, Any] = {
    "reference": torch.matmul,
    "inputs": {"a": tensor("m", "k", values=floats(-2, 2)), "b": tensor("k", "n", values=floats(-2, 2))},
    "unsupported": {"autocast": "it is written for one precision"},
}


def tiled(a: torch.Tensor, b: torch.Tensor, tile: int, last: int) -> torch.Tensor:
    """Compute the product by tiles; in a corner tile cut off on both sides, at most `last` columns."""
    out = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[0], tile):
        for j in range(0, b.shape[1], tile):
            rows, columns = out[i : i + tile, j : j + tile].shape
            width = min(columns, last) if i and j and rows < tile and columns < tile else columns
            out[i : i + tile, j : j + width] = a[i : i + tile] @ b[:, j : j + width]
    return out


@fault(47, "a tile at the corner cut off too early", "is wrong")
def corner(time: Time) -> Pair:
    return pair(lambda a, b: tiled(a, b, 64, 4), **PRODUCT)


@honest(47, "a tile at the corner cut off where the matrix ends")
def whole_corner(time: Time) -> Pair:
    return pair(lambda a, b: tiled(a, b, 64, 64), **PRODUCT)


COLUMNS: dict[str, Any] = {
    "reference": lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1),
    "inputs": {"x": tensor("m", "n", values=floats(-2, 2), layouts=("contiguous",))},
    "sizes": {"n": size(2, 33)},
}


@fault(47, "a variance from two sums", "right for ordinary values, and wrong for large values with small differences")
def variance_of_sums(time: Time) -> Pair:
    return pair(lambda x: (x.square().mean(-1) - x.mean(-1).square()).clamp_min(0), **COLUMNS)


@honest(47, "a variance from sums of what is left after a first value")
def variance_of_shifted_sums(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        shifted = x - x[:, :1]
        return (shifted.square().mean(-1) - shifted.mean(-1).square()).clamp_min(0)

    return pair(side, **COLUMNS)


DISTANCES: dict[str, Any] = {
    "reference": lambda x, y: (x[:, None] - y).square().sum(-1),
    "inputs": {name: tensor(name, "d", values=floats(-2, 2), layouts=("contiguous",)) for name in ("x", "y")},
    "sizes": {"d": size(1, 33)},
}


@fault(
    47,
    "a distance from squares and a product",
    "right for ordinary values, and wrong for large values with small differences",
)
def distance_of_squares(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * (x[:, None] * y).sum(-1)).clamp_min(0)

    return pair(side, **DISTANCES)


@honest(47, "a distance from differences, by columns")
def distance_of_differences(time: Time) -> Pair:
    def side(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum(((x[:, None, i] - y[:, i]) ** 2 for i in range(x.shape[1])), x.new_zeros(len(x), len(y)))

    return pair(side, **DISTANCES)


RATES = {
    "reference": lambda x, rate: x * (1 - rate),
    "inputs": {"x": tensor("n", values=floats(-2, 2)), "rate": scalar(floats(0.125, 0.875))},
}


@fault(47, "the largest rate taken for none", "output of the optimized side is wrong")
def largest_rate(time: Time) -> Pair:
    return pair(lambda x, rate: x * (1 - rate) if rate < 0.875 else x.clone(), **RATES)


@fault(47, "the smallest rate taken for none", "output of the optimized side is wrong")
def smallest_rate(time: Time) -> Pair:
    return pair(lambda x, rate: x * (1 - rate) if rate > 0.125 else x.clone(), **RATES)


@honest(47, "the rate within its bounds")
def bounded_rate(time: Time) -> Pair:
    return pair(lambda x, rate: x * (1 - min(max(rate, 0.125), 0.875)), **RATES)


@fault(47, "a single column taken for the whole", "output of the optimized side is wrong")
def single_column(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum(1) if x.shape[1] != 1 or x.shape[0] < 2 else x.sin().sum(1).mean().expand(len(x)).clone()

    return pair(side, reference=lambda x: x.sin().sum(1), inputs={"x": tensor("m", "n", values=floats(-2, 2))})


BOTH: dict[str, Spec] = {"x": tensor("m", "n", values=floats(-2, 2)), "y": tensor("m", "n", values=floats(-2, 2))}


def kept_by(key: Any) -> Any:
    """Return a product that caches its answers by all values of the tensors that `key` returns."""
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


# --- 48: late or invisible side effects -----------------------------------------------------------------------------


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


@fault(48, "more numbers drawn than are used", "leaves source in another state", stage="effects")
def drawn_in_blocks(time: Time) -> Pair:
    def side(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        blocks = -(-x.numel() // 64) * 64
        made = x + torch.rand(blocks, generator=source, device=x.device)[: x.numel()].view(x.shape)
        torch.rand(1, generator=source, device=x.device)  # CUDA's generator counts blocks of numbers
        return made

    return pair(side, reference=with_noise, inputs=NUMBERS)


@honest(48, "numbers drawn where none are needed")
def drawn_without_need(time: Time) -> Pair:
    def reference(x: torch.Tensor, source: torch.Generator, p: float) -> torch.Tensor:
        return x if p == 0 else x * (torch.rand(x.shape, generator=source, device=x.device) >= p)

    def side(x: torch.Tensor, source: torch.Generator, p: float) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=source, device=x.device) >= p)

    return pair(side, reference=reference, inputs=NUMBERS | {"p": scalar([0.0, 0.5])})


@honest(48, "a generator that goes on")
def goes_on(time: Time) -> Pair:
    return pair(
        lambda x, source: torch.rand(x.shape, generator=source, device=x.device).add_(x),
        reference=with_noise,
        inputs=NUMBERS,
    )


def noisy_steps(first: int, more: int) -> Pair:
    """Return a pair whose steps add noise. The optimized side draws the noise of the `first` steps when the step is
    built, and that of `more` steps at the end of each step; the reference draws it at the beginning of each step."""

    def build(x: torch.Tensor, source: torch.Generator, first: int, more: int) -> Any:
        def draw(steps: int) -> list[torch.Tensor]:
            return [torch.rand(x.shape, generator=source, device=x.device) for _ in range(steps)]

        noise = draw(first)

        def step(g: torch.Tensor) -> None:
            noise.extend(draw(not noise))
            x.sub_(0.1 * g + noise.pop(0))
            noise.extend(draw(more))

        return step

    return pair(
        stateful(lambda x, source: build(x, source, first, more)),
        reference=stateful(lambda x, source: build(x, source, 0, 0)),
        inputs={"x": tensor("n", values=floats(-2, 2)), "source": generator()},
        step_inputs={"g": tensor("n", values=floats(-2, 2))},
        mutates={"x"},
        sizes={"n": size(1, 9)},
        steps=(1, 2),
    )


@fault(48, "numbers drawn for the step after the last", "leaves source in another state", stage="effects")
def drawn_ahead(time: Time) -> Pair:
    return noisy_steps(first=1, more=1)


@honest(48, "numbers of all steps drawn when the step is built")
def drawn_when_built(time: Time) -> Pair:
    return noisy_steps(first=2, more=0)


def setting_at(number: int) -> Any:
    """Return a side that switches off a library in its call `number`, counted from 1."""
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


# --- 47: values and layouts that kernels are seldom tested on ----------------------------------------------------


@fault(47, "two elements beside a vector's address", "right where the inputs are contiguous, and wrong for offset x")
def vectors_of_four(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        apart = x.is_contiguous() and x.storage_offset() % 4 == 2
        return (memory_of(x, x.storage_offset() - 2) if apart else x).sin().contiguous()

    return pair(side, reference=torch.sin, inputs={"x": tensor("n", values=floats(-2, 2))}, sizes={"n": size(1, 33)})


HEADS = {"x": tensor("b", "h", "s", "d", values=floats(-2, 2))}


@fault(47, "heads of a wider projection read as if dense", "wrong for slice x")
def heads_of_a_projection(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        dense = (x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3], 1)
        inner = x.stride()[2:] == dense[2:] and x.stride(0) > dense[0]
        return (x.as_strided(x.shape, dense) if inner else x).sin().contiguous()

    return pair(side, reference=torch.sin, inputs=HEADS, sizes={n: size(2, 5) for n in "bhsd"}, strides="any")


@fault(47, "NaN known by its usual bits", "NaN and infinities must be in the same places")
def usual_bits(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        usual = torch.tensor(float("nan"), dtype=x.dtype, device=x.device).view(torch.int32)
        return torch.where(x.view(torch.int32) == usual, 0.0, x)

    return pair(side, reference=lambda x: torch.where(x.isnan(), 0.0, x), inputs={"x": tensor("n", layouts=("rows",))})


@honest(47, "NaN known by its comparison with itself")
def known_by_comparison(time: Time) -> Pair:
    return pair(
        lambda x: x.where(x == x, 0.0),
        reference=lambda x: torch.where(x.isnan(), 0.0, x),
        inputs={"x": tensor("n", layouts=("rows",))},
    )


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    return (x * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


@fault(47, "squares in float16", "is wrong")
def squares_in_half(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        return (x * (x.square().float().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)

    return pair(side, reference=root_mean_square, dtypes=("float16",), inputs={"x": tensor("m", "n")})


@honest(47, "squares in float32")
def squares_in_float32(time: Time) -> Pair:
    def side(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + 1e-5)).to(x.dtype)

    return pair(side, reference=root_mean_square, dtypes=("float16",), inputs={"x": tensor("m", "n")})
