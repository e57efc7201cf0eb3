import functools
import math

import pytest
import torch
from scale import FULLY, count, draws

from optimized.compilation.compiled_function import compile_quietly
from optimized.kernels import triton_reason
from optimized.recurrence import eigenstate_scan as module
from optimized.recurrence.eigenstate_scan import eigenstate_scan as optimized
from optimized.recurrence.eigenstate_scan import eigenstate_scan_chunked, eigenstate_scan_triton
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, tensor
from reference.recurrence.eigenstate_scan import eigenstate_scan as reference
from suite.eigenstate_lm.chunked_scan import LENGTH, chunked_scan

LARGEST = 1 - 2.0**-20


def within_the_circle(beta, eigenvalues, state):
    """Scale eigenvalues beyond |λ| = 1 − 2⁻²⁰ back to that length."""
    length = eigenvalues.double().norm(dim=-1, keepdim=True)
    eigenvalues.copy_(eigenvalues * (LARGEST / length.clamp(min=LARGEST)))


def by_fft(beta, eigenvalues, state):
    """Compute the scan as a convolution with the powers of λ, by FFT."""
    T = beta.shape[1]
    if not beta.numel():
        return torch.empty_like(beta), state.clone()
    powers = torch.view_as_complex(eigenvalues.double())[None] ** torch.arange(T + 1, device=beta.device)[:, None]
    weights = torch.fft.rfft(powers[:-1].real.to(beta.dtype), n=2 * T, dim=0)
    every = torch.fft.irfft(torch.fft.rfft(beta, n=2 * T, dim=1) * weights, n=2 * T, dim=1)[:, :T]
    begin = torch.view_as_complex(state)
    powers = powers.to(begin.dtype)
    final = powers[-1] * begin + torch.einsum("btk,tk->bk", beta.to(begin.dtype), powers[:-1].flip(0))
    return every + (powers[1:] * begin[:, None]).real, torch.view_as_real(final)


def _combined(before, after):
    """Combine two ranges of steps; each is (λ to the power of its length, its result), both as (real, imaginary)."""
    a, a_turn, x, x_turn = before
    b, b_turn, y, y_turn = after
    added = b * x - b_turn * x_turn + y, b * x_turn + b_turn * x + y_turn
    return a * b - a_turn * b_turn, a * b_turn + a_turn * b, *added


def _scanned(eigenvalues, drive, turned, state):
    """Return c_t of every step as (real, imaginary), for a complex drive."""
    from torch._higher_order_ops.associative_scan import associative_scan

    over = torch.view_as_real(torch.view_as_complex(eigenvalues) * torch.view_as_complex(state))
    first = (torch.arange(drive.shape[1], device=drive.device) == 0)[:, None]
    drive, turned = (
        x + torch.where(first, o[:, None], 0.0) for x, o in zip((drive, turned), over.unbind(-1), strict=True)
    )
    factors = (e.expand_as(drive).contiguous() for e in eigenvalues.unbind(-1))
    return associative_scan(_combined, (*factors, drive, turned), dim=1, combine_mode="pointwise")[2:]


class _ByAssociativeScan(torch.autograd.Function):
    """Function whose backward uses the same scan, because PyTorch's backward goes step by step."""

    @staticmethod
    def forward(ctx, beta, eigenvalues, state):
        real, imaginary = _scans()(eigenvalues, beta, torch.zeros_like(beta), state)
        ctx.save_for_backward(eigenvalues, state, real, imaginary)
        return real.clone(), torch.stack((real[:, -1], imaginary[:, -1]), -1)

    @staticmethod
    def backward(ctx, grad, grad_final):
        eigenvalues, state, *states = ctx.saved_tensors
        conjugate = torch.stack((eigenvalues[:, 0], -eigenvalues[:, 1]), -1)
        own, turned = grad.flip(1), torch.zeros_like(grad)
        own[:, 0] += grad_final[..., 0]
        turned[:, 0] += grad_final[..., 1]
        reached = [r.flip(1) for r in _scans()(conjugate, own, turned, torch.zeros_like(state))]
        before = [torch.cat((s[:, None], c[:, :-1]), 1) for s, c in zip(state.unbind(-1), states, strict=True)]
        slope = reached[0] * before[0] + reached[1] * before[1], reached[1] * before[0] - reached[0] * before[1]
        first = torch.view_as_complex(torch.stack([r[:, 0] for r in reached], -1))
        d_state = torch.view_as_real(torch.view_as_complex(conjugate) * first)
        return reached[0], torch.stack([s.sum((0, 1)) for s in slope], -1), d_state


