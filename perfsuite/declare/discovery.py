"""Find the pairs that a module declares: by name, in a list, a dict or a class, or by a parametrized function."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfsuite.declare.pair import Pair
from perfsuite.errors import PairError, in_one_line


def pairs_of(name: str, value: object, module: str) -> Iterator[tuple[str, Pair]]:
    """Yield (name, pair) for a module's attribute `name`. A list or dict declares pairs if all its elements are pairs.

    A pair in a list or a dict is named after it, with the index or key (`losses-0`, `losses-mean`). A pair in a class
    is named `Class.name`. A class may also have lists, dicts and classes (`Class.losses-0`). A parametrized function
    that is annotated to return a Pair gives one pair for each set of parameters, named from their ids
    (`attention-64-True`). A list, dict, class or function with a private name is ignored. Raises PairError if two pairs
    have the same name.
    """
    seen: set[str] = set()
    for found, pair in _declared(name, value, module):
        if found in seen:
            raise PairError(f"{name} declares two pairs called {found!r}; give them different keys or ids=")
        seen.add(found)
        yield found, pair


def _declared(name: str, value: object, module: str) -> Iterator[tuple[str, Pair]]:
    if isinstance(value, Pair):
        yield name, value
    elif name.rpartition(".")[2].startswith("_"):
        return
    elif isinstance(value, (list, tuple)) and value and all(isinstance(v, Pair) for v in value):
        yield from ((f"{name}-{number}", pair) for number, pair in enumerate(value))
    elif isinstance(value, dict) and value and all(isinstance(v, Pair) for v in value.values()):
        yield from ((f"{name}-{_plain(key)}", pair) for key, pair in value.items())
    elif isinstance(value, type) and value.__module__ == module:
        for n, held in list(vars(value).items()):
            if not _is_elsewhere(held, value):
                yield from _declared(f"{name}.{n}", held, module)
    elif inspect.isfunction(value) and value.__module__ == module and _is_factory(value):
        yield from ((f"{name}-{id}", _made(value, name, arguments)) for id, arguments in _parameters(value))


def _is_elsewhere(held: object, owner: type) -> bool:
    """Return whether the attribute of a class declares pairs elsewhere or not at all: a class that is not defined in
    it, or a function."""
    if isinstance(held, type):
        return held.__qualname__ != f"{owner.__qualname__}.{held.__name__}"
    return inspect.isfunction(held)


def unsupported_note(pairs: Iterable[Pair]) -> list[str]:
    """Return one line that lists the calling contexts that pairs declare as unsupported, with the number of pairs; an
    empty list if there are none."""
    counts = Counter(way for pair in pairs for way in pair.unsupported)
    ways = [f"{way} (pairs: {number})" for way, number in counts.most_common()]
    return [f"not tried, because pairs declare it as unsupported: {', '.join(ways)}"] if ways else []


def find(module: Any, name: str) -> Pair | None:
    """Return the module's pair of this name; None if there is none."""
    for attribute, value in list(vars(module).items()):
        if name == attribute or name.startswith((f"{attribute}-", f"{attribute}.")):
            for found, pair in pairs_of(attribute, value, module.__name__):
                if found == name:
                    return pair
    return None


def _is_factory(function: Any) -> bool:
    returned = inspect.get_annotations(function).get("return")
    is_pair = returned is Pair or (isinstance(returned, str) and returned.rpartition(".")[2] == "Pair")
    return is_pair and any(mark.name == "parametrize" for mark in _marks(function))


def _marks(function: Any) -> Sequence[Any]:
    return list(getattr(function, "pytestmark", ()))


def _parameters(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (id, arguments) for each combination of parameters. Those of the lowest decorator vary most slowly."""
    sets = [list(_sets(mark)) for mark in _marks(function) if mark.name == "parametrize"]
    for chosen in itertools.product(*sets):
        merged: dict[str, Any] = {}
        for _, arguments in chosen:
            merged |= arguments
        yield "-".join(id for id, _ in chosen), merged


def _sets(mark: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    given = dict(zip(("argnames", "argvalues", "indirect", "ids"), mark.args, strict=False)) | mark.kwargs
    names = given["argnames"]
    names = [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else list(names)
    where = f"parametrize({', '.join(names)})"
    entries, ids = _listed(given["argvalues"], f"{where}: the values are"), given.get("ids")
    if isinstance(ids, (list, tuple)) and len(ids) != len(entries):
        raise PairError(f"{where}: ids= has {len(ids)} names for {len(entries)} sets of parameters; give one each")
    for number, entry in enumerate(entries):
        is_param = hasattr(entry, "marks")
        if is_param and entry.marks:
            raise PairError(
                f"{where}: marks of one set of parameters are not applied to a pair; give them to its workloads "
                f"(marks=), or leave the set out"
            )
        values = entry.values if is_param else [entry] if len(names) == 1 else _listed(entry, f"{where}: a set is")
        if len(values) != len(names):
            raise PairError(f"{where}: {values!r} has {len(values)} values for {len(names)} parameters")
        own = entry.id if is_param else None
        if own is None and isinstance(ids, (list, tuple)):
            own = ids[number]
        if own is None:
            chosen = ids if callable(ids) else lambda value: None
            own = "-".join(_id(n, v, number, chosen(v)) for n, v in zip(names, values, strict=True))
        yield _plain(own), dict(zip(names, values, strict=True))


def _listed(values: Any, what: str) -> list[Any]:
    """Return the values as a list. Raises PairError, which begins with `what`, if they are none."""
    try:
        return list(values)
    except TypeError:
        raise PairError(f"{what} {values!r}, which is no list; write [...]") from None


def _id(name: str, value: object, number: int, chosen: object) -> str:
    """Return a parameter's part of the name: `chosen`, or the value as text if that is the same in each process."""
    if chosen is not None:
        return str(chosen)
    text = str(getattr(value, "__name__", value))
    return f"{name}{number}" if " at 0x" in text else text


def _plain(key: object) -> str:
    """Return the key as a part of a node id, in which "::" and "[" are special."""
    return re.sub(r"[^\w.=+-]+", "_", str(key))


def _made(function: Any, name: str, arguments: Mapping[str, Any]) -> Pair:
    given = ", ".join(f"{n}={v!r}" for n, v in arguments.items())
    try:
        made = function(**arguments)
    except PairError:
        raise
    except Exception as error:
        raise PairError(f"{name}({given}) raises {in_one_line(error)}") from None
    if not isinstance(made, Pair):
        raise PairError(f"{name}({given}) is annotated to return a Pair and returns {type(made).__name__}")
    return made
