"""Claims with their verdicts, the JSON file that stores them, and the Markdown page that shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import write
from suite.configuration import ConfigurationError
from suite.naming import shown

SCHEMA = 1
CONFIRMED, EXCEEDED, REFUTED = "confirmed", "more than claimed", "refuted"
DEPENDS, UNMEASURED = "depends", "not measurable here"
VERDICTS = (CONFIRMED, EXCEEDED, REFUTED, DEPENDS, UNMEASURED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim and its verdict. `found` describes the measured figures in words."""

    id: str
    trainer: str
    said: str
    verdict: str
    found: str
    device: str
    versions: str
    date: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(getattr(self, field.name), str):
                raise ValueError(f"{field.name} is no text")
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r} is not one of {', '.join(VERDICTS)}")


Answer = tuple[str, str]
"""(verdict, description of what was measured)."""
Measure = Callable[[Any], Answer]
"""Measures a claim, given the trainer's setting, which has a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A claim and the function that measures it."""

    id: str
    said: str
    measure: Measure
    gpu: bool
    """True if the claim can be measured only on a GPU."""

    def answer(self, setting: Any) -> Answer:
        """Return the verdict on this device."""
        if self.gpu and setting.device.type != "cuda":
            return UNMEASURED, "there is no GPU"
        return self.measure(setting)


class Checks:
    """The checks of a trainer, collected by a decorator in the order of their definition."""

    def __init__(self) -> None:
        self.all: dict[str, Check] = {}

    def __call__(self, id: str, said: str, *, gpu: bool = False) -> Callable[[Measure], Measure]:
        def keep(measure: Measure) -> Measure:
            if id in self.all:
                raise ValueError(f"claim {id} is measured twice")
            self.all[id] = Check(id=id, said=said, measure=measure, gpu=gpu)
            return measure

        return keep

    def chosen(self, only: Iterable[str]) -> list[Check]:
        """Return the checks with these ids, or all if none is given. ConfigurationError for an unknown id."""
        wanted = list(only)
        for name in wanted:
            if name not in self.all:
                raise ConfigurationError(f"there is no claim {name!r}; there are: {', '.join(self.all)}")
        return [check for check in self.all.values() if not wanted or check.id in wanted]


def load(path: Path) -> dict[str, Claim]:
    """Read id → claim; empty if the file does not exist. PerfsuiteError if it cannot be read or holds no claims."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError("another schema")
        return {c["id"]: Claim(**c) for c in data["claims"]}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PerfsuiteError(
            f"cannot read {shown(path)}: {error.strerror or error}; name another folder with --out"
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PerfsuiteError(
            f"{shown(path)} holds no claims ({str(error)[:200]}); move it away, and measure them anew"
        ) from None


def save(claims: Mapping[str, Claim], path: Path) -> None:
    """Write the claims as JSON, ordered by number. The file is written whole or not at all."""
    ordered = [dataclasses.asdict(claims[name]) for name in sorted(claims, key=_number)]
    write(path, json.dumps({"schema": SCHEMA, "claims": ordered}, indent=1, ensure_ascii=False) + "\n")


def page(claims: Mapping[str, Claim]) -> str:
    """Return the claims as a Markdown page."""
    lines = ["# What the sources claim, and what was measured", ""]
    lines += [
        "`perfsuite claims TRAINER` measures the claims and writes this page. The source of a trainer is the document",
        "from which its techniques were taken. The last column gives the figures; for the verdict *depends* it says on",
        "what, and for *not measurable here* why.",
        "",
    ]
    for trainer in dict.fromkeys(claims[name].trainer for name in sorted(claims, key=_number)):
        own = [claims[name] for name in sorted(claims, key=_number) if claims[name].trainer == trainer]
        lines += [f"## {trainer}", ""]
        made = dict.fromkeys(f"{c.device}, {c.versions}, {c.date}" for c in own)
        lines += [f"Measured on: {'; '.join(made)}.", ""]
        lines += ["| | claimed | verdict | found |", "| --- | --- | --- | --- |"]
        lines += [f"| {c.id} | {c.said} | **{c.verdict}** | {c.found} |" for c in own]
        lines.append("")
    return "\n".join(lines)


def _number(name: str) -> int:
    digits = "".join(c for c in name if c.isdigit())
    return int(digits) if digits else 0
