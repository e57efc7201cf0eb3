"""Single-process measurements for the claims of ups."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from suite.claims.measuring import interleaved, largest, peak_bytes
from suite.claims.ups_setting import RARE, SOURCE, Setting, make_trainer, mixture, steps, tuned
from suite.techniques import implementation
from suite.ups.losses import InverseTask
from suite.ups.model import make_decoder, make_encoder, make_operator
from suite.ups.task_fields import token_grid

TOGETHER = 4
"""Steps that are timed in a row: a multiple of the period of the inverse losses."""


def inverse(tasks: Sequence[InverseTask], *, shared: bool) -> torch.Tensor:
    """Compute both inverse losses, [2].

    The first loss reads the decoded grid if `shared`; otherwise it decodes only the query points.
    """
    function = implementation("losses.inverse_losses", "inverse_losses", optimized=True)
    sample = implementation("losses.query_sampling", "query_sampling", optimized=True)
    return torch.stack(function(tasks, 0, 1, None if shared else sample))


def first_loss(task: InverseTask) -> torch.Tensor:
    """Compute the error at the query points, 0-d; only these are decoded."""
    sample = implementation("losses.query_sampling", "query_sampling", optimized=True)
    found: torch.Tensor = sample(task.decode, task.latents, task.field, task.points, task.queries)
    return found


def differentiated(task: InverseTask, *, both: bool) -> None:
    """Run forward and backward in bfloat16 autocast: of both losses from one decoded grid, or of the first alone."""
    leaves = [*task.decode.parameters(), *task.encode.parameters()]  # type: ignore[attr-defined]  # they are modules
    with torch.enable_grad(), torch.autocast(task.latents.device.type, torch.bfloat16):
        loss = inverse([task], shared=True).sum() if both else first_loss(task)
    torch.autograd.grad(loss, leaves, allow_unused=True)


def flops(names: Sequence[str], asked: int, which: Literal["first", "apart", "shared"]) -> float:
    """Count the FLOPs of a micro-batch's inverse losses, forward and backward, at the source's sizes.

    names  names of its tasks
    asked  number of query points
    which  the first loss alone, at its query points; both apart, as the source has them; or both from one decoded grid
    """
    tasks = []
    with torch.device("meta"):
        for name, cells in (("advection1d", (1024,)), ("darcy2d", (128, 128))):
            if name not in names:
                continue
            examples, points = SOURCE.batch_size // len(names), torch.Size(cells).numel()
            tasks.append(
                InverseTask(
                    encode=make_encoder(SOURCE, token_grid(name, SOURCE.tokens)),
                    decode=make_decoder(SOURCE, len(cells)),
                    latents=torch.empty(examples, SOURCE.tokens, SOURCE.latent_width),
                    field=torch.empty(examples, *cells, 1),
                    points=torch.empty(*cells, len(cells)),
                    queries=torch.empty(min(points, asked), dtype=torch.int64),
                )
            )
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            loss = first_loss(tasks[0]) if which == "first" else inverse(tasks, shared=which == "shared").sum()
            loss.backward()
    return float(counter.get_total_flops())


def operator_after(s: Setting, config: Any) -> list[torch.Tensor]:
    """Return the operator's weights after `s.steps` steps."""
    trainer = make_trainer(s, config)
    for _ in range(s.steps):
        trainer.train_window({})
    trainer.last_report()
    return [w.detach().clone() for name, w in trainer.weights.items() if name.startswith("operator.")]


def apart(found: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> float:
    """Return the largest distance of a tensor from the known one, relative to the norm of the known one."""
    return largest(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(found, known, strict=True))


def state_rates(trainer: Any) -> tuple[float, float]:
    """Return the bytes of the optimizers' state per element of a matrix, and per element of the other weights."""
    states = [optimizer.state_dict() for optimizer in trainer.optimizers.values()]
    weights = list(trainer.weights.values())
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    others = sum(w.numel() for w in weights if w.dim() != 2)
    muon = sum(m.nbytes for state in states for m in state["muon"]["momenta"])
    adamw = sum(m.nbytes for state in states for which in ("first", "second") for m in state["adamw"][which])
    return muon / matrices, adamw / others


@functools.cache
def source_sizes(s: Setting, *, whole: bool) -> tuple[int, int]:
    """Return (elements of matrices, of other weights) of the source's operator, or of every network if `whole`."""
    with torch.device("meta"):
        networks: list[torch.nn.Module] = [make_operator(SOURCE)]
        if whole:
            for task in mixture(s).tasks:
                dims = len(task.fields.grid)
                networks += [make_decoder(SOURCE, dims), make_encoder(SOURCE, token_grid(task.task, SOURCE.tokens))]
    weights = [w for network in networks for w in network.parameters()]
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    return matrices, sum(w.numel() for w in weights) - matrices


def peak_of_steps(s: Setting, config: Any) -> int:
    """Return the peak bytes of a trainer and three of its steps."""

    def call() -> None:
        trainer = make_trainer(s, config)
        for _ in range(3):
            trainer.train_window({})
        trainer.last_report()

    mixture(s)
    found = peak_bytes(s.device, call)
    empty()
    return found


def by_kind(first: Sequence[torch.Tensor], count: int) -> dict[str, float]:
    """Return the distance of the offloaded optimizer's result from that on the device, relative to the total update.

    Both start from the weights `first` and use the same gradients in `count` steps. The result has the largest relative
    distance among the weights of Muon and among those of AdamW.
    """
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(w.shape, generator=generator).to(w.device) for w in first] for _ in range(count)]
    ends = []
    for module, name in (
        ("memory.cpu_offload_optimizer", "offloaded_hybrid"),
        ("optimizers.hybrid_muon_adamw", "hybrid_muon_adamw"),
    ):
        own = [w.clone() for w in first]
        step = implementation(module, name, optimized=True)(own)
        for given in grads:
            step(given)
        if own[0].is_cuda:
            torch.cuda.synchronize(own[0].device)
        ends.append(own)
    distances = {"Muon": 0.0, "AdamW": 0.0}
    for w, a, b in zip(first, *ends, strict=True):
        kind = "Muon" if w.dim() == 2 else "AdamW"
        distances[kind] = largest([distances[kind], float((a - b).norm() / (b - w).norm())])
    return distances


