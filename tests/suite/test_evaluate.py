"""`perfsuite evaluate`: errors of an operator with known predictions, and error messages."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from scale import FULLY

from suite.commands.evaluate import evaluate as command
from suite.commands.train import train
from suite.ups import evaluation
from suite.ups.batches import Data, mixture_of
from suite.ups.config import TrainConfig
from suite.ups.networks import Networks

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/ups/tiny.yaml")
SMALL = TrainConfig(
    tokens=8, latent_width=8, width=16, depth=1, heads=2, decoder_width=16, decoder_depth=1, batch_size=2
)
DATA = Data(tokens=8, latent_width=8, synthetic=4, synthetic_frames=5, batch_size=2)
SYNTHETIC = ["--synthetic", "4", "--synthetic_frames", "5"]
CPU = torch.device("cpu")


@pytest.fixture
def given():
    return mixture_of(DATA)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = ["ups", "--config", CONFIG, "--device", "cpu", "--steps", "2", "--folder", str(folder)]
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 0, result.output
    return folder


def test_nrmse_matches_the_source_s_definition():
    assert evaluation.nrmse(4.0, 16.0) == pytest.approx(0.5)
    assert evaluation.nrmse(1.0, 0.0) == pytest.approx(1e4)


def test_exact_predictions_have_no_latent_error(given):
    networks = Networks(SMALL, given)
    calls = iter(range(100))

    def exactly(z, dt):
        task = given.tasks[0] if dt[0] < 0.5 else given.tasks[1]
        step = next(calls) % (task.fields.states - 1) + 1
        return task.latents.rows[torch.tensor(task.fields.validation) * task.fields.states + step]

    scores, _ = evaluation.evaluate(networks, given, CPU, 4, exactly)
    assert [(s.task, s.step) for s in scores] == [*(("advection1d", n) for n in range(1, 5)), ("darcy2d", 1)]
    assert all(s.latent_nrmse == 0 for s in scores)


def test_nrmse_is_computed_on_decoded_fields_in_physical_units(given):
    networks = Networks(SMALL, given)
    scores, examples = evaluation.evaluate(networks, given, CPU, 1, lambda z, dt: 2 * z)
    for task, score, example in zip(given.tasks, scores, examples, strict=True):
        errors, squares = [], []
        for sample in task.fields.validation:
            z = 2 * task.latents.rows[sample * task.fields.states]
            decoded = networks.decoder(task.task)(z[None], task.fields.points.flatten(0, -2)).detach().flatten()
            mean, std = task.fields.normalisations[1].mean, task.fields.normalisations[1].std
            truth = task.fields.read(sample)[1].flatten() * std + mean
            errors.append((decoded * std + mean - truth).square().mean())
            squares.append(truth.square().mean())
        expected = math.sqrt(float(torch.stack(errors).mean() / (torch.stack(squares).mean() + 1e-8)))
        assert score.nrmse == pytest.approx(expected, rel=1e-5)
        assert example.field.shape == task.fields.grid


def test_averaged_weights_are_loaded(given):
    networks = Networks(SMALL, given)
    averages = {name: weight.detach() + 1 for name, weight in networks.weights().items()}
    found, step = evaluation.loaded(SMALL, given, {"averages": averages}, CPU)
    assert step is found.operator
    assert all(torch.equal(weight, averages[name]) for name, weight in found.weights().items())


@FULLY
def test_weights_option_selects_averaged_or_trained_weights(run, tmp_path):
    found = []
    for weights, words in (("averages", "averaged weights"), ("trained", "the trained weights, not averaged")):
        arguments = ["ups", "--checkpoint", str(run), "--device", "cpu", "--out", str(tmp_path), "--weights", weights]
        result = CliRunner().invoke(command, [*arguments, *SYNTHETIC])
        assert result.exit_code == 0, result.output
        assert f"validation samples, with {words}." in result.output
        found.append(json.loads((tmp_path / "evaluation.json").read_text()))
        assert found[-1]["weights"] == weights
    assert found[0]["scores"] != found[1]["scores"]


def test_evaluate_writes_json_markdown_and_plots(run, tmp_path):
    arguments = ["ups", "--checkpoint", str(run), "--device", "cpu", "--out", str(tmp_path), "--rollout", "3"]
    result = CliRunner().invoke(command, [*arguments, *SYNTHETIC])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["data_of_the_training"] is True
    assert [(s["task"], s["step"]) for s in found["scores"]] == [
        *(("advection1d", n) for n in (1, 2, 3)),
        ("darcy2d", 1),
    ]
    assert all(math.isfinite(s["nrmse"]) and s["nrmse"] > 0 for s in found["scores"])
    assert f"| darcy2d | 1 | 1 | {found['scores'][-1]['nrmse']:.4f} |" in (tmp_path / "evaluation.md").read_text()
    for task in ("advection1d", "darcy2d"):
        assert (tmp_path / f"{task}.svg").read_text().startswith("<?xml")


def test_data_other_than_the_training_data_are_reported(run, tmp_path):
    arguments = ["ups", "--checkpoint", str(run), "--device", "cpu", "--out", str(tmp_path), "--synthetic", "5"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "the data are not those of the training" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["polychromic", "--checkpoint", "x"], 2, "only ups, leak_cnn, eigenstate_lm, trainer2 can be evaluated"),
        (["ups", "--checkpoint", "x", "--rollout", "0"], 2, "--rollout 0: give 1 or more"),
        (["ups", "--checkpoint", "x", "--data", "nowhere"], 1, "no checkpoint x"),
        (
            ["ups", "--checkpoint", "."],
            1,
            "no checkpoint .; name a file, or a folder, that `perfsuite train ups` wrote",
        ),
        (["ups", "--checkpoint", "x" * 300], 1, f"no checkpoint {'x' * 300}; name a file, or a folder"),
        (["ups", "--checkpoint", "x", "--fold", "1"], 2, "no field is called 'fold'"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, [*arguments, "--device", "cpu"])
    assert (result.exit_code, message in result.output) == (code, True), result.output
    assert result.output.count("\n") == 1


def test_a_folder_that_is_not_writable_is_reported_before_the_evaluation(run, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ["ups", "--checkpoint", str(run), "--device", "cpu", "--out", str(tmp_path / "file/x"), *SYNTHETIC]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()  # neither scores nor anything else is printed before
    assert "cannot write into" in line
    assert "name another folder with --out" in line


def test_data_of_one_task_do_not_fit_a_checkpoint_of_two_tasks(run, tmp_path):
    from suite.ups.pde_build import build
    from suite.ups.recipe import recipes

    class Quiet:
        def begin(self, *arguments, **options): ...

        def __getattr__(self, name):
            return lambda *arguments, **options: None

    (recipe,) = recipes(task="darcy2d", samples=2, seed=0, betas=[], points=None, resolution=8)
    build(tmp_path / "d.hdf5", recipe, Quiet())
    arguments = ["ups", "--checkpoint", str(run), "--device", "cpu", "--darcy", str(tmp_path / "d.hdf5")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert "the checkpoint does not fit these data" in result.output


def test_entry_point_refers_to_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["evaluate"] == "suite.commands.evaluate:evaluate"
