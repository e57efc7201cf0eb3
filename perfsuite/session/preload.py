"""Prepare the server from which proving processes are forked (fork_server.py): choose its environment and imports.

The server imports nothing of the project, and nothing of perfsuite that reads the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from perfsuite.session.fork_server import Forks
from perfsuite.system.garbage import uncollected
from perfsuite.system.machine import has_gpu

PREPARE = "perfsuite.session.preload:prepare"
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
SERVER = {
    COMPILE_THREADS: "1",  # with more, importing Inductor starts threads, which a fork does not have
    "OMP_WAIT_POLICY": "PASSIVE",  # the threads of processes that prove at the same time must not spin
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a query of the CUDA runtime would initialise it, so forks could not use it
}
"""Environment variables of the server itself."""
SETTINGS = ("CUDA_", "NCCL", "NVIDIA_", "OMP_", "MKL_", "PYTHON", "PYTORCH", "TORCH", "TRITON")
"""Prefixes of environment variables that a module may read when it is imported."""
READ_LATER = "_CACHE_DIR"
"""Suffix of variables that are not read at import, but only when they are needed. Importing the compiler sets one."""

_servers: list[tuple[dict[str, str], Forks]] = []


def is_useful() -> bool:
    """Return whether processes that prove are forked from a server that has imported torch and the compiler.

    This works only on Linux. Without a GPU, few processes need the compiler, and on a machine with two cores, importing
    torch in the server takes as much time as it saves.
    """
    return sys.platform == "linux" and has_gpu()


def server() -> Forks:
    """Return this process's server, and start it if necessary. The server then takes seconds to import torch.

    A server that was started with other environment variables is replaced, since a conftest may change them later.
    """
    environment = environment_of(SERVER)
    settings = {n: v for n, v in environment.items() if n.startswith(SETTINGS) and not n.endswith(READ_LATER)}
    if _servers and _servers[0][0] != settings:
        close()
    if not _servers:
        _servers.append((settings, Forks(PREPARE, environment)))
    _servers[0][1].open()
    return _servers[0][1]


def is_preparing() -> bool:
    """Return whether there is a server that is still preparing."""
    return bool(_servers) and _servers[0][1].is_preparing()


def close() -> None:
    """End the server and its forks, if there is one."""
    while _servers:
        _servers.pop()[1].close()


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a measuring process: this one's with these variables."""
    known = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    known.pop("PYTEST_ADDOPTS", None)  # it could restrict the collection; the caller's own options are passed on
    # Otherwise fragmentation could make a side that needs most of the memory fail at a later call.
    known.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Triton's default. Inductor would change it in processes that use it, so others would compile all kernels again.
    home = known.get("TRITON_HOME") or os.path.expanduser("~")
    known.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))
    return known


def prepare() -> None:
    """Import torch, Triton, pytest and Hypothesis, and on a machine with a GPU also the compiler."""
    with uncollected():
        for name in ("torch", "numpy", "triton.language", "pytest", "hypothesis", "hypothesis.strategies"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if has_gpu():
            import_compiler()
    gc.collect()  # otherwise every fork would collect the garbage of the imports, which may warn
    gc.freeze()


def import_compiler() -> None:
    """Import the modules that the first use of torch.compile, or of its parts, would import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in COMPILER:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def read_environment() -> None:
    """In a fork, set the settings that were read from the server's environment to the values in this process's
    environment."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and COMPILE_THREADS in os.environ:
        config.compile_threads = int(os.environ[COMPILE_THREADS])
