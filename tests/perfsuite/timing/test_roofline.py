"""Measured ceilings of a (simulated) device: the best of several repeats, cached for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from perfsuite.errors import PairError
from perfsuite.timing import roofline
from perfsuite.timing.roofline import PRECISIONS, REPEATS, copy_bytes_per_s, matmul_flops_per_s

WARM_UP = 1e-6
"""Seconds of the first call, which is never counted, even if it is the shortest."""
SECONDS = [WARM_UP, 5.0, 3.0, 2.0, 4.0, 6.0]
BEST = 2.0

matmul = torch.backends.cuda.matmul


class Device:
    """Simulated device: calls last as long as scripted; tensors for the GPU stay on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seconds = iter(SECONDS * 10)
        self.calls: list[tuple[torch.dtype, str]] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.at = -1.0

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Any) -> float:
                assert device.synchronized
                return float(end.at - self.at) * 1e3

        def on_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return lambda *a, **k: make(*a, **{**k, "device": "cpu"})

        for name in ("ones", "randn"):
            monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch, "matmul", lambda a, b: self.work(a.dtype))
        monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: self.work(source.dtype))
        monkeypatch.setattr(roofline, "perf_counter", lambda: self.now)
        monkeypatch.setattr(roofline, "COPY_BYTES", {"cuda": 4000, "cpu": 400})
        monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cuda": 8, "cpu": 4})
        self.synchronized = False

    def work(self, dtype: torch.dtype) -> None:
        self.synchronized = False
        self.calls.append((dtype, str(matmul.fp32_precision)))
        self.now += next(self.seconds)

    def synchronize(self) -> None:
        self.synchronized = True


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """Clear the cached ceilings before and after the test, and restore torch's setting."""
    before = matmul.fp32_precision
    for ceiling in (copy_bytes_per_s, matmul_flops_per_s):
        ceiling.cache_clear()
    yield
    for ceiling in (copy_bytes_per_s, matmul_flops_per_s):
        ceiling.cache_clear()
    matmul.fp32_precision = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.mark.parametrize(("kind", "size"), [("cuda", 4000), ("cpu", 400)])
def test_copy_ceiling_counts_read_and_written_bytes_in_the_best_time(device: Device, kind: str, size: int) -> None:
    assert copy_bytes_per_s(kind) == pytest.approx(2 * size / BEST)
    assert [dtype for dtype, _ in device.calls] == [torch.float32] * (REPEATS + 1)


@pytest.mark.parametrize(("kind", "n"), [("cuda", 8), ("cpu", 4)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_matmul_ceiling_in_each_precision(device: Device, kind: str, n: int, precision: str) -> None:
    n = n // 2 if precision == "float64" or (kind == "cpu" and precision in ("bfloat16", "float16")) else n
    assert matmul_flops_per_s(kind, precision) == pytest.approx(2 * n**3 / BEST)
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    allowed = "tf32" if precision == "tf32" else "ieee"
    assert device.calls == [(dtype, allowed)] * (REPEATS + 1)


def test_each_ceiling_is_measured_once_per_process(device: Device) -> None:
    first = copy_bytes_per_s("cuda"), matmul_flops_per_s("cuda", "float32")
    count = len(device.calls)
    device.seconds = iter(())
    assert (copy_bytes_per_s("cuda"), matmul_flops_per_s("cuda", "float32")) == first
    assert len(device.calls) == count == 2 * (REPEATS + 1)
    device.seconds = iter([s / 2 for s in SECONDS] * 3)
    assert matmul_flops_per_s("cuda", "bfloat16") == pytest.approx(2 * first[1])
    assert copy_bytes_per_s("cpu") == pytest.approx(2 * first[0] / 10)
    assert len(device.calls) == 2 * count


@pytest.mark.parametrize("precision", ["float31", "int8", "", "Tensor", "TF32"])
def test_an_unknown_precision_is_an_error(device: Device, precision: str) -> None:
    with pytest.raises(PairError, match=f"precision='{precision}' is not one of float64, float32, tf32,"):
        matmul_flops_per_s("cuda", precision)
    assert not device.calls


@pytest.mark.parametrize("precision", ["tf32", "float32"])
@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
def test_legacy_matmul_precision_setting_is_restored(device: Device, legacy: str, precision: str) -> None:
    torch.set_float32_matmul_precision(legacy)
    try:
        matmul_flops_per_s("cuda", precision)
        assert torch.get_float32_matmul_precision() == legacy
        assert matmul.allow_tf32 is (legacy != "highest")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("chosen", ["tf32", "ieee"])
def test_fp32_precision_setting_is_restored(device: Device, chosen: str) -> None:
    """Once a project uses the new setting, torch raises even if the old one, allow_tf32, is only read."""
    matmul.fp32_precision = chosen
    matmul_flops_per_s("cuda", "tf32")
    matmul_flops_per_s("cuda", "float32")
    assert matmul.fp32_precision == chosen
    assert {p for _, p in device.calls} == {"tf32", "ieee"}


def test_failed_product_restores_the_setting_and_caches_no_ceiling(device: Device) -> None:
    matmul.fp32_precision = "ieee"
    device.seconds = iter(SECONDS[:2])
    with pytest.raises(StopIteration):
        matmul_flops_per_s("cuda", "tf32")
    assert matmul.fp32_precision == "ieee"
    device.seconds = iter(SECONDS)
    assert matmul_flops_per_s("cuda", "tf32") == pytest.approx(2 * 8**3 / BEST)


def test_ceilings_of_this_cpu_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(roofline, "MATMUL_SIZE", {"cpu": 32})
    assert copy_bytes_per_s("cpu") > 0
    assert all(matmul_flops_per_s("cpu", p) > 0 for p in PRECISIONS)
