"""Access to a technique's two implementations by name, so that a trainer can switch techniques on and off."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def implementation(module: str, function: str, *, optimized: bool) -> Callable[..., Any]:
    """Return `function` of `optimized.<module>` or `reference.<module>`, e.g. ("geometry.retrieval", "retrieval")."""
    side = "optimized" if optimized else "reference"
    found: Callable[..., Any] = getattr(importlib.import_module(f"{side}.{module}"), function)
    return found
