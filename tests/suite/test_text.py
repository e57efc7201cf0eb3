"""Text: choice of files, the tokenizer and its cache, packing, and the order of batches."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from scale import FULLY
from training import environment

from perfsuite.errors import PerfsuiteError
from suite import text
from suite.text import Batches, Corpus, Data, corpus, load, pack, synthetic, tokenizer_of, tokens_of

WORDS = "the rotor turns a plane through an angle and the field follows the plane "


@pytest.fixture
def tokenizers() -> Any:
    return pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write four texts, and three files that are omitted."""
    root = tmp_path / "texts"
    (root / "b" / "tests").mkdir(parents=True)
    (root / "b" / "one.md").write_text(WORDS * 3)
    (root / "b" / "tests" / "two.py").write_text("print('λ')\n")
    (root / "a.txt").write_text(WORDS * 2)
    (root / "z.rst").write_text("the end")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / "damaged.txt").write_bytes(b"caf\xe9")
    (root / "empty.py").write_text(" \n")
    return root


def of(*texts: str) -> Corpus:
    return Corpus(where="here", texts=texts, damaged=0, empty=0)


# --- corpus ---------------------------------------------------------------------------------------------------------


def test_corpus_reads_the_text_files_of_a_folder(folder: Path) -> None:
    found = corpus(folder)
    assert found.texts == (WORDS * 2, WORDS * 3, "print('λ')\n", "the end")
    assert (found.damaged, found.empty) == (1, 1)


def test_standard_library_files_exclude_tests_and_site_packages() -> None:
    paths = text._files(Path(sysconfig.get_path("stdlib")), text.LEFT_OUT)
    names = [str(p) for p in paths]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not [n for n in names if "site-packages" in n or "/test/" in n or "__pycache__" in n]
    assert len(names) > 200


def test_digest_depends_on_the_boundaries_of_texts() -> None:
    assert len({of("ab", "c").digest, of("a", "bc").digest, of("abc").digest}) == 3
    assert of("ab", "c").digest == of("ab", "c").digest


@pytest.mark.parametrize(("name", "message"), [("nowhere", "is no folder"), ("texts/z.rst", "is no folder")])
def test_a_missing_folder_raises_error(folder: Path, name: str, message: str) -> None:
    with pytest.raises(PerfsuiteError, match=message):
        corpus(folder.parent / name)


def test_a_folder_without_text_raises_error(tmp_path: Path) -> None:
    (tmp_path / "damaged.txt").write_bytes(b"\xff")
    with pytest.raises(PerfsuiteError, match=r"data: no text under .*; 1 damaged and 0 empty files were left out"):
        corpus(tmp_path)


# --- tokenizer ------------------------------------------------------------------------------------------------------


def test_encoded_text_decodes_unchanged(tokenizers: Any) -> None:
    tokenizer = tokenizer_of(of(WORDS * 9), 280)
    assert tokenizer.get_vocab_size() == 280
    odd = "λ \x00 🎈 <end> <pad>\n\n\tthe rotor"
    (ids,) = text.encode(tokenizer, [odd])
    assert ids[-1] == text.END_ID
    assert ids.count(text.END_ID) == 1, "a text that says <end> does not end there"
    assert text.PAD_ID not in ids
    assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == odd


def test_vocabulary_is_smaller_for_a_small_text(tokenizers: Any) -> None:
    tokens, vocabulary = tokens_of(of("ab ab ab"), 32000)
    assert 258 <= vocabulary < 270
    assert tokens.max() < vocabulary


@FULLY
def test_tokenizer_is_the_same_in_another_process(tokenizers: Any) -> None:
    """The tokenizer depends neither on the number of threads nor on the hash seed."""
    code = "from suite.text import *; print(tokenizer_of(corpus('texts'), 400, Path('{}')).to_str())"
    Path("texts").mkdir()
    for n in range(20):
        Path(f"texts/{n}.txt").write_text(WORDS[n:] * 5 + f"{n} " * n)
    seen = set()
    for threads, seed in (("1", "1"), ("2", "2")):
        command = [sys.executable, "-c", code.format(f"cache{threads}")]
        given = environment(RAYON_NUM_THREADS=threads, PYTHONHASHSEED=seed)
        seen.add(subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout)
    assert len(seen) == 1


