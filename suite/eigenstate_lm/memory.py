"""Estimate of the device memory that a step of eigenstate_lm needs, and advice on settings if it is too much."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from perfsuite.errors import PerfsuiteError
from suite.eigenstate_lm.config import TrainConfig, without_techniques
from suite.eigenstate_lm.model import parameters

STATES = 16
"""Bytes per parameter, in float32: the parameter, its gradient and AdamW's two moments."""


class Kept(NamedTuple):
    """Bytes per token and channel that the optimized trainer keeps for the backward pass, as measured on an H200."""

    block: float
    """Bytes for each block."""
    beside: float
    """Bytes that occur once, for the block that is being computed."""


KEPT = {"half": Kept(28.5, 14.0), "wide": Kept(48.5, 28.0)}
KEPT_CHECKPOINTED = {"half": Kept(12.5, 39.0), "wide": Kept(15.0, 60.0)}
DROPPED = 4.0
"""Bytes per token, channel and block for the dropout masks."""
ROWS = 4096
"""Tokens whose logits chunked_cross_entropy holds at a time."""
GIB = 2**30
TOO_WIDE = "use a smaller width, or fewer layers"


def needed(config: TrainConfig, vocabulary: int) -> tuple[float, float]:
    """Estimate the optimized trainer's memory: (bytes for any batch, bytes per sequence computed at a time)."""
    half = config.autocast_bf16 or config.autocast_fp16
    kept = (KEPT_CHECKPOINTED if config.activation_checkpoint else KEPT)["half" if half else "wide"]
    block = kept.block + (DROPPED if config.dropout and not config.activation_checkpoint else 0.0)
    sequence = (block * config.layers + kept.beside) * config.sequence_length * config.width
    fixed = STATES * parameters(config.sizes(vocabulary)) + 8.0 * vocabulary * config.width  # the head's gradient
    if config.chunked_cross_entropy:
        fixed += (2.0 if half else 4.0) * ROWS * vocabulary
    else:  # logits, their exponentials and their gradients
        sequence += 12.0 * config.sequence_length * vocabulary
    return fixed, sequence


def remedy(config: TrainConfig, vocabulary: int, total: int) -> str:
    """Return which settings to change so that a step with the same number of sequences fits into `total` bytes.

    Settings that cost no time or precision are changed first. If they do not suffice, the sequences are shortened.
    """

    def fits(changed: TrainConfig) -> bool:
        return _at_once(changed, vocabulary) <= total

    sequences = config.sequences
    half = config.autocast_bf16 or config.autocast_fp16
    free = [n for n in ("gradient_accumulation", "chunked_cross_entropy") if not getattr(config, n)]
    costly = ["activation_checkpoint"] * (not config.activation_checkpoint) + ["autocast_bf16"] * (not half)
    for paid in _subsets(costly):
        found: list[tuple[int, int, tuple[str, ...]]] = []
        for others in _subsets(free):
            chosen = (*others, *paid)
            given = replace(config, **dict.fromkeys(chosen, True))
            sizes = range(1, config.batch_size + 1) if given.gradient_accumulation else [config.batch_size]
            for size in sizes:
                more = sequences // size
                if not chosen and size == config.batch_size:
                    continue  # the current setting ran out of memory, whatever the estimate says
                if sequences % size == 0 and fits(replace(given, batch_size=size, accumulation=more)):
                    found.append((size, -len(chosen), chosen))
        if found:
            size, _, chosen = max(found)
            lower = f"lower batch_size from {config.batch_size} to {size}, with accumulation {sequences // size}"
            return _both(chosen, f"{lower} for as large a step" if size < config.batch_size else "")
    chosen = (*free, *costly)
    given = replace(config, **dict.fromkeys(chosen, True), batch_size=1)
    length = config.sequence_length // 2
    while length and not fits(replace(given, sequence_length=length)):
        length //= 2
    if not length:
        return TOO_WIDE
    return _both(chosen, f"lower batch_size to 1 and sequence_length from {config.sequence_length} to {length}")


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all subsets, the smallest first."""
    return [chosen for n in range(len(names) + 1) for chosen in itertools.combinations(names, n)]


def _both(switches: tuple[str, ...], lower: str) -> str:
    parts = [f"switch {', '.join(switches)} on"] if switches else []
    return " and ".join([*parts, lower] if lower else parts)


def plain_remedy(config: TrainConfig, vocabulary: int, total: int) -> str:
    """Return what to do where the plain trainer's step does not fit into `total` bytes."""
    fixed, sequence = needed(config, vocabulary)
    fitting = min(int((total - fixed) // sequence), config.sequences - 1)
    if fixed > total:
        return TOO_WIDE
    if fitting < 1:
        return "use the optimized trainer, or a smaller sequence_length"
    return (
        "use the optimized trainer, which computes a micro-batch at a time, or lower batch_size × accumulation from "
        f"{config.sequences} to {fitting}"
    )


@contextmanager
def naming_the_remedy(
    config: TrainConfig, vocabulary: int, device: torch.device, *, plain: bool = False
) -> Iterator[None]:
    """Convert an OutOfMemoryError to a PerfsuiteError that says in one line which settings to change, and how.

    On a CPU the operating system would kill the process without a message. There a step that needs more memory than the
    machine has raises PerfsuiteError before it starts.

    plain  True for the plain trainer, which runs none of the techniques and processes all sequences of a step at once
    """
    if plain:
        off = without_techniques(config)
        config = replace(off, autocast_bf16=config.autocast_bf16, autocast_fp16=config.autocast_fp16)
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if _at_once(config, vocabulary) > total:
            raise PerfsuiteError(_message(config, vocabulary, "this machine", total, plain=plain))
    try:
        yield
    except torch.OutOfMemoryError:
        # Do not count memory that other processes hold on the device.
        total = 0
        if device.type == "cuda":
            total = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        raise PerfsuiteError(_message(config, vocabulary, str(device), total, plain=plain)) from None


def _at_once(config: TrainConfig, vocabulary: int) -> float:
    fixed, sequence = needed(config, vocabulary)
    return fixed + _rows(config) * sequence


def _rows(config: TrainConfig) -> int:
    return config.batch_size if config.gradient_accumulation else config.sequences


def _message(config: TrainConfig, vocabulary: int, where: str, total: int, *, plain: bool) -> str:
    rows = _rows(config)
    return (
        f"out of memory: {rows} sequence{'s' * (rows != 1)} of {config.sequence_length} tokens at once need about "
        f"{_at_once(config, vocabulary) / GIB:.0f} GiB, and {where} has {total / GIB:.0f} for them; "
        + (plain_remedy if plain else remedy)(config, vocabulary, total)
    )
