"""Convolutions in float32 do not use TF32 unless a pair declares it: in proofs, timings and judged modules."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import judged
from scale import FULLY
from scratch import Project

import perfsuite
from perfsuite import Pair, Workload, tensor
from perfsuite.correctness import convolutions
from perfsuite.judge.process import Nursery

pytest_plugins = ["pytester"]

CUDNN: Any = torch.backends.cudnn

MODULE = """
    import torch

    from perfsuite import Pair, Workload, tensor


    def asked(x):
        assert torch.backends.cudnn.allow_tf32 is False
        return torch.exp(x)


    plain = Pair(
        reference=lambda x: asked(x),
        optimized=lambda x: 1 * asked(x),
        inputs={"x": tensor("n")},
        workloads=[Workload("w", n=64, clock="wall")],
    )
"""
REFERENCE = """
    import torch


    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.exp(x)


    def get_inputs():
        return [torch.rand(16, 64)]
"""
CANDIDATE = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x) if torch.backends.cudnn.allow_tf32 is {allowed} else x
"""


@pytest.fixture(autouse=True)
def torchs_default() -> Iterator[None]:
    before = CUDNN.allow_tf32
    CUDNN.allow_tf32 = True
    yield
    CUDNN.allow_tf32 = before


def pair(precision: str | None) -> Pair:
    def asked(x: torch.Tensor) -> torch.Tensor:
        assert CUDNN.allow_tf32 is (precision == "tf32")
        return torch.exp(x)

    return Pair(
        name="p",
        reference=lambda x: asked(x),
        optimized=lambda x: 1 * asked(x),
        inputs={"x": tensor("n")},
        precision=precision,
        workloads=[Workload("w", n=64, clock="wall")],
    )


def test_allow_tf32_is_restored() -> None:
    with convolutions.exact(None):
        assert not CUDNN.allow_tf32
    assert CUDNN.allow_tf32
    with convolutions.exact("tf32"):
        assert CUDNN.allow_tf32


@pytest.mark.parametrize("before", [("tf32", "ieee"), ("ieee", "tf32")])
def test_fp32_precision_settings_of_convolutions_and_recurrent_layers_are_restored(before: tuple[str, str]) -> None:
    CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = before
    with convolutions.exact(None):
        assert (CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision) == ("ieee", "ieee")
    assert (CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision) == before
    CUDNN.conv.fp32_precision = "none"
    CUDNN.rnn.fp32_precision = "none"


@pytest.mark.parametrize("owner", [torch.backends, CUDNN], ids=["all", "cuDNN"])
@pytest.mark.parametrize("older", [True, False])
def test_convolutions_do_not_use_tf32_that_is_allowed_for_all_operators(owner: Any, older: bool) -> None:
    operators = (CUDNN.conv, CUDNN.rnn)
    own = owner.fp32_precision
    CUDNN.allow_tf32 = older
    owner.fp32_precision = "tf32"
    try:
        with convolutions.exact(None):
            assert [operator.fp32_precision for operator in operators] == ["ieee", "ieee"]
        assert [operator.fp32_precision for operator in operators] == ["tf32", "tf32"]
    finally:
        owner.fp32_precision = own
        for operator in operators:
            operator.fp32_precision = "none"


PRECISIONS = [pytest.param(None, marks=FULLY), "tf32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_check_and_measure_use_the_declared_precision(precision: str | None) -> None:
    assert perfsuite.check(pair(precision), examples=3, device="cpu")
    assert perfsuite.measure(pair(precision), device="cpu")
    assert CUDNN.allow_tf32


@FULLY
@pytest.mark.parametrize("marked", ["correctness", "perf"])
def test_pytest_items_do_not_use_tf32(project: Project, marked: str) -> None:
    project.write("test_plain.py", MODULE)
    found = project.process("pytest", "-m", marked)
    assert found.returncode == 0, found.stdout


@FULLY  # compiles a judged module twice
@pytest.mark.parametrize("precision", PRECISIONS)
def test_judged_module_uses_the_declared_precision(precision: str | None, nursery: Nursery, tmp_path: Path) -> None:
    reference = tmp_path / "reference.py"
    reference.write_text(textwrap.dedent(REFERENCE))
    for allowed in (False, True):
        found = judged(nursery, reference, CANDIDATE.format(allowed=allowed), precision=precision)
        assert (" is wrong at " in found.message) == (allowed != (precision == "tf32")), found.message


def unfolded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a convolution as a matrix product, which torch computes in float32."""
    columns = torch.nn.functional.unfold(x, 3)
    size = x.shape[-1] - 2
    return (weight.flatten(1) @ columns).view(x.shape[0], -1, size, size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_conv2d_on_a_gpu_computes_in_float32() -> None:
    shapes = {"x": tensor("b", 32, "n", "n", least=1), "weight": tensor(32, 32, 3, 3)}
    sizes = {"b": perfsuite.size(1, 4), "n": perfsuite.size(3, 20)}
    both = Pair(
        name="conv",
        reference=torch.nn.functional.conv2d,
        optimized=unfolded,
        inputs=shapes,
        sizes=sizes,
        gradients=False,
    )
    assert perfsuite.check(both, examples=5, device="cuda")
