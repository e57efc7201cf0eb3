"""Make Triton's interpreter three times as fast, with the same results.

Triton's interpreter spends most of its time on bookkeeping that it repeats for every operation. Each replacement below
handles the common case from a cache or by a shorter path, and calls Triton's own function for everything else. A
function whose parameters are not as expected here is not replaced, so another version of Triton may be slower, but is
never wrong.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

MOST_KEPT = 4096
"""Number of entries at which a cache is cleared."""

OPERANDS = ("lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod")
"""Parameters of Triton's function that promotes and broadcasts the operands of an operation."""

_quick = False


def quicken() -> None:
    """Replace the slow functions, once per process. Do nothing unless Triton is imported with TRITON_INTERPRET=1."""
    global _quick
    if _quick or "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as language
        from triton.runtime import interpreter

        semantic = interpreter.interpreter_semantic
    except (ImportError, AttributeError):
        return
    _quick = True
    _replace(interpreter, "_patch_lang", ("fn",), functools.partial(_patched_once, language))
    _replace(interpreter, "_get_np_dtype", ("tt_dtype",), _dtypes)
    _replace(semantic, "broadcast_impl_value", ("lhs", "rhs"), _broadcast)
    _replace(semantic, "binary_op_type_checking_impl", OPERANDS, functools.partial(_operands, language, semantic))
    _replace(
        semantic, "binary_op_sanitize_overflow_impl", ("lhs", "rhs", "binary_op"), functools.partial(_checked, semantic)
    )
    _replace(language.block_type, "__init__", ("self", "element_ty", "shape"), _block_types)
    _replace(language.tensor, "__init__", ("self", "handle", "type"), _tensors)


def _replace(owner: Any, name: str, parameters: tuple[str, ...], made: Callable[[Any], Any]) -> None:
    own = getattr(owner, name, None)
    if own is not None and tuple(inspect.signature(own).parameters) == parameters:
        setattr(owner, name, made(own))


class _Nothing:
    """Patch scope that restores nothing, for a patch that was not needed."""

    @staticmethod
    def restore() -> None:
        pass


def _patched_once(language: Any, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Patch the language only once. Triton patches it again at each call of a device function, although the launch has
    already done so."""
    patched: set[int] = set()
    launched: list[Any] = []

    def patch(fn: Any) -> Any:
        modules = {id(m) for m in fn.__globals__.values() if m is language or m is language.core}
        if launched and modules <= patched:
            return _Nothing()
        scope = own(fn)
        if not launched:
            launched.append(scope)
            patched.clear()
            restore = scope.restore

            def ended() -> None:
                launched.clear()
                restore()

            scope.restore = ended
        patched.update(modules)
        return scope

    return patch


def _dtypes(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache NumPy's dtypes, for which Triton builds a table for every operation."""
    known: dict[str, Any] = {}

    def dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = own(tt_dtype)
        return known[name]

    return dtype


def _broadcast(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Skip broadcasting of two scalars, or of two blocks of the same shape."""

    def broadcast(lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block():
            if b.is_block() and a.shape.values == b.shape.values:
                return lhs, rhs
        elif not b.is_block():
            return lhs, rhs
        return own(lhs, rhs)

    return broadcast


def _operands(language: Any, semantic: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Skip type promotion of two tensors of the same element type, and of a pointer and its offset. Convert a number
    combined with a tensor to a constant of the tensor's type. Triton's promotion rules give the same results."""
    floats = {id(dtype) for dtype in (language.float32, language.float64)}
    integers = {id(language.int32): 1 << 31, id(language.int64): 1 << 63}
    kinds = floats | integers.keys()

    def constant(value: Any, dtype: Any) -> Any:
        """Return the number as a tensor of this dtype; None if Triton's own rules have to decide."""
        kind, end = type(value), integers.get(id(dtype))
        if end is None:
            fits = id(dtype) in floats and (kind is float or (kind is int and -(1 << 63) <= value < 1 << 64))
        else:
            fits = kind is int and -end <= value < end
        return semantic.scalar_constant(value, dtype=dtype) if fits else None

    def operands(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left = lhs.type.scalar if type(lhs) is language.tensor else None
        right = rhs.type.scalar if type(rhs) is language.tensor else None
        if left is right is not None and id(left) in kinds:
            return semantic.broadcast_impl_value(lhs, rhs)
        if allow_lhs_ptr and id(right) in integers and left is not None and left.is_ptr():
            return semantic.broadcast_impl_value(lhs, rhs)
        if arithmetic_check and right is None and left is not None and (made := constant(rhs, left)) is not None:
            return semantic.broadcast_impl_value(lhs, made)
        if arithmetic_check and left is None and right is not None and (made := constant(lhs, right)) is not None:
            return semantic.broadcast_impl_value(made, rhs)
        return own(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return operands


def _checked(semantic: Any, own: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Skip the overflow check of integers unless in debug mode. Triton repeats every operation on them in 64 bits, but
    uses the result only in debug mode."""

    def check(lhs: Any, rhs: Any, binary_op: Any) -> None:
        if semantic.builder.options.debug:
            own(lhs, rhs, binary_op)

    return check


def _block_types(own: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Cache the attributes of block types, which depend only on the element type and the shape."""
    known: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(n, "value", n) for n in shape)
        key = id(element_ty), sizes
        if key in known:
            vars(self).update(known[key])
            return
        own(self, element_ty, shape)
        if all(type(n) is int for n in sizes):
            _remember(known, key, dict(vars(self)))  # keeps the element type alive, so that its id stays unique

    return init


def _tensors(own: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Cache the attributes of tensors. All except the handle depend only on the type."""
    known: dict[tuple[int, int], tuple[Any, dict[str, Any]]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else 0, id(type.scalar)
        if key in known:
            vars(self).update(known[key][1], handle=handle, type=type)
            return
        own(self, handle, type)
        others = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        _remember(known, key, (type, others))  # keeps both ids unique, as above

    return init


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= MOST_KEPT:
        known.clear()
    known[key] = value
