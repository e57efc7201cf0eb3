"""`perfsuite train polychromic` and `perfsuite reply` with a model of random weights, and wrong input."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from reference.diversity.mean_pairwise_cosine import mean_pairwise_cosine
from reference.generation.batched_generation import batched_generation
from suite import trainers
from suite.commands.reply import reply
from suite.commands.train import train
from suite.polychromic.batches import prompts_of
from suite.polychromic.data import EVERY, TrainerData, uniforms

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/polychromic/tiny.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    arguments = ["polychromic", "--config", CONFIG, "--steps", "2", "--device", "cpu", "--folder", str(folder)]
    done = CliRunner().invoke(train, arguments)
    assert done.exit_code == 0, done.output
    return folder


def replied(*arguments: str) -> tuple[list[str], str]:
    done = CliRunner().invoke(reply, [*arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return done.stdout.split("\n"), done.stderr


def test_reply_prints_replies_and_their_diversity(run: Path) -> None:
    said, message = replied(str(run), "--prompt", "Say 3.", "--n", "3")
    assert message.startswith("diversity: 0.")
    assert said == replied(str(run / "window-00000002.pt"), "--prompt", "Say 3.", "--n", "3")[0]
    assert said != replied(str(run), "--prompt", "Say 3.", "--n", "3", "--seed", "1")[0]
    assert replied(str(run), "--prompt", "Say 3.", "--n", "1")[1] == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": []}, "does not fit the model tiny"),
        ({"optimizer": {}}, "does not fit the model tiny: it has no"),
        ({"model_digest": "other"}, "it was trained on another model than that in tiny"),
        ({"model": 3}, "is damaged: it names no model"),
        ({"config": {"dtype": "float16"}}, "is damaged: its configuration is none (dtype='float16': use float32"),
        ({"config": {"rank": 2.0}}, "is damaged: its configuration is none (rank=2.0: use a whole number from 1 on"),
        ({"config": {"objective": "x"}}, "is damaged: its configuration is none (objective='x'"),
    ],
)
def test_a_damaged_checkpoint_is_reported_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    from suite import finding
    from suite.runtime import checkpoints

    path = run / "window-00000002.pt"
    found = checkpoints.load(path, "polychromic")
    found.trainer.update(changes)
    monkeypatch.setattr(finding, "checkpoint_of", lambda given, trainer: (path, found))
    done = CliRunner().invoke(reply, [str(run), "--prompt", "x", "--device", "cpu"])
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert words in line


def test_weights_with_nan_are_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from suite import finding
    from suite.runtime import checkpoints

    found = checkpoints.load(run / "window-00000002.pt", "polychromic")
    next(iter(found.trainer["weights"].values())).fill_(torch.nan)
    monkeypatch.setattr(finding, "checkpoint_of", lambda given, trainer: (Path("x.pt"), found))
    done = CliRunner().invoke(reply, [str(run), "--prompt", "x", "--device", "cpu"])
    assert "x.pt has weights that are no finite numbers; name an earlier one" in done.output


def test_untrained_option_changes_the_replies(run: Path) -> None:
    from suite.runtime import checkpoints

    state = checkpoints.load(run / "window-00000002.pt", "polychromic").trainer
    config = trainers.config_of("polychromic")(**state["config"])
    assert config.steps == 2
    asked = [str(run), "--prompt", "Say 3.", "--n", "4", "--tokens", "40", "--temperature", "3"]
    assert replied(*asked)[0] != replied(*asked, "--untrained")[0]


def test_quality_matches_values_computed_from_the_validation_examples() -> None:
    data_config, load = trainers.data_config_of("polychromic"), trainers.data_of("polychromic")
    loaded = load(data_config(synthetic=40, length=64, batch_size=2, accumulation=2, validation=0.3))
    config = trainers.config_of("polychromic")(length=64, accumulation=2, prompts=2, new_tokens=5)
    trainer = trainers.build("polychromic", config, loaded.trainer_data, torch.device("cpu"), "optimized")
    for adapter in trainer.adapters.values():
        adapter.lora_b.data.normal_(std=0.1, generator=torch.Generator().manual_seed(adapter.number))
    found = trainers.quality_of("polychromic")(trainer, loaded.trainer_data)
    assert found.keys() == {"held_out_loss", "diversity", "log_likelihood"}
    assert 5 < found["held_out_loss"] < 6  # the vocabulary has 258 tokens
    untouched = loaded.trainer_data.language_model(torch.float32, "cpu")
    likelihoods: list[torch.Tensor] = []
    said, examples = [], {e.tokens[: e.prompt]: e for e in loaded.trainer_data.validation}
    for number, at in enumerate(range(0, len(examples), 8)):
        part = list(examples.values())[at : at + 8]
        numbers = uniforms(8 * number, 0, (len(part), 5, 5), "cpu")
        prompts = prompts_of(part, loaded.trainer_data.chat.end, "cpu")
        drawn = batched_generation(
            trainer.model, prompts.tokens, prompts.lengths, numbers, config.temperature, config.top_p, 1
        )
        for example, replies in zip(part, drawn.tolist(), strict=True):
            for tokens in replies:
                own = tokens[: tokens.index(1) + 1] if 1 in tokens else tokens
                whole = torch.tensor([*example.tokens[: example.prompt], *own])
                log_p = untouched(whole[None])[0].detach().log_softmax(-1)
                likelihoods.append(log_p[example.prompt - 1 : -1].gather(1, torch.tensor(own)[:, None]))
        said += [[loaded.trainer_data.chat.decode(reply) for reply in of_prompt] for of_prompt in drawn.tolist()]
    embedded = [trainer.sentences.encoder(*trainer.sentences.tokenized(of_prompt, "cpu")) for of_prompt in said]
    expected = torch.stack([mean_pairwise_cosine(of_prompt) for of_prompt in embedded]).mean()
    assert found["diversity"] == pytest.approx(float(expected), rel=1e-4)
    assert 0 < found["diversity"] < 1
    logits = [trainer.model(torch.tensor([e.tokens]))[0, e.prompt - 1 : -1] for e in loaded.trainer_data.validation]
    labels = [torch.tensor(e.tokens[e.prompt :]) for e in loaded.trainer_data.validation]
    expected = torch.nn.functional.cross_entropy(torch.cat(logits).detach(), torch.cat(labels))
    assert found["held_out_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["log_likelihood"] == pytest.approx(float(torch.cat(likelihoods).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--prompt", "x"], "no checkpoint nowhere; name a file, or a folder, that `perfsuite train"),
        (["RUN", "--prompt", "a" * 600], "and the model has room for 500; shorten it"),
        (["RUN", "--prompt", "x", "--top-p", "2"], "top_p=2.0: use a number above 0, at most 1"),
        (["RUN", "--prompt", "x", "--n", "0"], "Invalid value for '--n'"),
        (["RUN", "--prompt", " "], "--prompt: it is empty; say something"),
        (["RUN", "--prompt", "\udcff"], "--prompt: it is not UTF-8; give other text"),
        (["RUN", "--prompt", "x", "--model", "m" * 5000], "any more; name its folder with --model"),
        (
            ["RUN", "--prompt", "x", "--encoder", "nowhere"],
            "is not in nowhere any more; name it with --encoder",
        ),
        (["RUN", "--prompt", "x", "--tokens", "600"], "--tokens 600: the model has 512 positions; lower it"),
    ],
)
def test_wrong_options_are_reported_in_one_line(run: Path, arguments: list[str], words: str) -> None:
    given = [str(run) if a == "RUN" else a for a in arguments]
    done = CliRunner().invoke(reply, [*given, "--device", "cpu"])
    assert done.exit_code in (1, 2), done.output
    assert words in done.output.splitlines()[-1]


def test_entry_point_refers_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["reply"] == "suite.commands.reply:reply"


def test_model_digest_covers_later_tensors(tmp_path: Path) -> None:
    """A model with merged adapters differs from its base only in later tensors."""
    digests = []
    for name, changed in (("base", b""), ("merged", b"x"), ("again", b"")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        later = changed * EVERY or bytes(EVERY)
        (folder / "model.safetensors").write_bytes(bytes(20 * EVERY) + later + bytes(5))
        given: Any = None
        digests.append(
            TrainerData(chat=given, model=str(folder), encoder=None, training=(), validation=()).model_digest
        )
    assert digests[0] == digests[2] != digests[1]
