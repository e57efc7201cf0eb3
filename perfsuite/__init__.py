"""Test whether a fast version is still the same function, and still fast: declare a `Pair`, and run pytest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, compiled, side, stateful
from perfsuite.declare.specs import (
    constant,
    floats,
    generator,
    integers,
    listof,
    module,
    recorded,
    sampled,
    scalar,
    size,
    tensor,
)
from perfsuite.declare.workload import Cost, Workload
from perfsuite.errors import PairError, PerfsuiteError

if TYPE_CHECKING:
    from perfsuite.api import check, measure
    from perfsuite.errors import NotEquivalent

__version__ = "0.1.0"
LATER = {"check": "api", "measure": "api", "NotEquivalent": "errors"}
"""Name → the module that has it."""

__all__ = [
    "Cost",
    "NotEquivalent",
    "Pair",
    "PairError",
    "PerfsuiteError",
    "Side",
    "Workload",
    "check",
    "compiled",
    "constant",
    "floats",
    "generator",
    "integers",
    "listof",
    "measure",
    "module",
    "recorded",
    "sampled",
    "scalar",
    "side",
    "size",
    "stateful",
    "tensor",
]


def __getattr__(name: str) -> Any:
    # These need torch, so they are imported at first use: `import perfsuite` costs nothing.
    if name in LATER:
        return getattr(importlib.import_module(f"perfsuite.{LATER[name]}"), name)
    raise AttributeError(f"module 'perfsuite' has no attribute {name!r}")
