"""Faults of several processes: each is named, and look-alikes pass."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import rank_faults
from scale import some

from perfsuite.correctness.ranks import group, proof
from perfsuite.draws import coverage
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.session import planned_draws

COLLECTIVE_S = 2.0
"""Seconds that a collective waits for the other ranks in these tests."""
ENDS_S = 30.0
"""Seconds within which a group must end after its ranks diverged."""
DIFFERENT = "on rank 0 of 2; the ranks' results differ, .*: likely a collective is missing, or waited for too late"
DIVISION = "so it is where all ranks have equal parts .* divided by their number twice, or not at all"
OWN_RESULTS = "it is right: likely it leaves out some ranks' parts, or is a mean of the ranks' own results"
ANOTHER_ORDER = "they are the reference's numbers in another order: likely the ranks' parts are gathered in another"
WORDS = {
    "missing_on_one_rank": r"waits in vain for the other ranks in a collective, rank 0 at rank_faults.py:\d+, while "
    "rank 1 returned",
    "left_out": DIFFERENT,
    "waited_for_too_late": DIFFERENT,
    "of_the_first_rank": OWN_RESULTS,
    "returned_before_complete": "the ranks' results differ, .*, or waited for too late",
    "mean_over_unequal_counts": OWN_RESULTS,
    "wrong_in_one_process_too": "on rank 0 of 2; so it is in one process$",
    "noise_of_its_own_in_each_rank": r"a \(in place\) after 1 step .* on rank 1 of 2; .* draw other random numbers",
    "gathered_in_another_order": ANOTHER_ORDER,
    "gathered_from_the_own_rank": r"on rank 1 of 2; " + ANOTHER_ORDER,
    "not_averaged": DIVISION,
    "averaged_twice": DIVISION,
    "largest_sum": DIVISION + ", or is another reduction, such as MAX instead of SUM$",
    "largest_for_mean": OWN_RESULTS + ", or another reduction, such as MAX instead of AVG$",
    "rounded_at_random": r"output\[0\] of the optimized side differs between rank 0 and rank 1 of 2",
    "in_two_orders": "is wrong at",
    "raises_on_one_rank": r"raises ValueError at rank_faults.py:\d+: no gradient here on rank 1",
    "dies_on_one_rank": "ends the process of rank 1 by SIGKILL",
    "exits_on_one_rank": "ends the process of rank 1 with exit code 3",
    "all_rows": r"output of the .* has shape \(6, 5\) on rank 0 of 2, where that of the reference has \(3, ",
    "wrong_on_one_rank": r"is wrong at \[[345], \d\].*, in the parts of 2 ranks together; only the part of rank 1 is "
    "wrong: likely it depends on the rank",
    "parts_of_own_means": "in the parts of 2 ranks together; .*" + OWN_RESULTS,
    "parts_of_a_sum": "in the parts of 2 ranks together; " + DIVISION,
    "parts_exchanged": "in the parts of 2 ranks together; " + ANOTHER_ORDER,
    "writes_an_input": r"changes its input x in place, which the pair does not declare; the reference does not "
    r"change it \(on rank 1\)$",
    "ends_the_group": "in 2 processes sets torch.distributed's default process group to none .*one of 2.*put it back",
    "narrow_on_one_rank": r"output of the optimized side is torch.int32 on rank 1 of 2 and torch.int64 on rank 0",
    "reads_an_empty_file": r"raises EOFError at rank_faults.py:\d+: Ran out of input",
    "has_no_peer_access": r"raises RuntimeError at rank_faults.py:\d+: peer access is not supported",
    "waits_in_the_standard_library": r"hangs: rank 1 at rank_faults.py:\d+ did not return",
    "hangs_on_one_rank": r"hangs: rank 1 at rank_faults.py:\d+ did not return while rank 0 returned",
}
USUAL_WRONG = (
    "missing_on_one_rank",
    "averaged_twice",
    "rounded_at_random",
)
USUAL_RIGHT = ("in_one_bucket", "with_a_common_seed")
CASE = Case(dtype="float32", sizes={"n": 5, "rows": 3, "ranks": 2}, inputs={}, seed=1)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a group with short timeouts."""
    monkeypatch.setattr(group, "APART_S", 2 * COLLECTIVE_S)
    if (2, "cpu") not in group._groups:
        group._groups[2, "cpu"] = group.Group(2, "cpu", COLLECTIVE_S)


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    group.close_all()
    yield
    group.close_all()


def check(name: str, case: Case = CASE) -> None:
    family, _, key = name.partition("-")
    pair = getattr(rank_faults, family)[key]
    pair.name = name
    with group.alone(pair, "cpu"):
        proof.check(pair.at(2), case, "cpu", module=rank_faults)


@pytest.mark.parametrize("name", some(rank_faults.WRONG, USUAL_WRONG))
def test_fault_in_two_processes_is_named(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(NotEquivalent, match=WORDS[name]) as found:
        check(f"WRONG-{name}")
    assert "\n" not in str(found.value)
    assert time.monotonic() - began < ENDS_S


@pytest.mark.parametrize("name", some(rank_faults.RIGHT, USUAL_RIGHT))
def test_look_alike_in_two_processes_passes(name: str) -> None:
    check(f"RIGHT-{name}")


def test_shards_that_leave_out_a_remainder_are_found() -> None:
    cases = list(planned_draws.in_ranks(rank_faults.SHARDS["padded"].at(2), "float32", 0, "cpu"))
    for case in cases:
        check("SHARDS-padded", case)
    failure, _ = coverage.first_failure(lambda case: check("SHARDS-unpadded", case), cases)
    assert failure is not None
    assert re.search(DIFFERENT, str(failure))
