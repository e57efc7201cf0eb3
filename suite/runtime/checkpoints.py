"""Checkpoints, each in one file that is replaced atomically. A killed run leaves the last good checkpoint intact.

A file is a zip archive written by `torch.save` with plain values and tensors. Reading it runs no code from the file,
and verifies every byte with the archive's checksums.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from perfsuite.errors import first_line
from suite.naming import shown
from suite.runtime import archive
from suite.runtime.errors import CheckpointError, NotANumberError
from suite.runtime.plain import check

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "NotANumberError",
    "Start",
    "Store",
    "check",
    "load",
    "load_latest",
    "restore_rng",
    "rng_state",
]

FORMAT = "perfsuite.checkpoint"
VERSION = 1
OLD = ".old"
NAME = re.compile(rf"window-(\d{{8}}|[1-9]\d{{8,}})\.pt({re.escape(OLD)}\d*)?", re.ASCII)
"""Pattern of checkpoint file names. Numbers are zero-padded to eight digits or longer. Other files are ignored."""
MOST = 2**63
"""Exclusive upper limit of windows and items."""
KEYS = 624
"""Number of keys in the state of NumPy's generator. With a larger position in a state, it would read past them."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """Everything that a run needs to continue after `windows` windows, which contained `items` tokens or rows."""

    name: str
    windows: int
    items: int
    trainer: Mapping[str, Any]
    batches: Mapping[str, Any] | None
    configuration: Mapping[str, Any]
    rng: Mapping[str, Any]


@dataclass(slots=True)
class Start:
    """The checkpoint file from which a run resumes, and its content if it has been read already."""

    path: Path
    content: Checkpoint | None = None

    def take(self, name: str) -> Checkpoint:
        """Return the content, and keep no reference, since the run would hold its memory until it ends."""
        found, self.content = self.content, None
        return found if found is not None else load(self.path, name)


class Store:
    """The checkpoints in a folder. The last `keep` checkpoints are kept.

    The numbers in their names determine the order, not their times, since a clock may be set back. A run that resumes
    from an earlier checkpoint, or starts from scratch, renames the later ones to `*.old`. Renamed checkpoints sort
    before all others.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)

    def files(self) -> list[Path]:
        """Return the checkpoints, latest first; CheckpointError if the folder cannot be read."""
        try:
            found = [(place, name) for name in os.listdir(self.folder) if (place := _place(name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"cannot read the folder {shown(self.folder)}: {reason}; name another --folder"
            ) from None
        return [self.folder / name for _, name in sorted(found, reverse=True)]

    def latest(self) -> Path:
        """Return the latest checkpoint; CheckpointError if there is none."""
        found = self.files()
        if not found:
            raise CheckpointError(
                f"no checkpoint in {shown(self.folder)}; leave out --resume, or name a file or its folder"
            )
        return found[0]

    def holds(self, path: Path) -> bool:
        """Return True if a file is a checkpoint in this folder and was not renamed to `*.old`."""
        place = _place(path.name)
        try:
            return place is not None and place[0] and os.path.samefile(path.parent, self.folder)
        except OSError:
            return False

    def leave_behind(self, after: int) -> list[Path]:
        """Rename the checkpoints of more than `after` windows to `*.old`. Return their former paths.

        If `*.old` exists, the name is `*.old2`, and so on.
        """
        later = [p for p in self.files() if (place := _place(p.name)) and place[0] and place[1] > after]
        for path in later:
            try:
                os.replace(path, _free(path))
            except OSError as error:
                reason = error.strerror or str(error)
                raise CheckpointError(f"cannot rename {shown(path)}: {reason}; move it away") from None
        return later

    def save(self, checkpoint: Checkpoint, *, more: int = 0) -> Path:
        """Write a checkpoint completely or not at all, then remove the oldest ones beyond `keep` + `more`.

        Checkpoints of more windows are renamed to `*.old`. The latest checkpoint stays intact even if the process is
        killed at any moment.
        """
        path = self.folder / f"window-{checkpoint.windows:08d}.pt"
        temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
        fields = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # exclusive, so that no link's target is overwritten
                torch.save({"format": FORMAT, "version": VERSION, **fields}, file)
                file.flush()
                os.fsync(file.fileno())
            self.leave_behind(checkpoint.windows)
            os.replace(temporary, path)
            _flush(self.folder)
        except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            reason = getattr(cause, "strerror", None) or first_line(cause) or type(cause).__name__
            raise CheckpointError(
                f"cannot write {shown(path)}: {reason}; free space there, or name another --folder"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self.prune(path, more=more)
        return path

    def prune(self, newest: Path, *, more: int = 0) -> None:
        """Remove the oldest checkpoints beyond `keep` + `more`, if possible. Never remove `newest`."""
        files = [p for p in self.files() if p.is_symlink() or not p.is_dir()]
        for old in files[self.keep + more :]:
            if old != newest:
                with contextlib.suppress(OSError):
                    old.unlink()

    def refuse_others(self) -> None:
        """Raise CheckpointError if the folder contains checkpoints, which a new run would gradually remove."""
        if there := self.files():
            raise CheckpointError(
                f"{shown(self.folder)} holds checkpoints of an earlier run ({there[0].name}); "
                "go on with --resume latest, name another --folder, or give --overwrite"
            )

    def tidy(self) -> None:
        """Remove half-written files of killed runs. Only the run that holds the folder's lock may call it."""
        for path in self.folder.glob(".window-*.tmp"):
            with contextlib.suppress(OSError):
                path.unlink()


