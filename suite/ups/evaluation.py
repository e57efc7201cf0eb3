"""Prediction errors of a trained operator, per task and per step of a rollout.

Source: ups, technique 002 (NRMSE)
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import write
from suite import plotting
from suite.ups.batches import Data, Mixture, TaskData
from suite.ups.config import TrainConfig
from suite.ups.losses import ups_loss
from suite.ups.networks import Networks
from suite.ups.stages import Refiner, take

EPSILON = 1e-8
"""Term added to the mean square of the target, which avoids a division by 0."""
NOISE_SEED = 0
"""Seed of the noise from which the diffusion and consistency stages sample their residuals."""
ROLLOUT = 10
"""Default maximum number of steps in a rollout."""
SAMPLES = 16
"""Number of samples predicted at once."""
EXAMPLES = 256
"""Maximum number of validation examples per task in the held-out loss."""
Weights = Literal["averages", "trained"]
"""The exponential moving averages of the weights, or the trained weights. After few steps, the averages lag behind."""
KEYS: Mapping[Weights, str] = {"averages": "averages", "trained": "weights"}
"""Weights → their key in a checkpoint."""
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(latents [B, T, latent width], dt [B]) → the latents after a step of dt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Errors over all validation samples of a task at a step of the rollout."""

    task: str
    step: int
    """Step of the rollout, counted from 1."""
    samples: int
    nrmse: float
    """NRMSE of the decoded fields, computed on denormalised fields."""
    latent_nrmse: float
    """NRMSE of the latents."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """The first validation sample of a task at the last step of the rollout."""

    task: str
    step: int
    field: torch.Tensor
    """[*grid], denormalised."""
    prediction: torch.Tensor
    """[*grid], denormalised."""


def nrmse(error: float, target: float) -> float:
    """Return sqrt(error / (target + 1e-8)), where both arguments are mean squares."""
    return math.sqrt(error / (target + EPSILON))


def data_for(config: TrainConfig, data: Data) -> Data:
    """Return `data` with the latent sizes and seed of a checkpoint's configuration; evaluation makes no batches."""
    return dataclasses.replace(data, tokens=config.tokens, latent_width=config.latent_width, seed=config.seed)


def loaded(
    config: TrainConfig, mixture: Mixture, state: Mapping[str, Any], device: torch.device, weights: Weights = "averages"
) -> tuple[Networks, Step]:
    """Return (networks, step in time) from a checkpoint's state.

    PerfsuiteError if the state is damaged or does not fit the data.
    """
    chosen = KEYS[weights]
    try:
        if config.stage == "operator":
            networks = Networks(config, mixture).to(device).requires_grad_(False)
            take(networks.weights(), state[chosen])
            return networks.eval(), networks.operator
        refiner = Refiner(config, mixture, begin=False).to(device).requires_grad_(False)
        take(refiner.weights(), state[chosen])
        take(refiner.kept(), state["kept"])
    except KeyError as error:
        raise PerfsuiteError(f"the checkpoint is damaged: it has no entry {error}; take another one") from None
    except ValueError as error:
        raise PerfsuiteError(f"the checkpoint does not fit these data: {error}; name those of its training") from None
    generator = torch.Generator().manual_seed(NOISE_SEED)

    def step(z: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(z.shape, generator=generator).to(z)
        return refiner.refine(refiner.frozen.operator(z, dt), noise)

    return refiner.frozen.eval(), step


def quality(trainer: Any, mixture: Mixture) -> dict[str, float]:
    """Return the errors at the first and last step of a rollout and the held-out loss, for `perfsuite ab`."""
    kept = trainer.refiner.kept() if trainer.refiner is not None else {}
    state = {"averages": trainer.averages, "weights": trainer.weights, "kept": kept}
    found: dict[str, float] = {}
    for weights in get_args(Weights):
        networks, step = loaded(trainer.config, mixture, state, trainer.device, weights)
        scores, _ = evaluate(networks, mixture, trainer.device, ROLLOUT, step)
        last = {score.task: score.step for score in scores}
        for score in scores:
            if score.step in (1, last[score.task]):
                found[f"NRMSE of {score.task}, step {score.step}, {weights}"] = score.nrmse
                found[f"NRMSE of {score.task}'s latents, step {score.step}, {weights}"] = score.latent_nrmse
        found[f"held-out loss without inverse losses, {weights}"] = held_out_loss(
            trainer.config, mixture, trainer.device, step
        )
    return found


@torch.no_grad()
def held_out_loss(config: TrainConfig, mixture: Mixture, device: torch.device, step: Step) -> float:
    """Return the loss of one step in time over validation examples, without the inverse losses.

    Configurations with different schedules of the inverse losses can thus be compared. At most `EXAMPLES` examples per
    task are drawn with a fixed seed. Each task is weighted by its share of a batch.
    """
    shares = [1.0] if len(mixture.tasks) == 1 else [float(mixture.share), 1 - float(mixture.share)]
    total = 0.0
    for share, task in zip(shares, mixture.tasks, strict=True):
        count = task.count("validation")
        # Evenly spaced examples could all be at the same time, because all samples have the same number of states.
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:EXAMPLES].sort().values
        rows = task.rows(chosen.tolist(), "validation")
        errors = []
        for some in rows.split(SAMPLES):
            z, target = (task.latents.rows[at].to(device) for at in (some, some + 1))
            dt = torch.full((len(some),), task.fields.dt, device=device)
            none = (z.new_zeros(()), z.new_zeros(()))
            errors.append(len(some) * ups_loss(config, step(z, dt), target, task.at_boundary.to(device), none))
        total += share * float(torch.stack(errors).sum()) / len(rows)
    return total


