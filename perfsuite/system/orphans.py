"""End a worker when the process that started it ends. A worker imports this module before anything else."""

from __future__ import annotations

import os
import signal
import sys

PARENT = "PERFSUITE_PARENT"
"""Environment variable of a worker: the process id of the process that started it."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sets the signal that this process gets when its parent ends."""


def die_with_parent() -> None:
    """Make this worker end whenever its parent ends, since an orphan would disturb the next measurement.

    Call this before anything else. It works only on Linux. Elsewhere, a worker whose parent was killed runs to its end.
    """
    parent = os.environ.pop(PARENT, None)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)  # the parent ended before this process could ask for the signal
