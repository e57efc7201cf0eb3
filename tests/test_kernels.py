import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from optimized import kernels


def tensor(device="cuda:0", dtype=torch.float32):
    """Return the attributes of a tensor that the rules read, so that those of a GPU are tested without one."""
    place = torch.device(device)
    return SimpleNamespace(is_cuda=place.type == "cuda", device=place, dtype=dtype)


@pytest.fixture
def gpu(monkeypatch):
    """Simulate two GPUs of the given compute capabilities; the first one is current."""

    def have(first, second=(9, 0)):
        capabilities = {None: first, 0: first, 1: second}
        index = {"cuda:0": 0, "cuda:1": 1}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None: capabilities[device and index[str(device)]]
        )

    monkeypatch.setattr(kernels, "triton", object())
    return have


@pytest.mark.parametrize(("capability", "enough"), [((7, 5), False), ((7, 9), False), ((8, 0), True), ((9, 0), True)])
def test_gpu_needs_compute_capability_8_0(gpu, capability, enough):
    gpu(capability)
    reason = kernels.triton_reason()
    assert reason is None if enough else "below 8.0;" in reason
    assert kernels.use_triton(tensor()) == enough


def test_interpreter_needs_no_compute_capability(monkeypatch):
    monkeypatch.setattr(kernels, "triton", object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
    assert kernels.triton_reason() is None


def test_use_triton_checks_the_capability_of_the_tensors_device(gpu):
    gpu((7, 5), (8, 0))
    assert kernels.use_triton(tensor("cuda:1"))
    assert not kernels.use_triton(tensor("cuda:0"))


def test_missing_triton_is_the_reason_and_disables_the_kernels(gpu, monkeypatch):
    gpu((9, 0))
    monkeypatch.setattr(kernels, "triton", None)
    assert "triton is not installed;" in kernels.triton_reason()
    assert not kernels.use_triton(tensor())


@pytest.mark.parametrize(
    ("tensors", "served"),
    [
        ([tensor()], True),
        ([tensor(), tensor(), tensor()], True),
        ([tensor("cpu")], False),
        ([tensor(), tensor("cpu")], False),
        ([tensor("cpu"), tensor()], False),
        ([tensor(), tensor("cuda:1")], False),
        ([tensor(dtype=torch.float64)], False),
        ([tensor(), tensor(dtype=torch.float16)], False),
    ],
)
def test_use_triton_requires_float32_on_one_gpu(gpu, tensors, served):
    gpu((8, 0))
    assert kernels.use_triton(*tensors) == served


def test_use_triton_accepts_only_the_given_dtypes(gpu):
    gpu((8, 0))
    half = tensor(dtype=torch.float16)
    assert kernels.use_triton(tensor(), half, dtypes=(torch.float32, torch.float16))
    assert not kernels.use_triton(half, dtypes=(torch.float32, torch.bfloat16))


def test_kernel_is_launched_on_the_device_of_the_tensor(gpu):
    gpu((8, 0))
    assert not isinstance(kernels.launching(tensor("cuda:0")), torch.cuda.device)
    other = kernels.launching(tensor("cuda:1"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 1


def test_overflow_in_the_interpreter_does_not_warn():
    with kernels.launching(torch.zeros(1)):
        assert np.isinf(np.float32(3e38) * np.float32(10))


def test_kernels_can_be_imported_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("kernels_without_triton", kernels.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    assert without.triton is None
    assert without.triton_reason() is not None
    assert without.tl.constexpr(2.5).value == 2.5

    @without.jit
    def kernel(x):
        return x

    assert kernel(3) == 3


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 1, 9)])
def test_ceil_div(a, b, expected):
    assert kernels.ceil_div(a, b) == expected


def test_modules_with_kernels_have_no_string_annotations():
    """With string annotations Triton's interpreter would not recognise `tl.constexpr`."""
    sources = {path.name: path.read_text() for path in Path(kernels.__file__).parent.rglob("*.py")}
    with_kernels = [name for name, text in sources.items() if "\n@jit\n" in text]
    assert "muon.py" in with_kernels
    assert not [name for name in with_kernels if "from __future__ import annotations" in sources[name]]
