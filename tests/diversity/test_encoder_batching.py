import functools

import pytest
import torch
from scale import draws

from optimized.diversity.encoder_batching import encoder_batching as optimized
from perfsuite import Pair, Workload, compiled, integers, module, side, size, tensor
from reference.diversity.encoder_batching import encoder_batching as reference
from suite.polychromic.trial import MINILM, sentence_encoder

in_threes = functools.partial(optimized, rows=3)

REPLIES = {**MINILM, "n": 3, "longest": 128, "device": "cuda"}

encoder_batching = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "encoder": module(sentence_encoder),
        "tokens": tensor("sets", "n", "longest", dtype="int64", values=integers(0, "vocabulary")),
        "lengths": tensor("sets", "n", dtype="int64", values=integers(1, "longest + 1")),
    },
    gradients=False,
    max_examples=draws(cpu=8, otherwise=15),
    sizes={
        "sets": size(1, 4),
        "n": size(1, 3),
        "longest": size(1, 7),
        "vocabulary": size(1, 9),
        "layers": size(1, 2),
        "heads": size(1, 2),
        "head_width": size(2, 4),
        "positions": size(7, 9),
    },
    rivals={"compile": compiled(side(reference, devices=("cuda",)))},
    variants={"in_threes": lambda encoder, tokens, lengths: in_threes(encoder, tokens, lengths)},
    workloads=[
        # The trainer embeds the replies to four prompts. Launches take most of the time, and one call replaces four.
        Workload("sets4", **REPLIES, sets=4, clock="wall", speedup=2.0, host_syncs=1),
        # Six batches of similar length replace the reference's 64 of three replies.
        Workload("sets64", **REPLIES, sets=64, clock="wall", speedup=2.0, host_syncs=1),
        Workload(
            "cpu",
            sets=4,
            n=3,
            longest=24,
            vocabulary=100,
            layers=2,
            heads=2,
            head_width=16,
            positions=32,
            clock="wall",
            device="cpu",
        ),
    ],
)


SIDES = [reference, optimized, in_threes]


def drawn(sets=4, n=3, longest=9):
    torch.manual_seed(0)
    encoder = sentence_encoder(vocabulary=20, layers=2, heads=2, head_width=4, positions=16)
    return encoder, torch.randint(20, (sets, n, longest)), torch.randint(1, longest + 1, (sets, n))


@pytest.mark.parametrize("call", SIDES)
def test_each_embedding_matches_the_reply_encoded_alone(call):
    encoder, tokens, lengths = drawn()
    found = call(encoder, tokens, lengths)
    for s, i in torch.cartesian_prod(torch.arange(4), torch.arange(3)).tolist():
        with torch.no_grad():
            alone = encoder(tokens[s, i : i + 1, : lengths[s, i]], lengths[s, i : i + 1])[0]
        torch.testing.assert_close(found[s, i], alone / alone.norm())


@pytest.mark.parametrize("call", SIDES)
def test_embeddings_match_hand_computation(call):
    """Embeddings have norm 1; here the encoder returns a reply's length and its first token."""

    def encoder(tokens, lengths):
        assert tokens.shape[1] == lengths.max()
        return torch.stack((lengths, tokens[:, 0]), 1).double()

    tokens = torch.tensor([[[4, 9, 9], [0, 0, 9]], [[0, 0, 0], [3, 0, 0]]])
    found = call(encoder, tokens, torch.tensor([[3, 2], [1, 3]]))
    torch.testing.assert_close(found[0, 0], torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert found[0, 1].tolist() == found[1, 0].tolist() == [1.0, 0.0]
    torch.testing.assert_close(found[1, 1], torch.full((2,), 0.5**0.5, dtype=torch.float64))


@pytest.mark.parametrize("call", SIDES)
def test_embeddings_require_no_gradient(call):
    assert not call(*drawn()).requires_grad


def test_batches_group_replies_by_length_without_excess_padding():
    calls = []

    def encoder(tokens, lengths):
        calls.append((list(tokens.shape), lengths.tolist()))
        return torch.ones(len(tokens), 2)

    lengths = torch.tensor([[2, 7, 1], [7, 3, 5]])
    optimized(encoder, torch.zeros(2, 3, 9, dtype=torch.int64), lengths, rows=4)
    assert calls == [([4, 7], [7, 7, 5, 3]), ([2, 2], [2, 1])]
    calls.clear()
    optimized(encoder, torch.zeros(2, 3, 9, dtype=torch.int64), lengths)
    assert calls == [([6, 7], [7, 7, 5, 3, 2, 1])]


def test_zero_rows_per_batch_raise_value_error():
    with pytest.raises(ValueError, match="rows=0: a batch has at least one row"):
        optimized(*drawn(), rows=0)
