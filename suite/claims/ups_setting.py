"""Device and sizes at which the claims of ups are measured, with the data and the trainers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from suite.claims.measuring import compiled_call
from suite.techniques import implementation
from suite.ups.batches import Mixture, TaskData, TaskPart
from suite.ups.config import TrainConfig, without_techniques
from suite.ups.latents import latents_of
from suite.ups.losses import InverseTask
from suite.ups.recipe import TASKS
from suite.ups.step import sent
from suite.ups.task_fields import synthetic, token_grid
from suite.ups.trial import LINE, PLANE

SOURCE = without_techniques(TrainConfig(precision="fp16"))
"""The source's settings before its first phase, for each GPU."""
FEW_QUERIES, RARE = 1024, 4
"""Query points, and the period of the inverse losses in micro-batches, after the source's third phase."""
GB = 1e9
MOST_HALVINGS = 30
"""Maximum number of steps until the loss scale gives finite gradients."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes of the measurements."""

    device: torch.device
    config: TrainConfig = SOURCE
    """Settings before the source's first phase."""
    cells: tuple[int, int] = (LINE, PLANE)
    """Cells of advection's grid, and of Darcy flow's grid along each dimension."""
    samples: int = 16
    """Samples of each task, generated in memory."""
    frames: int = 11
    rounds: int = 5
    batches: tuple[int, ...] = (8, 16, 20, 24)
    """Batch sizes that are compared, in examples per micro-batch."""
    compiled: bool = True
    """True if compiled steps are timed too."""
    workers: tuple[int, int] = (8, 12)
    """Loader workers before and after the source's loader phase; (0, 0) leaves the phase out."""
    steps: int = 4
    """Steps of the runs whose weights are compared."""
    graphed_depth: int = 4
    """Maximum number of blocks of the network that is compiled with DistributedDataParallel."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that processes may use; 0 on a CPU."""
        return torch.cuda.device_count() if self.device.type == "cuda" else 0


def setting(device: torch.device) -> Setting:
    """Return the source's size on a GPU, and elsewhere a size that takes seconds."""
    if device.type == "cuda":
        return Setting(device=device)
    small = dataclasses.replace(
        SOURCE,
        tokens=8,
        latent_width=8,
        width=16,
        depth=2,
        heads=2,
        decoder_width=16,
        decoder_depth=1,
        batch_size=4,
        accumulation=3,
        num_queries=128,
    )
    return Setting(
        device=device,
        config=small,
        cells=(64, 16),
        samples=4,
        frames=4,
        rounds=3,
        batches=(4, 8),
        compiled=False,
        workers=(0, 0),
        steps=2,
    )


@functools.cache
def mixture(s: Setting) -> Mixture:
    """Return both tasks, in equal shares."""
    tasks = []
    for task, cells in zip(TASKS, s.cells, strict=True):
        fields = synthetic(task, samples=s.samples, cells=cells, frames=s.frames, validation=0.1, seed=0)
        latents = latents_of(fields, s.config.tokens, s.config.latent_width, s.config.seed)
        tasks.append(TaskData(fields=fields, latents=latents, tokens=token_grid(task, s.config.tokens)))
    return Mixture(tasks=tuple(tasks))


def tuned(s: Setting, **on: Any) -> TrainConfig:
    """Return the settings after phases 3, 6 and 8, with latents on the device; eager unless `on` sets `compile`."""
    after: Mapping[str, Any] = {
        "precision": "bf16",
        "accumulation": 2,
        "inverse_loss_frequency": RARE,
        "num_queries": s.config.num_queries // 2,
        "inverse_losses": True,
        "query_sampling": True,
        "fused_optimizers": True,
        "resident_latents": True,
    }
    return dataclasses.replace(s.config, **{**after, **on})


def make_trainer(s: Setting, config: TrainConfig) -> Any:
    """Build the optimized trainer of a configuration."""
    return implementation("trainers.ups", "Trainer", optimized=True)(config, mixture(s), s.device)


def steps(trainer: Any) -> Callable[[], None]:
    """Return a step of the trainer, after steps that compile, capture, and find the loss scale in float16.

    UncompiledError if it cannot be compiled.
    """

    def settle() -> None:
        for _ in range(trainer.settles + 1):
            trainer.train_window({})
        for _ in range(MOST_HALVINGS):
            if not trainer.scale.active or trainer.scale.growth:
                break
            trainer.train_window({})  # a skipped step takes less time
        trainer.last_report()

    compiled_call(settle)
    return functools.partial(trainer.train_window, {})


def inverse_tasks(trainer: Any, number: int = 0) -> list[InverseTask]:
    """Return the inputs of the inverse losses, for a micro-batch that has these losses."""
    parts: Sequence[TaskPart] = [sent(part, trainer.device) for part in trainer.maker[number].parts]
    networks, points = trainer.networks, trainer.points
    return [networks.inverse_task(p.task, p.before, p.field, p.queries, points[p.task]) for p in parts]
