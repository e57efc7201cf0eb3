"""Hostile and damaged checkpoints: a one-line error names the file, no code is executed, no file is changed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from scale import some
from training import SMALL, Toy

from suite.commands.generate import generate
from suite.commands.train import train
from suite.eigenstate_lm.model import Sizes, make_weights
from suite.runtime import Store, plain
from suite.runtime.checkpoints import load

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'perfsuite[train]'")

Fields = dict[str, Any]


class Evil:
    """Object that creates a folder if pickle unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-here",)


@pytest.fixture
def good(run: Toy) -> Path:
    """Return a checkpoint of the toy trainer after 4 windows, in a run's folder."""
    run.fit(4)
    return run.folder / "window-00000004.pt"


def fields_of(path: Path) -> Fields:
    found: Fields = torch.load(path, weights_only=True)
    return found


def resumed(path: str | Path, *arguments: str) -> Result:
    return CliRunner().invoke(train, ["toy", *SMALL, "--windows", "6", "--resume", str(path), *arguments])


def contents(folder: Path) -> dict[str, object]:
    """Return the mode and content of everything under the folder, without following links or reading pipes."""
    return {
        os.path.relpath(os.path.join(place, name), folder): (
            os.lstat(os.path.join(place, name)).st_mode,
            _of(place, name),
        )
        for place, folders, names in os.walk(folder)
        for name in [*folders, *names]
    }


def _of(place: str, name: str) -> bytes | None:
    path = Path(place, name)
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def refused(path: Path, named: str | None = None, *message: str) -> None:
    """Assert that `train`, in the run's folder and in a new one, and `generate` print one line and change no file."""
    before = contents(Path.cwd())
    for folder in (path.parent, Path("new")):
        one_line(resumed(path, "--folder", str(folder)), named or str(path), *message)
    one_line(CliRunner().invoke(generate, [str(path), "--device", "cpu"]), named or str(path))
    assert contents(Path.cwd()) == before
    assert not Path("was-here").exists(), "its code was run"


def one_line(done: Result, *message: str) -> None:
    assert done.exit_code == 1, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    (line,) = [line for line in done.output.splitlines() if not line.startswith("data: ")]
    assert line.startswith("Error: ")
    assert ";" in line, "there is no remedy"
    assert len(line) < 1000
    assert line.isprintable()
    for words in message:
        assert words in line


# --- file contents --------------------------------------------------------------------------------------------------


def laughs(times: int = 40) -> list[Any]:
    """Return a nested list of 2^times values that takes a few bytes."""
    found: list[Any] = [1]
    for _ in range(times):
        found = [found, found]
    return found


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(300):
        found = [found]
    return found


def expanded() -> torch.Tensor:
    """Return a tensor of four terabytes that is stored in four bytes."""
    return torch.ones(1).expand(10**12)


def sparse() -> torch.Tensor:
    where = torch.zeros(1, 1, dtype=torch.int64)
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns where only the argument asks for it
        return torch.sparse_coo_tensor(where, torch.ones(1), (10**12,))


