"""`perfsuite evaluate trainer2` and `perfsuite query`: nearest passages, scores, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from perfsuite.errors import PerfsuiteError
from suite import text
from suite.commands.evaluate import evaluate
from suite.commands.query import query
from suite.commands.train import train
from suite.runtime import Store, checkpoints
from suite.text import Data, Sequences
from suite.trainer2 import search

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

SIZES = ["--batch_size", "4", "--sequence_length", "8", "--blocks", "1", "--lattice", "2", "--memory_slots", "8"]
SMALL = [*SIZES, "--window", "2", "--windows", "2", "--vocabulary", "300", "--validation", "9", "--device", "cpu"]
COLOURS = ("red", "green", "blue", "white")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was trained on texts of four colours."""
    folder = tmp_path_factory.mktemp("trainer2")
    (folder / "texts").mkdir()
    for colour in COLOURS:
        lines = [f"{colour} line {n} of {colour}\n" for n in range(20)]
        (folder / "texts" / f"{colour}.txt").write_text("".join(lines))
    given = ["--data", str(folder / "texts"), "--cache", str(folder / "cache"), "--folder", str(folder / "run")]
    done = CliRunner().invoke(train, ["trainer2", "--side", "reference", *SMALL, *given])
    assert done.exit_code == 0, done.output
    return folder / "run"


