"""Exceptions of other libraries are shortened to one line."""

from __future__ import annotations

import pytest

from perfsuite.errors import MOST_CHARACTERS, first_line, in_one_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("one\ntwo", "one"),
        ("\n\n  one  \ntwo", "one"),
        ("backend='inductor' raised:\nRuntimeError: why\nmore", "backend='inductor' raised: RuntimeError: why"),
        ("first:\n\nsecond:\nthird", "first: second: third"),
        ("it ends here:", "it ends here:"),
        ("x" * 999, "x" * MOST_CHARACTERS),
    ],
)
def test_first_line_is_joined_with_the_next_after_a_colon(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line


def test_exception_without_a_message_is_shown_as_its_type() -> None:
    assert in_one_line(MemoryError()) == "MemoryError"
    assert in_one_line(ValueError("why:\nso")) == "ValueError: why: so"
