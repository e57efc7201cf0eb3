import math

import pytest
import torch
from scale import count, draws, some

from optimized.generation.parallel_sampling import parallel_sampling as optimized
from optimized.generation.parallel_sampling import parallel_sampling_torch, parallel_sampling_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, sampled, scalar, side, size, tensor
from reference.generation.parallel_sampling import parallel_sampling as reference

U = 2.0**-24
TINY = 2.0**-125
"""Smaller values are flushed to zero, or have few digits."""


def uniforms(generator, shape, dtype):
    """Draw values in [0, 0.98), with 0. Near 1 most draws lie at a boundary; `test_known_tokens` and others test it."""
    drawn = 0.98 * torch.rand(shape, generator=generator)
    drawn[::5] = 0.0
    return drawn


def near_a_boundary(logits, uniforms, temperature, top_p):
    """Return a mask [rows] of the rows whose token rounding in float32 may change.

    With x = (logit − largest) / temperature, the error of a probability p is at most p (4 |x| + 8) U: three roundings
    of x, and those of the exponential. The error of a sum of n terms is that of its terms, and at most n U more; all
    sides add in parts, so that no more than 64 + n / 512 roundings follow each other.

    Tokens that may be in the nucleus or not are counted in the worst case: all of those up to the token, or all after
    it.
    """
    x = (logits - logits.amax(1, keepdim=True)) / temperature
    valid = ~x.isnan().any(1)
    x = torch.where(valid[:, None], x, 0.0)
    p = x.softmax(1)
    n = p.shape[1]
    own = torch.where(p > 0, p * (4 * x.clamp(min=-1e30).abs() + 8) * U, 0.0)
    sums = 2 * own.sum(1, keepdim=True) + (min(n, 64 + n // 512) + 4) * U + n * TINY
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    running = torch.cat((torch.zeros_like(ordered[:, :1]), ordered.cumsum(1)), 1)
    # The sum of the tokens that certainly precede a token, and of those that possibly do. Equal logits keep their
    # order.
    high, low = (2 * (p + own) - p + TINY, (p - 2 * own - TINY).clamp(min=0))
    ascending = -ordered
    certain = running.gather(1, torch.searchsorted(ascending, -high))
    possible = running.gather(1, torch.searchsorted(ascending, -low, right=True)) - p
    exact = running[:, :-1].gather(1, order.argsort(1))
    alone = torch.searchsorted(ascending, -low, right=True) - torch.searchsorted(ascending, -high)
    equal = torch.searchsorted(ascending, -p, right=True) - torch.searchsorted(ascending, -p)
    certain, possible = (torch.where(alone == equal, exact, either) for either in (certain, possible))
    surely = (possible + sums < top_p) | (order.argsort(1) == 0) & (alone == 1)
    maybe = (certain - sums < top_p) & ~surely
    kept, open_ = (torch.where(some, p, 0.0) for some in (surely, maybe))
    goal = uniforms[:, None] * kept.sum(1, keepdim=True)
    inner, outer = kept.cumsum(1) - goal, open_.cumsum(1)
    # In the worst case of the uncertain tokens, the sum at the token exceeds the goal, and the sum before it does not.
    least = inner - uniforms[:, None] * (open_.sum(1, keepdim=True) - outer) - 2 * sums
    most = (inner - kept) + (1 - uniforms[:, None]) * outer + 2 * sums
    # Before the first kept token the sum is exactly 0.
    first = (kept.cumsum(1) == kept) & (outer == 0)
    # After the last kept token nothing follows: a goal rounded up to the total still gives this token.
    last = surely & (kept.flip(1).cumsum(1).flip(1) == kept) & (open_.flip(1).cumsum(1).flip(1) == 0)
    sure = surely & ((least > 0) | last) & ((most <= 0) | first)
    return valid & ~sure.any(1)


def in_small_blocks(logits, uniforms, temperature, top_p):
    return parallel_sampling_triton(logits, uniforms, temperature, top_p, block=64, candidates=16)


# Normal logits at this temperature have a nucleus of some tens of tokens, like those of a language model. At 1.0 the
# nucleus is half of the vocabulary, and each of its probabilities is as small as the rounding error of a sum.
LM = {"rows": 32, "temperature": 0.1, "top_p": 0.95}

parallel_sampling = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "logits": tensor("rows", "vocabulary"),
        "uniforms": tensor("rows", dtype="float32", values=sampled(uniforms)),
        "temperature": scalar(floats(0.1, 4)),
        "top_p": scalar(floats(0.05, 1)),
    },
    gradients=False,
    dtypes=("float32", "bfloat16"),
    # The interpreter takes about 10 ms per row.
    sizes={"rows": size(0, 5), "vocabulary": size(1, 300)},
    max_examples=draws(cpu=12, otherwise=30),
    excuse=near_a_boundary,
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    variants={
        "torch": parallel_sampling_torch,
        "triton": side(parallel_sampling_triton, available=triton_reason),
    },
    workloads=[
        Workload("smollm2", vocabulary=49152, **LM, device="cuda", speedup=5, host_syncs=0, launches=1),
        Workload("smollm2_bfloat16", vocabulary=49152, **LM, dtype="bfloat16", device="cuda", speedup=5),
        Workload("llama3", vocabulary=128256, **LM, device="cuda", speedup=5),
        Workload("llama3_bfloat16", vocabulary=128256, **LM, dtype="bfloat16", device="cuda", speedup=5),
        Workload("cpu", vocabulary=2000, **LM, clock="wall", device="cpu"),
    ],
    # For float32; logits in bfloat16 take half of the bytes.
    cost=Cost(bytes=lambda rows, vocabulary: rows * (4 * vocabulary + 4 + 8)),
)

