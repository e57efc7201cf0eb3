"""Checkpoints: a file each, replaced whole, so that a run that is killed leaves the last good one.

A file is `torch.save`'s zip archive of plain values and tensors. It is read without running code in it, and every
byte of it is held against the archive's own checksums.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import probe

FORMAT = "perfsuite.checkpoint"
VERSION = 1
NAME = re.compile(r"window-(\d+)\.pt")
PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """All that a run needs to go on: after `windows` windows, which held `items` tokens or rows."""

    name: str
    windows: int
    items: int
    trainer: Mapping[str, Any]
    batches: Mapping[str, Any] | None
    configuration: Mapping[str, Any]
    rng: Mapping[str, Any]


class CheckpointError(PerfsuiteError):
    """A checkpoint that is missing, damaged, foreign, or cannot be written."""


class NotANumberError(CheckpointError):
    """A state that must not be written: it holds NaN."""


class Store:
    """The checkpoints in a folder, of which the last `keep` written stay."""

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)

    def files(self) -> list[Path]:
        """Checkpoints, the last written one first.

        By time, not by number: a run that went on from an older one has written smaller numbers since.
        """
        try:
            found = [p for p in self.folder.iterdir() if NAME.fullmatch(p.name)]
            return sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"cannot read the folder {self.folder}: {reason}; name another --folder") from None

    def latest(self) -> Path:
        """The last one written; CheckpointError where there is none."""
        found = self.files()
        if not found:
            raise CheckpointError(f"no checkpoint in {self.folder}; leave out --resume, or name a file or its folder")
        return found[0]

    def save(self, checkpoint: Checkpoint, *, more: int = 0) -> Path:
        """Write a checkpoint whole or not at all, then drop the oldest beyond `keep` and `more`."""
        path = self.folder / f"window-{checkpoint.windows:08d}.pt"
        temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
        fields = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save({"format": FORMAT, "version": VERSION, **fields}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush(self.folder)
            self.prune(path, more=more)
        except (OSError, RuntimeError) as error:  # torch tells a full disk by a RuntimeError
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise CheckpointError(
                f"cannot write {path}: {reason}; free space there, or name another --folder"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return path

    def prune(self, newest: Path, *, more: int = 0) -> None:
        """Drop the oldest beyond `keep` and `more`; `newest` stays in any case."""
        for old in self.files()[self.keep + more :]:
            if old != newest:
                old.unlink(missing_ok=True)

    def refuse_others(self) -> None:
        """CheckpointError where the folder holds checkpoints, which a new run would drop one by one."""
        if there := self.files():
            raise CheckpointError(
                f"{self.folder} holds checkpoints of an earlier run ({there[0].name}); "
                "go on with --resume latest, name another --folder, or give --overwrite"
            )

    def ready(self) -> None:
        """Make the folder; CheckpointError where nothing can be written into it: before a run, and not at its end."""
        try:
            probe(self.folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"cannot write into {self.folder}: {reason}; name another --folder") from None

    def tidy(self) -> None:
        """Remove what runs that were killed have left half written."""
        for path in self.folder.glob(".window-*.tmp"):
            pid = path.name.split(".")[-2]
            if pid.isdigit() and not _alive(int(pid)):
                with contextlib.suppress(OSError):
                    path.unlink()


def load(path: Path, name: str | None = None) -> Checkpoint:
    """Read a checkpoint, to the CPU; CheckpointError in one line where it cannot be gone on from."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"{path} is damaged, in {broken}{_instead(path)}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint {path}; name one that is there, or 'latest'") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # zipfile and torch raise a dozen kinds on a file that is cut, empty or of something else
        raise CheckpointError(f"{path} is damaged, or no checkpoint{_instead(path)}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of `perfsuite train`; name another")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')}, this perfsuite reads {VERSION}; "
            "resume it with the version that wrote it"
        )
    missing = [field for field in Checkpoint.__slots__ if field not in content]
    if missing:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(missing)}{_instead(path)}")
    found = Checkpoint(**{field: content[field] for field in Checkpoint.__slots__})
    if name is not None and found.name != name:
        raise CheckpointError(f"{path} is of the trainer {found.name!r}, not of {name!r}; name another")
    return found


def check(state: Any, where: str = "state") -> None:
    """Pass a state that holds what can be read back, and no NaN; else CheckpointError, or NotANumberError."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and bool(state.isnan().any()):
            raise NotANumberError(f"{where} holds NaN")
    elif isinstance(state, Mapping):
        for key, value in state.items():
            if type(key) not in PLAIN:
                raise CheckpointError(f"{where} has a key of type {type(key).__name__}, which cannot be read back")
            check(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            check(value, f"{where}[{index}]")
    elif type(state) not in PLAIN and not isinstance(state, (torch.dtype, torch.device, torch.Size)):
        raise CheckpointError(
            f"{where} is a {type(state).__name__}, which cannot be read back; "
            "keep tensors and plain values in state_dict"
        )


def rng_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of every GPU that is in use."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Undo what was drawn since `rng_state`. GPUs that are not here are left out."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)


def _instead(path: Path) -> str:
    """The remedy: the checkpoint before it, if there is one."""
    others = [p for p in Store(path.parent).files() if p != path]
    return f"; resume from {others[0]}" if others else "; there is no other beside it: name another, or begin anew"


def _flush(folder: Path) -> None:
    """Make the new name survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
