"""Checkpoint of a sharded network in which each rank writes its own shards (ups, technique 002.7)."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from perfsuite.errors import first_line
from suite.runtime.errors import CheckpointError


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the weights and the optimizer's state to a folder, replacing the one at `path`; all ranks call it.

    Each rank writes its shards to its own file with `torch.distributed.checkpoint`; only the index is gathered. All
    ranks must see the same file system. The folder is renamed to `path` after all files are written, so a run that is
    killed at any time leaves a complete checkpoint.

    model      module whose parameters are DTensors, sharded by `fully_shard`
    optimizer  optimizer of these parameters; each parameter has a state, as after a step

    CheckpointError, in one line and on all ranks, if one of them cannot write.

    Source: ups, technique 002.7.
    """
    temporary, old = path.with_name(f".{path.name}.tmp"), _old(path)
    if dist.get_rank() == 0:
        _put_back(path)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    try:
        dcp.save(_state(model, optimizer), checkpoint_id=temporary)
    except CheckpointException as error:
        raise CheckpointError(f"cannot write {path}: {_cause(error)}; free space there, or name another") from None
    failure = [""]
    if dist.get_rank() == 0:
        try:
            if path.is_dir():
                os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            failure = [first_line(error)]
            _put_back(path)
    dist.broadcast_object_list(failure)
    if failure[0]:
        raise CheckpointError(f"cannot write {path}: {failure[0]}; name another")


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load a checkpoint that `save` wrote, with any number of ranks; all ranks call it.

    Each rank reads the parts of the files that overlap its own shards. CheckpointError, in one line and on all ranks,
    before anything is loaded, if the folder or a file is missing or truncated, or if the checkpoint belongs to another
    model. The index is a pickle, which can run code: load only checkpoints that you trust. Changed bytes in a file are
    not detected.

    Source: ups, technique 002.7.
    """
    if not path.exists() and _old(path).exists():
        path = _old(path)
    state = _state(model, optimizer)
    metadata = _metadata(path)
    _check_model(path, metadata, state)
    _check_files(path, metadata)
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        raise CheckpointError(f"cannot read {path}: {_cause(error)}; load another") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _old(path: Path) -> Path:
    """Return the path to which the earlier checkpoint is moved while the new one is renamed."""
    return path.with_name(f".{path.name}.old")


def _put_back(path: Path) -> None:
    """Move the earlier checkpoint back to `path`, if nothing is there."""
    if _old(path).exists() and not path.exists():
        with contextlib.suppress(OSError):
            os.replace(_old(path), path)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return name → DTensor or number; an optimizer that has no state yet gets one, with zeros."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _metadata(path: Path) -> Metadata:
    """Read the folder's index, which says where each shard is; CheckpointError if it is missing or damaged."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except OSError as error:
        raise CheckpointError(f"no checkpoint in {path}: {error.strerror}; name one that is there") from None
    except Exception:  # a truncated or foreign pickle raises many types
        metadata = None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is damaged: its .metadata cannot be read; load another")
    return metadata


def _check_model(path: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint's weights have other names or shapes than the model's."""
    saved = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    if saved.keys() != own.keys():
        raise CheckpointError(f"{path} is of another model, whose parameters have other names; load another")
    for name, shape in own.items():
        if saved[name] != shape:
            raise CheckpointError(
                f"{path} is of another model, whose {name} has shape {saved[name]} in place of {shape}; load another"
            )


def _check_files(path: Path, metadata: Metadata) -> None:
    """Raise CheckpointError if a file is missing or shorter than the index says."""
    for part in metadata.storage_data.values():
        try:
            size = (path / part.relative_path).stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {path / part.relative_path}: {error.strerror}; load another") from None
        if size < part.offset + part.length:
            raise CheckpointError(f"{path / part.relative_path} is cut off; load another")


def _cause(error: CheckpointException) -> str:
    """Return the error of the first rank that failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(cause) or type(cause).__name__}"
