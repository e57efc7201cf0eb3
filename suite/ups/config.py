"""The configuration of ups: the sizes of its model, the weights of its losses, and the constants of its training."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from suite.configuration import need


@dataclass(frozen=True, kw_only=True)
class UpsConfig:
    """The sizes and constants of ups; the defaults are the source's.

    `__post_init__` raises ValueError for an impossible value, with the field's name and the remedy.
    """

    # --- sizes
    tokens: int = 128
    """Latent tokens of a field."""
    latent_width: int = 128
    """Width of a latent token."""
    width: int = 384
    """Hidden width of the operator; a multiple of `heads`."""
    depth: int = 12
    """Transformer blocks of the operator."""
    heads: int = 8
    """Attention heads, 48 wide each at the default width, in the operator and in the decoders."""
    mlp_ratio: int = 4
    """Hidden width of a block's MLP, in multiples of `width`."""
    drop_path: float = 0.1
    """Probability of dropping a sublayer of the last block; it rises linearly from 0 in the first block."""
    decoder_width: int = 384
    """Hidden width of a decoder; a multiple of `heads`."""
    decoder_depth: int = 3
    """Cross-attention layers of a decoder."""

    # --- losses
    lambda_enc: float = 0.01
    """Weight of the error of the decoded field at the query points."""
    lambda_dec: float = 0.01
    """Weight of the error of the latents that are encoded again from the decoded field."""
    spectral: float = 0.05
    """Weight of the error of the amplitudes of the latents' Fourier series along the tokens."""
    boundary: float = 0.05
    """Weight of the error of the latent tokens at the domain's boundary."""
    inverse_loss_frequency: int = 1
    """Micro-batches from one with inverse losses to the next."""
    num_queries: int = 2048
    """Grid points at which a decoded field is compared; all of them where a grid has fewer."""

    # --- optimizer
    learning_rate: float = 1.4e-3
    coder_rate: float = 1.0
    """Factor of the learning rate of encoders and decoders. With inverse losses in every fourth batch they make a
    quarter of the steps, which a larger rate makes up for."""
    weight_decay: float = 0.03
    ema_decay: float = 0.999
    seed: int = 0
    """Seed of the initial weights, the dropped sublayers and the query points."""

    def __post_init__(self) -> None:
        sizes = ("tokens", "latent_width", "width", "depth", "heads", "mlp_ratio", "decoder_width", "decoder_depth")
        for name in (*sizes, "inverse_loss_frequency", "num_queries"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("width", "decoder_width"):
            need(getattr(self, name) % self.heads == 0, name, getattr(self, name), f"use a multiple of {self.heads}")
        need(0 <= self.drop_path < 1, "drop_path", self.drop_path, "use 0 or more and less than 1")
        for name in ("lambda_enc", "lambda_dec", "spectral", "boundary", "weight_decay"):
            need(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "use 0 or more")
        for name in ("learning_rate", "coder_rate"):
            need(0 < getattr(self, name) < math.inf, name, getattr(self, name), "use a number above 0")
        need(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "use 0 or more and less than 1")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(UpsConfig):
    """All settings of a training. The reference trainer reads only the fields before the techniques.

    `__post_init__` raises ValueError for an impossible value, with the field's name and the remedy.
    """

    # --- steps
    stage: Literal["operator", "diffusion", "consistency"] = "operator"
    """Part that is trained. Each stage after the first starts from the previous stage's checkpoint, `init`."""
    init: str | None = None
    """Checkpoint of the previous stage: a file, or the folder of a run, whose last checkpoint is used."""
    batch_size: int = 8
    """Examples of a micro-batch on one GPU."""
    accumulation: int = 3
    """Micro-batches per step."""
    grad_clip: float | None = None
    """Largest norm of all gradients together; null: they are not clipped."""

    # --- how it runs
    precision: Literal["float32", "fp16", "bf16"] = "float32"
    """Precision of the products, by autocast; fp16 scales the loss, and skips a step with non-finite gradients."""
    muon_in_bfloat16: bool = True
    """Orthogonalize Muon's matrices in bfloat16, as torch.optim.Muon does; false: in float32."""
    num_workers: int = 0
    """Worker processes that make batches ahead of time; 0: the training process makes them."""
    prefetch_factor: int = 4
    """Batches that each worker makes ahead of time."""
    use_fsdp2: bool = False
    """Shard the parameters over the GPUs. A single process, or a later stage, ignores it with a warning."""

    # --- techniques
    inverse_losses: bool = True
    """Compute the inverse losses only in the batches that use them; off: compute them in all, and use some."""
    query_sampling: bool = True
    """Decode fields only at the query points; off: decode at all points, and use some."""
    fused_optimizers: bool = True
    """Run Muon as batched products, AdamW as one kernel and the EMA as one launch; off: tensor by tensor."""
    fused_clip: bool = True
    """Clip all gradients at once on the device; off: the host clips them tensor by tensor."""
    resident_latents: bool = True
    """Keep all latents and fields on the device; off: send each batch, as the source does."""
    compile: bool = True
    """Compile the operator, the encoders and the decoders; on a CPU they are not compiled."""
    compile_mode: Literal["default", "reduce-overhead"] = "reduce-overhead"
    """`reduce-overhead` replays the compiled operator as CUDA graphs."""
    cuda_graphs: bool = True
    """Replay a whole step as one CUDA graph. It needs `fused_optimizers` and `fused_clip`. It excludes a scaled loss
    and an offloaded optimizer, for which the host must act in each step."""

    shared_optimizer: bool = True
    """With several GPUs, each GPU updates a share of the weights and sends it to the others; off: each updates all."""

    # --- techniques that need not pay
    activation_checkpoint: bool = False
    """Compute the operator's sublayers again in the backward pass: less memory, more time."""
    cpu_offload_optimizer: bool = False
    """Keep the optimizers' state in host memory: less memory, more time."""
    flex_attention: bool = False
    """Use FlexAttention for the operator's attention on a GPU; without a mask it gains nothing."""

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
        """Steps after which the schedule of the inverse losses repeats."""
        return math.lcm(self.inverse_loss_frequency, self.accumulation) // self.accumulation

    def has_inverse(self, number: int) -> bool:
        """Return whether a micro-batch, counted from 0, has the inverse losses.

        None has them if both weights are 0, or in a stage after the operator's.
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
"""The switches, in the order in which the ablation turns them on."""
TRADES = ("activation_checkpoint", "cpu_offload_optimizer", "flex_attention")
"""Switches that "all on" leaves off: two trade time for memory, and FlexAttention gains nothing without a mask."""
OF_RANKS = ("shared_optimizer",)
"""Switches that only have an effect with several GPUs."""
CLAIMS = {
    "inverse_losses": "1.31× with 1024 query points",
    "fused_optimizers": "1.13×",
    "compile": "1.36× with NCCL's settings",
    "activation_checkpoint": "1.45× with a batch of 16",
    "cpu_offload_optimizer": "1.23× with a batch of 20",
}
"""Speedup that the source expects of each technique."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the same configuration with every switch off."""
    off: dict[str, Any] = dict.fromkeys((*TECHNIQUES, *TRADES, *OF_RANKS), False)
    return dataclasses.replace(config, **off)
