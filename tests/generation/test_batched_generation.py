import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from boundaries import EPS, move_off_boundaries, near_a_boundary
from scale import draws

from optimized.generation.batched_generation import batched_generation as optimized
from optimized.generation.batched_generation import batched_generation_triton
from optimized.generation.parallel_sampling import parallel_sampling
from optimized.kernels import triton_reason
from perfsuite import Pair, Workload, compiled, floats, integers, module, scalar, side, size, tensor
from reference.generation.batched_generation import batched_generation as reference
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.trial import SMOLLM2, language_model

ROUNDINGS, LOW_ROUNDINGS = 64, 16
"""Allowed relative error of logits, in rounding units of float32 and of half precision under autocast."""


def after_a_boundary(model, prompts, lengths, uniforms, temperature, top_p, end, *, eps):
    """Return a mask of all tokens from the first that rounding may change, since the later ones depend on it."""
    error = ROUNDINGS * EPS if eps <= EPS else LOW_ROUNDINGS * eps
    tokens = reference(model, prompts, lengths, uniforms, temperature, top_p, end)
    unsure = torch.zeros_like(tokens, dtype=torch.bool)
    for prompt, length, replies, numbers, own in zip(prompts, lengths.tolist(), tokens, uniforms, unsure, strict=True):
        for reply, uniform, mask in zip(replies, numbers, own, strict=True):
            sequence = torch.cat((prompt[:length], reply))
            with torch.no_grad():
                logits = model(sequence[None])[0, length - 1 : -1]
            near = near_a_boundary(logits, uniform, temperature, top_p, error)
            mask |= near.cumsum(0) > 0
    return unsure


def away_from_boundaries(model, prompts, lengths, uniforms, temperature, top_p, end):
    """Replace uniform numbers, so that rounding in float32 decides no token."""
    move_off_boundaries(model, prompts, lengths, uniforms, temperature, top_p, ROUNDINGS * EPS)


batched_generation = Pair(
    reference=torch.no_grad()(reference),
    optimized=optimized,
    inputs={
        "model": module(language_model),
        "prompts": tensor("prompts", "longest", dtype="int64", values=integers(0, "vocabulary")),
        "lengths": tensor("prompts", dtype="int64", values=integers(1, "longest + 1")),
        "uniforms": tensor("prompts", "replies", "tokens", values=floats(0, 0.99)),
        "temperature": scalar(floats(0.5, 1.5)),
        "top_p": scalar(floats(0.1, 1.0)),
        "end": scalar(integers(0, 1)),
    },
    gradients=False,
    # Three of four draws have no token; in most of the others the replies differ.
    max_examples=draws(cpu=16, otherwise=30),
    sizes={
        "prompts": size(0, 2),
        "longest": size(1, 5),
        "replies": size(0, 2),
        "tokens": size(0, 5),
        "vocabulary": size(2, 40),
        "layers": size(1, 2),
        "groups": size(1, 2),
        "kv_heads": size(1, 2),
        "pairs": size(1, 4),
    },
    adjust=away_from_boundaries,
    excuse=after_a_boundary,
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    variants={
        "triton": side(batched_generation_triton, available=triton_reason),
    },
    workloads=[
        # With a fifth of the layers, the reference takes one second.
        Workload(
            "replies12",
            **{**SMOLLM2, "layers": 6},
            prompts=4,
            longest=64,
            replies=3,
            tokens=16,
            # At this temperature, tokens of random weights are about as likely as those of a trained model.
            temperature=0.2,
            top_p=0.9,
            end=0,
            device="cuda",
            clock="wall",
            speedup=3.0,
        ),
        Workload(
            "cpu",
            prompts=2,
            longest=8,
            replies=3,
            tokens=6,
            vocabulary=64,
            layers=2,
            groups=2,
            kv_heads=2,
            pairs=8,
            temperature=0.9,
            top_p=0.9,
            end=0,
            clock="wall",
            device="cpu",
        ),
    ],
)


def drawn(vocabulary=11, tokens=40):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = language_model(vocabulary, 2, 2, 2, 4)
    prompts = torch.randint(vocabulary, (3, 7), generator=generator)
    return model, prompts, torch.tensor([7, 1, 4]), torch.rand(3, 4, tokens, generator=generator)


@pytest.mark.parametrize("call", [reference, optimized])
def test_all_tokens_after_the_end_token_are_end_tokens(call):
    model, prompts, lengths, uniforms = drawn()
    with torch.no_grad():
        tokens = call(model, prompts, lengths, uniforms, end=3)
        ended = (tokens == 3).cumsum(2) > 0
        assert ended[:, :, -1].any()
        assert not ended[:, :, 0].all()
        assert tokens[ended].eq(3).all()
        # Without an end token the reply begins with the same tokens.
        endless = call(model, prompts, lengths, uniforms, end=-1)
    assert torch.equal(tokens[~ended], endless[~ended])


@pytest.mark.parametrize("call", [reference, optimized])
def test_a_reply_does_not_depend_on_the_others(call):
    model, prompts, lengths, uniforms = drawn(tokens=10)
    with torch.no_grad():
        tokens = call(model, prompts, lengths, uniforms, end=3)
        for p in range(3):
            alone = call(model, prompts[p : p + 1], lengths[p : p + 1], uniforms[p : p + 1, 1:3], end=3)
            assert torch.equal(alone[0], tokens[p, 1:3])


def test_long_replies_match_the_reference():
    model, prompts, lengths, uniforms = drawn()
    with torch.no_grad():
        assert torch.equal(
            optimized(model, prompts, lengths, uniforms, end=3), reference(model, prompts, lengths, uniforms, end=3)
        )


def test_generation_stops_soon_after_all_replies_have_ended(monkeypatch):
    from optimized.cached_decoding import Cache

    model, prompts, lengths, uniforms = drawn(tokens=200)
    steps = []
    own = Cache._next
    monkeypatch.setattr(Cache, "_next", lambda self, *given: steps.append(1) or own(self, *given))
    tokens = optimized(model, prompts, lengths, uniforms, end=3)
    last = int((tokens != 3).any(0).any(0).nonzero().max())
    assert last < len(steps) <= last + 17


def test_two_threads_may_generate_with_one_model():
    generator = torch.Generator().manual_seed(0)
    model = Llama(Shape(vocabulary=50, width=16, hidden=32, layers=2, heads=2, kv_heads=1, head_width=8, positions=64))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    every, lengths = torch.randint(1, 50, (2, 2, 5), generator=generator), torch.tensor([5, 5])
    uniforms = torch.rand(2, 2, 6, generator=generator)
    expected = [optimized(model, prompts, lengths, uniforms, end=-1) for prompts in every]
    in_step = threading.Barrier(2, timeout=10)

    def sample(*given):
        in_step.wait()
        return parallel_sampling(*given)

    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda prompts: optimized(model, prompts, lengths, uniforms, end=-1, sample=sample), every)
        assert all(map(torch.equal, found, expected))
