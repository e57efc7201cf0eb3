"""A checkpoint of a sharded network to which every rank writes its shards alone (ups, technique 002.7)."""

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
    """Write the weights and the optimizer's state to a folder, in place of what is there; called by all ranks.

    Each rank writes a file of its own shards by `torch.distributed.checkpoint`; nothing is gathered but what lies
    where. All ranks must see the same folder. The folder gets its name once all files are written: a run that is killed
    at any moment leaves a whole checkpoint.

    model      its parameters are DTensors, sharded by `fully_shard`
    optimizer  of these parameters; each has a state, as after a step

    CheckpointError in one line, in all ranks, where one of them cannot write.

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
    """Read what `save` has written, also in another number of ranks; called by all ranks.

    Each rank reads those parts of the files that overlap its own shards. CheckpointError in one line, in all ranks and
    before anything is loaded, for a folder or file that is missing or cut off, or of another model. The list of
    contents is a pickle, which may run code: load only checkpoints that you trust. Bytes of a file that were changed
    are not noticed.

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
    """Where a checkpoint is while another one takes its name."""
    return path.with_name(f".{path.name}.old")


def _put_back(path: Path) -> None:
    """Give the earlier checkpoint its name again, where no other has got it."""
    if _old(path).exists() and not path.exists():
        with contextlib.suppress(OSError):
            os.replace(_old(path), path)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Names → DTensors and numbers; of an optimizer that has no state yet it is made, with zeros."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _metadata(path: Path) -> Metadata:
    """The index of the folder's files: which shard lies where."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except OSError as error:
        raise CheckpointError(f"no checkpoint in {path}: {error.strerror}; name one that is there") from None
    except Exception:  # a pickle that is cut off or of something else raises a dozen kinds
        metadata = None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is damaged: its .metadata cannot be read; load another")
    return metadata


def _check_model(path: Path, metadata: Metadata, state: dict[str, Any]) -> None:
    """CheckpointError where the weights have other names or shapes."""
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
    """CheckpointError where a file is missing or shorter than its contents."""
    for part in metadata.storage_data.values():
        try:
            size = (path / part.relative_path).stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {path / part.relative_path}: {error.strerror}; load another") from None
        if size < part.offset + part.length:
            raise CheckpointError(f"{path / part.relative_path} is cut off; load another")


def _cause(error: CheckpointException) -> str:
    """The first rank's error."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(cause) or type(cause).__name__}"
