"""Collection of a module-level Pair by pytest, selection of its items, and the text of a failure."""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap

import pytest
from scale import FULLY
from scratch import SMALL, TWO_LINES, Project, lines_with, times

from perfsuite.gate.exit_codes import UNDECIDED
from perfsuite.system import device_nodes

pytest_plugins = ["pytester"]

OF_ALL_PAIRS = ("integrity", "contexts", "effects", "outside")
"""Items that every pair has, whatever it declares."""


def collected(result: pytest.RunResult) -> list[str]:
    """Return the node ids that `--collect-only -q` prints."""
    assert result.ret == 0, result.stdout.str()
    return [line for line in result.stdout.str().splitlines() if "::" in line]


def failure(result: pytest.RunResult) -> str:
    """Return the output of a failed run, after checking that it shows no internals of the harness."""
    output = result.stdout.str()
    assert result.ret == 1, output
    assert "INTERNALERROR" not in output
    assert "Traceback" not in output
    assert "perfsuite/" not in output.split("FAILURES")[-1], output  # no frame of the harness
    assert "hypothesis" not in output.split("FAILURES")[-1].lower(), output
    return output


def reproduction(output: str) -> list[str]:
    """Return the arguments of the line that reproduces a failure; if CI is set, the summary repeats the line."""
    line, *_ = lines_with(output, "reproduce: pytest ")
    return shlex.split(line.removeprefix("reproduce: pytest "))


def test_project_in_a_folder_with_a_bracket_is_collected(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest itself refuses such a path if it is given no argument."""
    folder = project.write("pro[1]ject/test_scale.py", TWO_LINES).parent
    project.write("pro[1]ject/pytest.ini", "[pytest]")
    monkeypatch.chdir(folder)
    assert SMALL in collected(project.run("--collect-only", "-q"))


def test_pairs_in_a_path_with_a_bracket_are_refused_in_one_line(project: Project) -> None:
    """A worker process gets the ids of its items as arguments, and pytest takes such a path for parameters."""
    project.write("tests[gpu]/test_scale.py", TWO_LINES)
    project.write("tests[gpu]/test_plain.py", "def test_plain(): pass")
    result = project.run("-m", "correctness")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert lines_with(result.stdout.str(), "pairs are declared in tests[gpu]/test_scale.py, but pytest", "rename it")
    assert "test_plain.py" not in result.stdout.str()
    done = project.cli("list")
    assert lines_with(done.output, "Interrupted: tests[gpu]/test_scale.py: pairs are declared in tests[gpu]")


FULL = """
    from perfsuite import Pair, Workload, tensor


    def slow(x, y):
        return (x * y).sum(-1)


    def fast(x, y):
        return (x * y).sum(-1)


    dot = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("m", "n"), "y": tensor("m", "n")},
        dtypes=("float32", "bfloat16"),
        max_examples=6,
        truth=slow,
        variants={"other": fast},
        rivals={"rival": slow},
        workloads=[
            Workload("small", m=4, n=16),
            Workload("large", m=8, n=32, direction="both", speedup=1.5),
            Workload("gpu", m=8, n=32, device="cuda"),
        ],
    )


    def test_beside():
        assert fast.__name__ == "fast"
