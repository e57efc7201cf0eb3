"""The configuration of leak_cnn: the fields and defaults of the source, and a switch for each technique."""

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
    """All settings of leak_cnn.

    The reference trainer reads only the fields before the techniques, `autocast_fp16` and `autocast_bf16`.

    Raises ValueError for an invalid value. The message names the field and the remedy.
    """

    # --- sizes
    batch_size: int = 5632
    """Segments per step. An epoch drops the incomplete last batch; other epochs contain its segments."""
    val_batch_size: int = 2048
    """Segments per validation batch. An incomplete last batch is included."""
    channels: tuple[int, int, int] = CHANNELS
    """Output channels of the three convolutions. At the default sizes, the network has 618,758 parameters."""
    hidden: int = HIDDEN
    """Width of the hidden fully connected layer."""

    # --- constants
    epochs: int = 200
    """Number of epochs. The cosine schedule of the learning rate spans all of them."""
    learning_rate: float = 1e-3
    """Learning rate of the first epoch."""
    weight_decay: float = 1e-2
    clip: float = 1.0
    """Maximum global norm of the gradients. Larger gradients are scaled down to it."""
    dropout: float = DROPOUT
    threshold: float = 0.5
    """Threshold on the probability that a long window contains a leak."""
    validate_every: int = 1
    """Interval between validations, in epochs; 0: no validation."""
    patience: int = 0
    """Number of epochs without a new best validation after which the run ends; 0: it never ends early."""
    seed: int = 0
    """Seed for the initial weights, the order of the segments and the dropout."""

    # --- execution
    num_workers: int = 8
    """Worker processes that read segments that are not on the device; 0: the training process reads them."""
    prefetch_factor: int = 4
    """Batches that each worker prepares ahead of time, with `loader` on."""
    persistent_workers: bool = True
    """Keep the workers alive between epochs, with `loader` on."""
    compile_mode: Literal["default", "reduce-overhead"] = "reduce-overhead"
    """reduce-overhead: use torch.compile's own CUDA graphs if `use_cudagraphs` does not capture the whole step."""
    limit_bytes: int | None = None
    """Maximum device memory for the segments, in bytes; null: half of the free memory. A larger set is streamed."""
    warmup_steps: int = 3
    """Number of warm-up steps before a CUDA graph is captured."""

    # --- techniques
    loader: bool = True
    prepare_mel_batch: bool = True
    resident_dataset: bool = True
    """Keep the segments on the device. No worker processes are used."""
    device_metrics: bool = True
    file_level_eval: bool = True
    """Evaluate up to 128 validation files per batch, and compute the metrics of the segments from the same logits."""
    fused_adamw: bool = True
    sync_free_scaler_step: bool = True
    """Clip gradients and run AdamW on the device, without waiting for the host. This AdamW is fused."""
    inplace_activation: bool = True
    cudnn_autotune: bool = False
    """Off by default: a resumed run might choose other algorithms, which round differently."""
    use_channels_last: bool = True
    conv_relu_pool: bool = True
    """Fuse convolution, ReLU and pooling: in a Triton kernel or, with `use_compile`, in a vectorised form."""
    use_compile: bool = True
    """Compile network, dropout and loss with torch.compile."""
    fullgraph_model: bool = True
    """Compile them as one graph. It has no effect without `use_compile`."""
    use_cudagraphs: bool = True
    """Replay a training step as one CUDA graph, and a validation as another."""
    tf32: bool = False
    autocast_bf16: bool = False
    """Compute convolutions and linear layers in bfloat16, in both trainers."""

    # --- techniques with a trade-off, or that exclude another
    autocast_fp16: bool = False
    """Compute convolutions and linear layers in float16 with a scaled loss, in both trainers."""
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
        """Loss scaling: the defaults of `torch.amp.GradScaler` for float16, a constant 1 for other dtypes."""
        return scaling_for(float16=self.autocast_fp16)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0: half a cosine that reaches 0 at `epochs`."""
        return 0.5 * self.learning_rate * (1 + math.cos(math.pi * min(epoch, self.epochs) / self.epochs))

    def validates(self, epoch: int) -> bool:
        """Return whether a validation follows an epoch, counted from 0. With validations on, the last epoch has one."""
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
"""Switches, in the order in which the ablation turns them on. The last two change the precision."""
TRADES = ("autocast_fp16", "activation_checkpoint")
"""Switches that "all on" leaves off: the first excludes autocast_bf16; the second trades time for memory."""
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
"""Technique → gain that the source claims."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES), False)
    return dataclasses.replace(config, **off)
