"""Detect work that continues after a side has returned."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import equivalence, side_calls, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe, same_leaf
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

LATE_S, LATE_EVERY = 0.02, 3
"""Seconds for which outputs are watched after a side has returned, on one of LATE_EVERY draws. At the timed sizes, work
that is worth hiding from a timer takes longer."""


def late_output(probe: Probe) -> None:
    """Check that outputs are complete when the call returns, and are not written later by a thread or on another
    stream."""
    if (probe.number or 0) % LATE_EVERY:
        return  # waiting takes long, and its result depends little on the draw
    changed = late(probe.call(probe.drawn()))
    if changed is not None:
        raise probe.fault(late_message(changed))


def late(produced: Leaves) -> str | None:
    """Return the name of the first output that changes after the call has returned, or None."""
    now = {n: leaf.detach().clone() for n, leaf in produced.items() if isinstance(leaf, torch.Tensor)}
    _wait()
    return next((n for n, kept in now.items() if not same_leaf(produced[n], kept)), None)


def comes_late(
    pair: Pair, side: Side, case: Case, device: str, truth: truths.Truth, *, home: Path | None, **how: Any
) -> bool:
    """Return whether a side that was wrong is right if its outputs are read only after a wait, and wrong again if they
    are read at once."""

    def is_right(settled: Callable[[], None]) -> bool:
        produced = side_calls.produce(pair, side, case, device, home=home, on_return=settled, **how)
        try:
            equivalence.judge(pair, truth, produced, strict_strides=False)
        except NotEquivalent:
            return False
        return True

    try:
        return is_right(_wait) and not is_right(lambda: None)
    except Exception:  # the result only adds to a message
        return False


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    time.sleep(LATE_S)


def late_message(name: str) -> str:
    """Return the message about the output `name`, which changes after the call."""
    return (
        f"goes on working after it has returned: {name} changes later, written by a background thread or on a stream "
        f"that nobody waits for"
    )
