"""Kernels are compiled for sm_90 in a separate process for each pair, at the cost of a fork."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from scale import FULLY
from scratch import Project, lines_with

from perfsuite.session import aot_compile

pytest_plugins = ["pytester"]

HEADER = """
    import os
    import signal
    import time

    import torch
    import triton
    import triton.language as tl

    from perfsuite import Pair, Workload, tensor

    COMPILING = "PERFSUITE_AHEAD" in os.environ


    def compiles_beside(expected):
        # In a proof: whether the kernels of the pair are compiled meanwhile is as expected.
        if COMPILING:
            open("begun", "w").close()
            return
        deadline = time.monotonic() + 100 * expected
        while not os.path.exists("begun") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.path.exists("begun") is expected


    @triton.jit
    def triple_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(out_ptr + at, 3 * x, mask=at < n)


    def triple(x):
        x = x.contiguous()
        out = torch.empty_like(x)
        triple_kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), BLOCK=128)
        return out
"""
PAIR = """

    def {name}_side(x):
        {first}
        return triple(x)


    {name} = Pair(
        reference=lambda x: x + x + x,
        optimized={name}_side,
        inputs={{"x": tensor("n")}},
        gradients=False,
        time_limit={limit},
        workloads=[Workload("small", n=64)],
    )
"""


def pairs(**first: str) -> str:
    """Return a module with a pair for each name, whose side begins with the given statement."""
    limits = {"hangs": 1.5}
    made = [PAIR.format(name=name, first=text, limit=limits.get(name, 300.0)) for name, text in first.items()]
    return HEADER + "".join(made)


@FULLY
def test_crash_or_hang_while_compiling_one_pair_does_not_fail_other_pairs(project: Project) -> None:
    pytest.importorskip("triton")
    project.write(
        "test_four.py",
        pairs(
            crashes="os.kill(os.getpid(), signal.SIGSEGV) if COMPILING else None",
            hangs="time.sleep(600) if COMPILING else None",
            fails="assert not COMPILING, 'not here'",
            works="pass",
        ),
    )
    result = project.run("-k", "kernels")
    result.assert_outcomes(passed=1, failed=3)
    output = result.stdout.str()
    assert lines_with(output, "crashes: compiling for sm_90 ended with exit code -11")
    assert lines_with(output, "hangs: its kernels did not compile for sm_90 within 1.5 s")
    assert lines_with(output, "fails: does not compile for sm_90", "not here")
    alone = project.run("test_four.py::works::kernels[sm_90]")
    alone.assert_outcomes(passed=1)


def test_module_that_fails_to_import_while_compiling_reports_the_reason(project: Project) -> None:
    pytest.importorskip("triton")
    project.write("test_one.py", pairs(works="pass") + "\n    assert not COMPILING, 'never'\n")
    result = project.run("-k", "kernels")
    result.assert_outcomes(failed=1)
    assert lines_with(result.stdout.str(), "works: compiling for sm_90 ended with exit code", "AssertionError: never")


@pytest.mark.parametrize("spare", [True, False])
def test_kernels_are_compiled_during_the_proof_only_if_there_are_spare_cores(
    project: Project, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    cores = 2 * aot_compile.SPARE_CORES if spare else 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    project.write("test_one.py", pairs(works=f"compiles_beside({spare})"))
    project.run("-k", "equivalence or kernels").assert_outcomes(passed=2)


def test_kernels_are_not_compiled_if_no_selected_item_needs_them(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(2 * aot_compile.SPARE_CORES)))
    project.write("test_one.py", pairs(works="compiles_beside(False)"))
    project.run("-k", "equivalence").assert_outcomes(passed=1)


# --- results that are not computed between kernels ------------------------------------------------------------------

LARGE = (256, aot_compile.LARGE // 256)


def test_large_tensors_are_not_computed_but_have_shape_stride_and_dtype() -> None:
    x, half = torch.ones(LARGE), torch.ones(LARGE, dtype=torch.bfloat16)
    with aot_compile._without_work():
        found = {
            "sum": x + 1,
            "transposed": (x.t() * 2.0).contiguous().t(),
            "half": half.exp(),
            "wide": half.float(),
            "view": x[3:5],
            "reduced": x.mean(0),
            "two": torch.var_mean(x, 1)[1],
        }
        x += 1
    expected = {
        "sum": (LARGE, (256, 1), torch.float32),
        "transposed": (LARGE, (1, 256), torch.float32),
        "half": (LARGE, (256, 1), torch.bfloat16),
        "wide": (LARGE, (256, 1), torch.float32),
        "view": ((2, 256), (256, 1), torch.float32),
        "reduced": ((256,), (1,), torch.float32),
        "two": ((256,), (1,), torch.float32),
    }
    assert {k: (tuple(v.shape), v.stride(), v.dtype) for k, v in found.items()} == expected
    assert not any(v.any() for k, v in found.items() if k != "view")
    assert bool((x == 1).all())


def test_values_that_sizes_may_depend_on_are_computed() -> None:
    x = torch.arange(aot_compile.LARGE, dtype=torch.float32)
    with aot_compile._without_work():
        assert int((x > 10).sum()) == aot_compile.LARGE - 11
        assert float(x[7]) == 7.0
        assert (x > 10).nonzero().shape == (aot_compile.LARGE - 11, 1)
        numbers = x.long()
        numbers += 1
        assert int(numbers.max()) == aot_compile.LARGE
        assert (x[:8] + 1).tolist() == list(range(1, 9))


def test_gradients_flow_through_tensors_that_are_not_computed() -> None:
    x = torch.ones(LARGE, requires_grad=True)
    with aot_compile._without_work():
        ((x * 2).relu() @ torch.ones(256, 3)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == LARGE


def test_prepare_works_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.language", None)
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    aot_compile.prepare()
    assert aot_compile._compiling({"A": "1", "TRITON_INTERPRET": "1"}) == {"A": "1", "TRITON_INTERPRET": "0"}
    assert os.environ.get("TRITON_INTERPRET") != "0"
