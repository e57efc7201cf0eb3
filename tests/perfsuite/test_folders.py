"""The folders that perfsuite makes for itself."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from perfsuite import folders
from perfsuite.errors import MachineError


@pytest.mark.parametrize("length", [folders.LONGEST_PARENT, 200])
def test_a_socket_finds_room_in_its_folder(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        usual = Path(parent, "x" * (length - len(parent) - 1))
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        with folders.socket_folder() as folder, socket.socket(socket.AF_UNIX) as listening:
            assert (Path(folder).parent == usual) == (length <= folders.LONGEST_PARENT)
            listening.bind(str(Path(folder, "a name of a workload")))


def test_where_there_is_no_room_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere/" + "x" * 90)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MachineError, match="set TMPDIR to a shorter path"):
        folders.socket_folder()
