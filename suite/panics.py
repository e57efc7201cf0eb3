"""Protection against panics of libraries written in Rust: no Exception, and a trace on the standard error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise ValueError where the block panics.

    Whatever the block writes to the standard error is dropped: keep it short.
    """
    kept = silent = None
    with suppress(OSError):  # the standard error may be closed
        kept = os.dup(2)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # pyo3's: each library has a class of its own
            raise ValueError(str(error)) from None
        raise
    finally:
        if kept is not None:
            os.dup2(kept, 2)
            os.close(kept)
        if silent is not None:
            os.close(silent)
