"""The machine is identified with NVML, without it, and where CUDA_VISIBLE_DEVICES hides devices."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from perfsuite.errors import MachineError
from perfsuite.system import device_nodes, machine
from perfsuite.system.host import cpu_slug
from perfsuite.system.machine import Monitor, gpu_slug, has_gpu, identify, reason_names, survey_gpus


class NvmlError(Exception):
    """Error like pynvml's: not a subclass of any of ours."""


class Nvml(types.ModuleType):
    """Stand-in for pynvml with two GPUs; it lacks the functions in `without`; `mask` and `counters` can be set."""

    def __init__(
        self, *, without: tuple[str, ...] = (), names: tuple[str, ...] = ("NVIDIA H200", "NVIDIA H200")
    ) -> None:
        super().__init__("pynvml")
        self.mask = 0
        self.clock = 1980
        self.counters = {74: 0, 269: 0, 270: 0, 271: 0}
        self.initialised = 0
        self.names = names
        functions: dict[str, Callable[..., Any]] = {
            "nvmlSystemGetDriverVersion": lambda: b"580.159.03",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self.names),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetUUID": lambda h: f"GPU-{h}{h}{h}-uuid",
            "nvmlDeviceGetName": lambda h: self.names[h],
            "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(total=150 << 30),
            "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
            "nvmlDeviceGetClockInfo": lambda h, kind: self.clock,
            "nvmlDeviceGetTemperature": lambda h, sensor: 54,
            "nvmlDeviceGetPowerUsage": lambda h: 412_345,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda h: self.mask,
            "nvmlDeviceGetFieldValues": self.fields,
        }
        for name, function in functions.items():
            if name not in without:
                setattr(self, name, function)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's own name
        self.initialised += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's own name
        self.initialised -= 1

    def fields(self, handle: int, ids: list[int]) -> list[Any]:
        value = types.SimpleNamespace
        return [value(fieldId=i, nvmlReturn=0, valueType=3, value=value(ullVal=self.counters[i])) for i in ids]


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_nodes, "NODES", ("/nonexistent/nvidiactl",))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return install(monkeypatch, Nvml())


def install(monkeypatch: pytest.MonkeyPatch, fake: Nvml) -> Nvml:
    """Simulate a machine with `fake`'s GPUs and a CUDA build of torch."""
    monkeypatch.setattr(device_nodes, "NODES", ("/dev/null",))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(machine, "package_version", lambda name: {"torch": "2.11.0+cu130", "triton": "3.6.0"}.get(name))
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    return fake


@pytest.mark.usefixtures("no_gpu")
def test_cpu_machine_is_identified_without_nvml() -> None:
    found = identify()
    assert found.device.startswith("cpu-")
    assert found.count == 0
    assert found.device_name == found.cpu
    assert (found.driver, found.cuda, found.power_limit_w) == (None, None, None)
    assert found.cores >= 1
    assert found.memory_bytes > 1 << 28