SIDES = [
    reference,
    optimized,
    parallel_sampling_torch,
    pytest.param(parallel_sampling_triton, marks=pytest.mark.interpreted),
    pytest.param(in_small_blocks, marks=pytest.mark.interpreted),
]


def drawn(call, logits, u, temperature=1.0, top_p=1.0):
    """Return the token drawn with each of these uniforms from the same logits."""
    u = torch.tensor(u)
    return call(logits.expand(len(u), -1), u, temperature, top_p).tolist()


@pytest.mark.parametrize("call", SIDES)
def test_known_tokens(call):
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0]).log()
    assert drawn(call, logits, [0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 0.999]) == [0, 0, 1, 1, 2, 2, 3, 3]
    # Of 0.4, 0.3, 0.2 and 0.1 the first two reach 0.65, three of them 0.75: in the vocabulary's order 1, 3 and 1, 2, 3.
    assert drawn(call, logits, [0.0, 0.56, 0.58, 0.999], top_p=0.65) == [1, 1, 3, 3]
    assert drawn(call, logits, [0.0, 0.43, 0.46, 0.65, 0.68], top_p=0.75) == [1, 1, 2, 2, 3]
    # At a temperature of 1/2 weights are squared: 1, 16, 4, 9.
    assert drawn(call, logits, [0.02, 0.04, 0.55, 0.58, 0.69, 0.71], temperature=0.5) == [0, 1, 1, 2, 2, 3]
    assert drawn(call, logits, [0.0, 0.9], top_p=0.01) == [1, 1]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130])
