"""`perfsuite calibrate`: on synthetic recordings with known noise, and once for real, on a CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
from click.testing import CliRunner, Result
from scale import FULLY
from scratch import OUTER, ROOT

from experiments.calibration import analysis, command, measure, record, report, resample
from experiments.calibration.record import Recording
from perfsuite import cli
from perfsuite.codec import to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.gate import decision, estimates, planning
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Status
from perfsuite.session.modes import accept, paired
from perfsuite.system import machine
from perfsuite.timing import runner, sampling

BLOCKS, ROUNDS = 8, 7
"""Blocks and rounds of the recordings here: half the gate's blocks, so that its plan may need more."""
QUIET = {"round": 0.004, "block": 0.002, "process": 0.001, "session": 0.0}


def recording(
    kinds: Mapping[str, Mapping[str, float]],
    *,
    sessions: int = 1,
    processes: int = 12,
    seed: int = 0,
    extras: tuple[float, ...] = record.EXTRAS,
    drift: float = 0.02,
) -> Recording:
    """Build a recording of times with these standard deviations (of log-times).

    The other two sides are exact, so both ratios have these deviations. `drift` is the standard deviation of the
    device's state, which affects runs of pytest-benchmark, but no ratio.
    """
    rng = np.random.default_rng(seed)
    found = []
    for number in range(sessions):
        shifts = {k: rng.normal(0, n["session"]) for k, n in kinds.items()}
        made = []
        for _ in range(processes):
            made.append(
                record.ProcessRecord(
                    kinds={k: kind(rng, n, shifts[k], extras, drift) for k, n in kinds.items()},
                    start_s=2.0,
                    seconds=20.0,
                )
            )
        found.append(
            record.SessionRecord(
                date=f"2026-11-{number + 1:02d}T12:00:00+00:00",
                driver="580.1",
                cuda="13.0",
                torch="2.11.0",
                triton="3.6.0",
                python="3.11.9",
                benchmark_version="5.3.1",
                benchmark_max_time=0.25,
                processes=tuple(made),
            )
        )
    return Recording(
        machine=builders.MACHINE,
        blocks=BLOCKS,
        rounds=ROUNDS,
        extras=extras,
        planting={k: {} for k in kinds},
        sessions=tuple(found),
    )


def kind(
    rng: np.random.Generator, noise: Mapping[str, float], shift: float, extras: tuple[float, ...], drift: float
) -> record.KindRecord:
    def side(seconds: float) -> tuple[tuple[float, ...], ...]:
        logs = rng.normal(0, noise["round"], (BLOCKS, ROUNDS)) + rng.normal(0, noise["block"], (BLOCKS, 1))
        logs += rng.normal(0, noise["process"]) + shift
        return tuple(map(tuple, (seconds * np.exp(logs)).tolist()))

    exact = tuple((1e-4,) * ROUNDS for _ in range(BLOCKS))
    rounds = {REFERENCE: tuple((3e-4,) * ROUNDS for _ in range(BLOCKS)), ACCEPTED: exact}
    rounds |= {record.side_name(x): side(1e-4 * (1 + x)) for x in extras}
    runs = {}
    for x in extras:
        seconds = 1e-4 * (1 + x) * math.exp(rng.normal(0, drift))
        runs[record.side_name(x)] = record.ToolRun(median=seconds, min=seconds, rounds=99, iterations=1, seconds=0.25)
    return record.KindRecord(
        clock="device", rounds_s=rounds, side_s=dict.fromkeys(rounds, 0.5), seconds=4.0, benchmark=runs, do_bench=runs
    )


@pytest.fixture(scope="module")
def quiet() -> Recording:
    return recording({"memory": QUIET, "kernels": QUIET})


@pytest.fixture(scope="module")
def found(quiet: Recording) -> analysis.Analysis:
    return analysis.analyse(quiet, suites=10)


