import math
from types import SimpleNamespace

import pytest
import torch
from scale import draws
from torch.nn import functional

from optimized.convolution import conv_relu_pool as module
from optimized.convolution.conv_relu_pool import conv_relu_pool as optimized
from optimized.convolution.conv_relu_pool import conv_relu_pool_triton, conv_relu_pool_vectorised
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, tensor
from reference.convolution.conv_relu_pool import conv_relu_pool as reference
from suite.leak_cnn.costs import BATCH
from suite.leak_cnn.trial import write_over

# Bound on the rounding error of a float32 sum, relative to the sum of its terms' magnitudes.
ROUNDING = 64 * torch.finfo(torch.float32).eps


def near_thresholds(x, weight, bias):
    """Return a mask [N, K, H // 2, W] of outputs where two rows nearly tie, or where the larger is nearly 0."""

    def convolved(x, weight, bias):
        return functional.conv2d(x, weight, bias, padding=1)

    rows = x.shape[2] // 2
    # A value that is not finite ties with nothing, and would make its neighbours' scale infinite.
    x, weight, bias = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (x, weight, bias))
    pre = convolved(x, weight, bias)[:, :, : 2 * rows].unflatten(2, (rows, 2))
    scale = convolved(x.abs(), weight.abs(), bias.abs())[:, :, : 2 * rows].unflatten(2, (rows, 2)).amax(3)
    top, gap = pre.amax(3), (pre[:, :, :, 0] - pre[:, :, :, 1]).abs()
    return (top.abs() <= ROUNDING * scale) | ((gap <= ROUNDING * scale) & (top > -ROUNDING * scale))


def near_a_threshold(x, weight, bias):
    """Return masks of the gradients that rounding may send to another element."""
    near = near_thresholds(x, weight, bias)
    rows = x.shape[2] // 2
    seen = near.any(1, keepdim=True).double().repeat_interleave(2, dim=2)
    seen = functional.pad(seen, (0, 0, 0, x.shape[2] - 2 * rows))
    of_output = near.any(3).any(2).any(0)
    return {
        "gradient of x": functional.max_pool2d(seen, 3, stride=1, padding=1) > 0,
        "gradient of weight": of_output[:, None, None, None],
        "gradient of bias": of_output,
    }


def off_thresholds(x, weight, bias):
    """Overwrite the items whose gradient may jump with items whose gradient cannot."""
    write_over(x, near_thresholds(x.double(), weight.double(), bias.double()).flatten(1).any(1))


def traffic(N, C, K, H, W, direction):
    x, weight, y = N * C * H * W, K * C * 9 + K, N * K * (H // 2) * W
    forward = 4 * (x + weight + y)
    # One byte for each pooled value records where its gradient goes.
    backward = 4 * (2 * x + 2 * weight + y) + y
    return {"forward": forward, "backward": backward, "both": forward + y + backward}[direction]


def arithmetic(N, C, K, H, W, direction):
    """Count the operations.

    If W is 1, only three of the nine taps count. Only one of two pooled rows has a gradient, but which one depends on
    the data.
    """
    forward = 2 * N * H * W * K * C * (3 if W == 1 else 9)
    return forward * {"forward": 1, "backward": 2, "both": 3}[direction]


# The two pooled convolutions of leak_cnn, at its batch size.
SECOND = {"N": BATCH, "C": 32, "K": 64, "H": 32, "W": 1, "device": "cuda"}
THIRD = {"N": BATCH, "C": 64, "K": 128, "H": 16, "W": 1, "device": "cuda"}

conv_relu_pool = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "x": tensor("N", "C", "H", "W"),
        # An outer weight that is not finite would only be multiplied by padding.
        "weight": tensor("K", "C", 3, 3, values=floats(nonfinite=False)),
        "bias": tensor("K", values=floats(nonfinite=False)),
    },
    # The kernels run in Triton's interpreter, which takes tens of milliseconds per program. Sizes still exceed the
    # tiles: 64 positions, 64 and 32 channels.
    sizes={"N": size(1, 9), "C": size(1, 34), "K": size(1, 66), "H": size(2, 18), "W": size(1, 2)},
    max_examples=draws(cpu=7),
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "compile_vectorised": compiled(side(conv_relu_pool_vectorised, devices=("cuda",))),
    },
    variants={
        "triton": side(conv_relu_pool_triton, available=triton_reason),
        "vectorised": conv_relu_pool_vectorised,
    },
    workloads=[
        Workload("conv2", **SECOND, launches=2),
        Workload("conv2_both", **SECOND, direction="both", speedup=1.5),
        Workload("conv3", **THIRD, launches=2),
        Workload("conv3_both", **THIRD, direction="both", speedup=1.5),
        Workload("cpu", N=8, C=32, K=64, H=32, W=1, clock="wall", direction="both", device="cpu"),
    ],
    adjust=off_thresholds,
    excuse=near_a_threshold,
    # Tensor cores reach float32's accuracy with up to three products, faster than float32 units do with one.
    cost=Cost(bytes=traffic, flops=arithmetic, precision="tf32"),
)

