"""Latents of all fields, encoded once by a frozen encoder and stored in a memory-mapped file.

The cache of a data file consists of two files: the latents as .npy and an index as JSON. The index is written last, so
that latents without an index count as missing. The file names contain a digest of the data, the encoder and the
normalisation.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import write
from suite.building import digest_of, digest_of_file
from suite.seeding import seeded_on_cpu
from suite.ups.model import Encoder
from suite.ups.task_fields import TaskFields, check_grid, token_grid

TASK_SEEDS = {"advection1d": 0, "darcy2d": 1}
"""Task → number that is part of its encoder's seed, so that the encoders differ."""
FORMAT = 1


@dataclass(frozen=True)
class Latents:
    """The latents of all states of a task."""

    rows: torch.Tensor
    """float32 [samples · states, tokens, latent width]; a state is in row `sample · states + state`."""
    mapped: Path | None = None
    """Memory-mapped file of the latents, if any. Only its path is then pickled, and unpickling maps the file again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Latents, (self.rows,)) if self.mapped is None else (_open, (self.mapped,))


def _open(array: Path) -> Latents:
    return Latents(_mapped(array), array)


def frozen_encoder(task: str, tokens: int, latent_width: int, seed: int) -> Encoder:
    """Build the frozen encoder of a task, float32 on the CPU. Its weights depend only on the seed and the task."""
    with seeded_on_cpu(seed * len(TASK_SEEDS) + TASK_SEEDS[task] & 2**63 - 1):
        return Encoder(token_grid(task, tokens), 1, latent_width).requires_grad_(False)


def key_of(fields: TaskFields, tokens: int, latent_width: int, seed: int) -> str:
    """Return a digest of everything that the latents depend on."""
    encoder = {"tokens": tokens, "latent_width": latent_width, "seed": seed, "task": fields.task}
    normalised = [asdict(n) for n in fields.normalisations]
    return digest_of({"format": FORMAT, "data": fields.digest, "encoder": encoder, "normalisation": normalised})


def latents_of(fields: TaskFields, tokens: int, latent_width: int, seed: int, folder: str | None = None) -> Latents:
    """Return the latents of all states, on the CPU.

    The latents of a file are mapped from the cache, which is written if it is missing. Fields without a file are
    encoded in memory.

    folder  folder of the cache; None: the folder of the data file

    PerfsuiteError if the grid does not divide into the tokens, or the cache is damaged or cannot be written.
    """
    check_grid(fields, tokens)
    encoder = frozen_encoder(fields.task, tokens, latent_width, seed)
    if fields.path is None:
        encoded = torch.empty(fields.samples * fields.states, tokens, latent_width)
        _encode(fields, encoder, encoded)
        return Latents(encoded)
    key = key_of(fields, tokens, latent_width, seed)
    place = Path(folder) if folder is not None else fields.path.parent
    array = place / f"{fields.path.stem}.latents-{key[:16]}.npy"
    index = array.with_suffix(".json")
    shape = [fields.samples * fields.states, tokens, latent_width]
    if not index.exists():
        _make(fields, encoder, array, index, shape, key)
    _check(array, index, shape, key)
    return Latents(_mapped(array), array)


def _encode(fields: TaskFields, encoder: Encoder, out: torch.Tensor) -> None:
    with torch.no_grad():
        for sample in range(fields.samples):
            first = sample * fields.states
            out[first : first + fields.states] = encoder(fields.read(sample).unsqueeze(-1), fields.points)


def _make(fields: TaskFields, encoder: Encoder, array: Path, index: Path, shape: list[int], key: str) -> None:
    temporary: str | None = None
    try:
        array.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=array.parent, prefix=f".{array.name}.")
        os.close(handle)
        mapped = numpy.lib.format.open_memmap(temporary, mode="w+", dtype=numpy.float32, shape=tuple(shape))
        _encode(fields, encoder, torch.from_numpy(mapped))
        mapped.flush()
        del mapped
        digest = digest_of_file(Path(temporary))
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would exclude other users
        os.replace(temporary, array)
        temporary = None
    except OSError as error:
        reason = error.strerror or error
        raise PerfsuiteError(f"cannot write {array}: {reason}; name another folder with --latents") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
    write(index, json.dumps({"key": key, "shape": shape, "sha256": digest, "written": _stamp(array)}) + "\n")


def _stamp(array: Path) -> list[int]:
    """Return the size of a file in bytes and its modification time in ns."""
    found = array.stat()
    return [found.st_size, found.st_mtime_ns]


def _mapped(array: Path) -> torch.Tensor:
    # Copy-on-write, because PyTorch requires writable memory; nothing is written to the file.
    return torch.from_numpy(numpy.load(array, mmap_mode="c"))


def _check(array: Path, index: Path, shape: list[int], key: str) -> None:
    """Raise PerfsuiteError if the array does not contain the bytes that were written for this key.

    If size and modification time are as recorded, the file counts as unchanged, because reading 13 GB takes a minute.
    """
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
        if not isinstance(known, dict) or not {"key", "shape", "sha256"} <= known.keys():
            raise ValueError("its index lacks fields")
        if known["key"] != key or known["shape"] != shape:
            raise ValueError("it was made from other data, or by another encoder")
        if known.get("written") != (now := _stamp(array)):
            if digest_of_file(array) != known["sha256"]:
                raise ValueError("its bytes are not those that were written")
            with suppress(PerfsuiteError):  # in a read-only folder, each start compares the bytes
                write(index, json.dumps({**known, "written": now}) + "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PerfsuiteError(
            f"latents: {array} cannot be used: {reason}; delete {index} and it is made again"
        ) from None
