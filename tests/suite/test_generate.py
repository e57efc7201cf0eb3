"""`perfsuite generate`: text generation with a network of eigenstate_lm."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from scale import FULLY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import ROOT, environment

from optimized.recurrence.eigenstate_scan import eigenstate_scan
from optimized.recurrence.fused_output_projection import fused_output_projection
from perfsuite.errors import PerfsuiteError
from suite import text
from suite.commands.generate import generate, summary
from suite.eigenstate_lm import generation
from suite.eigenstate_lm.generation import Characters, Options, Reader, drawn, generated, sizes_of
from suite.eigenstate_lm.model import Sizes, first_states, forward, make_weights
from suite.runtime import Checkpoint, Store
from suite.runtime.checkpoints import rng_state

TINY = Sizes(vocabulary=23, width=8, layers=2, eigenstates=4, cells=3)
PLAIN = Options(tokens=30, temperature=1.0, top_k=0, seed=0, past_end=True)
GREEDY = replace(PLAIN, temperature=0.0)
TEXTS = ["the rotor turns λ by an angle 🎈 and the field follows the plane "] * 9


def weights(sizes: Sizes = TINY, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return weights of a network with sharper outputs than a new one, so that it does not just repeat its prompt."""
    factors = {"embedding": 20, "out": 8, "contract": 8}
    return {n: factors.get(n.rpartition(".")[2], 1) * w.to(dtype) for n, w in make_weights(0, sizes).items()}


def words(length: int = 150) -> list[int]:
    drawn = torch.randint(TINY.vocabulary, (length,), generator=torch.Generator().manual_seed(1))
    return [int(t) for t in drawn]


def parallel(given: dict[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of one forward over the whole text."""
    states = first_states(sizes_of(given), 1).to(given["embedding"].dtype)
    x, _ = forward(given, torch.tensor([tokens]), states, eigenstate_scan, fused_output_projection)
    return x[0] @ given["embedding"].T


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-10), (torch.float32, 1e-5, 1e-5)])
def test_reading_token_by_token_matches_the_parallel_form(dtype: torch.dtype, rtol: float, atol: float) -> None:
    given, tokens = weights(dtype=dtype), words()
    reader = Reader(given)
    found = torch.stack([reader.read([token]) for token in tokens])
    assert found.dtype == dtype
    torch.testing.assert_close(found, parallel(given, tokens), rtol=rtol, atol=atol)


@pytest.mark.parametrize("stretch", [7, 149, 150, 4096])
def test_long_prompt_is_read_in_stretches(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, tokens = weights(dtype=torch.float64), words()
    monkeypatch.setattr(generation, "STRETCH", stretch)
    seen = []

    def seeing(own: object, stretch: torch.Tensor, *more: Any) -> Any:
        seen.append(stretch.shape[1])
        return forward(own, stretch, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(generation, "forward", seeing)
    torch.testing.assert_close(Reader(given).read(tokens), parallel(given, tokens)[-1], rtol=1e-10, atol=1e-10)
    assert (sum(seen), max(seen)) == (150, min(150, stretch))


def test_memory_per_token_does_not_depend_on_its_position() -> None:
    class Shapes(TorchDispatchMode):
        """Record the shapes of all tensors that operations return."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            shapes.extend(tuple(t.shape) for t in tree_leaves(found) if isinstance(t, torch.Tensor))
            return found

    reader = Reader(weights())
    seen, states = [], []
    for token in words(101):
        shapes: list[tuple[int, ...]] = []
        with Shapes():
            reader.read([token])
        seen.append(shapes)
        states.append(tuple(reader.states.shape))
    assert seen[10]
    assert seen[10] == seen[100]
    assert set(states) == {(TINY.layers, 1, TINY.cells * TINY.eigenstates, 2)}
    # No tensor is larger than the largest weight.
    assert max(math.prod(shape) for shape in seen[100]) <= max(w.numel() for w in weights().values())


def test_sizes_of_reads_the_sizes_from_the_weights() -> None:
    assert sizes_of(make_weights(0, TINY)) == TINY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.clear(), "of no network of eigenstate_lm"),
        (lambda w: w.pop("0.decay"), "of no network of eigenstate_lm"),
        (lambda w: w.update(embedding=torch.ones(3)), "of no network of eigenstate_lm"),
        (lambda w: w.update(embedding="x"), "of no network of eigenstate_lm"),
        (lambda w: w.pop("1.decay"), "1.contract is missing, or too much"),
        (lambda w: w.pop("1.norm2"), "1.norm2 is missing, or too much"),
        (lambda w: w.update(more=torch.ones(3)), "more is missing, or too much"),
    ],
)
def test_sizes_of_rejects_weights_of_another_network(change: Callable[[dict[str, Any]], object], message: str) -> None:
    given = make_weights(0, TINY)
    change(given)
    with pytest.raises(PerfsuiteError, match=message):
        sizes_of(given)


