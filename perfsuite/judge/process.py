"""A process that runs one module, and the memory that is shared with it."""

from __future__ import annotations

import base64
import io
import json
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError

HERE = Path(__file__).parent
SANDBOX = HERE / "sandbox.py"
START_LIMIT_S = 120.0
"""Until Python and torch are imported."""
ALIGNMENT = 256
TRACES = ("PYTEST", "HYPOTHESIS", "PERFSUITE", "XDIST")
"""Parts of the names of variables that the process does not get."""
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""No pool of processes that compile beside it."""
CACHES = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Variables that name a folder to write to."""


class Ended(Exception):  # noqa: N818 - what it did, in words
    """The process raised, hung or ended: its message says which."""


class Memory:
    """Memory that another process has too; a place in it is a JSON object."""

    def __init__(self) -> None:
        self.file = os.memfd_create("perfsuite")
        self.end = 0
        self.held: mmap.mmap | None = None

    def clear(self) -> None:
        """Begin at its start again."""
        self.end = 0

    def take(self, size: int) -> int:
        """The offset of so many bytes."""
        begin = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = begin + size
        if self.held is None or self.end > len(self.held):
            os.ftruncate(self.file, max(self.end, 2 * (len(self.held) if self.held is not None else 0), 1 << 16))
            self.held = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return begin

    def place(self, tensor: torch.Tensor, *, filled: bool = True) -> tuple[dict[str, Any], torch.Tensor]:
        """(where it is, the tensor there) for a copy of it with the same strides; without values unless `filled`."""
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        count = extent if tensor.numel() else 0
        offset = self.take(count * tensor.element_size())
        at = {
            "offset": offset,
            "count": count,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        if not count:
            return at, torch.empty_like(tensor, device="cpu")
        assert self.held is not None
        whole = torch.frombuffer(self.held, dtype=tensor.dtype, count=count, offset=offset)
        there = whole.as_strided(tensor.shape, tensor.stride())
        if filled:
            there.copy_(tensor)
        return at, there

    def value(self, value: Any, place: Callable[[torch.Tensor], dict[str, Any]]) -> dict[str, Any]:
        """Where an argument is; `place` finds a place for each tensor."""
        if isinstance(value, torch.Tensor):
            return {"tensor": place(value.detach())}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self.value(v, place) for v in value]}
        if isinstance(value, Mapping):
            return {"dict": {key: self.value(v, place) for key, v in value.items()}}
        return {"pickled": self.pickled(value)}

    def pickled(self, value: Any) -> list[int]:
        """Where an object is."""
        stream = io.BytesIO()
        torch.save(value, stream)
        data = stream.getvalue()
        begin = self.take(len(data))
        assert self.held is not None
        self.held[begin : begin + len(data)] = data
        return [begin, begin + len(data)]

    def close(self) -> None:
        """Give it back; tensors there may live on."""
        os.close(self.file)


def on_device(tensor: torch.Tensor, key: str) -> dict[str, Any]:
    """The place of a tensor in memory of a GPU, for another process."""
    parts = tensor.untyped_storage()._share_cuda_()
    handle = [{"b": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts]
    return {
        "handle": handle,
        "key": key,
        "offset": tensor.storage_offset(),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


class Nursery:
    """A process that has imported torch and runs nothing else; those that run modules are forked from it."""

    def __init__(self) -> None:
        self.own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {n: v for n, v in os.environ.items() if not any(t in n.upper() for t in TRACES)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", (HERE / "child.py").read_text(), str(theirs.fileno()), SANDBOX.read_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment | {"OMP_WAIT_POLICY": "passive"},
            pass_fds=(theirs.fileno(),),
            cwd=tempfile.gettempdir(),
        )
        theirs.close()
        self.lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """Its answer: the number of the process that it has forked, or how that has ended."""
        with self.lock:
            socket.send_fds(self.own, [json.dumps(request).encode()], files)
            answer = self.own.recv(64)
        if not answer:
            raise PerfsuiteError("the process that starts others has ended; run perfsuite judge again")
        return int(answer)

    def close(self) -> None:
        """End it."""
        self.own.close()
        self.process.wait()


class Process:
    """Runs `name` of the file at `source`, confined to a folder of its own."""

    def __init__(
        self, nursery: Nursery, source: Path, name: str, device: str, *, hidden: Sequence[str], cpu_s: int
    ) -> None:
        self.nursery, self.name, self.memory = nursery, name, Memory()
        self.folder = Path(tempfile.mkdtemp(prefix="perfsuite-judge-"))
        self.path = self.folder / "candidate.py"
        shutil.copyfile(source, self.path)
        asked, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        own = {
            "scratch": str(self.folder),
            "environment": dict.fromkeys(CACHES, str(self.folder)) | SETTINGS,
            "hidden": list(hidden),
            "cpu_s": cpu_s,
            "device": device,
        }
        self.number = nursery.ask(own, (asked, replies, self.memory.file))
        os.close(asked)
        os.close(replies)
        self._rest = b""
        self.ended = self.closed = False
        self.lacking: list[str] = self._reply(START_LIMIT_S).get("lacking", [])

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Its reply, after which it stands still until it is asked again. Ended where it raised, hung or ended."""
        self._continue()
        self._send(json.dumps(request).encode())
        return self._checked(self._reply(limit_s))

    def timed(
        self, request: Mapping[str, Any], limit_s: float, fill: Callable[[], None] = lambda: None
    ) -> tuple[float, dict[str, Any]]:
        """(seconds between the word "go" and the reply, the reply).

        `fill` writes the inputs while the process stands still: before its time begins it cannot work on them.
        """
        self.ask(request, limit_s)
        fill()
        begin = time.perf_counter()
        self._continue()
        self._send(b"go")
        line = self._line(limit_s)
        seconds = time.perf_counter() - begin
        return seconds, self._checked(self._read(line))

    def _continue(self) -> None:
        if self.ended:
            raise Ended("has ended its process")
        os.killpg(self.number, signal.SIGCONT)

    def _reply(self, limit_s: float) -> dict[str, Any]:
        return self._read(self._line(limit_s))

    def _read(self, line: bytes) -> dict[str, Any]:
        """The reply in a line; what else the process does, it does when it is asked again."""
        if self.nursery.ask({"stop": self.number}):
            raise Ended(self._end())
        try:
            found = json.loads(line)
        except ValueError:
            raise Ended("writes into the pipe of its replies") from None
        if not isinstance(found, dict):
            raise Ended("writes into the pipe of its replies")
        return found

    def _checked(self, found: dict[str, Any]) -> dict[str, Any]:
        if "error" in found:
            raise Ended(f"raises {found['error']}")
        return found

    def _send(self, line: bytes) -> None:
        try:
            os.write(self._requests, line + b"\n")
        except BrokenPipeError:
            raise Ended(self._end()) from None

    def _line(self, limit_s: float) -> bytes:
        until = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self._end()
                raise Ended(f"hangs: it was stopped after {limit_s:g} s")
            part = os.read(self._replies, 1 << 16)
            if not part:
                raise Ended(self._end())
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> str:
        self.ended = True
        code = self.nursery.ask({"end": self.number})
        return f"ends its process with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"

    def close(self) -> None:
        """End the process and all that it started; remove its folder. Once is enough."""
        if self.closed:
            return
        self.closed = True
        if not self.ended:
            self._end()
        os.close(self._requests)
        os.close(self._replies)
        self.memory.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def refuse_where_unsupported() -> None:
    """PerfsuiteError where no process can be confined."""
    if not sys.platform.startswith("linux"):
        raise PerfsuiteError("perfsuite judge needs Linux: elsewhere it cannot confine what it runs")