"""
PROOFS = [
    "equivalence[float32]",
    "equivalence[bfloat16]",
    "equivalence[float32-other]",
    "equivalence[bfloat16-other]",
    "gradients[float32]",
    "gradients[bfloat16]",
    "gradients[float32-other]",
    "gradients[bfloat16-other]",
    "integrity",
    "contexts",
    "effects",
    "outside",
    "truth",
]
SPEEDS = ["speed[small]", "speed[large]", "speed[gpu]"]


# --- what is collected ----------------------------------------------------------------------------------------------


def test_a_pair_becomes_items_beside_ordinary_tests(project: Project) -> None:
    project.write("tests/test_dot.py", FULL)
    found = collected(project.run("--collect-only", "-q"))
    names = [*(f"dot::{p}" for p in PROOFS), "test_beside", *(f"dot::{s}" for s in SPEEDS)]
    assert found == [f"tests/test_dot.py::{name}" for name in names]  # timed last: nothing runs beside them


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (["-m", "correctness"], PROOFS),
        (["-m", "perf"], SPEEDS),
        (["-m", "gpu"], ["speed[gpu]"]),
        (["-m", "perf and not gpu"], SPEEDS[:2]),
        (["-k", "dot and gradients"], [p for p in PROOFS if p.startswith("gradients")]),
        (["-k", "large"], ["speed[large]"]),
        (["-m", "not correctness and not perf"], None),
        (["tests/test_dot.py::dot::integrity"], ["integrity"]),
        (["tests/test_dot.py::dot"], [*PROOFS, *SPEEDS]),
        (["tests/test_dot.py::dot::speed[small]"], ["speed[small]"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith(("-", "tests")) else "",
)
def test_markers_keywords_and_node_ids_select_items(
    project: Project, selection: list[str], expected: list[str] | None
) -> None:
    project.write("tests/test_dot.py", FULL)
    project.measured(times())
    found = collected(project.run("--collect-only", "-q", *selection))
    names = ["test_beside"] if expected is None else [f"dot::{e}" for e in expected]
    assert found == [f"tests/test_dot.py::{name}" for name in names]


def test_markers_are_registered(project: Project) -> None:
    output = project.run("--markers").stdout.str()
    for marker in ("correctness", "perf", "gpu", "multi_gpu"):
        assert f"@pytest.mark.{marker}:" in output


def test_help_lists_the_options(project: Project) -> None:
    output = project.run("--help").stdout.str()
    for option in ("--perfsuite-profile", "--perfsuite-case", "--perfsuite-report", "--perfsuite-baselines"):
        assert option in output


def test_functions_and_mixed_lists_are_not_collected_as_pairs(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.write(
        "test_more.py",
        """
        from perfsuite import Pair, Workload, tensor

        def make():
            return Pair(
                reference=abs, optimized=abs, inputs={"x": tensor("n")}, workloads=[Workload("small", n=8)]
            )

        def made(by=2) -> Pair:
            return make()

        mixed = [make(), 3]
        """,
    )
    assert {i.partition("::")[0] for i in collected(project.run("--collect-only", "-q"))} == {"test_scale.py"}


def test_a_pair_without_gradients_has_no_gradients_item(project: Project) -> None:
    without_gradients = TWO_LINES.replace('tensor("n")', 'tensor("n", dtype="bool")')
    project.write("test_scale.py", without_gradients)
    names = [i.rpartition("::")[2] for i in collected(project.run("--collect-only", "-q"))]
    assert names == ["equivalence[float32]", *OF_ALL_PAIRS, "speed[small]"]
    project.write("test_scale.py", TWO_LINES.replace("workloads=", "gradients=False,\n        workloads="))
    names = [i.rpartition("::")[2] for i in collected(project.run("--collect-only", "-q"))]
    assert names == ["equivalence[float32]", *OF_ALL_PAIRS, "speed[small]"]


def test_one_pair_under_two_names_is_refused(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES + "\n    again = scale\n")
    result = project.run()
    assert result.ret == 2
    assert lines_with(result.stdout.str(), "one pair is bound to two names", "'scale' and 'again'")


def test_suites_without_pairs_are_unaffected(project: Project) -> None:
    project.write(
        "test_plain.py", "import pytest\n\n\ndef test_one(): pass\n\n\ndef test_two(benchmark): benchmark(abs, 1)\n"
    )
    result = project.run("--benchmark-disable")
    result.assert_outcomes(passed=2)
    assert "perfsuite" not in result.stdout.str().split("collected")[1]


# --- proofs ---------------------------------------------------------------------------------------------------------


def test_all_proofs_of_a_pair_pass(project: Project) -> None:
    project.write("test_dot.py", FULL)
    project.run("-m", "correctness").assert_outcomes(passed=len(PROOFS))


STATEFUL = """
    from perfsuite import Pair, Workload, stateful, tensor


    def running(start):
        total = start.clone()

        def step(x):
            total.add_(x)
            return total.clone()

        return step


    sums = Pair(
        reference=stateful(running),
        optimized=stateful(running),
        inputs={"start": tensor("n")},
        step_inputs={"x": tensor("n")},
        steps=(1, 2, 5),
        workloads=[Workload("small", n=16, clock="wall")],
    )
