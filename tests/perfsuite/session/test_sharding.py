"""A gate in shards on several runners, and the result of merging their reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MACHINE, measurement
from click.testing import Result
from scale import some
from scratch import Failure, Project, fails, lines_with, times

from perfsuite.baseline import storage
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Status, Verdict
from perfsuite.report import Correctness, RunReport, jsonfile
from perfsuite.report.model import exit_code
from perfsuite.session.sharding import Shard, keep, merge, parse

pytest_plugins = ["pytester"]


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shard"), [("1/1", Shard(1, 1)), ("2/3", Shard(2, 3)), ("", None), (None, None)])
def test_a_shard_is_parsed_from_its_number_and_count(text: str | None, shard: Shard | None) -> None:
    assert parse(text) == shard
    assert shard is None or str(shard) == text


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", " 1/3", "1/3\n", "١/٣", "1/99999"])
def test_an_invalid_shard_is_rejected(text: str) -> None:
    with pytest.raises(PerfsuiteError, match=r"is not a part such as 1/3"):
        parse(text)


def item(name: str, *, timed: bool = True) -> Any:
    return SimpleNamespace(name=name, get_closest_marker=lambda mark: timed and mark == "perf")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_the_shards_partition_the_workloads(count: int) -> None:
    every = [item("proof", timed=False), *(item(f"w{n}") for n in range(5))]
    parts = []
    for number in range(1, count + 1):
        selected = list(every)
        keep(selected, Shard(number, count))
        assert selected[0].name == "proof"  # items that are not timed stay in every shard
        parts.append([i.name for i in selected[1:]])
    assert sorted(name for part in parts for name in part) == [f"w{n}" for n in range(5)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# --- reports --------------------------------------------------------------------------------------------------------


def report(number: int, count: int = 2, **fields: Any) -> RunReport:
    """Return the report of one shard, whose single workload passes."""
    id = f"test_a.py::a::speed[w{number}]"
    verdict = Verdict(id=id, status=Status.PASS, message=f"PASS {id}")
    known: dict[str, Any] = {
        "machine": MACHINE,
        "revision": "1a2b3c4",
        "started": "2030-04-05T10:11:12+00:00",
        "seconds": 10.0 * number,
        "measurements": {id: (measurement(id),)},
        "verdicts": {id: verdict},
        "selected": 1,
        "collected": count,
        "workloads": (id,),
        "shard": f"{number}/{count}",
    }
    return RunReport(**{**known, **fields})


def test_reports_of_all_shards_merge_into_one() -> None:
    whole = merge([report(2), report(1)])
    assert whole.problems == ()
    assert exit_code(whole) == 0
    assert (whole.selected, whole.collected, whole.partial, whole.shard) == (2, 2, None, "")
    assert sorted(whole.verdicts) == sorted(whole.measurements) == sorted(whole.workloads)
    assert whole.seconds == 20.0


def broken(id: str, status: Status, **fields: Any) -> dict[str, Any]:
    return {"verdicts": {id: Verdict(id=id, status=status, message=f"{status} {id}", **fields)}}


W2 = "test_a.py::a::speed[w2]"
FAULTS: dict[str, tuple[Sequence[RunReport], str, int]] = {
    "missing": ([report(1, 3), report(3, 3)], "shard 2 is missing: its workloads were not judged", 10),
    "twice": ([report(1), report(1)], "shard 1 is there twice", 10),
    "all but one twice": ([report(1), report(2), report(2)], "shard 2 is there twice", 10),
    "of other counts": ([report(1, 2), report(2, 3)], "the shards are of 2, 3; give those of one run", 10),
    "no shard's": ([report(1), report(2, shard="")], "a report is not of a run with --shard", 10),
    "another revision": (
        [report(1), report(2, revision="5d6e7f8")],
        "the shards differ in revision: 1a2b3c4, 5d6e7f8",
        10,
    ),
    "another device": (
        [report(1), report(2, machine=replace(MACHINE, device="nvidia-h100"))],
        "the shards differ in device: nvidia-h100, nvidia-h200",
        10,
    ),
    "another selection": ([report(1), report(2, collected=9)], "the shards differ in number of workloads: 2, 9", 10),
    "a part of a part": ([report(1, collected=5), report(2, collected=5)], "the shards have 2 of 5 workloads", 10),
    "no verdict": ([report(1), report(2, verdicts={})], f"1 workloads have no verdict, e.g. {W2}", 10),
    "a problem": ([report(1), report(2, problems=("it is damaged",))], "it is damaged", 10),
    "interrupted": ([report(1), report(2, complete=False)], "", 2),
    "undecided": ([report(1), report(2, **broken(W2, Status.NOISY))], "", 10),
    "regressed": ([report(1, complete=False), report(2, **broken(W2, Status.REGRESSED))], "", 1),
    "crashed": ([report(1), report(2, **broken(W2, Status.UNMEASURED, moved="optimized"))], "", 1),
    "not proven": ([report(1), report(2, correctness=Correctness(failed=1, failures={"a": "is wrong"}))], "", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_merged_report_has_the_exit_code_of_its_worst_shard(fault: str) -> None:
    reports, problem, code = FAULTS[fault]
    whole = merge(reports)
    assert exit_code(whole) == code
    assert any(problem in p for p in whole.problems) if problem else not whole.problems


def test_a_skipped_workload_needs_no_verdict() -> None:
    skipping = report(2, verdicts={}, measurements={}, skipped=(W2,))
    whole = merge([report(1), skipping])
    assert exit_code(whole) == 0
    assert whole.skipped == (W2,)


def test_skipped_and_failed_proofs_add_up() -> None:
    one = Correctness(passed=2, failed=1, skipped=1, skip_reasons={"no GPU": 1}, failures={"a": "is wrong"})
    two = Correctness(passed=3, skipped=2, skip_reasons={"no GPU": 1, "no triton": 1})
    assert merge([report(1, correctness=one), report(2, correctness=two)]).correctness == Correctness(
        passed=5, failed=1, skipped=3, skip_reasons={"no GPU": 2, "no triton": 1}, failures={"a": "is wrong"}
    )


def test_merging_no_reports_is_an_error() -> None:
    with pytest.raises(PerfsuiteError, match=r"nothing to merge: name the report\.json of every shard"):
        merge([])


# --- through the command --------------------------------------------------------------------------------------------

PAIR = """
    from perfsuite import Pair, Workload, tensor


    def slow(x):
        return x + x + x


    def fast(x):
        return 3 * x


    {name} = Pair(
        reference=slow,
        optimized=fast,
        inputs={{"x": tensor("n")}},
        workloads=[Workload(f"w{{n}}", n=64, clock="wall") for n in range({count})],
    )
