"""Keep the measurements of an interrupted acceptance, so that the next one can resume from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Machine, Measurement
from perfsuite.revisions.revision import State
from perfsuite.session.tasks import Outcome
from perfsuite.system.folders import own_folder


class Kept:
    """File of measurements, one per line, of one clean revision on one machine.

    Measurements of a dirty tree are not kept, because it would be unknown of which code they are.
    """

    def __init__(self, folder: Path, state: State, machine: Machine, processes: int, *, more: bool = False) -> None:
        about = json.dumps([state.revision, to_json(machine), processes, more], sort_keys=True)
        name = hashlib.sha256(about.encode()).hexdigest()[:16]
        usable = state.revision is not None and not state.dirty
        self.path = folder / f"{name}.jsonl" if usable else None

    def load(self, ids: Sequence[str]) -> dict[str, list[Measurement]]:
        """Return the kept measurements of these workloads. Damaged lines are ignored."""
        found: dict[str, list[Measurement]] = {}
        try:
            lines = self.path.read_bytes().splitlines() if self.path else []
        except OSError:
            lines = []
        for line in lines:
            try:
                measurement = from_json(Measurement, json.loads(line))
            except (ValueError, RecursionError, PerfsuiteError):
                continue
            if measurement.id in ids:
                found.setdefault(measurement.id, []).append(measurement)
        return found

    def add(self, id: str, outcome: Outcome) -> None:
        """Keep one more measurement. If the file cannot be written, nothing more is kept."""
        if self.path is None or not isinstance(outcome, Measurement):
            return
        try:
            own_folder(self.path.parent)
            with self.path.open("a") as file:
                file.write("\n" + json.dumps(to_json(outcome)))  # begins a new line, even after a truncated one
        except OSError:
            self.path = None

    def forget(self) -> None:
        """Remove the file after the run has ended, so that the next run measures again."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