# --- sampling -------------------------------------------------------------------------------------------------------


def text_of(options: Options, prompt: Sequence[int] = (1, 5, 9)) -> list[int]:
    return list(generated(Reader(weights()), prompt, options))


@pytest.mark.parametrize("prompt", [[1], [1, 5, 9], words(20)])
def test_greedy_tokens_match_the_parallel_form(prompt: list[int]) -> None:
    found = text_of(GREEDY, prompt)
    assert found == text_of(GREEDY, prompt)
    tokens = list(prompt)
    for _ in range(GREEDY.tokens):
        tokens.append(1 + int(parallel(weights(), tokens)[-1, 1:].argmax()))
    assert found == tokens[len(prompt) :]
    assert len(set(found)) > 2


def test_sampled_tokens_depend_on_the_seed() -> None:
    assert text_of(PLAIN) == text_of(PLAIN)
    assert text_of(PLAIN) != text_of(replace(PLAIN, seed=1))
    assert len(text_of(PLAIN)) == 30


def test_top_k_1_and_tiny_temperature_match_greedy_tokens() -> None:
    assert text_of(replace(PLAIN, top_k=1)) == text_of(GREEDY)
    assert text_of(replace(PLAIN, temperature=1e-300)) == text_of(GREEDY)
    assert text_of(replace(GREEDY, top_k=5, seed=3)) == text_of(GREEDY)


@pytest.mark.parametrize(
    ("temperature", "top_k", "shares"),
    [
        (1.0, 0, [0, 1 / 8, 1 / 8, 3 / 4]),
        (0.5, 0, [0, 1 / 38, 1 / 38, 36 / 38]),
        (math.inf, 0, [0, 1 / 3, 1 / 3, 1 / 3]),
        (1.0, 99, [0, 1 / 8, 1 / 8, 3 / 4]),
        (1.0, 1, [0, 0, 0, 1]),
    ],
)
def test_tokens_are_sampled_with_their_probabilities(temperature: float, top_k: int, shares: list[float]) -> None:
    """The padding token is never sampled, however likely it is."""
    options = replace(PLAIN, temperature=temperature, top_k=top_k)
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1e4, 5.0, 5.0, 5.0 + math.log(6)])
    drawns = [drawn(logits, options, generator) for _ in range(2000)]
    found = [drawns.count(token) / len(drawns) for token in range(4)]
    assert found == pytest.approx(shares, abs=0.03)
    assert found[0] == 0


def test_only_the_top_k_tokens_are_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([9.0, 1.0, 3.0, 2.0, 3.1, 0.0])
    options = replace(PLAIN, top_k=3, temperature=9.0)
    assert {drawn(logits, options, generator) for _ in range(200)} == {2, 3, 4}


def test_generation_stops_at_the_end_token_unless_past_end() -> None:
    options = replace(PLAIN, tokens=400)
    on = text_of(options)
    assert len(on) == 400
    assert text.END_ID in on
    assert text_of(replace(options, past_end=False)) == on[: on.index(text.END_ID)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_or_infinite_logits_raise_error(value: float) -> None:
    logits = torch.tensor([0.0, 1.0, value, 1.0])
    for options in (PLAIN, GREEDY):
        with pytest.raises(PerfsuiteError, match="no number: its training diverged; name an earlier checkpoint"):
            drawn(logits, options, torch.Generator())


# --- characters -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    return text.trained(TEXTS, 290)


def test_a_character_of_several_tokens_is_shown_complete(tokenizer: Any) -> None:
    tokens = tokenizer.encode("a🎂é").ids
    characters = Characters(tokenizer)
    found = [characters.of(token) for token in tokens]
    assert "".join(found) == "a🎂é"
    assert set(found) == {"a", "", "🎂", "é"}
    assert characters.rest() == ""


@pytest.mark.parametrize("seed", range(20))
def test_characters_join_to_the_decoded_text(tokenizer: Any, seed: int) -> None:
    """Most of the tokens are single bytes, which are not complete characters."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, tokenizer.get_vocab_size(), (200,), generator=generator).tolist()
    characters = Characters(tokenizer, [1])
    found = "".join(characters.of(token) for token in tokens) + characters.rest()
    assert found == tokenizer.decode(tokens, skip_special_tokens=False)


def test_an_incomplete_character_is_shown_at_the_end(tokenizer: Any) -> None:
    half = tokenizer.encode("a🎂").ids[:-1]
    characters = Characters(tokenizer)
    assert "".join(characters.of(token) for token in half) == "a"
    assert characters.rest() == "\ufffd"


def test_decoder_may_treat_the_first_token_differently() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    spaced = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1}))
    spaced.decoder = tokenizers.decoders.Metaspace()
    characters = Characters(spaced, [0])
    assert [characters.of(token) for token in (1, 0, 0)] == [" b", " a", " a"]


# --- the command ----------------------------------------------------------------------------------------------------


def sizes_for(tokenizer: Any) -> Sizes:
    return replace(TINY, vocabulary=tokenizer.get_vocab_size())


def saved(folder: Path, tokenizer: Any, /, windows: int = 3, name: str = "eigenstate_lm", **changes: Any) -> Path:
    """Save a checkpoint of a network with the tokenizer's vocabulary."""
    checkpoint = Checkpoint(
        name=name,
        windows=windows,
        items=0,
        trainer={"weights": weights(sizes_for(tokenizer)), "tokenizer": tokenizer.to_str(), **changes},
        batches=None,
        configuration={},
        rng=rng_state(),
    )
    return Store(folder).save(checkpoint)


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: Any) -> Path:
    return saved(tmp_path / "run", tokenizer)


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(generate, [*arguments, "--device", "cpu"])


