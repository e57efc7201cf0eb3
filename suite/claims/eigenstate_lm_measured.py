"""Measurements for the claims of eigenstate_lm."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from suite.backends import tf32_products
from suite.claims.eigenstate_lm_setting import ENDS, PRECISIONS, SOURCE, Setting
from suite.claims.measuring import compiled_call, interleaved, peak_bytes
from suite.eigenstate_lm.data import Data, Text, text_of
from suite.eigenstate_lm.model import (
    VOCABULARY,
    Sizes,
    block_weights,
    driven,
    eigenvalues,
    fed,
    first_states,
    make_weights,
    mixed,
    scanned_by,
    undropped,
)
from suite.packed_text import PackedText
from suite.techniques import implementation


def random_pack(s: Setting) -> PackedText:
    """Return a pack of random tokens."""
    data = Data(synthetic=s.cached, vocabulary=s.vocabulary, sequence_length=s.config.sequence_length)
    return text_of(data).pack


def make_trainer(s: Setting, *, optimized: bool = True, length: int | None = None, **on: Any) -> Any:
    config = dataclasses.replace(s.config, sequence_length=length or s.config.sequence_length, **on)
    make = implementation("trainers.eigenstate_lm", "Trainer", optimized=optimized)
    return make(config, Text(random_pack(s), config.sequence_length), s.device)


def step_of(trainer: Any) -> Callable[[], None]:
    return functools.partial(trainer.train_window, {})


@functools.cache
def step_seconds(s: Setting) -> Mapping[str, list[float]]:
    """Return the seconds of a step by round, for each precision that fits into the device's memory."""
    calls = {}
    for name, on in PRECISIONS.items():
        trainer = make_trainer(s, **on)
        try:
            compiled_call(step_of(trainer))
        except PerfsuiteError as error:
            if not lacks_memory(error):
                raise
        else:
            calls[name] = step_of(trainer)
        del trainer
        free_memory()
    if not calls:
        raise PerfsuiteError("out of memory: a step fits in no precision")
    return interleaved(s.device, s.rounds, calls, count=1)


