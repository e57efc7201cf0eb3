"""Assignment of rows to batches: a permutation that is identical on every device, and the batches' bounds."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from perfsuite.errors import PerfsuiteError

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def permutation(count: int, seed: int, epoch: int, device: torch.device | str) -> torch.Tensor:
    """Return a permutation of 0 to count - 1 that depends only on seed and epoch, int64 [count].

    The function does not wait for the device. It is counter-based: rows are sorted by SplitMix64 (Steele, Lea and
    Flood, 2014) of their number. SplitMix64 is a bijection of 64-bit words, so no two keys are equal and every device
    sorts the same way.
    """
    start = word_of(seed, epoch)
    return torch.argsort(hashed(torch.arange(count, dtype=torch.int64, device=device) * signed(STEP) + signed(start)))


def hashed(words: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output for each state, int64: a bijection, identical on every device."""
    for shift, factor in ROUNDS:
        words = (words ^ _shifted(words, shift)) * signed(factor)
    return words ^ _shifted(words, LAST_SHIFT)


def bounds(count: int, batch_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """Return (first row, end) of each batch. With `drop_last`, a shorter last batch is omitted."""
    end = count // batch_size * batch_size if drop_last else count
    return [(start, min(start + batch_size, end)) for start in range(0, end, batch_size)]


def check_rows(tensors: Sequence[torch.Tensor]) -> int:
    """Return the common number of rows of all tensors; PerfsuiteError if they differ."""
    if not tensors or any(t.ndim == 0 for t in tensors):
        raise PerfsuiteError("tensors: give one or more, each with a row for every example")
    counts = [len(t) for t in tensors]
    if len(set(counts)) > 1:
        raise PerfsuiteError(f"tensors: they have {', '.join(map(str, counts))} rows; give as many of each")
    return counts[0]


def check_batches(rows: int, batch_size: int, drop_last: bool) -> None:
    """Raise PerfsuiteError if `batch_size` is below 1, or the rows do not fill a batch."""
    if batch_size < 1:
        raise PerfsuiteError(f"batch_size: {batch_size} is out of range; give 1 or more")
    if not rows:
        raise PerfsuiteError("data: it has no example; give one or more")
    if not bounds(rows, batch_size, drop_last):
        raise PerfsuiteError(
            f"batch_size: {batch_size} is more than the {rows} examples, and drop_last leaves out what makes no whole "
            "batch; lower it"
        )


def mixed(word: int) -> int:
    """Return SplitMix64's output for a state; both are unsigned 64-bit words."""
    for shift, factor in ROUNDS:
        word = (word ^ word >> shift) * factor & WORD
    return word ^ word >> LAST_SHIFT


def word_of(seed: int, number: int) -> int:
    """Return a pseudorandom unsigned 64-bit word for a seed and a number."""
    return mixed(mixed(seed & WORD) + number & WORD)


def signed(word: int) -> int:
    """Return the int64 with the same bits. Products with it are right, since torch's int64 arithmetic wraps around."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift, which fills with zeros; torch's own shift is arithmetic and repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


class EpochSampler(Sampler[int]):
    """Sampler for `torch.utils.data.DataLoader` with an epoch's order, `permutation` on the host."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.count, self.seed, self.epoch, "cpu").tolist())


def whole(state: Mapping[str, Any], name: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return the count `name` from a checkpoint's state; ValueError if it is not an int or out of range."""
    value = state[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {reprlib.repr(value)}, and must be a whole number from {least} to {most}")
    return value


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise PerfsuiteError if a checkpoint's position belongs to other data.

    `identity` describes the current data and settings. `state` has the same fields from the checkpoint.
    """
    for name, own in identity.items():
        if state[name] != own:
            what = "the data has" if name == "digest" else f"{name} has"
            values = "" if name == "digest" else f", from {reprlib.repr(state[name])} to {own}"
            raise PerfsuiteError(
                f"{what} changed since the checkpoint was written{values}; resume with what it was then"
            )
