"""`perfsuite bisect`: the search on a simulated clock, and the comparison of commits in a separate work tree."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MACHINE
from click.testing import CliRunner
from scale import FULLY
from scratch import git

from perfsuite import bisection
from perfsuite.bisection import Change, Commit, SkippedError, change_of, commits_between, search, summary
from perfsuite.cli import main
from perfsuite.errors import PerfsuiteError, RevisionError
from perfsuite.gate.exit_codes import COULD_NOT_BEGIN
from perfsuite.records import Measurement, SideRecord, Status, Verdict
from perfsuite.report import jsonfile
from perfsuite.report.model import RunReport

GOOD = Commit(hash="0" * 40, subject="good")
COMMITS = [Commit(hash=f"{n:040x}", subject=f"change {n}") for n in range(1, 33)]
ID = "tests/test_dots.py::dots::speed[large]"


def clock(slow_from: int, *, slower: float = 0.02, noise: float = 0.003, seed: int = 0) -> Any:
    """Return a noisy comparison of commits in which all from number `slow_from` on are slower."""
    random_ = random.Random(seed)
    calls: list[tuple[str, str]] = []

    def compare(earlier: Commit, later: Commit) -> Change:
        calls.append((earlier.hash, later.hash))
        before, after = (int(c.hash, 16) >= slow_from for c in (earlier, later))
        value = slower * (after - before) + random_.gauss(0, noise)
        return Change(value=value, low=value - 2 * noise, high=value + 2 * noise)

    compare.calls = calls  # type: ignore[attr-defined]
    return compare


@pytest.mark.parametrize("planted", [1, 2, 5, 8, 13, 16, 17, 24, 31, 32])
def test_search_finds_the_planted_commit_among_32(planted: int) -> None:
    compare = clock(planted, seed=planted)
    found = search(GOOD, COMMITS, compare)
    assert found.first == COMMITS[planted - 1]
    assert found.parent == ([GOOD, *COMMITS][planted - 1])
    assert found.own is not None
    assert found.own.value == pytest.approx(0.02, abs=0.015)
    assert len(compare.calls) <= 2 + 3 * 5  # five steps, each repeated twice at most


def test_search_ends_if_the_last_two_commits_cannot_be_compared() -> None:
    exact = clock(20, noise=0.0)

    def compare(earlier: Commit, later: Commit) -> Change:
        if earlier is not GOOD:
            raise SkippedError("the earlier one does not run beside it")
        change: Change = exact(earlier, later)
        return change

    found = search(GOOD, COMMITS, compare)
    assert (found.first, found.own) == (COMMITS[19], None)
    assert summary(found)[1].endswith("it cannot be compared with that one")


def test_search_refuses_a_change_of_nan() -> None:
    with pytest.raises(PerfsuiteError, match="there is nothing to search for"):
        search(GOOD, COMMITS, lambda earlier, later: Change(value=math.nan, low=math.nan, high=math.nan))


def test_commits_that_cannot_be_compared_are_skipped_and_listed() -> None:
    lines: list[str] = []
    exact = clock(20, noise=0.0)

    def compare(earlier: Commit, later: Commit) -> Change:
        if int(later.hash, 16) in (16, 19, 18):
            raise SkippedError("it does not import")
        change: Change = exact(earlier, later)
        return change

    found = search(GOOD, COMMITS, compare, lines.append)
    assert (found.first, found.parent) == (COMMITS[19], COMMITS[16])
    assert found.suspects == (COMMITS[17], COMMITS[18])
    assert set(found.skipped) == {COMMITS[n - 1].hash for n in (16, 18, 19)}
    assert any("skipped, it does not import" in line for line in lines)
    text = summary(found)
    assert text[0] == f'{COMMITS[19].hash[:9]} "change 20", , is the first that takes more time'
    assert (
        text[1]
        == f'against {COMMITS[16].hash[:9]} "change 17": +2.00% (+2.00 to +2.00), 100% of +2.00% (+2.00 to +2.00)'
    )
    assert text[2].endswith(f"may be the cause instead: {COMMITS[17].hash[:9]}, {COMMITS[18].hash[:9]}")


def test_search_finds_the_commit_that_exceeds_half_of_the_total_change() -> None:
    values = {n: 0.01 * (n >= 5) + 0.02 * (n >= 9) for n in range(33)}

    def compare(earlier: Commit, later: Commit) -> Change:
        value = values[int(later.hash, 16)] - values[int(earlier.hash, 16)]
        return Change(value=value, low=value, high=value)

    found = search(GOOD, COMMITS, compare)
    assert found.first == COMMITS[8]
    assert "67% of +3.00%" in summary(found)[1]


def test_search_refuses_ends_that_do_not_differ_or_cannot_be_compared() -> None:
    with pytest.raises(PerfsuiteError, match=r'"change 32" takes no more than 000000000 "good".*nothing to search for'):
        search(GOOD, COMMITS, clock(99))

    def fails(earlier: Commit, later: Commit) -> Change:
        raise SkippedError("no such workload")

    with pytest.raises(PerfsuiteError, match=r'"change 32" cannot be compared: no such workload; name another --bad'):
        search(GOOD, COMMITS, fails)


def test_repeated_comparisons_narrow_the_interval() -> None:
    one, other = Change(value=0.01, low=0.0, high=0.02), Change(value=0.03, low=0.02, high=0.04)
    mean = one.mean([other])
    assert (mean.value, mean.high - mean.low) == (pytest.approx(0.02), pytest.approx(0.02 / 2**0.5))
    assert one.mean([]) == one


# --- the repository -------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    (root / "inner").mkdir(parents=True)
    git(root, "init", "--quiet")
    for number in range(4):
        (root / "inner" / "number.txt").write_text(str(number))
        git(root, "add", "-A")
        git(root, "commit", "--quiet", "-m", f"number {number}")
    monkeypatch.chdir(root / "inner")
    return root


def test_commits_between_returns_the_later_commits_in_order(repository: Path) -> None:
    good, commits = commits_between("HEAD~3", "HEAD", repository)
    assert good.subject == "number 0"
    assert [c.subject for c in commits] == ["number 1", "number 2", "number 3"]
    assert all(len(c.hash) == 40 and c.date[:2] == "20" for c in commits)
    with pytest.raises(PerfsuiteError, match="--good HEAD is no ancestor of HEAD~1"):
        commits_between("HEAD", "HEAD~1", repository)
    with pytest.raises(PerfsuiteError, match="--good HEAD and HEAD are the same commit"):
        commits_between("HEAD", "HEAD", repository)
    with pytest.raises(PerfsuiteError, match="revision nowhere is not in this repository"):
        commits_between("nowhere", "HEAD", repository)


def test_commits_between_returns_commits_without_a_message(repository: Path) -> None:
    git(repository, "commit", "--quiet", "--allow-empty", "--allow-empty-message", "-m", "")
    _, commits = commits_between("HEAD~2", "HEAD", repository)
    assert [c.subject for c in commits] == ["number 3", ""]


def test_commits_between_ignores_checks_of_signatures(repository: Path) -> None:
    """With log.showSignature, `git log` prints the check of a signature before each signed commit."""
    program = repository / "gpg"
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n*--verify*) echo "gpg: Good signature" >&2; echo "[GNUPG:] GOODSIG 1 2";;\n'
        '*) cat > /dev/null; echo "[GNUPG:] SIG_CREATED x" >&2; echo "-----BEGIN PGP SIGNATURE-----";;\nesac\n'
    )
    program.chmod(0o755)
    git(repository, "config", "gpg.program", str(program))
    git(repository, "config", "log.showSignature", "true")
    git(repository, "commit", "--quiet", "--allow-empty", "-S", "-m", "signed")
    assert "Good signature" in git(repository, "log", "-1")
    good, commits = commits_between("HEAD~1", "HEAD", repository)
    assert (good.subject, [c.subject for c in commits]) == ("number 3", ["signed"])


def test_scratch_folder_is_removed_if_git_cannot_remove_the_work_tree(repository: Path) -> None:
    with pytest.raises(RevisionError), bisection.Comparer(ID, repository) as compare:
        compare._tree.mkdir()  # as after an interrupt of `git worktree add`
    assert not compare._scratch.exists()


def report(verdict: Verdict, *measured: Measurement) -> RunReport:
    return RunReport(
        machine=MACHINE,
        revision="a" * 40,
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        measurements={ID: measured} if measured else {},
        verdicts={ID: verdict},
    )


def verdict(slowdown: float | None, status: Status = Status.PASS, message: str = "PASS") -> Verdict:
    wide = None if slowdown is None else 0.004
    return Verdict(
        id=ID,
        status=status,
        message=message,
        slowdown=slowdown,
        low=None if slowdown is None or wide is None else slowdown - wide,
        high=None if slowdown is None or wide is None else slowdown + wide,
    )


class Compared:
    """Stand-in for `perfsuite compare` that reports the change of the commit numbered in `number.txt`."""

    def __init__(self, changes: dict[int, float | None]) -> None:
        self.changes, self.asked = changes, list[Any]()
        self.run = subprocess.run

    def __call__(self, command: list[str], **options: Any) -> Any:
        if "compare" not in command:
            return self.run(command, **options)
        there = Path(options["cwd"])
        number = int((there / "number.txt").read_text())
        self.asked.append((number, command, options["env"].get("PYTHONPATH", "").split(":")[0], there))
        change = self.changes[number]
        if change is None:
            return SimpleNamespace(returncode=4, stdout="", stderr="ERROR: not found: no such workload\n\n")
        folder = Path(command[command.index("--report") + 1])
        folder.mkdir(parents=True)
        jsonfile.write(report(verdict(change)), folder / "report.json")
        return SimpleNamespace(returncode=0, stdout="", stderr="")


def test_each_commit_is_compared_in_a_temporary_work_tree(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Compared({1: 0.0, 2: None, 3: 0.05})
    monkeypatch.setattr(bisection.subprocess, "run", compared)
    (repository / "inner" / "number.txt").write_text("999")  # the checkout must stay unchanged
    done = CliRunner().invoke(main, ["bisect", ID, "--good", "HEAD~3"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split('"')[1] == "number 3"
    assert "against " in done.stdout
    assert "one of the skipped commits between the two may be the cause" in done.stdout
    assert ": ERROR: not found: no such workload" in done.stdout
    assert [number for number, *_ in compared.asked] == [3, 1, 2, 3]
    _, command, place, there = compared.asked[0]
    assert command[1:5] == ["-P", "-m", "perfsuite", "compare"]
    assert command[6] == ID
    assert there == Path(place) / "inner"
    assert not there.exists()
    assert git(repository, "worktree", "list").count("\n") == 0
    assert (repository / "inner" / "number.txt").read_text() == "999"


def test_wrong_arguments_are_reported_in_one_line(repository: Path) -> None:
    for arguments, words in (
        (["dots", "--good", "HEAD~1"], "Error: there is no workload here that dots could be; give a whole id"),
        ([ID, "--good", "never"], "Error: revision never is not in this repository"),
    ):
        done = CliRunner().invoke(main, ["bisect", *arguments])
        assert done.exit_code == COULD_NOT_BEGIN
        assert done.output.startswith(words), done.output
        assert done.output.count("\n") == 1


def listing(*ids: str, stderr: str = "") -> Any:
    """Return a stand-in for `perfsuite list --json` that lists these workloads."""
    run, listed = subprocess.run, "" if stderr else json.dumps([{"id": id} for id in ids])

    def process(command: list[str], **options: Any) -> Any:
        if "list" in command:
            return SimpleNamespace(returncode=0, stdout=listed, stderr=stderr)
        return run(command, **options)

    return process


def test_workload_may_be_named_by_a_unique_part(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ID.replace("large", "small")
    monkeypatch.setattr(bisection.subprocess, "run", listing(ID, other))
    for name in (ID, "dots[large]", "dots::speed[large]", "LARGE"):
        assert bisection.workload_named(name, repository) == ID
    gone = "tests/test_gone.py::gone::speed[x]"
    assert bisection.workload_named(gone, repository) == gone  # other commits may have it
    for name, words in (("dots", "fits 2 workloads: .*; name one"), ("lorge", f"the nearest: {re.escape(ID)}$")):
        with pytest.raises(PerfsuiteError, match=words):
            bisection.workload_named(name, repository)
    monkeypatch.setattr(bisection.subprocess, "run", listing(stderr="\nERROR: a wrong option\n"))
    with pytest.raises(
        PerfsuiteError, match=r"^the workloads here cannot be listed: ERROR: a wrong option; give a whole"
    ):
        bisection.workload_named("dots", repository)


def counted(launches: int, before: int) -> Measurement:
    sides = {
        name: SideRecord(device_s=1e-5, wall_s=2e-5, blocks_s=(1e-5,), peak_bytes=None, host_syncs=0, launches=count)
        for name, count in (("optimized", launches), ("accepted", before))
    }
    return Measurement(
        id=ID,
        pair="dots",
        workload="large",
        device="cuda",
        clock="device",
        direction="forward",
        dtype="float32",
        sizes={},
        seed=0,
        sides=sides,
        log_ratios={"accepted": (0.0,)},
    )


def test_counts_are_compared_instead_of_times() -> None:
    found = change_of(report(verdict(0.0), counted(9, 7), counted(8, 7)), "launches")
    assert (found.value, found.low, found.shown) == (1.0, 1.0, "+1 launches")
    with pytest.raises(SkippedError, match="no count of memory on this device"):
        change_of(report(verdict(0.0), counted(9, 7)), "memory")
    broken = verdict(None, Status.NOT_EQUIVALENT, f"NOT_EQUIVALENT {ID}: output is wrong")
    for by in ("time", "launches"):
        for measured in ((), (counted(9, 7),)):
            with pytest.raises(SkippedError, match=r"^output is wrong$"):
                change_of(report(broken, *measured), by)


SLOW_PAIR = """
import time

from perfsuite import Pair, Workload, tensor


def plain(x):
    return x * 3


def fast(x):
    time.sleep({pause})
    return x * 3


thrice = Pair(
    reference=plain, optimized=fast, inputs={{"x": tensor("n")}}, gradients=False,
    workloads=[Workload("small", n=8, clock="wall")],
)
"""


@FULLY
def test_bisect_finds_the_planted_commit_with_real_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("__pycache__/\n.perfsuite/\n")
    for number in range(5):
        (tmp_path / "test_thrice.py").write_text(SLOW_PAIR.format(pause=0.002 if number < 3 else 0.0023))
        (tmp_path / "number.txt").write_text(str(number))
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "--quiet", "-m", f"number {number}")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["bisect", "test_thrice.py::thrice::speed[small]", "--good", "HEAD~4"])
    assert done.exit_code == 0, done.output
    assert '"number 3"' in done.stdout.splitlines()[0]
