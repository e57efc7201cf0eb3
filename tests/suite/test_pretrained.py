"""A language model loaded from a folder: supported formats, and errors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.pretrained import load, shape_of

SHAPE = Shape(vocabulary=16, width=8, hidden=12, layers=2, heads=2, kv_heads=1, head_width=4, positions=32)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture
def save() -> Any:
    module = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: pip install 'perfsuite[train]'"
    )
    return module.save_file


def configured(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


def test_shape_is_read_from_the_configuration(tmp_path: Path) -> None:
    assert shape_of(configured(tmp_path)) == SHAPE
    newer = configured(
        tmp_path, rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, head_dim=6
    )
    assert asdict(shape_of(newer)) == {**asdict(SHAPE), "rope_theta": 5e5, "head_width": 6}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only models of Llama's architecture are trained"),
        ({"attention_bias": True}, "attention_bias is True; only models of Llama's"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is "),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rotary embeddings of type 'linear' are not computed here"),
        ({"hidden_size": "wide"}, r"config\.json is damaged: ValueError"),
        ({"vocab_size": None}, r"config\.json is damaged: TypeError"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "4 heads are no multiple of 3 key-value heads"),
        ({"head_dim": 5}, "the head width is 5, and must be even"),
    ],
)
def test_other_architectures_are_rejected(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PerfsuiteError, match=words):
        shape_of(configured(tmp_path, **fields))


def test_missing_folder_and_configuration_are_reported(tmp_path: Path) -> None:
    with pytest.raises(PerfsuiteError, match="absent is no folder; name one"):
        shape_of(tmp_path / "absent")
    with pytest.raises(PerfsuiteError, match=r"cannot read .*config\.json: No such file"):
        shape_of(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_loaded(tmp_path: Path, save: Any, tied: bool) -> None:
    model = Llama(Shape(**{**asdict(SHAPE), "tied": tied}))
    state = {k: v.clone() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    save(state, tmp_path / "model.safetensors")
    configured(tmp_path, tie_word_embeddings=tied)
    found = load(tmp_path, torch.float32, "cpu")
    tokens = torch.randint(16, (2, 5))
    assert torch.equal(found(tokens), model(tokens))
    assert (found.lm_head.weight is found.model.embed_tokens.weight) is tied
    assert load(tmp_path, torch.bfloat16, "cpu").lm_head.weight.dtype == torch.bfloat16


def test_sharded_weights_are_loaded(tmp_path: Path, save: Any) -> None:
    model = Llama(SHAPE)
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    halves = {f"part-{n}.safetensors": dict(list(state.items())[n::2]) for n in (0, 1)}
    for name, half in halves.items():
        save(half, tmp_path / name)
    index = {"weight_map": {key: name for name, half in halves.items() for key in half}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = torch.randint(16, (2, 5))
    assert torch.equal(load(configured(tmp_path), torch.float32, "cpu")(tokens), model(tokens))
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(PerfsuiteError, match=r"part-1\.safetensors is missing; fetch the model again"):
        load(tmp_path, torch.float32, "cpu")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(PerfsuiteError, match="has no weight_map of file names"):
        load(tmp_path, torch.float32, "cpu")


def test_weights_of_another_model_are_rejected(tmp_path: Path, save: Any) -> None:
    state = {k: v.clone() for k, v in Llama(SHAPE).state_dict().items() if k != "lm_head.weight"}
    configured(tmp_path)
    path = tmp_path / "model.safetensors"
    for changed, words in (
        ({"model.norm.weight": torch.ones(9)}, r"model\.norm\.weight is \(9,\), expected \(8,\)"),
        ({"model.more.weight": torch.ones(9)}, r"model\.more\.weight is \(9,\), expected nothing of that name"),
    ):
        save({**state, **changed}, path)
        with pytest.raises(PerfsuiteError, match=words):
            load(tmp_path, torch.float32, "cpu")
    save({k: v for k, v in state.items() if k != "model.norm.weight"}, path)
    with pytest.raises(PerfsuiteError, match=r"model\.norm\.weight is missing, expected \(8,\)"):
        load(tmp_path, torch.float32, "cpu")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PerfsuiteError, match=r"model\.safetensors is damaged: .*; fetch the model again"):
        load(tmp_path, torch.float32, "cpu")