def asked(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(query, [str(run), "--device", "cpu", *arguments])


def evaluated(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(evaluate, ["trainer2", "--checkpoint", str(run), "--device", "cpu", *arguments])


def test_query_ranks_a_passage_itself_first(run: Path) -> None:
    file = Store(run).latest()
    found = checkpoints.load(file, "trainer2")
    passages = search.Passages(search.data_of(found.configuration, []), len(found.trainer["weights"]["embedding"]), 999)
    own = passages.decoded(3)
    done = asked(run, own, "-n", "4", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["rank"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["passage"] == own
    distances = [row["distance"] for row in rows]
    assert distances == sorted(distances)
    assert distances[0] == pytest.approx(1e-4, rel=0.1)  # sqrt(eps)
    shown = asked(run, own, "--passages", "10")
    assert "10 of " in shown.output
    assert shown.output.count("│ ") > 5


def test_costs_give_the_weights_of_the_reference_retrieval() -> None:
    from reference.geometry.retrieval import retrieval

    torch.manual_seed(0)
    metric, at, candidates = torch.rand(4) + 0.1, torch.randn(1, 4), torch.randn(6, 4)
    trainer = SimpleNamespace(metric=metric, config=SimpleNamespace(eps=1e-8))
    weights = torch.softmax(-5 * search.costs(trainer, at, candidates), 1)
    none = torch.zeros(1, 0, 4), torch.zeros(1, 0, 6), torch.zeros(1, 0, dtype=torch.bool)
    memory = candidates, torch.eye(6), torch.ones(6, dtype=torch.bool)  # identity: the result equals the weights
    torch.testing.assert_close(weights, retrieval(at, torch.ones(1), *none, *memory, None, metric, 5.0, 1e-8))


class Known:
    """Geometry whose coordinates are a given function of a sequence's tokens."""

    def __init__(self, of: Any) -> None:
        self.metric, self.config, self.coordinates = torch.ones(1), SimpleNamespace(eps=0.0), of


def sequences(count: int) -> Sequences:
    """Return sequences in which row i contains only the token i; the last row is padded."""
    ids = torch.arange(count)[:, None].expand(-1, 6).clone()
    mask = torch.ones(count, 6)
    mask[-1, 4:] = 0
    return Sequences(input_ids=ids, attention_mask=mask, vocabulary=count)


def test_scores_match_known_geometries() -> None:
    every = sequences(41)
    best = search.scores_of(Known(lambda tokens, mask: tokens[:, :1].double()), every)
    assert best == search.Scores(passages=40, first=1.0, among_ten=1.0, reciprocal_rank=1.0)
    same = search.scores_of(Known(lambda tokens, mask: torch.zeros(len(tokens), 1)), every)
    assert (same.first, same.among_ten, same.reciprocal_rank) == (0.0, 0.0, pytest.approx(1 / 20.5))
    shift = iter((0.0, 3.2))  # shifts the second halves by about three rows

    def moved(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens[:, :1].double() - next(shift)

    off = search.scores_of(Known(moved), every)
    assert (off.first, off.among_ten) == (pytest.approx(1 / 40), 1.0)
    chance = search.by_chance(40)
    assert (chance.first, chance.among_ten) == (1 / 40, 1 / 4)


def test_held_out_sequences_are_not_trained_on(run: Path) -> None:
    found = checkpoints.load(Store(run).latest(), "trainer2")
    data = search.data_of(found.configuration, [])
    whole = text.sequences_of(data)[0]
    trained_on, held_out = text.divided(whole, 9)
    assert (len(held_out), len(trained_on)) == (9, len(whole) - 9)
    assert len(text.load(data).batches.sequences) == len(trained_on)
    assert found.batches is not None
    assert found.batches["digest"] == trained_on.digest
    together = torch.cat([trained_on.input_ids, held_out.input_ids]).tolist()
    assert sorted(together) == sorted(whole.input_ids.tolist())


def test_evaluate_reports_scores_before_and_after_training(run: Path, tmp_path: Path) -> None:
    done = evaluated(run, "--out", "here")
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("before", "after", "by chance", "9 held-out passages"))
    assert "not those of the training" not in done.output
    found = json.loads((tmp_path / "here" / "evaluation.json").read_text())
    assert found["data_of_the_training"]
    assert found["by chance"]["first"] == pytest.approx(1 / found["after"]["passages"])
    other = evaluated(run, "--validation", "5")
    assert "the data are not those of the training" in other.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["  "], "the query is empty; give some text"),
        (["word\udcff"], "the query is not UTF-8; give other text"),
        (["word", "--data", "nowhere"], "nowhere is no folder"),
        (["word", "--vocabulary", "290"], "the vocabulary of .* has 290 tokens, that of the checkpoint 300"),
        (["word", "--synthetic", "64"], "synthetic: 64 takes the place of data: .*; leave data out, or use 0"),
        (["word", "--sequence", "8"], "no field is called 'sequence'; did you mean 'sequence_length'"),
    ],
)
def test_a_wrong_query_is_reported_in_one_line(run: Path, arguments: list[str], words: str) -> None:
    done = asked(run, *arguments)
    assert done.exit_code in (1, 2), done.output
    last = done.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert re.search(words, last), last


def test_a_misspelled_option_that_is_needed_is_named(run: Path) -> None:
    done = CliRunner().invoke(evaluate, ["trainer2", "--chekpoint", str(run)])
    assert (done.exit_code, done.output) == (2, "Error: no such option: --chekpoint; did you mean --checkpoint?\n")


def test_random_tokens_have_no_passages() -> None:
    with pytest.raises(PerfsuiteError, match="it was trained on random tokens, which have no text; train on a folder"):
        search.Passages(Data(synthetic=64), 300, 999)


def test_a_wrong_evaluation_is_reported_in_one_line(run: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (["--validation", "0"], "validation: no sequence is held out; say how many"),
        (["--validation", "100000"], "sequences would leave none to train on; lower it"),
        (["--vocabulary", "290"], "name the data of its training"),
    ):
        done = evaluated(run, *arguments)
        assert words in done.output.splitlines()[-1], done.output
    file = Store(run).latest()
    found = checkpoints.load(file, "trainer2")
    found.trainer = {**found.trainer, "metric": torch.ones(3)}
    damaged = Store(tmp_path / "damaged").save(found)
    assert "is damaged: metric has shape [3]" in evaluated(damaged).output
    assert "Error: no checkpoint" in evaluated(tmp_path).output
