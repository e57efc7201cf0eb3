"""The language model: transformers' Llama, in which a token does not depend on later ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from suite.polychromic.llama import Llama, Shape

SHAPE = Shape(vocabulary=64, width=32, hidden=48, layers=3, heads=4, kv_heads=2, head_width=8, positions=64)


def tokens() -> torch.Tensor:
    return torch.randint(SHAPE.vocabulary, (3, 20), generator=torch.Generator().manual_seed(0))


# transformers imports torchao if it is installed; Python warns when it first compiles torchao's docstrings.
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("tied", [True, False])
def test_llama_matches_transformers_bitwise(tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = Llama(replace(SHAPE, tied=tied))
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(tokens()), theirs(tokens()).logits)


def test_attention_is_causal() -> None:
    model, given = Llama(SHAPE), tokens()
    other = torch.cat((given[:, :12], given.flip(1)[:, :8]), 1)
    with torch.no_grad():
        torch.testing.assert_close(model(given)[:, :12], model(other)[:, :12], atol=0, rtol=0)
        assert not torch.equal(model(given)[:, 12:], model(other)[:, 12:])


def test_attention_depends_only_on_relative_positions() -> None:
    """A rotation of all positions by the same angle changes no product of a query and a key."""
    model, given = Llama(SHAPE).double(), tokens()
    with torch.no_grad():
        first = model(given)
        heads = type(model.model.layers[0].self_attn).heads
        turned = torch.linspace(1.0, 2.0, 4, dtype=torch.float64).repeat(2)

        def later(self, x, cos, sin):  # type: ignore[no-untyped-def]
            moved = cos * turned.cos() - sin * turned.sin(), sin * turned.cos() + cos * turned.sin()
            return heads(self, x, *moved)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.model.layers[0].self_attn), "heads", later)
            torch.testing.assert_close(model(given), first, atol=1e-12, rtol=1e-12)


def test_tied_model_shares_the_embedding_matrix() -> None:
    model = Llama(SHAPE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert Llama(replace(SHAPE, tied=False)).lm_head.weight is not model.lm_head.weight
