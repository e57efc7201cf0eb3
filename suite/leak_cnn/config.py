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
    """All settings of leak_cnn. `__post_init__` raises ValueError, with field and remedy, for an invalid value.

    The reference trainer reads the fields before the techniques, and `autocast_fp16` and `autocast_bf16`. It has no
    other techniques.
    """

    # --- sizes
    batch_size: int = 5632
    """Segments of a step. An incomplete batch at an epoch's end is left out; its segments come in other epochs."""
    val_batch_size: int = 2048
    """Segments whose loss is computed together in validation; none is left out."""
    channels: tuple[int, int, int] = CHANNELS
    """Output channels of the three convolutions. With the default `hidden`, too, the network has 618,758 parameters."""
    hidden: int = HIDDEN

    # --- constants
    epochs: int = 200
    """Epochs of the cosine schedule. The run ends with it."""
    learning_rate: float = 1e-3
    """Learning rate of the first epoch."""
    weight_decay: float = 1e-2
    clip: float = 1.0
    """Largest global norm of the gradients; larger gradients are scaled down to it."""
    dropout: float = DROPOUT
    threshold: float = 0.5
    """Threshold for a long window's probability of LEAK."""
    validate_every: int = 1
    """Epochs from one validation to the next; 0: no validation."""
    patience: int = 0
    """End the run after this many epochs without a new best validation; 0: never."""
    seed: int = 0
    """Seed of the first weights, the order of the segments and the dropout."""

    # --- how it runs
    num_workers: int = 8
    """Processes that read segments from the file if they are not on the device; 0: this process reads them."""
    prefetch_factor: int = 4
    """Batches that each of these processes prepares ahead, with `loader` on."""
    persistent_workers: bool = True
    """Keep these processes from one epoch to the next, with `loader` on."""
    compile_mode: Literal["default", "reduce-overhead"] = "reduce-overhead"
    """reduce-overhead: use torch.compile's own CUDA graphs where `use_cudagraphs` does not capture the whole step."""
    limit_bytes: int | None = None
    """Most bytes of device memory for the segments; null: half of the free memory. A larger set is streamed."""
    warmup_steps: int = 3
    """Warm-up steps before a CUDA graph is captured."""

    # --- techniques
    loader: bool = True
    prepare_mel_batch: bool = True
    resident_dataset: bool = True
    """Keep the segments on the device; no worker reads any."""
    device_metrics: bool = True
    file_level_eval: bool = True
    """Evaluate up to 128 validation files in a batch, and compute the segments' metrics from the same logits."""
    fused_adamw: bool = True
    sync_free_scaler_step: bool = True
    """Clip and run AdamW without waiting for the host. This AdamW is fused."""
    inplace_activation: bool = True
    cudnn_autotune: bool = False
    """Off by default: a resumed run may choose other algorithms, which round differently."""
    use_channels_last: bool = True
    conv_relu_pool: bool = True
    """Use the Triton kernel or, with `use_compile`, the vectorised form."""
    use_compile: bool = True
    """Run network, dropout and loss under torch.compile."""
    fullgraph_model: bool = True
    """Compile them as one graph; no effect without `use_compile`."""
    use_cudagraphs: bool = True
    """Replay a step as one CUDA graph, and a validation as another."""
    tf32: bool = False
    autocast_bf16: bool = False
    """Compute convolutions and linear layers in bfloat16, in either trainer."""

    # --- techniques that trade, or exclude another
    autocast_fp16: bool = False
    """Compute them in float16, with a scaled loss."""
    activation_checkpoint: bool = False
    """Recompute the convolutions in the backward pass: less memory, more time."""

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
        """Loss scaling: that of `torch.amp.GradScaler` for float16, and a constant 1 for other dtypes."""
        return scaling_for(float16=self.autocast_fp16)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, from 0: half a cosine that ends at 0 after `epochs`."""
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * min(epoch, self.epochs) / self.epochs))

    def validates(self, epoch: int) -> bool:
        """Return whether a validation follows an epoch, from 0. With validations, one follows the last epoch."""
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
"""The switches, in the order in which the ablation turns them on. The last two change the precision."""
TRADES = ("autocast_fp16", "activation_checkpoint")
"""Switches that "all on" leaves off: the first excludes autocast_bf16, the second trades time for memory."""
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
"""Technique → the gain that the source expects."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES), False)
    return dataclasses.replace(config, **off)