@functools.cache
def _scans():
    return compile_quietly(_scanned, dynamic=False)


def by_associative_scan(beta, eigenvalues, state):
    """Scan with PyTorch's associative scan, compiled."""
    return _ByAssociativeScan.apply(beta, eigenvalues, state)


def traffic(B, T, K, direction):
    """Count the bytes of all steps: forward beta and the result; backward beta, both gradients of these."""
    steps = {"forward": 8, "backward": 12, "both": 20}[direction]
    return steps * B * T * K + 16 * B * K + 8 * K


FINITE = floats(-3, 3, nonfinite=False)

eigenstate_scan = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        # A value that is not finite stays in the state, as infinity or NaN depending on the order of the sums.
        "beta": tensor("B", "T", "K", values=FINITE),
        "eigenvalues": tensor("K", 2, values=floats(-1, 1, nonfinite=False)),
        "state": tensor("B", "K", 2, values=FINITE),
    },
    # The kernels run in Triton's interpreter, which takes 0.1 s per program. Longer sequences are tested below.
    sizes={"B": size(1, 2), "T": size(0, 20), "K": size(1, 34)},
    max_examples=draws(cpu=7),
    adjust=within_the_circle,
    rivals={
        "compile_chunked": compiled(side(eigenstate_scan_chunked, devices=("cuda",))),
        "fft": side(by_fft, devices=("cuda",)),
        "associative_scan": side(by_associative_scan, devices=("cuda",)),
    },
    variants={
        "triton": side(eigenstate_scan_triton, available=triton_reason),
        "chunked": eigenstate_scan_chunked,
        "plain_chunks": chunked_scan,
    },
    # In "one" every size, and the number of groups, is 1, which Triton makes a constant.
    workloads=[
        Workload("small_32k", B=4, T=32768, K=256, direction="both", speedup=400, host_syncs=0, device="cuda"),
        Workload("cpu", B=1, T=1024, K=16, clock="wall", direction="both", device="cpu"),
        Workload("one", B=1, T=1, K=1, clock="wall", direction="both", device="cpu"),
    ],
    cost=Cost(bytes=traffic),
    # The loop takes 10 s per call.
    time_limit=900,
)

SIDES = [reference, eigenstate_scan_chunked, pytest.param(eigenstate_scan_triton, marks=pytest.mark.interpreted)]


def drawn(B, T, K, magnitude=LARGEST, seed=0):
    generator = torch.Generator().manual_seed(seed)
    phase = 2 * math.pi * torch.rand(K, generator=generator)
    eigenvalues = magnitude * torch.stack((phase.cos(), phase.sin()), -1)
    beta, state = (torch.randn(shape, generator=generator) for shape in ((B, T, K), (B, K, 2)))
    return [beta, eigenvalues, state]


def differentiated(call, arguments):
    """Return both results, then the gradients of beta, eigenvalues and state."""
    leaves = [t.detach().clone().requires_grad_() for t in arguments]
    results = call(*leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(r.shape, generator=generator).to(r) for r in results]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, grads)]


