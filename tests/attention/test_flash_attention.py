import itertools

import pytest
import torch
from attending import by_flash_attn, different, flash_attn_reason
from scale import draws
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from optimized.attention import flash_attention as module
from optimized.attention.flash_attention import flash_attention as optimized
from optimized.attention.flash_attention import flash_attention_packed as optimized_packed
from perfsuite import Cost, Pair, Workload, compiled, floats, integers, sampled, scalar, side, size, tensor
from reference.attention.flash_attention import flash_attention as reference
from reference.attention.flash_attention import flash_attention_packed as reference_packed


def padded(call):
    """Adapt `call` to a pair, whose inputs have no defaults and end with `lengths`."""

    def called(q, k, v, causal, lengths):
        return call(q, k, v, lengths, bool(causal))

    return called


def dense(call):
    def called(q, k, v, causal):
        return call(q, k, v, None, bool(causal))

    return called


def by(backend):
    """Return a side that uses only this backend of PyTorch's attention."""

    def called(q, k, v, causal):
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        shared = k.shape[1] != q.shape[1]
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=shared)

    return side(called, devices=("cuda",))


BACKENDS = {
    "cudnn": by(SDPBackend.CUDNN_ATTENTION),
    "flash": by(SDPBackend.FLASH_ATTENTION),
    "efficient": by(SDPBackend.EFFICIENT_ATTENTION),
    "flash_attn": side(by_flash_attn, devices=("cuda",), available=flash_attn_reason),
}
HALF = ("bfloat16", "float16")


def inputs(tokens="T"):
    """Return the specs of q, k and v.

    With larger values one key could get nearly all the weight, and the query's gradient would be a small difference
    of large terms.
    """
    heads = {"q": ("groups * K", floats(-1, 1)), "k": ("K", sampled(different)), "v": ("K", floats(-4, 4))}
    return {name: tensor("B", number, tokens, "D", values=values) for name, (number, values) in heads.items()}


CAUSAL = scalar(integers(0, 1))
INPUTS = inputs()
# Each head width needs its own kernel.
SIZES = {"B": size(1, 3), "groups": size(1, 3), "K": size(1, 2), "T": size(2, 33), "D": size(64, 64)}
UNSUPPORTED = {"double_backward": "its backward pass on a GPU is a kernel without a derivative"}
CPU = Workload("cpu", B=2, groups=2, K=2, T=64, D=32, causal=1, clock="wall", direction="both", device="cpu")


def traffic(item):
    """Return the function that counts a call's least traffic in bytes; `item` is the size of an element in bytes."""

    def of(B, groups, K, T, D, direction, **_):
        queries, keys = B * groups * K * T * D, B * K * T * D
        read, written = {"forward": (1, 1), "backward": (3, 1), "both": (4, 2)}[direction]
        return item * ((read + written) * queries + 2 * keys * {"forward": 1, "backward": 2, "both": 3}[direction])

    return of


def arithmetic(B, groups, K, T, D, causal, direction, **_):
    products = {"forward": 4, "backward": 10, "both": 14}[direction]
    return products * B * groups * K * T * T * D // (2 if causal else 1)


def of_tiles(cost):
    """Compute `cost` for sequences of whole tiles of 128 tokens."""
    return lambda tiles, **sizes: cost(T=128 * tiles, **sizes)


