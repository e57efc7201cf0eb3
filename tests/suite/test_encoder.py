"""The sentence encoder: transformers' BERT with mean pooling, in which rows are independent."""

from __future__ import annotations

import pytest
import torch

from suite.polychromic.encoder import EncoderShape, SentenceEncoder
from suite.polychromic.trial import MINILM, sentence_encoder

SIZES = {"vocabulary": 50, "layers": 3, "heads": 4, "head_width": 8, "positions": 24}


def drawn(rows: int = 5, longest: int = 20) -> tuple[SentenceEncoder, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    encoder = sentence_encoder(**SIZES)
    return encoder, torch.randint(50, (rows, longest)), torch.randint(1, longest + 1, (rows,))


def test_encoder_matches_transformers_bert() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=24,
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    ours, tokens, lengths = drawn()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    ours.load_state_dict({name: weight for name, weight in theirs.state_dict().items() if "position_ids" not in name})
    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
    with torch.no_grad():
        last = theirs(input_ids=tokens, attention_mask=inside.long()).last_hidden_state
        mean = (last * inside[..., None]).sum(1) / lengths[:, None]
        torch.testing.assert_close(ours(tokens, lengths), mean)


def test_encoder_matches_torch_s_transformer_encoder_layer() -> None:
    """torch's layer gets the same weights and is post-norm with GELU; mean pooling follows."""
    ours, tokens, lengths = drawn()
    ours = ours.double()
    x = ours.embeddings(tokens)
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    for layer in ours.encoder.layer:
        theirs = torch.nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True, dtype=torch.float64
        )
        attention, own = layer.attention, layer.attention.self
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([p.weight for p in (own.query, own.key, own.value)]),
                "self_attn.in_proj_bias": torch.cat([p.bias for p in (own.query, own.key, own.value)]),
                "self_attn.out_proj.weight": attention.output.dense.weight,
                "self_attn.out_proj.bias": attention.output.dense.bias,
                "linear1.weight": layer.intermediate.dense.weight,
                "linear1.bias": layer.intermediate.dense.bias,
                "linear2.weight": layer.output.dense.weight,
                "linear2.bias": layer.output.dense.bias,
                "norm1.weight": attention.output.LayerNorm.weight,
                "norm1.bias": attention.output.LayerNorm.bias,
                "norm2.weight": layer.output.LayerNorm.weight,
                "norm2.bias": layer.output.LayerNorm.bias,
            }
        )
        x = theirs(x, src_key_padding_mask=padding)
    means = torch.stack([row[:length].mean(0) for row, length in zip(x, lengths.tolist(), strict=True)])
    torch.testing.assert_close(ours(tokens, lengths), means)


def test_embeddings_are_the_sum_of_word_position_and_type() -> None:
    ours, tokens, _ = drawn()
    parts = ours.embeddings
    summed = (
        parts.word_embeddings(tokens)
        + parts.position_embeddings(torch.arange(20))
        + parts.token_type_embeddings.weight[0]
    )
    torch.testing.assert_close(parts(tokens), torch.nn.functional.layer_norm(summed, (32,), eps=1e-12))


def test_output_does_not_depend_on_padding_or_other_rows() -> None:
    encoder, tokens, lengths = drawn()
    other = torch.where(torch.arange(20) < lengths[:, None], tokens, 49 - tokens)
    with torch.no_grad():
        found = encoder(tokens, lengths)
        assert torch.equal(encoder(other, lengths), found)
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(encoder(tokens[row : row + 1, :length], lengths[row : row + 1])[0], found[row])


def test_all_minilm_l6_v2_has_22_6_million_parameters() -> None:
    with torch.device("meta"):
        encoder = SentenceEncoder(EncoderShape())
    assert sum(p.numel() for p in encoder.parameters()) == 22_565_376
    shape = EncoderShape()
    sizes = {
        "vocabulary": shape.vocabulary,
        "layers": shape.layers,
        "heads": shape.heads,
        "head_width": shape.width // shape.heads,
        "positions": shape.positions,
    }
    assert sizes == MINILM
