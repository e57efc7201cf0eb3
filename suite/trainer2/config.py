"""The configuration of trainer2: the source's fields, the sizes, and a switch for each technique."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from suite.configuration import need

FIELD_CHANNELS = (16, 16)
"""Inner shape of the field. Its 256 values condition the model, and the retrieved states drive them."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of trainer2. `__post_init__` raises ValueError, with field and remedy, for an invalid value.

    The reference trainer reads only the sizes, the constants, `step_progress_every` and `autocast_bf16`.
    """

    # --- sizes
    batch_size: int = 16
    sequence_length: int = 128
    """Tokens T of an item, at most 512."""
    width: int = 256
    """Width D of the model, at least 256: the first 256 channels of the retrieved states drive the field."""
    heads: int = 4
    blocks: int = 6
    coordinates: int = 8
    """Number n of coordinates, which are the first channels of the model's output; even."""
    lattice: int = 8
    """Lattice sites along each of the field's two outer axes."""
    memory_slots: int = 2048
    window: int = 64
    """Steps of a free window, and of a nudged window."""

    # --- constants
    eps: float = 1e-8
    beta: float = 5.0
    """Inverse temperature of the retrieval."""
    rotor_k: int = 6
    eta_update: float = 1e-2
    beta_nudge: float = 1e-3
    nudge_scale: float = 0.1
    kappa: float = 0.1
    diffusion: float = 0.5
    gamma: float = 0.01
    dt: float = 0.05
    seed: int = 0
    """Seed of the frozen weights, the first field and the order of the data."""

    # --- how it runs
    use_cudagraphs: bool = False
    """Replay a step as one CUDA graph."""
    static_shapes: bool = True
    """Require that all batches have the first one's shape, which CUDA graphs need."""
    capture_batch_size: int | None = None
    """Batch size of the captured step; `batch_size`, or None for the same."""
    warmup_steps: int = 10
    """Eager steps before the capture of the CUDA graph."""
    step_progress_every: int = 0
    """Print a report after each this many steps of a window, which waits for the device; 0: none. A CUDA graph has
    none."""
    cudnn_benchmark: bool = False
    timing_debug: bool = False
    """Measure the seconds of each phase, which waits for the device after each phase."""

    # --- techniques
    metric_batching: bool = True
    rotor_update: bool = True
    lior_and_speed: bool = True
    compiled_function: bool = True
    """Run the model's forward pass under torch.compile."""
    velocity_accumulation: bool = True
    adaptive_cleanup: bool = True
    retrieval: bool = True
    rotor_cache: bool = True
    metric_update: bool = True
    autocast_bf16: bool = False
    """Compute the model's matrix products and attention in bfloat16, in both trainers."""

    def __post_init__(self) -> None:
        channels = FIELD_CHANNELS[0] * FIELD_CHANNELS[1]
        for name in ("batch_size", "heads", "blocks", "lattice", "memory_slots", "window", "warmup_steps"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        need(
            self.batch_size <= self.memory_slots,
            "batch_size",
            self.batch_size,
            f"use at most memory_slots={self.memory_slots}: a window writes a slot an item",
        )
        need(1 <= self.sequence_length <= 512, "sequence_length", self.sequence_length, "use 1 to 512 tokens")
        need(self.width >= channels, "width", self.width, f"the field takes up {channels} channels; use more")
        need(self.width % self.heads == 0, "width", self.width, f"use a multiple of heads={self.heads}")
        n = self.coordinates
        need(2 <= n <= self.width and n % 2 == 0, "coordinates", n, "rotors join pairs; use an even number")
        need(self.rotor_k >= 0, "rotor_k", self.rotor_k, "use 0 or more")
        need(self.beta_nudge > 0, "beta_nudge", self.beta_nudge, "the update divides by it; use more than 0")
        need(self.step_progress_every >= 0, "step_progress_every", self.step_progress_every, "use 0 or more")
        need(0 <= self.seed < 2**63, "seed", self.seed, "use 0 to 2^63 - 1")
        if self.use_cudagraphs:
            need(self.static_shapes, "static_shapes", False, "a graph has one shape; switch use_cudagraphs off")
            size = self.capture_batch_size
            need(
                size in (None, self.batch_size),
                "capture_batch_size",
                size,
                f"use batch_size={self.batch_size}, or None",
            )
            every = self.step_progress_every
            need(not every, "step_progress_every", every, "a report waits, and a graph cannot; use 0")

    @property
    def eta(self) -> float:
        """Step size of the updates of the metric and the rotor."""
        return self.eta_update / self.beta_nudge


TECHNIQUES = (
    "metric_batching",
    "rotor_update",
    "lior_and_speed",
    "compiled_function",
    "velocity_accumulation",
    "adaptive_cleanup",
    "retrieval",
    "rotor_cache",
    "metric_update",
    "use_cudagraphs",
    "autocast_bf16",
)
"""Switches, in the order in which the ablation turns them on. Only the last one changes the precision."""
CLAIMS = {
    "metric_batching": "3–5%",
    "rotor_update": "2–3%",
    "lior_and_speed": "2–3%",
    "compiled_function": "1–2% (scripted weights and mix)",
    "velocity_accumulation": "< 1%",
    "adaptive_cleanup": "1–2%",
    "retrieval": "5–10%",
    "rotor_cache": "2–3%",
    "use_cudagraphs": "15–25%",
    "autocast_bf16": "20–30%",
}
"""Technique → the gain that the source expects."""


def without_techniques(config: TrainConfig) -> TrainConfig:
    """Return the same configuration with every switch off."""
    return dataclasses.replace(config, **dict.fromkeys(TECHNIQUES, False))


def short_windows(config: TrainConfig) -> tuple[TrainConfig, TrainConfig, int] | None:
    """Return configurations with windows of one and of two steps, and the number of a window's steps after the first.

    `suite.ablation.measure` uses them to count the work of a window. The result is None if a window has at most two
    steps, or if its steps differ because of reports within it.
    """
    if config.window <= 2 or config.step_progress_every:
        return None
    return dataclasses.replace(config, window=1), dataclasses.replace(config, window=2), config.window - 1