@pytest.fixture(autouse=True)
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for other measurements on this machine: no test here depends on a time."""
    monkeypatch.setattr(command.device_lock, "turn", lambda *arguments: nullcontext())


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["calibrate", *map(str, arguments)])


# --- duplicated constants ---------------------------------------------------------------------------------------------


def test_blocks_and_rounds_equal_those_of_the_gate() -> None:
    assert (record.BLOCKS, record.ROUNDS) == (sampling.BLOCKS, sampling.ROUNDS)


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_components_are_recovered() -> None:
    truth = {"round": 0.008, "block": 0.005, "process": 0.004, "session": 0.006}
    made = recording({"memory": truth}, sessions=12, processes=25, extras=(0.0, 0.02))
    for other in (REFERENCE, ACCEPTED):
        c = analysis.components(made, "memory", other)
        assert c.session is not None
        assert c.abba == pytest.approx(truth["round"], rel=0.05)
        assert c.block == pytest.approx(truth["block"], rel=0.1)
        assert c.process == pytest.approx(truth["process"], rel=0.15)
        assert c.session == pytest.approx(truth["session"], rel=0.5)
        assert (c.processes, c.sessions) == (300, 12)
        assert c.outliers < 0.02
        median_of_seven = 0.2104
        unit = truth["process"] ** 2 + (truth["block"] ** 2 + median_of_seven * truth["round"] ** 2) / BLOCKS
        assert c.unit.low < math.sqrt(unit) < c.unit.high


def test_one_session_has_no_session_component(quiet: Recording) -> None:
    assert analysis.components(quiet, "memory", REFERENCE).session is None


def test_resampled_process_means_have_the_recorded_variance() -> None:
    noise = {"round": 0.01, "block": 0.01, "process": 0.003, "session": 0.0}
    pool = resample.pools(recording({"memory": noise}, processes=40))["memory"]
    recorded = np.mean([a[0].mean(axis=1).var(ddof=1) for a in pool.sides.values()])
    rng, mean, (pooled,) = np.random.default_rng(1), pool.mean("+2.0%"), pool.noise()
    drawn = [resample._drawn(pooled, mean, BLOCKS, rng) for _ in range(3_000)]
    assert np.var([np.mean(d) for d in drawn]) == pytest.approx(recorded, rel=0.1)
    assert np.mean(drawn) == pytest.approx(mean, abs=3e-4)
    assert mean == pytest.approx(-math.log(1.02), abs=3e-3)


def test_plan_for_blocks_without_variance_has_the_usual_number() -> None:
    still = {"round": 0.0, "block": 0.0, "process": 0.004, "session": 0.0}
    made = resample.simulate(resample.pools(recording({"memory": still})), {OPTIMIZED: 2}, np.random.default_rng(0))
    tally = made.tallies["memory"][OPTIMIZED]
    assert tally.runs == tally.bounded == 2 * resample.COPIES
    assert tally.blocks == tally.processes * BLOCKS


def test_planted_sizes_are_measured(found: analysis.Analysis) -> None:
    for k in found.kinds:
        for extra in record.EXTRAS:
            (g,) = (g for g in k.gate if g.planted == extra)
            assert g.measured == pytest.approx(extra, abs=1e-3)
            assert 0 < g.error < 1e-3


# --- the gate's error rates ------------------------------------------------------------------------------------------


def test_quiet_device_meets_all_targets(found: analysis.Analysis) -> None:
    assert (found.suite, found.suites, found.processes) == (2 * resample.COPIES, 20, 12)
    assert found.red.value == found.improved.value == 0
    assert all(t.met for t in found.targets)
    alarms, power, coverage = found.targets
    assert "false alarm" in alarms.what
    assert (alarms.found.value, alarms.found.of) == (0, 20)
    assert "1% slower found on the device clock" in power.what
    assert (power.found.value, power.found.of) == (1, 2 * resample.COPIES * 10)
    assert coverage.found.of == 2 * resample.COPIES * (10 * len(record.EXTRAS) + 10)
    for k in found.kinds:
        unchanged, *_, two, three, five = k.gate
        assert (unchanged.regressed.value, unchanged.passed.value, unchanged.noisy.value) == (0, 1, 0)
        assert unchanged.regressed.low == 0 < unchanged.regressed.high < 0.1
        assert 1 < unchanged.processes < 3
        assert unchanged.seconds == pytest.approx(unchanged.processes, rel=0.7)  # 2 sides of .5 s in 8 blocks
        assert [g.regressed.value for g in (two, three, five)] == [1, 1, 1]
        assert five.processes == decision.RED_PROCESSES
        assert k.margin == estimates.MARGIN_MIN[k.clock]


def test_noisy_device_has_wider_margins_and_misses_the_power_target() -> None:
    noisy = analysis.analyse(recording({"launch": {**QUIET, "process": 0.03}}), suites=4)
    (k,) = noisy.kinds
    assert k.margin > estimates.MARGIN_USUAL
    assert k.gate[1].regressed.value < 0.1
    assert k.gate[0].processes > 3
    readings = {c.name: c.reading for c in noisy.constants}
    assert readings["PROCESS_SD"] == "assumed too small here"
    assert readings["MARGIN_MIN"] == "resolved only above it: launch"
    assert not noisy.targets[1].met


def test_plan_of_more_blocks_than_recorded_gives_a_warning() -> None:
    made = analysis.analyse(recording({"launch": {**QUIET, "block": 0.02}}), suites=1)
    assert any("the gate would measure more than the 8 blocks" in line for line in made.warnings)


def test_intervals_cover_the_truth(found: analysis.Analysis) -> None:
    for k in found.kinds:
        assert k.coverage.high > 0.95
        assert k.coverage.value > 0.9


def test_simulated_gate_adds_one_process_to_open_workloads_per_round(
    quiet: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round analyses all workloads, with one more process for open ones, like `perfsuite.session.modes.paired`."""
    rounds: list[dict[str, int]] = []
    opened: list[set[str]] = []

    def analyse(subjects: Any, suite: decision.SuiteNoise, *, selected: int) -> Any:
        every = list(subjects)
        assert selected == len(every) == 2 * resample.COPIES
        assert sum(s.sampled for s in every) == paired.sample_size(len(every))
        for s in every:
            assert s.entry is not None
            assert [len(p) for p in s.entry.process_means("accepted")] == [accept.PROCESSES]
            planned = planning.blocks_of(s.entry, estimates.margin_of(s.entry, suite, selected=selected))
            assert {len(m.log_ratios[ACCEPTED]) for m in s.runs} == {min(planned, BLOCKS)}
        answers = decide(every, suite, selected=selected)
        rounds.append({s.id: len(s.runs) for s in every})
        opened.append({i for i, a in answers.items() if isinstance(a, decision.Undecided)})
        return answers

    decide = decision.analyse
    monkeypatch.setattr(decision, "analyse", analyse)
    made = resample.simulate(resample.pools(quiet), {"+1.0%": 1}, np.random.default_rng(0))
    assert set(rounds[0].values()) == {1}
    assert len(rounds) == made.suites["+1.0%"].rounds > 3
    assert not opened[-1]
    for before, after, left in zip(rounds, rounds[1:], opened, strict=False):
        assert {i for i in after if after[i] == before[i] + 1} == left
    tallies = [made.tallies[k]["+1.0%"] for k in ("memory", "kernels")]
    assert sum(t.processes for t in tallies) == sum(rounds[-1].values())
    assert sum(t.runs for t in tallies) == 2 * resample.COPIES
    assert all(t.statuses[Status.REGRESSED] == t.runs for t in tallies)


