"""End a worker with the process that started it. Imported before anything else in a worker."""

from __future__ import annotations

import os
import signal
import sys

PARENT = "PERFSUITE_PARENT"
"""Environment variable: the process id of the process that starts a worker."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent ends."""


def die_with_parent() -> None:
    """End this worker when its parent ends, however that happens: an orphan would disturb the next measurement.

    To be called before anything else. Linux only; elsewhere a worker whose parent was killed runs on to its end.
    """
    parent = os.environ.pop(PARENT, None)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)  # it ended before this process could ask for the signal
