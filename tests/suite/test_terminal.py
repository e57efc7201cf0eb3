"""Commands keep working with a closed pipe, a full disk as the output, and a terminal that only supports ASCII."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from scale import FULLY
from training import ROOT, SMALL, environment

from perfsuite.errors import PerfsuiteError
from suite import terminal
from suite.commands.train import train
from suite.runtime import Store

RECORDING = ROOT / "docs/trainers/trainer2-ablation/small/trainer2.json"


class Gone(io.RawIOBase):
    """Stream on which writing raises an error."""

    def __init__(self, error: OSError) -> None:
        self.error: OSError | None = error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        return len(data)


Make = Callable[[str, OSError], None]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Yield a function (stream's name, error) that makes writing to a standard stream raise the error."""
    made: list[Gone] = []

    def make(name: str, error: OSError) -> None:
        made.append(Gone(error))
        stream = io.TextIOWrapper(io.BufferedWriter(made[-1]), encoding="utf-8", write_through=True)
        monkeypatch.setattr(sys, name, stream)

    yield make
    for stream in made:
        stream.error = None  # its buffer is flushed at garbage collection


def left(command: click.Command, *arguments: str) -> int:
    """Return the exit code of the command."""
    with pytest.raises(SystemExit) as caught:
        command.main(list(arguments))
    return int(caught.value.code or 0)


PIPE, DISK = BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [PIPE, DISK])
def test_run_continues_if_its_output_cannot_be_written(gone: Make, error: OSError, tmp_path: Path) -> None:
    for name in ("stderr", "stdout"):
        gone(name, error)
    assert left(train, "toy", *SMALL, "--windows", "5", "--folder", "run", "--timing_debug", "true") == 0
    assert Store(tmp_path / "run").latest().name == "window-00000005.pt"


@pytest.mark.parametrize("error", [PIPE, DISK])
@pytest.mark.parametrize(("arguments", "code"), [(["--widnows", "3"], 2), (["--resume", "nowhere"], 1)])
def test_exit_code_is_right_if_the_error_cannot_be_written(
    gone: Make, error: OSError, arguments: list[str], code: int
) -> None:
    gone("stderr", error)
    assert left(train, "toy", *SMALL, *arguments) == code


def test_a_closed_pipe_is_no_error(gone: Make) -> None:
    gone("stdout", PIPE)
    assert left(train, "toy", *SMALL, "--show") == 0
    terminal.tell("again")


def test_an_unwritable_output_is_reported_in_one_line(gone: Make, capfd: pytest.CaptureFixture[str]) -> None:
    gone("stdout", DISK)
    with pytest.raises(PerfsuiteError, match="cannot write to the standard output: No space left on device; send it"):
        terminal.tell("x")
    assert left(train, "toy", *SMALL, "--show") == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_run_succeeds_without_stdout_and_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    terminal.tell("x")
    terminal.tell("x", err=True)
    terminal.console().print("x")
    assert left(train, "toy", *SMALL, "--windows", "2", "--folder", "run") == 0


def test_tell_escapes_bytes_that_are_not_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.tell("λ \udcce\udcbb \udcff \ud800")
    terminal.tell("λ \udcce\udcbb \udcff")
    assert capsys.readouterr().out == "λ \\udcce\\udcbb \\udcff \\ud800\nλ λ \\xff\n"


def test_reserve_keeps_closed_standard_descriptors_from_being_reused() -> None:
    """Otherwise a library's message to stderr could end up in a checkpoint."""
    code = """
import os
os.close(1), os.close(2)
from suite.terminal import reserve
reserve()
number = os.open("file", os.O_CREAT | os.O_WRONLY)
os.write(2, b"told")
raise SystemExit(not (number > 2 and os.stat("file").st_size == 0))
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


@pytest.mark.parametrize(
    ("command", "arguments"), [("ablate", ["--no-plot", "--from", str(RECORDING)]), ("claims", ["--only", "C5"])]
)
def test_an_unwritable_output_folder_is_reported_in_one_line(
    command: str, arguments: list[str], tmp_path: Path
) -> None:
    """The folder is a file, or its parent is one."""
    from importlib import import_module

    from click.testing import CliRunner

    (tmp_path / "file").write_text("")
    found = getattr(import_module(f"suite.commands.{command}"), command)
    for out in ("file", "file/x"):
        done = CliRunner().invoke(found, ["trainer2", *arguments, "--out", out])
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("Error: cannot ")
        assert out in line


# --- ASCII ----------------------------------------------------------------------------------------------------------

EVERY_COMMAND = r"""
import importlib, json, sys
from pathlib import Path
import click
import toy
import torch
torch.set_num_threads(1)