def test_simulated_baseline_and_run_come_from_different_sessions(quiet: Recording) -> None:
    still = {"round": 1e-6, "block": 1e-6, "process": 1e-6, "session": 0.0}
    calm, wild = (
        recording({"memory": still}, processes=3),
        recording({"memory": {**still, "process": 0.05}}, processes=3),
    )
    both = replace(calm, sessions=(*calm.sessions, *wild.sessions))
    made = resample.simulate(resample.pools(both), {OPTIMIZED: 12}, np.random.default_rng(0))
    # If the noisy session is the accepted one, the margin is wide; if the quiet one is, it is the minimum.
    assert {m > estimates.MARGIN_MIN["device"] for m in made.tallies["memory"][OPTIMIZED].margins} == {True, False}


@FULLY
def test_the_same_seed_gives_the_same_figures(quiet: Recording) -> None:
    one, two, other = (analysis.analyse(quiet, seed=s, suites=3) for s in (5, 5, 6))
    assert one == two
    assert one != other


def test_clopper_pearson() -> None:
    assert analysis.clopper_pearson(0, 10) == (0.0, pytest.approx(0.30850, abs=1e-5))
    assert analysis.clopper_pearson(5, 10) == (pytest.approx(0.18709, abs=1e-5), pytest.approx(0.81291, abs=1e-5))
    assert analysis.clopper_pearson(10, 10)[1] == 1.0
    assert analysis.clopper_pearson(0, 0) == (0.0, 1.0)


def test_constants_are_compared_with_measured_values(found: analysis.Analysis) -> None:
    by_name = {c.name: c for c in found.constants}
    assert {"PROCESS_SD", "PROCESS_DOF", "SESSION_SD", "SESSION_DOF", "IMPORT_BIAS"} <= set(by_name)
    assert {"MARGIN_MIN", "TARGET_SHARE", "STAGES"} <= set(by_name)
    assert by_name["SESSION_SD"].measured.startswith("not measured")
    assert by_name["PROCESS_SD"].reading == "cautious: less was measured"
    assert by_name["MARGIN_MIN"].reading == "agrees"
    assert by_name["STAGES"].reading == "agrees"


