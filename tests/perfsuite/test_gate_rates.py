"""Simulated suites: the gate's rule has the error rates that it was designed with.

The design was simulated with 200 suites of 70 workloads. A normal run simulates a few of them;
PERFSUITE_TEST_SCALE=full simulates all.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from builders import entry, measurement, workload_id
from scale import FULL, FULLY

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.baseline.priors import suite_noise
from perfsuite.gate import planning
from perfsuite.gate.decision import Undecided, analyse
from perfsuite.gate.estimates import Subject, margin_of
from perfsuite.records import Measurement, Status, Verdict
from perfsuite.session.modes.paired import sample_size

WORKLOADS, PROCESSES, ACCEPTED_PROCESSES, BLOCKS = 70, 12, 5, 8
PROCESS_SD, BLOCK_SD = (3e-4, 4e-3), (1e-3, 6e-3)
"""Ranges of the workloads' standard deviations."""
TAILS = 5
"""Degrees of freedom of Student's t, by which shifts and blocks have heavy tails."""
TRUTH = math.log(20.0)
PROCESS = measurement(accepted=0.0)
ENTRY = entry([PROCESS])


def suites(few: int) -> int:
    return 200 if FULL else few


class Simulated:
    """A suite with its baseline; the noise of a run is the accepted noise times `scale`."""

    def __init__(self, rng: np.random.Generator, workloads: int = WORKLOADS) -> None:
        self.rng, self.workloads = rng, workloads
        draws = [np.exp(rng.uniform(*np.log(bounds), workloads)) for bounds in (PROCESS_SD, BLOCK_SD)]
        self.deviations = {workload_id(i): (float(p), float(b)) for i, (p, b) in enumerate(zip(*draws, strict=True))}
        self.entries = {key: self._entry(key) for key in self.deviations}
        self.noise = suite_noise(self.entries)

    def _entry(self, key: str) -> Entry:
        (session,) = ENTRY.sessions
        (process,) = session.processes
        rows = self.processes(key, ACCEPTED_PROCESSES, BLOCKS)
        ratios = [{"reference": tuple((TRUTH + row).tolist()), "accepted": tuple(row.tolist())} for row in rows]
        kept = tuple(replace(process, log_ratios=r) for r in ratios)
        return replace(ENTRY, id=key, sessions=(replace(session, processes=kept),))

    def processes(self, key: str, count: int, blocks: int) -> np.ndarray:
        """Return block log-ratios of two imports of one revision, one row per process."""
        shift, block = (
            sd * self.rng.standard_t(TAILS, (count, n)) / math.sqrt(TAILS / (TAILS - 2))
            for sd, n in zip(self.deviations[key], (1, blocks), strict=True)
        )
        rows: np.ndarray = shift + block
        return rows

    def run(self, slower: float, scale: float, *, default: bool) -> dict[str, Verdict]:
        """Return the verdicts if every workload is slower by `slower` margins, which are 1% or the `default`."""
        subjects: dict[str, Subject] = {}
        measured: dict[str, list[Measurement]] = {}
        sampled = set(self.rng.choice(list(self.entries), sample_size(self.workloads), replace=False).tolist())
        for key, made in self.entries.items():
            margin = margin_of(made, self.noise, selected=self.workloads) if default else 0.01
            blocks = planning.blocks_of(made, margin) if default else BLOCKS
            rows = scale * self.processes(key, PROCESSES, blocks) - math.log1p(slower * margin)
            measured[key] = [replace(PROCESS, id=key, log_ratios={"accepted": tuple(row.tolist())}) for row in rows]
            subjects[key] = Subject(
                id=key, entry=made, margin=None if default else margin, against="the revision", sampled=key in sampled
            )
        left = list(subjects)
        while left:
            for key in left:
                s = subjects[key]
                subjects[key] = replace(s, runs=tuple(measured[key][: len(s.runs) + 1]))
            answers = analyse(subjects.values(), self.noise, selected=self.workloads)
            left = [key for key, answer in answers.items() if isinstance(answer, Undecided)]
        return {key: answer for key, answer in answers.items() if isinstance(answer, Verdict)}


