"""Trainers' states: sent through a file, and compared."""

import io

import torch


def same(first, second):
    """Whether two states are equal, bit for bit; configurations aside."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first if k != "config")
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def through_a_file(trainer):
    """The state of a trainer, as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)
