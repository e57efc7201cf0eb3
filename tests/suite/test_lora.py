"""Low-rank adapters: their outputs, their dropout, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic import lora
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.lora import Dropout, LoRALinear, Settings, attach, kept, places_of, starts_of
from suite.polychromic.lora_nf4 import NF4LoRALinear
from suite.polychromic.nf4 import NF4, dequantised

SHAPE = Shape(vocabulary=16, width=8, hidden=12, layers=2, heads=2, kv_heads=1, head_width=4, positions=32)
SETTINGS = Settings(rank=3, alpha=6.0, dropout=0.25)


@pytest.fixture
def files() -> Any:
    return pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: pip install 'perfsuite[train]'"
    )


def adapted(seed: int = 0, shape: Shape = SHAPE) -> tuple[Llama, dict[str, LoRALinear]]:
    torch.manual_seed(seed)
    model = Llama(shape)
    adapters = attach(model, SETTINGS)
    with torch.no_grad():
        for adapter in adapters.values():
            adapter.lora_b.normal_()
    return model, adapters


def tokens() -> torch.Tensor:
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(1))


def test_new_adapters_do_not_change_the_output() -> None:
    torch.manual_seed(0)
    model = Llama(SHAPE)
    before = model(tokens())
    adapters = attach(model, SETTINGS)
    assert len(adapters) == 2 * 7
    assert torch.equal(model(tokens()), before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{part}" for name in adapters for part in "ab"
    }


def test_lora_linear_matches_its_definition() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(torch.nn.Linear(4, 5, bias=False), SETTINGS, 0)
    x = torch.randn(2, 4)
    with torch.no_grad():
        layer.lora_b.normal_()
    delta = layer.lora_b @ layer.lora_a * 2.0
    torch.testing.assert_close(layer(x), x @ (layer.weight + delta).T)
    layer.dropout = Dropout(starts_of(7, 0, 1), places_of(0, (1, 2))[0])
    multipliers = kept(layer.dropout.starts[0], layer.dropout.places, 4, 0.25) / 0.75
    torch.testing.assert_close(layer(x), x @ layer.weight.T + (x * multipliers) @ delta.T)


def test_nf4_lora_linear_matches_its_definition() -> None:
    torch.manual_seed(0)
    base = torch.nn.Linear(128, 5, bias=False)
    exact = base.weight.detach().clone()
    layer = NF4LoRALinear(base, SETTINGS, 0)
    x = torch.randn(2, 128)
    with torch.no_grad():
        layer.lora_b.normal_()
    values, largest = torch.tensor(NF4), exact.view(5, 2, 64).abs().amax(2)
    nearest = values[(exact.view(5, 2, 64, 1) / largest[:, :, None, None] - values).abs().argmin(-1)]
    weight = (nearest * largest[:, :, None]).view(5, 128)
    torch.testing.assert_close(layer.weight, weight)
    torch.testing.assert_close(layer(x), x @ (weight + layer.lora_b @ layer.lora_a * 2.0).T)
    frozen = [p for p in layer.parameters() if not p.requires_grad]
    assert sum(p.numel() * p.itemsize for p in frozen) * 8 == 4.5 * exact.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dequantised_weight_has_the_original_dtype(dtype: torch.dtype) -> None:
    layer = NF4LoRALinear(torch.nn.Linear(64, 3, bias=False, dtype=dtype), SETTINGS, 0)
    exact = dequantised(layer.codes, layer.absmax.double())
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight, (exact if dtype == torch.float64 else exact.float()).to(dtype))


def dropped(seed: int = 0, step: int = 0, adapter: int = 0, example: int = 0, token: int = 0) -> torch.Tensor:
    """Return which elements of a row of tokens are dropped, from `token` on."""
    return ~kept(starts_of(seed, step, 2)[adapter], places_of(example, (1, token + 200))[0, token:], 500, 0.1)


def test_dropout_depends_on_seed_step_adapter_example_and_token() -> None:
    drawn = dropped()
    assert torch.equal(drawn, dropped())
    assert 0.097 < drawn.float().mean() < 0.103
    for other in (dropped(seed=1), dropped(step=1), dropped(adapter=1), dropped(example=1), dropped(token=1)):
        assert 0.17 < (drawn != other).float().mean() < 0.19  # 2 · 0.1 · 0.9 if they are independent
    assert kept(starts_of(0, 0, 1)[0], torch.arange(10), 100, 0.0).all()


def test_dropout_does_not_depend_on_the_batch() -> None:
    start = starts_of(0, 0, 1)[0]
    whole = kept(start, places_of(0, (3, 8)), 16, 0.1)
    assert torch.equal(kept(start, places_of(2, (1, 5)), 16, 0.1), whole[2:, :5])


@pytest.mark.parametrize("fields", [{"rank": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_settings_out_of_range_raise_value_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(SETTINGS, **fields)


@pytest.mark.usefixtures("files")
def test_saved_adapters_are_loaded_unchanged(tmp_path: Path) -> None:
    model, adapters = adapted()
    lora.save(adapters, tmp_path / "new" / "folder", "the base")
    other, theirs = adapted(seed=1)
    assert lora.settings_of(tmp_path / "new" / "folder") == SETTINGS
    other.load_state_dict({n: p for n, p in model.state_dict().items() if "lora" not in n}, strict=False)
    lora.load(theirs, tmp_path / "new" / "folder")
    assert torch.equal(other(tokens()), model(tokens()))


@pytest.mark.usefixtures("files")
def test_load_rejects_adapters_of_another_model(tmp_path: Path) -> None:
    lora.save(adapted()[1], tmp_path, "the base")
    wider, deeper = replace(SHAPE, hidden=16), replace(SHAPE, layers=3)
    for shape, words in (
        (wider, r"gate_proj\.lora_B\.weight is \(12, 3\), expected \(16, 3\)"),
        (deeper, "is missing"),
    ):
        with pytest.raises(PerfsuiteError, match=rf"are not of this model: .*{words}"):
            lora.load(adapted(shape=shape)[1], tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"{")
    with pytest.raises(PerfsuiteError, match=r"adapter_model\.safetensors is damaged: "):
        lora.load(adapted()[1], tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(PerfsuiteError, match=r"adapter_model\.safetensors is missing"):
        lora.load(adapted()[1], tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; plain LoRA adapters are read"),
        ({"use_dora": True}, "use_dora is True; plain LoRA"),
        ({"target_modules": ["q_proj"]}, r"the adapters are of \['q_proj'\]; expected one for each of q_proj, k_proj"),
        ({"r": None}, "is damaged: TypeError"),
        ({"r": 0}, "is damaged: ValueError: rank must be 1 or more"),
    ],
)
def test_settings_of_rejects_other_kinds_of_adapters(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    lora.save(adapted()[1], tmp_path, "the base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(PerfsuiteError, match=words):
        lora.settings_of(tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # raised by transformers, through PEFT
def test_peft_loads_saved_adapters_and_saves_them_in_the_same_format(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, adapters = adapted()
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    base = transformers.LlamaForCausalLM(config).eval()
    base.load_state_dict({n: p for n, p in model.state_dict().items() if "lora" not in n})
    lora.save(adapters, tmp_path / "ours", "")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    _, again = adapted(seed=1)
    assert lora.settings_of(tmp_path / "theirs") == SETTINGS
    lora.load(again, tmp_path / "theirs")
    for name, adapter in adapters.items():
        assert torch.equal(adapter.lora_a, again[name].lora_a)
        assert torch.equal(adapter.lora_b, again[name].lora_b)


def test_kv_cache_uses_the_current_adapters() -> None:
    from optimized.generation.kv_cache import kv_cache as cached
    from reference.generation.kv_cache import kv_cache as plain

    model, adapters = adapted()
    given = tokens(), torch.tensor([5, 2]), tokens().flip(1)
    step = cached(model)
    first = step(*given)
    with torch.no_grad():
        torch.testing.assert_close(first, plain(model)(*given))
        for adapter in adapters.values():
            adapter.lora_b.mul_(2)
        torch.testing.assert_close(step(*given), plain(model)(*given))
        assert not torch.equal(step(*given), first)
