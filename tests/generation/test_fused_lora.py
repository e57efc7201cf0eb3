import math

import pytest
import torch
from scale import draws

from optimized.dropout_masks import packed
from optimized.generation import fused_lora as module
from optimized.generation.fused_lora import fused_lora as optimized
from optimized.generation.fused_lora import fused_lora_narrow, fused_lora_torch, fused_lora_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, sampled, scalar, side, size, tensor
from reference.generation.fused_lora import fused_lora as reference


def arithmetic(tokens, inputs, outputs, rank, direction):
    """Count operations: the frozen product once per direction, the low-rank ones once forward and twice backward."""
    frozen, low = 2 * tokens * inputs * outputs, 2 * tokens * rank * (inputs + outputs)
    return {"forward": frozen + low, "backward": frozen + 2 * low, "both": 2 * frozen + 3 * low}[direction]


COST = Cost(flops=arithmetic, precision="float32")
RIVALS = {
    "compile": compiled(side(reference, devices=("cuda",))),
    "product_kernel": side(fused_lora_triton, devices=("cuda",), available=triton_reason),
}
VARIANTS = {
    "torch": fused_lora_torch,
    "narrow": side(fused_lora_narrow, available=triton_reason),
    "triton": side(fused_lora_triton, available=triton_reason),
}
# The layers of Llama 8B: queries and outputs of attention, keys and values, the FFN's two.
LAYERS = {"q": (4096, 4096), "k": (4096, 1024), "up": (4096, 14336), "down": (14336, 4096)}
HALF = {"rank": 16, "dtype": "bfloat16", "direction": "both", "device": "cuda", "scale": 2.0}
CPU = {"tokens": 128, "inputs": 64, "outputs": 96, "rank": 4, "scale": 2.0, "clock": "wall", "device": "cpu"}
SIZES = {"tokens": size(0, 40), "inputs": size(0, 48), "outputs": size(0, 40), "rank": size(1, 18)}


def of_layer(name):
    inputs, outputs = LAYERS[name]
    return {"inputs": inputs, "outputs": outputs, **HALF}


