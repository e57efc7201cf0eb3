"""`perfsuite compare --python`: two environments, timed alternately."""

from __future__ import annotations

import io
import json
import math
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scale import FULLY
from scratch import Project, lines_with

from perfsuite import Pair, tensor
from perfsuite.correctness import rule as rule_of_proofs
from perfsuite.correctness import truth_summaries, truths
from perfsuite.draws import inputs
from perfsuite.errors import PerfsuiteError
from perfsuite.gate import exit_codes
from perfsuite.records import Case, WorkloadProof
from perfsuite.session.environments import collection, results, rule
from perfsuite.session.environments.interpreter import Interpreter, check, describe, differences
from perfsuite.session.environments.rule import Change, Compared
from perfsuite.session.modes.environments import Environments, _costs, _differing, _with_notes
from perfsuite.timing.alternation import ENDED, Alternation, abandon

pytest_plugins = ["pytester"]

# --- alternation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "socket"  # the whole path may be too long for a socket


def test_two_processes_time_their_blocks_alternately(place: str) -> None:
    """The order A B, B A, A B lets a drift of the device affect both alike."""
    order: list[str] = []
    timing = threading.Lock()

    def process(number: int, name: str, wanted: int) -> int:
        with Alternation(place, number) as turns:
            blocks = turns.planned(lambda: wanted)
            turns.begin()
            for block in range(blocks):
                assert timing.acquire(blocking=False), "both time at once"
                order.append(f"{name}{block}")
                timing.release()
                turns.ended(block, last=block + 1 == blocks)
            return blocks

    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(process, 1, "B", 7)
        here = pool.submit(process, 0, "A", 5)
        assert (here.result(), there.result()) == (5, 5)  # the smaller of both plans
    assert order == ["A0", "B0", "B1", "A1", "A2", "B2", "B3", "A3", "A4", "B4"]