def drawn_recurrence(s: Setting, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return ([β, λ, initial states] of a block, gradients of the results). They are the same at each call."""
    generator = torch.Generator().manual_seed(0)
    B, K = s.config.batch_size, s.config.cells * s.config.eigenstates
    turning = eigenvalues(decays(s)[0][0]).flatten(0, 1)
    inputs = [torch.randn(B, length, K, generator=generator), turning, torch.zeros(B, K, 2)]
    grads = [torch.randn(B, length, K, generator=generator), torch.randn(B, K, 2, generator=generator)]
    return [t.to(s.device) for t in inputs], [t.to(s.device) for t in grads]


def differentiated(
    scan: Callable[..., Any], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the results of the scan and the gradients with respect to all its inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    found = scan(*leaves)
    return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, grads)]


def recurrence_in_float64(inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results and gradients computed in float64."""
    chunked = implementation("recurrence.eigenstate_scan", "eigenstate_scan_chunked", optimized=True)
    return differentiated(chunked, [t.double() for t in inputs], [t.double() for t in grads])


def by_name(calls: Mapping[int, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    return {str(number): call for number, call in calls.items()}


def decays(s: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return α [layers, cells, K] on the CPU: as at the start of training, and for the largest possible |λ|."""
    config = s.config
    sizes = Sizes(vocabulary=1, width=1, layers=config.layers, eigenstates=config.eigenstates, cells=config.cells)
    weights = make_weights(0, sizes)
    first = torch.stack([weights[f"{layer}.decay"] for layer in range(config.layers)])
    return first, torch.full_like(first, 100.0)


def influence_of_scan(s: Setting, decay: torch.Tensor) -> torch.Tensor:
    """Return [distance]: the largest |dRe(c_last)/dβ| over all eigenstates, where β is `distance` tokens back."""
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    turning = eigenvalues(decay).flatten(0, -2).to(s.device)
    beta = torch.zeros(1, s.reach, len(turning), device=s.device, requires_grad=True)
    every, _ = scan(beta, turning, torch.zeros(1, len(turning), 2, device=s.device))
    (found,) = torch.autograd.grad(every[0, -1].sum(), beta)
    return found[0].abs().amax(-1).flip(0)


def influence_of_network(s: Setting, decay: torch.Tensor | None) -> torch.Tensor:
    """Return [distance]: the norm of the gradient of the network's last output by its input `distance` tokens back."""
    config = s.config
    sizes = config.sizes(vocabulary=1)
    first = make_weights(0, sizes)
    if decay is not None:
        first |= {f"{layer}.decay": alpha for layer, alpha in enumerate(decay)}
    weights = {name: w.to(s.device) for name, w in first.items()}
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=True)
    project = implementation("recurrence.fused_output_projection", "fused_output_projection", optimized=False)
    generator = torch.Generator().manual_seed(0)
    embeddings = (0.02 * torch.randn(1, s.reach, config.width, generator=generator)).to(s.device).requires_grad_()
    along = torch.randn(config.width, generator=generator).to(s.device)
    x = embeddings
    with tf32_products(allowed=False):
        for layer, state in enumerate(first_states(sizes, 1, s.device)):
            own = block_weights(weights, layer)
            real, _ = scan(driven(own, x), scanned_by(own), state)
            x = fed(own, mixed(own, x, real, project, undropped), undropped)
        (found,) = torch.autograd.grad((x[0, -1] * along).sum(), embeddings)
    norms: torch.Tensor = found[0].double().norm(dim=-1)
    return norms.flip(0)


def whole_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=False)(
        hidden, weight, labels
    )
    return found


def kept_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss in the same chunks as `freed_loss`, but keep the logits of each chunk for the backward."""
    parts = [slice(start, start + chunk_rows(hidden)) for start in range(0, len(hidden), chunk_rows(hidden))]
    losses = [functional.cross_entropy(functional.linear(hidden[p], weight), labels[p], reduction="sum") for p in parts]
    return torch.stack(losses).sum() / len(hidden)


def freed_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=True)(
        hidden, weight, labels, rows=chunk_rows(hidden)
    )
    return found


def chunk_rows(hidden: torch.Tensor) -> int:
    """Return the rows of a chunk, 1/32 of all. For the source's batch these are 4096, as in the optimized loss."""
    return max(1, len(hidden) // 32)


def peak_of_loss(s: Setting, form: Callable[..., torch.Tensor], wide: bool) -> tuple[float, int]:
    """Return (peak bytes of forward and backward, scaled to the source's batch; number of measured rows).

    The rows are halved until they fit into memory.
    """
    rows = s.rows
    while (found := peak_of_rows(s, form, wide, rows)) is None:
        rows //= 2
        free_memory()
        if not rows:
            raise torch.OutOfMemoryError("out of memory: not even the loss of a row fits")
    return found * SOURCE.tokens * VOCABULARY / (rows * s.vocabulary), rows


def peak_of_rows(s: Setting, form: Callable[..., torch.Tensor], wide: bool, rows: int) -> int | None:
    """Return the peak bytes for `rows` rows; None if they do not fit into memory."""
    dtype = torch.float32 if wide else torch.bfloat16
    try:
        hidden, weight = (
            torch.randn(count, s.config.width, device=s.device).to(dtype).requires_grad_()
            for count in (rows, s.vocabulary)
        )
        labels = torch.randint(s.vocabulary, (rows,), device=s.device)

        def call() -> None:
            with torch.autocast(s.device.type, torch.bfloat16, enabled=wide):
                loss = form(hidden, weight, labels)
            torch.autograd.grad(loss, (hidden, weight))

        return peak_bytes(s.device, call, [hidden, weight, labels])
    except torch.OutOfMemoryError:
        return None


def peak_of_step(s: Setting, **on: bool) -> int:
    """Return the peak bytes of a trainer and one of its steps."""

    def call() -> None:
        trainer = make_trainer(s, **on)
        compiled_call(step_of(trainer))
        if s.device.type == "cuda":  # exclude the memory of compilation
            torch.cuda.synchronize(s.device)
            torch.cuda.reset_peak_memory_stats(s.device)
        trainer.train_window({})

    found = peak_bytes(s.device, call)
    free_memory()
    return found


def final_losses(s: Setting) -> tuple[list[tuple[float, float]], int]:
    """Return ([(final loss in float32, in float16) by seed], number of steps whose gradient norm was not finite)."""
    corpus = text_of(Data(synthetic=200, vocabulary=s.trained_vocabulary, sequence_length=s.trained.sequence_length))
    make = implementation("trainers.eigenstate_lm", "Trainer", optimized=True)
    found, left_out = [], 0
    for seed in range(s.seeds):
        ends = []
        for low in (False, True):
            trainer = make(dataclasses.replace(s.trained, seed=seed, autocast_fp16=low), corpus, s.device)
            reports = []
            for _ in range(s.trained.steps):
                trainer.train_window({})
                reports.append(trainer.last_report())
            left_out += sum(not math.isfinite(r.norm) for r in reports)
            ends.append(sum(r.loss for r in reports[-ENDS:]) / ENDS)
        found.append((ends[0], ends[1]))
    return found, left_out


def free_memory() -> None:
    """Free all unused memory, including that of unused trainers, which are in reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def lacks_memory(error: PerfsuiteError) -> bool:
    return str(error).startswith("out of memory")


def reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
