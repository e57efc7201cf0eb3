"""`perfsuite data pack`, `train`, `ablate` and `generate` of eigenstate_lm on a small text, and wrong input."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from perfsuite.errors import PerfsuiteError
from suite.commands.ablate import ablate
from suite.commands.data import data
from suite.commands.generate import generate
from suite.commands.train import train
from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.memory import TOO_WIDE, naming_the_remedy, needed, remedy

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")

SIZES = ["--width", "8", "--layers", "1", "--eigenstates", "3", "--sequence_length", "16", "--batch_size", "2"]
TINY = [*SIZES, "--accumulation", "2", "--steps", "12", "--use_compile", "false", "--device", "cpu"]
ONE_LINE = "Error: "


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(4):
        lines = [f"def f{n}(x):\n    return x + {n * number}\n" for n in range(30)]
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def pack(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packs") / "pack"
    done = CliRunner().invoke(data, ["pack", str(out), "--from", str(texts), "--vocabulary", "300"])
    assert done.exit_code == 0, done.output
    return out


def invoked(command: click.Command, *arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["eigenstate_lm", *TINY, *map(str, arguments)])


def refused(done: Result) -> str:
    """Return the error message of a command with wrong input."""
    assert done.exit_code in (1, 2), done.output
    lines = [line for line in done.output.splitlines() if line.strip()]
    assert not any("Traceback" in line for line in lines), done.output
    return lines[-1]


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_run_is_resumed_and_generates_text(pack: Path, side: str) -> None:
    given = ["--side", side, "--folder", "run", "--data", pack]
    done = invoked(train, *given, "--windows", "5")
    assert done.exit_code == 0, done.output
    assert "a unigram model's loss is" in done.output
    assert "eigenstate_lm: 5 steps in" in done.output
    assert "tokens/s" in done.output
    more = invoked(train, *given, "--resume", "latest")
    assert more.exit_code == 0, more.output
    assert "eigenstate_lm: 12 steps, 7 of them in this run," in more.output
    written = CliRunner().invoke(generate, ["run", "--prompt", "def ", "--tokens", "5", "--device", "cpu"])
    assert written.exit_code == 0, written.output
    assert written.output.startswith("def ")


def test_optimized_side_resumes_a_run_of_the_reference_side(pack: Path) -> None:
    first = invoked(train, "--side", "reference", "--folder", "run", "--windows", "4", "--data", pack)
    assert first.exit_code == 0, first.output
    second = invoked(train, "--folder", "run", "--resume", "latest", "--data", pack)
    assert second.exit_code == 0, second.output
    assert "eigenstate_lm: 12 steps, 8 of them in this run," in second.output


def test_tensorboard_shows_loss_and_throughput(pack: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = invoked(train, "--folder", "run", "--data", pack, "--tensorboard", "true", "--tensorboard_every", "1")
    assert done.exit_code == 0, done.output
    found = EventAccumulator("run/tensorboard")
    found.Reload()
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second"} <= set(found.Tags()["scalars"])
    assert len(found.Scalars("loss")) >= 11


def test_python_s_standard_library_is_packed_without_data(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(texts))
    done = invoked(train, "--folder", "run", "--windows", "1", "--vocabulary", "300", "--cache", "cache")
    assert done.exit_code == 0, done.output
    assert Path("cache/library-300/tokens.bin").exists()


def test_synthetic_tokens_train_without_text_and_cannot_generate() -> None:
    done = invoked(train, "--folder", "run", "--windows", "2", "--synthetic", "9", "--vocabulary", "50")
    assert done.exit_code == 0, done.output
    assert "eigenstate_lm: 2 steps in" in done.output
    message = refused(CliRunner().invoke(generate, ["run", "--device", "cpu"]))
    assert "was trained on random tokens" in message


def test_ablate_measures_each_technique(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("packed_tokens", "eigenstate_scan", "chunked_cross_entropy")  # none of them compiles
    monkeypatch.setattr("suite.eigenstate_lm.config.TECHNIQUES", few)
    given = ["--data", pack, "--rounds", "2", "--out", "found", "--no-plot"]
    done = invoked(ablate, *given)
    assert done.exit_code == 0, done.output
    record = json.loads(Path("found/eigenstate_lm.json").read_text())
    assert {"reference", "none", "all", "+eigenstate_scan", "-eigenstate_scan"} <= {
        arm["name"] for arm in record["arms"]
    }
    assert "| eigenstate_scan | 53.9× |" in Path("found/eigenstate_lm.md").read_text()


# --- wrong input ----------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refused(CliRunner().invoke(data, ["pack", "out", "--from", str(tmp_path / "empty")]))
    assert "no text under" in message
    assert "it must hold .txt, .md, .rst, .py files" in message
    message = refused(invoked(train, "--data", tmp_path / "empty"))
    assert "holds no packed text (pack.json is missing or damaged); make it with `perfsuite data pack`" in message


def test_a_truncated_pack_is_reported(pack: Path, tmp_path: Path) -> None:
    import shutil

    cut = tmp_path / "cut"
    shutil.copytree(pack, cut)
    tokens = (cut / "tokens.bin").read_bytes()
    (cut / "tokens.bin").write_bytes(tokens[:-7])
    message = refused(invoked(train, "--data", cut))
    assert f"tokens.bin has {len(tokens) - 7} bytes and not {len(tokens)}; make it again" in message


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("tokens.bin", b"cut", "tokens.bin has 3 bytes and not "),
        ("pack.json", b"{", "pack.json is damaged: it is no index of packed text"),
        ("ends.npy", None, "ends.npy is missing"),
    ],
)
@pytest.mark.parametrize("more", [["--synthetic", "9"], []], ids=["random", "library"])
def test_a_damaged_cache_is_reported_and_rebuilt_after_deletion(
    texts: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], name: str, damage: bytes | None, said: str
) -> None:
    import shutil
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(texts))
    given = ["--overwrite", "--windows", "1", "--vocabulary", "300", "--cache", "cache", *more]
    folder = Path("cache", "random-300-16-9" if more else "library-300")
    assert invoked(train, *given).exit_code == 0
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage)
    message = refused(invoked(train, *given))
    assert said in message
    assert message.endswith(f"; delete {folder}; it is made again")
    shutil.rmtree(folder)
    assert invoked(train, *given).exit_code == 0


def test_cached_random_tokens_of_another_vocabulary_are_reported() -> None:
    given = ["--overwrite", "--windows", "1", "--vocabulary", "300", "--cache", "cache", "--synthetic", "9"]
    assert invoked(train, *given).exit_code == 0
    index = Path("cache/random-300-16-9/pack.json")
    index.write_text(json.dumps({**json.loads(index.read_text()), "vocabulary": 100}))
    message = refused(invoked(train, *given))
    assert "pack.json is damaged: vocabulary is 100 and must be 300; delete cache/random-300-16-9" in message


@pytest.mark.parametrize("more", [["--synthetic", "9"], []], ids=["random", "library"])
def test_an_invalid_cache_folder_is_reported(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "file").write_text("")
    message = refused(invoked(train, "--cache", tmp_path / "file", *more))
    assert f"cache: {tmp_path / 'file'} is a file; name a folder with --cache" in message
    message = refused(invoked(train, "--cache", "x" * 300, *more))
    assert message.endswith(": File name too long; name another folder with --cache")


def test_a_context_longer_than_the_data_is_reported(pack: Path) -> None:
    message = refused(invoked(train, "--data", pack, "--sequence_length", "1000000"))
    assert "sequence_length: 1000000 and the token after are more than the" in message
    assert "lower it, or pack more text" in message
    message = refused(invoked(train, "--data", pack, "--sequence_length", "700"))
    assert "a step takes 4 sequences" in message
    assert "lower accumulation, batch_size or sequence_length, or pack more text" in message


def test_resume_rejects_a_checkpoint_of_another_vocabulary(pack: Path, texts: Path, tmp_path: Path) -> None:
    assert invoked(train, "--folder", "run", "--windows", "1", "--data", pack).exit_code == 0
    other = tmp_path / "other"
    made = CliRunner().invoke(data, ["pack", str(other), "--from", str(texts), "--vocabulary", "280"])
    assert made.exit_code == 0, made.output
    message = refused(invoked(train, "--folder", "run", "--resume", "latest", "--data", other))
    assert "its vocabulary has 300 tokens, and that of the data 280" in message


def test_resume_rejects_other_data_and_another_step_size(pack: Path, texts: Path, tmp_path: Path) -> None:
    assert invoked(train, "--folder", "run", "--windows", "1", "--data", pack).exit_code == 0
    more = tmp_path / "texts"
    more.mkdir()
    for path in texts.iterdir():
        (more / path.name).write_text(path.read_text() + "# more\n")
    other = tmp_path / "other"
    tokenizer = str(pack / "tokenizer.json")
    made = CliRunner().invoke(data, ["pack", str(other), "--from", str(more), "--tokenizer", tokenizer])
    assert made.exit_code == 0, made.output
    message = refused(invoked(train, "--folder", "run", "--resume", "latest", "--data", other))
    assert "the data has changed since the checkpoint was written; resume with what it was then" in message
    message = refused(invoked(train, "--folder", "run", "--resume", "latest", "--data", pack, "--accumulation", "1"))
    assert "batch_size x accumulation has changed since the checkpoint was written, from 4 to 2;" in message


def test_resume_rejects_other_network_sizes(pack: Path) -> None:
    assert invoked(train, "--folder", "run", "--windows", "1", "--data", pack).exit_code == 0
    message = refused(invoked(train, "--folder", "run", "--resume", "latest", "--data", pack, "--width", "9"))
    assert "embedding has shape [300, 8] in the checkpoint and [300, 9] here" in message


def test_vocabulary_of_a_given_pack_overrides_the_option(pack: Path) -> None:
    done = invoked(train, "--folder", "run", "--windows", "1", "--data", pack, "--vocabulary", "5000")
    assert done.exit_code == 0
    assert "vocabulary 300 (the pack's own; vocabulary=5,000 is for what is made here)" in done.output


def test_resuming_a_finished_run_says_that_all_steps_are_done(pack: Path) -> None:
    assert invoked(train, "--folder", "run", "--data", pack, "--steps", "11").exit_code == 0
    done = invoked(train, "--folder", "run", "--resume", "latest", "--data", pack, "--steps", "11")
    assert done.exit_code == 0
    assert "0 of them in this run" in done.output
    assert "all 11 steps were made before; raise steps to go on" in done.output


def test_error_names_only_the_wrong_option(pack: Path) -> None:
    message = refused(invoked(train, "--data", pack, "--steps", "20", "--batch_size", "0"))
    assert "--batch_size: batch_size=0: use 1 or more" in message
    assert "--steps" not in message


# --- memory ---------------------------------------------------------------------------------------------------------

GIB = 2**30
SMALL = TrainConfig(autocast_bf16=True)


def config(**fields: object) -> TrainConfig:
    return dataclasses.replace(SMALL, **fields)  # type: ignore[arg-type]  # of several kinds


def test_needed_memory_of_the_source_s_step_is_37_gib() -> None:
    """Measured on an H200: 36.8 GiB with four sequences, 71.2 GiB with eight."""
    fixed, sequence = needed(SMALL, 50257)
    assert (fixed + 4 * sequence) / GIB == pytest.approx(36.8, rel=0.03)
    assert (fixed + 8 * sequence) / GIB == pytest.approx(71.2, rel=0.03)


def test_a_network_larger_than_the_memory_is_reported(pack: Path) -> None:
    message = refused(invoked(train, "--data", pack, "--width", "99999999"))
    assert "use a smaller width, or fewer layers" in message


def test_a_step_larger_than_the_memory_is_rejected_before_it_runs() -> None:
    huge = config(batch_size=9000, accumulation=1)
    said = r"9000 sequences of 32768 tokens at once need about .* GiB, and this machine has .*; lower batch_size"
    with pytest.raises(PerfsuiteError, match=said), naming_the_remedy(huge, 50257, torch.device("cpu")):
        raise AssertionError("it was tried")


@pytest.mark.parametrize(
    ("fields", "gib", "said"),
    [
        ({}, 24, "lower batch_size from 4 to 2, with accumulation 8 for as large a step"),
        ({"batch_size": 20, "accumulation": 1}, 139, "lower batch_size from 20 to 10, with accumulation 2"),
        ({}, 8, "switch activation_checkpoint on and lower batch_size from 4 to 1, with accumulation 16"),
        ({"chunked_cross_entropy": False}, 39, "switch chunked_cross_entropy on"),
        (
            {"gradient_accumulation": False, "accumulation": 1},
            20,
            "switch gradient_accumulation on and lower batch_size",
        ),
        ({"width": 2**17}, 80, "use a smaller width, or fewer layers"),
        ({"gradient_accumulation": False}, 100, "switch gradient_accumulation on"),
        ({"activation_checkpoint": True}, 4, "lower batch_size to 1 and sequence_length from 32768 to 8192"),
        ({"activation_checkpoint": True, "autocast_bf16": False}, 7, "switch autocast_bf16 on and lower batch_size"),
    ],
)
def test_remedy_names_the_settings_to_reduce(fields: dict[str, object], gib: int, said: str) -> None:
    text = remedy(config(**fields), 50257, gib * GIB)
    assert text.startswith(said)
    if text != TOO_WIDE:
        assert needed_at_once(changed_as(text, config(**fields))) <= gib * GIB


def changed_as(text: str, given: TrainConfig) -> TrainConfig:
    """Return the configuration with the changes that a remedy names."""
    switches = re.search(r"switch (.*?) on", text)
    on = dict.fromkeys(switches[1].split(", ") if switches else (), True)
    patterns = {
        "batch_size": r"batch_size (?:from \d+ )?to (\d+)",
        "accumulation": r"accumulation (\d+)",
        "sequence_length": r"sequence_length from \d+ to (\d+)",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    lower = {name: int(match[1]) for name, match in found.items() if match}
    changed = dataclasses.replace(given, **on, **lower)
    assert changed != given
    assert "sequence_length" in lower or changed.sequences == given.sequences
    return changed


def needed_at_once(chosen: TrainConfig) -> float:
    fixed, sequence = needed(chosen, 50257)
    return fixed + sequence * (chosen.batch_size if chosen.gradient_accumulation else chosen.sequences)


@pytest.mark.parametrize(
    ("fields", "gib", "said"),
    [
        (
            {},
            131,
            r"16 sequences .* 434 GiB, .* 131 for them; use the optimized trainer, .* × accumulation from 16 to 4",
        ),
        ({}, 24, r"use the optimized trainer, or a smaller sequence_length"),
        ({"width": 2**17}, 80, "use a smaller width, or fewer layers"),
    ],
)
def test_remedy_of_the_reference_trainer_counts_all_accumulated_sequences(
    fields: dict[str, object], gib: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * GIB, gib * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    with (
        pytest.raises(PerfsuiteError, match=said),
        naming_the_remedy(config(**fields), 50257, torch.device("cuda"), plain=True),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
