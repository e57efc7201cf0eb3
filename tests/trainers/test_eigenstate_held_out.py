"""Held-out sequences of eigenstate_lm: training skips them, and validation keeps the best weights."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy
import pytest
import torch
from click.testing import CliRunner
from scale import some
from states import same, through_a_file

from optimized.trainers.eigenstate_lm import Trainer as Optimized
from perfsuite import PerfsuiteError
from reference.trainers.eigenstate_lm import Trainer as Reference
from suite import packed_text
from suite.commands.data import data
from suite.commands.evaluate import evaluate
from suite.commands.generate import loaded
from suite.commands.train import train
from suite.eigenstate_lm import held_out
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.data import Data, Steps, Text, next_rows, text_of
from suite.eigenstate_lm.ngrams import loss_of
from suite.runtime import Store, checkpoints
from suite.text import synthetic

VOCABULARY, HELD_OUT = 60, 5
SMALL = TrainConfig(
    width=16, layers=2, eigenstates=4, sequence_length=24, batch_size=3, accumulation=2, steps=60, learning_rate=1e-2,
    dropout=0.1, num_workers=0, use_compile=False, validate_every=4,
)  # fmt: skip
SIDES = pytest.mark.parametrize("kind", [Reference, Optimized])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("pack")
    tokens = synthetic(VOCABULARY, SMALL.sequence_length, 40).input_ids.flatten().numpy()
    packed_text.write(folder, tokens, numpy.array([len(tokens)]), "", VOCABULARY, {"recipe": "drawn"})
    return Text(packed_text.opened(folder), SMALL.sequence_length, HELD_OUT)


def trained(kind, text, steps, config=SMALL):
    torch.manual_seed(0)  # seeds the dropout
    trainer = kind(config, text, "cpu")
    for _ in range(steps):
        trainer.train_window({})
    return trainer


def test_held_out_sequences_are_never_trained_on(text):
    assert text.validation.tolist() == [3, 11, 19, 27, 35]
    assert len(text) == 39 - HELD_OUT
    seen = torch.cat([next_rows(SMALL, text, step, {}) for step in range(20)])
    assert set(seen.tolist()) == set(range(39)) - set(text.validation.tolist())
    whole = Text(text.pack, text.length)
    assert torch.equal(whole.training, torch.arange(39))
    assert len(whole.validation) == 0


@pytest.mark.parametrize("workers", some((0, 1), usual=(0,)))
def test_training_with_the_loader_gives_the_same_weights(workers, text):
    plain = trained(Optimized, text, 7).state_dict()["weights"]
    config = dataclasses.replace(SMALL, loader=True, num_workers=workers)
    ahead = trained(Optimized, text, 7, config).state_dict()["weights"]
    assert same(plain, ahead)


@SIDES
def test_validation_loss_is_the_mean_over_all_held_out_tokens_without_dropout(kind, text):
    trainer = trained(kind, text, 4)
    plain = Reference(dataclasses.replace(SMALL, dropout=0.0), text, "cpu", torch.float64)
    with torch.no_grad():
        for name, weight in plain.weights.items():
            weight.copy_(trainer.weights[name])
    inputs, labels = plain.sequences.batch(text.validation)
    expected = float(plain.held_out_loss(inputs, labels))
    assert trainer.metrics()["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert "bits_per_byte" not in trainer.metrics()  # the tokens are random, not those of a text


@SIDES
def test_validation_does_not_change_weights_or_optimizer_state(kind, text):
    often = trained(kind, text, 9).state_dict()
    never = trained(kind, text, 9, dataclasses.replace(SMALL, validate_every=0)).state_dict()
    assert same(often["weights"], never["weights"])
    assert same(often["optimizer"], never["optimizer"])
    assert "best" not in never


@SIDES
def test_weights_with_the_smallest_held_out_loss_are_kept(kind, text):
    trainer = kind(SMALL, text, "cpu")
    best, least = None, math.inf
    for step in range(1, 25):
        trainer.train_window({})
        if step % 4 == 0 and (loss := trainer.held_out.loss) < least:
            best, least = (step, {k: w.clone() for k, w in trainer.state_dict()["weights"].items()}), loss
    state = trainer.state_dict()["best"]
    assert (state["step"], state["loss"]) == (best[0], least)
    assert same(state["weights"], best[1])
    assert trainer.held_out.summary().startswith("held-out loss ")


def test_nan_as_first_held_out_loss_is_replaced_by_a_finite_one(text, monkeypatch):
    trainer = Optimized(SMALL, text, "cpu")
    for step, loss in enumerate((math.nan, 1.0, math.nan, 0.5), 1):
        monkeypatch.setattr(held_out, "mean_loss", lambda *given, loss=loss: loss)
        trainer.held_out.validate(4 * step, None, "cpu", None)
    assert (trainer.held_out.best_step, trainer.held_out.best_loss) == (16, 0.5)


@SIDES
def test_resumed_run_ends_with_the_same_best_weights(kind, text):
    # At this rate the held-out loss rises after the resume, so that the best weights are those of the checkpoint.
    config = dataclasses.replace(SMALL, dropout=0.0, learning_rate=0.3)
    whole = trained(kind, text, 8, config)
    other = kind(config, text, "cpu")
    other.load_state_dict(through_a_file(trained(kind, text, 6, config)))
    for _ in range(2):
        other.train_window({})
    best = other.state_dict()["best"]
    assert same(whole.state_dict()["best"], best)
    assert (best["step"], best["last"]["step"]) == (4, 8)


@SIDES
def test_run_stops_when_the_held_out_loss_has_not_fallen_for_patience(kind, text):
    trainer = trained(kind, text, 4, dataclasses.replace(SMALL, patience=2))
    assert trainer.stops() is None
    state = trainer.state_dict()
    state["best"]["last"] = {"loss": 9.0, "step": 12}
    trainer.load_state_dict(state)
    assert trainer.stops() == "no held-out loss was less than that of step 4 in 2 validations (patience)"


def test_checkpoint_without_best_weights_loads_and_mismatched_ones_raise(text):
    state = trained(Optimized, Text(text.pack, text.length), 2).state_dict()
    trainer = Optimized(SMALL, text, "cpu")
    trainer.load_state_dict(state)
    assert trainer.held_out.step == 0
    state["best"] = {"weights": {"embedding": torch.zeros(1)}, "loss": 1.0, "step": 1, "last": {"loss": 1.0, "step": 1}}
    with pytest.raises(ValueError, match="only in the checkpoint, or only here"):
        trainer.load_state_dict(state)


def test_data_position_from_another_validation_split_is_rejected(text):
    steps = Steps(text, 6, 60, 0)
    before = Steps(Text(text.pack, text.length), 6, 60, 0)
    with pytest.raises(PerfsuiteError, match="validation has changed since the checkpoint was written, from 0 to 5"):
        steps.load_state_dict(before.state_dict())
    older = {name: value for name, value in before.state_dict().items() if name != "validation"}
    before.load_state_dict(older)


def test_holding_out_all_sequences_raises(text):
    with pytest.raises(PerfsuiteError, match=r"validation: 39 sequences are held out, and .* has 39 of 24"):
        Text(text.pack, text.length, 39)


def test_pack_train_and_evaluate_report_bits_per_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    words = numpy.random.default_rng(0).integers(0, 40, 6000)
    Path("in/a.txt").write_text(" ".join(f"wörd{n}" for n in words))
    assert CliRunner().invoke(data, ["pack", "text", "--from", "in", "--vocabulary", "300"]).exit_code == 0
    sizes = [
        "--width",
        "16",
        "--layers",
        "1",
        "--eigenstates",
        "4",
        "--sequence_length",
        "32",
        "--use_compile",
        "false",
    ]
    common = ["--data", "text", "--device", "cpu"]
    options = ["--steps", "24", "--validate_every", "12", "--validation", "8", "--folder", "run", *sizes]
    done = CliRunner().invoke(train, ["eigenstate_lm", *common, *options])
    assert done.exit_code == 0, done.output
    assert "8 more held out" in done.output
    assert "held-out loss " in done.output

    given = text_of(Data(data="text", sequence_length=32, validation=8))
    library = tokenizers.Tokenizer.from_str(given.tokenizer)
    labels = given.packed().batch(given.validation)[1]
    expected = sum(len(library.decode(row.tolist(), skip_special_tokens=True).encode()) for row in labels)
    # A character split between two sequences is decoded to a replacement character of 3 bytes in each.
    assert abs(given.validation_bytes - expected) <= 4 * len(labels)

    done = CliRunner().invoke(evaluate, ["eigenstate_lm", "--checkpoint", "run", "--ngrams", "3", *common])
    assert done.exit_code == 0, done.output
    assert "a Kneser-Ney model of 3 tokens, counted on the other sequences: " in done.output
    found = json.loads(Path("run/evaluation/evaluation.json").read_text())
    kept = checkpoints.load_latest(Store(Path("run")), "eigenstate_lm")[1].trainer["best"]
    assert found["validation_loss"] == pytest.approx(kept["loss"], rel=1e-5)
    bits = kept["loss"] / math.log(2) * 8 * 32 / given.validation_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found["data_of_the_training"] is True
    assert found["ngram_validation_loss"] == pytest.approx(loss_of(given, 3))
    assert found["ngram_bits_per_byte"] < found["bits_per_byte"]  # after only 24 steps
    weights, _ = loaded("run")
    assert all(torch.equal(weights[name], kept["weights"][name]) for name in weights)


def test_evaluate_takes_the_vocabulary_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokens = ["--synthetic", "8", "--validation", "2", "--device", "cpu"]
    sizes = ["--width=16", "--layers=1", "--eigenstates=4", "--sequence_length=32", "--use_compile=false"]
    options = [
        "--vocabulary",
        "300",
        "--steps=12",
        "--windows=1",
        "--batch_size=2",
        "--accumulation=1",
        "--folder",
        "run",
    ]
    done = CliRunner().invoke(train, ["eigenstate_lm", *tokens, *options, *sizes])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(evaluate, ["eigenstate_lm", "--checkpoint", "run", *tokens])
    assert done.exit_code == 0, done.output
    assert json.loads(Path("run/evaluation/evaluation.json").read_text())["data_of_the_training"] is True
    done = CliRunner().invoke(evaluate, ["eigenstate_lm", "--checkpoint", "run", *tokens, "--vocabulary", "400"])
    assert "its vocabulary has 300 tokens, and that of the data 400" in done.output