def by_key_head(q, k, v, causal):
    """Return the reference's result with the memory of one key head's scores."""

    def of_one(*heads):
        return reference(*heads, None, bool(causal))

    groups = q.shape[1] // k.shape[1]
    heads = zip(q.split(groups, 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([checkpoint(of_one, *head, use_reentrant=False) for head in heads], 1)


MOST_SCORES = 16 * 16384**2
"""More scores of a sequence than that do not fit into an H200's memory in the reference's backward pass."""


def shapes(dtype):
    """Yield workloads of about equal numbers of tokens, for the forward pass and for both passes."""
    narrow, wide = itertools.product((64,), (128, 1024, 4096, 16384)), itertools.product((128,), (1024, 16384))
    causal = ((1, "forward"), (1, "both"))
    ways = [*itertools.product(narrow, (*causal, (0, "forward"))), *itertools.product(wide, causal)]
    for (D, T), (masked, direction) in ways:
        heads = min(2048 // D, MOST_SCORES // T**2)
        sizes = {"B": max(1, 16384 // T), "groups": 4, "K": heads // 4, "tiles": T // 128, "D": D, "causal": masked}
        name = f"d{D}_t{T}{'_causal' if masked else ''}{'_both' if direction == 'both' else ''}"
        yield Workload(name, **sizes, dtype=dtype, direction=direction, device="cuda")


flash_attention = Pair(
    reference=dense(reference),
    optimized=dense(optimized),
    inputs={**INPUTS, "causal": CAUSAL},
    sizes=SIZES,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported=UNSUPPORTED,
    rivals={"compile": compiled(side(dense(reference), devices=("cuda",)))},
    workloads=[
        Workload("d64_t1024", B=4, groups=3, K=3, T=1024, D=64, causal=1, direction="both", device="cuda"),
        CPU,
    ],
    cost=Cost(bytes=traffic(4), flops=arithmetic),
)
flash_attention_half = Pair(
    reference=dense(reference),
    optimized=side(dense(optimized), devices=("cuda",)),  # on a CPU it calls PyTorch's attention, as in float32
    inputs={**INPUTS, "causal": CAUSAL},
    sizes=SIZES,
    dtypes=HALF,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported=UNSUPPORTED,
    workloads=[Workload("d64_t1000", B=16, groups=4, K=8, T=1000, D=64, causal=1, dtype="bfloat16", device="cuda")],
    cost=Cost(bytes=traffic(2), flops=arithmetic, precision="bfloat16"),
)
# cuDNN is used only for lengths that are multiples of 128.
flash_attention_tiles = Pair(
    reference=dense(reference),
    optimized=side(dense(optimized), devices=("cuda",)),
    inputs={**inputs("128 * tiles"), "causal": CAUSAL},
    sizes={"B": size(1, 2), "groups": size(1, 2), "K": size(1, 1), "tiles": size(1, 2), "D": size(64, 64)},
    dtypes=HALF,
    truth=by_key_head,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported=UNSUPPORTED,
    rivals=BACKENDS,
    workloads=list(shapes("bfloat16")),
    cost=Cost(bytes=of_tiles(traffic(2)), flops=of_tiles(arithmetic), precision="bfloat16"),
)
flash_attention_padded = Pair(
    reference=padded(reference),
    optimized=padded(optimized),
    inputs={**INPUTS, "causal": CAUSAL, "lengths": tensor("B", dtype="int64", values=integers(1, "T"))},
    sizes=SIZES,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported=UNSUPPORTED,
    workloads=[
        Workload("d64_t1024", B=16, groups=3, K=3, T=1024, D=64, causal=1, direction="both", device="cuda"),
        CPU,
    ],
    cost=Cost(bytes=traffic(4), flops=arithmetic),
)


def ends(generator, shape, dtype):
    """Draw non-decreasing shares of the tokens, from 0 to 1."""
    drawn = torch.rand(shape, generator=generator, device=generator.device).sort().values
    drawn[0], drawn[-1] = 0.0, 1.0
    return drawn


def packed(call, longest=False):
    """Adapt `call`: convert shares of the tokens into offsets."""

    def called(q, k, v, causal, shares):
        offsets = (shares.double() * len(q)).round().int()
        return call(q, k, v, offsets, bool(causal), len(q) if longest else None)

    return called


def sequences(number, values):
    return tensor("N", number, "D", values=values)


PACKED = {
    "q": sequences("groups * K", floats(-1, 1)),
    "k": sequences("K", sampled(different)),
    "v": sequences("K", floats(-4, 4)),
    "causal": CAUSAL,
    "shares": tensor("sequences + 1", dtype="float32", values=sampled(ends), differentiable=False),
}
PACKED_SIZES = {"N": size(2, 60), "groups": size(1, 2), "K": size(1, 2), "D": size(64, 64), "sequences": size(1, 5)}
ONCE = {"N": 64, "groups": 2, "K": 2, "D": 32, "sequences": 4, "causal": 1}

flash_attention_packed = Pair(
    reference=packed(reference_packed),
    optimized=packed(optimized_packed),
    inputs=PACKED,
    sizes=PACKED_SIZES,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported=UNSUPPORTED,
    workloads=[Workload("cpu", **ONCE, clock="wall", direction="both", device="cpu")],
)
flash_attention_packed_half = Pair(
    reference=packed(reference_packed),
    optimized=side(packed(optimized_packed), devices=("cuda",)),
    inputs=PACKED,
    sizes=PACKED_SIZES,
    dtypes=HALF,
    max_examples=draws(cpu=7, otherwise=15),
    strides="any",
    unsupported={**UNSUPPORTED, "captured_graph": "the host reads the longest sequence's length"},
    variants={"longest": side(packed(optimized_packed, longest=True), devices=("cuda",))},
    workloads=[
        Workload(
            f"d{D}",
            N=16384,
            groups=4,
            K=2048 // D // 4,
            D=D,
            sequences=32,
            causal=1,
            dtype="bfloat16",
            direction=direction,
            clock="wall",  # the host reads the offsets
            device="cuda",
        )
        for D, direction in ((64, "both"), (128, "both"))
    ],
)


def drawn(B=2, H=4, K=2, T=9, D=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, T, D, generator=generator).to(dtype) for n in (H, K, K)]


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_row_matches_the_unpadded_row_and_its_padding_is_zero(call, causal):
    q, k, v = drawn()
    found = call(q, k, v, torch.tensor([9, 4]), causal)
    torch.testing.assert_close(found[0], call(q, k, v, causal=causal)[0])
    alone = call(*(x[1:, :, :4] for x in (q, k, v)), causal=causal)
    torch.testing.assert_close(found[1:, :, :4], alone)
    assert found[1, :, 4:].eq(0).all()


@pytest.mark.parametrize("call", [reference, optimized])
def test_causal_attention_ignores_later_tokens(call):
    q, k, v = drawn()
    whole = call(q, k, v)
    torch.testing.assert_close(whole[:, :, :5], call(*(x[:, :, :5] for x in (q, k, v))))
    torch.testing.assert_close(whole[:, :, 0], v[:, :, 0].repeat_interleave(2, 1))


@pytest.mark.parametrize("call", [reference_packed, optimized_packed])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_attend_to_each_other(call, causal):
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in drawn())
    offsets = torch.tensor([0, 9, 9, 13, 18], dtype=torch.int32)
    found = call(q, k, v, offsets, causal)
    for first, end in itertools.pairwise(offsets.tolist()):
        own = [x[first:end].transpose(0, 1)[None] for x in (q, k, v)]
        torch.testing.assert_close(found[first:end], reference(*own, causal=causal)[0].transpose(0, 1))


@pytest.mark.parametrize("call", [reference_packed, optimized_packed])
def test_packed_attention_accepts_zero_sequences(call):
    q, k, v = (torch.zeros(0, n, 8) for n in (4, 2, 2))
    assert call(q, k, v, torch.zeros(1, dtype=torch.int32)).shape == (0, 4, 8)


def test_unaligned_tensors_are_copied_to_16_byte_alignment():
    whole = torch.randn(65)
    aligned, apart = whole[:64].view(1, 1, 8, 8), whole[1:].view(1, 1, 8, 8)
    assert module._aligned(aligned) is aligned
    assert module._aligned(apart).data_ptr() % 16 == 0
    assert torch.equal(module._aligned(apart), apart)
    assert module._aligned(aligned.mT).is_contiguous()
    odd = torch.randn(1, 1, 8, 9)[..., :8]  # rows of 36 bytes
    assert module._aligned(odd).stride(-2) == 8