def written(*arguments: str) -> str:
    """Return the generated text, without the summary line after it."""
    done = invoked(*arguments)
    assert done.exit_code == 0, done.output
    found, _, message = done.output.removesuffix("\n").rpartition("\n")
    assert "tokens read" in message
    return found


def one_line(done: Result, *message: str) -> None:
    assert done.exit_code == 1, done.output
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    for word in message:
        assert word in line


def process(*arguments: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from suite.commands.generate import generate; generate()", *arguments]
    return subprocess.run(command, env=environment(**more), capture_output=True)


def test_entry_point_refers_to_the_command() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["perfsuite.commands"]["generate"] == "suite.commands.generate:generate"


@FULLY
def test_command_prints_the_same_text_as_the_library(checkpoint: Path, tokenizer: Any) -> None:
    given = weights(sizes_for(tokenizer))
    prompt = [1, *tokenizer.encode("the λ").ids]
    options = Options(tokens=40, temperature=0.7, top_k=20, seed=5)
    tokens = list(generated(Reader(given), prompt, options))
    done = process(
        *(str(checkpoint), "--prompt", "the λ", "--tokens", "40", "--temperature", "0.7", "--top-k", "20"),
        *("--seed", "5", "--device", "cpu"),
        PYTHONIOENCODING="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "the λ" + tokenizer.decode(tokens) + "\n"
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"{len(prompt)} tokens read and the first drawn in ")
    assert f"; {len(tokens) - 1} more in " in line
    assert line.endswith(" tokens/s)")


def test_folder_selects_its_latest_checkpoint(checkpoint: Path, tokenizer: Any) -> None:
    later = saved(checkpoint.parent, tokenizer, windows=9, weights=make_weights(1, sizes_for(tokenizer)))
    assert written(str(checkpoint.parent)) == written(str(later))
    assert written(str(checkpoint.parent)) != written(str(checkpoint))


def test_text_starts_at_the_end_token_without_a_prompt(checkpoint: Path, tokenizer: Any) -> None:
    tokens = list(generated(Reader(weights(sizes_for(tokenizer))), [1], replace(GREEDY, past_end=False)))
    assert written(str(checkpoint), "--temperature", "0", "--tokens", "30") == tokenizer.decode(tokens)


def test_past_end_continues_after_the_end_token(checkpoint: Path) -> None:
    arguments = [str(checkpoint), "--tokens", "2000", "--temperature", "9", "--top-k", "0"]
    on = written(*arguments, "--past-end")
    assert "<end>" in on
    assert written(*arguments) == on.partition("<end>")[0]


def test_summary_reports_counts_seconds_and_rate() -> None:
    assert summary(12, 0, 0.0, 0.0) == "12 tokens read; the text ended at once"
    assert summary(12, 1, 0.5, 0.5) == "12 tokens read and the first drawn in 0.5 s; 0 more in 0 s"
    assert summary(12, 201, 0.25, 4.25) == "12 tokens read and the first drawn in 0.25 s; 200 more in 4 s (50 tokens/s)"


def test_interruption_exits_with_code_130(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*given: object) -> Iterator[int]:
        yield 40
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generated", stopped)
    done = invoked(str(checkpoint), "--prompt", "the")
    assert done.exit_code == 130
    first, second = done.output.splitlines()
    assert (first[:3], len(first), second) == ("the", 4, "interrupted")


@FULLY
def test_a_full_output_device_is_reported_in_one_line(checkpoint: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "perfsuite", "generate", str(checkpoint), "--device", "cpu", "--prompt", "x"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 1
    assert "cannot write the text: No space left on device; send it elsewhere" in done.stderr
    assert "Traceback" not in done.stderr


@FULLY
def test_a_closed_pipe_ends_the_command_silently(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "perfsuite", "generate", str(checkpoint), "--device", "cpu", "--past-end"]
    with subprocess.Popen(
        [*command, "--prompt", "x", "--tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_generate_does_not_wait_for_a_run_that_holds_the_lock(checkpoint: Path) -> None:
    from suite.runtime.locking import only_one

    with only_one(checkpoint.parent):
        assert written(str(checkpoint.parent)) == written(str(checkpoint))


def test_generate_retries_if_a_run_removes_the_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run removes it between listing the folder and opening the file; a later one exists by then."""
    files = Store.files
    seen: list[int] = []

    def before(self: Store) -> list[Path]:
        seen.append(1)
        return [self.folder / "window-00000002.pt"] if len(seen) < 3 else files(self)

    expected = written(str(checkpoint))
    monkeypatch.setattr(Store, "files", before)
    assert written(str(checkpoint.parent)) == expected
    assert len(seen) > 2


def test_out_of_memory_is_reported_in_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(generation.Reader, "__init__", full)
    one_line(invoked(str(checkpoint)), "CUDA out of memory; free some, or name another --device")


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "tokens must be 1 or more, got 0"),
        (["--temperature", "-0.5"], "temperature must be 0 or more, got -0.5"),
        (["--temperature", "nan"], "temperature must be 0 or more, got nan"),
        (["--top-k", "-1"], "top_k must be 0 or more, got -1"),
        (["--seed", "-1"], "seed must be 0 or more, got -1"),
        (["--seed", str(2**63)], "seed must be less than 2^63"),
        (["--prompt", "a\udcffb"], "--prompt: the tokenizer cannot encode it: it is not UTF-8; give other text"),
        (["--device", "abacus"], "--device abacus"),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments: list[str], message: str, checkpoint: Path) -> None:
    one_line(CliRunner().invoke(generate, [str(checkpoint), "--device", "cpu", *arguments]), message)


@pytest.mark.parametrize("name", ["nowhere.pt", "empty", "x" * 300])
def test_a_missing_checkpoint_is_reported(name: str) -> None:
    Path("empty").mkdir()
    one_line(invoked(name), f"no checkpoint {name}; name a file, or a folder, that `perfsuite train eigenstate_lm`")


def test_a_file_that_is_no_checkpoint_is_reported() -> None:
    Path("notes.pt").write_text("mine")
    one_line(invoked("notes.pt"), "notes.pt is damaged, or no checkpoint")


def test_a_checkpoint_of_another_trainer_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    one_line(invoked(str(saved(tmp_path, tokenizer, name="toy"))), "is of the trainer 'toy', not of 'eigenstate_lm'")


def without_an_end() -> str:
    """Return a tokenizer with 290 tokens and no end token."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(290)}))
    return str(made.to_str())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": ""}, "was trained on random tokens, which no text belongs to; train on text"),
        ({"tokenizer": None}, "it lacks weights or a tokenizer; name another"),
        ({"weights": None}, "it lacks weights or a tokenizer; name another"),
        ({"weights": {"x": torch.ones(1)}}, "the weights are of no network of eigenstate_lm; name another"),
        ({"tokenizer": "{}"}, "is damaged: its tokenizer is none ("),
        ({"weights": make_weights(0, TINY)}, "its tokenizer has 290 tokens, its network 23; name another"),
    ],
)
def test_a_checkpoint_that_cannot_generate_text_is_reported(
    changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = saved(tmp_path, tokenizer, **changes)
    one_line(invoked(str(path)), str(path), message)


def test_a_tokenizer_without_an_end_token_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    path = saved(tmp_path, tokenizer, tokenizer=without_an_end())
    one_line(invoked(str(path)), "its tokenizer has no token <end> of number 1, by which texts end")


def test_a_prompt_with_unknown_words_is_reported(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    few = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}))
    path = saved(tmp_path, few)
    assert written(str(path), "--prompt", "a", "--tokens", "1").startswith("a")
    one_line(invoked(str(path), "--prompt", "b"), "--prompt: the tokenizer cannot encode it", "give other text")


def test_weights_of_a_diverged_training_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    broken = weights(sizes_for(tokenizer))
    broken["embedding"] = torch.full_like(broken["embedding"], torch.inf)
    done = invoked(str(saved(tmp_path, tokenizer, weights=broken)))
    assert done.exit_code == 1
    assert "Error: the network's output is no number: its training diverged; name an earlier checkpoint" in done.output


def test_missing_tokenizers_package_is_reported(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    one_line(invoked(str(checkpoint)), "text needs the package tokenizers, which is not installed")
