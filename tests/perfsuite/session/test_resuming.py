"""An interrupted acceptance resumes where it was, only on the same commit and machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from builders import MACHINE
from scratch import SMALL, TWO_LINES, Failure, Project, fails, lines_with, times

from perfsuite.records import Measurement, Status
from perfsuite.revisions.revision import State
from perfsuite.session.resuming import Kept
from perfsuite.session.tasks import Outcome
from perfsuite.system import machine

pytest_plugins = ["pytester"]

CLEAN = State(revision="1a2b3c4")


def kept(folder: Path, state: State = CLEAN, **fields: object) -> Kept:
    return Kept(folder / ".perfsuite/accept", state, replace(MACHINE, **fields), 5)  # type: ignore[arg-type]


def filled(folder: Path) -> list[Measurement]:
    """Keep three measurements of two workloads, and return them."""
    made = [builders.measurement(id, seed=n) for n, id in enumerate(["a", "b", "a"])]
    file = kept(folder)
    for m in made:
        file.add(m.id, m)
    return made


def test_measurements_are_kept_until_forgotten(tmp_path: Path) -> None:
    one, two, three = filled(tmp_path)
    assert kept(tmp_path).load(["a", "b", "c"]) == {"a": [one, three], "b": [two]}
    assert kept(tmp_path).load(["b"]) == {"b": [two]}
    assert (tmp_path / ".perfsuite/.gitignore").read_text() == "*\n"
    kept(tmp_path).forget()
    assert kept(tmp_path).load(["a", "b"]) == {}
    kept(tmp_path).forget()


def test_failures_are_not_kept(tmp_path: Path) -> None:
    kept(tmp_path).add("a", Failure(status=Status.UNMEASURED, message="it hangs"))
    assert not (tmp_path / ".perfsuite").exists()


def test_measurements_of_another_revision_or_machine_are_not_loaded(tmp_path: Path) -> None:
    filled(tmp_path)
    assert kept(tmp_path, State(revision="5d6e7f8")).load(["a"]) == {}
    for change in ({"driver": "590.1"}, {"torch": "2.12.0"}, {"power_limit_w": 500.0}, {"cores": 8}):
        assert kept(tmp_path, **change).load(["a"]) == {}
    assert Kept(tmp_path / ".perfsuite/accept", CLEAN, MACHINE, 5, more=True).load(["a"]) == {}  # it times no rivals
    assert len(kept(tmp_path).load(["a"])["a"]) == 2


@pytest.mark.parametrize("state", [State(revision="1a2b3c4", dirty=True), State(problem="it is not in git")])
def test_nothing_is_kept_for_a_dirty_tree_or_outside_git(tmp_path: Path, state: State) -> None:
    file = kept(tmp_path, state)
    file.add("a", builders.measurement("a"))
    assert not (tmp_path / ".perfsuite").exists()
    assert file.load(["a"]) == {}
    file.forget()


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda data: data[:-40], [0]),
        (lambda data: data + b"\n{", [0, 2]),
        (lambda data: data + b"\n\xff\xfe\x00", [0, 2]),
        (lambda data: data + b"\n" + b"[" * 100_000, [0, 2]),
        (lambda data: data + b'\n{"id": "a"}\n[]\nnull', [0, 2]),
        (lambda data: data.replace(b'"seed": 2', b'"seed": "2"'), [0]),
        (lambda data: data.replace(b'"seed": 0', b'"seed": "0"'), [2]),
    ],
)
def test_only_damaged_lines_are_ignored(tmp_path: Path, damage: Callable[[bytes], bytes], left: list[int]) -> None:
    made = filled(tmp_path)
    (path,) = (tmp_path / ".perfsuite/accept").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    undamaged = [made[n] for n in left]
    assert kept(tmp_path).load(["a", "b"]) == {"a": undamaged, "b": [made[1]]}
    kept(tmp_path).add("a", made[2])  # on its own line, even after a truncated one
    assert kept(tmp_path).load(["a"]) == {"a": [*undamaged, made[2]]}


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / ".perfsuite").write_text("")
    file = kept(tmp_path)
    file.add("a", builders.measurement("a"))
    assert file.load(["a"]) == {}
    file.forget()


# --- through the command --------------------------------------------------------------------------------------------


def interrupted(process: int, then: Callable[[], object] = lambda: None) -> Callable[[str, int, bool], Outcome]:
    """Return the outcomes of `times`, with Ctrl-C in the given process."""
    quiet = times()

    def outcome(id: str, number: int, second: bool) -> Outcome:
        if number == process and id == SMALL:
            then()
            raise KeyboardInterrupt
        found: Outcome = quiet(id, number, second)
        return found

    return outcome


@pytest.fixture
def scale(project: Project) -> Project:
    project.write("test_scale.py", TWO_LINES)
    project.write("test_other.py", TWO_LINES.replace("scale", "other"))
    project.commit()
    return project


def accept(project: Project, outcome: object) -> tuple[int, str, int]:
    """Return (exit code, output, number of timed processes)."""
    fake = project.measured(outcome)
    done = project.cli("accept", "--reason", "the first")
    return done.exit_code, done.output, sum(len(ids) for ids, _ in fake.calls)


def test_an_interrupted_acceptance_resumes(scale: Project) -> None:
    code, output, _ = accept(scale, interrupted(2))
    assert code == 2, output
    assert not (scale.path / "baselines").exists()
    code, output, timed = accept(scale, times())
    assert code == 0, output
    assert lines_with(output, "resuming: 5 measurements of an interrupted run count")
    assert timed == 2 * 5 - 5
    assert not list((scale.path / ".perfsuite/accept").glob("*.jsonl"))
    assert accept(scale, times())[2] == 10  # the next one measures anew
    assert "2 PASS" in scale.gate().stdout.str()


def _another_commit(project: Project) -> None:
    project.commit("another")


def _another_machine(project: Project) -> None:
    here = machine.identify()
    project.monkeypatch.setattr(machine, "identify", lambda: replace(here, torch="2.99"))


@pytest.mark.parametrize("change", [_another_commit, _another_machine])
def test_an_acceptance_on_another_commit_or_machine_starts_anew(
    scale: Project, change: Callable[[Project], None]
) -> None:
    accept(scale, interrupted(2))
    change(scale)
    code, output, timed = accept(scale, times())
    assert (code, timed) == (0, 10), output
    assert "resuming" not in output


@pytest.mark.parametrize("interrupt", [False, True])
def test_measurements_are_forgotten_if_the_tree_changes_while_it_is_measured(scale: Project, interrupt: bool) -> None:
    """The next acceptance must not count measurements of code that was edited and restored."""
    quiet = times()

    def edited() -> None:
        scale.replace("test_scale.py", "3 * x", "3.0 * x")

    def outcome(id: str, number: int, second: bool) -> Outcome:
        if number == 2 and id == SMALL:
            edited()
        found: Outcome = quiet(id, number, second)
        return found

    code, output, _ = accept(scale, interrupted(2, edited) if interrupt else outcome)
    assert code == (2 if interrupt else 4), output
    scale.git("checkout", ".")
    code, output, timed = accept(scale, quiet)
    assert (code, timed) == (0, 10), output


def test_a_dirty_tree_keeps_nothing(scale: Project) -> None:
    scale.replace("test_scale.py", "3 * x", "3.0 * x")
    scale.measured(interrupted(2))
    assert scale.cli("accept", "--reason", "x", "--allow-dirty").exit_code == 2
    assert not list((scale.path / ".perfsuite").glob("accept/*"))


def test_an_acceptance_after_a_red_one_measures_again(scale: Project) -> None:
    """A workload that was slow because of a neighbour must not stay red for ever."""
    scale.replace("test_scale.py", 'clock="wall")', 'clock="wall", speedup=3.0)')
    scale.replace("test_other.py", 'clock="wall")', 'clock="wall", speedup=3.0)')
    scale.commit()
    code, output, _ = accept(scale, times(speedup=2.0))
    assert code == 1
    assert lines_with(output, "not accepted", "BELOW_FLOOR", SMALL)
    code, output, timed = accept(scale, times(speedup=4.0))
    assert (code, timed) == (0, 10), output


def test_an_acceptance_after_a_failed_workload_measures_again(scale: Project) -> None:
    hangs = Failure(status=Status.UNMEASURED, message="the optimized side hangs")
    code, output, _ = accept(scale, fails(hangs, only="scale::"))
    assert code == 1, output
    code, output, timed = accept(scale, times())
    assert (code, timed) == (0, 10), output
