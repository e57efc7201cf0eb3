"""`baselines/waivers.toml`: workloads that may be red for a time, each with an owner, a reason and an end date.

    [[waiver]]
    workload = "tests/geometry/test_rotor_update.py::rotor_update::speed[window64]"
    owner = "Ada Lovelace"
    reason = "the driver's new scheduler; reported upstream"
    until = 2026-12-31

A waiver applies to a speed that is too low (REGRESSED, BELOW_FLOOR) or undecided (NOISY). It never applies to a wrong
result, or to a workload that was not measured.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Excuse, Status, Verdict

WAIVABLE = (Status.REGRESSED, Status.BELOW_FLOOR, Status.NOISY)
FIELDS = {
    "workload": "'the id that a report shows'",
    "owner": "'the person or team that ends it'",
    "reason": "'why it may be red'",
    "until": "2026-12-31, unquoted",
}
"""Required field → what to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """Waiver of one workload, up to and including the day `until`."""

    workload: str
    owner: str
    reason: str
    until: date


def load(
    path: str | os.PathLike[str],
    *,
    today: date,
    known_ids: Collection[str],
    in_scope: Callable[[str], bool] = lambda id: True,
) -> tuple[Waiver, ...]:
    """Return the waivers in a file; none if the file does not exist.

    `known_ids` are all workloads that were collected (selected or not) or accepted. `in_scope` returns whether the run
    collected a workload's file, so that it knows each workload there. Raises PerfsuiteError, with a one-line message,
    for a file that cannot be read, a field that is missing, unknown or of the wrong type, a workload that is unknown or
    listed twice, and a waiver that has ended. If there are several errors, the message has the first and the number of
    others.
    """
    path = Path(path)
    data = _tables(path)
    waivers: list[Waiver] = []
    errors = [f"unknown table or field {k!r}; only [[waiver]] is known" for k in sorted(set(data) - {"waiver"})]
    tables = data.get("waiver", [])
    if not isinstance(tables, list):
        errors.append("write [[waiver]] in double brackets")
        tables = []
    for number, table in enumerate(tables, 1):
        try:
            waiver = _read(table, today=today, is_known=lambda id: id in known_ids or not in_scope(id))
            if any(w.workload == waiver.workload for w in waivers):
                raise PerfsuiteError(f"{waiver.workload} is waived twice; keep one")
            waivers.append(waiver)
        except PerfsuiteError as error:
            errors.append(f"waiver {number}: {error}")
    if errors:
        others = f" (and {len(errors) - 1} more errors in this file)" if len(errors) > 1 else ""
        raise PerfsuiteError(f"{path}: {errors[0]}{others}")
    return tuple(waivers)


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PerfsuiteError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or a number that is too long
        raise PerfsuiteError(f"{path}: not valid TOML ({' '.join(str(error).split())}); fix it") from None


def _read(table: Any, *, today: date, is_known: Callable[[str], bool]) -> Waiver:
    if not isinstance(table, dict):
        raise PerfsuiteError("is not a table; write [[waiver]] in double brackets")
    for name in sorted(set(table) - set(FIELDS)):
        raise PerfsuiteError(f"unknown field {name!r}; the fields are {', '.join(FIELDS)}")
    for name, what in FIELDS.items():
        if name not in table:
            raise PerfsuiteError(f"lacks {name!r}; write {name} = {what}")
    workload, owner, reason, until = (table[name] for name in FIELDS)
    if not isinstance(workload, str) or not is_known(workload):
        raise PerfsuiteError(f"there is no workload {workload!r}; correct the id, or remove the waiver")
    if not _is_text(owner):
        raise PerfsuiteError(f"the waiver of {workload} names no owner; write owner = 'a person or team'")
    if not _is_text(reason):
        raise PerfsuiteError(f"the waiver of {workload} gives no reason; say why")
    # datetime is a subclass of date, but a waiver's end has no time of day and no time zone.
    if not isinstance(until, date) or isinstance(until, datetime):
        raise PerfsuiteError(f"until = {until!r} of {workload} is not a date; write until = 2026-12-31, unquoted")
    if today > until:
        raise PerfsuiteError(f"the waiver of {workload} ended on {until}; fix the workload, or extend or remove it")
    return Waiver(workload=workload, owner=" ".join(owner.split()), reason=" ".join(reason.split()), until=until)


def _is_text(value: object) -> bool:
    """Return whether this is text with a letter or digit, and without characters that control a terminal."""
    return isinstance(value, str) and any(c.isalnum() for c in value) and " ".join(value.split()).isprintable()


def apply(verdicts: Mapping[str, Verdict], waivers: Sequence[Waiver]) -> dict[str, Verdict]:
    """Return the verdicts, with the status WAIVED where a waiver applies. The message of a waived verdict contains the
    original message."""
    by_id = {w.workload: w for w in waivers}
    return {
        key: _waived(verdict, by_id[key]) if key in by_id and verdict.status in WAIVABLE else verdict
        for key, verdict in verdicts.items()
    }


def _waived(verdict: Verdict, waiver: Waiver) -> Verdict:
    excuse = Excuse(status=verdict.status, owner=waiver.owner, until=waiver.until.isoformat(), reason=waiver.reason)
    message = (
        f"WAIVED until {excuse.until}, owner {excuse.owner} ({excuse.reason}): without the waiver {verdict.message}"
    )
    return replace(verdict, status=Status.WAIVED, message=message, excuse=excuse)