SIDES = [reference, optimized, conv_relu_pool_vectorised]
if triton_reason() is None and not torch.cuda.is_available():
    SIDES.append(conv_relu_pool_triton)


def drawn(N=2, C=3, K=4, H=6, W=1, dtype=torch.float32, coarse=False):
    """Draw x, weight and bias; if `coarse`, as small whole numbers, so that sums are exact and ties frequent."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, C, H, W), (K, C, 3, 3), (K,))
    if coarse:
        return [torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def differentiated(call, arguments, coarse=False):
    """Return the output, then the gradients of x, weight and bias."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in arguments]
    y = call(*leaves)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randint(-2, 3, y.shape, generator=generator) if coarse else torch.randn(y.shape, generator=generator)
    y.backward(grad.to(y))
    return [y.detach(), *(t.grad for t in leaves)]


def column(values):
    """Return a column as x, a weight that passes it on unchanged, and a bias of 0."""
    weight = torch.zeros(1, 1, 3, 3)
    weight[0, 0, 1, 1] = 1.0
    return [torch.tensor(values)[None, None, :, None], weight, torch.zeros(1)]


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    x = torch.tensor([1.0, 2.0, -3.0, 4.0])[None, None, :, None]
    weight = torch.full((1, 1, 3, 3), 7.0)
    weight[0, 0, :, 1] = torch.tensor([10.0, 1.0, 100.0])  # for the row above, the row itself, the row below
    # 0 + 1 + 200, 10 + 2 - 300; 20 - 3 + 400, -30 + 4 + 0
    assert call(x, weight, torch.tensor([0.5])).flatten().tolist() == [201.5, 417.5]
    assert call(-x, weight, torch.tensor([0.5])).flatten().tolist() == [288.5, 26.5]


@pytest.mark.parametrize("call", SIDES)
def test_last_odd_row_is_convolved_but_not_pooled(call):
    x, weight, bias = column([1.0, 2.0, 3.0])
    weight[0, 0, 2, 1] = 1.0
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    y = call(x, weight, bias)
    y.backward(torch.full_like(y, 2.0))
    assert y.item() == 5.0
    assert x.grad.flatten().tolist() == [0.0, 2.0, 2.0]
    assert weight.grad.tolist() == [[[[0.0, 2.0, 0.0], [0.0, 4.0, 0.0], [0.0, 6.0, 0.0]]]]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(
    ("rows", "out", "taken"),
    [
        ([2.0, 1.0], 2.0, [1.0, 0.0]),
        ([1.0, 2.0], 2.0, [0.0, 1.0]),
        ([3.0, 3.0], 3.0, [1.0, 0.0]),  # the first of equal rows
        ([0.0, 0.0], 0.0, [0.0, 0.0]),  # no gradient flows at 0
        ([0.0, -1.0], 0.0, [0.0, 0.0]),
        ([-2.0, -1.0], 0.0, [0.0, 0.0]),
        ([-1.0, 5.0], 5.0, [0.0, 1.0]),
    ],
)
def test_gradient_goes_to_the_first_largest_positive_row(call, rows, out, taken):
    x, weight, bias = (t.requires_grad_() for t in column(rows))
    y = call(x, weight, bias)
    y.sum().backward()
    assert y.item() == out
    assert x.grad.flatten().tolist() == taken
    assert bias.grad.item() == sum(taken)


