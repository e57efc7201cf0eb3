"""Protection against panics in Rust libraries, which raise no Exception and print a trace to stderr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise ValueError if the block panics.

    Everything that the block writes to stderr is dropped, so keep the block short.
    """
    kept = silent = None
    with suppress(OSError):  # stderr may be closed
        kept = os.dup(2)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # from pyo3; each library has its own class
            raise ValueError(str(error)) from None
        raise
    finally:
        if kept is not None:
            os.dup2(kept, 2)
            os.close(kept)
        if silent is not None:
            os.close(silent)