"""


def test_a_stateful_pair_is_collected_and_passes(project: Project) -> None:
    project.write("test_sums.py", STATEFUL)
    names = [i.rpartition("::")[2] for i in collected(project.run("--collect-only", "-q"))]
    assert names == ["equivalence[float32]", *OF_ALL_PAIRS, "speed[small]"]
    project.run("-m", "correctness").assert_outcomes(passed=5)


def test_a_stateful_pair_that_drifts_fails(project: Project) -> None:
    text = STATEFUL.replace("return total.clone()", "return total + drift * (total > 1)")
    text = text.replace("running(start)", "running(start, drift=0.0)")
    text = text.replace("optimized=stateful(running)", "optimized=stateful(lambda start: running(start, 1e-3))")
    project.write("test_sums.py", text)
    output = failure(project.run("-m", "correctness", "-k", "equivalence"))
    assert lines_with(output, "sums", "step")
    failure(project.run(*reproduction(output)))


WRITES = """
    import torch

    from perfsuite import Pair, Workload, tensor


    def slow(x, out):
        out.copy_(x + x)


    def fast(x, out):
        torch.add(x, x, out=out)


    double = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n"), "out": tensor("n")},
        mutates={"out": "written"},
        gradients=False,
        workloads=[Workload("small", n=16, clock="wall")],
    )
