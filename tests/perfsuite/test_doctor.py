"""The doctor reports each problem in one line with its remedy, and survives a torch that crashes."""

from __future__ import annotations

import io
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from perfsuite import doctor
from perfsuite.doctor import Finding, examine, read_probe, table


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the processes that import torch and triton by immediate answers."""
    facts: dict[str, dict[str, Any]] = {
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "usable": False, "problem": None},
        "triton": {"version": "3.6.0"},
    }
    monkeypatch.setattr(doctor, "_start", lambda running, module, code: lambda: (facts[module], ""))
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)


def named(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


@pytest.mark.usefixtures("quick")
def test_examine_checks_every_component(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert [f.name for f in findings] == [
        "Python", "torch", "GPU", "NVML", "triton", "nvcc", "ninja", "C compiler", "pytest", "pytest-benchmark",
        "hypothesis", "flash-attn", "torchao", "liger-kernel", "git", "baseline", ".perfsuite/", "baselines/",
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_every_problem_has_a_one_line_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    findings = examine(tmp_path)
    assert {f.name for f in findings if f.status != "ok"} >= {"GPU", "C compiler", "pytest", "hypothesis", "git"}
    for finding in findings:
        assert bool(finding.remedy) == (finding.status != "ok"), finding
        assert "\n" not in finding.detail + finding.remedy


@pytest.mark.parametrize(
    ("code", "out", "err", "problem"),
    [
        (-signal.SIGILL, "", "", "crashes Python with SIGILL"),
        (-signal.SIGSEGV, "", "noise", "crashes Python with SIGSEGV"),
        (1, "", "Traceback\n  ...\nImportError: libcudart.so.13: cannot open", "fails: ImportError: libcudart.so.13"),
        (3, "", "", "fails: exit status 3"),
        (0, "hello", "", "without a word"),
    ],
)
def test_failed_probe_is_reported_in_one_line(code: int, out: str, err: str, problem: str) -> None:
    facts, message = read_probe(code, out, err)
    assert facts == {}
    assert problem in message
    assert "\n" not in message


def test_probe_output_may_follow_other_output() -> None:
    assert read_probe(0, 'a warning\n\n{"version": "2.11"}\n', "") == ({"version": "2.11"}, "")


def test_torch_that_crashes_on_import_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    monkeypatch.setattr(doctor, "TRITON_PROBE", "raise ImportError('no libtriton')")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    findings = examine(tmp_path)
    assert named(findings, "torch").status == "missing"
    assert "SIGABRT" in named(findings, "torch").detail
    assert "pip install" in named(findings, "torch").remedy
    assert "no libtriton" in named(findings, "triton").detail


@pytest.mark.parametrize(
    ("interpret", "status", "detail"), [("0", "ok", "on the GPU"), ("1", "warn", "although there is a GPU")]
)
def test_triton_finding_states_where_kernels_run(
    interpret: str, status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    finding = doctor._triton(lambda: ({"version": "3.6.0"}, ""), on_gpu=True)
    assert (finding.status, detail in finding.detail) == (status, True)
    assert "interpreter" in doctor._triton(lambda: ({"version": "3.6.0"}, ""), on_gpu=False).detail


def test_nvcc_of_another_cuda_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    other = doctor._nvcc({"usable": True, "cuda": "13.0"})
    assert other.status == "warn"
    assert "torch was built for CUDA 13.0" in other.detail
    assert doctor._nvcc({"usable": True, "cuda": "12.8"}).status == "ok"


def test_versions_outside_the_tested_range_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"hypothesis": doctor.Requirement("hypothesis>=6.150,<7")}
    monkeypatch.setattr(doctor, "requirements", lambda: required)
    monkeypatch.setattr(doctor, "package_version", lambda name: "5.1")
    finding = doctor._package("hypothesis", "draws the inputs")
    assert finding.status == "warn"
    assert "'hypothesis" in finding.remedy


def test_pytest_benchmark_that_fails_with_this_pytest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requirements", dict)
    monkeypatch.setattr(doctor, "package_version", {"pytest-benchmark": "5.2.3", "pytest": "9.2.0"}.get)
    assert "fails with pytest 9.2.0" in doctor._package("pytest-benchmark", "").detail


def test_git_finding_is_ok_only_in_a_repository(tmp_path: Path) -> None:
    assert "no repository" in doctor._git(tmp_path).detail
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert doctor._git(tmp_path).status == "ok"


def test_baseline_finding_if_missing_damaged_or_present(tmp_path: Path) -> None:
    missing = doctor._baseline(tmp_path)
    assert (missing.status, missing.remedy) == ("warn", "perfsuite accept --reason '…'")
    path = tmp_path / missing.detail.partition(" ")[0]
    path.parent.mkdir()
    for damaged in ("{", "[]", "[" * 100_000, '{"benchmarks": [{"fullname": 1}]}', '{"benchmarks": [1]}'):
        path.write_text(damaged)
        found = doctor._baseline(tmp_path)
        assert "cannot be read" in found.detail
        assert found.remedy.startswith("git checkout -- baselines/")
    path.write_text('{"benchmarks": [{"fullname": "a::b@reference"}, {"fullname": "a::b@optimized"}]}')
    present = doctor._baseline(tmp_path)
    assert present.status == "ok"
    assert present.detail.endswith(", 1 workload")


def test_folder_that_cannot_be_written_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._writable(tmp_path / "baselines", "baselines").status == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)  # root may write anywhere
    finding = doctor._writable(tmp_path / "baselines", "baselines")
    assert (finding.status, finding.remedy) == ("missing", f"chmod u+w {tmp_path}, or mount it writable")


def test_file_in_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".perfsuite").write_text("")
    assert doctor._writable(tmp_path / ".perfsuite", "reports").remedy == f"remove the file {tmp_path / '.perfsuite'}"


def test_table_shows_status_without_colour() -> None:
    out = io.StringIO()
    findings = [
        Finding(name="torch", status="ok", detail="2.11.0"),
        Finding(name="GPU", status="missing", detail="[none]", remedy="add one"),
    ]
    Console(file=out, width=80).print(table(findings))
    assert "✓ torch" in " ".join(out.getvalue().split())
    assert "✗ GPU [none] → add one" in " ".join(out.getvalue().split())
