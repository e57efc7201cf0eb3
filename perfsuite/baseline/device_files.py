"""A device's baseline files: `<device>.json`, and `<device>-x2.json` for workloads that two processes call together."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from perfsuite.baseline import accepted_entries, storage
from perfsuite.baseline.accepted_entries import Baseline, Entry
from perfsuite.records import Machine


class Baselines:
    """Baseline files of this machine in one folder. `load` reads them."""

    def __init__(self, folder: Path, identify: Callable[[], Machine]) -> None:
        """`identify` returns this machine. It is called when the machine is first needed, and may raise
        MachineError."""
        self.folder, self.identify = folder, identify
        self.files: dict[int, Baseline] = {}
        """Baselines by the number of processes."""
        self.entries: Mapping[str, Entry] = {}
        """Entries of all files that were read, by id."""

    @functools.cached_property
    def machine(self) -> Machine:
        """This machine."""
        return self.identify()

    def path(self, ranks: int) -> Path:
        """Return the path of the file for workloads that this number of processes call together."""
        return self.folder / f"{self.machine.device}{f'-x{ranks}' if ranks > 1 else ''}.json"

    def load(self) -> None:
        """Read each file that this machine can measure: files for more GPUs than it has are left out. Raises
        BaselineError for a damaged file."""
        numbers = [1, *sorted(self._numbers())]
        self.files = {n: storage.load(path) for n in numbers if (path := self.path(n)).exists()}
        self.entries = {id: entry for file in self.files.values() for id, entry in file.entries.items()}

    def devices(self) -> set[str]:
        """Return the devices that have a file in the folder, and this machine's."""
        return {self.machine.device} | {re.sub(r"-x\d+$", "", path.stem) for path in self.folder.glob("*.json")}

    def _numbers(self) -> set[int]:
        names = re.compile(rf"{re.escape(self.machine.device)}-x(\d+)")
        found = {int(match[1]) for path in self.folder.glob("*.json") if (match := names.fullmatch(path.stem))}
        return {n for n in found if n > 1 and n <= (self.machine.count or n)}

    def compared(self) -> tuple[list[str], list[str]]:
        """Return the errors and notes of `baseline.compare_machines` for every file that was read."""
        found = [accepted_entries.compare_machines(file.machine, self.machine) for file in self.files.values()]
        errors, notes = ([line for each in found for line in each[i]] for i in (0, 1))
        return list(dict.fromkeys(errors)), list(dict.fromkeys(notes))

    def update(
        self, entries: Mapping[int, Sequence[Entry]], *, more: bool, drop: Collection[str], note: Callable[[str], None]
    ) -> dict[str, Entry]:
        """Write these entries, by number of processes, into their files, without the ids in `drop`. Return all entries.

        A workload that is accepted for one number of processes is removed from the files for other numbers. `note`
        receives a line for each change and for each file.
        """
        after: dict[str, Entry] = {}
        for number in sorted({*entries, *self.files}):
            own = entries.get(number, ())
            moved = {e.id for n, others in entries.items() if n != number for e in others}
            gone = {*drop, *moved}
            if not own and not gone.intersection(self.files[number].entries):
                after |= self.files[number].entries
                continue

            def change(before: Baseline | None, own: Sequence[Entry] = own, gone: Collection[str] = gone) -> Baseline:
                return accepted_entries.merge(before, own, machine=self.machine, more=more, drop=gone)

            old, new = storage.update(self.path(number), change)
            for line in accepted_entries.describe_changes(old, new):
                note(line)
            note(f"wrote {self.path(number)}")
            after |= new.entries
        return after