"""


def test_a_pair_that_writes_into_its_arguments_is_proven(project: Project) -> None:
    project.write("test_double.py", WRITES)
    project.run("-m", "correctness").assert_outcomes(passed=5)
    project.write("test_double.py", WRITES.replace("torch.add(x, x, out=out)", "out[1:].copy_((x + x)[1:])"))
    output = failure(project.run("-m", "correctness", "-k", "equivalence"))
    assert lines_with(output, "double", "out")


# --- what a failure reports -----------------------------------------------------------------------------------------

OFF = TWO_LINES.replace("return 3 * x", "return 3 * x + 1e-3 * (x > 1)")


def test_a_failure_is_short_and_prints_a_line_that_reproduces_it(project: Project) -> None:
    project.write("test_scale.py", OFF)
    output = failure(project.run("-m", "correctness", "-k", "equivalence"))
    message = output.split("FAILURES")[1].split("short test summary")[0].strip("= \n").splitlines()
    assert len(message) <= 6, message  # heading, message, line
    assert lines_with(output, "scale", "budget")
    arguments = reproduction(output)
    again = project.run(*arguments)
    again.assert_outcomes(failed=1)
    assert reproduction(again.stdout.str()) == arguments
    project.write("test_scale.py", TWO_LINES)
    project.run(*arguments).assert_outcomes(passed=1)


def test_the_reproduce_line_repeats_an_integrity_failure(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace("return 3 * x", "x.mul_(3)\n        return x"))
    output = failure(project.run("-m", "correctness", "-k", "integrity"))
    assert lines_with(output, "scale", "changes its input x", "the reference does not change it")
    failure(project.run(*reproduction(output)))


def test_the_reproduce_line_repeats_a_gradients_failure(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace("return 3 * x", "return 2 * x + x.detach()"))
    output = failure(project.run("-m", "correctness"))
    assert lines_with(output, "FAILED", "gradients[float32]")
    assert not lines_with(output, "FAILED", "equivalence")
    failure(project.run(*reproduction(output)))


@pytest.mark.parametrize("where", ["torch.is_autocast_enabled('cpu')", "torch.get_default_dtype() == torch.bfloat16"])
def test_the_reproduce_line_repeats_a_failure_in_one_context(project: Project, where: str) -> None:
    """Each draw of a proof is called in one of the contexts; the draw of the line is called in all of them."""
    faulty = TWO_LINES.replace("return 3 * x", f"return (2 if {where} else 3) * x")
    project.write("test_scale.py", f"import torch\n{textwrap.dedent(faulty)}")
    output = failure(project.run("-k", "contexts"))
    failure(project.run(*reproduction(output)))


def test_draws_are_deterministic_under_ci(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    project.write("test_scale.py", OFF)
    lines = [reproduction(failure(project.run("-k", "equivalence"))) for _ in range(2)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"dtype": "float32"}', "m=3;seed=0", "n=-1;seed=0", "n=3,m=3;seed=0"]
)
def test_an_invalid_case_option_is_reported(project: Project, line: str) -> None:
    project.write("test_scale.py", TWO_LINES)
    result = project.run("-k", "equivalence", f"--perfsuite-case={line}")
    output = result.stdout.str()
    assert result.ret == 1
    assert "Traceback" not in output
    assert lines_with(output, "case"), output
    assert "side raises" not in output


def test_a_wrong_option_is_reported_in_one_line(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    result = project.run("-m", "perf", "--perfsuite-shard=5/3")
    assert result.ret != 0
    assert lines_with(result.stdout.str(), "--shard '5/3' is not a part"), result.stdout.str()
    assert "plugin.py" not in result.stdout.str()


def test_too_narrow_a_condition_is_reported(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace("workloads=", "where=lambda n: n == 12345,\n        workloads="))
    output = failure(project.run("-k", "equivalence"))
    assert lines_with(output, "where=", "size(")


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "options", "shown"),
    [
        pytest.param("speed", [], False, marks=FULLY),
        pytest.param("speed", ["--benchmark-columns=median"], True, marks=FULLY),
        pytest.param("speed or own", [], True, marks=FULLY),
    ],
)
def test_the_table_of_pytest_benchmark_is_shown_only_on_request(
    project: Project, names: str, options: list[str], shown: bool
) -> None:
    module = """
        import pytest
        from perfsuite import Pair, Workload, tensor

        same = Pair(
            reference=abs, optimized=lambda x: x.abs(), inputs={"x": tensor("n")}, gradients=False,
            workloads=[Workload("w", n=8)],
        )


        @pytest.mark.perf
        def test_own(benchmark):
            benchmark(abs, 1)
    """
    project.write("test_tables.py", module)
    output = project.run("-m", "perf", "-k", names, *options).stdout.str()
    assert re.search(r"workload +reference +optimized +speedup", output)
    assert ("Name (time in" in output) is shown


def test_contexts_that_pairs_declare_as_unsupported_are_counted(project: Project) -> None:
    module = """
        from perfsuite import Pair, Workload, tensor


        def made(**unsupported):
            return Pair(
                reference=abs, optimized=lambda x: x.abs(), inputs={"x": tensor("n")}, gradients=False,
                workloads=[Workload("w", n=8)], unsupported=unsupported,
            )


        one, two, three = made(autocast="why"), made(autocast="why", two_threads="why"), made()
    """
    project.write("test_unsupported.py", module)
    output = project.run("-m", "correctness", "-k", "contexts").stdout.str()
    assert "not tried, because pairs declare it as unsupported: autocast (pairs: 2), two_threads (pairs: 1)" in output
    assert "not tried" not in project.run("-m", "correctness", "-k", "three").stdout.str()


def test_gpu_tests_are_skipped_with_the_reason_on_a_machine_without_gpus(project: Project) -> None:
    project.write(
        "test_devices.py",
        """
        import pytest

        @pytest.mark.gpu
        def test_one(): raise AssertionError("not here")

        @pytest.mark.multi_gpu
        def test_two(): raise AssertionError("not here")
        """,
    )
    result = project.run("-rs")
    result.assert_outcomes(skipped=2)
    assert lines_with(result.stdout.str(), "SKIPPED", "needs 1 CUDA device; 0 here")
    assert lines_with(result.stdout.str(), "SKIPPED", "needs 2 CUDA devices; 0 here")


def test_pytestmark_applies_to_all_items_of_a_pair(project: Project) -> None:
    text = "import pytest\npytestmark = pytest.mark.multi_gpu\n" + project.write("x.py", TWO_LINES).read_text()
    project.write("test_scale.py", text)
    result = project.run("-rs")
    result.assert_outcomes(skipped=7)
    assert lines_with(result.stdout.str(), "SKIPPED", "needs 2 CUDA devices; 0 here")


def test_a_workload_for_the_gpu_is_skipped_with_the_reason(project: Project) -> None:
    project.write("test_dot.py", FULL)
    fake = project.measured(times(sizes={"m": 4, "n": 16}))
    result = project.run("-m", "perf", "-rs")
    assert lines_with(result.stdout.str(), "SKIPPED", "CUDA")
    assert all("speed[gpu]" not in i for ids, _ in fake.calls for i in ids)


def test_a_side_for_another_device_is_skipped_with_the_reason(project: Project) -> None:
    project.write(
        "test_scale.py",
        TWO_LINES.replace("optimized=fast", 'optimized=side(fast, devices=["cuda"])').replace(
            "import Pair", "import Pair, side"
        ),
    )
    result = project.run("-m", "correctness", "-k", "equivalence", "-rs")
    result.assert_outcomes(skipped=1)
    assert lines_with(result.stdout.str(), "SKIPPED", "cuda")


# --- Triton ---------------------------------------------------------------------------------------------------------

KERNEL = """
    import torch
    import triton
    import triton.language as tl

    from perfsuite import Pair, Workload, tensor


    @triton.jit
    def triple_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(out_ptr + at, 3 * x, mask=at < n)


    def slow(x):
        return x + x + x


    def fast(x):
        out = torch.empty_like(x)
        triple_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
        return out


    triple = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n")},
        gradients=False,
        workloads=[Workload("small", n=64)],
    )
