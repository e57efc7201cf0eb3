"""Folders for sockets."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from perfsuite.errors import MachineError
from perfsuite.system import folders


@pytest.mark.parametrize("length", [folders.LONGEST_PARENT, 200])
def test_socket_folder_has_a_path_short_enough_for_a_socket(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        usual = Path(parent, "x" * (length - len(parent) - 1))
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        with folders.socket_folder() as folder, socket.socket(socket.AF_UNIX) as listening:
            assert (Path(folder).parent == usual) == (length <= folders.LONGEST_PARENT)
            listening.bind(str(Path(folder, "a name of a workload")))


def test_socket_folder_without_a_short_path_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere/" + "x" * 90)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MachineError, match="set TMPDIR to a shorter path"):
        folders.socket_folder()