def test_waiting_for_the_other_process_is_excluded_from_the_time_limit(place: str) -> None:
    """Otherwise the waiting process would be stopped, and blamed, when the other hangs."""
    waited: list[bool] = []

    def process(number: int) -> None:
        with Alternation(place, number, waited.append if number == 0 else lambda begins: None) as turns:
            turns.planned(lambda: 2)
            turns.begin()
            for block in range(2):
                turns.ended(block, last=block == 1)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(process, number) for number in (1, 0)]:
            done.result()
    assert waited[:2] == [True, False]
    assert len(waited) >= 4
    assert waited == [True, False] * (len(waited) // 2)


@pytest.mark.parametrize("number", [0, 1])
def test_abandoned_alternation_ends_both_processes(place: str, number: int) -> None:
    abandon(place)
    with pytest.raises(PerfsuiteError, match=ENDED), Alternation(place, number) as turns:
        turns.planned(lambda: 3)


@pytest.mark.parametrize("number", [0, 1])
def test_alternation_ends_if_the_other_process_has_ended(place: str, number: int) -> None:
    def process(number: int, *, ends: bool) -> None:
        with Alternation(place, number) as turns:
            turns.planned(lambda: 3)
            if not ends:
                turns.begin()
                turns.ended(0, last=False)

    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(process, number, ends=False)
        pool.submit(process, 1 - number, ends=True).result()
        with pytest.raises(PerfsuiteError, match=ENDED):
            left.result()


# --- the other interpreter ------------------------------------------------------------------------------------------


def wrapper(folder: Path, *lines: str, name: str = "python") -> Path:
    """Write a shell script that runs these lines, and then this interpreter."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    path.chmod(0o755)
    return path


def test_differences_list_packages_and_versions(tmp_path: Path) -> None:
    about = tmp_path / "site/fast_kernels-2.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: Fast_Kernels\nVersion: 2.1\n")
    with_dot = tmp_path / "site/faster.kernels-2.2.dist-info"
    with_dot.mkdir()
    (with_dot / "METADATA").write_text("Metadata-Version: 2.1\nName: faster.kernels\nVersion: 2.2\n")
    other = wrapper(tmp_path, f'export PYTHONPATH="{tmp_path}/site:$PYTHONPATH"')
    here, there = describe(sys.executable, tmp_path), describe(str(other), tmp_path)
    assert there.path == str(other)
    assert differences(here, there) == ["fast-kernels absent → 2.1", "faster-kernels absent → 2.2"]
    assert differences(here, here) == []
    new = Interpreter(path="x", python="3.99", harness=here.harness, packages={**here.packages, "torch": "9"})
    assert differences(here, new) == [f"python {here.python} → 3.99", f"torch {here.packages['torch']} → 9"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no-such-command", "there is no such command; give the path of an interpreter"),
        ("./absent", "no such file; give the path of an interpreter, for instance .venv-new/bin/python"),
        (".", "there is no such command"),
        ("./", "no such file"),
        ("./data", "it cannot be run (Permission denied)"),
        ("/bin/true", "it is not a working Python interpreter (exit code 0)"),
        ("./broken", "it is not a working Python interpreter (no library)"),
        (
            "./bare",
            "perfsuite and pytest and torch cannot be imported there (ModuleNotFoundError: No module named",
        ),
    ],
    ids=lambda text: text.partition(" ")[0].replace("/", "") or None,
)
@pytest.mark.usefixtures("place")
def test_interpreter_that_cannot_measure_is_refused_in_one_line(kind: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    wrapper(tmp_path, "echo no library >&2", "exit 1", name="broken")
    bare = wrapper(tmp_path, name="bare")
    bare.write_text(bare.read_text().replace('"$@"', '-S -E "$@"'))
    with pytest.raises(PerfsuiteError) as raised:
        describe(kind, tmp_path)
    message = str(raised.value)
    assert message.startswith(f"--python {kind}: ")
    assert says in message
    assert "\n" not in message


def test_other_version_of_perfsuite_is_refused() -> None:
    def version(number: str) -> Interpreter:
        return Interpreter(path=f"/{number}/python", python="3.12", harness=number)

    check(version("1.0"), version("1.0"))
    says = "--python /0.9/python: it has perfsuite 0.9, and this is 1.0; install the same version in both"
    with pytest.raises(PerfsuiteError, match=says):
        check(version("1.0"), version("0.9"))


# --- the rule -------------------------------------------------------------------------------------------------------


def changes(rng: random.Random, shifts: list[float], sd: float, pairs: int = 4, clock: str = "device") -> list[Change]:
    """Return the rule's verdicts for workloads with true log-ratios `shifts`; noise differs between workloads."""
    means = {}
    for number, shift in enumerate(shifts):
        own = sd * math.exp(rng.gauss(0, 0.4))
        means[str(number)] = [rng.gauss(shift, own) for _ in range(pairs)]
    found = rule.estimates(means, dict.fromkeys(means, clock))
    return [rule.change_of(one, len(means))[0] for one in found.values()]


@pytest.mark.parametrize("sd", [0.002, 0.01, 0.04])
def test_unchanged_workloads_seldom_have_a_false_change(sd: float) -> None:
    """The false alarm rate of a run of 40 workloads is designed to be 1%."""
    rng = random.Random(7)
    runs = [changes(rng, [0.0] * 40, sd) for _ in range(200)]
    assert sum(any(c is not Change.SAME for c in run) for run in runs) <= 6


def test_a_large_change_is_found_in_its_direction() -> None:
    rng = random.Random(3)
    for _ in range(50):
        found = changes(rng, [0.1, -0.1, *[0.0] * 38], 0.005)
        assert found[:2] == [Change.SLOWER, Change.FASTER]


def test_change_below_1_percent_is_not_reported() -> None:
    means = {str(n): [0.008 + d for d in (0.0, 1e-5, -1e-5, 2e-5)] for n in range(10)}
    found = rule.estimates(means, dict.fromkeys(means, "device"))
    assert {rule.change_of(one, 10)[0] for one in found.values()} == {Change.SAME}


def test_few_workloads_do_not_use_their_own_noise_alone() -> None:
    """Two processes that agree by chance do not make a change of 2% certain."""
    one = rule.estimates({"a": [0.02, 0.0201]}, {"a": "device"})["a"]
    assert rule.change_of(one, 1)[0] is Change.SAME
    rng = random.Random(1)  # the noise was measured with a softmax on two shared cores
    false = [c for _ in range(500) for c in changes(rng, [0.0], 0.038, pairs=2, clock="wall") if c is not Change.SAME]
    assert len(false) <= 10


# --- the command ----------------------------------------------------------------------------------------------------

PAIRS = """
    import os
    import time

    from perfsuite import Pair, Workload, tensor

    try:
        import fast_kernels as installed
    except ImportError:
        installed = None


    def double(x):
        return x + x


    noted = []


    def slower(x):
        if not noted:  # the first inputs of each process
            noted.append(True)
            with open("there" if installed else "here", "a") as file:
                file.write(f"{x.double().sum().item()}\\n")
        if installed:
            time.sleep(0.005)
        return 2 * x


    def wrong(x):
        return 3 * x if installed else 2 * x


    def ends(x):
        if installed:
            os._exit(7)
        return 2 * x


    def moved(x):
        return x * 2.001 if installed else x + x


    for function in (slower, wrong, ends, moved):
        globals()[function.__name__] = Pair(
            name=function.__name__,
            reference=moved if function is moved else double,
            optimized=function,
            inputs={"x": tensor("n")},
            workloads=[Workload(name="small", sizes={"n": 64})],
        )
"""


def compared(project: Project) -> tuple[str, dict[str, dict[str, Any]]]:
    """Compare PAIRS in this environment and in one with another package; return (stderr, the workloads)."""
    project.write("test_kernels.py", PAIRS)
    project.write("site/fast_kernels.py", "")
    project.write("site/fast_kernels-2.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: fast_kernels\nVersion: 2.1")
    other = wrapper(project.path, f'export PYTHONPATH="{project.path}/site:$PYTHONPATH"')
    done = project.process(
        "perfsuite", "compare", "--python", str(other), "--processes", "2", "test_kernels.py", "--json"
    )
    assert done.returncode == exit_codes.CODE_AT_FAULT, done.stderr
    found = json.loads(done.stdout)
    assert found["differences"] == ["fast-kernels absent → 2.1"]
    assert lines_with(done.stderr, "fast-kernels absent → 2.1")
    return done.stderr, {w["id"].rpartition("::speed")[0].rpartition("::")[2]: w for w in found["workloads"]}


@FULLY
def test_compare_python_reports_slower_wrong_and_crashing_workloads(project: Project) -> None:
    """A package of the other environment makes one workload slower, one wrong, and ends one's process."""
    shown, found = compared(project)
    assert {n: w["change"] for n, w in found.items()} == {
        "slower": "slower",
        "wrong": "not the same function",
        "ends": "not compared",
        "moved": "not the same function",
    }
    here, there = found["slower"]["seconds"]
    assert there > here + 0.004
    assert len(found["slower"]["means"]) == 2
    assert found["slower"]["interval"][0] > 2
    drawn = {(project.path / where).read_text() for where in ("here", "there")}
    assert len(drawn) == 1, "both must have the same inputs"
    assert lines_with(shown, "1 slower, 2 not the same function, 1 not compared")
    assert lines_with(shown, "slower[small]", "slower")
    assert found["wrong"]["message"].startswith("there, ")
    assert found["wrong"]["message"].endswith("; here it is proven")
    assert "there, the optimized side ended" in found["ends"]["message"]
    words = "in float64 the reference computes other values there: output differs by "
    assert found["moved"]["message"].startswith(words)


# --- results of the references ----------------------------------------------------------------------------------------


def summaries(reference: Any, dtype: str = "float32", seed: int = 3) -> dict[str, tuple[float, ...]]:
    pair = Pair(name="p", reference=reference, optimized=reference, inputs={"x": tensor("n")}, gradients=False)
    case = Case(dtype=dtype, sizes={"n": 5000}, inputs={}, seed=seed)
    truth = truths.establish(pair, case, "cpu", gradients=False, replicas=rule_of_proofs.NONE)
    return truth_summaries.of(truth, inputs.build(pair, case, "cpu"))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return 2 * x * (1 + 1e-14)


def one_element(x: torch.Tensor) -> torch.Tensor:
    made = 2 * x
    made[17] += 0.1
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("there", "differs"),
    [
        (lambda x: x + x, ""),
        (rounded, ""),
        (lambda x: 2.0001 * x, "output differs by .* of which rounding explains"),
        (one_element, "output differs by 0.001"),
        (lambda x: (2 * x)[:-1], "output has 5000 elements here and 4999 there"),
        (lambda x: 2 * x / (x != x[3]), "output has 0 NaN or infinite elements here and 1 there"),
        (lambda x: {"sum": 2 * x}, r"it returns output here and output\['sum'\] there"),
    ],
)
def test_other_values_of_the_reference_are_found(there: Any, differs: str, dtype: str) -> None:
    here, other = summaries(lambda x: x + x, dtype), summaries(there, dtype)
    assert results.are_inputs_equal(here, other)
    found = results.difference(here, other)
    assert re.match(differs, found) if differs else not found, found