def test_session_component_is_estimated_from_several_sessions() -> None:
    made = recording({"memory": {**QUIET, "session": 0.004}}, sessions=4, processes=6)
    several = analysis.analyse(made, suites=2)
    shown = next(c for c in several.constants if c.name == "SESSION_SD")
    assert not shown.measured.startswith("not measured")
    assert several.kinds[0].to_reference.session == pytest.approx(0.004, rel=0.8)


def test_analysis_of_one_process_is_an_error() -> None:
    with pytest.raises(PerfsuiteError, match="too little is recorded: 1 process"):
        analysis.analyse(recording({"memory": QUIET}, processes=1))


# --- the other tools -------------------------------------------------------------------------------------------------


def run(seconds: float) -> record.ToolRun:
    return record.ToolRun(median=seconds, min=seconds, rounds=9, iterations=1, seconds=0.1)


def with_runs(made: Recording, *sessions: tuple[float, ...]) -> Recording:
    """Return the recording with runs of pytest-benchmark of the unchanged side in each process of each session."""
    found = []
    for session, seconds in zip(made.sessions, sessions, strict=True):
        processes = [
            replace(p, kinds={"memory": replace(p.kinds["memory"], benchmark={OPTIMIZED: run(s)})})
            for p, s in zip(session.processes, seconds, strict=True)
        ]
        found.append(replace(session, processes=tuple(processes)))
    return replace(made, sessions=tuple(found))


def test_tool_runs_of_different_processes_are_compared() -> None:
    made = with_runs(recording({"memory": QUIET}, processes=4), (1.0, 1.0, 1.0, 1.06))
    rate = analysis.compared(made, "memory", "benchmark", "median", 5, OPTIMIZED)
    assert rate is not None
    assert (rate.value, rate.of) == (3 / 12, 12)  # the last run against each of the three others
    assert (rate.low, rate.high) == analysis.clopper_pearson(0.5, 2)
    # pytest-benchmark fails above its threshold, not at it.
    made = with_runs(recording({"memory": QUIET}, processes=2), (1.0, 1.05))
    rate = analysis.compared(made, "memory", "benchmark", "min", 5, OPTIMIZED)
    assert rate is not None
    assert rate.value == (1.05 / 1.0 * 100 - 100 > 5) / 2


def test_tool_runs_of_different_sessions_are_compared_if_there_are_several() -> None:
    made = with_runs(recording({"memory": QUIET}, processes=2, sessions=2), (1.0, 2.0), (1.0, 1.0))
    rate = analysis.compared(made, "memory", "benchmark", "median", 5, OPTIMIZED)
    assert rate is not None
    assert (rate.value, rate.of) == (2 / 8, 8)


def test_rate_of_a_tool_that_did_not_run_is_none(quiet: Recording) -> None:
    assert analysis.compared(quiet, "memory", "benchmark", "median", 5, "+9.0%") is None


@pytest.mark.parametrize(("margin", "percent"), [(0.01, 1), (0.013, 2), (0.02, 2), (0.06, 6)])
def test_threshold_is_the_margin_rounded_up_to_whole_percent(margin: float, percent: int) -> None:
    assert analysis.thresholds(margin) == (percent, 5)


# --- the file --------------------------------------------------------------------------------------------------------


def test_saved_recording_equals_the_loaded_one(quiet: Recording, tmp_path: Path) -> None:
    path = record.save(tmp_path / "a.json", quiet)
    assert record.load(path) == quiet
    assert max(map(len, path.read_text().splitlines())) < 300


def test_a_recording_of_the_first_schema_is_read(quiet: Recording, tmp_path: Path) -> None:
    data = to_json(quiet) | {"schema": 1}
    data["quads"] = data.pop("rounds")
    for session in data["sessions"]:
        for process in session["processes"]:
            for kind in process["kinds"].values():
                kind["quads_s"] = kind.pop("rounds_s")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data))
    assert record.load(path) == quiet


