"""Look-up of a workload or a device by its name, or by a unique part of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from perfsuite.errors import PerfsuiteError, printable
from perfsuite.report import workload_rows

SHOWN = 5
"""Maximum number of names in a message."""


def workload(name: str, ids: Sequence[str], among: str = "in the history") -> str:
    """Return the id that equals or contains `name`. Short names such as "geometry/rotor_update[window64]" match, too.

    Raises PerfsuiteError if several ids match, and lists them, or if none matches, and lists the closest ones. `among`
    says in the message where the ids are from.
    """
    names = {id: "{}[{}]".format(*name) for id, name in workload_rows.names_of(ids).items()}
    return _chosen(name, names, "workload", among)


def device(name: str, devices: Mapping[str, str]) -> str:
    """Return the slug of the device whose slug or name matches. Raises PerfsuiteError as `workload` does."""
    return _chosen(name, devices, "device", "in the history")


def _chosen(query: str, names: Mapping[str, str], what: str, among: str) -> str:
    wanted = query.casefold()
    exact = [key for key, name in names.items() if wanted in (key.casefold(), name.casefold())]
    found = exact or [k for k, n in names.items() if wanted in k.casefold() or wanted in n.casefold()]
    if len(found) == 1:
        return found[0]
    shown = printable(repr(query))
    if found:
        raise PerfsuiteError(f"{shown} fits {len(found)} {what}s: {_listed(found)}; name one")
    words = {word: None for key, name in names.items() for word in (key, name, *re.findall(r"\w+", key))}
    near = difflib.get_close_matches(query, words, n=SHOWN)
    keys = dict.fromkeys(key for word in near for key, name in names.items() if word in key or word == name)
    there = f"the nearest: {_listed(keys)}" if keys else f"there are: {_listed(names)}"
    raise PerfsuiteError(f"no {what} {among} fits {shown}; {there}")


def _listed(keys: Iterable[str]) -> str:
    every = list(keys)
    return ", ".join(every[:SHOWN]) + (", …" if len(every) > SHOWN else "")