def predicted(trainer: Any) -> torch.Tensor:
    """Return the operator's output for the first part of the trainer's first micro-batch."""
    part = trainer.maker[0].parts[0]
    with torch.no_grad():
        found: torch.Tensor = trainer.networks.operator(part.before.to(trainer.device), part.dt.to(trainer.device))
    return found


def same_forward(s: Setting) -> bool:
    """Return whether the checkpointed operator has the same output, bit for bit, with sublayers dropped."""
    checkpointed = implementation("memory.activation_checkpoint", "activation_checkpoint_operator", optimized=True)
    trainer = make_trainer(s, tuned(s))
    part, scales = trainer.maker[0].parts[0], trainer.maker[0].scales
    before, dt = part.before.to(s.device), part.dt.to(s.device)
    scales = scales[..., : len(before)].to(s.device)
    operator = trainer.networks.operator
    with torch.enable_grad(), torch.autocast(s.device.type, torch.bfloat16):
        return torch.equal(operator(before, dt, scales), checkpointed(operator, before, dt, scales))


def modes(s: Setting) -> dict[str, bool]:
    """Return the modes of a step as name → `compile`."""
    return {"eager": False, "compiled": True} if s.compiled else {"eager": False}


def later_batch(s: Setting) -> int:
    """Return the batch size of the source's later phases: 20 at the source's size."""
    return s.batches[-2]


def timed(s: Setting, configs: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step by round, for each configuration."""
    calls: dict[str, Callable[[], object]] = {n: steps(make_trainer(s, config)) for n, config in configs.items()}
    return interleaved(s.device, s.rounds, calls, count=TOGETHER)


def phases(s: Setting) -> dict[str, Any]:
    """Return the configurations of each of the source's phases alone, and of all together, on one GPU.

    before    the source's settings before its phases, with its workers
    resident  the same with latents on the device; all phases except the loader's are compared with it
    together  all phases, with the workers of the loader's phase

    A phase that changes the batch size changes it by the source's factor.
    """
    workers = s.workers != (0, 0)
    size = s.config.batch_size
    changes: dict[str, dict[str, Any]] = {
        "1": {"compile": True},
        "2": {"activation_checkpoint": True, "batch_size": 2 * size, "accumulation": 2},
        "3": {"inverse_loss_frequency": RARE, "num_queries": s.config.num_queries // 2, **_SCHEDULED},
        "5": {"cpu_offload_optimizer": True, "batch_size": 2 * round(size * 5 / 8)},
        "6": {"precision": "bf16"},
        "8": {"fused_optimizers": True},
    }
    if not s.compiled:
        del changes["1"]
    merged: dict[str, Any] = {}
    for change in changes.values():
        merged |= change
    merged["batch_size"] = later_batch(s)
    resident = dataclasses.replace(s.config, resident_latents=True)
    before = dataclasses.replace(s.config, num_workers=s.workers[0]) if workers else resident
    loader: dict[str, Any] = {"num_workers": s.workers[1], "prefetch_factor": 2} if workers else {}
    found = {"before": before, "resident": resident, "together": dataclasses.replace(before, **merged, **loader)}
    found |= {name: dataclasses.replace(resident, **change) for name, change in changes.items()}
    return found | ({"4": dataclasses.replace(before, **loader)} if workers else {})


def timed_phases(s: Setting) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return (name → configuration, name → seconds of a step by round).

    The phase of the loader is left out if a worker dies, as it does without enough shared memory.
    """
    configs = phases(s)
    try:
        return configs, timed(s, configs)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error) or s.workers == (0, 0):
            raise
    return timed_phases(dataclasses.replace(s, workers=(0, 0)))


_SCHEDULED = {"inverse_losses": True, "query_sampling": True}
"""Techniques that compute only what the schedule needs."""


def empty() -> None:
    """Free all unused memory, including that of unused trainers, which are in reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()
