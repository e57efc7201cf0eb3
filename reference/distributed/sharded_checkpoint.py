"""Checkpoint of a sharded network in one file, which rank 0 writes and each rank reads (ups, technique 002.7)."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from perfsuite.errors import first_line
from suite.runtime import archive
from suite.runtime.errors import CheckpointError


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the weights and the optimizer's state to a file, replacing the one at `path`; all ranks call it.

    The tensors are gathered one after the other. Each rank holds all of them in memory, and rank 0 writes them.

    model      module whose parameters are DTensors, sharded by `fully_shard`
    optimizer  optimizer of these parameters; each parameter has a state, as after a step

    CheckpointError, in one line and on all ranks, if rank 0 cannot write.

    Source: ups, technique 002.7.
    """
    content: dict[str, Any] = {}
    for name, p in model.named_parameters():
        state = {key: _whole(value) for key, value in optimizer.state[p].items()}
        content[name] = {"weight": _whole(p.detach()), "state": state}
    failure = [""]
    if dist.get_rank() == 0:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, temporary)
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            failure = [first_line(error) or type(error).__name__]
    dist.broadcast_object_list(failure)
    if failure[0]:
        raise CheckpointError(f"cannot write {path}: {failure[0]}; free space there, or name another")


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load a checkpoint that `save` wrote, with any number of ranks; all ranks call it.

    Each rank reads the whole file and keeps its shards. CheckpointError, in one line, if the file is missing or
    damaged, or if it belongs to another model.

    Source: ups, technique 002.7.
    """
    try:
        with archive.opened(path) as file:
            content = archive.content(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; name a checkpoint that is there") from None
    except archive.DamagedError as error:
        raise CheckpointError(f"{path} {error}; load another") from None
    parameters = dict(model.named_parameters())
    if not isinstance(content, dict) or content.keys() != parameters.keys():
        raise CheckpointError(f"{path} is of another model, whose parameters have other names; load another")
    for name, p in parameters.items():
        if not isinstance(content[name], dict) or content[name].keys() != {"weight", "state"}:
            raise CheckpointError(f"{path} has no optimizer state; load a checkpoint that `save` wrote")
        saved = content[name]["weight"]
        if saved.shape != p.shape:
            shapes = f"{tuple(saved.shape)} in place of {tuple(p.shape)}"
            raise CheckpointError(f"{path} is of another model, whose {name} has shape {shapes}; load another")
    for name, p in parameters.items():
        assert isinstance(p, DTensor)
        p.to_local().detach().copy_(_shard(content[name]["weight"], p))
        optimizer.state[p] = {
            key: DTensor.from_local(_shard(value, p), p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            if value.shape == p.shape and key != "step"
            else value
            for key, value in content[name]["state"].items()
        }


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return the gathered tensor on the CPU."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _shard(whole: torch.Tensor, p: DTensor) -> torch.Tensor:
    """Return a copy of this rank's rows on the parameter's device."""
    shards = whole.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return (shards[rank] if rank < len(shards) else whole[:0]).to(p.device, copy=True)
