"""Configuration of the polychromic trainer: the source's fields and defaults, and a switch for each technique."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from suite.configuration import need
from suite.polychromic.lora import Settings
from suite.polychromic.sampling import LEAST
from suite.scaling import Scaling, scaling_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of the trainer. The reference trainer reads only the fields above the techniques.

    `__post_init__` raises ValueError for an invalid value. The message names the field and the remedy.
    """

    # --- sizes
    length: int = 512
    """Maximum tokens of a prompt and its reply together; a longer reply is truncated."""
    batch_size: int = 2
    """Examples per micro-batch."""
    accumulation: int = 8
    """Micro-batches per optimizer step."""
    prompts: int = 4
    """Number of prompts per step for which the model samples replies: those of the step's first examples."""
    replies: int = 3
    """Replies sampled per prompt, which form a set; 3 or more."""
    new_tokens: int = 100
    """Maximum tokens of a sampled reply."""

    # --- constants
    steps: int = 1000
    """Optimizer steps of the learning-rate schedule, after which the run ends."""
    learning_rate: float = 2e-4
    """Learning rate of the first step. It decays to 0 with a cosine schedule."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Maximum global norm of the gradients; larger gradients are scaled down to it."""
    rank: int = 16
    """Rank of the LoRA adapters."""
    alpha: float = 16.0
    dropout: float = 0.1
    """Dropout probability for the adapters' inputs."""
    diversity: float = 0.3
    """λ, the weight of the diversity relative to the cross-entropy. With 0 no replies are sampled."""
    objective: Literal["policy", "as_written"] = "policy"
    """policy: gradient of the expected diversity; as_written: the source's diversity term, which has no gradient."""
    temperature: float = 0.9
    top_p: float = 0.9
    seed: int = 0
    """Seed of the adapters' initial weights, the order of the examples, dropout and the sampled replies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the frozen weights and the activations. The adapters and their optimizer state are float32."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: store the weights of the blocks' frozen linear layers in 4 bits, as QLoRA does. Both trainers support it."""
    activation_checkpoint: bool = False
    """Recompute blocks in the backward pass: less memory, more time. Both trainers support it."""

    packed_tokens: int = 8192
    """With `packed_examples`: maximum tokens per pack, which limits the memory."""

    # --- techniques
    batched_generation: bool = True
    """Sample all replies in one batch, with a KV cache."""
    parallel_sampling: bool = True
    """Sample the tokens with one kernel; needs `batched_generation`."""
    encoder_batching: bool = True
    pairwise_cosine: bool = True
    pairwise_cosine_cuda: bool = False
    """Compute the distances in CUDA C++ instead, which is the source's third tier. Not part of the ablation."""
    set_policy_loss: bool = True
    chunked_cross_entropy: bool = True
    fused_lora: bool = True
    flash_attention: bool = True
    fused_blocks: bool = True
    """Compute norms, rotary embeddings and gates with one kernel each; needs `flash_attention`."""
    packed_examples: bool = True
    """Pack a step's examples without padding instead of splitting it into micro-batches; needs `flash_attention`."""
    cuda_graph_step: bool = True
    """Replay the model's forward and backward passes as CUDA graphs, in half precision."""
    clip_grad_norm: bool = True
    sync_free_scaler_step: bool = True
    """Run AdamW in one kernel, without synchronising with the host."""

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "accumulation", "steps", "rank", "new_tokens", "prompts", "packed_tokens"):
            value = getattr(self, name)
            need(isinstance(value, int) and value >= 1, name, value, "use a whole number from 1 on")
        need(self.replies >= 3, "replies", self.replies, "a reply's part in the diversity needs 3 or more")
        need(self.objective in ("policy", "as_written"), "objective", self.objective, "use policy or as_written")
        need(self.dtype in DTYPES, "dtype", self.dtype, f"use {' or '.join(DTYPES)}")
        need(self.quantization in ("none", "nf4"), "quantization", self.quantization, "use none or nf4")
        few = self.prompts <= self.examples
        need(few, "prompts", self.prompts, f"a step has {self.examples} examples (batch_size x accumulation)")
        for name in ("learning_rate", "clip", "alpha"):
            value = getattr(self, name)
            need(0 < value < math.inf, name, value, "use a number above 0")
        for name in ("diversity", "weight_decay"):
            value = getattr(self, name)
            need(0 <= value < math.inf, name, value, "use 0 or more")
        need(0 <= self.dropout < 1, "dropout", self.dropout, "use 0 or more and less than 1")
        need(LEAST <= self.temperature < math.inf, "temperature", self.temperature, f"use {LEAST:.2g} or more")
        need(0 < self.top_p <= 1, "top_p", self.top_p, "use a number above 0, at most 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")

    @property
    def examples(self) -> int:
        """Examples per optimizer step."""
        return self.batch_size * self.accumulation

    @property
    def adapters(self) -> Settings:
        """The adapters' hyperparameters."""
        return Settings(rank=self.rank, alpha=self.alpha, dropout=self.dropout)

    @property
    def scaling(self) -> Scaling:
        """The loss scale: 1, since nothing is computed in float16; it halves at a step with non-finite gradients."""
        return scaling_for(float16=False)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. After the schedule it stays at the final value, 0."""
        return self.learning_rate * (1 + math.cos(math.pi * min(step / self.steps, 1.0))) / 2


TECHNIQUES = (
    "batched_generation",
    "parallel_sampling",
    "encoder_batching",
    "pairwise_cosine",
    "set_policy_loss",
    "chunked_cross_entropy",
    "fused_lora",
    "flash_attention",
    "fused_blocks",
    "packed_examples",
    "cuda_graph_step",
    "clip_grad_norm",
    "sync_free_scaler_step",
)
"""The techniques' switches, in the order in which the ablation turns them on."""
CLAIMS = {
    "batched_generation": "2–3×",
    "pairwise_cosine": "2–3×, in CUDA C++ 3–4×",
    "fused_lora": "2×",
    "flash_attention": "1.5–2×",
}
"""Technique → speedup that the source expects."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every technique off."""
    off: dict[str, Any] = dict.fromkeys(TECHNIQUES, False)
    return dataclasses.replace(config, **off)