def assert_no_worse(call, arguments, factor=2.0):
    """Assert that the error of each result and gradient, in norm, is at most `factor` times that of the loop."""
    truth = differentiated(reference, [t.double() for t in arguments])
    for name, own, loop, exact in zip(
        ("every", "final", "beta", "eigenvalues", "state"),
        differentiated(call, arguments),
        differentiated(reference, arguments),
        truth,
        strict=True,
    ):
        allowed = factor * float((loop - exact).norm()) + 4 * torch.finfo(own.dtype).eps * float(exact.norm())
        assert float((own - exact).norm()) <= allowed, name


@pytest.mark.parametrize("call", SIDES)
def test_known_values(call):
    """With λ = i/2, an input of 1 becomes i/2, −1/4, −i/8 in the next steps."""
    beta = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 4, 1)
    every, final = call(beta, torch.tensor([[0.0, 0.5]]), torch.zeros(1, 1, 2))
    assert every.flatten().tolist() == [1.0, 0.0, -0.25, 0.0]
    assert final.flatten().tolist() == [0.0, -0.125]


@pytest.mark.parametrize("call", SIDES)
def test_scan_can_be_continued_from_its_final_state(call):
    beta, eigenvalues, state = drawn(2, 40, 3, magnitude=0.9)
    every, final = call(beta, eigenvalues, state)
    first, middle = call(beta[:, :17], eigenvalues, state)
    second, last = call(beta[:, 17:], eigenvalues, middle)
    torch.testing.assert_close(torch.cat((first, second), 1), every)
    torch.testing.assert_close(last, final)


@pytest.mark.parametrize("magnitude", [LARGEST, 0.5, 1e-3, 0.0])
@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_chunk_length_changes_only_rounding_errors(chunk, magnitude):
    def call(*arguments):
        return eigenstate_scan_chunked(*arguments, chunk=chunk)

    assert_no_worse(call, drawn(2, 300, 4, magnitude))


@pytest.mark.parametrize("magnitude", [LARGEST, 0.5, 1e-3])
@pytest.mark.parametrize("T", [1, LENGTH - 1, LENGTH, LENGTH + 1, 5 * LENGTH + 3])
def test_chunked_scan_changes_only_rounding_errors(T, magnitude):
    assert_no_worse(chunked_scan, drawn(2, T, 4, magnitude))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("T", "length", "chunks", "at_once"),
    [
        (1, 32, 32, 8),
        (26, 2, 2, 4),
        (24, 2, 2, 2),
        (23, 4, 1, 2),
        (count(quick=38, full=70), 8, 4, 8),
        (count(quick=20, full=52), 2, 2, 1),
    ],
    ids=["one step", "a group cut short", "whole groups", "groups of one chunk", "chunks cut short", "many groups"],
)
@pytest.mark.parametrize("magnitude", [LARGEST, pytest.param(0.4, marks=FULLY)])
def test_kernels_pass_the_state_from_group_to_group(T, length, chunks, at_once, magnitude, monkeypatch):
    monkeypatch.setattr(module, "LENGTH", length)
    monkeypatch.setattr(module, "CHUNKS", chunks)
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    monkeypatch.setattr(module, "STATES", 2)
    assert_no_worse(eigenstate_scan_triton, drawn(2, T, 3, magnitude))


@pytest.mark.interpreted
@pytest.mark.parametrize("bits", [module.UNWRITTEN, 0x7FBFDEAD, 0x7FC00000])
def test_nan_state_equal_to_the_unwritten_marker_does_not_block_the_kernel(bits, monkeypatch):
    monkeypatch.setattr(module, "LENGTH", 2)
    monkeypatch.setattr(module, "CHUNKS", 2)
    beta, eigenvalues, state = drawn(1, 12, 1)
    state = torch.tensor([bits], dtype=torch.int32).view(torch.float32).expand(1, 1, 2)
    every, final = eigenstate_scan_triton(beta, eigenvalues, state)
    assert every.isnan().all()
    assert final.isnan().all()


