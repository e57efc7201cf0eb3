"""What a step of eigenstate_lm needs of a device's memory, and what to reduce where that is too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perfsuite.errors import PerfsuiteError
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.model import parameters

STATES = 16
"""Bytes of a parameter: itself, its gradient, and AdamW's two moments."""
KEPT = 35.5
"""Bytes that the optimized trainer keeps of a token, block and channel for the backward, in half precision."""
KEPT_CHECKPOINTED = 18.5
KEPT_WIDE = 58.0
"""The same in float32."""
KEPT_WIDE_CHECKPOINTED = 32.0
GIB = 2**30


def needed(config: TrainConfig, vocabulary: int) -> tuple[float, float]:
    """(bytes whatever the batch is, bytes of a sequence of a micro-batch), by the optimized trainer, about."""
    half = config.autocast_bf16 or config.autocast_fp16
    kept = KEPT if half else KEPT_WIDE
    if config.activation_checkpoint:
        kept = KEPT_CHECKPOINTED if half else KEPT_WIDE_CHECKPOINTED
    sequence = kept * config.sequence_length * config.layers * config.width
    if not config.chunked_cross_entropy:  # logits, their exponentials and their gradients
        sequence += 12.0 * config.sequence_length * vocabulary
    return STATES * parameters(config.sizes(vocabulary)), sequence


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
