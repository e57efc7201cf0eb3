"""The planted slowdowns fit the modules that they are planted in."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest
from scratch import ROOT

spec = importlib.util.spec_from_file_location("plant_slowdown", ROOT / "tools/plant_slowdown.py")
assert spec is not None and spec.loader is not None  # noqa: PT018
planting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planting)


@pytest.mark.parametrize("name", planting.NAMES)
def test_more_work_is_planted(tmp_path: Path, name: str) -> None:
    shutil.copytree(ROOT / "optimized", tmp_path / "optimized")
    (tmp_path / "baselines").mkdir()
    shutil.copy(ROOT / planting.BASELINE, tmp_path / planting.BASELINE)
    path = planting.plant(tmp_path, name, 0.03)
    original = (ROOT / path.relative_to(tmp_path)).read_text()
    assert path.read_text() != original
    ast.parse(path.read_text())
    with pytest.raises(ValueError, match="has more work already"):
        planting.plant(tmp_path, name, 0.03)
    path.write_text("")
    with pytest.raises(ValueError, match=r"adapt plant_slowdown\.py"):
        planting.plant(tmp_path, name, 0.03)
