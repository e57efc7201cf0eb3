"""The configuration of leak_cnn: the source's fields and defaults, and a switch for each technique."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from suite.configuration import need
from suite.leak_cnn.model import CHANNELS, DROPOUT, HIDDEN
from suite.scaling import Scaling, scaling_for


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All of leak_cnn's settings. `__post_init__` raises ValueError, naming field and remedy, for what cannot be.

    The reference trainer reads what stands before the techniques, and `autocast_fp16` and `autocast_bf16`: it has no
    other techniques.
    """

    # --- sizes
    batch_size: int = 5632
    """Segments of a step; what makes no whole batch at an epoch's end is left out, and comes in another epoch."""
    val_batch_size: int = 2048
    """Segments whose loss is taken together in validation; nothing is left out."""
    channels: tuple[int, int, int] = CHANNELS
    """Of the three convolutions; with `hidden` at their defaults the network has 618,758 parameters."""
    hidden: int = HIDDEN

    # --- constants
    epochs: int = 200
    """Of the cosine schedule, at whose end the run ends."""
    learning_rate: float = 1e-3
    """Of the first epoch."""
    weight_decay: float = 1e-2
    clip: float = 1.0
    """The gradients' largest global norm."""
    dropout: float = DROPOUT
    threshold: float = 0.5
    """Of a long window's probability of LEAK."""
    validate_every: int = 1
    """Epochs from one validation to the next; 0: none."""
    patience: int = 0
    """End after so many epochs without a validation that is better than the best; 0: never."""
    seed: int = 0
    """Of the first weights, the order of the segments and the dropout."""

    # --- how it runs
    num_workers: int = 8
    """Processes that read segments from the file, where they are not on the device; 0: this one."""
    prefetch_factor: int = 4
    """Batches that each of them makes ahead, with `loader` on."""
    persistent_workers: bool = True
    """They stay from one epoch to the next, with `loader` on."""
    compile_mode: Literal["default", "reduce-overhead"] = "reduce-overhead"
    """reduce-overhead: torch.compile's own CUDA graphs, where `use_cudagraphs` does not capture the whole step."""
    limit_bytes: int | None = None
    """Of the device's memory for the segments; null: half of what is free there. A larger set is streamed."""
    warmup_steps: int = 3
    """Steps before a capture."""

    # --- techniques
    loader: bool = True
    prepare_mel_batch: bool = True
    resident_dataset: bool = True
    """The segments lie on the device, and no worker reads any."""
    device_metrics: bool = True
    file_level_eval: bool = True
    """All validation files in one batch, from which the segments' metrics come, too."""
    fused_adamw: bool = True
    sync_free_scaler_step: bool = True
    """Clipping and AdamW without the host; AdamW is fused in it."""
    inplace_activation: bool = True
    cudnn_autotune: bool = False
    """Off: what is fastest may come out otherwise in a run that is resumed, and round otherwise."""
    use_channels_last: bool = True
    conv_relu_pool: bool = True
    """By the Triton kernel; compiled, in its vectorised form."""
    use_compile: bool = True
    """Network, dropout and loss under torch.compile."""
    fullgraph_model: bool = True
    """As one graph; of no effect without `use_compile`."""
    use_cudagraphs: bool = True
    """Replay a step as one CUDA graph, and a validation as another."""
    tf32: bool = False
    autocast_bf16: bool = False
    """Convolutions and linear layers in bfloat16, in either trainer."""

    # --- techniques that trade, or exclude another
    autocast_fp16: bool = False
    """The same in float16, with a scaled loss."""
    activation_checkpoint: bool = False
    """The convolutions are computed again in the backward: less memory, more time."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "val_batch_size", "hidden", "epochs", "warmup_steps", "prefetch_factor"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        need(all(c >= 1 for c in self.channels), "channels", self.channels, "use 1 or more of each")
        for name in ("validate_every", "patience", "num_workers", "weight_decay"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            need(0 < value < math.inf, name, value, "use a number above 0")
        need(0 <= self.dropout < 1, "dropout", self.dropout, "use 0 or more and less than 1")
        need(0 <= self.threshold <= 1, "threshold", self.threshold, "a probability; use 0 to 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")
        size = self.limit_bytes
        need(size is None or size >= 0, "limit_bytes", size, "use 0 or more, or null")
        both = self.autocast_bf16 and self.autocast_fp16
        need(not both, "autocast_fp16", True, "a product has one precision; switch autocast_bf16 off")

    @property
    def scaling(self) -> Scaling:
        """Of the loss: as float16 wants it, and by 1 elsewhere."""
        return scaling_for(float16=self.autocast_fp16)

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, from 0: half a cosine that ends at 0 after `epochs`."""
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * min(epoch, self.epochs) / self.epochs))

    def validates(self, epoch: int) -> bool:
        """Whether an epoch, from 0, is followed by a validation; the last one is."""
        every = self.validate_every
        return every > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self.epochs)


TECHNIQUES = (
    "loader",
    "prepare_mel_batch",
    "resident_dataset",
    "device_metrics",
    "file_level_eval",
    "fused_adamw",
    "sync_free_scaler_step",
    "inplace_activation",
    "cudnn_autotune",
    "use_channels_last",
    "conv_relu_pool",
    "use_compile",
    "fullgraph_model",
    "use_cudagraphs",
    "tf32",
    "autocast_bf16",
)
"""The switches, in the order in which the ablation turns them on. The last two have a precision of their own."""
TRADES = ("autocast_fp16", "activation_checkpoint")
"""Switches that no "all on" has: the one excludes autocast_bf16, the other pays time for memory."""
CLAIMS = {
    "loader": "1–2%",
    "prepare_mel_batch": "0",
    "device_metrics": "2–5%",
    "file_level_eval": "2–3× of the file-level evaluation",
    "fused_adamw": "10–20% of the step",
    "inplace_activation": "1–3%",
    "cudnn_autotune": "5–10%",
    "use_channels_last": "20–30% on the convolutions, with tf32 and autocast",
    "conv_relu_pool": "10–15%",
    "fullgraph_model": "3–8%",
    "autocast_bf16": "5–10% over float16",
}
"""What the source expected of each."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """The same configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES), False)
    return dataclasses.replace(config, **off)