@pytest.mark.parametrize("call", SIDES[1:])
@pytest.mark.parametrize(
    "rows", [[math.nan, 1.0, 2.0, 3.0], [1.0, math.inf, 2.0, -1.0], [-math.inf, -1.0, 1.0, math.nan]]
)
def test_nonfinite_rows_give_the_same_results_as_the_reference(call, rows):
    x, weight, bias = column(rows)
    weight[0, 0, :, 1] = torch.tensor([0.5, 1.0, -0.25])
    for got, expected in zip(
        differentiated(call, [x, weight, bias]), differentiated(reference, [x, weight, bias]), strict=True
    ):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("call", SIDES[1:])
@pytest.mark.parametrize("H", [5, 6, 10])
def test_infinite_last_row_gives_the_same_gradients_as_the_reference(call, H):
    x, weight, bias = column([1.0] * (H - 1) + [math.inf])
    weight[0, 0, :, 1] = torch.tensor([-1.0, 1.0, -1.0])
    for got, expected in zip(
        differentiated(call, [x, weight, bias]), differentiated(reference, [x, weight, bias]), strict=True
    ):
        torch.testing.assert_close(got, expected, equal_nan=True)


# The interpreter multiplies the bits of bfloat16 numbers, not their values.
PRECISIONS = [
    (call, dtype)
    for call in SIDES[1:]
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if call is not conv_relu_pool_triton or dtype is not torch.bfloat16
]


@pytest.mark.parametrize(("call", "dtype"), PRECISIONS)
@pytest.mark.parametrize("sizes", [(2, 3, 4, 6, 1), (5, 17, 33, 7, 1), (3, 2, 3, 2, 1), (2, 3, 4, 6, 2)])
def test_ties_and_zeros_match_the_reference(call, dtype, sizes):
    check_ties(call, dtype, sizes, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 6, 1), (5, 17, 33, 7, 1), (9, 64, 128, 16, 1)])
def test_ties_and_zeros_match_the_reference_on_a_gpu(dtype, sizes):
    check_ties(conv_relu_pool_triton, dtype, sizes, "cuda")


def check_ties(call, dtype, sizes, device):
    # The numbers are small integers: every sum is exact in float32, and all sides round it alike.
    arguments = [t.to(device) for t in drawn(*sizes, dtype=dtype, coarse=True)]
    # The truth is computed in float64 on the CPU: cuDNN may transform the operands, which makes sums inexact.
    exact = [t.detach().cpu().double() for t in arguments]
    got, expected = differentiated(call, arguments, True), differentiated(reference, exact, True)
    assert (expected[0] == 0).any()
    for name, a, b in zip(("output", "x", "weight", "bias"), got, expected, strict=True):
        assert a.dtype == dtype, name
        assert torch.equal(a.cpu(), b.to(dtype)), name


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("sizes", [{"N": 0}, {"N": 1, "C": 1, "K": 1, "H": 2}, {"H": 3}])
def test_edge_sizes_match_the_reference(call, sizes):
    arguments = drawn(**sizes)
    for got, expected in zip(differentiated(call, arguments), differentiated(reference, arguments), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("W", [1, 3])
def test_pooling_a_single_row_raises_runtime_error(call, W):
    with pytest.raises(RuntimeError):
        call(*drawn(H=1, W=W))


@pytest.mark.parametrize("call", SIDES)
def test_channels_last_layout_is_preserved(call):
    x, weight, bias = drawn()
    x = x.contiguous(memory_format=torch.channels_last)
    got, expected = differentiated(call, [x, weight, bias]), differentiated(reference, [x, weight, bias])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    assert got[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.interpreted
def test_splits_of_several_tiles_match_the_reference(monkeypatch):
    monkeypatch.setattr(module, "WEIGHT_PROGRAMS", 2)
    arguments = drawn(N=20, C=3, K=5, H=20)
    got, expected = differentiated(conv_relu_pool_triton, arguments), differentiated(reference, arguments)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (5, 3, 65, 7), (3, 33, 2, 20), (1, 2, 2, 140)])
