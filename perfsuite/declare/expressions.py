"""Evaluate sizes that are expressions of other sizes, such as `"2*half"`, `"H//G"` or `"V-1"`."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from perfsuite.errors import PairError

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@functools.lru_cache(maxsize=1024)
def names(expression: str) -> frozenset[str]:
    """Return the sizes that the expression depends on. Raises PairError if it contains anything except names, integers
    and the operators in OPERATORS."""
    return frozenset(_names(_parsed(expression), expression))


def value(expression: str, sizes: Mapping[str, Any]) -> int:
    """Return the value of the expression at these sizes."""
    return int(sizes[expression]) if expression in sizes else _value(_parsed(expression), sizes)


@functools.lru_cache(maxsize=1024)
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise _refused(expression) from None


def _names(node: ast.expr, expression: str) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Constant(value=int()):
            return set()
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _names(left, expression) | _names(right, expression)
    raise _refused(expression)


def _value(node: ast.expr, sizes: Mapping[str, Any]) -> int:
    match node:
        case ast.Name(id=name):
            return int(sizes[name])
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
    raise AssertionError("`names` refuses everything else")


def _refused(expression: str) -> PairError:
    return PairError(f"{expression!r} is no size: use a name, or sums, products and // of names, e.g. '2*half'")