def test_an_index_that_differs_is_found() -> None:
    here, there = summaries(torch.argsort), summaries(lambda x: torch.argsort(x).flip(0))
    assert results.difference(here, there).startswith("output differs by ")
    assert not results.difference(here, summaries(torch.argsort))


def test_results_of_other_inputs_are_not_compared() -> None:
    here, there = (summaries(lambda x: 2 * x, seed=seed) for seed in (3, 4))
    assert not results.are_inputs_equal(here, there)
    proofs = [{"a": WorkloadProof(id="a", seed=3, summaries=s)} for s in (here, there)]
    assert _differing(*proofs) == {}
    measured = {"a": Compared(id="a", change=Change.SAME)}
    assert _with_notes(measured, *proofs)["a"].costs == (results.NOT_COMPARED,)
    assert _with_notes(measured, proofs[0], proofs[0]) == measured


@pytest.mark.parametrize("problems", [[], ["the interpreter cannot be used"]])
def test_run_that_ends_early_reports_that_it_wrote_no_file(problems: list[str]) -> None:
    run: Any = object.__new__(Environments)
    run.found, run.problems, run.notes, run.written = None, problems, [], {}
    lines: list[str] = []
    reporter = SimpleNamespace(
        _tw=SimpleNamespace(_file=io.StringIO()),
        section=lambda *given, **more: None,
        write_line=lambda line, **more: lines.append(line),
    )
    run.pytest_terminal_summary(reporter)
    assert lines == (problems or ["✗ the run ended before all was compared: no file is written"])