@pytest.mark.parametrize("call", SIDES)
def test_one_state_may_be_shared_by_all_sequences(call):
    beta, eigenvalues, state = drawn(3, 5, 2)
    every, final = call(beta, eigenvalues, state[:1])
    expected = call(beta, eigenvalues, state[:1].expand(3, 2, 2).contiguous())
    assert torch.equal(every, expected[0])
    assert torch.equal(final, expected[1])


def test_autocast_does_not_change_the_result():
    arguments = drawn(2, 100, 3, magnitude=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        found = eigenstate_scan_chunked(*arguments)
    for own, expected in zip(found, eigenstate_scan_chunked(*arguments), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("call", [eigenstate_scan_chunked])
def test_gradient_of_the_last_step_reaches_the_first_input(call):
    """Over 4096 steps with |λ| = 1 − 2⁻²⁰ the gradient is λ's power itself."""
    beta, eigenvalues, state = (t.requires_grad_() for t in drawn(1, 4096, 3))
    every, _ = call(beta, eigenvalues, state)
    (grad,) = torch.autograd.grad(every[0, -1].sum(), beta)
    power = torch.view_as_complex(eigenvalues.detach().double()) ** 4095
    torch.testing.assert_close(grad[0, 0].double(), power.real, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", SIDES)
def test_half_precision_beta_is_accumulated_in_the_dtype_of_the_state(call, dtype):
    beta, eigenvalues, state = drawn(1, 20, 2, magnitude=0.9)
    low = beta.to(dtype)
    every, final = call(low, eigenvalues, state)
    exact, exact_final = reference(low.double(), eigenvalues.double(), state.double())
    assert (every.dtype, final.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(final.double(), exact_final, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(every, exact.to(dtype))


@pytest.mark.parametrize("call", [eigenstate_scan_chunked, eigenstate_scan_triton])
def test_zero_steps_return_a_copy_of_the_state(call):
    beta, eigenvalues, state = drawn(2, 0, 3)
    every, final = call(beta, eigenvalues, state)
    assert every.shape == (2, 0, 3)
    assert torch.equal(final, state)
    assert final.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("call", [reference, eigenstate_scan_chunked, eigenstate_scan_triton])
@pytest.mark.parametrize(("B", "K"), [(0, 3), (2, 0)])
def test_no_sequences_or_states_give_gradients_of_zero(call, B, K):
    for gradient, argument in zip(differentiated(call, drawn(B, 4, K))[2:], drawn(B, 4, K), strict=True):
        assert torch.equal(gradient, torch.zeros_like(argument))


@pytest.mark.parametrize("call", [eigenstate_scan_chunked, eigenstate_scan_triton])
def test_a_state_is_expanded_to_the_sequences_where_there_are_no_steps(call):
    beta, eigenvalues, state = drawn(1, 0, 3)
    _, final = call(beta.expand(2, 0, 3), eigenvalues, state)
    assert torch.equal(final, state.expand(2, 3, 2))


def test_zero_steps_per_chunk_raise_value_error():
    with pytest.raises(ValueError, match="chunk=0: a chunk has at least one step"):
        eigenstate_scan_chunked(*drawn(1, 2, 1), chunk=0)


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [LARGEST, 0.5])
@pytest.mark.parametrize(("T", "K"), [(32768, 48), (20000, 40), (1025, 7), (33, 3), (1, 1)])
def test_kernels_are_accurate_and_deterministic_at_any_length_on_a_gpu(T, K, magnitude):
    arguments = [t.cuda() for t in drawn(2, T, K, magnitude)]
    exact = differentiated(eigenstate_scan_chunked, [t.double() for t in arguments])
    first, again = (differentiated(eigenstate_scan_triton, arguments) for _ in range(2))
    for own, other, truth in zip(first, again, exact, strict=True):
        assert torch.equal(own, other)
        assert float((own - truth).norm() / truth.norm()) < 1e-6
