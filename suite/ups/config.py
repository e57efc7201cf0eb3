"""The configuration of ups: model sizes, loss weights, training constants and a switch for each technique."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from suite.configuration import need


@dataclass(frozen=True, kw_only=True)
class UpsConfig:
    """Sizes and constants of ups. The defaults are those of the source.

    Raises ValueError for an invalid value. The message names the field and the remedy.
    """

    # --- sizes
    tokens: int = 128
    """Number of latent tokens per field."""
    latent_width: int = 128
    """Width of a latent token."""
    width: int = 384
    """Hidden width of the operator; a multiple of `heads`."""
    depth: int = 12
    """Number of transformer blocks in the operator."""
    heads: int = 8
    """Number of attention heads in the operator and in the decoders. At the default width, a head is 48 wide."""
    mlp_ratio: int = 4
    """Hidden width of a block's MLP, as a multiple of `width`."""
    drop_path: float = 0.1
    """Probability that a sublayer of the last block is dropped. It rises linearly from 0 in the first block."""
    decoder_width: int = 384
    """Hidden width of a decoder; a multiple of `heads`."""
    decoder_depth: int = 3
    """Number of cross-attention layers in a decoder."""

    # --- losses
    lambda_enc: float = 0.01
    """Weight of the inverse encoding loss: the error of the decoded field at the query points."""
    lambda_dec: float = 0.01
    """Weight of the inverse decoding loss: the error of latents that are decoded and then encoded again."""
    spectral: float = 0.05
    """Weight of the spectral loss: the error of the Fourier amplitudes of the latents along the tokens."""
    boundary: float = 0.05
    """Weight of the boundary loss: the error of the latent tokens at the boundary of the domain."""
    inverse_loss_frequency: int = 1
    """Interval, in micro-batches, at which the inverse losses are computed."""
    num_queries: int = 2048
    """Number of grid points at which a decoded field is compared; a smaller grid uses all its points."""

    # --- optimizer
    learning_rate: float = 1.4e-3
    coder_rate: float = 1.0
    """Factor on the learning rate of the encoders and decoders. With inverse losses in every fourth batch, they are
    updated a quarter as often; a larger factor compensates for that."""
    weight_decay: float = 0.03
    ema_decay: float = 0.999
    seed: int = 0
    """Seed for the initial weights, the dropped sublayers and the query points."""

    def __post_init__(self) -> None:
        sizes = ("tokens", "latent_width", "width", "depth", "heads", "mlp_ratio", "decoder_width", "decoder_depth")
        for name in (*sizes, "inverse_loss_frequency", "num_queries"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("width", "decoder_width"):
            need(
                getattr(self, name) % self.heads == 0,
                name,
                getattr(self, name),
                f"use a multiple of heads={self.heads}",
            )
        need(0 <= self.drop_path < 1, "drop_path", self.drop_path, "use 0 or more and less than 1")
        for name in ("lambda_enc", "lambda_dec", "spectral", "boundary", "weight_decay"):
            need(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "use 0 or more")
        for name in ("learning_rate", "coder_rate"):
            need(0 < getattr(self, name) < math.inf, name, getattr(self, name), "use a number above 0")
        need(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "use 0 or more and less than 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(UpsConfig):
    """All settings of a training run. The reference trainer reads only the fields before the techniques.

    Raises ValueError for an invalid value. The message names the field and the remedy.
    """

    # --- steps
    stage: Literal["operator", "diffusion", "consistency"] = "operator"
    """Stage to train. Each stage after the first starts from the previous stage's checkpoint, `init`."""
    init: str | None = None
    """Checkpoint of the previous stage: a file, or the folder of a run. The last checkpoint in a folder is used."""
    batch_size: int = 8
    """Examples per micro-batch on one GPU."""
    accumulation: int = 3
    """Micro-batches per step."""
    grad_clip: float | None = None
    """Maximum global norm of the gradients; null: no clipping."""

    # --- execution
    precision: Literal["float32", "fp16", "bf16"] = "float32"
    """Autocast precision of matrix products. fp16 also scales the loss and skips steps with non-finite gradients."""
    muon_in_bfloat16: bool = True
    """Orthogonalize Muon's matrices in bfloat16, as torch.optim.Muon does; off: in float32."""
    num_workers: int = 0
    """Worker processes that build batches ahead of time; 0: the training process builds them."""
    prefetch_factor: int = 4
    """Batches that each worker builds ahead of time."""
    use_fsdp2: bool = False
    """Shard the parameters over the GPUs. With a single process or in a later stage, it only causes a warning."""

    # --- techniques
    inverse_losses: bool = True
    """Compute the inverse losses only in the batches that use them; off: compute them in every batch, used or not."""
    query_sampling: bool = True
    """Decode fields only at the query points; off: decode at all points, then select the query points."""
    fused_optimizers: bool = True
    """Run Muon with batched matrix products, AdamW as one kernel and the EMA as one launch; off: tensor by tensor."""
    fused_clip: bool = True
    """Clip all gradients at once on the device; off: the host clips them tensor by tensor."""
    resident_latents: bool = True
    """Keep all latents and fields on the device; off: send each batch, as the source does."""
    compile: bool = True
    """Compile the operator, the encoders and the decoders. On a CPU, it has no effect."""
    compile_mode: Literal["default", "reduce-overhead"] = "reduce-overhead"
    """`reduce-overhead` replays the compiled operator as CUDA graphs."""
    cuda_graphs: bool = True
    """Replay a whole step as one CUDA graph. It needs `fused_optimizers` and `fused_clip`. It cannot be combined with a
    scaled loss or an offloaded optimizer, because these need the host in each step."""

    shared_optimizer: bool = True
    """With several GPUs, each GPU updates a part of the weights and sends it to the others; off: each updates all."""

    # --- techniques that do not always pay off
    activation_checkpoint: bool = False
    """Recompute the operator's sublayers in the backward pass: less memory, more time."""
    cpu_offload_optimizer: bool = False
    """Keep the optimizer state in host memory: less device memory, more time."""
    flex_attention: bool = False
    """Use FlexAttention for the operator's attention on a GPU. Without a mask, it is no faster."""

    def __post_init__(self) -> None:
        UpsConfig.__post_init__(self)
        for name in ("batch_size", "accumulation", "prefetch_factor"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        need(self.num_workers >= 0, "num_workers", self.num_workers, "use 0 or more")
        if self.grad_clip is not None:
            need(0 < self.grad_clip < math.inf, "grad_clip", self.grad_clip, "use a number above 0, or null")
        first = self.stage == "operator"
        need(first or self.init is not None, "stage", self.stage, "name the stage before's checkpoint with --init")
        need(not first or self.init is None, "init", self.init, "the operator stage has none before it; leave it out")

    @property
    def schedule_period(self) -> int:
        """Number of steps after which the schedule of the inverse losses repeats."""
        return math.lcm(self.inverse_loss_frequency, self.accumulation) // self.accumulation

    def has_inverse(self, number: int) -> bool:
        """Return whether a micro-batch, counted from 0, includes the inverse losses.

        They are never included if both weights are 0, or in a stage after the operator stage.
        """
        weighted = self.stage == "operator" and (self.lambda_enc > 0 or self.lambda_dec > 0)
        return weighted and number % self.inverse_loss_frequency == 0


TECHNIQUES = (
    "inverse_losses",
    "query_sampling",
    "fused_optimizers",
    "fused_clip",
    "resident_latents",
    "compile",
    "cuda_graphs",
)
"""Switches, in the order in which the ablation turns them on."""
TRADES = ("activation_checkpoint", "cpu_offload_optimizer", "flex_attention")
"""Switches that "all on" leaves off: two trade time for memory, and FlexAttention is no faster without a mask."""
OF_RANKS = ("shared_optimizer",)
"""Switches that have an effect only with several GPUs."""
CLAIMS = {
    "inverse_losses": "1.31× with 1024 query points",
    "fused_optimizers": "1.13×",
    "compile": "1.36× with NCCL's settings",
    "activation_checkpoint": "1.45× with a batch of 16",
    "cpu_offload_optimizer": "1.23× with a batch of 20",
}
"""Technique → speedup that the source claims."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES, *OF_RANKS), False)
    return dataclasses.replace(config, **off)