def load(path: Path, name: str | None = None) -> Checkpoint:
    """Read a checkpoint to the CPU; CheckpointError, with a one-line message, if a run cannot resume from it.

    Neither the content nor the file name is trusted: a number in the name must equal the number of windows.
    """
    try:
        with archive.opened(path) as file:
            content = archive.content(file)
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise CheckpointError(f"no checkpoint {shown(path)}; name one that is there, or 'latest'") from None
        raise CheckpointError(f"{shown(path)} is a link to a file that is missing{_instead(path)}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error.strerror or error}{_instead(path)}") from None
    except archive.DamagedError as error:
        raise CheckpointError(f"{shown(path)} {error}{_instead(path)}") from None
    if not isinstance(content, dict) or not _is(content.get("format"), FORMAT):
        raise CheckpointError(f"{shown(path)} is no checkpoint of `perfsuite train`; name another")
    if not _is(content.get("version"), VERSION):
        found = content.get("version")
        other = found if type(found) is int and 0 <= found < MOST else "that is none"
        raise CheckpointError(
            f"{shown(path)} has format version {other}, this perfsuite reads {VERSION}; "
            "resume it with the version that wrote it"
        )
    if wrong := _wrong(content):
        raise CheckpointError(f"{shown(path)} is damaged: {wrong}{_instead(path)}")
    checkpoint = Checkpoint(**{field: content[field] for field in Checkpoint.__slots__})
    place = _place(path.name)
    if place is not None and place[1] != checkpoint.windows:
        raise CheckpointError(
            f"{shown(path)} is of {checkpoint.windows} windows, not of {place[1]} as its name says; "
            f"name it window-{checkpoint.windows:08d}.pt, or resume from another"
        )
    if name is not None and checkpoint.name != name:
        raise CheckpointError(
            f"{shown(path)} is of the trainer {reprlib.repr(checkpoint.name)}, not of {name!r}; name another"
        )
    return checkpoint


def load_latest(store: Store, name: str | None = None) -> tuple[Path, Checkpoint]:
    """Return (file, checkpoint) of the latest checkpoint, even while a run in the folder removes old ones."""
    while True:
        path = store.latest()
        try:
            return path, load(path, name)
        except CheckpointError:
            if os.path.lexists(path):
                raise


def _is(found: object, wanted: str | int) -> bool:
    """Return True if a value equals `wanted`. The type is compared first, since `==` on a tensor returns no bool."""
    return type(found) is type(wanted) and found == wanted


def _wrong(content: Mapping[Any, Any]) -> str | None:
    """Return a phrase that says which field of a checkpoint is missing or invalid; None if all are valid."""
    kinds: dict[str, Any] = {"name": str, "windows": int, "items": int, "batches": (Mapping, type(None))}
    missing = [field for field in Checkpoint.__slots__ if field not in content]
    if missing:
        return f"it lacks {', '.join(missing)}"
    try:
        for field in Checkpoint.__slots__:
            check(content[field], field, tensors=field != "configuration", nan=True)
            if not isinstance(content[field], kinds.get(field, Mapping)) or isinstance(content[field], bool):
                return f"its {field} are of type {type(content[field]).__name__}"
        for field in ("windows", "items"):
            if not 0 <= content[field] < MOST:
                return f"its {field} are a number out of range"
        if not all(type(key) is str for key in content["configuration"]):
            return "its configuration has a field without a name"
    except CheckpointError:
        return "it holds what no checkpoint does"
    return None


def rng_state() -> dict[str, Any]:
    """Return the random generators' states of Python, NumPy and PyTorch, including all GPUs if CUDA is initialised."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the states of `rng_state`, except for GPUs that this machine lacks. Invalid states raise an exception."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    if len(keys) != KEYS or not 0 <= position <= KEYS:
        raise ValueError(f"numpy's generator has {len(keys)} keys, and is at {position}")
    numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)


def _free(path: Path) -> str:
    """Return an unused `*.old` name for a checkpoint."""
    names = itertools.chain([OLD], (f"{OLD}{number}" for number in itertools.count(2)))
    return next(f"{path}{name}" for name in names if not os.path.lexists(f"{path}{name}"))


def _place(name: str) -> tuple[bool, int] | None:
    """Return (whether the name has no `.old` suffix, windows) for a checkpoint's name; None for other names.

    A later checkpoint has a greater value.
    """
    match = NAME.fullmatch(name)
    return (match[2] is None, int(match[1])) if match else None


def _instead(path: Path) -> str:
    """Return the remedy: resume from the checkpoint before it if there is one, otherwise from the latest."""
    try:
        found = [p.name for p in Store(path.parent).files()]
    except CheckpointError:
        found = []
    before = found[found.index(path.name) + 1 :] if path.name in found else []
    others = before or [name for name in found if name != path.name]
    if others:
        return f"; resume from {shown(path.parent / others[0])}"
    return "; there is no other beside it: name another, or begin anew"


def _flush(folder: Path) -> None:
    """Flush the folder to disk, so that the new name survives a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
