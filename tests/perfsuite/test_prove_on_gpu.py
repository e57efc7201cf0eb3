"""The tool that runs groups of proofs on a GPU reports what passed, failed and was cut off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import prove_on_gpu

TESTS = {
    "passing": "def test_it():\n    pass\n",
    "failing": "def test_it():\n    assert False\n",
    "hanging": "import time\n\n\ndef test_it():\n    time.sleep(600)\n",
}


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("passing", 0, "1 passed"), ("failing", 1, "FAILED"), ("hanging", 1, "cut off")],
)
def test_the_result_of_a_group_is_printed(
    name: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"test_{name}.py"
    file.write_text(TESTS[name])
    monkeypatch.setattr(prove_on_gpu, "GROUPS", {"it": ("--noconftest", "--rootdir", str(tmp_path), str(file))})
    monkeypatch.setattr(prove_on_gpu, "ONE_PROCESS", ("it",))
    seconds = str(prove_on_gpu.SHUTDOWN_S + 0.1) if name == "hanging" else "60"
    monkeypatch.setattr(sys, "argv", ["prove_on_gpu", "it", "--seconds", seconds, "--out", str(tmp_path / "out")])
    assert prove_on_gpu.main() == code
    assert says in capsys.readouterr().out
    assert (tmp_path / "out" / "it.log").exists()


def test_an_unknown_group_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prove_on_gpu", "pears"])
    with pytest.raises(SystemExit) as stopped:
        prove_on_gpu.main()
    assert stopped.value.code == 2
    assert "unknown group 'pears'; choose from pairs, planted" in capsys.readouterr().err


def test_every_path_of_a_group_exists() -> None:
    paths = [argument for group in prove_on_gpu.GROUPS.values() for argument in group if "/" in argument]
    assert len(paths) > 20
    assert all((prove_on_gpu.ROOT / path).exists() for path in paths)
