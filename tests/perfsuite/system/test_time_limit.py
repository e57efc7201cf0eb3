"""A call is stopped after a time limit."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from perfsuite.system.time_limit import CutOff, cut_off


def spin(seconds: float) -> bool:
    """Return whether the loop ran to its end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(0.001)
        except Exception:  # code under test may catch exceptions, too
            return False
    return True


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_call_beyond_the_limit_is_stopped_and_the_old_timer_is_restored() -> None:
    fired: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000.0, 500.0)
        began = time.monotonic()
        with pytest.raises(CutOff), cut_off(0.05):
            spin(60.0)
        assert time.monotonic() - began < 30.0
        left, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
        assert 900.0 < left <= 1000.0
        assert interval == 500.0
        signal.raise_signal(signal.SIGALRM)
        assert fired == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
@pytest.mark.parametrize("goes_on", [False, True])
def test_timer_is_up_even_if_the_code_catches_the_exception(goes_on: bool) -> None:
    def call() -> None:
        try:
            spin(60.0)
        except BaseException as error:
            if not goes_on:
                raise RuntimeError("not complete") from error

    with cut_off(0.05) as timer:
        if goes_on:
            call()
        else:
            with pytest.raises(RuntimeError, match="not complete"):
                call()
    assert timer.up


def test_call_within_the_limit_runs_to_its_end() -> None:
    with cut_off(1000.0) as timer:
        assert spin(0.01)
    assert not timer.up
    if hasattr(signal, "setitimer"):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_call_in_another_thread_is_not_stopped() -> None:
    ended: list[bool] = []

    def run() -> None:
        with cut_off(0.01):
            ended.append(spin(0.1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]
