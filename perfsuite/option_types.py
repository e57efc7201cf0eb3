"""Types of the command line's options and arguments."""

from __future__ import annotations

import math
from typing import Any

import click


class NamedPath(click.Path):
    """A path that is not empty: an empty one, such as that of an unset variable, would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; name a path, such as . for this folder", param, ctx)
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A number in a range that is neither infinite nor NaN, which is in every range for click."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number", param, ctx)
        return found