class Rates:
    """Results of a number of simulated suites."""

    def __init__(self, seed: int, few: int, slower: float, scale: float, *, default: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.suites = suites(few)
        self.alarms = 0
        """Number of suites in which anything is REGRESSED."""
        self.statuses: Counter[Status] = Counter()
        processes = 0
        for _ in range(self.suites):
            verdicts = Simulated(rng).run(slower, scale, default=default)
            assert len(verdicts) == WORKLOADS
            self.statuses += Counter(v.status for v in verdicts.values())
            self.alarms += any(v.status is Status.REGRESSED for v in verdicts.values())
            processes += sum(v.processes for v in verdicts.values())
        self.processes = processes / (self.suites * WORKLOADS)

    def of(self, status: Status) -> float:
        return self.statuses[status] / (self.suites * WORKLOADS)

    def near(self, status: Status, expected: float, slack: float) -> bool:
        """Return whether a rate is within three standard errors plus `slack`, for what the design neglects."""
        error = math.sqrt(expected * (1 - expected) / (self.suites * WORKLOADS))
        return abs(self.of(status) - expected) <= slack + 3 * error

    def used(self, processes: float) -> bool:
        """Return whether a workload took about `processes` on average; the mean varies between suites."""
        return abs(self.processes - processes) <= 0.1 + 1.5 / math.sqrt(self.suites)


@pytest.mark.parametrize(("scale", "few", "noisy", "processes"), [(1.0, 5, 0.0, 1.45), (2.0, 3, 0.006, 2.6)])
def test_unchanged_suite_raises_no_alarm(scale: float, few: int, noisy: float, processes: float) -> None:
    found = Rates(1, few, 0.0, scale)
    # With a rate of 1%, more than six of 200 suite runs would be beyond chance.
    assert found.alarms <= 0.03 * found.suites
    assert found.near(Status.NOISY, noisy, 0.003)
    assert found.of(Status.IMPROVED) < 0.003
    assert found.used(processes)


@pytest.mark.parametrize(
    ("slower", "scale", "few", "red", "passed", "processes"),
    [
        (1.0, 1.0, 4, 0.988, 0.011, 4.2),
        (1.5, 1.0, 3, 0.999, 0.001, 4.05),
        pytest.param(1.0, 2.0, 5, 0.927, 0.017, 5.8, marks=FULLY),
        pytest.param(1.5, 2.0, 3, 0.991, 0.002, 4.7, marks=FULLY),
    ],
)
def test_slowdown_of_the_margin_is_detected(
    slower: float, scale: float, few: int, red: float, passed: float, processes: float
) -> None:
    found = Rates(2, few, slower, scale)
    assert found.near(Status.REGRESSED, red, 0.01)
    assert found.near(Status.PASS, passed, 0.005)
    assert found.used(processes)


def test_slowdown_of_the_default_margin_is_detected_with_the_planned_blocks() -> None:
    found = Rates(3, 4, 1.0, 1.0, default=True)
    assert found.of(Status.REGRESSED) > 0.95
    # At most BETA, within three standard errors.
    assert found.of(Status.PASS) < 0.02 + 3 * math.sqrt(0.02 * 0.98 / (found.suites * WORKLOADS))


@pytest.mark.parametrize("workloads", [1, 4])
@pytest.mark.parametrize("scale", [4.0, 20.0])
def test_few_workloads_on_a_much_noisier_machine_have_few_wrong_verdicts(workloads: int, scale: float) -> None:
    """Few workloads have too few processes to estimate the run's noise, so it is estimated from their blocks."""
    rng = np.random.default_rng(4)
    count = suites(60) // workloads
    alike, slower = (
        Counter(
            v.status
            for _ in range(count)
            for v in Simulated(rng, workloads).run(margins, scale, default=False).values()
        )
        for margins in (0.0, 1.0)
    )
    total = count * workloads
    assert alike[Status.REGRESSED] <= 0.02 * total
    assert slower[Status.PASS] <= 0.02 * total
