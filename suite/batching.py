"""Assignment of rows to batches: a permutation that is the same on every device, and the bounds of the batches."""

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
    """Return 0 to count - 1 in an order that depends on seed and epoch alone, int64 [count].

    It does not wait for the device. Counter-based: rows are sorted by SplitMix64 (Steele, Lea and Flood, 2014) of their
    number. It maps 64 bits one to one, so that no two rows have the same key and every device sorts alike.
    """
    start = word_of(seed, epoch)
    return torch.argsort(hashed(torch.arange(count, dtype=torch.int64, device=device) * signed(STEP) + signed(start)))


def hashed(words: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output for each state, int64 as the words are: one to one, and the same on every device."""
    for shift, factor in ROUNDS:
        words = (words ^ _shifted(words, shift)) * signed(factor)
    return words ^ _shifted(words, LAST_SHIFT)


def bounds(count: int, batch_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """Return (first row, end) of each batch; a last one that is shorter is left out if `drop_last`."""
    end = count // batch_size * batch_size if drop_last else count
    return [(start, min(start + batch_size, end)) for start in range(0, end, batch_size)]


def check_rows(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of rows that all tensors have; PerfsuiteError where they differ."""
    if not tensors or any(t.ndim == 0 for t in tensors):
        raise PerfsuiteError("tensors: give one or more, each with a row for every example")
    counts = [len(t) for t in tensors]
    if len(set(counts)) > 1:
        raise PerfsuiteError(f"tensors: they have {', '.join(map(str, counts))} rows; give as many of each")
    return counts[0]


def check_batches(rows: int, batch_size: int, drop_last: bool) -> None:
    """Raise PerfsuiteError where this many rows make no batch."""
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
    """Return SplitMix64's output for a state, both unsigned words of 64 bits."""
    for shift, factor in ROUNDS:
        word = (word ^ word >> shift) * factor & WORD
    return word ^ word >> LAST_SHIFT


def word_of(seed: int, number: int) -> int:
    """Return a random unsigned word of 64 bits for each seed and number."""
    return mixed(mixed(seed & WORD) + number & WORD)


def signed(word: int) -> int:
    """Return the int64 of the same bits. It serves as well in products, since torch's wrap around."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, with zeros from the left; torch's own shift repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


class EpochSampler(Sampler[int]):
    """The order of an epoch, `permutation` on the host, for a `torch.utils.data.DataLoader`."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.count, self.seed, self.epoch, "cpu").tolist())


def whole(state: Mapping[str, Any], name: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return a count that a checkpoint holds; ValueError where it is not an int, or out of range."""
    value = state[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {reprlib.repr(value)}, and must be a whole number from {least} to {most}")
    return value


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise PerfsuiteError where a checkpoint's position is one in other data.

    `identity` describes the present data and settings; `state` has the same fields, as they were in the checkpoint.
    """
    for name, own in identity.items():
        if state[name] != own:
            what = "the data has" if name == "digest" else f"{name} has"
            values = "" if name == "digest" else f", from {reprlib.repr(state[name])} to {own}"
            raise PerfsuiteError(
                f"{what} changed since the checkpoint was written{values}; resume with what it was then"
            )
