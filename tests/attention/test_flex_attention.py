import math
import warnings

import pytest
import torch
from attending import by_flash_attn, different, flash_attn_reason
from scale import some
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimized.attention import flex_attention as module
from optimized.attention.flex_attention import flex_attention as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, sampled, side, size, tensor
from reference.attention.flex_attention import flex_attention as reference
from suite.ups.trial import BATCH, HEADS, LATENTS

BEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def best_backend(q, k, v):
    """Compute attention with the first backend in BEST_FIRST that accepts the inputs."""
    with sdpa_kernel(BEST_FIRST, set_priority=True):
        return functional.scaled_dot_product_attention(q, k, v)


def heads(values):
    return tensor("B", "heads", "T", "head_width", values=values)


def traffic(item):
    """Return the function that counts a call's least traffic in bytes; `item` is the size of an element in bytes."""

    def of(B, heads, T, head_width, direction):
        tensors = {"forward": 4, "backward": 7, "both": 11}[direction]
        return item * tensors * B * heads * T * head_width

    return of


def arithmetic(B, heads, T, head_width, direction):
    return {"forward": 4, "backward": 10, "both": 14}[direction] * B * heads * T * T * head_width


FIELDS = {
    # With larger values one key could get nearly all the weight, and the query's gradient would be a small difference
    # of large terms.
    "inputs": {"q": heads(floats(-1, 1)), "k": heads(sampled(different)), "v": heads(floats(-4, 4))},
    # Each head width is compiled separately.
    "sizes": {"B": size(1, 3), "heads": size(1, 3), "T": size(2, 33), "head_width": size(48, 48)},
    "strides": "any",
    "unsupported": {"double_backward": "its backward pass on a GPU is a kernel without a derivative"},
}
UPS = {**HEADS, "B": BATCH, "T": LATENTS["T"]}
CPU = Workload("cpu", B=2, heads=2, T=32, head_width=16, clock="wall", direction="both", device="cpu")

flex_attention = Pair(
    reference=reference,
    optimized=optimized,
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "best_backend": side(best_backend, devices=("cuda",)),
    },
    workloads=[Workload("ups_both", **UPS, direction="both", device="cuda"), CPU],
    cost=Cost(bytes=traffic(4), flops=arithmetic),
    **FIELDS,
)
flex_attention_bfloat16 = Pair(
    reference=reference,
    optimized=optimized,
    dtypes=("bfloat16",),
    rivals={
        "best_backend": side(best_backend, devices=("cuda",)),
        "flash_attn": side(by_flash_attn, devices=("cuda",), available=flash_attn_reason),
    },
    workloads=[
        Workload("ups", **UPS, dtype="bfloat16", device="cuda"),
        Workload("ups_both", **UPS, dtype="bfloat16", direction="both", device="cuda"),
    ],
    cost=Cost(bytes=traffic(2), flops=arithmetic, precision="bfloat16"),
    **FIELDS,
)


@pytest.fixture
def taken(monkeypatch):
    """Use FlexAttention on every device, uncompiled; return the list of its calls."""
    calls = []

    def plain(*tensors):
        calls.append(tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it materializes the scores
            return module._plain(*tensors)

    monkeypatch.setattr(module, "_takes", lambda q: True)
    monkeypatch.setattr(module, "_compiled", lambda: plain)
    return calls


def drawn(T=20, head_width=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, T, head_width, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("call", [reference, optimized])
def test_output_for_two_keys_matches_hand_computation(call):
    q = torch.tensor([[2.0 * math.log(3), 0.0, 0.0, 0.0]])
    k = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    v = torch.tensor([[4.0], [8.0]]).expand(2, 4)
    # The scores are log 3 and 0, because √4 is 2; the weights are 3/4 and 1/4.
    found = call(q[None, None], k[None, None], v[None, None])
    torch.testing.assert_close(found, torch.full((1, 1, 1, 4), 5.0))


@pytest.mark.parametrize("T", [1, 7, 128, 130])
@pytest.mark.parametrize("head_width", some([16, 48, 64], [48]))
def test_flex_attention_matches_the_reference(taken, T, head_width):
    inputs = drawn(T, head_width)
    torch.testing.assert_close(optimized(*inputs), reference(*inputs))
    assert len(taken) == 1


def test_autocast_runs_flex_attention_in_bfloat16(taken):
    inputs = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        found, known = optimized(*inputs), reference(*inputs)
    assert {t.dtype for t in taken[0]} == {torch.bfloat16}
    assert found.dtype == known.dtype == torch.bfloat16
    torch.testing.assert_close(found, known, atol=2**-7, rtol=2**-7)


class OnCuda(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("q", "takes"),
    [
        (torch.ones(2, 3, 4, 48), True),
        (torch.ones(2, 3, 4, 16, dtype=torch.bfloat16), True),
        (torch.ones(2, 3, 4, 48, dtype=torch.float64), False),
        (torch.ones(2, 3, 4, 15), False),
        (torch.ones(0, 3, 4, 48), False),
    ],
)
def test_takes_accepts_only_cuda_inputs_with_a_flex_attention_kernel(q, takes):
    assert module._takes(q.as_subclass(OnCuda)) is takes
    assert module._takes(q) is False


def test_compiled_caller_traces_flex_attention_into_its_own_graph(monkeypatch):
    monkeypatch.setattr(module, "_takes", lambda q: True)
    monkeypatch.setattr(module, "_compiled", None)
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph

    inputs = drawn()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(lambda *t: 2 * optimized(*t), backend=kept, fullgraph=True)(*inputs)
    assert [n.target for n in graphs[0].graph.nodes if "flex_attention" in str(n.target)]
    torch.testing.assert_close(found, 2 * reference(*inputs))


@pytest.mark.gpu
def test_batch_size_and_token_count_may_change_on_a_gpu():
    for B, T in ((2, 128), (24, 128), (3, 40)):
        inputs = [torch.randn(B, 8, T, 48, device="cuda", requires_grad=True) for _ in range(3)]
        grads = [torch.autograd.grad(call(*inputs).sum(), inputs) for call in (optimized, reference)]
        torch.testing.assert_close(*grads)