def test_equal_tokens_with_the_lowest_indices_are_kept(call, n):
    # With half a token more than k of n, k + 1 are kept.
    for k in {0, n // 2, n - 1}:
        top_p = (k + 0.5) / n
        u = [0.0, 0.5 / (k + 1), 1 - 0.5 / (k + 1), 1 - U]
        assert drawn(call, torch.full((n,), 3.0), u, top_p=top_p) == [0, 0, k, k]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("top_p", [0.3, 0.999, 1.0])
def test_a_token_of_probability_0_is_not_drawn(call, top_p):
    logits = torch.full((150,), -math.inf)
    logits[70:80] = 0.0
    logits[90] = -1e4
    found = drawn(call, logits, [0.0, 0.5, 1 - U], top_p=top_p)
    assert found[0] == 70
    assert found[2] == {0.3: 72, 0.999: 79, 1.0: 79}[top_p]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_row_without_a_valid_distribution_gives_token_minus_1(call, top_p):
    logits = torch.zeros(6, 100)
    logits[1, 70] = math.nan
    logits[2, 99] = math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    logits[5, 0] = torch.tensor(math.nan).copysign(torch.tensor(-1.0))
    tokens = call(logits, torch.full((6,), 0.25), 0.7, top_p)
    assert (tokens < 0).tolist() == [False, True, True, True, False, True]
    assert set(tokens[[1, 2, 3, 5]].tolist()) == {-1}
    assert tokens[4] == 0


@pytest.mark.parametrize("call", SIDES)
def test_extreme_logits_and_temperatures_give_the_expected_tokens(call):
    logits = torch.tensor([-3e38, 3e38, 2.9e38, 3e38, -math.inf])
    for temperature in (1.2e-38, 1e-30, 1.0):
        assert drawn(call, logits, [0.0, 0.4, 0.6, 1 - U], temperature=temperature) == [1, 1, 3, 3]
    assert drawn(call, torch.tensor([0.0, 1.0]), [0.0, 0.49, 0.51], temperature=1e30) == [0, 0, 1]


@pytest.mark.parametrize("call", SIDES)
@pytest.mark.parametrize(
    ("shapes", "temperature", "top_p", "words"),
    [
        (((2, 3), (2,)), 0.0, 0.9, "temperature=0.0: it must be finite, and 1.2e-38 at least"),
        (((2, 3), (2,)), math.nan, 0.9, "temperature=nan"),
        (((2, 3), (2,)), math.inf, 0.9, "temperature=inf"),
        (((2, 3), (2,)), 1.0, 0.0, "top_p=0.0: it must be above 0, and 1 at most"),
        (((2, 3), (2,)), 1.0, 1.1, "top_p=1.1"),
        (((2, 0), (2,)), 1.0, 0.9, r"logits \[2, 0\]"),
        (((2, 3), (3,)), 1.0, 0.9, r"uniforms \[3\]"),
        (((3,), (1,)), 1.0, 0.9, r"logits \[3\]"),
    ],
)
def test_invalid_arguments_raise_value_error(call, shapes, temperature, top_p, words):
    with pytest.raises(ValueError, match=words):
        call(*map(torch.zeros, shapes), temperature, top_p)


def case(rows, vocabulary, seed=0, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, device=device) * 3
    return logits, torch.rand(rows, generator=generator, device=device)


def differing(call, logits, u, temperature, top_p, truth=None):
    """Return (number of tokens that differ from float64, number of these that are near no boundary)."""
    exact = logits.double(), u.double()
    wrong = call(logits, u, temperature, top_p) != (reference(*exact, temperature, top_p) if truth is None else truth)
    near = near_a_boundary(*(values[wrong] for values in exact), temperature, top_p)
    return int(wrong.sum()), int((~near).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_differ_from_float64_only_near_a_boundary(dtype):
    total, wrong = count(quick=100_000, full=1_000_000), dict.fromkeys((reference, parallel_sampling_torch), 0)
    for seed, top_p in enumerate((0.9, 1.0, 0.5, 0.99)):
        logits, u = case(total // 4, 24, seed)
        logits = logits.to(dtype)
        truth = reference(logits.double(), u.double(), 0.8, top_p)
        for call in wrong:
            differ, outside = differing(call, logits, u, 0.8, top_p, truth)
            assert outside == 0
            wrong[call] += differ
    assert max(wrong.values()) <= total // 1000


def test_near_a_boundary_does_not_excuse_errors_larger_than_rounding():
    logits, u = case(4000, 24)

    def shifted(logits, u, temperature, top_p):
        return reference(logits, (u + 1e-3).clamp(max=1 - U), temperature, top_p)

    differ, outside = differing(shifted, logits, u, 0.8, 0.9)
    assert outside > 0.8 * differ > 0


@pytest.mark.parametrize("top_p", [0.6, 0.95, 1.0])
def test_near_a_boundary_marks_few_rows(top_p):
    logits, u = case(1000, 50)
    assert near_a_boundary(logits.double(), u.double(), 1.0, top_p).sum() <= 10


@pytest.mark.interpreted
@pytest.mark.parametrize("vocabulary", some([1, 63, 64, 65, 129, 700], [1, 64, 65, 129]))
def test_kernel_draws_match_float64(vocabulary):
    for top_p in (0.3, 0.9, 0.9999, 1.0):
        assert differing(in_small_blocks, *case(6, vocabulary), 0.9, top_p) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", [reference, optimized, parallel_sampling_torch])
def test_draws_differ_from_float64_only_near_a_boundary_on_a_gpu(call, dtype):
    total, wrong = count(quick=100_000, full=1_000_000), 0
    for seed, top_p in enumerate(5 * (0.9, 1.0, 0.5, 0.99)):
        logits, u = case(total // 20, 3000, seed, "cuda")
        differ, outside = differing(call, logits.to(dtype), u, 0.8, top_p)
        assert outside == 0
        wrong += differ
    assert wrong <= total // 1000


@pytest.mark.interpreted
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_the_kernel_writes_within_its_tensors(vocabulary, top_p, fences):
    logits, u = case(3, vocabulary)
    expected = parallel_sampling_torch(logits, u, 1.0, top_p)
    assert torch.equal(in_small_blocks(logits, u, 1.0, top_p), expected)
    # There are more equal tokens than places in the list of candidates.
    assert in_small_blocks(torch.zeros(3, vocabulary), u, 1.0, top_p).max() < vocabulary
    assert fences.intact()


@pytest.mark.interpreted
def test_kernel_accepts_strided_logits_and_uniforms():
    logits, u = case(4, 130)
    apart = torch.full((4, 131, 2), math.nan)
    apart[:, :130, 0] = logits
    pairs = torch.stack((u, torch.full_like(u, math.nan)), 1)
    assert torch.equal(in_small_blocks(apart[:, :130, 0], pairs[:, 0], 1.0, 0.9), reference(logits, u, 1.0, 0.9))