def mask(generator, shape, dtype):
    """Draw a mask of half of the elements; for a small tensor sometimes of all or none."""
    count = math.prod(shape)
    which = int(torch.randint(8, (), generator=generator))
    if count < 1 << 12 and which < 2:
        return torch.full(shape, which == 0, dtype=dtype)
    # One random number serves eight elements, because real sizes are drawn often.
    numbers = torch.randint(-(2**62), 2**62, (count // 8 + 1,), generator=generator)
    return (numbers.view(torch.uint8)[:count].view(shape) & 1).to(dtype)


INPUTS = {
    "x": tensor("tokens", "inputs"),
    "weight": tensor("outputs", "inputs", values=floats(-2, 2), differentiable=False),
    "a": tensor("rank", "inputs", values=floats(-2, 2)),
    "b": tensor("outputs", "rank", values=floats(-2, 2)),
    "scale": scalar(floats(0.25, 4)),
}

fused_lora = Pair(
    dtypes=("float32", "bfloat16"),
    reference=reference,
    optimized=optimized,
    inputs={
        **INPUTS,
        "kept": tensor("tokens", "inputs", dtype="bool", values=sampled(mask)),
        "keep": scalar(floats(0.5, 1)),
    },
    sizes=SIZES,
    max_examples=draws(cpu=7, otherwise=24),
    rivals=RIVALS,
    variants=VARIANTS,
    workloads=[
        # The other layers' sizes compile the same kernels; each takes seconds here.
        *(
            Workload(f"{name}_{tokens}", tokens=tokens, **of_layer(name), keep=0.95)
            for name, tokens in (("q", 8192), ("up", 8192), ("down", 8192), ("q", 1024))
        ),
        Workload("cpu", **CPU, keep=0.95, direction="both"),
    ],
    cost=COST,
)


def all_kept(x, weight, a, b, scale):
    """Apply the layer with a dropout that drops nothing."""
    return fused_lora_narrow(x, weight, a, b, scale, torch.ones(x.shape, dtype=torch.bool, device=x.device), 1.0)


fused_lora_without_dropout = Pair(
    dtypes=("float32", "float16"),
    reference=reference,
    optimized=optimized,
    inputs=INPUTS,
    sizes=SIZES,
    max_examples=draws(cpu=6, otherwise=16),
    rivals=RIVALS,
    variants={**VARIANTS, "all_kept": side(all_kept, available=triton_reason)},
    workloads=[
        Workload("q_1024", tokens=1024, **of_layer("q")),
        Workload("cpu", **CPU, direction="both"),
    ],
    cost=COST,
)

KERNELS = [pytest.param(call, marks=pytest.mark.interpreted) for call in (fused_lora_narrow, fused_lora_triton)]
SIDES = [optimized, fused_lora_torch, *KERNELS]


def drawn(tokens=9, inputs=20, outputs=12, rank=3, kept=True):
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, inputs), (outputs, inputs), (rank, inputs), (outputs, rank)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return *tensors, 1.5, torch.rand(tokens, inputs, generator=generator) < 0.7 if kept else None, 0.7 if kept else 1.0


def differentiated(call, x, weight, a, b, *rest):
    """Return the output and the gradients of x, a and b."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, a, b)]
    y = call(leaves[0], weight, *leaves[1:], *rest)
    factors = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, factors)]


def assert_equal_to_reference(call, *arguments):
    for own, other in zip(differentiated(call, *arguments), differentiated(reference, *arguments), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


@pytest.fixture
def small_tiles(monkeypatch):
    """Set tiles of 16 rows and columns, and few programs, so that some process several tiles."""
    monkeypatch.setattr(module, "DOWN_CONFIGS", ((32, 16, 16, 4, 3), (None, 32, 16, 4, 3)))
    for name in ("ACROSS_CONFIG", "INTO_CONFIG"):
        monkeypatch.setattr(module, name, (16, 16, 4, 3))
    for name in ("PRODUCT_ROWS", "PRODUCT_COLUMNS", "PRODUCT_TERMS"):
        monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(module, "PROGRAMS", 4)
    monkeypatch.setattr(module, "PRODUCT_GROUP", 2)


@pytest.mark.parametrize("call", [reference, *SIDES])
def test_known_values(call):
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    a, b = torch.tensor([[5.0, 7.0]]), torch.tensor([[0.5]])
    assert call(x, weight, a, b, 2.0).tolist() == [[3 + 8 + 2 * 0.5 * (5 + 14)]]
    assert call(x, weight, a, b, 2.0, torch.tensor([[False, True]]), 0.5).tolist() == [[3 + 8 + 2 * 0.5 * 14 / 0.5]]


@pytest.mark.interpreted
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("call", [fused_lora_narrow, fused_lora_triton])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "rank"),
    [(1, 4, 4, 1), (16, 16, 16, 16), (17, 20, 36, 17), (80, 44, 32, 5), (33, 21, 19, 3), (15, 28, 12, 40)],
)
def test_kernels_match_the_reference_at_tile_edges(tokens, inputs, outputs, rank, kept, call, small_tiles, fences):
    assert_equal_to_reference(call, *drawn(tokens, inputs, outputs, rank, kept))
    assert fences.intact()


@pytest.mark.interpreted
def test_product_kernel_is_used_only_for_rows_aligned_to_16_bytes(monkeypatch):
    made = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *args, **options: made.append(None) or product(*args, **options))
    for inputs, outputs, expected in ((20, 12, 2), (21, 12, 0), (20, 13, 0)):
        made.clear()
        differentiated(fused_lora_triton, *drawn(inputs=inputs, outputs=outputs))
        assert len(made) == expected
    x, *rest = drawn()
    shifted = torch.cat((torch.zeros(1), x.flatten()))[1:].view(x.shape)
    fused_lora_triton(shifted, *rest)
    assert len(made) == 0


@pytest.mark.parametrize("call", SIDES)
def test_uint8_mask_gives_the_same_result_as_a_bool_mask(call):
    *tensors, scale, kept, keep = drawn()
    found = differentiated(call, *tensors, scale, kept, keep)
    for own, other in zip(found, differentiated(call, *tensors, scale, kept.to(torch.uint8), keep), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("at", [(0, 3), (4, 0), (8, 0)])
def test_dropped_infinity_gives_the_same_result_as_the_reference(call, at):
    """Dropout multiplies a dropped infinity by 0, which gives NaN, but only in the row of the infinity."""
    x, weight, a, b, scale, kept, keep = drawn()
    x[at], kept[at] = math.inf, False
    for own, other in zip(
        differentiated(call, x, weight, a, b, scale, kept, keep),
        differentiated(reference, x, weight, a, b, scale, kept, keep),
        strict=True,
    ):
        torch.testing.assert_close(own, other, equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("call", SIDES)
def test_nan_in_the_incoming_gradient_stays_in_its_row(call):
    arguments = drawn()
    x, weight, *rest = arguments
    dy = torch.ones(9, 12)
    dy[4, 0] = math.nan
    found = []
    for each in (call, reference):
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(each(leaf, weight, *rest), leaf, dy)
    assert found[0].isnan().any(1).tolist() == [row == 4 for row in range(9)]
    torch.testing.assert_close(*found, equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("kept", [False, True])
def test_backward_saves_only_h_and_packed_bits_besides_the_inputs(call, kept):
    saved = []
    x, weight, a, b, *rest = drawn(kept=kept)
    leaves = [t.requires_grad_() for t in (x, a, b)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(x, weight, a, b, *rest)
    own = [t for t in saved if all(t.data_ptr() != known.data_ptr() for known in (*leaves, weight))]
    expected = [((9, 3), torch.float32), *([((9, 3), torch.uint8)] if kept else [])]
    assert [(tuple(t.shape), t.dtype) for t in own] == expected


@pytest.mark.interpreted
@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("inputs", [1, 20])
def test_packed_bits_give_the_same_result_as_the_mask(call, inputs):
    *tensors, scale, kept, keep = drawn(inputs=inputs)
    bits = packed(kept)
    for own, other in zip(
        differentiated(call, *tensors, scale, bits, keep),
        differentiated(call, *tensors, scale, kept, keep),
        strict=True,
    ):
        assert torch.equal(own, other)


@pytest.mark.interpreted
def test_inputs_are_divided_among_programs_if_tokens_are_few(monkeypatch):
    launched = []
    monkeypatch.setattr(module, "_total", lambda parts, dtype: launched.append(len(parts)) or parts.sum(0).to(dtype))
    monkeypatch.setattr(module, "DOWN_CONFIGS", ((None, 16, 16, 4, 3),))
    monkeypatch.setattr(module, "PROGRAMS", 10)
    for tokens, inputs, parts in ((16, 16, 1), (16, 64, 1), (16, 130, 2), (16, 640, 10), (96, 640, 1)):
        x, _, a, *_ = drawn(tokens=tokens, inputs=inputs)
        torch.testing.assert_close(module._down_triton(x, a, 2.0, None), 2 * x @ a.T, atol=1e-4, rtol=1e-4)
        assert launched.pop() == parts


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("which", [0, 2, 3])
def test_gradient_requested_alone_equals_the_jointly_requested_one(call, which):
    arguments = drawn()
    expected = differentiated(call, *arguments)[{0: 1, 2: 2, 3: 3}[which]]
    wanted = arguments[which].requires_grad_()
    y = call(*arguments)
    (found,) = torch.autograd.grad(y, wanted, torch.linspace(-1, 2, y.numel()).view(y.shape))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("call", [reference, *SIDES])
def test_weight_gets_no_gradient(call):
    x, weight, *rest = drawn()
    weight.requires_grad_()
    call(x.requires_grad_(), weight, *rest).sum().backward()
    assert weight.grad is None


@pytest.mark.parametrize("call", [optimized, fused_lora_torch])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_accurate_than_the_reference(call, dtype):
    x, weight, a, b, *rest = drawn(tokens=40, inputs=200, outputs=64, rank=16)
    half = [t.to(dtype) for t in (x, weight, a, b)]
    truth = differentiated(reference, *(t.double() for t in half), *rest)
    for own, other, true in zip(
        differentiated(call, *half, *rest), differentiated(reference, *half, *rest), truth, strict=True
    ):
        assert own.dtype == dtype
        assert (own.double() - true).norm() <= 1.1 * (other.double() - true).norm()


@pytest.mark.parametrize("call", SIDES)
def test_second_derivative_is_refused(call):
    x, *rest = drawn()
    y = call(x.requires_grad_(), *rest)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("tokens", "columns", "each", "grid"),
    [
        (1, 1, 1, (1, 1)),
        (8192, 4096, 8, (16, 16)),
        (1024, 4096, 1, (16, 16)),
        (8192, 14336, 32, (4, 56)),
        (100, 10**6, 2, (1, 3907)),
    ],
)
def test_tiling_returns_tiles_per_program_and_the_grid(tokens, columns, each, grid):
    assert module._tiling(tokens, columns, (64, 256)) == (each, grid)
