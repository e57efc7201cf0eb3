"""The imports of the server from which the proving processes are forked (forks.py).

Nothing of the project is imported, nor anything of perfsuite that notes the environment as a process finds it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from typing import Any

from perfsuite.machine import has_gpu

PREPARE = "perfsuite.preload:prepare"
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
SERVER = {
    COMPILE_THREADS: "1",  # with more, importing Inductor starts threads, which a fork does not have
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to ask the CUDA runtime would initialise it, which a fork cannot use
}
"""Environment variables of the server itself."""


def prepare() -> None:
    """Import torch, and on a machine with a GPU the compiler, too."""
    for name in ("torch", "numpy", "triton.language"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if has_gpu():
        import_compiler()
    gc.collect()  # what imports leave would be collected, and may warn, in every fork
    gc.freeze()


def import_compiler() -> None:
    """Import what the first use of torch.compile, or of what belongs to it, would wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in COMPILER:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def read_environment() -> None:
    """In a fork: set what was read from the server's environment to what this process's says."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and COMPILE_THREADS in os.environ:
        config.compile_threads = int(os.environ[COMPILE_THREADS])
