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
    """All settings of eigenstate_lm. `__post_init__` raises ValueError, with field and remedy, for an invalid value.

    The reference trainer reads the fields before the techniques, `autocast_fp16` and `autocast_bf16`. It ignores all
    other switches.
    """

    # --- sizes
    width: int = 1024
    layers: int = 8
    eigenstates: int = 128
    """Eigenstates of a cell."""
    cells: int = 2
    """Cells of a block."""
    sequence_length: int = 32768
    """Tokens of a sequence."""
    batch_size: int = 4
    """Sequences of a micro-batch."""
    accumulation: int = 4
    """Micro-batches of a step."""

    # --- constants
    steps: int = 1000
    """Steps of the learning-rate schedule, 11 or more. The run ends with the schedule."""
    learning_rate: float = 3e-4
    """Maximum learning rate of the schedule."""
    weight_decay: float = 1e-2
    clip: float = 1.0
    """Maximum global norm of the gradients; larger gradients are scaled down to it."""
    dropout: float = 0.1
    seed: int = 0
    """Seed of the initial weights and of the order of the sequences."""

    validate_every: int = 100
    """Steps between validations, if the data have held-out sequences (`validation`); 0: no validation."""
    patience: int = 0
    """End the run after this many validations without a smaller loss; 0: never."""

    # --- how it runs
    num_workers: int = 4
    """Worker processes that read sequences, with `loader` on."""
    prefetch_factor: int = 4
    """Batches that each worker prepares ahead."""
    cleanup_every: int = 10
    """Steps between checks of the allocator's cache, with `adaptive_cleanup` on; 0: no check."""

    # --- techniques
    packed_tokens: bool = True
    """Read sequences from the memory-mapped file; off: tokenize texts when they are needed."""
    eigenstate_scan: bool = True
    fused_output_projection: bool = True
    chunked_cross_entropy: bool = True
    gradient_accumulation: bool = True
    """Compute a step by micro-batches; off: all its sequences at once."""
    clip_grad_norm: bool = True
    one_cycle: bool = True
    sync_free_scaler_step: bool = True
    """Run AdamW in one kernel, without waiting for the host."""
    adaptive_cleanup: bool = True
    use_compile: bool = True
    """Run the parts of a block, except the scan, under torch.compile."""
    tf32: bool = False
    autocast_bf16: bool = False
    """Compute matrix products in bfloat16, in either trainer."""

    # --- techniques with a trade-off, or that exclude another
    autocast_fp16: bool = False
    """Compute matrix products in float16, with loss scaling, in either trainer."""
    fp8_linear: bool = False
    """Compute the products of a block's two linear layers in FP8, except those of the weights' gradients; needs
    `autocast_bf16` and a width that is a multiple of 16."""
    activation_checkpoint: bool = False
    """Recompute a block's two linear layers in the backward pass: less memory, more time."""
    loader: bool = False
    """Prefetch batches in worker processes; needs `packed_tokens`. It gains little: without it, reading a step's batch
    takes a thousandth of the step."""

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
        in_bf16 = self.autocast_bf16 or not self.fp8_linear
        need(in_bf16, "fp8_linear", True, "everything else is in bfloat16 then; switch autocast_bf16 on")
        fits = not (self.fp8_linear and self.width % 16)
        need(fits, "width", self.width, "fp8_linear needs a multiple of 16")
        alone = self.loader and not self.packed_tokens
        need(not alone, "loader", True, "its workers read the packed file; switch packed_tokens on")

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.batch_size * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.sequence_length

    @property
    def scaling(self) -> Scaling:
        """Loss scaling: that of `torch.amp.GradScaler` for float16; for other dtypes it starts at 1, and only steps
        with non-finite gradients change it."""
        return scaling_for(float16=self.autocast_fp16)

    @property
    def precision(self) -> str:
        """Precision of the matrix products, as named in `perfsuite.timing.roofline`."""
        if self.autocast_bf16 or self.autocast_fp16:
            return "bfloat16" if self.autocast_bf16 else "float16"
        return "tf32" if self.tf32 else "float32"

    def sizes(self, vocabulary: int = VOCABULARY) -> Sizes:
        """Return the sizes of the network for a vocabulary."""
        return Sizes(
            vocabulary=vocabulary,
            width=self.width,
            layers=self.layers,
            eigenstates=self.eigenstates,
            cells=self.cells,
        )

    def flops(self, vocabulary: int = VOCABULARY) -> float:
        """Return the FLOPs of the forward and backward pass per token: six per parameter, the tied head included."""
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
"""Switches, in the order in which the ablation turns them on. The last two change the precision."""
TRADES = ("autocast_fp16", "fp8_linear", "activation_checkpoint", "loader")
"""Switches that "all on" leaves off: one excludes autocast_bf16, one rounds more, one trades time for memory, and one
gains little."""
CLAIMS = {
    "eigenstate_scan": "53.9×",
    "fused_output_projection": "2× the bandwidth",
    "chunked_cross_entropy": "13–26 GB less",
    "tf32": "2–3×",
    "autocast_bf16": "2×, half the memory (of float16)",
    "adaptive_cleanup": "prevents fragmentation",
}
"""Technique → the gain that the source expects."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES), False)
    return dataclasses.replace(config, **off)
