"""Two processes call a workload together: the slowest rank's time counts, and an error names its rank."""

from __future__ import annotations

import pytest
import timed_rank_faults
from scale import FULLY

from perfsuite.correctness.ranks import group
from perfsuite.correctness.ranks.group import RanksFailed
from perfsuite.errors import NotEquivalent
from perfsuite.records import OPTIMIZED, REFERENCE, Measurement, WorkloadProof
from perfsuite.session.rank_timing.parent import RankTiming
from perfsuite.session.tasks import PROVE, Task

ENDS_S = 60.0
"""Limit for the ranks' start and first calls, and for the 30 s within which a group ends after a fault."""


def timing(name: str) -> RankTiming:
    pair = timed_rank_faults.totals[name]
    pair.name = f"totals-{name}"
    return RankTiming(pair, pair.workloads[0], timed_rank_faults, "cpu", lambda phase: None)


def measured(name: str, proof: WorkloadProof | None = None) -> Measurement:
    with group.alone(timed_rank_faults.totals[name], "cpu"):
        return timing(name).measure(Task(id=name, limit_s=ENDS_S, blocks=4, proof=proof, thorough=False))


@FULLY
def test_a_call_takes_as_long_as_the_slowest_rank() -> None:
    with group.alone(timed_rank_faults.totals["slow"], "cpu"):
        proof = timing("slow").prove(Task(id="slow", kind=PROVE, seed=5))
    assert {digest.partition(" ")[0] for digest in proof.digests} == {"0", "1"}
    assert proof.evidence is not None
    found = measured("slow", proof)
    assert min(found.sides[OPTIMIZED].blocks_s) >= timed_rank_faults.SLEEP_S
    assert (found.seed, found.sizes["ranks"], found.evidence) == (5, 2, proof.evidence)
    assert found.group is not None
    assert (found.group.ranks, found.group.backend, len(found.group.by_rank)) == (2, "gloo", 2)
    assert all(set(counts) == {REFERENCE, OPTIMIZED} for counts in found.group.by_rank)


@FULLY
def test_a_setting_left_changed_is_named() -> None:
    with (
        group.alone(timed_rank_faults.totals["leaves_a_setting"], "cpu"),
        pytest.raises(
            NotEquivalent, match=r"optimized side sets torch's default dtype to torch.float64 .*; put it back"
        ),
    ):
        timing("leaves_a_setting").prove(Task(id="x", kind=PROVE, seed=5, limit_s=ENDS_S))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("wrong", r"output of the optimized side is wrong at \[\d+\].*, on rank 1 of 2$", marks=FULLY),
        ("goes_wrong", r"output of the timed optimized side is wrong at .*, on rank 1 of 2; it was right before"),
    ],
)
def test_error_names_the_rank_with_wrong_outputs(name: str, words: str) -> None:
    with pytest.raises(NotEquivalent, match=words):
        measured(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "raises",
            r"^raises ValueError at timed_rank_faults.py:\d+: no gradient here on rank 1, while rank 0 goes on$",
            marks=FULLY,
        ),
        pytest.param("dies", "^ends the process of rank 1 by SIGKILL$", marks=FULLY),
        pytest.param(
            "hangs", r"^hangs: rank 1 at timed_rank_faults.py:\d+ did not return while rank 0 waits$", marks=FULLY
        ),
    ],
)
def test_error_names_the_rank_that_fails_while_timed(name: str, words: str) -> None:
    with pytest.raises(RanksFailed, match=words):
        measured(name)
