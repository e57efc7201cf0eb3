"""One rank: a process that torch's elastic launcher starts, and that calls sides until its connection closes.

Started by `torchrun --standalone --nproc-per-node=2 -m perfsuite.correctness.ranks.process` with the arguments
SOCKET STACKS DEVICE SECONDS, or forked with these arguments by forked.py. They are the socket on which the parent
listens, the folder to which stacks are written, "cpu" or "cuda", and the timeout of a collective in seconds.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from perfsuite import errors
from perfsuite.correctness import convolutions
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.ranks import parts
from perfsuite.correctness.ranks.group import Ended, Found, Raised, Request, Verdict
from perfsuite.declare import discovery
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.errors import GlobalStateChanged, HarnessFault, NotEquivalent, PerfsuiteError, first_line, users_frame
from perfsuite.records import OPTIMIZED, REFERENCE
from perfsuite.state import process_state
from perfsuite.system import triton_interpreter

LATE_S = 0.005
"""Seconds by which one rank calls a side later than the others, which then have no part of it in a result that they
read before it is complete."""


def main() -> None:
    """Answer requests until the parent closes the connection."""
    rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[3]
    with (Path(sys.argv[2]) / str(rank)).open("w") as stacks, Client(sys.argv[1]) as connection:
        # On SIGUSR1 the rank writes its stack, so that the parent can say where it hangs.
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
        connection.send((rank, os.getpid()))
        try:
            if device == "cuda":
                torch.cuda.set_device(rank)
            else:
                torch.set_num_threads(1)
            connection.recv()  # sent once all ranks are connected: on a busy machine they start at different times
            dist.init_process_group(process_state.group_backend(device), timeout=timedelta(seconds=float(sys.argv[4])))
        except EOFError:
            raise
        except Exception as error:
            connection.send(first_line(error))
            raise
        triton_interpreter.quicken()
        connection.send(None)
        with suppress(EOFError, BrokenPipeError):
            while True:
                _answer(connection, rank, ranks, device)
    os._exit(0)  # a normal exit could wait forever for ranks that no longer exist


def _end_with(socket: int) -> None:
    """Exit this process when the other end of the socket is closed, even during a call."""
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def _answer(connection: Connection, rank: int, ranks: int, device: str) -> None:
    """Receive a request and answer it. A Request calls a side, once all ranks are prepared; any other request is run by
    its `outcome` method."""
    request = connection.recv()
    calls = isinstance(request, Request)
    try:
        if calls:
            call = _prepared(request, rank, ranks, device)
            send(connection, None)
            connection.recv()
            if rank == request.case.seed % ranks:
                time.sleep(LATE_S)
            send(connection, call())
        else:
            send(connection, Ended(request.outcome(connection, rank, ranks, device)))
    except Exception as error:
        is_verdict = not calls and isinstance(error, (PerfsuiteError, NotEquivalent))
        send(connection, _verdict(error) if is_verdict else _raised(error))
    except HarnessFault as error:
        send(connection, _verdict(error))


def _verdict(error: BaseException) -> Verdict:
    known = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
    return Verdict(kind=known.__name__, text=str(error), place="")


def _raised(error: Exception) -> Raised:
    if isinstance(error, parts.ChangedInputError):
        return Found(kind="", text=str(error), place="")
    if isinstance(error, GlobalStateChanged):
        return Found(kind=GlobalStateChanged.__name__, text=error.words, place="")
    frame = users_frame(error)
    place = f"{Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
    return Raised(kind=type(error).__name__, text=first_line(error), place=place)


def _prepared(request: Request, rank: int, ranks: int, device: str) -> Callable[[], Leaves]:
    """Import the pair's module, make the inputs, and return a function that calls the side on them."""
    sys.path[:] = request.sys_path
    process_state.take(request.settings)
    pair = pair_of(request.module, request.path, request.pair)[0].at(ranks, equal_parts=request.equal_parts)
    sides = {OPTIMIZED: pair.optimized, REFERENCE: pair.reference, **pair.variants}
    side, home = as_side(sides[request.side]), Path(request.path).parent
    call = parts.prepared(pair, side, request.case, device, rank=rank, ranks=ranks, home=home)
    return convolutions.exact(pair.precision)(call)


def pair_of(module_name: str, path: str, name: str) -> tuple[Pair, ModuleType]:
    """Return the pair `name`, and the module that declares it, imported from the file `path`."""
    module = sys.modules.get(module_name)
    if module is None or module.__file__ != path:  # test modules in two folders may have the same name
        module = _imported(module_name, path)
    pair = discovery.find(module, name)
    if pair is None:
        raise LookupError(f"{module_name} has no pair {name} where it is imported again")
    pair.name = name
    return pair, module


def _imported(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def send(connection: Connection, answer: Any) -> None:
    """Send outputs, or any other object that can be pickled, to the parent process."""
    if isinstance(answer, dict):
        answer = on_cpu(answer)
    file = io.BytesIO()
    torch.save(answer, file)
    connection.send_bytes(file.getvalue())


def on_cpu(leaves: Leaves) -> Leaves:
    """Return the outputs with all tensors in host memory."""
    return {n: t.detach().cpu() if isinstance(t, torch.Tensor) else t for n, t in leaves.items()}


if __name__ == "__main__":
    main()
