"""KernelBench's problems: each Model against torch.compile of it, with their own inputs as templates.

Run on a GPU:  KERNELBENCH=…/KernelBench/level1 pytest -m correctness docs/foreign/test_kernelbench.py
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Pair, compiled

FOLDER = os.environ.get("KERNELBENCH", "")
if not FOLDER:
    pytest.skip("no problems: set KERNELBENCH to a folder of KernelBench's level 1", allow_module_level=True)


def loaded(path: Path) -> Any:
    name = f"kernelbench_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LARGE = 32


def cut(number: Any) -> Any:
    """A size of at most 63: the problems have up to a billion elements. Irregular sizes and common divisors stay so."""
    if isinstance(number, tuple):
        return tuple(map(cut, number))
    return LARGE + number % LARGE if type(number) is int and number > LARGE else number


def pair(path: Path) -> Pair:
    problem = loaded(path)
    vars(problem).update({name: cut(value) for name, value in vars(problem).items() if not name.startswith("_")})

    def new(*init: Any) -> Any:
        return compiled(problem.Model(*init))

    return Pair.from_modules(problem.Model, new, problem.get_inputs, problem.get_init_inputs)


if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

problems = {path.stem: pair(path) for path in sorted(Path(FOLDER).glob("*.py"))}
