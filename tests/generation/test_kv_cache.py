import pytest
import torch
from scale import FULLY, draws

from optimized import decoding_kernels
from optimized.cached_decoding import Cache
from optimized.decoding_kernels import is_served
from optimized.generation.kv_cache import kv_cache as optimized
from optimized.generation.kv_cache import kv_cache_triton
from optimized.kernels import triton_reason
from perfsuite import Pair, Workload, integers, module, side, size, stateful, tensor
from reference.generation.kv_cache import kv_cache as reference
from suite.polychromic.llama import Attention
from suite.polychromic.lora import LoRALinear, Settings, attach, without
from suite.polychromic.trial import SMOLLM2, language_model


def with_compiled_model(model):
    """Run the reference with a compiled model. Compiled as a whole, it would unroll a forward pass for each token:
    1,920 layers of SmolLM2, which took more than 5 minutes."""
    return reference(torch.compile(model, dynamic=True))


kv_cache = Pair(
    reference=stateful(reference),
    optimized=stateful(optimized),
    inputs={"model": module(language_model)},
    step_inputs={
        "prompts": tensor("rows", "longest", dtype="int64", values=integers(0, "vocabulary")),
        "lengths": tensor("rows", dtype="int64", values=integers(1, "longest + 1")),
        "replies": tensor("rows", "tokens", dtype="int64", values=integers(0, "vocabulary")),
    },
    gradients=False,
    sizes={
        "rows": size(1, 3),
        "longest": size(1, 6),
        "tokens": size(1, 5),
        "vocabulary": size(1, 9),
        "layers": size(1, 2),
        "groups": size(1, 2),
        "kv_heads": size(1, 2),
        "pairs": size(1, 3),
    },
    steps=(1, 2),
    max_examples=draws(cpu=6, otherwise=12),
    rivals={"compile": stateful(side(with_compiled_model, devices=("cuda",)))},
    variants={"triton": stateful(side(kv_cache_triton, available=triton_reason))},
    workloads=[
        Workload("replies12", **SMOLLM2, rows=12, longest=64, tokens=64, clock="wall", device="cuda", speedup=3.0),
        Workload(
            "cpu",
            rows=3,
            longest=8,
            tokens=8,
            vocabulary=64,
            layers=2,
            groups=2,
            kv_heads=2,
            pairs=8,
            clock="wall",
            device="cpu",
        ),
    ],
)


def drawn(vocabulary=11):
    torch.manual_seed(0)
    model = language_model(vocabulary, 2, 2, 2, 4)
    prompts, replies = torch.randint(vocabulary, (3, 7)), torch.randint(vocabulary, (3, 5))
    return model, prompts, torch.tensor([7, 1, 4]), replies


@pytest.mark.parametrize("call", [reference, optimized])
def test_logits_of_each_row_match_the_row_alone(call):
    model, prompts, lengths, replies = drawn()
    found = call(model)(prompts, lengths, replies)
    for row, length in enumerate(lengths.tolist()):
        whole = torch.cat((prompts[row, :length], replies[row]))[None]
        alone = model(whole)[0, length - 1 : -1]
        torch.testing.assert_close(found[row], alone)


@pytest.mark.parametrize("call", [reference, optimized])
def test_padding_after_a_prompt_is_ignored(call):
    model, prompts, lengths, replies = drawn()
    other = torch.where(torch.arange(7) < lengths[:, None], prompts, 10 - prompts)
    step = call(model)
    assert torch.equal(step(prompts, lengths, replies), step(other, lengths, replies))


def test_earlier_longer_call_does_not_change_the_result():
    model, prompts, lengths, replies = drawn()
    step = optimized(model)
    alone = step(prompts, lengths, replies)
    step(torch.randint(11, (3, 60)), torch.tensor([60, 50, 40]), torch.randint(11, (3, 30)))
    assert torch.equal(step(prompts, lengths, replies), alone)


def test_in_place_weight_changes_take_effect():
    model, prompts, lengths, replies = drawn()
    step = optimized(model)
    step(prompts, lengths, replies)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(step(prompts, lengths, replies), reference(model)(prompts, lengths, replies))


def test_cache_contains_keys_and_values_for_the_prompt_and_the_next_token(monkeypatch):
    model, prompts, lengths, _ = drawn()
    cache, tokens = Cache(model, 3, 16), torch.tensor([1, 2, 3])
    with torch.no_grad():
        cache.read(prompts, lengths)
        cache.next(tokens, lengths)
    own = Attention.heads
    for row, length in enumerate(lengths.tolist()):
        heads = []
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(Attention, "heads", lambda *given, heads=heads: heads.append(own(*given)) or heads[-1])
            model(torch.cat((prompts[row, :length], tokens[row, None]))[None])
        for kept, (_, *alone) in zip(cache.layers, heads, strict=True):
            for found, expected in zip(kept, alone, strict=True):
                torch.testing.assert_close(found[row, :, : length + 1], expected[0])
    for keys, _ in cache.layers:
        written = keys.ne(0).any(-1).any(1)
        # The padding of a prompt is also written, and later overwritten by the reply.
        assert written.sum(1).tolist() == [8, 7, 7]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ((1, 2, 2), 16),
        pytest.param((3, 2, 4), None, marks=FULLY),
        ((3, 2, 4), 1),
        pytest.param((2, 3, 16), None, marks=FULLY),
        pytest.param((2, 3, 16), 16, marks=FULLY),
    ],
)
def test_kernel_decode_step_matches_pytorch_with_and_without_adapters(shape, rank):
    torch.manual_seed(0)
    model = language_model(53, 2, *shape)
    adapters = attach(model, Settings(rank=rank, alpha=8.0), LoRALinear) if rank else {}
    prompts, lengths, tokens = torch.randint(53, (3, 70)), torch.tensor([70, 1, 33]), torch.randint(53, (3, 2))
    plain, fast = Cache(model, 3, 128, kernels=False), Cache(model, 3, 128, kernels=True)
    with torch.no_grad():
        for _ in range(2):  # the second pass has other adapter weights
            for adapter in adapters.values():
                adapter.lora_b.normal_(std=0.1)
            assert torch.equal(plain.read(prompts, lengths), fast.read(prompts, lengths))
            for t in range(2):
                found = [cache.next(tokens[:, t], lengths + t) for cache in (plain, fast)]
                torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    for one, other in zip(plain.layers, fast.layers, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=FULLY)])
def test_adapters_attached_later_or_disabled_take_effect(kernels):
    model, prompts, lengths, replies = drawn()
    step = (kv_cache_triton if kernels else optimized)(model)
    plain = step(prompts, lengths, replies)
    adapters = attach(model, Settings(rank=2), LoRALinear)
    for adapter in adapters.values():
        adapter.lora_b.data.normal_()
    torch.testing.assert_close(
        step(prompts, lengths, replies), reference(model)(prompts, lengths, replies), atol=1e-4, rtol=1e-4
    )
    with without(adapters.values()):
        torch.testing.assert_close(step(prompts, lengths, replies), plain, atol=1e-5, rtol=1e-5)


def test_kernels_do_not_serve_other_layer_types_or_more_than_64_rows(monkeypatch):
    model = language_model(11, 2, 2, 2, 4)
    assert not is_served(model, 3)  # on a CPU
    monkeypatch.setattr(decoding_kernels, "use_triton", lambda *_, **__: True)
    assert is_served(model, 64)
    assert not is_served(model, 65)
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    assert not is_served(model, 64)
