"""The configuration of eigenstate_lm: the source's fields and defaults, and a switch for each technique."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from suite.configuration import need
from suite.eigenstate_lm.model import VOCABULARY, Sizes, parameters
from suite.scaling import Scaling, scaling_for


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All of eigenstate_lm's settings. `__post_init__` raises ValueError, naming field and remedy, for what cannot be.

    The reference trainer reads what stands before the techniques, and `autocast_fp16` and `autocast_bf16`: it has no
    other techniques.
    """

    # --- sizes
    width: int = 1024
    layers: int = 8
    eigenstates: int = 128
    """Of a cell."""
    cells: int = 2
    """Of a block."""
    sequence_length: int = 32768
    """Tokens."""
    batch_size: int = 4
    """Sequences of a micro-batch."""
    accumulation: int = 4
    """Micro-batches of a step."""

    # --- constants
    steps: int = 1000
    """Of the schedule, at whose end the run ends; more than 10."""
    learning_rate: float = 3e-4
    """The highest one."""
    weight_decay: float = 1e-2
    clip: float = 1.0
    """The gradients' largest norm, of all together."""
    dropout: float = 0.1
    seed: int = 0
    """Of the first weights and of the order of the sequences."""

    validate_every: int = 100
    """Steps from one validation to the next, where the data have held-out sequences (`validation`); 0: none."""
    patience: int = 0
    """End after so many validations without a smaller loss; 0: never."""

    # --- how it runs
    num_workers: int = 4
    """Processes that read sequences, with `loader` on."""
    prefetch_factor: int = 4
    """Batches that each of them makes ahead."""
    cleanup_every: int = 10
    """Steps from one look at the allocator's cache to the next, with `adaptive_cleanup` on."""

    # --- techniques
    packed_tokens: bool = True
    """Sequences come from the mapped file; off: texts are encoded when they are asked for."""
    eigenstate_scan: bool = True
    fused_output_projection: bool = True
    chunked_cross_entropy: bool = True
    gradient_accumulation: bool = True
    """Off: all sequences of a step at once."""
    clip_grad_norm: bool = True
    one_cycle: bool = True
    sync_free_scaler_step: bool = True
    """AdamW in one kernel, without the host."""
    adaptive_cleanup: bool = True
    use_compile: bool = True
    """What is within a block, beside the scan, under torch.compile."""
    tf32: bool = False
    autocast_bf16: bool = False
    """Products in bfloat16, in either trainer."""

    # --- techniques that trade, or exclude another
    autocast_fp16: bool = False
    """The same in float16, with a scaled loss."""
    activation_checkpoint: bool = False
    """A block's two linear layers are computed again in the backward: less memory, more time."""
    loader: bool = False
    """Workers make the batches ahead, for which this process needs a thousandth of a step; wants `packed_tokens`."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "eigenstates", "cells", "sequence_length", "batch_size", "accumulation"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        need(self.steps > 10, "steps", self.steps, "a tenth of them warms up; use more than 10")
        for name in ("weight_decay", "validate_every", "patience"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        need(self.num_workers >= 0, "num_workers", self.num_workers, "use 0 or more")
        need(self.prefetch_factor >= 1, "prefetch_factor", self.prefetch_factor, "use 1 or more")
        need(self.cleanup_every >= 0, "cleanup_every", self.cleanup_every, "use 0 or more")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            need(0 < value < math.inf, name, value, "use a number above 0")
        need(0 <= self.dropout < 1, "dropout", self.dropout, "use 0 or more and less than 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")
        both = self.autocast_bf16 and self.autocast_fp16
        need(not both, "autocast_fp16", True, "a product has one precision; switch autocast_bf16 off")
        alone = self.loader and not self.packed_tokens
        need(not alone, "loader", True, "its workers read the packed file; switch packed_tokens on")

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.batch_size * self.accumulation

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.sequences * self.sequence_length

    @property
    def scaling(self) -> Scaling:
        """Of the loss: as float16 wants it, and by 1 elsewhere."""
        return scaling_for(float16=self.autocast_fp16)

    @property
    def precision(self) -> str:
        """Of the products, as `perfsuite.ceilings` calls it."""
        if self.autocast_bf16 or self.autocast_fp16:
            return "bfloat16" if self.autocast_bf16 else "float16"
        return "tf32" if self.tf32 else "float32"

    def sizes(self, vocabulary: int = VOCABULARY) -> Sizes:
        """Of the network, for a text's vocabulary."""
        return Sizes(
            vocabulary=vocabulary,
            width=self.width,
            layers=self.layers,
            eigenstates=self.eigenstates,
            cells=self.cells,
        )

    def flops(self, vocabulary: int = VOCABULARY) -> float:
        """Of a token's forward and backward: six for each parameter, the head's among them."""
        return 6.0 * parameters(self.sizes(vocabulary))


TECHNIQUES = (
    "packed_tokens",
    "eigenstate_scan",
    "fused_output_projection",
    "chunked_cross_entropy",
    "gradient_accumulation",
    "clip_grad_norm",
    "one_cycle",
    "sync_free_scaler_step",
    "adaptive_cleanup",
    "use_compile",
    "tf32",
    "autocast_bf16",
)
"""The switches, in the order in which the ablation turns them on. The last two have a precision of their own."""
TRADES = ("autocast_fp16", "activation_checkpoint", "loader")
"""Switches that no "all on" has: one excludes autocast_bf16, one pays time for memory, one processes for little."""
CLAIMS = {
    "eigenstate_scan": "53.9×",
    "fused_output_projection": "2× the bandwidth",
    "chunked_cross_entropy": "13–26 GB less",
    "tf32": "2–3×",
    "autocast_bf16": "2×, half the memory (of float16)",
    "adaptive_cleanup": "prevents fragmentation",
}
"""What the source expected of each."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """The same configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES), False)
    return dataclasses.replace(config, **off)