def damaged(made: Recording, what: str) -> str:
    data = to_json(made)
    if what == "schema":
        data["schema"] = 99
    elif what == "rounds":
        data["sessions"][0]["processes"][0]["kinds"]["memory"]["rounds_s"][OPTIMIZED][0].pop()
    elif what == "side":
        del data["sessions"][0]["processes"][0]["kinds"]["memory"]["rounds_s"]["+1.0%"]
    elif what == "negative":
        data["sessions"][0]["processes"][0]["kinds"]["memory"]["rounds_s"][OPTIMIZED][0][0] = -1.0
    elif what == "seconds":
        del data["sessions"][0]["processes"][0]["kinds"]["memory"]["side_s"][ACCEPTED]
    elif what == "deep":
        return "[" * 100_000
    elif what == "field":
        del data["machine"]
    elif what == "another file":
        return "{}"
    else:
        return json.dumps(data)[:-9]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("schema", "schema 99, this version reads 2"),
        ("rounds", "lacks rounds of the optimized side"),
        ("side", "lacks rounds of the +1.0% side"),
        ("negative", "not above 0"),
        ("seconds", "lacks the seconds that were spent on the accepted side"),
        ("deep", "not JSON"),
        ("field", "lacks 'machine'"),
        ("another file", "not a recording"),
        ("cut short", "not JSON"),
    ],
)
def test_damaged_recording_is_reported_in_one_line(quiet: Recording, tmp_path: Path, what: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(damaged(quiet, what))
    result = invoke("--from", path, "--out", tmp_path)
    assert result.exit_code == 1
    (line,) = result.output.strip().splitlines()
    assert said in line
    assert "perfsuite calibrate" in line


def test_session_is_added_only_once(quiet: Recording) -> None:
    later = replace(quiet, sessions=(replace(quiet.sessions[0], date="2026-12-01T12:00:00+00:00"),))
    both = record.joined(quiet, later, name="later.json")
    assert len(both.sessions) == 2
    assert record.joined(both, later, name="later.json") == both
    with pytest.raises(PerfsuiteError, match=r"later.json: its number of rounds is 3, not 7"):
        record.joined(quiet, replace(later, rounds=3), name="later.json")


# --- table and plot --------------------------------------------------------------------------------------------------


def test_sessions_of_the_stored_recording_are_not_lost(quiet: Recording, tmp_path: Path) -> None:
    later = replace(quiet.sessions[0], date="2026-12-01T12:00:00+00:00")
    out = tmp_path / "a folder"
    whole = record.save(out / "nvidia-h200.json", replace(quiet, sessions=(*quiet.sessions, later)))
    part = record.save(tmp_path / "part.json", quiet)
    before = whole.read_bytes()
    arguments = ("--out", out, "--suites", 1, "--no-plot")
    refused = invoke("--from", part, *arguments)
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"Error: {whole} has 1 session that would be lost; add them with --add '{whole}', or name another folder with "
        "--out\n"
    )
    assert whole.read_bytes() == before
    assert list(out.iterdir()) == [whole]
    assert invoke("--from", part, "--add", whole, *arguments).exit_code == 0
    assert len(record.load(whole).sessions) == 2
    assert invoke("--from", whole, *arguments).exit_code == 0


def test_the_longest_limit_of_pytest_benchmark_is_shown(found: analysis.Analysis, quiet: Recording) -> None:
    without = replace(quiet.sessions[0], benchmark_max_time=0.0)
    both = replace(quiet, sessions=(without, *quiet.sessions))
    assert "one run of 2 kinds, at most 0.25 s a side" in report.table(found, both, picture=None)


@FULLY
def test_table_and_plot_are_made_from_a_stored_recording(quiet: Recording, tmp_path: Path) -> None:
    stored = record.save(tmp_path / "stored.json", quiet)
    out = tmp_path / "out"
    arguments = ["--from", stored, "--out", out, "--suites", 3, "--json"]
    first = invoke(*arguments)
    assert first.exit_code == 0, first.output
    names = {"nvidia-h200.json", "nvidia-h200.md", "nvidia-h200.svg"}
    assert {p.name for p in out.iterdir()} == names
    before = {n: (out / n).read_bytes() for n in names}
    assert record.load(out / "nvidia-h200.json") == quiet
    shown = json.loads(first.stdout)
    assert {k["kind"] for k in shown["kinds"]} == {"memory", "kernels"}
    text = (out / "nvidia-h200.md").read_text()
    for part in ("NVIDIA H200", "## The whole suite", "12 recorded processes", "PROCESS_SD", "nvidia-h200.svg"):
        assert part in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert invoke(*arguments).exit_code == 0
    assert {n: (out / n).read_bytes() for n in names} == before


def test_table_rows_have_as_many_cells_as_the_header(found: analysis.Analysis, quiet: Recording) -> None:
    widths: list[int] = []
    for line in [*report.table(found, quiet, picture=None).splitlines(), ""]:
        if line.startswith("|"):
            widths.append(line.count("|"))
        else:
            assert len(set(widths)) <= 1
            widths = []


