"""Libraries written in Rust, which end a mistake in a panic: no Exception, and a trace on the standard error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_panic() -> Iterator[None]:
    """ValueError where the block panics. What it writes to the standard error is dropped: keep the block short."""
    kept = silent = None
    with suppress(OSError):  # of a standard error that is closed
        kept = os.dup(2)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # of pyo3: each library has a class of its own
            raise ValueError(str(error)) from None
        raise
    finally:
        if kept is not None:
            os.dup2(kept, 2)
            os.close(kept)
        if silent is not None:
            os.close(silent)