@torch.no_grad()
def evaluate(
    networks: Networks, mixture: Mixture, device: torch.device, rollout: int, step: Step | None = None
) -> tuple[list[Score], list[Example]]:
    """Predict all validation samples step by step from their first states. Return (scores, an example of each task).

    rollout  maximum number of steps; a task with fewer states has fewer steps
    step     function that steps the latents in time; None: the operator
    """
    scores, examples = [], []
    for task in mixture.tasks:
        steps = min(rollout, task.fields.states - 1)
        sums = torch.zeros(steps, 4, dtype=torch.float64)
        cells = math.prod(task.fields.grid)
        for first in range(0, len(task.fields.validation), SAMPLES):
            samples = task.fields.validation[first : first + SAMPLES]
            found = _rolled(networks, task, samples, steps, device, step or networks.operator)
            for number, (prediction, field, z, target) in enumerate(found):
                pairs = ((prediction, field), (z, target))
                squares = [
                    [(a - b).square().sum(dtype=torch.float64), b.square().sum(dtype=torch.float64)] for a, b in pairs
                ]
                sums[number] += torch.stack([s for pair in squares for s in pair]).cpu()
            if not first:
                prediction, field = found[-1][:2]
                examples.append(
                    Example(task=task.task, step=steps, field=field[0].cpu(), prediction=prediction[0].cpu())
                )
        count = len(task.fields.validation)
        for number, (error, square, latent_error, latent_square) in enumerate(sums.tolist(), start=1):
            scores.append(
                Score(
                    task=task.task,
                    step=number,
                    samples=count,
                    nrmse=nrmse(error / (count * cells), square / (count * cells)),
                    latent_nrmse=nrmse(
                        latent_error / (count * task.latents.rows[0].numel()),
                        latent_square / (count * task.latents.rows[0].numel()),
                    ),
                )
            )
    return scores, examples


def _rolled(
    networks: Networks, task: TaskData, samples: tuple[int, ...], steps: int, device: torch.device, step: Step
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (decoded prediction, field, predicted latents, latents) for each step; the fields are denormalised."""
    first = torch.tensor(samples) * task.fields.states
    states = torch.stack([task.fields.read(sample) for sample in samples])
    points = task.fields.points.to(device).flatten(0, -2)
    dt = torch.full((len(samples),), task.fields.dt, device=device)
    normalisation = task.fields.normalisations[1]
    z = task.latents.rows[first].to(device)
    found = []
    for number in range(1, steps + 1):
        z = step(z, dt)
        decoded = networks.decoder(task.task)(z, points).reshape(len(samples), *task.fields.grid)
        field = states[:, number].to(device)
        target = task.latents.rows[first + number].to(device)
        found.append((normalisation.undo(decoded), normalisation.undo(field), z, target))
    return found


def as_markdown(scores: list[Score], checkpoint: str, weights: Weights) -> str:
    """Return the scores as a Markdown table."""
    named = {"averages": "averaged weights", "trained": "the trained weights, not averaged"}[weights]
    lines = [
        f"NRMSE of {checkpoint}, over the validation samples, with {named}.",
        "",
        "| task | step | samples | NRMSE | NRMSE of latents |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {s.task} | {s.step} | {s.samples} | {s.nrmse:.4f} | {s.latent_nrmse:.4f} |" for s in scores]
    return "\n".join(lines) + "\n"


def save(scores: list[Score], examples: list[Example], folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write evaluation.json, evaluation.md and a figure per task; return the paths."""
    plots = plotting.pyplot("pictures need matplotlib: pip install 'perfsuite[test]'")
    content = {**about, "scores": [_finite(dataclasses.asdict(score)) for score in scores]}
    files = [
        write(folder / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n"),
        write(folder / "evaluation.md", as_markdown(scores, str(about["checkpoint"]), about["weights"])),
    ]
    with plotting.style(plots):
        for example in examples:
            path = folder / f"{example.task}.svg"
            plotting.save(plots, _drawn(plots, example), path)
            files.append(path)
    return files


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite values by None: a rollout may diverge, and JSON has no NaN or infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _drawn(plots: Any, example: Example) -> Any:
    """Plot the field, its prediction and the error side by side; return the figure."""
    error = example.prediction - example.field
    parts = {"field": example.field, "prediction": example.prediction, "error": error}
    figure, axes = plots.subplots(1, 3, figsize=(9, 3), layout="constrained")
    bounds = (float(example.field.min()), float(example.field.max()))
    axes[1].sharey(axes[0])
    for axis, (name, values) in zip(axes, parts.items(), strict=True):
        axis.set_title(f"{example.task}, step {example.step}: {name}")
        if values.ndim == 1:
            axis.plot(((torch.arange(len(values)) + 0.5) / len(values)).numpy(), values.numpy(), linewidth=0.8)
            axis.set_xlabel("x")
        else:
            low, high = bounds if name != "error" else (None, None)
            picture = axis.imshow(values.T.numpy(), origin="lower", extent=(0, 1, 0, 1), vmin=low, vmax=high)
            figure.colorbar(picture, ax=axis, shrink=0.8)
    return figure
