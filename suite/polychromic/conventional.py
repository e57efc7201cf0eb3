"""A good conventional implementation of polychromic with standard libraries: the baseline of the trainers' timings.

It uses transformers' model with scaled_dot_product_attention, PEFT's adapters, torch.compile for each block, and
fused AdamW. One compiled call of `generate` with a static cache samples all replies. `Conventional` imports both
packages when it is constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from suite.polychromic import advantages
from suite.polychromic.batches import IGNORED, batch_of, prompts_of
from suite.polychromic.chat import Encoded
from suite.polychromic.config import DTYPES, TrainConfig
from suite.polychromic.data import TrainerData, examples_of
from suite.polychromic.drawn import SHAPES
from suite.polychromic.lora import LAYERS
from suite.polychromic.objective import nucleus, rows_of, texts

# Prompts are padded to a multiple of 64 tokens.
MULTIPLE = 64


class Conventional:
    """Runs the same steps as the trainers, on the same examples. Its random numbers are those of the libraries.

    PerfsuiteError if transformers or PEFT is not installed.
    """

    def __init__(
        self, config: TrainConfig, data: TrainerData, device: torch.device | str, *, compiles: bool = True
    ) -> None:
        try:
            import peft
            import transformers
        except ImportError as error:
            raise PerfsuiteError(f"the conventional set-up needs transformers and peft: {error}") from None
        if config.quantization != "none":
            raise PerfsuiteError("the conventional set-up has no weights in 4 bits; use quantization: none")
        self.config, self.data, self.device = config, data, torch.device(device)
        base = _model(transformers, data, DTYPES[config.dtype], self.device)
        if config.activation_checkpoint:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(LAYERS),
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(config.seed)
        self.model: Any = peft.get_peft_model(base, settings)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, config.learning_rate, weight_decay=config.weight_decay, fused=self.device.type == "cuda"
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: config.rate(step) / config.learning_rate
        )
        self.sentences = data.sentences(self.device)
        if compiles:
            for block in base.model.layers:
                block.forward = _compiled(block.forward)
        self._checkpointed = list(base.model.layers) if config.activation_checkpoint else []
        self.cache = "static" if compiles else None
        self.steps = 0
        self.last: dict[str, float] = {}

    def train_window(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Run one optimizer step."""
        config, examples = self.config, examples_of(self.config, self.data, self.steps, batch)
        diversity = self._policy_gradient(examples[: config.prompts]) if config.diversity else None
        whole = sum(len(e.tokens) - e.prompt for e in examples)
        losses = []
        self.model.train()
        for at in range(0, len(examples), config.batch_size):
            part = batch_of(examples[at : at + config.batch_size], self.data.chat.end, self.device)
            logits = self.model(input_ids=part.tokens, use_cache=False).logits[:, :-1].float()
            labels = part.labels[:, 1:]
            loss = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / whole).backward()
            losses.append(loss.detach() / whole)
        torch.nn.utils.clip_grad_norm_(self.trained, config.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.last = {"cross_entropy": float(torch.stack(losses).sum())}
        if diversity is not None:
            self.last["diversity"] = float(diversity)

    def _policy_gradient(self, examples: Sequence[Encoded]) -> torch.Tensor:
        """Accumulate the gradient of −λ times the expected diversity. Return the mean diversity of the sets."""
        config, end = self.config, self.data.chat.end
        tokens, mask = self._left_padded(examples)
        self.model.eval()
        with torch.no_grad():
            found = self.model.generate(
                input_ids=tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=0,
                max_new_tokens=config.new_tokens,
                num_return_sequences=config.replies,
                pad_token_id=end,
                eos_token_id=end,
                **({"cache_implementation": self.cache} if self.cache else {}),
            )
            new = found[:, tokens.shape[1] :]
            new = functional.pad(new, (0, config.new_tokens - new.shape[1]), value=end)
            drawn = new.unflatten(0, (-1, config.replies))
            said = texts(self.data.chat, drawn)
            embedded = self.sentences.encoder(*self.sentences.tokenized(said, self.device))
            unit = functional.normalize(embedded, dim=-1).unflatten(0, (-1, config.replies))
            distances = 1 - unit @ unit.mT
        rows = rows_of(prompts_of(examples, end, self.device), drawn, end)
        for block in self._checkpointed:
            block.training = True  # transformers checkpoints a block in training mode only; its dropout stays off
        whole = self.model(input_ids=rows.tokens, use_cache=False).logits
        logits = whole.gather(1, rows.before[..., None].expand(-1, -1, whole.shape[-1]))
        kept = nucleus(logits, rows.drawn, config.temperature, config.top_p)
        log_p = kept.log_softmax(-1).gather(-1, rows.drawn[..., None]).squeeze(-1)
        of_replies = log_p.masked_fill(~rows.sampled, 0.0).sum(-1).unflatten(0, (-1, config.replies))
        own = advantages.without_own_reply(distances)
        (-config.diversity * (own * of_replies).sum(-1).mean()).backward()
        pairs = config.replies * (config.replies - 1) / 2
        diversity: torch.Tensor = distances.triu(1).sum((-2, -1)).mean() / pairs
        return diversity

    def _left_padded(self, examples: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompts [prompts, length], left-padded for `generate`, and their attention mask.

        The length is a multiple of `MULTIPLE`, because `generate` recompiles the model for each new length.
        """
        longest = -(-max(e.prompt for e in examples) // MULTIPLE) * MULTIPLE
        rows = [[*[self.data.chat.end] * (longest - e.prompt), *e.tokens[: e.prompt]] for e in examples]
        mask = [[*[0] * (longest - e.prompt), *[1] * e.prompt] for e in examples]
        return torch.tensor(rows, device=self.device), torch.tensor(mask, device=self.device)


def _model(transformers: Any, data: TrainerData, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the model from its folder, or build one of the named size with random weights."""
    if data.model not in SHAPES:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(data.model, dtype=dtype, attn_implementation="sdpa")
        return loaded.to(device)
    shape = SHAPES[data.model]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    if getattr(config, "rope_parameters", None):
        config.rope_parameters["rope_theta"] = shape.rope_theta
    else:  # before transformers 5
        config.rope_theta = shape.rope_theta
    with device:
        return transformers.LlamaForCausalLM(config).to(dtype)


def _compiled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compile a block's forward for calls without a KV cache. For calls with one, `generate` compiles the whole model.

    All blocks share one compilation. Compiling the whole model for training as well takes more than 5 min.
    """
    quick = torch.compile(forward, dynamic=True)

    def chosen(*given: Any, past_key_values: Any = None, **options: Any) -> torch.Tensor:
        if past_key_values is None:
            return quick(*given, **options)
        return forward(*given, past_key_values=past_key_values, **options)

    return chosen