"""


def test_a_triton_kernel_adds_a_kernels_item(project: Project) -> None:
    pytest.importorskip("triton")
    project.write("test_triple.py", KERNEL)
    names = [i.rpartition("::")[2] for i in collected(project.run("--collect-only", "-q", "-m", "correctness"))]
    assert names == ["equivalence[float32]", *OF_ALL_PAIRS, "kernels[sm_90]"]


@pytest.mark.parametrize(("visible", "interpreted"), [(None, False), ("0", False), ("", True), ("-1", True)])
def test_kernels_are_interpreted_if_every_gpu_is_hidden(
    project: Project, monkeypatch: pytest.MonkeyPatch, visible: str | None, interpreted: bool
) -> None:
    (project.path / "node").touch()
    monkeypatch.setattr(device_nodes, "NODES", (str(project.path / "node"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    project.run("--collect-only")
    assert (os.environ.pop("TRITON_INTERPRET", "0") == "1") == interpreted


def test_perfsuite_run_reports_that_kernels_are_not_compiled_for_another_device(project: Project) -> None:
    pytest.importorskip("triton")
    project.write("test_triple.py", KERNEL)
    project.measured(times())
    done = project.cli("run", "--report", "out")
    assert done.exit_code == 0, done.output
    report = json.loads((project.path / "out/report.json").read_text())
    assert report["correctness"]["passed"] == 5
    assert lines_with(done.output, "kernels of 1 pair are not compiled for sm_90 here", "pytest -m correctness")


@FULLY
def test_a_kernel_that_does_not_compile_fails(project: Project) -> None:
    """Kernels are compiled in a separate process without a GPU; a project's addopts do not interfere."""
    pytest.importorskip("triton")
    project.write("pytest.ini", "[pytest]\naddopts = -m 'not perf' --strict-markers -x\nfilterwarnings = error")
    project.write("test_triple.py", KERNEL.replace("3 * x,", "tl.dot(x, x),"))
    result = project.run("-k", "kernels")
    output = failure(result)
    assert lines_with(output, "triple:", "does not compile for sm_90", "dot")
    project.write("test_triple.py", KERNEL)
    project.run("-k", "kernels").assert_outcomes(passed=1)


