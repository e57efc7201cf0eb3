"""One rank: a process that torch's elastic launcher starts, and that calls sides until its connection ends.

Started as `torchrun --standalone --nproc-per-node=2 -m perfsuite.ranks.process SOCKET STACKS DEVICE SECONDS`: where the
parent listens, the folder for stacks, "cpu" or "cuda", and how long a collective waits for the other ranks.
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
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from perfsuite import convolutions, declared, interpreter, process_state, rank_parts, truths
from perfsuite import inputs as make
from perfsuite.errors import first_line, users_frame
from perfsuite.execution import Leaves
from perfsuite.pair import Pair, as_side
from perfsuite.ranks.group import Raised, Request, backend
from perfsuite.records import OPTIMIZED, REFERENCE


def main() -> None:
    """Answer until there is no further request."""
    rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[3]
    with (Path(sys.argv[2]) / str(rank)).open("w") as stacks, Client(sys.argv[1]) as connection:
        # Where each rank is, if it does not answer.
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
        connection.send((rank, os.getpid()))
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(backend(device), timeout=timedelta(seconds=float(sys.argv[4])))
        interpreter.quicken()
        with suppress(EOFError):
            while True:
                _answer(connection, rank, ranks, device)
    os._exit(0)  # the other ranks may be gone, and what waits for them would never end


def _end_with(socket: int) -> None:
    """End this process when the other end of the socket is gone, also in the middle of a call."""
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


def _answer(connection: Connection, rank: int, ranks: int, device: str) -> None:
    """Take a request, prepare it, and call the side once all ranks are prepared."""
    try:
        call = _prepared(connection.recv(), rank, ranks, device)
        connection.send_bytes(_saved(None))
        connection.recv()
        connection.send_bytes(_saved(call()))
    except EOFError:
        raise
    except Exception as error:
        frame = users_frame(error)
        place = f"{Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
        connection.send_bytes(_saved(Raised(kind=type(error).__name__, text=first_line(error), place=place)))


def _prepared(request: Request, rank: int, ranks: int, device: str) -> Callable[[], Leaves]:
    """The call, with the pair's module imported and the inputs made."""
    sys.path[:] = request.sys_path
    process_state.take(request.settings)
    pair = _pair(request).at(ranks, equal_parts=request.equal_parts)
    sides = {OPTIMIZED: pair.optimized, REFERENCE: pair.reference, **pair.variants}
    case, home = request.case, Path(request.path).parent
    rounded = truths.rounded_to_precision(pair, case)

    def given(step: int) -> dict[str, Any]:
        return rank_parts.of_rank(pair.step_inputs, rounded(make.build_step(pair, case, device, step)), rank, ranks)

    values = rank_parts.of_rank(pair.inputs, rounded(make.build(pair, case, device, home=home)), rank, ranks)
    side = as_side(sides[request.side])
    return convolutions.exact(pair.precision)(lambda: truths.run(side, pair, values, case, False, given))


def _pair(request: Request) -> Pair:
    module = sys.modules.get(request.module)
    if module is None or module.__file__ != request.path:  # test modules of two folders may have one name
        module = _imported(request)
    pair = declared.find(module, request.pair)
    if pair is None:
        raise LookupError(f"{request.module} has no pair {request.pair} where it is imported again")
    pair.name = request.pair
    return pair


def _imported(request: Request) -> ModuleType:
    spec = importlib.util.spec_from_file_location(request.module, request.path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[request.module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[request.module]
        raise
    return module


def _saved(answer: Leaves | Raised | None) -> bytes:
    if isinstance(answer, dict):
        answer = {n: t.detach().cpu() if isinstance(t, torch.Tensor) else t for n, t in answer.items()}
    file = io.BytesIO()
    torch.save(answer, file)
    return file.getvalue()


if __name__ == "__main__":
    main()
