"""Allow only one measuring run at a time on each device, since two runs would disturb each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

HELD = "PERFSUITE_TURN"
"""Environment variable with the devices that a parent process holds. A run that it starts must not wait for them."""
POLL_S = 0.2


@contextmanager
def turn(devices: Sequence[str], name: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold these devices while the block runs. If another run holds one, report this once and wait.

    `devices` are names that all runs on this machine use, such as a GPU's UUID. `name` is for the message. If a device
    cannot be locked, for instance because the folder is not writable, this is reported, and the device is not held.
    """
    from filelock import FileLock, Timeout

    before = os.environ.get(HELD, "")
    wanted = [d for d in sorted(set(devices)) if d not in before.split(",")]
    with ExitStack() as held:
        for device in wanted:
            # Other users' runs are included. All runs use the same order, so that no two wait for each other.
            lock = FileLock(Path(tempfile.gettempdir()) / f"perfsuite-measuring-{device}.lock", mode=0o666)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                report(f"waiting: another perfsuite run is measuring on {name}; this one goes on when that has ended")
                lock.acquire(poll_interval=POLL_S)
            except OSError as error:
                report(
                    f"{lock.lock_file}: cannot be locked ({error.strerror or error}): another run on {name} would not "
                    "wait for this one; make that file writable, or remove it"
                )
                continue
            held.callback(lock.release)
        os.environ[HELD] = ",".join(filter(None, [before, *wanted]))
        try:
            yield
        finally:
            if before:
                os.environ[HELD] = before
            else:
                os.environ.pop(HELD, None)
