"""Check the functions that a pair declares, such as `adjust=`, and report their errors as errors of the pair."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perfsuite import faults
from perfsuite.errors import PairError, PerfsuiteError, in_one_line, users_frame


@contextmanager
def of_pair(pair: str, role: str, called_with: str) -> Iterator[None]:
    """Convert an error of a declared function to a PairError that names the pair, the function, its arguments and the
    line."""
    try:
        yield
    except PerfsuiteError:
        raise
    except Exception as error:
        if faults.is_of_device(error):
            raise
        raise PairError(
            f"{pair}: {role}= raises {in_one_line(error)}{_place(error)}; correct it: it is called with {called_with}"
        ) from error


def check_positional(
    pair: str, role: str, call: Callable[..., Any], inputs: Sequence[str], keywords: Collection[str] = ()
) -> None:
    """Raise PairError if the function cannot be called with these inputs by position, and with those of the keywords
    that it has."""
    signature = _signature(call)
    if signature is None:
        return
    try:
        signature.bind(*inputs, **{name: None for name in keywords if has_keyword(call, name)})
    except TypeError as error:
        raise PairError(
            f"pair {pair!r}: {role}= cannot be called with the inputs ({', '.join(inputs)}) by position: {error}"
        ) from None


def check_named(pair: str, role: str, call: Callable[..., Any], known: Collection[str]) -> None:
    """Raise PairError if the function has a required parameter whose name is not known."""
    role = role if role.endswith(")") else f"{role}="
    for name in required(call):
        if name not in known:
            raise PairError(
                f"pair {pair!r}: {role} names {name!r}, which is no size and no scalar of its inputs; they are "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def has_keyword(call: Callable[..., Any], name: str) -> bool:
    """Return whether the function has a keyword-only parameter of this name."""
    signature = _signature(call)
    parameter = signature.parameters.get(name) if signature is not None else None
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def required(call: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without a default."""
    signature = _signature(call)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = signature.parameters.values() if signature is not None else ()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    """Return the function's signature; None if Python has none, as for some functions written in C."""
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def _place(error: Exception) -> str:
    frame = users_frame(error)
    return f" at {Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
