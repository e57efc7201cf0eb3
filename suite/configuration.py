"""Reads dataclasses from a YAML file and the command line. The command line overrides the file, the file the defaults.

Several dataclasses (of the trainer, the run and the data) share one flat namespace: a field that two of them have is
the same field. Fields of a nested dataclass are addressed with a dot: `--model.layers 4`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from perfsuite.errors import PerfsuiteError
from suite.naming import as_typed

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

LARGEST = 3.4028234663852886e38
"""Largest number in float32."""
REMEDY = "install it with: pip install 'perfsuite[train]'"


def known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the fields that the dataclass has, since a checkpoint of another version may have more."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def need(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError unless the field's value is valid. For a configuration's `__post_init__`."""
    if not holds:
        raise ValueError(f"{name}={value!r}: {remedy}")


class ConfigurationError(PerfsuiteError):
    """A field is unknown, a value has a wrong type, or a file cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A field with its dotted name and its type."""

    name: str
    type: Any

    def expected(self) -> str:
        """Describe the field's type for the user."""
        return _in_words(self.type)


def read(kinds: Sequence[type[Any]], path: str | Path | None, arguments: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return an instance of each dataclass, from a YAML file and arguments like `--eta_update 0.02`.

    A dash in a name counts as an underscore. A bool without a value is True. ConfigurationError names the invalid
    field; for an unknown field it suggests the most similar one.
    """
    fields = {f.name: f for kind in kinds for f in _fields(kind)}
    values: dict[str, tuple[Any, str]] = {}
    if path is not None:
        for name, value in _flat(_document(Path(path)), fields):
            try:
                values[name] = (_typed(value), str(path))
            except ValueError as error:
                raise ConfigurationError(f"{path}: {name} is {value!r}: {error}; name it otherwise") from None
            except RecursionError:  # an alias in its own anchor
                raise ConfigurationError(f"{path}: {name} contains itself; write its value without an alias") from None
    values |= {name: (value, f"--{name}") for name, value in _split(arguments, fields)}
    for name, (value, origin) in values.items():
        if name not in fields:
            options = _options_of_command() if origin == f"--{name}" else []
            raise ConfigurationError(f"{origin}: no field is called {name!r}{_nearest(name, [*fields, *options])}")
        takes_none = _takes_none(fields[name].type)
        if (value is None and not takes_none) or (value == "" and takes_none):  # the parser would accept it
            raise ConfigurationError(f"{origin}: {name} must be {fields[name].expected()}, got nothing")
    return tuple(_made(kind, values, fields) for kind in kinds)


def as_yaml(instances: Sequence[Any]) -> str:
    """Return the fields of several dataclasses as YAML text that `read` accepts."""
    import yaml

    merged: dict[str, Any] = {}
    for instance in instances:
        merged |= _init_values(instance)
    return str(yaml.safe_dump(merged, sort_keys=False))


def _init_values(instance: Any) -> dict[str, Any]:
    """Return the fields of `__init__` and their values."""
    values = ((f.name, getattr(instance, f.name)) for f in dataclasses.fields(instance) if f.init)
    return {name: _init_values(value) if dataclasses.is_dataclass(value) else plain(value) for name, value in values}


def plain(value: Any) -> Any:
    """Convert a value to dicts, lists, numbers, strings, bools and None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _fields(kind: type[Any], prefix: str = "") -> Iterator[Field]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if not field.init:
            continue
        if dataclasses.is_dataclass(hint):
            yield from _fields(typing.cast("type[Any]", hint), f"{prefix}{field.name}.")
        else:
            yield Field(name=prefix + field.name, type=hint)


def _document(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]  # a module imported late
        """Loader that rejects duplicate keys, for which PyYAML would use the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise ConfigurationError(f"{path}: {key!r} is there twice, in the mapping of line {line}")
            return dict(super().construct_mapping(node, deep))

    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}; name a YAML file that can be read") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: not UTF-8 text; name a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(f"{path}{where}: not YAML: {' '.join(problem.split())}") from None
    except (ValueError, RecursionError) as error:  # e.g. a date that does not exist
        raise ConfigurationError(f"{path}: holds a value that cannot be read: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: holds a {type(found).__name__}; it must hold fields, as in `seed: 0`")
    return found


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise PerfsuiteError(f"configurations need PyYAML, which is not installed; {REMEDY}") from None
    return yaml


def _typed(value: Any) -> Any:
    """Convert a file's strings to the form of command-line arguments, since both may be file names."""
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    return as_typed(value) if isinstance(value, str) else value


def _flat(document: Mapping[Any, Any], fields: Mapping[str, Field], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values. A mapping is flattened only if it contains fields."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(f.startswith(f"{name}.") for f in fields):
            yield from _flat(value, fields, f"{name}.")
        else:
            yield name, value


def _split(arguments: Sequence[str], fields: Mapping[str, Field]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for `--name value`, `--name=value` and, for a bool, `--name`."""
    left = list(arguments)
    while left:
        token = left.pop(0)
        if not token.startswith("--"):
            raise ConfigurationError(f"{token!r} belongs to no field; fields are given as --name value")
        name, equals, value = token[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            if left and not left[0].startswith("--"):
                value = left.pop(0)
            elif name in fields and fields[name].type is bool:
                value = "true"
            elif name in fields:
                raise ConfigurationError(f"--{name} needs a value, {fields[name].expected()}")
        yield name, value


def _options_of_command() -> list[str]:
    """Return the names of the running command's own options, which `read` does not get."""
    context = click.get_current_context(silent=True)
    options = [p for p in context.command.params if isinstance(p, click.Option)] if context else []
    return [word.removeprefix("--") for option in options for word in option.opts if word.startswith("--")]


def _nearest(name: str, fields: Iterable[str]) -> str:
    fields = list(fields)
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    if not near:
        inner = {f.rpartition(".")[2]: f for f in fields}
        near = [inner[n] for n in difflib.get_close_matches(name, inner, n=1, cutoff=0.5)]
    return f"; did you mean {near[0]!r}?" if near else "; `perfsuite train NAME --show` lists them all"


def _made(kind: type[Any], values: Mapping[str, tuple[Any, str]], fields: Mapping[str, Field]) -> Any:
    own = [f.name for f in _fields(kind) if f.name in values]
    parser = _parser(kind)
    try:
        parsed = parser.parse_object(_nested({n: values[n][0] for n in own}))
        for name in own:
            if not _is_finite(parsed[f"it.{name}"]):
                raise ValueError(f"{name} must be finite in float32, got {values[name][0]}")
        return parser.instantiate(parsed)["it"]
    except ConfigurationError:
        raise
    except Exception as error:  # raised by the parser, or by the dataclass itself
        for name in own:  # find the field that caused the error
            value, origin = values[name]
            try:
                parser.parse_object(_nested({name: value}), defaults=False)
            except Exception as problem:
                if "Expected" in str(problem) or "validate" in str(problem) or "not accepted" in str(problem):
                    where = origin if origin == f"--{name}" else f"{origin}: {name}"
                    raise ConfigurationError(f"{where} must be {fields[name].expected()}, got {value!r}") from None
        named = [n for n in own if re.search(rf"\b{re.escape(n)}\b", str(error))]
        origins = dict.fromkeys(values[n][1] for n in named or own)
        where = ", ".join(origins) or kind.__name__
        raise ConfigurationError(f"{where}: {' '.join(str(error).split())}") from None


def _is_finite(value: Any) -> bool:
    """Return whether a value has neither NaN nor a number that is infinite in float32, the dtype of the trainers."""
    if isinstance(value, (list, tuple)):
        return all(_is_finite(inner) for inner in value)
    return not isinstance(value, float) or abs(value) <= LARGEST


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        inner = whole
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return {"it": whole}


def _parser(kind: type[Any]) -> ArgumentParser:
    try:
        import jsonargparse  # noqa: F401 - to say so where it is missing
    except ModuleNotFoundError:
        raise PerfsuiteError(f"configurations need jsonargparse, which is not installed; {REMEDY}") from None
    _yaml()  # jsonargparse parses values as YAML
    return _parser_of(cast("Any", kind))


@functools.cache
def _parser_of(kind: Any) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(kind, "it")
    return parser


def _takes_none(hint: Any) -> bool:
    return hint in (Any, None, type(None)) or type(None) in typing.get_args(hint)


def _in_words(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(h) for h in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(v) for v in inner)
    if origin is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} values: {', '.join(_in_words(h) for h in inner)}"
    return str(hint).replace("typing.", "") if origin else getattr(hint, "__name__", str(hint))
