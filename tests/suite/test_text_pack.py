"""Packed text: reproducible bytes, with or without an interruption, and one-line errors."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner, Result

from perfsuite.errors import PerfsuiteError
from suite import packed_text, text_pack
from suite.commands.data import data
from suite.packed_text import ENDS, INDEX, TOKENIZER, TOKENS, opened
from suite.text import END, END_ID
from suite.text_pack import Recipe, pack

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
LONG = "x" * 300
NAMES = (TOKENS, ENDS, TOKENIZER, INDEX)
TEXTS = {f"{i}.txt": f"the field follows the plane {i} times, and the rotor turns it " * 20 for i in range(7)}


class Quiet:
    """Progress that counts its calls and raises KeyboardInterrupt in call number `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.calls = 0
        self.last = last
        self.said: list[str] = []

    def progress(self, what: str, done: int, total: int) -> None:
        self.calls += 1
        if self.calls == self.last:
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write seven texts, which take more than one block, and two files that are not texts."""
    monkeypatch.setattr(text_pack, "BLOCK_BYTES", 3000)
    root = tmp_path / "texts"
    root.mkdir()
    for name, content in TEXTS.items():
        (root / name).write_text(content)
    (root / "damaged.md").write_bytes(b"caf\xe9")
    (root / "empty.py").write_text(" \n")
    return root


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    return Recipe(folder=folder, vocabulary=300)


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_pack_writes_the_tokens_of_all_documents(tmp_path: Path, recipe: Recipe) -> None:
    watcher = Quiet()
    made = pack(tmp_path / "out", recipe, watcher)
    found = made.pack
    assert not made.kept
    assert made.source == f"7 files of {recipe.folder} (left out: 2 not UTF-8 or empty)"
    assert watcher.said == ["left out: damaged.md: not UTF-8", "left out: empty.py: empty"]
    assert sorted(content(tmp_path / "out")) == sorted(NAMES)
    assert not (tmp_path / "out.parts").exists()
    assert (found.documents, found.vocabulary, found.row.dtype) == (7, 300, numpy.uint16)
    ends = numpy.load(tmp_path / "out" / ENDS)
    assert ends[-1] == found.tokens == len(found.row)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / TOKENIZER))
    documents = numpy.split(numpy.asarray(found.row), ends[:-1])
    assert all(d[-1] == END_ID for d in documents)
    assert [tokenizer.decode(d[:-1].tolist()) for d in documents] == list(TEXTS.values())


def test_each_json_line_is_a_document(tmp_path: Path, recipe: Recipe) -> None:
    """For a folder, `field` must be given; for a single file, the default field is "text"."""
    assert recipe.folder is not None
    rows = [{"body": "one line", "n": 1}, {"body": " \n"}, {"body": "é, and <end>", "text": "another"}]
    file = recipe.folder / "rows.jsonl"
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)))
    without = pack(tmp_path / "out", recipe, Quiet())
    assert without.pack.documents == 7
    both = pack(tmp_path / "both", dataclasses.replace(recipe, field="body"), Quiet())
    assert (both.pack.documents, both.source[:8]) == (9, "8 files ")
    alone = pack(tmp_path / "alone", Recipe(folder=file, field="body", vocabulary=300), Quiet()).pack
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "alone" / TOKENIZER))
    parts = numpy.split(numpy.asarray(alone.row), numpy.load(tmp_path / "alone" / ENDS)[:-1])
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == ["one line", "é, and <end>"]
    with pytest.raises(PerfsuiteError, match=r"rows\.jsonl, line 1: no text is called 'text'.*are 'body', 'n'$"):
        pack(tmp_path / "named", Recipe(folder=file, vocabulary=300), Quiet())
    file.write_text(json.dumps(rows[2]))
    assert pack(tmp_path / "named", Recipe(folder=file, vocabulary=300), Quiet()).pack.documents == 1


def test_an_identical_pack_is_kept_and_has_the_same_bytes_elsewhere(tmp_path: Path, recipe: Recipe) -> None:
    first = pack(tmp_path / "out", recipe, Quiet())
    again = pack(tmp_path / "out", recipe, Quiet())
    assert again.kept
    assert again.pack == first.pack
    pack(tmp_path / "other", recipe, Quiet())
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_a_pack_interrupted_anywhere_resumes_to_the_same_bytes(tmp_path: Path, recipe: Recipe) -> None:
    whole = Quiet()
    pack(tmp_path / "whole", recipe, whole)
    out, parts = tmp_path / "out", tmp_path / "out.parts"
    for last in range(1, whole.calls + 1):
        with pytest.raises(KeyboardInterrupt):
            pack(out, recipe, Quiet(last))
        assert not out.exists()
        assert parts.is_dir()
        pack(out, recipe, Quiet())
        assert content(out) == content(tmp_path / "whole")
        assert not parts.exists()
        shutil.rmtree(out)


def test_a_resumed_pack_does_not_repeat_finished_work(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Quiet()
    pack(tmp_path / "whole", recipe, whole)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "out", recipe, Quiet(whole.calls))  # the last block is done
    monkeypatch.setattr(text_pack.text, "trained", None)
    monkeypatch.setattr(text_pack.text, "encode", None)
    pack(tmp_path / "out", recipe, Quiet())


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-1]), Path.unlink])
def test_a_damaged_part_is_rebuilt(tmp_path: Path, recipe: Recipe, damage) -> None:
    pack(tmp_path / "whole", recipe, Quiet())
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "out", recipe, Quiet(9 + 7 + 3))
    parts = sorted((tmp_path / "out.parts").glob("part-tokens-*"))
    assert parts
    damage(parts[0])
    pack(tmp_path / "out", recipe, Quiet())
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_pack_with_an_existing_tokenizer_gives_the_same_tokens(tmp_path: Path, recipe: Recipe) -> None:
    pack(tmp_path / "out", recipe, Quiet())
    given = tmp_path / "out" / TOKENIZER
    other = pack(tmp_path / "other", Recipe(folder=recipe.folder, vocabulary=999, tokenizer=given), Quiet())
    assert content(tmp_path / "other")[TOKENS] == content(tmp_path / "out")[TOKENS]
    assert other.pack.vocabulary == 300


def test_tokens_of_a_large_vocabulary_take_four_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    row = numpy.array([70_000, 1])
    packed_text.write(out, row, numpy.array([2]), "{}", 70_001, {"recipe": "r"})
    assert opened(out).row.tolist() == row.tolist()
    assert (out / TOKENS).stat().st_size == 8


def test_sequences_counts_contexts_with_a_next_token(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    packed_text.write(out, numpy.arange(21), numpy.array([21]), "{}", 300, {"recipe": "r"})
    found = opened(out)
    assert [found.sequences(length) for length in (1, 5, 10, 19, 20)] == [20, 4, 2, 1, 1]
    with pytest.raises(PerfsuiteError, match=r"^sequence_length: 21 and the token after are more than the 21 tokens"):
        found.sequences(21)
    with pytest.raises(PerfsuiteError, match="sequence_length: 0 is out of range; give 1 or more"):
        found.sequences(0)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("to and fro " * 50)
    pack(root / "out", Recipe(folder=root / "texts", vocabulary=260), Quiet())
    return root / "out"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flipped(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def of_another_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))


def without_its_tokens(path: Path) -> None:
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tokens"}))


def without_a_digest(path: Path) -> None:
    index = json.loads(path.read_text())
    del index["sha256"][ENDS]
    path.write_text(json.dumps(index))


def saying(**message: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **message}))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (TOKENS, cut, r"tokens.bin has \d+ bytes and not \d+; make it again with `perfsuite data pack --overwrite`"),
        (TOKENS, flipped, "tokens.bin is damaged: it is not what was written; make it again"),
        (ENDS, flipped, "ends.npy is damaged"),
        (TOKENIZER, Path.unlink, "out: tokenizer.json is missing; make it again"),
        (ENDS, Path.unlink, "out: ends.npy is missing; make it again"),
        (INDEX, Path.unlink, "out: pack.json is missing; make it again"),
        (INDEX, cut, "out: pack.json is damaged: it is no index of packed text; make it again"),
        (INDEX, of_another_version, "is of version 9, not 1; make it again"),
        (INDEX, without_its_tokens, "out: pack.json is damaged: 'tokens' is missing; make it again"),
        (INDEX, without_a_digest, "out: pack.json is damaged: sha256 does not tell that of ends.npy; make it again"),
        (INDEX, saying(sha256=3), "pack.json is damaged: sha256 does not tell that of tokens.bin"),
        (INDEX, saying(vocabulary=-1), "pack.json is damaged: vocabulary is -1 and must be a whole number from 1"),
        (INDEX, saying(vocabulary=True), "pack.json is damaged: vocabulary is True and must be"),
        (INDEX, saying(vocabulary=99999), "pack.json is damaged: vocabulary is 99999, and by tokenizer.json 260"),
        (INDEX, saying(vocabulary=100), "pack.json is damaged: vocabulary is 100, and by tokenizer.json 260"),
        (INDEX, saying(tokens=float("inf")), "pack.json is damaged: tokens is inf and must be a whole number"),
        (INDEX, saying(tokens=7), r"pack.json is damaged: tokens is 7, and by ends.npy \d+"),
        (INDEX, saying(documents=7), "pack.json is damaged: documents is 7, and by ends.npy 1"),
    ],
)
def test_a_damaged_pack_is_reported(tmp_path: Path, sound: Path, name: str, damage, said: str) -> None:
    out = tmp_path / "out"
    shutil.copytree(sound, out)
    damage(out / name)
    with pytest.raises(PerfsuiteError, match=rf"^data: .*{said}"):
        opened(out)


def test_a_damaged_pack_is_rebuilt_with_overwrite(tmp_path: Path, sound: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(sound, out)
    cut(out / TOKENS)
    recipe = Recipe(folder=sound.parent / "texts", vocabulary=260)
    with pytest.raises(PerfsuiteError, match=r"make it again with `perfsuite data pack --overwrite`$"):
        pack(out, recipe, Quiet())
    assert not pack(out, recipe, Quiet(), overwrite=True).kept
    assert content(out) == content(sound)


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_pack_without_a_valid_index_is_rebuilt_with_overwrite(tmp_path: Path, sound: Path, damage) -> None:
    out = tmp_path / "out"
    shutil.copytree(sound, out)
    damage(out / INDEX)
    recipe = Recipe(folder=sound.parent / "texts", vocabulary=260)
    with pytest.raises(PerfsuiteError, match=r"make it again with `perfsuite data pack --overwrite`$"):
        pack(out, recipe, Quiet())
    with pytest.raises(PerfsuiteError, match=rf"delete {out}; it is made again$"):
        pack(out, recipe, Quiet(), cached=True)
    (out / "mine").write_text("mine")
    with pytest.raises(PerfsuiteError, match="is no packed text; name another folder, or move it away"):
        pack(out, recipe, Quiet(), overwrite=True)
    (out / "mine").unlink()
    assert not pack(out, recipe, Quiet(), overwrite=True).kept
    assert content(out) == content(sound)


@pytest.mark.parametrize("name", [TOKENS, INDEX])
def test_an_unreadable_pack_is_not_reported_as_damaged(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    forbid(monkeypatch, sound / name)
    with pytest.raises(PerfsuiteError, match=rf"^data: cannot read {sound / name}: Permission denied; make it"):
        opened(sound)
    recipe = Recipe(folder=sound.parent / "texts", vocabulary=260)
    with pytest.raises(PerfsuiteError, match=rf"^data: cannot read {sound / name}: Permission denied; make it"):
        pack(sound, recipe, Quiet())


def forbid(monkeypatch: pytest.MonkeyPatch, forbidden: Path) -> None:
    """Make opening a path raise PermissionError. Mode 000 would not stop root."""
    own_open, own_scandir = io.open, os.scandir

    def refused(own: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(path, int) and Path(path) == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return own(path, *arguments, **named)

    monkeypatch.setattr(io, "open", functools.partial(refused, own_open))
    monkeypatch.setattr(os, "scandir", functools.partial(refused, own_scandir))


def test_unreadable_files_are_omitted_and_named(tmp_path: Path, recipe: Recipe, monkeypatch: Any) -> None:
    (recipe.folder / "sub").mkdir()
    forbid(monkeypatch, recipe.folder / "sub")
    forbid(monkeypatch, recipe.folder / "3.txt")
    watcher = Quiet()
    made = pack(tmp_path / "out", recipe, watcher)
    assert made.source == f"6 files of {recipe.folder} (left out: 2 not UTF-8 or empty, 2 unreadable)"
    assert {"left out: sub: Permission denied", "left out: 3.txt: Permission denied"} < set(watcher.said)
    forbid(monkeypatch, recipe.folder)
    with pytest.raises(PerfsuiteError, match=rf"^data: cannot read {recipe.folder}: Permission denied; make it"):
        pack(tmp_path / "out", recipe, Quiet())


def test_a_wrong_input_keeps_the_finished_parts(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "out", recipe, Quiet(9 + 7 + 3))
    kept = content(tmp_path / "out.parts")
    for wrong in (Recipe(folder=tmp_path / "none"), Recipe(folder=recipe.folder, tokenizer=tmp_path / "none")):
        with pytest.raises(PerfsuiteError):
            pack(tmp_path / "out", wrong, Quiet())
    assert content(tmp_path / "out.parts") == kept


def test_a_missing_pack_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PerfsuiteError, match="none is no folder of packed text; make it with `perfsuite data pack`"):
        opened(tmp_path / "none")
    with pytest.raises(PerfsuiteError, match=f"^data: cannot read {LONG}: File name too long; make it readable"):
        opened(LONG)


def invoked(*arguments: object) -> Result:
    return CliRunner().invoke(data, ["pack", *map(str, arguments)])


def test_command_reports_the_pack_and_its_digest(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out"
    done = invoked(out, "--from", folder, "--vocabulary", 300)
    assert done.exit_code == 0, done.output
    assert f"wrote {out}: " in done.stderr
    assert " tokens of 7 documents, vocabulary 300\n" in done.stderr
    assert done.stdout == f"{opened(out).digest}  {out}\n"
    assert f"kept {out}: " in invoked(out, "--from", folder, "--vocabulary", 300).stderr


def test_wrong_input_is_reported_in_one_line(tmp_path: Path, folder: Path) -> None:
    out, empty, other = tmp_path / "out", tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "mine").write_text("mine")
    assert invoked(out, "--from", folder, "--vocabulary", 300).exit_code == 0
    (tmp_path / "bad.json").write_text("{}")
    lines, halves, blank = (tmp_path / f"{name}.jsonl" for name in ("lines", "halves", "blank"))
    lines.write_text('{"text": "one"}\n{"text": "two"\n')
    halves.write_text(json.dumps({"text": "\ud800"}))
    blank.write_text("\n")
    foreign = tokenizers.Tokenizer(tokenizers.models.BPE())
    (tmp_path / "foreign.json").write_text(foreign.to_str())
    for arguments, said in (
        ((out, "--from", tmp_path / "none"), "data: "),
        ((tmp_path / "a", "--from", empty), f"data: no text under {empty}; it must hold .txt, .md, .rst, .py files"),
        ((tmp_path / "a", "--from", folder, "--vocabulary", 9), "vocabulary: 9 is too small for bytes; it must be 258"),
        ((out, "--from", folder, "--vocabulary", 280), f"{out} exists and is packed from other texts or with another"),
        ((other, "--from", folder), f"{other} exists and is no packed text; name another folder"),
        ((tmp_path / "a", "--from", folder, "--tokenizer", tmp_path / "none"), "tokenizer: there is no file "),
        ((tmp_path / "a", "--from", folder, "--tokenizer", tmp_path / "bad.json"), "tokenizer: "),
        (
            (tmp_path / "a", "--from", folder, "--tokenizer", tmp_path / "foreign.json"),
            f"tokenizer: {tmp_path / 'foreign.json'} has no token {END} of number 1, by which documents end",
        ),
        ((other / "mine" / "a", "--from", folder), "cannot write "),
        ((LONG, "--from", folder), f"cannot write {LONG}: File name too long; name another folder"),
        ((tmp_path / "b" / "a", "--from", LONG), f"data: cannot read {LONG}: File name too long; make it readable"),
        (
            (tmp_path / "b" / "a", "--from", folder, "--tokenizer", LONG),
            f"tokenizer: cannot read {LONG}: File name too long; make it readable",
        ),
        ((tmp_path / "a", "--from", folder, "--vocabulary", 99999999999), "vocabulary: 99999999999 is too large; it "),
        ((".", "--from", folder), ". cannot be replaced as a whole; name a folder in it"),
        (
            (tmp_path / "a", "--from", tmp_path / "none.jsonl"),
            f"data: {tmp_path / 'none.jsonl'} is no folder; name one",
        ),
        ((tmp_path / "a", "--from", lines), f"{lines}, line 2: not JSON: "),
        ((tmp_path / "a", "--from", halves), f"{halves}, line 1: its text has half of a character"),
        (
            (tmp_path / "a", "--from", blank),
            f"data: no text under {tmp_path} (left out: 1 not UTF-8 or empty); it must",
        ),
    ):
        done = invoked(*arguments)
        lines = done.stderr.splitlines()
        assert done.exit_code == 1, arguments
        assert lines[-1].startswith(f"Error: {said}"), lines
        assert "Traceback" not in done.stderr
    assert (other / "mine").read_text() == "mine"
    assert not list(tmp_path.glob("*.parts*"))
    assert not (tmp_path / "b").exists()


def test_overwrite_replaces_a_pack_of_another_vocabulary(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out"
    assert invoked(out, "--from", folder, "--vocabulary", 300).exit_code == 0
    assert invoked(out, "--from", folder, "--vocabulary", 280, "--overwrite").exit_code == 0
    assert opened(out).vocabulary == 280
    assert not (tmp_path / "out.parts").exists()


def test_a_text_that_changes_during_packing_raises_error(tmp_path: Path, recipe: Recipe) -> None:
    class Meddling(Quiet):
        def progress(self, what: str, done: int, total: int) -> None:
            if what == "learning" and not done:
                (recipe.folder / "3.txt").write_text("something else")

    with pytest.raises(PerfsuiteError, match=r"3.txt was changed while it was read; run the command again"):
        pack(tmp_path / "out", recipe, Meddling())