HOSTILE: dict[str, Callable[[Fields], object]] = {
    "code": lambda f: f["trainer"].update(scores=Evil()),
    "code among the generators": lambda f: f["rng"].update(python=Evil()),
    "code for a key": lambda f: f["configuration"].update({"x": {Evil(): 1}}),
    "no name": lambda f: f.update(name=None),
    "a name of lines": lambda f: f.update(name="toy\nError: \x1b[31mall is well" * 100),
    "windows of text": lambda f: f.update(windows="4"),
    "windows true": lambda f: f.update(windows=True),
    "windows below 0": lambda f: f.update(windows=-4),
    "windows beyond counting": lambda f: f.update(windows=1 << 5000),
    "windows of a tensor": lambda f: f.update(windows=torch.ones(3)),
    "items of a tensor": lambda f: f.update(items=torch.ones(3)),
    "a version of a tensor": lambda f: f.update(version=torch.ones(3)),
    "a version beyond counting": lambda f: f.update(version=1 << 20000),
    "a format of a tensor": lambda f: f.update(format=torch.ones(3)),
    "a list for the trainer": lambda f: f.update(trainer=[1, 2]),
    "nothing for the trainer": lambda f: f.update(trainer=None),
    "a list for the batches": lambda f: f.update(batches=[1]),
    "a list for the configuration": lambda f: f.update(configuration=[1]),
    "numbers for fields": lambda f: f["configuration"].update({1: 2}),
    "a tensor for a field": lambda f: f["configuration"].update(eta_update=torch.ones(3)),
    "a list that is too long": lambda f: f["configuration"].update(eta_update=laughs()),
    "a state that is too long": lambda f: f["trainer"].update(more=laughs()),
    "a list of itself": lambda f: f["trainer"].update(more=itself()),
    "too deep": lambda f: f["trainer"].update(more=deep()),
    "a set": lambda f: f["trainer"].update(more={1, 2}),
    "an integer beyond printing": lambda f: f["configuration"].update(eta_update=1 << 20000),
    "four terabytes": lambda f: f["trainer"].update(scores=expanded()),
    "a sparse tensor": lambda f: f["trainer"].update(scores=sparse()),
    "a tensor without memory": lambda f: f["trainer"].update(scores=torch.ones(3, device="meta")),
    "text for a tensor": lambda f: f["trainer"].update(scores="x" * 10**6),
    "another shape": lambda f: f["trainer"].update(scores=torch.ones(3, 7)),
    "a state without a tensor": lambda f: f["trainer"].pop("scores"),
    "a state of a name with lines": lambda f: f.update(trainer={"x\ny\x1b": 1}),
    "nothing for the generators": lambda f: f.update(rng=None),
    "no generators": lambda f: f.update(rng={}),
    "another state of Python's": lambda f: f["rng"].update(python=(3, (1, 2), None)),
    "a position beyond numpy's keys": lambda f: f["rng"].update(numpy=("MT19937", [1] * 624, 10**6, 0, 0.0)),
    "a position before them": lambda f: f["rng"].update(numpy=("MT19937", [1] * 624, -5, 0, 0.0)),
    "more keys": lambda f: f["rng"].update(numpy=("MT19937", [1] * 10**5, 5, 0, 0.0)),
    "another state of torch's": lambda f: f["rng"].update(torch=torch.ones(9, dtype=torch.uint8)),
    "no position": lambda f: f["batches"].pop("position"),
    "a position below 0": lambda f: f["batches"].update(position=-7),
    "a position beyond the end": lambda f: f["batches"].update(position=10**6),
    "a position of text": lambda f: f["batches"].update(position="x"),
    "an epoch of a tensor": lambda f: f["batches"].update(epoch=torch.ones(3)),
    "an epoch beyond counting": lambda f: f["batches"].update(epoch=1 << 4000),
    "a seed of a tensor": lambda f: f["batches"].update(seed=torch.ones(3)),
    "a seed that is too long": lambda f: f["batches"].update(seed=laughs(20)),
}