def test_a_kernel_that_no_workload_launches_fails(project: Project) -> None:
    pytest.importorskip("triton")
    project.write(
        "test_triple.py",
        KERNEL.replace("triple_kernel[(triton", "if x.numel() > 64:\n            triple_kernel[(triton"),
    )
    output = failure(project.run("-k", "kernels"))
    assert lines_with(output, "triple_kernel", "launched by no workload and no variant")


def test_a_kernel_that_another_pair_of_the_file_launches_passes(project: Project) -> None:
    pytest.importorskip("triton")
    rare = KERNEL.replace("triple_kernel[(triton", "if x.numel() > 64:\n            triple_kernel[(triton")
    other = '\n\nlarger = replace(triple, workloads=[Workload("large", n=1000, device="cpu")])\n'
    project.write("test_triple.py", "from dataclasses import replace" + textwrap.dedent(rare) + other)
    project.run("-k", "kernels").assert_outcomes(passed=2)


def test_a_jit_function_that_a_kernel_passes_on_is_not_a_kernel(project: Project) -> None:
    pytest.importorskip("triton")
    text = KERNEL.replace("3 * x,", "tl.associative_scan(x, 0, added),")
    added = "@triton.jit\n    def added(a, b):\n        return a + b\n\n\n    @triton.jit\n    def triple_kernel"
    project.write("test_triple.py", text.replace("@triton.jit\n    def triple_kernel", added))
    project.run("-k", "kernels").assert_outcomes(passed=1)


@FULLY
def test_kernels_of_cpu_workloads_are_not_compiled_for_the_gpu(project: Project) -> None:
    """A block of 96 cannot be compiled, which matters only to a workload for a GPU."""
    pytest.importorskip("triton")
    text = KERNEL.replace("BLOCK=128", "BLOCK=x.numel()")
    workloads = '[Workload("small", n=64), Workload("odd", n=96, clock="wall", device="cpu")]'
    project.write("test_triple.py", text.replace('[Workload("small", n=64)]', workloads))
    project.run("-k", "kernels").assert_outcomes(passed=1)
    project.write("test_triple.py", text.replace('[Workload("small", n=64)]', workloads.replace(', device="cpu"', "")))
    assert lines_with(failure(project.run("-k", "kernels")), "triple:", "does not compile for sm_90")


def test_a_variant_without_a_kernel_is_not_called_at_gpu_sizes(project: Project) -> None:
    pytest.importorskip("triton")
    variants = """
        variants={"triton": fast, "plain": plain},
        workloads=[Workload("large", n=64, device="cuda"), Workload("cpu", n=8, clock="wall", device="cpu")],
    """
    plain = """
    def plain(x):
        assert x.numel() < 64, "too large for this machine"
        return 3 * x


    triple = Pair("""
    text = KERNEL.replace('        workloads=[Workload("small", n=64)],', variants).replace("    triple = Pair(", plain)
    project.write("test_triple.py", text)
    project.run("-k", "kernels").assert_outcomes(passed=1)