"""


@pytest.fixture
def accepted(project: Project) -> Project:
    """Accept five workloads of two pairs."""
    project.write("tests/test_first.py", PAIR.format(name="first", count=3))
    project.write("tests/test_second.py", PAIR.format(name="second", count=2))
    project.accept()
    return project


def gate(project: Project, shard: str, outcome: object = None) -> tuple[Result, str]:
    """Return (the run of one shard, the path of its report)."""
    project.measured(outcome or times())
    folder = f"out-{shard.replace('/', '-')}"
    done = project.cli("gate", "--shard", shard, "--report", folder)
    return done, f"{folder}/report.json"


def test_shards_of_a_green_gate_merge_into_a_green_report(accepted: Project) -> None:
    paths = []
    measured: list[str] = []
    for number in (1, 2, 3):
        done, path = gate(accepted, f"{number}/3")
        assert done.exit_code == 0, done.output
        assert lines_with(done.output, "of 5 workloads")
        assert accepted.workers is not None
        measured += accepted.workers.proven
        paths.append(path)
    assert len(set(measured)) == len(measured) == 5
    done = accepted.cli("merge", *paths, "--report", "whole")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, "5 PASS")
    whole = jsonfile.read(accepted.path / "whole/report.json")
    assert len(whole.verdicts) == 5
    assert sorted(p.name for p in (accepted.path / "whole").iterdir()) == [
        "junit.xml",
        "report.html",
        "report.json",
        "summary.md",
    ]


def test_a_part_with_a_figure_that_is_no_number_is_one_line(accepted: Project) -> None:
    _, path = gate(accepted, "1/2")
    report = accepted.path / path
    report.write_text(re.sub(r'^ "seconds": [^,]*', ' "seconds": NaN', report.read_text(), flags=re.MULTILINE))
    done = accepted.cli("merge", path)
    assert done.exit_code == 4
    assert done.stderr == f"Error: {path} is not JSON: NaN is no finite number; run again to write a new one\n"


def test_a_red_shard_makes_the_merged_report_red(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = accepted.path / "summary-of-the-job.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    _, first = gate(accepted, "1/2")
    done, second = gate(accepted, "2/2", times(slower=0.05))
    assert done.exit_code == 1
    summary.unlink()
    done = accepted.cli("merge", first, second)
    assert done.exit_code == 1
    assert lines_with(done.output, "✗", "REGRESSED")
    assert "REGRESSED" in summary.read_text()
    done = accepted.cli("merge", first)
    assert done.exit_code == 10
    assert lines_with(done.output, "✗", "shard 2 is missing")


def test_an_unmeasured_shard_makes_the_merged_report_red(accepted: Project) -> None:
    _, first = gate(accepted, "1/2")
    hangs = Failure(status=Status.UNMEASURED, message="the measuring process hangs")
    _, second = gate(accepted, "2/2", fails(hangs))
    done = accepted.cli("merge", first, second)
    assert done.exit_code == 10
    assert lines_with(done.output, "✗", "UNMEASURED", "hangs")


@pytest.mark.parametrize("shard", ["3/2", "0/2", "half"])
def test_a_gate_with_an_invalid_shard_is_refused(accepted: Project, shard: str) -> None:
    done, path = gate(accepted, shard)
    assert done.exit_code == 4
    assert lines_with(done.output, f"--shard '{shard}' is not a part such as 1/3")
    assert accepted.workers is not None
    assert not accepted.workers.tasks
    assert not (accepted.path / path).exists()


def test_a_shard_without_a_workload_is_red(accepted: Project) -> None:
    done, _ = gate(accepted, "6/6")
    assert done.exit_code == 10
    assert lines_with(done.output, "✗", "nothing was measured: shard 6/6 has no workload; make fewer shards")


def test_a_removed_workload_makes_each_shard_red(accepted: Project) -> None:
    (accepted.path / "tests/test_second.py").unlink()
    for number in (1, 2, 3):
        done, _ = gate(accepted, f"{number}/3")
        assert done.exit_code == 10, number
        assert lines_with(done.output, "✗", "second::speed[w0]", "not collected"), number


def _gone(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:100])


def _another(path: Path) -> None:
    path.write_text("{}")


def _odd_shard(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "shard": "two"}))


@pytest.mark.parametrize("damage", some([_gone, _cut, _another, _odd_shard], [_cut]))
def test_an_unreadable_report_gives_a_one_line_error(accepted: Project, damage: Callable[[Path], None]) -> None:
    (_, first), (_, second) = gate(accepted, "1/2"), gate(accepted, "2/2")
    damage(accepted.path / second)
    done = accepted.cli("merge", first, second)
    assert done.exit_code == 4
    assert len(done.output.strip().splitlines()) == 1
    assert done.output.startswith("Error: ")
    assert not (accepted.path / ".perfsuite/report/report.json").exists()


def test_accept_works_in_shards(project: Project) -> None:
    project.write("test_first.py", PAIR.format(name="first", count=3))
    project.commit()
    for number in (1, 2):
        project.measured(times())
        done = project.cli("accept", "--reason", "the first", "--shard", f"{number}/2")
        assert done.exit_code == 0, done.output
    (path,) = (project.path / "baselines").glob("*.json")
    assert len(storage.load(path).entries) == 3
    project.measured(times())
    assert "3 PASS" in project.gate().stdout.str()


def test_a_merged_report_combines_dirty_and_adds_up_the_time() -> None:
    whole = merge([report(1, spent={"timing": 2.0}), report(2, dirty=True, spent={"timing": 3.0, "proofs": 1.0})])
    assert (whole.dirty, whole.spent) == (True, {"timing": 5.0, "proofs": 1.0})
    other = merge([report(1), report(2, machine=replace(MACHINE, torch="2.12.0"))])
    assert any("the shards differ in torch: 2.11.0, 2.12.0" in problem for problem in other.problems)