def test_the_kernels_write_within_their_outputs(sizes, fences):
    differentiated(conv_relu_pool_triton, drawn(*sizes))
    assert fences.intact()


@pytest.mark.interpreted
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_each_gradient_can_be_requested_alone(wanted):
    arguments, expected = drawn(), differentiated(reference, drawn())
    for t, needed in zip(arguments, wanted, strict=True):
        t.requires_grad_(needed)
    y = conv_relu_pool_triton(*arguments)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    for t, needed, true in zip(arguments, wanted, expected[1:], strict=True):
        assert (t.grad is not None) == needed
        if needed:
            torch.testing.assert_close(t.grad, true)


@pytest.mark.interpreted
@pytest.mark.parametrize("recording", [True, False])
def test_taken_rows_are_recorded_only_if_gradients_are_recorded(recording, monkeypatch):
    made, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: made.append(k["dtype"]) or empty_like(*a, **k))
    arguments = [t.requires_grad_() for t in drawn()]
    with torch.set_grad_enabled(recording):
        y = conv_relu_pool_triton(*arguments)
    assert made == ([torch.uint8] if recording else [])
    torch.testing.assert_close(y, reference(*arguments))


@pytest.mark.interpreted
def test_the_kernels_refuse_a_second_derivative():
    x, weight, bias = (t.requires_grad_() for t in drawn())
    (first,) = torch.autograd.grad(conv_relu_pool_triton(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_kernels_are_used_on_a_gpu_if_all_inputs_have_the_same_dtype(gpu, mixed, monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda *tensors, dtypes: gpu)
    monkeypatch.setattr(module, "conv_relu_pool_triton", lambda *arguments: "kernels")
    monkeypatch.setattr(module, "conv_relu_pool_vectorised", lambda *arguments: "vectorised")
    x, weight, bias = drawn()
    assert optimized(x, weight.bfloat16() if mixed else weight, bias) == (
        "kernels" if gpu and not mixed else "vectorised"
    )


@pytest.mark.parametrize("call", [reference, optimized])
def test_autocast_output_is_bfloat16_except_for_float64_inputs(call):
    x, weight, bias = drawn(coarse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(x, weight, bias)
        in_double = call(x.double(), weight.double(), bias.double())
    assert y.dtype is torch.bfloat16
    assert torch.equal(y.float(), reference(x, weight, bias))
    assert in_double.dtype is torch.float64


@pytest.mark.parametrize("allowed", [True, False])
def test_precision_is_tf32_only_on_cuda_if_cudnn_allows_it(allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    assert module._precision(SimpleNamespace(is_cuda=True)) == ("tf32" if allowed else "tf32x3")
    assert module._precision(SimpleNamespace(is_cuda=False)) == "tf32x3"


@pytest.mark.parametrize(
    ("tile", "N", "rows", "expected"),
    [(64, 1, 1, (1, 64, 1)), (64, 5632, 16, (16, 4, 1408)), (64, 5, 9, (16, 4, 2)), (64, 3, 130, (64, 1, 9))],
)
def test_positions_cover_all_rows(tile, N, rows, expected):
    assert module._positions(tile, N, rows) == expected


@pytest.mark.parametrize("kernels", [module.FLOAT32, module.HALF])
def test_tiles_and_warps_are_powers_of_two(kernels):
    """A GPU requires powers of two at every size; the interpreter requires them only of tiles that are used whole."""
    for tiles in kernels:
        assert all(n == module._power(n) for n in (tiles.positions, tiles.outputs, tiles.inputs, tiles.num_warps))