@pytest.mark.parametrize("what", some(HOSTILE, list(HOSTILE)[::2]))
def test_hostile_content_is_reported_in_one_line(good: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = fields_of(good)
    HOSTILE[what](fields)
    torch.save(fields, good)
    monkeypatch.setattr(plain, "MOST", 10_000)  # a low limit keeps the test fast
    refused(good)


def test_unmodified_content_can_be_resumed(good: Path) -> None:
    torch.save(fields_of(good), good)
    assert resumed(good, "--folder", str(good.parent)).exit_code == 0


# --- file formats ---------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive with each part replaced by `change(name, part)`."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w", compression) as made:
        for part in archive.namelist():
            made.writestr(part, change(part, archive.read(part)))
    return out.getvalue()


def overlapping(path: Path) -> bytes:
    """Store the largest part inside another one; names, sizes and checksums are right."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    inner = max(parts, key=lambda name: len(parts[name]))
    alone, out = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(alone, "w") as made:
        made.writestr(inner, parts.pop(inner))
        (entry,) = made.infolist()
        local = alone.getvalue()
    with zipfile.ZipFile(out, "w") as made:
        for name, part in parts.items():
            made.writestr(name, part)
        made.writestr(inner.partition("/")[0] + "/around", local)
        entry.header_offset = out.tell() - len(local)
        made.filelist.append(entry)
    return out.getvalue()


def oversized(path: Path) -> bytes:
    """Corrupt the first entry of the ZIP directory so that its part claims 4 GiB."""
    whole = bytearray(path.read_bytes())
    at = whole.index(b"PK\x01\x02")
    struct.pack_into("<II", whole, at + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    return bytes(whole)


def twice(path: Path) -> bytes:
    """Store a part twice under the same name, so that it is ambiguous which one is read."""
    out = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "a") as made:
        part = archive.namelist()[0]
        made.filelist[0].filename = "x"
        made.NameToInfo.clear()
        made.writestr(part, archive.read(part))
        made.filelist[0].filename = part
    return out.getvalue()


FILES: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda path: b"",
    "text": lambda path: b"not a checkpoint\n",
    "cut": lambda path: path.read_bytes()[:-100],
    "a pickle": lambda path: pickle.dumps({"format": "perfsuite.checkpoint", "version": 1, "trainer": Evil()}),
    "a bomb": lambda path: rewritten(
        path, lambda name, part: bytes(1 << 24) if "/data/" in name else part, zipfile.ZIP_DEFLATED
    ),
    "compressed": lambda path: rewritten(path, lambda name, part: part, zipfile.ZIP_DEFLATED),
    "parts within each other": overlapping,
    "a part larger than the file": oversized,
    "parts twice": twice,
    "an archive without a version": lambda path: path.read_bytes().replace(b"/version", b"/constan"),
    "a storage that is larger than its bytes": lambda path: rewritten(
        path, lambda name, part: part[:8] if "/data/0" in name else part
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_of_another_format_is_reported_in_one_line(good: Path, what: str) -> None:
    good.write_bytes(FILES[what](good))
    refused(good)


@pytest.mark.parametrize("what", ["folder", "pipe", "device", "dead link", "link to itself", "link to something else"])
def test_a_checkpoint_path_that_is_no_regular_file_is_reported(good: Path, what: str) -> None:
    good.unlink()
    if what == "folder":
        (good / "window-00000001.pt").mkdir(parents=True)
    elif what == "pipe":
        os.mkfifo(good)
    else:
        targets = {
            "device": Path("/dev/zero"),
            "dead link": Path("nowhere"),
            "link to itself": good,
            "link to something else": Path("mine"),
        }
        Path("mine").write_text("mine")
        good.symlink_to(targets[what].absolute())
    before = contents(Path.cwd())
    for done in (resumed("latest", "--folder", str(good.parent)), resumed(good, "--folder", "new")):
        one_line(done, str(good))
    one_line(CliRunner().invoke(generate, [str(good.parent), "--device", "cpu"]), str(good))
    assert contents(Path.cwd()) == before


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\nb.pt", r"a\nb.pt"), ("a\udcffb.pt", r"a\xffb.pt"), ("a\x1b[31mb.pt", r"a\x1b[31mb.pt"), ("λ.pt", "λ.pt")],
)
def test_unprintable_file_names_are_escaped_in_the_error(good: Path, name: str, shown: str) -> None:
    path = good.rename(good.parent / name)
    assert resumed(path, "--folder", "other").exit_code == 0
    path.write_bytes(b"PK")
    refused(path, shown, "is damaged, or no checkpoint")
    path.unlink()
    one_line(resumed(path, "--folder", "new"), f"no checkpoint {path.parent}/{shown}")


@pytest.mark.parametrize("name", ["a\nb", "a\udcffb", "λ"])
def test_folders_with_unprintable_names_are_supported(good: Path, name: str) -> None:
    folder = good.parent.rename(good.parent.parent / name)
    assert resumed("latest", "--folder", str(folder)).exit_code == 0
    assert Store(folder).latest().name == "window-00000006.pt"
    Store(folder).latest().write_bytes(b"PK")
    before = contents(folder)
    one_line(resumed("latest", "--folder", str(folder)), "window-00000006.pt is damaged", "resume from")
    assert contents(folder) == before


def test_a_link_to_a_checkpoint_is_a_checkpoint(good: Path) -> None:
    """The link is removed like any other checkpoint; its target stays."""
    elsewhere = good.rename(good.parent.parent / "elsewhere.pt")
    good.symlink_to(elsewhere)
    whole = elsewhere.read_bytes()
    options = ("--folder", str(good.parent), "--keep", "1", "--checkpoint_every", "1", "--windows", "8")
    assert resumed("latest", *options).exit_code == 0
    assert not good.is_symlink()
    assert elsewhere.read_bytes() == whole
    assert load(elsewhere).windows == 4


# --- generate -------------------------------------------------------------------------------------------------------

TINY = Sizes(vocabulary=290, width=4, layers=1, eigenstates=2, cells=1)
WEIGHTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "of complex numbers": lambda w: w.update(embedding=w["embedding"].to(torch.complex64)),
    "of whole numbers": lambda w: w.update(embedding=w["embedding"].long()),
    "empty": lambda w: w.update({"0.decay": torch.zeros(10**6, 0)}),
    "of text": lambda w: w.update({"0.decay": "x"}),
    "named by numbers": lambda w: w.update({3: torch.ones(1)}),
}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "panics as it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panics as it encodes": {"normalizer": {"type": "Prepend", "prepend": ""}},
    "a pattern that is none": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
    "a token beyond the last": {"model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 4 * 10**6}}},
}


@pytest.fixture(scope="module")
def tokenizer() -> str:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    from suite import text

    return str(text.trained(["the rotor turns by an angle"] * 9, 290).to_str())


def generated(fields: Fields, path: Path) -> Result:
    torch.save(fields, path)
    return CliRunner().invoke(generate, [str(path), "--device", "cpu", "--tokens", "3", "--prompt", "the a"])


def language(good: Path, tokenizer: str, sizes: Sizes = TINY) -> Fields:
    trainer = {"weights": make_weights(0, sizes), "tokenizer": tokenizer}
    return {**fields_of(good), "name": "eigenstate_lm", "trainer": trainer}


def sizes_for(tokenizer: str) -> Sizes:
    import dataclasses

    import tokenizers

    count = tokenizers.Tokenizer.from_str(tokenizer).get_vocab_size()
    return dataclasses.replace(TINY, vocabulary=count)


@pytest.mark.parametrize("what", [None, *WEIGHTS])
def test_generate_rejects_weights_of_another_type(good: Path, tokenizer: str, what: str | None) -> None:
    fields = language(good, tokenizer, sizes_for(tokenizer))
    if what is None:
        assert generated(fields, good).exit_code == 0
    else:
        WEIGHTS[what](fields["trainer"]["weights"])
        one_line(generated(fields, good), str(good))


@pytest.mark.parametrize("what", TOKENIZERS)
def test_generate_rejects_invalid_tokenizers(
    good: Path, tokenizer: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is one line even if the library panics, which prints to stderr by itself."""
    import json

    changed = json.dumps({**json.loads(tokenizer), **TOKENIZERS[what]})
    sizes = sizes_for(tokenizer)
    if what == "a token beyond the last":
        sizes = Sizes(vocabulary=3, width=4, layers=1, eigenstates=2, cells=1)
    done = generated(language(good, changed, sizes), good)
    one_line(done, "the tokenizer cannot encode it" if what == "panics as it encodes" else str(good))
    assert capfd.readouterr().err == ""


def test_padding_of_the_tokenizer_is_switched_off(good: Path, tokenizer: str) -> None:
    """Otherwise every prompt would have a billion tokens."""
    import json

    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    changed = json.dumps({**json.loads(tokenizer), "padding": {**padding, "pad_to_multiple_of": None}})
    done = generated(language(good, changed, sizes_for(tokenizer)), good)
    assert done.exit_code == 0, done.output
    assert " tokens read" in done.output
