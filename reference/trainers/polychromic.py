"""The reference trainer of polychromic, which fine-tunes a language model for diverse replies; plain and eager.

A step draws replies to some of its examples' prompts, one reply after another, and each token from a forward pass over
the whole sequence before it. A sentence encoder embeds the replies set by set. The adapters' gradient is that of the
examples' cross-entropy, computed by micro-batches, minus λ times that of the expected diversity of a set. AdamW is
applied to the clipped gradients.

The source leaves some choices open, and some of it is wrong. This trainer does the following:

* The source's diversity is a number without a gradient. `objective: policy` trains on the gradient of its expectation.
  The baseline of a reply is the diversity of its set without that reply. `as_written` only reports the diversity.
* The diversity term of a step is the mean over its sets, whatever the number of micro-batches.
* The cross-entropy is the mean over all trained tokens of a step, as in transformers' Trainer.
* Replies are drawn, and their probabilities computed, without dropout: the probabilities must be those of the sampled
  distribution.
* Both trainers share the code for the model's weights, the adapters' initial weights, the random numbers, the frozen
  sentence encoder, the nucleus and the advantages. The tests compare the last two with the objective written out. The
  model's forward pass is implemented in this file.
* Dropout, replies and the order of the examples depend only on the seed and the step number.

Source: polychromic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from reference.diversity.encoder_batching import encoder_batching
from reference.diversity.mean_pairwise_cosine import mean_pairwise_cosine
from reference.diversity.pairwise_cosine import pairwise_cosine
from reference.generation.batched_generation import batched_generation
from reference.generation.fused_lora import fused_lora
from reference.generation.fused_lora_nf4 import fused_lora_nf4
from reference.losses.chunked_cross_entropy import chunked_cross_entropy
from reference.losses.set_policy_loss import set_policy_loss
from reference.optimizers.clip_grad_norm import clip_grad_norm
from reference.synchronization.sync_free_scaler_step import ScalerStep
from suite.backends import tf32_products
from suite.polychromic import advantages
from suite.polychromic.batches import IGNORED, batch_of, prompts_of
from suite.polychromic.chat import Encoded
from suite.polychromic.config import DTYPES, TrainConfig
from suite.polychromic.data import TrainerData, examples_of, uniforms
from suite.polychromic.lora import Dropout, LoRALinear, kept, places_of, starts_of
from suite.polychromic.lora_nf4 import NF4LoRALinear
from suite.polychromic.objective import Rows, nucleus, rows_of, sets_of, texts, widened_loss
from suite.polychromic.report import Report
from suite.polychromic.state import adapted, drop, restore, state_of, weights_of
from suite.runtime.ranges import phase
from suite.runtime.reports import Reports
from suite.stepping import Throughput, WaitsForReports


class Trainer(WaitsForReports):
    """The reference trainer. `train_window` runs one step; `metrics` returns its metrics.

    data   examples and models, as `suite.polychromic.data.load` opens them
    dtype  working precision, by default the configuration's; float64 for the ground truth
    """

    window_name = "step"

    def __init__(
        self, config: TrainConfig, data: TrainerData, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> None:
        self.config, self.data, self.device = config, data, torch.device(device)
        self.dtype = dtype or DTYPES[config.dtype]
        self.model = data.language_model(self.dtype, self.device)
        trained = torch.promote_types(self.dtype, torch.float32)
        layer = NF4LoRALinear if config.quantization == "nf4" else LoRALinear
        self.adapters = adapted(self.model, config.adapters, config.seed, trained, layer)
        self.weights = weights_of(self.adapters)
        self.sentences = data.sentences(self.device, trained) if config.diversity else None
        self.lr = torch.zeros((), device=self.device, dtype=trained)
        # `train_window` clips the gradients, so the optimizer must not clip them again.
        self.optimizer = ScalerStep(
            list(self.weights.values()),
            self.lr,
            weight_decay=config.weight_decay,
            max_norm=float("inf"),
            scaling=config.scaling,
        )
        self.steps = 0
        self.throughput = Throughput(config.examples, self.device)
        self._reports: Reports[Report] = Reports(self.device, Report.stays)

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Train one step on the next examples, as determined by the number of steps made.

        `batch["step"]`, if given, must be that number, counted from 0; otherwise ValueError.
        """
        config, examples = self.config, examples_of(self.config, self.data, self.steps, batch)
        with torch.enable_grad(), tf32_products(allowed=False):
            diversity, tokens, grads = self._policy_gradient(examples[: config.prompts])
            with phase("cross-entropy"):
                loss, own = self._supervised(examples)
            grads = [a + b for a, b in zip(own, grads, strict=True)] if grads else own
            with torch.no_grad(), phase("optimizer"):
                norm = clip_grad_norm(grads, config.clip)
                self.lr.fill_(config.rate(self.steps))
                # The optimizer divides by its scale, which is below 1 after a step with non-finite gradients.
                self.optimizer([g * self.optimizer.scale for g in grads])
        self.steps += 1
        found = Report(
            step=self.steps,
            cross_entropy=float(loss),
            diversity=diversity,
            tokens=tokens,
            rate=float(self.lr),
            norm=float(norm),
            weight=config.diversity,
        )
        self._reports.send(torch.zeros(0, device=self.device), lambda _: found)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the configuration and the models' source."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]

    # --- the examples

    def _supervised(self, examples: Sequence[Encoded]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the mean cross-entropy of the examples' replies, and its gradients."""
        size, end = self.config.batch_size, self.data.chat.end
        parts = [batch_of(examples[at : at + size], end, self.device) for at in range(0, len(examples), size)]
        counts = [int((part.labels[:, 1:] != IGNORED).sum()) for part in parts]
        total, grads = torch.zeros((), device=self.device, dtype=self.lr.dtype), self._zeros()
        starts = starts_of(self.config.seed, self.steps, len(self.adapters)).to(self.device)
        for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
            drop(self.adapters, Dropout(starts, places_of(number * size, part.tokens.shape, self.device)))
            hidden = self._hidden(part.tokens)[:, :-1].flatten(0, 1)
            share = count / sum(counts)
            with widened_loss(hidden):
                loss = share * chunked_cross_entropy(hidden, self.model.lm_head.weight, part.labels[:, 1:].flatten())
            for own, grad in zip(grads, self._gradients(loss), strict=True):
                own += grad
            total += loss.detach()
        drop(self.adapters, None)
        return total, grads

    # --- the replies

    def _policy_gradient(self, examples: Sequence[Encoded]) -> tuple[float, float, list[torch.Tensor]]:
        """Return (the sets' mean diversity, mean tokens of a reply, gradients of -λ times the expected diversity).

        The gradients are empty with `objective: as_written`. If λ is 0, nothing is drawn and both numbers are 0.
        """
        config, end = self.config, self.data.chat.end
        if not config.diversity:
            return 0.0, 0.0, []
        prompts = prompts_of(examples, end, self.device)
        numbers = uniforms(config.seed, self.steps, (len(examples), config.replies, config.new_tokens), self.device)
        with torch.no_grad(), phase("generation"):
            drawn = batched_generation(
                self._logits, prompts.tokens, prompts.lengths, numbers, config.temperature, config.top_p, end
            )
        with torch.no_grad(), phase("embedding"):
            said = texts(self.data.chat, drawn)
            given = sets_of(self.sentences, said, config.replies, self.device)
            embeddings = encoder_batching(self.sentences.encoder, *given)
            distances = torch.stack([pairwise_cosine(of_set) for of_set in embeddings])
            diversity = torch.stack([mean_pairwise_cosine(of_set) for of_set in embeddings]).mean()
        rows = rows_of(prompts, drawn, end)
        length = float(rows.sampled.sum(1).double().mean())
        if config.objective == "as_written":
            return float(diversity), length, []
        own = advantages.without_own_reply(distances)
        grads = self._zeros()
        for number in range(len(examples)):
            part = slice(number * config.replies, (number + 1) * config.replies)
            of_set = Rows(rows.tokens[part], rows.before[part], rows.drawn[part], rows.sampled[part])
            with phase("policy"):
                loss = config.diversity / len(examples) * self._policy_loss_of(of_set, own[number : number + 1])
                for whole, grad in zip(grads, self._gradients(loss), strict=True):
                    whole += grad
        return float(diversity), length, grads

    def _policy_loss_of(self, rows: Rows, own: torch.Tensor) -> torch.Tensor:
        config = self.config
        hidden = self._hidden(rows.tokens)
        before = hidden.gather(1, rows.before[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = functional.linear(before, self.model.lm_head.weight)
        return set_policy_loss(
            nucleus(logits, rows.drawn, config.temperature, config.top_p), rows.drawn, rows.sampled, own
        )

    # --- the model

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the token after each token, [B, T, V]."""
        return functional.linear(self._hidden(tokens), self.model.lm_head.weight)

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the last hidden states [B, T, width] of tokens [B, T]."""
        body, shape = self.model.model, self.model.shape
        x = functional.embedding(tokens, body.embed_tokens.weight)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float32, device=tokens.device)
        # transformers computes the angles in float32, too.
        angles = positions[:, None].float() * (1.0 / shape.rope_theta ** (pairs / shape.head_width))
        angles = torch.cat((angles, angles), -1)
        causal = positions[:, None] >= positions
        given = (angles.cos().to(x.dtype), angles.sin().to(x.dtype), causal)
        for block in body.layers:
            if self.config.activation_checkpoint:
                x = checkpoint(_block, block, x, *given, use_reentrant=False)
            else:
                x = _block(block, x, *given)
        return _normed(body.norm, x)

    def _gradients(self, loss: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(loss, list(self.weights.values()))

    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros_like(w) for w in self.weights.values()]


def _block(block: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Apply a Llama block with adapters to x [B, T, width].

    cos, sin  [T, D], of the rotary embedding
    causal    bool [T, T], True where a token attends
    """
    own, mlp, width = block.self_attn, block.mlp, cos.shape[-1]
    given = _normed(block.input_layernorm, x)
    q, k, v = (
        _adapted(layer, given).unflatten(-1, (-1, width)).transpose(1, 2)
        for layer in (own.q_proj, own.k_proj, own.v_proj)
    )
    q, k = (y * cos + torch.cat((-y[..., width // 2 :], y[..., : width // 2]), -1) * sin for y in (q, k))
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    scores = (q @ k.mT * width**-0.5).masked_fill(~causal, -torch.inf)
    weights = torch.softmax(_widened(scores), -1).to(x.dtype)
    x = x + _adapted(own.o_proj, (weights @ v).transpose(1, 2).flatten(2))
    given = _normed(block.post_attention_layernorm, x)
    return x + _adapted(mlp.down_proj, functional.silu(_adapted(mlp.gate_proj, given)) * _adapted(mlp.up_proj, given))


def _adapted(layer: LoRALinear, x: torch.Tensor) -> torch.Tensor:
    """Apply a frozen linear layer with its adapter."""
    rate, own, mask = layer.settings.dropout, layer.dropout, None
    if own is not None and rate:
        mask = kept(own.starts[layer.number], own.places, x.shape[-1], rate)
    given = (layer.lora_a.to(x.dtype), layer.lora_b.to(x.dtype), layer.scale, mask, 1 - rate)
    if isinstance(layer, NF4LoRALinear):
        return fused_lora_nf4(x, layer.codes, layer.absmax.to(torch.promote_types(x.dtype, torch.float32)), *given)
    return fused_lora(x, layer.weight, *given)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    wide = _widened(x)
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32; keep other dtypes."""
    return x.float() if x.dtype.itemsize == 2 else x