def test_matrix_products_between_kernels_are_not_computed(project: Project) -> None:
    """Products take long on a CPU, and nobody reads their values."""
    pytest.importorskip("triton")
    products = """
        ones, out = torch.ones(2, 3, 3), torch.ones(3, 3)
        if "PERFSUITE_AHEAD" in os.environ:
            pathlib.Path("compiled").touch()
            for made in (ones[0] @ ones[1], torch.bmm(ones, ones), torch.mm(ones[0], ones[1], out=out), out):
                assert made.shape[-2:] == (3, 3) and not made.any()
        triple_kernel[(triton"""
    text = KERNEL.replace("\n        triple_kernel[(triton", products).replace(
        "import torch", "import os\n    import pathlib\n    import torch", 1
    )
    project.write("test_triple.py", text)
    project.run("-k", "kernels").assert_outcomes(passed=1)
    assert (project.path / "compiled").exists(), "the products are not reached"


# --- pytest-benchmark: the contract of perfsuite/session/benchmark_records.py -----------------------------------------


@pytest.fixture
def timed(project: Project) -> Project:
    project.write("test_scale.py", TWO_LINES)
    project.measured(times())
    return project


def test_samples_are_written_as_pytest_benchmark_records(timed: Project) -> None:
    result = timed.run("-m", "perf", "--benchmark-json=out.json")
    assert result.ret == 0
    assert lines_with(result.stdout.str(), "speed[small]@optimized")
    records = {r["fullname"]: r for r in json.loads((timed.path / "out.json").read_text())["benchmarks"]}
    assert set(records) == {f"{SMALL}@reference", f"{SMALL}@optimized"}
    reference, optimized = records[f"{SMALL}@reference"], records[f"{SMALL}@optimized"]
    assert (reference["name"], optimized["name"]) == ("speed[small]@reference", "speed[small]@optimized")
    assert reference["group"] == optimized["group"] == SMALL
    assert optimized["stats"]["median"] == pytest.approx(1e-5)
    assert reference["stats"]["median"] == pytest.approx(2e-5)
    assert optimized["stats"]["rounds"] == 8
    assert optimized["extra_info"]["perfsuite"]["id"] == SMALL
    assert reference["extra_info"] == {}


@pytest.mark.parametrize("option", [["-p", "no:benchmark"], ["--benchmark-disable"]])
def test_a_pair_is_timed_without_pytest_benchmark(timed: Project, option: list[str]) -> None:
    result = timed.run("-m", "perf", *option)
    result.assert_outcomes(passed=1)
    assert not lines_with(result.stdout.str(), "speed[small]@optimized")
    assert lines_with(result.stdout.str(), "small", "2.00×")
    assert "WARNING" not in result.stdout.str()


def test_the_gate_finds_a_regression_without_pytest_benchmark(timed: Project) -> None:
    timed.accept()
    timed.measured(times(slower=0.05))
    result = timed.run("-p", "no:benchmark", "-m", "perf", "--perfsuite-mode=gate")
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL)


def test_skipped_benchmarks_are_not_reported_as_green(timed: Project) -> None:
    timed.accept()
    timed.measured(times())
    result = timed.run("-m", "perf", "--benchmark-skip", "--benchmark-compare")
    assert result.ret == UNDECIDED
    assert lines_with(result.stdout.str(), "nothing was measured", "skip")


def test_benchmark_only_keeps_timed_items(timed: Project) -> None:
    timed.run("--benchmark-only", "-m", "perf").assert_outcomes(passed=1)


def test_a_regression_is_reported_with_benchmark_compare_fail(timed: Project) -> None:
    timed.accept()
    timed.measured(times(slower=0.05))
    result = timed.run("-m", "perf", "--benchmark-compare-fail=mean:50%", "--benchmark-compare")
    assert result.ret != 0
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL)


def test_a_failure_of_the_harness_is_reported_once(timed: Project) -> None:
    assert timed.workers is not None
    timed.workers.run = lambda *given: 1 / 0  # type: ignore[method-assign]
    timed.run("-m", "perf").assert_outcomes(failed=1)  # and no error of the benchmark fixture, "was not used"