@pytest.mark.usefixtures("no_gpu")
def test_has_gpu_only_checks_device_nodes_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command calls it, and packages or NVML take milliseconds."""
    for name in ("_nvml", "package_version", "survey_gpus", "torch_cuda"):
        monkeypatch.setattr(machine, name, lambda *given, name=name: pytest.fail(f"calls {name}"))
    assert not has_gpu()


def test_import_and_identify_load_neither_torch_nor_triton() -> None:
    then = "identify(); print({'torch', 'triton'} & {*sys.modules})"
    code = f"import sys; from perfsuite.system.machine import identify; {then}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_gpu_machine_is_identified_with_nvml(nvml: Nvml) -> None:
    found = identify()
    assert (found.device, found.device_name, found.count) == ("nvidia-h200", "NVIDIA H200", 2)
    assert (found.driver, found.cuda, found.power_limit_w) == ("580.159.03", "13.0", 700.0)
    assert (found.torch, found.triton) == ("2.11.0+cu130", "3.6.0")
    assert nvml.initialised == 0, "NVML must be shut down again"


@pytest.mark.usefixtures("nvml")
def test_prefer_cpu_describes_the_cpu_of_a_gpu_machine() -> None:
    found = identify(prefer="cpu")
    assert found.device.startswith("cpu-")
    assert found.count == 0
    assert found.driver is None


@pytest.mark.usefixtures("no_gpu")
def test_prefer_cuda_without_a_gpu_says_why() -> None:
    with pytest.raises(MachineError, match="no usable GPU: no NVIDIA device node"):
        identify(prefer="cuda")


def test_prefer_takes_known_kinds_only() -> None:
    with pytest.raises(MachineError, match="'tpu' is not one of cpu, cuda"):
        identify(prefer="tpu")


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("visible", "count"),
    [("0", 1), ("1,0", 2), ("0,7,1", 1), ("GPU-11", 1), ("GPU-9", 0), ("0,-1,1", 1), (" 1 ", 1)],
)
def test_visible_devices_are_read_as_cuda_does(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert len(survey_gpus().gpus) == count


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hidden_gpus_are_not_found(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not has_gpu()
    assert identify().device.startswith("cpu-")
    assert "unset it" in machine.why_no_gpu()


def test_a_cpu_build_of_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Nvml())
    monkeypatch.setattr(machine, "package_version", lambda name: "2.13.0+cpu")
    assert not has_gpu()
    assert "CPU build" in machine.why_no_gpu()


def test_first_visible_gpu_identifies_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Nvml(names=("NVIDIA H200", "NVIDIA L4")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert identify().device == "nvidia-l4"


def test_nvidia_smi_is_used_if_nvml_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    install(monkeypatch, Nvml(without=("nvmlDeviceGetCount",)))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '0, GPU-aa, NVIDIA H200, 580.1, 700.00'\necho '1, GPU-bb, NVIDIA L4, 580.1, [N/A]'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = survey_gpus()
    assert found.source == "nvidia-smi"
    assert [(g.name, g.power_limit_w) for g in found.gpus] == [("NVIDIA H200", 700.0), ("NVIDIA L4", None)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert identify().device == "nvidia-l4"


def test_a_gpu_of_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Nvml(without=("nvmlDeviceGetCount",)))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MachineError, match="which is not known") as caught:
        identify()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("nvml")
def test_cuda_visible_devices_that_names_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES='7' names none of its 2 GPUs"):
        identify()


def test_monitor_summarizes_its_samples(nvml: Nvml) -> None:
    with Monitor(1) as monitor:
        monitor.sample()
        nvml.clock, nvml.mask = 1740, 0x4
        monitor.sample()
        nvml.clock, nvml.mask = 345, 0x1
        monitor.sample()
    condition = monitor.condition(set_aside=9)
    assert (condition.sm_clock_mhz, condition.sm_clock_min_mhz) == (1860, 1740), "an idle reading tells nothing"
    assert (condition.temperature_c, condition.power_w) == (54, 412.3)
    assert condition.throttle == ("SW power cap",)
    assert condition.set_aside == 9
    assert nvml.initialised == 0


@pytest.mark.parametrize(
    ("mask", "unfit"), [(0x1, False), (0x4, False), (0x2, False), (0x8, True), (0x20, True), (0x44, True), (0x80, True)]
)
def test_throttled_is_true_only_for_reasons_that_invalidate_timings(nvml: Nvml, mask: int, unfit: bool) -> None:
    with Monitor(0) as monitor:
        assert not monitor.throttled()
        nvml.mask = mask
        monitor.sample()
        assert monitor.throttled() is unfit
        nvml.mask = 0
        monitor.sample()
        assert not monitor.throttled()


def test_past_throttling_is_detected_from_the_counters(nvml: Nvml) -> None:
    nvml.counters[270] = 10**9
    with Monitor(0) as monitor:
        monitor.sample()
        assert not monitor.throttled(), "what happened before counts for nothing"
        nvml.counters[270] += 5000
        monitor.sample()
        assert monitor.throttled()
        monitor.sample()
        assert not monitor.throttled()
    assert monitor.condition().throttle == ("HW thermal",)


def test_monitor_works_without_missing_nvml_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(
        monkeypatch,
        Nvml(without=("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues")),
    )
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40  # the name before driver 535
    with Monitor(0) as monitor:
        monitor.sample()
        assert monitor.throttled()
    assert monitor.condition().power_w is None
    assert monitor.condition().sm_clock_mhz == 1980


@pytest.mark.usefixtures("nvml")
def test_monitor_of_a_missing_gpu_has_no_readings() -> None:
    with Monitor(5) as monitor:
        assert monitor.sample().sm_clock_mhz is None
    assert monitor.condition().throttle == ()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("index", [0, None])
def test_monitor_without_a_gpu_has_no_readings(index: int | None) -> None:
    with Monitor(index) as monitor:
        monitor.sample()
        assert not monitor.throttled()
    assert monitor.condition().sm_clock_mhz is None


def test_a_failing_nvml_never_raises_from_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, Nvml())

    def broken(*arguments: object) -> None:
        raise NvmlError("GPU is lost")

    for name in [n for n in vars(fake) if n.startswith("nvmlDevice") and "Count" not in n and "Handle" not in n]:
        setattr(fake, name, broken)
    with Monitor(0) as monitor:
        sample = monitor.sample()
    assert sample == machine.Sample(sm_clock_mhz=None, temperature_c=None, power_w=None, reasons=frozenset())


def test_an_unknown_throttle_reason_is_named_by_its_bit() -> None:
    assert reason_names(0x8000_0004) == {"SW power cap", "0x80000000"}
    assert reason_names(0) == frozenset()


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
     ("Tesla V100-SXM2-16GB", "nvidia-tesla-v100-sxm2-16gb"), ("NVIDIA H200 MIG 1g.18gb", "nvidia-h200-mig-1g-18gb")],
)  # fmt: skip
def test_gpu_slugs(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


@pytest.mark.parametrize(
    ("model", "slug"),
    [("Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz", "cpu-intel-xeon-gold-6338"),
     ("AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763"),
     ("Intel(R) Xeon(R) Processor", "cpu-intel-xeon-f6m143"),
     ("", "cpu-unknown-f6m143")],
)  # fmt: skip
def test_cpu_slugs(model: str, slug: str) -> None:
    assert cpu_slug(model, {"cpu family": "6", "model": "143"}) == slug
