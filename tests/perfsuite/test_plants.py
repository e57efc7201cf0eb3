"""The faults planted to test the gate fit their modules, and the workloads that they name exist."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from scratch import ROOT

sys.path.insert(0, str(ROOT / "tools"))
try:
    import plants
finally:
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("name", plants.PLANTS)
def test_each_plant_fits_its_module(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "optimized", tmp_path / "optimized")
    path = plants.plant(tmp_path, name)
    assert path.read_text() != (ROOT / path.relative_to(tmp_path)).read_text()
    ast.parse(path.read_text())
    with pytest.raises(ValueError, match="something is planted already"):
        plants.plant(tmp_path, name)
    path.write_text("")
    with pytest.raises(ValueError, match=r"adapt plants\.py"):
        plants.plant(tmp_path, name)


def test_each_plant_names_the_workloads_that_show_it() -> None:
    for name, found in plants.PLANTS.items():
        assert found.seen or (found.red and found.green), name
        assert not {*found.red} & {*found.green}, name


def test_the_workloads_of_each_plant_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for id in {i for found in plants.PLANTS.values() for i in (*found.red, *found.green, *found.seen)}:
        file, pair, item = id.split("::")
        monkeypatch.syspath_prepend(str((ROOT / file).parent))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of setuptools, which torch imports
            module = importlib.import_module(Path(file).stem)
        assert module.__file__ == str(ROOT / file)
        assert item in [f"speed[{workload.name}]" for workload in getattr(module, pair).workloads], id


def test_the_command_prints_the_gate_command_to_run(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "optimized", tmp_path / "optimized")
    command = [sys.executable, str(ROOT / "tools/plant_slowdown.py")]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for name, option in (("launch", "gate --partial 'tests/"), ("loop_bound", "gate --partial --changed 'tests/")):
        done = subprocess.run(
            [*command, name], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert option in done.stdout
    done = subprocess.run(
        [*command, "launch"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert "something is planted already" in done.stderr