def test_plot_of_one_kind_is_written_as_png(tmp_path: Path) -> None:
    one = analysis.analyse(recording({"memory": QUIET}, processes=5), suites=2)
    path = report.plot(one, tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_reported_unless_no_plot_is_given(
    quiet: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = record.save(tmp_path / "stored.json", quiet)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = invoke("--from", stored, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.output.strip() == f"Error: {report.REMEDY}"
    assert invoke("--from", stored, "--out", tmp_path, "--no-plot", "--suites", 1).exit_code == 0
    assert not list(tmp_path.glob("*.svg"))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "x.json", "--more"], "--from measures nothing"),
        (["--from", "missing.json"], "missing.json: No such file"),
        (["--add", "missing.json"], "missing.json: No such file"),
        (["--more", "--out", "nowhere", "--device", "cpu"], "No such file"),
        (["--processes", "1"], "Invalid value for '--processes'"),
        (["--kind", "disk"], "'disk' is not one of"),
        (["--seconds", "0"], "Invalid value for '--seconds'"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert said in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_output_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("--device", "cpu", "--out", tmp_path / "file" / "below")
    assert result.exit_code == 1
    assert "cannot write" in result.output


def test_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    result = invoke("--device", "cuda", "--out", tmp_path)
    assert result.exit_code == 1
    assert "no usable GPU" in result.output


def test_a_dry_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_events", lambda *a: pytest.fail("it measures"))
    result = invoke("--device", "cpu", "--dry-run", "--out", tmp_path / "out", "--seconds", 1000)
    assert result.exit_code == 0
    assert "processes: 12 of 12, about" in result.output
    assert "estimated:" in result.output
    assert not (tmp_path / "out").exists()
    plan = json.loads(invoke("--device", "cpu", "--dry-run", "--json").stdout)
    assert plan["estimated_seconds"] > 0
    assert plan["design"]["kinds"] == list(record.KINDS)
    assert (plan["design"]["blocks"], plan["design"]["rounds"]) == (record.BLOCKS, record.ROUNDS)


def test_help_does_not_import_torch_or_scipy() -> None:
    code = "import sys; from perfsuite.cli import main\ntry: main(['calibrate', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# --- measuring, with recorded events in place of the processes -------------------------------------------------------


def events_of(made: Recording, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one process of a recording."""
    yield {"event": "started"}
    for name, found in made.sessions[0].processes[number].kinds.items():
        yield {"event": "begin", "what": name}
        yield {"event": "planting", "kind": name, "planting": {"seconds": 1.0}}
        timed = replace(found, benchmark={}, do_bench={})
        yield {"event": "kind", "kind": name, "record": to_json(timed)}
        for side, rounds in found.benchmark.items():
            yield {"event": "run", "tool": "benchmark", "kind": name, "side": side, "run": to_json(rounds)}
        yield {"event": "end", "what": name}
    yield {"event": "done"}


@pytest.fixture
def processes(quiet: Recording, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replay the quiet recording instead of measuring; return the list of jobs that were started."""
    jobs: list[dict[str, Any]] = []

    def events(job: Path, out: Path, log: Path) -> Iterator[dict[str, Any]]:
        jobs.append(json.loads(job.read_text()))
        log.write_text("")
        yield from events_of(quiet, len(jobs) - 1)

    monkeypatch.setattr(measure, "_events", events)
    return jobs


def measured(out: Path, *more: object) -> Result:
    design = ("--device", "cpu", "--blocks", BLOCKS, "--rounds", ROUNDS, "--seconds", 9999)
    return invoke(*design, "--out", out, "--suites", 1, "--no-plot", *more)


def test_events_of_the_processes_are_recorded(
    processes: list[dict[str, Any]], quiet: Recording, tmp_path: Path
) -> None:
    result = measured(tmp_path, "--processes", 4)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.json")
    made = record.load(path)
    recorded = [p.kinds for p in made.sessions[0].processes]
    assert len(recorded) == 4
    assert recorded[2]["memory"].rounds_s == quiet.sessions[0].processes[2].kinds["memory"].rounds_s
    assert recorded[2]["memory"].benchmark == quiet.sessions[0].processes[2].kinds["memory"].benchmark
    assert processes[0]["planting"] == {}
    assert processes[1]["planting"]["memory"] == {"seconds": 1.0}  # calibrated once, then handed on
    assert any("do_bench: not available here" in line for line in made.sessions[0].left_out)


def test_more_adds_a_session(processes: list[dict[str, Any]], tmp_path: Path) -> None:
    assert measured(tmp_path, "--processes", 3).exit_code == 0
    (path,) = tmp_path.glob("*.json")
    first = record.load(path)
    path.write_text(json.dumps(to_json(replace(first, sessions=(replace(first.sessions[0], date="2026-01-01"),)))))
    assert measured(tmp_path, "--processes", 2, "--more").exit_code == 0
    assert [len(s.processes) for s in record.load(path).sessions] == [3, 2]
    assert processes[3]["planting"]["memory"] == {"seconds": 1.0}
    refused = measured(tmp_path, "--more", "--rounds", 3)
    assert refused.exit_code == 1
    assert "this session: its number of rounds is 3, not 7" in refused.output
    assert len(processes) == 5


def test_processes_beyond_the_time_budget_are_left_out(processes: list[dict[str, Any]], tmp_path: Path) -> None:
    assert measured(tmp_path, "--processes", 5, "--seconds", 1).exit_code == 0
    (path,) = tmp_path.glob("*.json")
    (session,) = record.load(path).sessions
    assert len(session.processes) == measure.FEWEST
    assert "3 of 5 processes: the budget of 1 s was spent" in session.left_out
    (table,) = tmp_path.glob("*.md")
    assert "**Left out** 3 of 5 processes" in table.read_text()


@pytest.mark.parametrize("recorded", [0, 1, 3])
def test_interrupt_keeps_the_recorded_processes(
    recorded: int, quiet: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record.save(tmp_path / f"{machine.identify(prefer='cpu').device}.json", quiet)
    before = whole.read_bytes()
    calls = iter(range(99))

    def events(job: Path, out: Path, log: Path) -> Iterator[dict[str, Any]]:
        number = next(calls)
        if number == recorded:
            yield {"event": "started"}
            raise KeyboardInterrupt
        yield from events_of(quiet, number)

    monkeypatch.setattr(measure, "_events", events)
    result = measured(tmp_path)
    assert result.exit_code == command.INTERRUPTED
    (partial,) = tmp_path.glob("*.partial.json")
    assert record.load(partial).processes == recorded
    assert f"{recorded} process(es) of this session are kept" in result.output
    assert f"`perfsuite calibrate --from {partial} --out {tmp_path} --add {whole}` makes" in result.output
    assert whole.read_bytes() == before
    again = invoke("--from", partial, "--out", tmp_path / "again", "--suites", 1, "--no-plot")
    assert again.exit_code == (0 if recorded > 1 else 1)


def test_failure_of_a_kind_is_reported_once(quiet: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(99))

    def events(job: Path, out: Path, log: Path) -> Iterator[dict[str, Any]]:
        yield {"event": "failed", "what": "matmul", "why": "OutOfMemoryError: too large"}
        yield from events_of(quiet, next(calls))

    monkeypatch.setattr(measure, "_events", events)
    result = measured(tmp_path, "--processes", 2)
    assert result.exit_code == 0, result.output
    assert result.output.count("matmul: OutOfMemoryError: too large") == 1


def test_processes_that_measure_nothing_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def events(job: Path, out: Path, log: Path) -> Iterator[dict[str, Any]]:
        log.write_text("Traceback\nImportError: no torch here\n")
        yield from ()

    monkeypatch.setattr(measure, "_events", events)
    result = measured(tmp_path)
    assert result.exit_code == 1
    assert "nothing could be measured: process 1" in result.output
    assert "ImportError: no torch here" in result.output
    assert not list(tmp_path.iterdir())


# --- the workloads and a real run ------------------------------------------------------------------------------------


def test_planted_work_is_proportional_to_the_planted_slowdown() -> None:
    from experiments.calibration import workloads

    assert list(workloads.KINDS) == list(record.KINDS)
    assert [workloads.Kernels().launches(x) for x in record.EXTRAS] == [200, 201, 202, 204, 206, 210]
    memory = workloads.Memory()
    for device in ("cpu", "cuda"):
        sizes = [memory._elements(device, x) / memory.n[device] - 1 for x in record.EXTRAS]
        assert sizes == pytest.approx(record.EXTRAS, abs=2e-4)


@pytest.mark.parametrize("name", list(record.KINDS))
def test_sides_of_a_kind_agree_and_come_from_two_imports(name: str) -> None:
    import torch

    from experiments.calibration import worker, workloads

    second = worker.second_import().KINDS[name]
    ours = workloads.KINDS[name]
    planting = {"seconds": 1e-5, "overhead_s": 0.0}
    calls = {
        "reference": ours.reference("cpu"),
        "accepted": second.optimized("cpu", 0.0, planting),
        "optimized": ours.optimized("cpu", 0.0, planting),
        "planted": ours.optimized("cpu", 0.05, planting),
    }
    assert calls["accepted"].__code__ is not calls["optimized"].__code__
    assert type(second) is not type(ours)
    results = {}
    for side, call in calls.items():
        inputs = ours.inputs("cpu", 0.05, torch.Generator().manual_seed(0))
        call(*inputs.values())
        results[side] = list(inputs.values())[-1]
    some = ours.n["cpu"] // 2
    for side in ("reference", "accepted", "planted"):
        torch.testing.assert_close(results[side][:some], results["optimized"][:some], rtol=1e-3, atol=1e-3)


def test_rounds_of_a_discarded_block_are_dropped() -> None:
    import random

    import torch

    from experiments.calibration import worker
    from perfsuite.declare.pair import Pair
    from perfsuite.declare.sides import Side
    from perfsuite.declare.specs import tensor
    from perfsuite.records import Case
    from perfsuite.timing.clocks import CpuClock

    pair = Pair(reference=abs, optimized=abs, inputs={"x": tensor("n")})
    case = Case(dtype="float32", sizes={}, inputs={}, seed=0)
    master = {"x": torch.zeros(4)}
    runners = {
        n: runner.Runner(name=n, side=Side(call=abs), pair=pair, case=case, direction="forward", device="cpu")
        for n in (REFERENCE, ACCEPTED, OPTIMIZED)
    }
    masters, rng = dict.fromkeys(runners, master), random.Random(0)
    sampler = worker.QuadSampler(runners, masters, CpuClock(), "wall", {}, rng, lambda phase: None)
    for block in (0, 0, 1):  # the first block is measured twice, as if the device had throttled
        sampler._block(block, 3)
    assert {n: [len(b) for b in q] for n, q in sampler.rounds_s.items()} == {n: [3, 3] for n in runners}
    sampler.plan(9, 5)
    assert (sampler.blocks, sampler.rounds) == (9, 5)


@FULLY
def test_calibrate_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OUTER:  # under xdist, pytest-benchmark takes no times
        monkeypatch.delenv(name, raising=False)
    arguments = [
        "--device",
        "cpu",
        "--processes",
        2,
        "--blocks",
        2,
        "--rounds",
        2,
        "--kind",
        "launch",
        "--kind",
        "matmul",
    ]
    arguments += ["--benchmark-max-time", 0.005, "--suites", 1, "--seconds", 300, "--out", tmp_path, "--picture", "png"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.json")
    made = record.load(path)
    assert made.kinds == ("matmul", "launch")
    assert made.processes == 2
    assert made.planting["launch"]["seconds"] > 0
    for process in made.sessions[0].processes:
        for found in process.kinds.values():
            assert set(found.rounds_s) == set(record.side_names(record.EXTRAS))
            assert set(found.benchmark) == {record.side_name(x) for x in record.EXTRAS}
            assert found.do_bench == {}
            assert all(r.rounds >= 5 and 0 < r.min <= r.median for r in found.benchmark.values())
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".png"}
    (table,) = tmp_path.glob("*.md")
    assert "not available here" in table.read_text()
    assert "2 blocks of 2 rounds" in result.output


def test_planted_wait_on_the_device_has_the_planted_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated device a product takes 1.5 ms, and a wait 1.2 µs plus 0.5 ns per cycle."""
    from experiments.calibration import workloads

    clock = [0.0]

    def sleep(cycles: int) -> None:
        clock[0] += 1.2e-6 + cycles * 0.5e-9

    def product(*inputs: object) -> None:
        clock[0] += 1.5e-3

    def timed(work: Any) -> float:
        before = clock[0]
        work()
        return clock[0] - before

    monkeypatch.setattr(workloads, "_sleep", lambda: sleep)
    planting = workloads.Matmul().calibrate("cuda", product, timed)
    assert planting["seconds"] == pytest.approx(1.5e-3)
    assert planting["overhead_s"] == pytest.approx(1.2e-6, rel=0.01)
    for extra in record.EXTRAS[1:]:
        wait = workloads._wait("cuda", extra, planting)
        assert wait is not None
        assert timed(wait) == pytest.approx(extra * 1.5e-3, rel=0.001)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_work_is_planted_in_the_unchanged_side(device: str) -> None:
    from experiments.calibration import workloads

    assert workloads._wait(device, 0.0, {}) is None
