"""Readers for the files of a model folder in transformers' format: JSON, safetensors and tokenizers."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite.errors import PerfsuiteError
from suite.naming import shown

if TYPE_CHECKING:
    import torch


def check_folder(folder: Path, content: str) -> None:
    """Raise PerfsuiteError if `folder` is not a folder. The message says with `content` what it must contain."""
    if not os.path.isdir(folder):  # Path.is_dir raises if the name is too long
        raise PerfsuiteError(f"{shown(folder)} is no folder; name one that has {content}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; PerfsuiteError if the file is missing, damaged or holds no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PerfsuiteError(f"cannot read {shown(path)}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise PerfsuiteError(f"{shown(path)} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise PerfsuiteError(f"{shown(path)} is damaged: it holds no object")
    return found


def read_tensors(path: Path, remedy: str = "") -> dict[str, torch.Tensor]:
    """Read a safetensors file, name → tensor. PerfsuiteError, with `remedy`, if it is missing or damaged."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise PerfsuiteError("safetensors is not installed; pip install 'perfsuite[train]'") from None
    try:
        found: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError:
        raise PerfsuiteError(f"{shown(path)} is missing{remedy}") from None
    except Exception as error:  # SafetensorError, or torch's error for an unsupported dtype
        raise PerfsuiteError(f"{shown(path)} is damaged: {error}{remedy}") from None
    return found


def read_tokenizer(folder: Path) -> Any:
    """Read tokenizer.json with the package tokenizers; PerfsuiteError if it is missing or damaged."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PerfsuiteError("tokenizers is not installed; pip install 'perfsuite[train]'") from None
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise PerfsuiteError(f"cannot read {shown(path)}: {error}") from None


def package_folders(package: str) -> list[Path]:
    """Return the folders of an installed package without importing it; an empty list if it is not installed."""
    found = importlib.util.find_spec(package)
    return [] if found is None else [Path(p) for p in found.submodule_search_locations or ()]