def test_tokens_are_cached_per_corpus_and_vocabulary(
    tokenizers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train = text.trained

    def counted(*arguments: Any) -> Any:
        trained.append(1)
        return train(*arguments)

    monkeypatch.setattr(text, "trained", counted)
    cache = tmp_path / "deep" / "cache"
    first, vocabulary = tokens_of(of(WORDS), 300, cache)
    again, same = tokens_of(of(WORDS), 300, cache)
    assert (len(trained), same) == (1, vocabulary)
    assert numpy.array_equal(first, again)
    assert first.dtype == again.dtype == numpy.int64
    tokens_of(of(WORDS + "x"), 300, cache)
    tokens_of(of(WORDS), 280, cache)
    assert len(trained) == 3, "other texts and other settings have their own"
    for path in cache.glob("*[!k]"):  # all files except the locks
        path.write_bytes(path.read_bytes()[:100])
    repaired, _ = tokens_of(of(WORDS), 300, cache)
    assert len(trained) == 4, "a damaged cache is made anew"
    assert numpy.array_equal(first, repaired)
    assert not list(cache.glob(".*"))


def test_concurrent_calls_train_the_tokenizer_once(tokenizers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file lock works between threads as it does between processes."""
    train, trained, both = text.trained, [], threading.Barrier(2)

    def slow(*arguments: Any) -> Any:
        trained.append(1)
        time.sleep(0.3)  # without the lock the other thread would start in this time
        return train(*arguments)

    def made() -> int:
        both.wait()
        return tokens_of(of(WORDS * 50), 270)[1]

    monkeypatch.setattr(text, "trained", slow)
    with ThreadPoolExecutor(2) as pool:
        sizes = [future.result() for future in [pool.submit(made) for _ in range(2)]]
    assert sizes == [270, 270]
    assert len(trained) == 1


def test_an_unwritable_cache_is_reported(tokenizers: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfsuiteError, match=r"cannot write .*; name another folder with --cache"):
        tokens_of(of(WORDS), 300, tmp_path / "file" / "cache")


def test_a_cache_that_is_a_file_is_reported(tokenizers: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfsuiteError, match=r"^cache: .*file is a file; name a folder with --cache$"):
        tokens_of(of(WORDS), 300, tmp_path / "file")


def test_missing_tokenizers_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PerfsuiteError, match=r"pip install 'perfsuite\[train\]', or train on random tokens"):
        tokens_of(of(WORDS), 300)


def test_a_vocabulary_too_small_for_bytes_raises_error() -> None:
    with pytest.raises(PerfsuiteError, match="vocabulary: 257 is too small"):
        tokenizer_of(of(WORDS), 257)


def test_a_vocabulary_too_large_for_the_library_raises_error() -> None:
    with pytest.raises(PerfsuiteError, match="vocabulary: 16777217 is too large; it must be 16777216 or less"):
        tokenizer_of(of(WORDS), text.LARGEST + 1)


# --- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_pack_fills_rows_and_masks_the_padding(count: int) -> None:
    found = pack(numpy.arange(2, 2 + count), 4, 99)
    rows = -(-count // 4)
    assert (found.input_ids.dtype, found.attention_mask.dtype) == (torch.int64, torch.float32)
    assert found.input_ids.shape == found.attention_mask.shape == (rows, 4)
    assert found.input_ids.reshape(-1)[:count].tolist() == list(range(2, 2 + count))
    assert found.attention_mask.reshape(-1).tolist() == [1] * count + [0] * (4 * rows - count)
    assert not found.input_ids.reshape(-1)[count:].any()


def test_load_returns_batches_vocabulary_and_summary(tokenizers: Any, folder: Path) -> None:
    found = load(Data(data=str(folder), vocabulary=300, sequence_length=8, batch_size=4))
    assert found.trainer_data == 300
    assert found.summary.startswith(f"data: 4 files of {folder}, ")
    assert "left out: 1 not UTF-8, 1 empty" in found.summary
    assert next(found.batches)["input_ids"].shape == (4, 8)


def test_synthetic_sequences_depend_only_on_their_arguments() -> None:
    one, again = synthetic(50, 12, 20, 3), synthetic(50, 12, 20, 3)
    assert torch.equal(one.input_ids, again.input_ids)
    assert not torch.equal(one.input_ids, synthetic(50, 12, 20, 4).input_ids)
    assert one.input_ids.shape == (20, 12)
    assert 2 <= int(one.input_ids[:-1].min()) <= int(one.input_ids.max()) < 50
    assert one.attention_mask.sum() == 20 * 12 - 4
    assert torch.equal(one.attention_mask == 0, one.input_ids == text.PAD_ID)
    assert load(Data(synthetic=64, batch_size=4)).summary.startswith("data: 64 random sequences of 256 tokens")


# --- batches --------------------------------------------------------------------------------------------------------


def rows(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return the numbers of the batch's sequences; each sequence begins with its number."""
    return batch["input_ids"][:, 0].tolist()


def numbered(count: int) -> text.Sequences:
    return pack(numpy.repeat(numpy.arange(count), 3), 3, 99)


def test_an_epoch_has_each_sequence_at_most_once() -> None:
    batches = Batches(numbered(11), 4, seed=1)
    assert len(batches) == 2
    epochs = [[r for _ in range(2) for r in rows(next(batches))] for _ in range(3)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "reshuffled"
    assert set(next(batches)) == {"input_ids", "attention_mask"}


def test_order_depends_only_on_seed_and_epoch() -> None:
    def order(seed: int) -> list[list[int]]:
        batches = Batches(numbered(9), 2, seed)
        return [rows(next(batches)) for _ in range(9)]

    assert order(3) == order(3)
    assert order(3) != order(4)
    before = torch.get_rng_state()
    assert order(5) == (numpy.random.rand(), torch.rand(1), order(5))[-1]
    torch.set_rng_state(before)
    order(5)
    assert torch.equal(before, torch.get_rng_state()), "nor does it draw from the generators of others"


def test_order_of_a_seed_matches_stored_values() -> None:
    """If a later version shuffled differently, positions in checkpoints would become invalid."""
    batches = Batches(numbered(8), 4, seed=7)
    assert [rows(next(batches)) for _ in range(3)] == [[0, 6, 7, 2], [4, 5, 1, 3], [6, 3, 1, 0]]


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("peeked", [False, True])
def test_batches_resume_from_a_position(stop: int, peeked: bool) -> None:
    whole = Batches(numbered(9), 2, seed=2)
    expected = [rows(next(whole)) for _ in range(20)]
    first = Batches(numbered(9), 2, seed=2)
    seen = [rows(next(first)) for _ in range(stop)]
    if peeked:
        first.peek()
    second = Batches(numbered(9), 2, seed=2)
    second.peek()
    second.load_state_dict(first.state_dict())
    seen += [rows(next(second)) for _ in range(20 - stop)]
    assert seen == expected


def test_peek_returns_the_next_batch() -> None:
    batches = Batches(numbered(9), 2)
    for _ in range(10):
        seen = batches.peek()
        assert batches.peek() is seen
        assert next(batches) is seen


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Batches(numbered(9), 3), "batch_size has changed"),
        (Batches(numbered(9), 2, seed=1), "seed has changed"),
        (Batches(numbered(8), 2), "the data has changed since the checkpoint was written"),
    ],
)
def test_a_position_in_other_data_raises_error(other: Batches, message: str) -> None:
    with pytest.raises(PerfsuiteError, match=message):
        other.load_state_dict(Batches(numbered(9), 2).state_dict())


def test_fewer_sequences_than_a_batch_raise_error() -> None:
    with pytest.raises(PerfsuiteError, match="batch_size: 4 is more than the 3 sequences"):
        Batches(numbered(3), 4)


def test_data_out_of_range_raises_value_error() -> None:
    with pytest.raises(ValueError, match="sequence_length must be 1 or more"):
        Data(sequence_length=0)
