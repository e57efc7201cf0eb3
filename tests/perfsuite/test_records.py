"""Records survive a round trip through JSON; data that does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from builders import MACHINE, measurement
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import count

from perfsuite import records
from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import (
    Case,
    Evidence,
    InputCase,
    Limit,
    Machine,
    Measurement,
    SideRecord,
    Status,
    Verdict,
)

RECORDS = [kind for kind in vars(records).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]

NUMBERS = st.integers() | st.floats(allow_nan=False)  # values of a record's Any fields


def tables(kind: type) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy of plain dicts for each field that is a mapping."""
    hints = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(kind).items()}
    return {
        name: st.dictionaries(st.text(max_size=5), NUMBERS if of[1] is Any else st.from_type(of[1]), max_size=3)
        for name, of in hints.items()
        if len(of) == 2 and of[0] is str and of[1] is not Ellipsis and of[1] is not type(None)
    }


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_survives_json(kind: type) -> None:
    @settings(derandomize=True, max_examples=count(quick=6, full=20), deadline=None, database=None)
    @given(st.builds(kind, **tables(kind)))
    def survives(record: Any) -> None:
        text = json.dumps(to_json(record))
        assert repr(from_json(kind, json.loads(text))) == repr(record)

    survives()


def test_nested_records_keep_their_types() -> None:
    limit = Limit(seconds=1e-3, by="memory", bytes=1.0, flops=0.0, ceiling=4e12)
    evidence = Evidence(
        pair="p", dtype="float32", device="cpu", draws=9, discarded=1, elements=80, excused=0, worst=0.25
    )
    made = measurement(limit=limit, evidence=evidence, skipped={"rival": "not equal"}, few=("reference",))
    back = from_json(Measurement, json.loads(json.dumps(to_json(made))))
    assert back == made
    assert isinstance(back.sides["optimized"], SideRecord)
    assert isinstance(back.log_ratios["reference"], tuple)
    assert back.evidence == evidence
    assert from_json(Machine, to_json(MACHINE)) == MACHINE


def test_an_int_is_accepted_for_a_float_field() -> None:
    data = {**to_json(measurement()), "seconds": 3}
    assert from_json(Measurement, data).seconds == 3.0


CASE = to_json(Case(dtype="float32", sizes={"n": 3}, inputs={"x": InputCase(layout="strided")}, seed=1))


@pytest.mark.parametrize(
    ("kind", "data", "match"),
    [
        (Case, [], "Case is not a table"),
        (Case, {k: v for k, v in CASE.items() if k != "seed"}, "Case lacks 'seed'"),
        (Case, {**CASE, "extra": 1}, "Case has an unknown field 'extra'"),
        (Case, {**CASE, "seed": "1"}, "Case.seed is '1', not int"),
        (Case, {**CASE, "seed": True}, "Case.seed is True, not int"),
        (Case, {**CASE, "sizes": [1]}, "Case.sizes is not a table"),
        (Case, {**CASE, "inputs": {"x": 5}}, "Case.inputs.x is not a table"),
        (Case, {**CASE, "inputs": {"x": {"layout": 5}}}, "Case.inputs.x.layout is 5, not str"),
        (Measurement, {**to_json(measurement()), "few": "reference"}, "Measurement.few is not a list"),
        (
            Measurement,
            {**to_json(measurement()), "log_ratios": {"reference": [0.1, "x"]}},
            "reference is 'x', not float",
        ),
        (Verdict, {"id": "a", "status": "GREEN", "message": "m"}, "Verdict.status: 'GREEN' is not a Status"),
        (Machine, {**to_json(MACHINE), "cores": 1.5}, "Machine.cores is 1.5, not int"),
    ],
)
def test_data_that_does_not_fit_raises_a_one_line_error(kind: type, data: Any, match: str) -> None:
    with pytest.raises(PerfsuiteError, match=match) as caught:
        from_json(kind, data)
    assert "\n" not in str(caught.value)


def test_only_pass_unchanged_improved_and_waived_are_green() -> None:
    assert {s for s in Status if s.green} == {Status.PASS, Status.UNCHANGED, Status.IMPROVED, Status.WAIVED}
