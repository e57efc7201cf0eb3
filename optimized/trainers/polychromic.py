"""The optimized trainer of polychromic, with a switch for each technique.

Its steps equal those of `reference/trainers/polychromic.py`, up to rounding. The switches are in
`suite.polychromic.config`. The replies to all prompts are drawn together, with a KV cache. All sets are embedded in one
batch, and their policy gradient is computed in one batch, too. While the host decodes the replies to text, the device
computes the examples' gradients.

Source: polychromic.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optimized.attention.flash_attention import flash_attention, flash_attention_packed
from optimized.block_kernels import gated, gated_torch, normed, normed_torch, turned, turned_torch
from optimized.dropout_masks import kept_bits
from optimized.generation.fused_lora import fused_lora
from optimized.generation.fused_lora_nf4 import fused_lora_nf4, nf4_weight
from optimized.graphs.cuda_graph_step import CudaGraphs, CudaGraphStep
from suite.backends import tf32_products
from suite.polychromic import advantages
from suite.polychromic.batches import Prompts, batch_of, groups_of, packed, prompts_of
from suite.polychromic.chat import Encoded
from suite.polychromic.config import DTYPES, TrainConfig
from suite.polychromic.data import TrainerData, examples_of, uniforms
from suite.polychromic.llama import rotation
from suite.polychromic.lora import Dropout, LoRALinear, places_of, starts_of
from suite.polychromic.lora_nf4 import NF4LoRALinear
from suite.polychromic.objective import nucleus, rows_of, sets_of, texts, widened_loss
from suite.polychromic.report import Report
from suite.polychromic.state import adapted, drop, restore, state_of, weights_of
from suite.runtime.ranges import phase
from suite.runtime.reports import Reports
from suite.stepping import QueuesReports, Throughput
from suite.techniques import implementation

# Steps that may be queued before the host waits for the report of an earlier one.
AHEAD = 2
# Packed examples, and prompts with their replies, are padded to a multiple of this many tokens: each length needs its
# own CUDA graph, and cuDNN's attention is used only for multiples of 128.
MULTIPLE = 128
# Number of eager calls for each form of the inputs before its graph is captured, and number of graphs that are kept.
WARMUP, GRAPHS = 1, 8


class FusedLoRALinear(LoRALinear):
    """LoRA layer that uses `fused_lora` if gradients are enabled, and PyTorch operations otherwise.

    Generation, which processes a few rows of one token each, gains nothing from `fused_lora`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        rate, own, given = self.settings.dropout, self.dropout, None
        if own is not None and rate:
            given = kept_bits(own.starts[self.number], own.places.flatten(), x.shape[-1], rate)
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        keep = 1 - rate if given is not None else 1.0
        return self.fused(x.flatten(0, -2), a, b, self.scale, given, keep).unflatten(0, x.shape[:-1])

    def fused(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        """Compute the layer with its adapter for tokens [N, inputs]."""
        return fused_lora(x, self.weight, *given)


class FusedNF4LoRALinear(FusedLoRALinear, NF4LoRALinear):
    """LoRA layer with 4-bit weights that uses `fused_lora_nf4` if gradients are enabled.

    Otherwise it uses PyTorch operations on weights that the same kernel dequantises.
    """

    def fused(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return fused_lora_nf4(x, self.codes, self.absmax, *given)

    @property
    def weight(self) -> torch.Tensor:
        return nf4_weight(self.codes, self.absmax, self.dtype)


LORA_LAYERS: Mapping[tuple[str, bool], type[LoRALinear]] = {
    ("none", False): LoRALinear,
    ("none", True): FusedLoRALinear,
    ("nf4", False): NF4LoRALinear,
    ("nf4", True): FusedNF4LoRALinear,
}
"""(quantization, fused_lora) of the configuration → class of the adapted layers."""


class Trainer(QueuesReports):
    """The optimized trainer. `train_window` queues a step; `metrics` returns the last metrics that have arrived.

    data   examples and models, as `suite.polychromic.data.load` returns them
    """

    window_name = "step"

    def __init__(self, config: TrainConfig, data: TrainerData, device: torch.device | str) -> None:
        self.config, self.data, self.device = config, data, torch.device(device)
        self.model = data.language_model(DTYPES[config.dtype], self.device)
        layer = LORA_LAYERS[config.quantization, config.fused_lora]
        self.adapters = adapted(self.model, config.adapters, config.seed, torch.float32, layer)
        self.weights = weights_of(self.adapters)
        self.sentences = data.sentences(self.device) if config.diversity else None
        self.lr = torch.zeros((), device=self.device)
        self._sums = [torch.zeros_like(weight) for weight in self.weights.values()]
        self._choose()
        # `train_window` clips the gradients, so the optimizer must not clip them again.
        self.optimizer = self._scaler_step(
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
            torch._foreach_zero_(self._sums)
            drawn = self._replies(examples[: config.prompts]) if config.diversity else None
            with phase("cross-entropy"):
                loss = self._supervised(examples)
            diversity = tokens = torch.zeros((), device=self.device)
            if drawn is not None:
                diversity, tokens = self._policy_gradient(drawn)
            with torch.no_grad(), phase("optimizer"):
                norm = self._clip(self._sums, config.clip)
                self.lr.fill_(config.rate(self.steps))
                # The optimizer divides by its scale, which is below 1 after a step with non-finite gradients.
                torch._foreach_mul_(self._sums, self.optimizer.scale)
                self.optimizer(self._sums)
        self.steps += 1
        step, rate = self.steps, config.rate(self.steps - 1)

        def read(whole: torch.Tensor) -> Report:
            values = whole.tolist()
            return Report(
                step=step,
                cross_entropy=values[0],
                diversity=values[1],
                tokens=values[2],
                rate=rate,
                norm=values[3],
                weight=config.diversity,
            )

        self._reports.send(torch.stack([t.float() for t in (loss, diversity, tokens, norm)]), read)
        self._reports.wait(AHEAD)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint: all state that training changes, the configuration and the models' source."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state. ValueError if a shape differs."""
        restore(self, state)
        self.steps = state["steps"]

    def _choose(self) -> None:
        """Choose the implementation of each technique: optimized if its switch is on, otherwise the reference."""
        config = self.config

        def of(module: str, function: str, on: bool) -> Callable[..., Any]:
            return implementation(module, function, optimized=on)

        self._generate = of("generation.batched_generation", "batched_generation", config.batched_generation)
        self._sampling = {}
        if config.batched_generation:
            sample = of("generation.parallel_sampling", "parallel_sampling", config.parallel_sampling)
            self._sampling = {"sample": sample}
        self._embed = of("diversity.encoder_batching", "encoder_batching", config.encoder_batching)
        self._distances = of("diversity.pairwise_cosine", "pairwise_cosine", config.pairwise_cosine)
        if config.pairwise_cosine_cuda:
            self._distances = of("diversity.pairwise_cosine_cuda", "pairwise_cosine_cuda", True)
        self._mean = of("diversity.mean_pairwise_cosine", "mean_pairwise_cosine", config.pairwise_cosine)
        self._policy_loss = of("losses.set_policy_loss", "set_policy_loss", config.set_policy_loss)
        self._cross_entropy = of("losses.chunked_cross_entropy", "chunked_cross_entropy", config.chunked_cross_entropy)
        self._clip = of("optimizers.clip_grad_norm", "clip_grad_norm", config.clip_grad_norm)
        self._scaler_step = of("synchronization.sync_free_scaler_step", "ScalerStep", config.sync_free_scaler_step)
        self._parts = FUSED if config.fused_blocks else PLAIN
        self._block: Callable[..., torch.Tensor] = functools.partial(_attending, _dense_attention, self._parts)
        if not config.flash_attention:
            self._block = _plain
        self._packs = config.packed_examples and config.flash_attention
        self._packed_pass: Callable[..., torch.Tensor] = self._packed
        self._policy_pass: Callable[..., torch.Tensor] = self._policy
        # In float32, packed attention needs the host, which a capture excludes.
        if config.cuda_graph_step and self.device.type == "cuda" and DTYPES[config.dtype].itemsize == 2:
            given: dict[str, Any] = {
                "warmup": WARMUP,
                "graphs": GRAPHS,
                "device": self.device,
                # The graphs can share memory: after a pass only its loss, a copy, and the gradients' sums are used.
                "backend": CudaGraphs(torch.cuda.graph_pool_handle()),
            }
            self._packed_pass = CudaGraphStep(self._packed, **given)
            self._policy_pass = CudaGraphStep(self._policy, **given)

    # --- the examples

    def _supervised(self, examples: Sequence[Encoded]) -> torch.Tensor:
        """Add the gradients of the examples' mean cross-entropy to the sums; return that mean, 0-d."""
        config, end = self.config, self.data.chat.end
        whole = sum(len(e.tokens) - e.prompt for e in examples)
        starts = starts_of(config.seed, self.steps, len(self.adapters)).to(self.device)
        losses = []
        if self._packs:
            for group in groups_of(examples, config.packed_tokens):
                part = packed([examples[n] for n in group], group.start, end, MULTIPLE, self.device)
                share = torch.tensor(part.count / whole).to(self.device)
                given = (part.tokens, part.targets, part.positions, part.places, part.offsets)
                losses.append(self._packed_pass(*given, starts, share, longest=max(config.length, MULTIPLE)))
        else:
            for at in range(0, len(examples), config.batch_size):
                own = examples[at : at + config.batch_size]
                batch = batch_of(own, end, self.device)
                drop(self.adapters, Dropout(starts, places_of(at, batch.tokens.shape, self.device)))
                hidden = self._hidden(batch.tokens)[:, :-1].flatten(0, 1)
                share = sum(len(e.tokens) - e.prompt for e in own) / whole
                losses.append(self._loss(hidden, batch.labels[:, 1:].flatten(), share))
        drop(self.adapters, None)
        return torch.stack(losses).sum()

    def _packed(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        offsets: torch.Tensor,
        starts: torch.Tensor,
        share: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Add the gradients of packed examples' loss to the sums; return the loss.

        The loss is their cross-entropy times their share of the step.
        """
        drop(self.adapters, Dropout(starts, places[None]))
        body = self.model.model
        x = body.embed_tokens(tokens[None])
        cos, sin = rotation(self.model.shape, positions, x.dtype)
        attention = functools.partial(_packed_attention, offsets=offsets, longest=longest)
        for block in body.layers:
            x = self._run(functools.partial(_attending, attention, self._parts), block, x, cos, sin)
        return self._loss(self._parts.norm(body.norm, x)[0], targets, share)

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
        with widened_loss(hidden):
            loss = share * self._cross_entropy(hidden, self.model.lm_head.weight, labels)
        return self._differentiated(loss)

    # --- the replies

    def _replies(self, examples: Sequence[Encoded]) -> "Drawn":
        """Queue the generation of replies, and their copy to the host."""
        config, end = self.config, self.data.chat.end
        multiple = MULTIPLE if self.device.type == "cuda" else 1
        prompts = prompts_of(examples, end, self.device, config.new_tokens, multiple)
        numbers = uniforms(config.seed, self.steps, (len(examples), config.replies, config.new_tokens), self.device)
        with torch.no_grad(), phase("generation"):
            tokens = self._generate(
                self.model,
                prompts.tokens,
                prompts.lengths,
                numbers,
                config.temperature,
                config.top_p,
                end,
                **self._sampling,
            )
            return Drawn(prompts, tokens, OnHost(tokens))

    def _policy_gradient(self, drawn: "Drawn") -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of -λ times the expected diversity to the sums, with `objective: policy`.

        Return (the sets' mean diversity, mean tokens of a reply), 0-d each. Waits for the drawn replies.
        """
        config = self.config
        with torch.no_grad(), phase("embedding"):
            said = texts(self.data.chat, drawn.on_host.tensor())
            embeddings = self._embed(
                self.sentences.encoder, *sets_of(self.sentences, said, config.replies, self.device)
            )
            distances = torch.stack([self._distances(of_set) for of_set in embeddings])
            diversity = torch.stack([self._mean(of_set) for of_set in embeddings]).mean()
        rows = rows_of(drawn.prompts, drawn.tokens, self.data.chat.end)
        if config.objective == "policy":
            with phase("policy"):
                own = advantages.without_own_reply(distances)
                self._policy_pass(rows.tokens, rows.before, rows.drawn, rows.sampled, own)
        return diversity, rows.sampled.sum(1).float().mean()

    def _policy(
        self,
        tokens: torch.Tensor,
        before: torch.Tensor,
        drawn: torch.Tensor,
        sampled: torch.Tensor,
        own: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        hidden = self._hidden(tokens)
        hidden = hidden.gather(1, before[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = functional.linear(hidden, self.model.lm_head.weight)
        drawn_from = nucleus(logits, drawn, config.temperature, config.top_p)
        return self._differentiated(config.diversity * self._policy_loss(drawn_from, drawn, sampled, own))

    # --- the model

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.hidden(tokens, functools.partial(self._run, self._block))

    def _run(self, block: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """Apply a block; with `activation_checkpoint`, recompute it in the backward pass."""
        if not self.config.activation_checkpoint:
            return block(*given)
        # A block uses no random numbers of PyTorch's: dropout is counter-based.
        again: torch.Tensor = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
        return again

    def _differentiated(self, loss: torch.Tensor) -> torch.Tensor:
        """Add the loss's gradients to the sums; return the loss."""
        torch._foreach_add_(self._sums, torch.autograd.grad(loss, list(self.weights.values())))
        return loss.detach()


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drawn replies [prompts, replies, tokens], and their copy to the host."""

    prompts: Prompts
    tokens: torch.Tensor
    on_host: "OnHost"


class OnHost:
    """An asynchronous copy of a tensor to the host; the host waits only when it reads the copy."""

    def __init__(self, source: torch.Tensor) -> None:
        self._copy, self._arrived = source, None
        if source.is_cuda:
            self._copy = torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(source.device))

    def tensor(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


def _plain(block: nn.Module, *given: torch.Tensor) -> torch.Tensor:
    called: torch.Tensor = block(*given)
    return called


class Parts(NamedTuple):
    """A block's functions: the norm, the rotary embedding of heads [B, T, heads, width], and the gate of the MLP."""

    norm: Callable[..., torch.Tensor]
    turn: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]


FUSED = Parts(normed, turned, gated)
PLAIN = Parts(normed_torch, turned_torch, gated_torch)


def _attending(
    attention: Callable[..., torch.Tensor],
    parts: Parts,
    block: nn.Module,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a block with another attention, a function of heads [B, T, heads, width].

    The attention is causal, so `mask` is ignored.
    """
    own, mlp, width = block.self_attn, block.mlp, cos.shape[-1]
    given = parts.norm(block.input_layernorm, x)
    q, k, v = (project(given).unflatten(-1, (-1, width)) for project in (own.q_proj, own.k_proj, own.v_proj))
    attended = attention(parts.turn(q, cos, sin), parts.turn(k, cos, sin), v)
    x = x + own.o_proj(attended.flatten(2))
    given = parts.norm(block.post_attention_layernorm, x)
    return x + mlp.down_proj(parts.gate(mlp.gate_proj(given), mlp.up_proj(given)))


def _dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, offsets: torch.Tensor, longest: int
) -> torch.Tensor:
    """Compute the attention of packed sequences, with heads [1, N, heads, width]."""
    return flash_attention_packed(q[0], k[0], v[0], offsets, longest=longest)[None]
