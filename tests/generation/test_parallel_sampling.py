import pytest
import torch
from boundaries import near_a_boundary
from scale import count

from optimized.generation import parallel_sampling as own
from optimized.generation.parallel_sampling import parallel_sampling as optimized
from optimized.generation.parallel_sampling import parallel_sampling_torch, parallel_sampling_triton
from optimized.kernels import triton_reason
from perfsuite import Cost, Pair, Workload, compiled, floats, scalar, side, size, tensor
from reference.generation.parallel_sampling import parallel_sampling as reference

SMOLLM2, LLAMA3 = 49152, 128256
"""Vocabularies."""

parallel_sampling = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "logits": tensor("rows", "vocabulary", values=floats(-8, 8)),
        "uniforms": tensor("rows", values=floats(0, 0.99)),
        "temperature": scalar(floats(0.5, 1.5)),
        "top_p": scalar(floats(0.1, 1.0)),
    },
    gradients=False,
    dtypes=("float32", "bfloat16"),
    sizes={"rows": size(0, 5), "vocabulary": size(1, 40)},
    excuse=near_a_boundary,
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    variants={
        "torch": parallel_sampling_torch,
        "triton": side(parallel_sampling_triton, available=triton_reason),
    },
    workloads=[
        Workload(f"{name}{suffix}", rows=32, vocabulary=V, temperature=0.9, top_p=0.9, device="cuda", speedup=5, **more)
        for name, V in (("smollm2", SMOLLM2), ("llama3", LLAMA3))
        for suffix, more in (("", {}), ("_bfloat16", {"dtype": "bfloat16"}))
    ]
    + [Workload("cpu", rows=8, vocabulary=512, temperature=0.9, top_p=0.9, clock="wall", device="cpu")],
    cost=Cost(bytes=lambda rows, vocabulary: 4 * rows * vocabulary),
)

SIDES = [
    reference,
    parallel_sampling_torch,
    pytest.param(parallel_sampling_triton, marks=pytest.mark.interpreted),
]


def peaked(rows, vocabulary, seed=0):
    """As of a language model: a few tokens have most of the probability."""
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(rows, vocabulary, generator=generator), torch.rand(rows, generator=generator)


@pytest.mark.parametrize("call", SIDES)
def test_a_row_by_hand(call):
    # 0.1, 0.4, 0.2, 0.3: of a nucleus of 0.8 these are the tokens 1, 3 and 2, with 0.9 in all.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(5, -1)
    uniforms = torch.tensor([0.0, 0.44, 0.45, 0.66, 0.67])
    assert call(logits, uniforms, 1.0, 0.8).tolist() == [1, 1, 2, 2, 3]
    # Without a nucleus: 0.1, 0.5, 0.7, 1.
    assert call(logits, torch.tensor([0.0, 0.09, 0.11, 0.51, 0.99]), 1.0, 1.0).tolist() == [0, 0, 1, 2, 3]
    # A nucleus that holds the likeliest alone.
    assert call(logits, uniforms, 1.0, 0.01).tolist() == [1] * 5


@pytest.mark.parametrize("call", SIDES)
def test_the_temperature_divides_the_logits(call):
    logits, uniforms = peaked(20, 30)
    assert torch.equal(call(logits, uniforms, 0.5, 0.9), call(2 * logits, uniforms, 1.0, 0.9))


@pytest.mark.parametrize("call", SIDES)
def test_equal_tokens_are_in_the_nucleus_by_their_numbers(call):
    # Of eight equal tokens the first three have 0.375, and the sum before the third, 0.25, is below 0.3.
    uniforms = torch.tensor([0.0, 0.3, 0.34, 0.6, 0.7, 0.99])
    assert call(torch.zeros(6, 8), uniforms, 1.0, 0.3).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("call", SIDES)
def test_what_is_minus_infinity_is_never_drawn(call):
    logits = torch.full((4, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 1.0, 1.0
    assert call(logits, torch.tensor([0.0, 0.49, 0.51, 0.999]), 1.0, 1.0).tolist() == [2, 2, 4, 4]


@pytest.mark.interpreted
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 63, 64, 65, 200])
def test_the_kernel_takes_every_size(vocabulary, monkeypatch):
    monkeypatch.setattr(own, "BLOCK", 16)
    logits, uniforms = peaked(12, vocabulary)
    logits[:4] = logits[:4].round()
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9), (1.5, 0.3)):
        expected = reference(logits.double(), uniforms, temperature, top_p)
        excused = near_a_boundary(logits, uniforms, temperature, top_p)
        found = parallel_sampling_triton(logits, uniforms, temperature, top_p)
        assert torch.equal(found[~excused], expected[~excused])


@pytest.mark.interpreted
def test_rows_may_lie_apart(request):
    whole, uniforms = peaked(6, 64)
    logits = whole[::2, 8:40]
    expected = reference(logits, uniforms[:3])
    fences = request.getfixturevalue("fences")  # around what the kernel alone allocates
    assert torch.equal(parallel_sampling_triton(fences.around(logits), uniforms[:3]), expected)
    assert torch.equal(parallel_sampling_triton(logits.T.contiguous().T, uniforms[:3]), expected)
    assert fences.intact()


def test_in_float32_few_draws_lie_at_a_boundary_and_the_others_are_those_of_float64():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, differ, excused, total = 500, 0, 0, 0
    for seed in range(count(quick=20, full=2000)):
        logits, uniforms = (t.to(device) for t in peaked(rows, 300, seed))
        expected = reference(logits.double(), uniforms)
        mask = near_a_boundary(logits, uniforms, 0.9, 0.9)
        found = optimized(logits, uniforms)
        assert torch.equal(found[~mask], expected[~mask])
        differ, excused, total = differ + int((found != expected).sum()), excused + int(mask.sum()), total + rows
    assert excused <= 0.001 * total
    assert differ <= excused
