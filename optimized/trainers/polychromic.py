"""polychromic: fine-tuning of a language model for replies that differ, built from the optimized modules.

The same step as `reference.trainers.polychromic` makes, with each technique behind a switch of its own
(`suite.polychromic.config`). The replies to all prompts are drawn together, from kept keys and values; all sets are
embedded in one batch, and their policy's gradient is that of one batch, too.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from optimized.attention.flash_attention import flash_attention
from optimized.generation.fused_lora import fused_lora
from suite.backends import tf32_products
from suite.polychromic import advantages
from suite.polychromic.batches import batch_of, prompts_of
from suite.polychromic.chat import Encoded
from suite.polychromic.config import DTYPES, TrainConfig
from suite.polychromic.data import Given, examples_of, uniforms
from suite.polychromic.lora import LoRALinear, kept
from suite.polychromic.objective import nucleus, rows_of, sets_of, texts, widened_loss
from suite.polychromic.report import Report
from suite.polychromic.state import adapted, drop, restore, state_of, weights_of
from suite.runtime.ranges import phase
from suite.runtime.reports import Reports
from suite.stepping import QueuesReports, Throughput
from suite.techniques import implementation

# Steps that may be queued before the host waits for the report of an earlier one.
AHEAD = 2


class FusedLoRALinear(LoRALinear):
    """The adapted layer by `fused_lora` where it is differentiated; one token of a few rows gains nothing by it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        rate, tokens = self.settings.dropout, x.flatten(0, -2)
        given = None
        if self.seed is not None and rate:
            given = kept(self.seed, self.number, tuple(tokens.shape), rate, x.device)
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        found = fused_lora(tokens, self.weight, a, b, self.scale, given, 1 - rate if given is not None else 1.0)
        return found.unflatten(0, x.shape[:-1])


class Trainer(QueuesReports):
    """The optimized trainer. `train_window` queues a step; `metrics` gives what has been reported so far.

    given  examples and models, as `suite.polychromic.data.load` opens them
    """

    window_name = "step"

    def __init__(self, config: TrainConfig, given: Given, device: torch.device | str) -> None:
        self.config, self.given, self.device = config, given, torch.device(device)
        self.model = given.language_model(DTYPES[config.dtype], self.device)
        layer = FusedLoRALinear if config.fused_lora else LoRALinear
        self.adapters = adapted(self.model, config.adapters, config.seed, torch.float32, layer)
        self.weights = weights_of(self.adapters)
        self.sentences = given.sentences(self.device) if config.diversity else None
        self.lr = torch.zeros((), device=self.device)
        self._choose()
        # Gradients are clipped before.
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
        """A step on the examples that come next, by the number of steps made.

        `batch["step"]` may say that number, from 0; ValueError where it is another.
        """
        config, examples = self.config, examples_of(self.config, self.given, self.steps, batch)
        with torch.enable_grad(), tf32_products(allowed=False):
            diversity, tokens, grads = self._policy_gradient(examples[: config.prompts])
            with phase("cross-entropy"):
                loss, own = self._supervised(examples)
            if grads:
                torch._foreach_add_(own, grads)
            with torch.no_grad(), phase("optimizer"):
                norm = self._clip(own, config.clip)
                self.lr.fill_(config.rate(self.steps))
                self.optimizer(own)
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
        """Return what training has changed."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. ValueError where a shape is another."""
        restore(self, state)
        self.steps = state["steps"]

    def _choose(self) -> None:
        """The implementation of each technique that the configuration asks for."""
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
        self._mean = of("diversity.mean_pairwise_cosine", "mean_pairwise_cosine", config.pairwise_cosine)
        self._policy_loss = of("losses.set_policy_loss", "set_policy_loss", config.set_policy_loss)
        self._cross_entropy = of("losses.chunked_cross_entropy", "chunked_cross_entropy", config.chunked_cross_entropy)
        self._clip = of("optimizers.clip_grad_norm", "clip_grad_norm", config.clip_grad_norm)
        self._scaler_step = of("synchronization.sync_free_scaler_step", "ScalerStep", config.sync_free_scaler_step)
        self._block: Callable[..., torch.Tensor] = functools.partial(_attending, flash_attention)
        if not config.flash_attention:
            self._block = _plain

    # --- the examples

    def _supervised(self, examples: Sequence[Encoded]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The mean cross-entropy of the examples' replies, and its gradients."""
        size, end = self.config.batch_size, self.given.chat.end
        whole = sum(len(e.tokens) - e.prompt for e in examples)
        losses, grads = [], []
        for number, at in enumerate(range(0, len(examples), size)):
            own = examples[at : at + size]
            part = batch_of(own, end, self.device)
            drop(self.adapters, self.config.seed, self.steps, number)
            hidden = self._hidden(part.tokens)[:, :-1].flatten(0, 1)
            share = sum(len(e.tokens) - e.prompt for e in own) / whole
            with widened_loss(hidden):
                loss = share * self._cross_entropy(hidden, self.model.lm_head.weight, part.labels[:, 1:].flatten())
            found = self._gradients(loss)
            if grads:
                torch._foreach_add_(grads, found)
            else:
                grads = found
            losses.append(loss.detach())
        drop(self.adapters, None)
        return torch.stack(losses).sum(), grads

    # --- the replies

    def _policy_gradient(self, examples: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(the sets' mean diversity, tokens of a reply, the gradients of minus λ times the expected diversity)."""
        config, end = self.config, self.given.chat.end
        none = torch.zeros((), device=self.device)
        if not config.diversity:
            return none, none, []
        prompts = prompts_of(examples, end, self.device)
        numbers = uniforms(config.seed, self.steps, (len(examples), config.replies, config.new_tokens), self.device)
        with torch.no_grad(), phase("generation"):
            drawn = self._generate(
                self.model,
                prompts.tokens,
                prompts.lengths,
                numbers,
                config.temperature,
                config.top_p,
                end,
                **self._sampling,
            )
        with torch.no_grad(), phase("embedding"):
            said = texts(self.given.chat, drawn)
            embeddings = self._embed(
                self.sentences.encoder, *sets_of(self.sentences, said, config.replies, self.device)
            )
            distances = torch.stack([self._distances(of_set) for of_set in embeddings])
            diversity = torch.stack([self._mean(of_set) for of_set in embeddings]).mean()
        rows = rows_of(prompts, drawn, end)
        tokens = rows.sampled.sum(1).float().mean()
        if config.objective == "as_written":
            return diversity, tokens, []
        with phase("policy"):
            hidden = self._hidden(rows.tokens)
            before = hidden.gather(1, rows.before[..., None].expand(-1, -1, hidden.shape[-1]))
            logits = functional.linear(before, self.model.lm_head.weight)
            own = advantages.without_own_reply(distances)
            drawn_from = nucleus(logits, rows.drawn, config.temperature, config.top_p)
            loss = config.diversity * self._policy_loss(drawn_from, rows.drawn, rows.sampled, own)
            return diversity, tokens, self._gradients(loss)

    # --- the model

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.config.activation_checkpoint:
            return self.model.hidden(tokens, self._block)
        return self.model.hidden(tokens, lambda *given: checkpoint(self._block, *given, use_reentrant=False))

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(self.weights.values())))


def _plain(block: nn.Module, *given: torch.Tensor) -> torch.Tensor:
    return block(*given)


def _attending(
    attention: Callable[..., torch.Tensor],
    block: nn.Module,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The block with another attention, which needs no mask: it is causal."""
    attended = attention(*block.self_attn.heads(block.input_layernorm(x), cos, sin))
    x = x + block.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    return x + block.mlp(block.post_attention_layernorm(x))
