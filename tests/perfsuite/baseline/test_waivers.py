"""A waiver excuses a known workload until a date, with a reason; anything else about it is an error."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from perfsuite.baseline.waivers import WAIVABLE, Waiver, apply, load
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Excuse, Status, Verdict

TODAY = date(2026, 11, 21)
KNOWN = {"a.py::a::speed[w]", "b.py::b::speed[w]"}
GOOD = """
[[waiver]]
workload = "a.py::a::speed[w]"
owner = "Ada  Lovelace"
reason = "driver 590's scheduler, reported"
until = 2026-12-31
"""


def read(tmp_path: Path, text: str, today: date = TODAY) -> tuple[Waiver, ...]:
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    return load(path, today=today, known_ids=KNOWN)


def test_a_waiver_is_read(tmp_path: Path) -> None:
    expected = Waiver(
        workload="a.py::a::speed[w]",
        owner="Ada Lovelace",
        reason="driver 590's scheduler, reported",
        until=date(2026, 12, 31),
    )
    assert read(tmp_path, GOOD) == (expected,)


def test_no_file_and_an_empty_one_waive_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "none.toml", today=TODAY, known_ids=KNOWN) == ()
    assert read(tmp_path, "") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("]]", "]", 1), "not valid TOML"),
        ("\x00", "not valid TOML"),
        (GOOD.replace("[[waiver]]", "[waiver]"), "double brackets"),
        (GOOD.replace("[[waiver]]", "[[waivers]]"), "'waivers'"),
        ("waiver = [3]", "not a table"),
        (GOOD.replace('workload = "a.py::a::speed[w]"', ""), "lacks 'workload'"),
        (GOOD.replace('reason = "driver 590\'s scheduler, reported"', ""), "lacks 'reason'"),
        (GOOD.replace("until = 2026-12-31", ""), "lacks 'until'"),
        (GOOD.replace('owner = "Ada  Lovelace"', ""), "waiver 1: lacks 'owner'; write owner = 'the person or team"),
        (GOOD.replace("Ada  Lovelace", " "), "names no owner; write owner = 'a person or team'"),
        (GOOD.replace('"Ada  Lovelace"', "7"), "names no owner"),
        (GOOD.replace("Ada  Lovelace", "\\u200b"), "names no owner"),
        (GOOD.replace("Ada  Lovelace", "\\u001b[31mAda"), "names no owner"),
        (GOOD + f"team = {'9' * 5000}", "not valid TOML"),
        ("a = " + 2000 * "[", "not valid TOML"),
        (GOOD + 'team = "me"', "unknown field 'team'"),
        (GOOD.replace("driver 590's scheduler, reported", "  "), "no reason"),
        (GOOD.replace('"driver 590\'s scheduler, reported"', "3"), "no reason"),
        (GOOD.replace("2026-12-31", '"2026-12-31"'), "not a date"),
        (GOOD.replace("2026-12-31", "2026-12-31T00:00:00"), "not a date"),
        (GOOD.replace("a.py::a", "z.py::z"), "no workload 'z.py::z::speed[w]'"),
        (GOOD.replace('"a.py::a::speed[w]"', "[1]"), "no workload"),
        (GOOD + GOOD, "waived twice"),
        (GOOD.replace("2026-12-31", "2026-11-20"), "ended on 2026-11-20"),
    ],
)
def test_errors_are_one_line_that_names_the_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PerfsuiteError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert says in message
    assert "waivers.toml" in message
    assert "\n" not in message


def test_a_file_that_is_not_text_or_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PerfsuiteError, match="not valid TOML"):
        load(path, today=TODAY, known_ids=KNOWN)
    with pytest.raises(PerfsuiteError, match="cannot be read"):
        load(tmp_path, today=TODAY, known_ids=KNOWN)


def test_several_errors_are_counted(tmp_path: Path) -> None:
    ended = GOOD.replace("2026-12-31", "2026-01-01")
    with pytest.raises(PerfsuiteError, match=r"ended on 2026-01-01.*\(and 1 more"):
        read(tmp_path, ended + ended.replace("a.py::a", "b.py::b"))


def test_a_waiver_holds_through_its_last_day(tmp_path: Path) -> None:
    assert len(read(tmp_path, GOOD, date(2026, 12, 31))) == 1
    with pytest.raises(PerfsuiteError, match="ended"):
        read(tmp_path, GOOD, date(2027, 1, 1))


@pytest.mark.parametrize("status", list(Status))
def test_only_speed_verdicts_are_waived(tmp_path: Path, status: Status) -> None:
    waivers = read(tmp_path, GOOD)
    found = Verdict(
        id="a.py::a::speed[w]", status=status, message=f"{status} a.py::a::speed[w]: 3% slower", slowdown=0.03
    )
    other = Verdict(id="b.py::b::speed[w]", status=status, message="other")
    result = apply({v.id: v for v in (found, other)}, waivers)
    assert result[other.id] == other
    if status in (Status.REGRESSED, Status.BELOW_FLOOR, Status.NOISY):
        waived = result[found.id]
        assert waived.status is Status.WAIVED
        assert waived.status.green
        assert waived.slowdown == 0.03
        assert waived.excuse == Excuse(
            status=status, owner="Ada Lovelace", until="2026-12-31", reason="driver 590's scheduler, reported"
        )
        for part in (f"without the waiver {found.message}", "driver 590's scheduler", "2026-12-31", "Ada Lovelace"):
            assert part in waived.message
        assert "\n" not in waived.message
    else:
        assert status not in WAIVABLE
        assert result[found.id] == found
