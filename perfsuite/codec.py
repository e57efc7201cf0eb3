"""Convert records to and from JSON: dataclasses of numbers, text, enumerations, tables and other records."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, TypeVar

from perfsuite.errors import PerfsuiteError

R = TypeVar("R")

PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types of most values of a record, which JSON has too."""


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def to_json(value: Any) -> Any:
    """Return a record as plain JSON values."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        return {name: to_json(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def from_json(kind: type[R], data: Any) -> R:
    """Return the record of type `kind` from the data that `to_json` returned. Raises PerfsuiteError, which names the
    field, if one is missing or wrong."""
    known: Any = kind  # for mypy, a type variable's type is not hashable
    result: R = _reader(known)(data, kind.__name__)
    return result


Reader: TypeAlias = Callable[[Any, str], Any]
"""(JSON value, its name in messages) → value of a record's field."""


@cache
def _reader(kind: Any) -> Reader:
    """Return a function that reads values of a type. It is cached, since a history has a hundred thousand records."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return lambda data, where: data
    if origin in (typing.Union, types.UnionType):
        return _optional(typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    if origin is tuple:
        return _tuple(_reader(typing.get_args(kind)[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _table(_reader(typing.get_args(kind)[1]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(kind)
    return _plain(kind)


def _optional(options: tuple[Any, ...]) -> Reader:
    inner = _reader(next(o for o in options if o is not type(None)))
    if type(None) not in options:
        return inner
    return lambda data, where: None if data is None else inner(data, where)


def _tuple(inner: Reader) -> Reader:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, list):
            raise PerfsuiteError(f"{where} is not a list")
        return tuple([inner(v, where) for v in data])

    return read


def _table(inner: Reader) -> Reader:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, Mapping):
            raise PerfsuiteError(f"{where} is not a table")
        return {k: inner(v, f"{where}.{k}") for k, v in data.items()}

    return read


def _enum(kind: type[enum.Enum]) -> Reader:
    def read(data: Any, where: str) -> Any:
        try:
            return kind(data)
        except ValueError:
            raise PerfsuiteError(f"{where}: {data!r} is not a {kind.__name__}") from None

    return read


def _plain(kind: Any) -> Reader:
    def read(data: Any, where: str) -> Any:
        if type(data) is kind:
            return data
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise PerfsuiteError(f"{where} is an integer too large for a float") from None
        if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
            raise PerfsuiteError(f"{where} is {data!r}, not {kind.__name__}")
        return data

    return read


def _record(kind: type) -> Reader:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    readers = [
        (name, _reader(hints[name]), f.default is missing and f.default_factory is missing)
        for name, f in fields.items()
    ]

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, Mapping):
            raise PerfsuiteError(f"{where} is not a table")
        unknown = data.keys() - fields.keys()
        if unknown:
            raise PerfsuiteError(f"{where} has an unknown field {min(unknown)!r}")
        values = {}
        for name, reader, is_required in readers:
            if name in data:
                values[name] = reader(data[name], f"{where}.{name}")
            elif is_required:
                raise PerfsuiteError(f"{where} lacks {name!r}")
        return kind(**values)

    return read
