"""A sentence encoder with BERT's architecture, mean pooling, and the parameter names of transformers' BertModel.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """Sizes of the encoder. The defaults are those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    width: int = 384
    hidden: int = 1536
    layers: int = 6
    heads: int = 12
    positions: int = 512
    types: int = 2
    eps: float = 1e-12


class Embeddings(nn.Module):
    """Layer norm of the sum of the word, position and type-0 embeddings."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embeddings = nn.Embedding(shape.positions, shape.width)
        self.token_type_embeddings = nn.Embedding(shape.types, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, eps=shape.eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.position_embeddings.weight[: tokens.shape[1]]
        normed: torch.Tensor = self.LayerNorm(
            self.word_embeddings(tokens) + self.token_type_embeddings.weight[0] + places
        )
        return normed


class SelfAttention(nn.Module):
    """Multi-head self-attention over the tokens that the mask allows."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Output(nn.Module):
    """Projection, residual connection to the sublayer's input, and layer norm."""

    def __init__(self, inner: int, shape: EncoderShape) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, eps=shape.eps)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(x) + before)
        return normed


class Attention(nn.Module):
    """Self-attention with its output projection, residual connection and norm."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.self = SelfAttention(shape)
        self.output = Output(shape.width, shape)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.self(x, mask), x)
        return found


class Intermediate(nn.Module):
    """First projection of the MLP, followed by GELU."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(self.dense(x))


class Layer(nn.Module):
    """Attention and MLP, each followed by a residual connection and a norm."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = Output(shape.hidden, shape)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, mask)
        found: torch.Tensor = self.output(self.intermediate(x), x)
        return found


class Layers(nn.Module):
    """The stack of layers."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class SentenceEncoder(nn.Module):
    """Sentence encoder: the mean of the last layer's outputs over the tokens of a sentence, not normalised. No dropout.

    The other rows and the padding change a row's embedding only by rounding. Weights are initialised as in
    transformers: normal with standard deviation 0.02, biases 0.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.encoder = Layers(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, width].

        tokens   int64 [B, T], T at most the number of positions; padding may be any token of the vocabulary
        lengths  int64 [B], 1 or more
        """
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        x = self.encoder(self.embeddings(tokens), inside[:, None, None])
        total: torch.Tensor = x.masked_fill(~inside[..., None], 0.0).sum(1)
        return total / lengths[:, None]