@pytest.mark.parametrize(
    ("counted", "says"),
    [
        ([(10, 11), (12, 13)], ("kernel launches 10 here, 11 there",)),
        ([(10, 11), (11, 10)], ()),
        ([(10, 11), (10, 10)], ()),
        ([(10, 11), (None, 10)], ()),
    ],
)
def test_count_differs_only_if_one_environment_always_has_more(
    counted: list[tuple[Any, Any]], says: tuple[str, ...]
) -> None:
    def measured(launches: int | None) -> Any:
        return SimpleNamespace(sides={"optimized": SimpleNamespace(launches=launches, peak_bytes=None, host_syncs=0)})

    assert _costs([(measured(a), measured(b)) for a, b in counted]) == says


@pytest.mark.parametrize(
    ("conftest", "says"),
    [
        ("", {"test_lacking.py": "ModuleNotFoundError: No module named 'only_here'"}),
        ("import os; os._exit(3)", "pytest ends while it collects there (exit code 3)"),
        ("raise ValueError('no kernels here')", "pytest cannot collect there (ValueError: no kernels here)"),
        ("import os; os.write(1, b'\\xff\\n'); os.write(2, b'\\xff\\n'); os._exit(3)", "pytest ends while it collects"),
    ],
)
def test_modules_that_the_other_environment_cannot_import_are_named(
    tmp_path: Path, conftest: str, says: dict[str, str] | str
) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_right.py").write_text("def test_one(): pass")
    (tmp_path / "test_lacking.py").write_text("import only_here")
    there = Interpreter(path=sys.executable, python="3", harness="0")
    modules = ["test_right.py", "test_lacking.py"]
    arguments = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    if isinstance(says, dict):
        assert collection.failures(there, modules, arguments, tmp_path) == says
        return
    with pytest.raises(PerfsuiteError) as caught:
        collection.failures(there, modules, arguments, tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare"], "give a REVISION, or --python another environment's interpreter"),
        (["compare", "--python", "./absent"], "--python ./absent: no such file"),
        (["compare", "HEAD", "--python", "./absent"], "HEAD is no path, and --python takes the place of a revision"),
        pytest.param(
            ["compare", "--python", sys.executable, "-k", "nothing_of_the_name"], "nothing to compare", marks=FULLY
        ),
    ],
)
def test_wrong_compare_arguments_are_refused_in_one_line(arguments: list[str], says: str, project: Project) -> None:
    project.write("test_kernels.py", PAIRS)
    done = project.process("perfsuite", *arguments)
    assert done.returncode not in (0, 1)
    assert lines_with(done.stdout + done.stderr, says)
    assert "Traceback" not in done.stdout + done.stderr