def command(name, *arguments):
    try:
        found = getattr(importlib.import_module(f"suite.commands.{name}"), name)
        found.main([*arguments], prog_name=name)
    except SystemExit as end:
        codes.append((name, end.code))

codes = []
small = json.loads(sys.argv[1])
run, texts, pack, prompt = sys.argv[2:6]
Path("c.yaml").write_text("windows: 4\nfolder: \u03bbyaml\n", encoding="utf-8")
options = ["--tensorboard", "true", "--tensorboard_every", "1", "--timing_debug", "true"]
command("train", "toy", *small, "--windows", "5", "--folder", run, *options)
command("train", "toy", "--config", "c.yaml", *small)
command("curve", run)
command("ablate", "trainer2", "--from", sys.argv[6], "--out", f"{run}/a")
command("data", "pack", pack, "--from", texts, "--vocabulary", "300")
from test_hostile_checkpoints import TINY
from suite.eigenstate_lm.model import make_weights
import dataclasses, tokenizers
from suite.runtime import Store
from training import made
content = Path(pack, "tokenizer.json").read_text(encoding="utf-8")
sizes = dataclasses.replace(TINY, vocabulary=tokenizers.Tokenizer.from_str(content).get_vocab_size())
trainer = {"weights": make_weights(0, sizes), "tokenizer": content}
Store(f"{run}/lm").save(made(3, name="eigenstate_lm", trainer=trainer))
command("generate", f"{run}/lm", "--prompt", prompt, "--tokens", "5", "--device", "cpu")
from suite.claims import record
said = dict(trainer="trainer2", said="\u03bb", verdict="depends", found="\xd7", device="d", versions="v", date="")
record.save({"C1": record.Claim(id="C1", **said)}, Path(run, "c", "claims.json"))
command("claims", "eigenstate_lm", "--only", "C47", "--device", "cpu", "--out", f"{run}/c")
assert set(record.load(Path(run, "c", "claims.json"))) == {"C1", "C47"}
Path("codes.json").write_text(json.dumps(codes))
"""


@FULLY
def test_every_command_works_in_an_ascii_terminal(tmp_path: Path) -> None:
    """In a separate process, with non-ASCII file names, each command exits with 0 and writes its files."""
    for library in ("jsonargparse", "yaml", "tensorboard", "matplotlib", "tokenizers"):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install 'perfsuite[train,test]'")
    (tmp_path / "λtexts").mkdir()
    (tmp_path / "λtexts" / "ü.md").write_text("the rotor turns λ by an angle ×" * 20, encoding="utf-8")
    given = environment(LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    names = ["λrun", "λtexts", "λpack", "λ the", str(RECORDING)]
    command = [sys.executable, "-c", EVERY_COMMAND, json.dumps(SMALL), *names]
    done = subprocess.run(command, env=given, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    commands = ("train", "train", "curve", "ablate", "data", "generate", "claims")
    assert codes == [[name, 0] for name in commands], done.stderr
    assert "Traceback" not in done.stderr
    assert "? the" in done.stdout, "a character that the terminal lacks is a question mark"
    for name in ("window-00000005.pt", "curve.svg", "a/trainer2.md", "a/trainer2.svg", "c/claims.md"):
        assert (tmp_path / "λrun" / name).exists(), name
    assert (tmp_path / "λyaml" / "window-00000004.pt").exists()
    assert sorted(os.listdir(tmp_path / "λpack")) == ["ends.npy", "pack.json", "tokenizer.json", "tokens.bin"]
