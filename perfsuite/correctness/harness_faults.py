"""Distinguish errors of the harness from errors of the sides that it calls."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from perfsuite import faults
from perfsuite.errors import HarnessFault, first_line

Params = ParamSpec("Params")
Result = TypeVar("Result")
FOLDER = Path(__file__).parent
JUDGES = frozenset({"differences.py", "forms.py", "reference_errors.py", "rule.py", "truths.py"})
"""Files of perfsuite that process the outputs of the reference while its truth is computed."""
CALLS_A_SIDE = "side_calls.py", "run"
"""File and function through which all of them call a side."""
INSTALLED = "site-packages"


def raises_harness_faults(work: Callable[Params, Result]) -> Callable[Params, Result]:
    """Make `work` raise HarnessFault instead of an error of its own, which would be mistaken for a side's error."""

    @wraps(work)
    def wrapped(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return work(*args, **kwargs)
        except Exception as error:
            place = _own_place(error)
            if place is None:
                raise
            what = f"{type(error).__name__}: {first_line(error)}"
            raise HarnessFault(
                f"perfsuite itself raises {what} at {place}: a bug of perfsuite; report it with this traceback"
            ) from error

    return wrapped


def _own_place(error: Exception) -> str | None:
    """Return the place in one of the JUDGES that raised the error, directly or in torch; None if a side or the device
    is the cause."""
    if type(error).__module__.startswith("perfsuite.") or isinstance(error, MemoryError):
        return None
    if faults.is_of_device(error):
        return None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if INSTALLED not in Path(f.filename).parts]
    own = [(Path(f.filename).name, f.name) for f in frames if Path(f.filename).parent == FOLDER]
    if not own or CALLS_A_SIDE in own or own[-1][0] not in JUDGES or Path(frames[-1].filename).parent != FOLDER:
        return None
    return f"{own[-1][0]}:{frames[-1].lineno}"
