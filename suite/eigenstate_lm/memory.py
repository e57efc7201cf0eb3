"""What a step of eigenstate_lm needs of a device's memory, and what to reduce where that is too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from perfsuite.errors import PerfsuiteError
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.model import parameters

STATES = 16
"""Bytes of a parameter: itself, its gradient, and AdamW's two moments."""


class Kept(NamedTuple):
    """Bytes that the optimized trainer keeps of a token and channel for the backward, as measured on an H200."""

    block: float
    """Of every block."""
    beside: float
    """Once: what the block that is at work needs."""


KEPT = {"half": Kept(28.5, 14.0), "wide": Kept(48.5, 28.0)}
KEPT_CHECKPOINTED = {"half": Kept(12.5, 39.0), "wide": Kept(15.0, 60.0)}
DROPPED = 4.0
"""Of every block, which elements dropout has left."""
ROWS = 4096
"""Tokens whose logits chunked_cross_entropy has at a time."""
GIB = 2**30


def needed(config: TrainConfig, vocabulary: int) -> tuple[float, float]:
    """(bytes whatever the batch is, bytes of a sequence of a micro-batch), by the optimized trainer, about."""
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
    """What to change so that a step fits into so many bytes."""
    fixed, sequence = needed(config, vocabulary)
    rows = _rows(config)
    fits = int((total - fixed) // sequence)
    if not config.gradient_accumulation and config.accumulation > 1:
        return "switch gradient_accumulation on, by which a micro-batch is there at a time"
    fits = min(fits, rows - 1)
    if fits >= 1:
        more = -(-config.sequences // fits)
        return f"lower batch_size from {config.batch_size} to {fits}, with accumulation {more} for as large a step"
    if not config.activation_checkpoint:
        return "switch activation_checkpoint on, which keeps half"
    if not config.autocast_bf16 and not config.autocast_fp16:
        return "switch autocast_bf16 on, which keeps half"
    length = config.sequence_length
    while length > 1 and fixed + sequence * length / config.sequence_length > total:
        length //= 2
    length = min(length, config.sequence_length // 2)
    return f"lower batch_size to 1 and sequence_length from {config.sequence_length} to {max(1, length)}"


@contextmanager
def told_when_out(config: TrainConfig, vocabulary: int, device: torch.device) -> Iterator[None]:
    """An OutOfMemoryError within is told in one line, which says what to reduce and by how much.

    On a CPU, whose system ends a process without a word, what is more than the machine has is refused beforehand.
    """
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if _at_once(config, vocabulary) > total:
            raise PerfsuiteError(_told(config, vocabulary, "this machine", total))
    try:
        yield
    except torch.OutOfMemoryError:
        # What others on the device hold is not to be had.
        total = 0
        if device.type == "cuda":
            total = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        raise PerfsuiteError(_told(config, vocabulary, str(device), total)) from None


def _at_once(config: TrainConfig, vocabulary: int) -> float:
    fixed, sequence = needed(config, vocabulary)
    return fixed + _rows(config) * sequence


def _rows(config: TrainConfig) -> int:
    return config.batch_size if config.gradient_accumulation else config.sequences


def _told(config: TrainConfig, vocabulary: int, where: str, total: int) -> str:
    return (
        f"out of memory: {_rows(config)} sequences of {config.sequence_length} tokens at once take about "
        f"{_at_once(config, vocabulary) / GIB:.0f} GiB, and {where} has {total / GIB:.0f} for them; "
        + remedy(config, vocabulary, total)
    )
