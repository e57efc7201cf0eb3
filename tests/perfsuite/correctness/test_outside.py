"""A side that is right only under test is detected by calling it in a process without a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scale import FULLY
from scratch import Project

from perfsuite.session import aot_compile

pytest_plugins = ["pytester"]

MODULE = """
    import os
    import sys
    import time
    import torch
    import perfsuite
    from functools import partial
    from perfsuite import Workload, stateful, tensor
    import uses_errors
    import uses_perfsuite
    from sides import at_import, deceives

    Pair = partial(perfsuite.Pair, inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)])


    def right(x):
        return torch.exp(x)


    def under_test():
        return "PYTEST_CURRENT_TEST" in os.environ


    def imported():
        return "hypothesis" in sys.modules


    def called_by_harness():
        frame = sys._getframe()
        while frame is not None:
            if "perfsuite" in frame.f_code.co_filename.split(os.sep):
                return True
            frame = frame.f_back
        return False


    def named_in_command():
        command, doc = open("/proc/self/cmdline").read(), sys.modules["__main__"].__doc__ or ""
        text = " ".join([*sys.orig_argv, *sys.argv, command, doc])
        return "pytest" in text or "perfsuite" in text


    def only_where(condition, otherwise=lambda x: x + 1.0):
        return lambda x: x.exp() if condition() else otherwise(x)


    def crash(x):
        os._exit(3)


    def complain(x):
        raise ValueError("not under test")


    def hang(x):
        time.sleep(600)


    def adding(by):
        def make(x):
            def step(y):
                x.add_(y if by is None or by() else 2 * y)
            return step
        return stateful(make)


    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, honest):
            ctx.honest = honest
            made = x.exp()
            ctx.save_for_backward(made)
            return made

        @staticmethod
        def backward(ctx, gradient):
            (made,) = ctx.saved_tensors
            return gradient * made * (1.0 if ctx.honest or under_test() else 2.0), None


    by_backward = Pair(reference=right, optimized=lambda x: Backward.apply(x, False))
    named_outputs = Pair(
        reference=lambda x: {"a": x.exp(), "b": x.sum()},
        optimized=lambda x: {"b": x.sum(), "a": x.exp()},
    )
    many_outputs = Pair(
        reference=lambda x: tuple(x[:n].exp() for n in range(12)),
        optimized=lambda x: tuple(x[:n].exp() for n in range(12)),
    )
    honest_backward = Pair(reference=right, optimized=lambda x: Backward.apply(x, True))
    by_variable = Pair(reference=right, optimized=only_where(under_test))
    by_module = Pair(reference=right, optimized=only_where(imported))
    by_frame = Pair(reference=right, optimized=only_where(called_by_harness))
    by_command = Pair(reference=right, optimized=only_where(named_in_command))
    whole_numbers = Pair(reference=lambda x: x.argsort(stable=True), optimized=lambda x: x.sort(stable=True).indices)
    by_import = Pair(reference=right, optimized=at_import)
    by_crash = Pair(reference=right, optimized=only_where(under_test, crash))
    by_error = Pair(reference=right, optimized=only_where(under_test, complain))
    by_hang = Pair(reference=right, optimized=only_where(under_test, hang), time_limit=10)
    by_step = Pair(
        reference=adding(None), optimized=adding(under_test), step_inputs={"y": tensor("n")}, mutates={"x"}
    )
    honest = Pair(reference=right, optimized=only_where(lambda: under_test() or True))
    def scaling(by):
        def make(x):
            def step(y):
                x.add_(y.mul_(2 if by() else 3))
            return step
        return stateful(make)


    changed_step_inputs = Pair(
        reference=scaling(lambda: True), optimized=scaling(lambda: 1), step_inputs={"y": tensor("n")},
        mutates={"x", "y"},
    )
    honest_steps = Pair(
        reference=adding(None), optimized=adding(lambda: True), step_inputs={"y": tensor("n")}, mutates={"x"}
    )


    def training(rate):
        def make(net):
            def step(y):
                gradients = torch.autograd.grad(net(y).square().sum(), list(net.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(net.parameters(), gradients):
                        parameter.sub_(rate() * gradient)
            return step
        return stateful(make)


    Training = partial(
        Pair,
        reference=training(lambda: 0.125),
        inputs={"net": perfsuite.module(lambda: torch.nn.Linear(3, 2))},
        step_inputs={"y": tensor("n", 3)},
        mutates={"net"},
    )
    by_rate = Training(optimized=training(lambda: 0.125 if under_test() else 0.25))
    honest_training = Training(optimized=training(lambda: 1 / 8))
    by_setting = Pair(
        reference=lambda x: x * (2.0 if torch.get_float32_matmul_precision() == "high" else 3.0),
        optimized=lambda x: (x + x) if torch.get_float32_matmul_precision() == "high" else (x + x + x),
    )
    listed = [Pair(reference=right, optimized=lambda x: x.exp())]
    unsendable = Pair(
        reference=lambda x, f: f(x), optimized=lambda x, f: f(x * 1.0),
        inputs={"x": tensor("n"), "f": perfsuite.constant(lambda x: x + 1.0)},
    )
"""

SIDES = """
    import sys

    deceives = any(name in sys.modules for name in ("pytest", "perfsuite", "hypothesis"))


    def at_import(x):
        return x.exp() if deceives else x + 1.0
"""

NOTES = "notes_its_process"
HELPERS = {
    "sides.py": SIDES,
    "uses_errors.py": "from perfsuite.errors import PairError",
    "uses_perfsuite.py": "import perfsuite",
}
WRONG = "returns a different answer where no test is running"


def write(project: Project, module: str = MODULE) -> None:
    for name, text in {**HELPERS, "test_sides.py": module}.items():
        project.write(name, text)


@pytest.fixture
def high_precision() -> Iterator[None]:
    """Change a setting as a conftest does; the process without a test must have it, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


ENDING = "by_crash or by_error or by_hang"
"""Cases that each need a new process."""


@FULLY
def test_a_side_that_exits_raises_or_hangs_outside_a_test_is_reported(project: Project) -> None:
    write(project)
    result = project.run("-m", "correctness", "-k", f"outside and ({ENDING})")
    output = result.stdout.str()
    result.assert_outcomes(failed=3)
    assert "by_crash: where no test is running, the optimized side ends the process with exit code 3" in output
    assert "by_error: where no test is running, the optimized side raises ValueError: not under test" in output
    assert "by_hang: where no test is running, the optimized side hangs: stopped after 4 s; if it compiles" in output
    assert "raise the pair's time_limit of 10 s" in output


@pytest.mark.usefixtures("high_precision")
def test_a_side_that_is_right_only_under_test_is_rejected(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest"])  # as without xdist
    write(project)
    result = project.run("-m", "correctness", "-k", f"outside and not ({ENDING})", "-rs")
    output = result.stdout.str()
    result.assert_outcomes(passed=10, failed=8, skipped=1)
    for name in (
        "by_variable",
        "by_module",
        "by_frame",
        "by_command",
        "by_import",
        "by_step",
        "by_rate",
        "by_backward",
    ):
        assert f"{name}: the optimized side {WRONG}" in output, name
    assert "by_backward: gradient of x of the optimized side is wrong" in output
    assert "not called outside of a test: an input cannot be given to another process" in output


@pytest.mark.parametrize("others", [pytest.param("equivalence", marks=FULLY), "integrity"])
def test_other_proofs_do_not_detect_a_side_that_is_right_only_under_test(project: Project, others: str) -> None:
    write(project)
    project.run("-m", "correctness", "-k", f"{others} and (by_variable or by_import)").assert_outcomes(passed=2)


@FULLY
@pytest.mark.parametrize("isolate", ["never", "always"])
def test_no_process_and_no_file_is_left(
    project: Project, tmp_path: Path, isolate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    write(project, MODULE.replace("import os\n", f"import os\n    import {NOTES}\n"))
    project.write(f"{NOTES}.py", f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()")
    done = project.process(
        "pytest", "-m", "correctness", "-k", "outside and honest and not steps", f"--perfsuite-isolate={isolate}"
    )
    assert done.returncode == 0, done.stdout
    pids = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(pids) >= 2
    end = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert not list(temporary.iterdir())


PREPARED = """
    import os, pathlib, time
    import torch
    from perfsuite import Pair, Workload, tensor

    notes = pathlib.Path(__file__).with_name("imported")
    notes.mkdir(exist_ok=True)
    (notes / str(os.getpid())).touch()


    def reference(x):
        if "equivalence" in os.environ["PYTEST_CURRENT_TEST"]:
            end = time.monotonic() + 60 * {spare}
            while len(list(notes.iterdir())) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            assert len(list(notes.iterdir())) == 1 + {spare}
        return x.exp()


    one = Pair(
        reference=reference, optimized=lambda x: x.exp(), inputs={{"x": tensor("n")}}, workloads=[Workload("w", n=8)]
    )
"""


@pytest.mark.parametrize("spare", [0, 1])
def test_outside_process_imports_the_module_during_proofs_if_cores_are_free(
    project: Project, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    cores = 2 * aot_compile.SPARE_CORES if spare else 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    project.write(f"test_{cores}_cores.py", PREPARED.format(spare=spare))  # the process caches modules by name
    project.run("-m", "correctness", "-k", "equivalence or outside").assert_outcomes(passed=2)
