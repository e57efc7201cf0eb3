"""`perfsuite judge` rejects each way to cheat by name, and allows what a candidate may do."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from judging import PIPE, REFERENCE, candidate, documented, judged, proven
from scale import FULLY

from perfsuite.cli import main
from perfsuite.correctness.truths import Truth
from perfsuite.draws.tensor_values import BOUNDED_REGIMES
from perfsuite.errors import NotEquivalent, PerfsuiteError, printable
from perfsuite.gate.exit_codes import CODE_AT_FAULT, GREEN
from perfsuite.judge import causes, child, problem, process, timing
from perfsuite.judge import verdict as verdicts
from perfsuite.judge.causes import Causes
from perfsuite.judge.memory import HostMemory
from perfsuite.judge.process import Nursery
from perfsuite.judge.trial import truth_of
from perfsuite.judge.verdict import Status
from perfsuite.records import InputCase

WAITING = """
    import ctypes

    def spawn():
        libc, actions, number = ctypes.CDLL(None), (ctypes.c_byte * 256)(), ctypes.c_int()
        os.mkfifo("fifo")
        libc.posix_spawn_file_actions_init(actions)
        libc.posix_spawn_file_actions_addopen(actions, 9, b"fifo", 0, 0)
        argument, none = (ctypes.c_char_p * 2)(b"true", None), (ctypes.c_char_p * 1)(None)
        libc.posix_spawn(ctypes.byref(number), b"/bin/true", actions, None, argument, none)
"""
"""Code with a thread that waits for a child, which waits for a file to be opened."""
EXPLOITS: dict[str, tuple[str, str]] = {
    "a constant answer": (candidate("return torch.zeros_like(x)"), "all elements are the same"),
    "an answer kept by its address": (
        candidate("""
            key = x.data_ptr()
            self.kept.setdefault(key, self.right(x))
            return self.kept[key]
        """),
        "the answer that it gave to other inputs",
    ),
    "an answer kept by its shape": (
        candidate("return self.kept.setdefault(x.shape, self.right(x))"),
        "the answer that it gave to other inputs",
    ),
    "an answer kept by a few elements": (
        candidate("""
            key = tuple(x.flatten()[::97].tolist())
            return self.kept.setdefault(key, self.right(x))
        """),
        "the answer that it gave to other inputs",
    ),
    "an answer kept by its sum": (
        candidate("return self.kept.setdefault(x.double().sum().item(), self.right(x))"),
        "on the elements of the call before in another order.*the answer that it gave to other inputs",
    ),
    "an answer kept by its largest element": (
        candidate("return self.kept.setdefault(x.abs().max().item(), self.right(x))"),
        "the answer that it gave to other inputs",
    ),
    "right at every other call": (
        candidate("return self.right(x) if self.calls % 2 else torch.zeros_like(x)"),
        "when it is called again on the same inputs",
    ),
    "right while it is proven": (
        candidate("""
            if self.calls > 31:
                return self.kept["last"]
            self.kept["last"] = self.right(x)
            return self.kept["last"]
        """),
        "it returns a different answer while it is timed",
    ),
    "zeros taken for ones in timed calls": (
        candidate("return self.right(x if held('request')['again'] or x.any() else x + 1)", PIPE),
        "it returns a different answer while it is timed: output of the candidate side is wrong",
    ),
    "an element that is off in timed calls": (
        candidate(
            """
            y = self.right(x)
            if not held("request").get("again", True):
                y[0, y[0].abs().argmin()] += 3e-6
            return y
            """,
            PIPE,
        ),
        "it returns a different answer while it is timed: output",
    ),
    "nothing but NaN": (candidate("return torch.full_like(x, torch.nan)"), "NaN and infinities must be in"),
    "outputs by other keys": (
        candidate("return {'y': self.right(x)}"),
        r"it returns its outputs as \['y'\] where the reference returns a tensor",
    ),
    "an input used as a workspace": (
        candidate("""
            y = self.right(x)
            x.zero_()
            return y
        """),
        "it writes into its inputs",
    ),
    "half precision": (
        candidate(
            "return functional.silu(x.bfloat16() @ self.linear.weight.t().bfloat16() + self.linear.bias).float()"
        ),
        "its error is that of bfloat16",
    ),
    "memory in which an answer may still be": (
        candidate("return torch.empty_like(x).nan_to_num_()"),  # an address there may be a NaN
        "is wrong",
    ),
    "the reference, in other words": (
        candidate("""
            try:
                return torch.ops.no_such.kernel(x)
            except AttributeError:
                y = self.linear(x)
                return torch.stack([row * torch.sigmoid(row) for row in y])
        """),
        "the reference's own operations of torch's",
    ),
    "a decoy beside the library's calls": (
        candidate("""
            x = torch.clamp(x, -1e9, 1e9)
            y = self.linear(x)
            return torch.stack([row * torch.sigmoid(row) for row in y])
        """),
        "the reference's own operations of torch's",
    ),
    "forged replies": (
        candidate("""
            for number in range(3, 64):
                try:
                    os.write(number, b"{}\\n" * 4)
                except OSError:
                    pass
            return self.right(x)
        """),
        "is wrong|its output is not written|writes into|ends its process|raises",
    ),
    "replies of another form": (
        candidate("os.write(pipe(), b'{\"forms\": 5}\\n' * 2)\ntime.sleep(9)", PIPE),
        "it writes into the pipe of its replies",
    ),
    "replies without an end": (
        candidate("while True: os.write(pipe(), bytes(1000))", PIPE),
        "it writes into the pipe of its replies",
    ),
    "shared memory made shorter": (candidate("os.ftruncate(memory(), 0)", PIPE), "it raises PermissionError"),
    "a verdict in its own words": (
        candidate("raise ValueError(chr(27) + '[2K' + chr(13) + 'PASS  good.py')"),
        r"it raises ValueError: \\x1b\[2K",
    ),
    "a thread that keeps running": (
        candidate(
            """
            if not self.kept:
                self.kept["thread"] = threading.Thread(target=spawn, daemon=True)
                self.kept["thread"].start()
                time.sleep(0.3)
            return self.right(x)
            """,
            WAITING,
        ),
        "it keeps running when it is stopped",
    ),
    "a timer that lets it go on": (
        candidate("assert CDLL(None).timer_create(1, None, bytearray(8)) == 0", "from ctypes import CDLL"),
        "it raises",
    ),
    "work before its time begins": (
        candidate(
            """
            if "answer" in self.kept:
                return self.kept.pop("answer")
            time.sleep(0.005)
            return self.right(x)
            """,
            """
            import sys
            import torch
            child = sys.modules["__main__"]
            prepare = child.Served.prepare

            def ahead(self, request):
                run = prepare(self, request)
                if request["do"] == "call" and len(request["outputs"]) == 1:
                    x = self.value(request["inputs"][0][0])
                    self.model.kept["answer"] = self.model.right(x)
                return run

            child.Served.prepare = ahead
            """,
        ),
        "is wrong|returns a different answer|times as fast as the reference, and 1 is asked",
    ),
    "an output that is written later": (
        candidate(
            "return self.right(x)",
            """
            import threading, time
            import torch
            copy = torch.Tensor.copy_
            def later(into, value):
                threading.Timer(0.05, copy, (into, value.clone())).start()
            torch.Tensor.copy_ = later
            """,
        ),
        "its output is not written|after it has said",
    ),
    "busy threads beside the reference": (
        candidate(
            """
            if not self.kept:
                self.kept = {n: threading.Thread(target=busy, daemon=True) for n in range(8)}
                for thread in self.kept.values():
                    thread.start()
            time.sleep(0.002)
            return self.right(x)
            """,
            """
            def busy():
                while True:
                    sum(range(1000))
            """,
        ),
        "hangs|slows the reference|times as fast as the reference, and 1 is asked",
    ),
    "more memory than there is": (
        candidate("return self.right(x) + torch.ones(1 << 42).sum()"),
        "raises (RuntimeError|MemoryError)",
    ),
    "an answer looked for in memory": (
        candidate("""
            import gc
            same = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == x.shape and o is not x]
            return same[-1].clone() if same else torch.zeros_like(x)
        """),
        "is wrong|its output is not written",
    ),
    "an answer kept in a file": (
        candidate("""
            path = f"{list(x.shape)}.pt"
            if not os.path.exists(path):
                torch.save(self.right(x), path)
            return torch.load(path)
        """),
        "the answer that it gave to other inputs",
    ),
    "a tensor that does not let itself be copied": (
        candidate(
            "return self.right(x).as_subclass(Unwilling)",
            """
            import torch

            class Unwilling(torch.Tensor):
                @classmethod
                def __torch_function__(cls, function, types, args=(), kwargs=None):
                    if function is torch.Tensor.copy_:
                        return args[0]
                    return super().__torch_function__(function, types, args, kwargs or {})
            """,
        ),
        "its output is not written",
    ),
    "a form that is not its own": (
        candidate(
            "return self.right(x)[:1]",
            """
            import sys
            import torch
            torch.Tensor.shape = property(lambda self: torch.Size([16, 64]))
            """,
        ),
        "is wrong|its output is not written|raises|it returns",
    ),
    "a helper in a session of its own": (
        candidate("os.fork() or os.setsid()\nreturn self.right(x)"),
        "is wrong|times as fast as the reference, and 1 is asked|raises|ends|hangs|writes|answers",
    ),
    "a last row that is left out": (
        candidate("""
            y = self.right(x)
            y[-1] = 0
            return y
        """),
        r"is wrong at \[15, ",
    ),
    "a bias that is hard to see": (
        candidate("return self.right(x) + 4e-6"),
        r"it is the truth plus (3\.9\d|4|4\.0\d)e-06 in each element",
    ),
    "an answer that drifts": (
        candidate("return self.right(x) * (1 + 1e-6 * self.calls)"),
        "is wrong|is inaccurate",
    ),
    "parameters that are left out": (
        candidate("return functional.silu(functional.linear(x, self.linear.weight))"),
        "is wrong",
    ),
    "what holds for the template alone": (
        candidate("return self.right(x) if bool((x >= 0).all()) and bool((x > 0.01).any()) else x"),
        "is wrong",
    ),
    "a patched clock": (
        candidate(
            """
            time.sleep(0.01)
            return self.right(x)
            """,
            """
            import time
            time.perf_counter = time.perf_counter_ns = time.monotonic = lambda: 0
            """,
        ),
        "times as fast as the reference, and 1 is asked",
    ),
    "a look into the judge's memory": (
        candidate("return open(f'/proc/{os.getppid()}/mem', 'rb') and self.right(x)"),
        "raises PermissionError",
    ),
    "a signal that stops the judge": (
        candidate("return os.kill(os.getppid(), 19) or self.right(x)"),
        "raises PermissionError",
    ),
    "a connection": (
        candidate("__import__('socket').create_connection(('127.0.0.1', 9), 1)\nreturn self.right(x)"),
        "raises PermissionError",
    ),
    "a message to another process": (
        candidate("socket(AF_UNIX, SOCK_DGRAM).sendto(b'x', '/tmp/no_such')", "from socket import *"),
        "raises PermissionError",
    ),
    "memory that outlives its process": (
        candidate("if CDLL(None).shmget(0, 64, 0o600) < 0: raise PermissionError", "from ctypes import CDLL"),
        "raises PermissionError",
    ),
    "a file outside of its folder": (
        candidate("open('/var/tmp/left', 'w')\nreturn self.right(x)"),
        "raises PermissionError",
    ),
    "the reference's file": (
        candidate("open(REFERENCE_FILE)\nreturn self.right(x)"),
        "raises PermissionError",
    ),
    "less priority for the judge": (
        candidate("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)\nreturn self.right(x)"),
        "raises PermissionError",
    ),
    "an exit that looks well": (candidate("os._exit(0)"), "ends its process with exit code 0"),
    "sys.exit": (candidate("raise SystemExit(0)"), "raises SystemExit"),
    "a crash": (candidate("__import__('ctypes').string_at(0)"), "ends its process with signal 11"),
    "a hang": (candidate("while True: time.sleep(1)"), "hangs: it was stopped after 3 s"),
    "another shape": (
        candidate("return self.right(x)[:, :-1]"),
        r"it returns float32\[16, 63\] where the reference returns float32\[16, 64\]",
    ),
    "another dtype": (candidate("return self.right(x).double()"), "it returns float64"),
    "a file that does not compile": ("def (", "raises SyntaxError"),
    "no such class": ("class Other: pass", "raises AttributeError: .*ModelNew"),
}
COPIES = ("the reference, in other words", "a decoy beside the library's calls")
"""Exploits that are right: while their speedup may still be large enough, they are NOISY."""
QUICK = (
    "an element that is off in timed calls",
    "nothing but NaN",
    "outputs by other keys",
    "an answer kept by a few elements",
    "an answer kept by its sum",
    "right at every other call",
    "right while it is proven",
    "an input used as a workspace",
    "half precision",
    "a decoy beside the library's calls",
    "forged replies",
    "replies of another form",
    "replies without an end",
    "shared memory made shorter",
    "a verdict in its own words",
    "work before its time begins",
    "a look into the judge's memory",
    "a signal that stops the judge",
    "the reference's file",
    "an exit that looks well",
    "another shape",
)
"""Exploits that a normal run tries."""


def test_the_document_has_a_row_for_each() -> None:
    assert set(EXPLOITS) <= documented()
    assert len(EXPLOITS) >= 40


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(textwrap.dedent(REFERENCE))
    return path


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else FULLY) for n in EXPLOITS])
def test_an_exploit_is_rejected_by_name(nursery: Nursery, reference: Path, name: str) -> None:
    text, says = EXPLOITS[name]
    found = judged(nursery, reference, text)
    undecided = [Status.NOISY] if name in COPIES else []
    assert found.status in (Status.NOT_EQUIVALENT, Status.TOO_SLOW, *undecided), found
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.message)


def test_an_honest_candidate_is_proven_and_timed(nursery: Nursery, reference: Path) -> None:
    found = judged(nursery, reference, candidate("return self.right(x)"), least=0.01)
    assert found.status is Status.PASS, found
    assert found.draws == 8
    assert 0 < found.worst <= 1
    assert found.speedup is not None
    assert 0 < found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.same_parameters
    assert set(found.seconds) == {"reference", "candidate"}


def test_outputs_by_keys_may_come_in_any_order(nursery: Nursery, tmp_path: Path) -> None:
    reference = tmp_path / "reference.py"
    model = """
        import torch

        class {name}(torch.nn.Module):
            def forward(self, x):
                return {returned}

        def get_inputs():
            return [torch.rand(8, 8)]
    """
    reference.write_text(textwrap.dedent(model.format(name="Model", returned="{'a': x.exp(), 'b': x.sin()}")))
    for returned, says in (
        ("{'b': x.sin(), 'a': x.exp()}", "own operations"),  # right, but no kernel
        ("{'b': x.exp(), 'a': x.sin()}", "is wrong"),
    ):
        text = textwrap.dedent(model.format(name="ModelNew", returned=returned))
        found = judged(nursery, reference, text)
        assert found.status is not Status.PASS
        assert says in found.message


class Beside:
    """Judge on whose clock the reference takes these seconds beside each candidate that is started, and 1 s alone."""

    candidate = "candidate"

    def __init__(self, *beside: float) -> None:
        self.beside, self.now, self.started = list(beside), 1.0, 0
        self.called_sides: set[str] = set()

    def drawn(self) -> None:
        return None

    def copying(self, reference: object) -> float:
        return 0.0

    def called(self, name: str, side: object, drawn: object) -> float:
        self.called_sides.add(name)
        return self.now

    def prove_untimed(self, side: object) -> None:
        return None

    def again(self) -> Beside:
        self.now, self.started = self.beside.pop(0), self.started + 1
        return self

    def close(self) -> None:
        self.now = 1.0


@pytest.mark.parametrize(
    ("first", "later", "started"),
    [
        ([2.0] * 8, [2.0, 2.0], 2),
        ([1.05] * 8, [], 0),
        ([2.0] * 7 + [0.9], [], 0),
        ([2.0] * 8, [1.0], 1),  # other programs have ended meanwhile
        ([2.0] * 8, [2.0, 1.0], 2),
    ],
)
def test_a_reference_that_is_always_slower_beside_the_candidate_is_said_by_name(
    first: list[float], later: list[float], started: int
) -> None:
    world = Beside(*later)
    slowed = later == [2.0, 2.0]
    with pytest.raises(NotEquivalent, match="it slows the reference") if slowed else contextlib.nullcontext():
        timing._same_alone(None, world, first, 1, world.again, None)  # type: ignore[arg-type]
    assert world.started == started
    assert timing.STAND_IN in world.called_sides


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ('if __name__ == "candidate":\n    raise ValueError("not here")', "raises ValueError: not here"),
        ('if __name__ == "candidate":\n    os._exit(3)', "ends its process with exit code 3"),
        ('if __name__ == "candidate":\n    torch.sigmoid = torch.tanh', "returns a different answer while it is timed"),
    ],
)
def test_a_reference_that_fails_in_its_own_process_accuses_nobody(
    nursery: Nursery, reference: Path, before: str, says: str
) -> None:
    reference.write_text(f"import os\nimport torch\n{before}\n{reference.read_text()}")
    found = judged(nursery, reference, candidate("return self.right(x)"))
    assert found.status is Status.NOISY
    assert found.message.startswith("not timed: the reference, in a process of its own, ")
    assert says in found.message
    assert found.draws == 8


@FULLY
def test_a_reference_that_torch_compiles_to_another_function_accuses_nobody(nursery: Nursery, reference: Path) -> None:
    differs = "y = self.linear(x) + torch.compiler.is_compiling()"
    reference.write_text(reference.read_text().replace("y = self.linear(x)", differs))
    found = judged(nursery, reference, candidate("return self.right(x)"), compiled=True, limit_s=20.0)
    assert found.status is Status.NOISY
    assert found.message == (
        "not timed: torch.compile of the reference returns a different answer while it is timed: output 0 of a timed "
        "call is not the reference's; --no-compile times without it"
    )


OVERFLOWING = """
    import torch


    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.exp(40 * x)


    def get_inputs():
        return [torch.randn(256, 64)]


    def get_init_inputs():
        return []
"""


def test_a_reference_that_overflows_on_its_own_inputs_accuses_nobody(nursery: Nursery, reference: Path) -> None:
    reference.write_text(textwrap.dedent(OVERFLOWING))
    own = (
        "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return (x * 40).exp()\n"
    )
    found = judged(nursery, reference, own)
    assert found.status is Status.NOISY
    assert found.message == (
        "not timed: the reference, in a process of its own, is not finite in float32 on the inputs of get_inputs()"
    )


CONTINUING = """
if not self.kept:
    self.kept["helpers"] = 2
    for _ in range(2):
        if os.fork() == 0:
            while True:
                os.killpg(0, signal.SIGCONT)
return self.right(x)
"""


@pytest.mark.parametrize(
    "body", ["os.fork() or time.sleep(60)\nreturn self.right(x)", CONTINUING], ids=["sleeping", "continuing"]
)
@FULLY
def test_no_process_that_a_candidate_forks_is_left_or_holds_the_judge_up(
    reference: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any, body: str
) -> None:
    own = tmp_path_factory.mktemp("folders")  # others judge beside this one
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    nursery = Nursery()
    found = judged(nursery, reference, candidate(body, "import signal"))
    nursery.close()
    assert found.status is not Status.PASS or body == CONTINUING
    assert not list(own.iterdir())
    until = time.monotonic() + 10  # what was killed takes a moment to be gone
    while left := [p for p in Path("/proc").glob("[0-9]*/cwd") if str(own) in _target(p)]:
        assert time.monotonic() < until, left


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # another user's process, or one that has ended
        return ""


@FULLY
def test_parameters_of_other_names_are_those_of_the_seed(nursery: Nursery, reference: Path) -> None:
    other = candidate("return self.right(x)").replace("self.linear", "self.project")
    found = judged(nursery, reference, other, least=0.01)
    assert found.status is Status.PASS, found
    assert not found.same_parameters


OF_ONE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {}
def get_inputs():
    return [torch.rand(3, 4)]
{}
"""


WITH = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))
        {}
    def forward(self, x):
        return {}
def get_inputs():
    return [torch.rand(3, 4)]
"""


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["judge", *map(str, arguments)])


@FULLY
def test_the_command_says_it_for_people_and_for_machines(reference: Path) -> None:
    good, bad = reference.with_name("good.py"), reference.with_name("bad.py")
    good.write_text(candidate("return self.right(x)"))
    bad.write_text(candidate("return self.right(x) * 1.001"))
    common = ("--device", "cpu", "--seconds", 0.5, "--no-compile", "--speedup", 0.01)
    done = command(reference, good, bad, *common)
    assert done.exit_code == CODE_AT_FAULT
    first, second = done.output.splitlines()
    assert first.startswith("PASS")
    assert "× the reference" in first
    assert second.startswith("NOT_EQUIVALENT")
    assert "is wrong" in second
    done = command(reference, good, *common, "--json")
    assert done.exit_code == GREEN
    (one,) = json.loads(done.stdout)
    assert one["status"] == "PASS"
    assert one["speedup"]["low"] > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "no Model; a reference has Model, get_inputs() and get_init_inputs()"),
        ("import no_such_module_at_all", "the import raises ModuleNotFoundError"),
        ("class Model:\n    pass\ndef get_inputs(): return []", "Model is no torch.nn.Module"),
        ("raise SystemExit(0)", "the import raises SystemExit: 0"),
        (
            OF_ONE.format("x", "def get_init_inputs(): raise ValueError('no')"),
            "get_init_inputs() raises ValueError: no",
        ),
        (OF_ONE.format("x", "def get_inputs(): return []"), "get_inputs() returns no list of inputs"),
        (OF_ONE.format("x", "def get_inputs(): return torch.rand(3)"), "get_inputs() returns no list of inputs"),
        (OF_ONE.format("x[99]", ""), "a call on inputs that are drawn like those of get_inputs() raises IndexError"),
        (OF_ONE.format("x * 0", ""), "the reference gives the same answer whatever its inputs are"),
        (OF_ONE.format("x > -1", ""), "the reference gives the same answer whatever its inputs are"),
        (OF_ONE.format("torch.nn.functional.dropout(x)", ""), "otherwise when it is called again"),
        (OF_ONE.format("x.exp_()", ""), "the reference changes its inputs in place"),
        (OF_ONE.format("(x, None)", ""), "the reference returns what is no tensor"),
        (
            WITH.format("self.product = self.weight * 2", "x * self.product"),
            "copy.deepcopy of Model raises RuntimeError: Only Tensors created explicitly by the user",
        ),
        (
            WITH.format("self.register_buffer('row', torch.rand(1).expand(4))", "x * self.row"),
            "row of Model is an expanded tensor, into which no value can be loaded; register a copy",
        ),
        (OF_ONE.format("x.to_sparse()", ""), "returns a sparse, nested or quantized tensor, and only dense ones"),
        (
            "import warnings\nwarnings.simplefilter('ignore')\n"  # it is deprecated
            + WITH.format("self.norm = torch.nn.utils.weight_norm(torch.nn.Linear(4, 4))", "self.norm(x)"),
            "; use torch.nn.utils.parametrizations.weight_norm, whose modules can be copied",
        ),
        (
            WITH.format("self.linear = torch.nn.Linear(4, 4, device='meta')", "self.linear(x)"),
            "linear.weight of Model is on the meta device and has no values; create it on the CPU",
        ),
        (
            OF_ONE.format("x", "def get_inputs(): return [torch.rand(4, device='meta')]"),
            "get_inputs() returns a tensor on the meta device, which has no values from which a range could be taken",
        ),
        (
            OF_ONE.format("x.exp()", "def excuse(): return None"),
            "excuse= cannot be called with the inputs (x0) by position",
        ),
        (
            OF_ONE.format("x.to_dense()", "def get_inputs(): return [torch.eye(4).to_sparse()]"),
            "get_inputs() returns a sparse or nested tensor, and only dense inputs are drawn",
        ),
        (
            WITH.format("self.lazy = torch.nn.LazyLinear(4)", "self.lazy(x)"),
            "lazy.weight of Model has no shape before the first call; give its layer the sizes",
        ),
        (
            OF_ONE.format("x.exp()", "def get_init_inputs(): return [lambda: 0]"),
            "get_init_inputs() returns what no candidate can get: ",
        ),
        (
            OF_ONE.format("x.exp()", "class Config: pass\ndef get_init_inputs(): return [{'config': Config()}]"),
            "get_init_inputs() returns what no candidate can get: ",
        ),
        (
            OF_ONE.format("x.exp()", "class Config: pass\ndef get_inputs(): return [torch.rand(4), Config()]"),
            "get_inputs() returns what no candidate can get: ",
        ),
        (
            OF_ONE.format("x.real", "def get_inputs(): return [torch.randn(4, dtype=torch.complex64)]"),
            "get_inputs() returns a tensor of complex64, and only real inputs are drawn",
        ),
    ],
)
def test_a_bad_reference_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "reference.py"
    path.write_text(text)
    done = command(path, path)
    assert done.exit_code == 4
    assert done.output.count("\n") == 1
    assert says in done.output


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--limit=0", "'--limit': 0.0 is not in the range 0<x<=86400.0"),
        ("--limit=1e10", "'--limit': 10000000000.0 is not in the range 0<x<=86400.0"),
        ("--seconds=nan", "'--seconds': nan is no finite number"),
        ("--speedup=-1", "'--speedup': -1.0 is not in the range x>0"),
        pytest.param(
            "--device=cuda",
            "there is no CUDA device here; leave it out, or give --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a CUDA device"),
        ),
    ],
)
def test_an_option_that_cannot_be_is_named(reference: Path, option: str, says: str) -> None:
    done = command(reference, reference, option)
    assert done.exit_code in (2, 4)
    assert says in done.output.splitlines()[-1]


@FULLY
def test_a_file_in_the_folder_for_temporary_files_is_not_imported(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timeit.py").write_text("raise SystemExit(1)\n")  # torch imports the library's
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nursery = Nursery()
    found = judged(nursery, reference, candidate("return self.right(x)"), least=0.01)
    nursery.close()
    assert found.status is Status.PASS, found


@FULLY
def test_what_a_compiler_asks_of_the_system_is_granted(nursery: Nursery, reference: Path) -> None:
    """A process group of its own, and the mode and times of files, are granted, but not carried out."""
    asks = """
        os.setpgid(0, 0)
        open("made", "w").close()
        os.chmod("made", 0o700)
        os.utime("made", (1, 1))
        assert os.stat("made").st_mtime > 1
        __import__("socket").socketpair()
        return self.right(x)
    """
    found = judged(nursery, reference, candidate(asks), least=0.01)
    assert found.status is Status.PASS, found


@pytest.mark.parametrize("left_out", ["self.norm.weight", "self.norm.bias", "self.norm.running_mean"])
def test_parameters_that_begin_as_one_or_zero_are_varied(nursery: Nursery, reference: Path, left_out: str) -> None:
    norm = "self.norm = torch.nn.BatchNorm1d(width).eval()"
    text = (
        reference.read_text()
        .replace("def forward", f"    {norm}\n\n    def forward")
        .replace("y = self.linear(x)", "y = self.norm(self.linear(x))")
    )
    reference.write_text(text.replace("            \n", ""))
    own = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0}[left_out.rpartition(".")[2]]
    body = f"""
        with torch.no_grad():
            {left_out}.fill_({own})
        return functional.silu(self.norm(self.linear(x)))
    """
    made = candidate(body).replace("self.calls = 0", f"{norm}\n        self.calls = 0")
    found = judged(nursery, reference, made)
    assert found.status is Status.NOT_EQUIVALENT
    assert "is wrong at" in found.message


def test_weights_that_are_packed_in_init_are_named(nursery: Nursery, reference: Path) -> None:
    text = candidate("return functional.silu(x @ self.packed + self.linear.bias)")
    packed = text.replace("self.calls = 0", "self.calls, self.packed = 0, self.linear.weight.t().clone().detach()")
    found = judged(nursery, reference, packed)
    assert found.status is Status.NOT_EQUIVALENT
    assert "the parameters are set after __init__: if packed is computed from them there, let it be" in found.message
    found = judged(nursery, reference, candidate("return functional.silu(self.linear(x)) * 1.001"))
    assert "after __init__" not in found.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a CUDA device")
@pytest.mark.parametrize(("body", "is_named"), [("return self.right(x.cuda())", True), ("return self.other(x)", False)])
def test_a_candidate_that_needs_a_gpu_is_named(nursery: Nursery, reference: Path, body: str, is_named: bool) -> None:
    found = judged(nursery, reference, candidate(body))
    assert found.status is Status.NOT_EQUIVALENT
    assert ("it names CUDA or Triton, and was run on the CPU" in found.message) == is_named


def test_a_folder_of_candidates_is_one_line_with_the_remedy(tmp_path: Path, reference: Path) -> None:
    for given in ((reference, tmp_path), (tmp_path, reference)):
        done = command(*given)
        assert done.exit_code == 4
        assert done.output == f"perfsuite judge: {tmp_path}: a folder; give the files in it, as with {tmp_path}/*.py\n"


def test_a_disk_without_space_is_one_line_and_leaves_no_folder(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "own"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # each write of a file then fails
        try:
            with pytest.raises(PerfsuiteError, match=r"cannot be written in .*; make space there, or set TMPDIR"):
                process.Process(nursery, Path(__file__), "ModelNew", "cpu", cpu_s=9)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*(tmp_path / "own").iterdir()]


def test_an_answer_without_numbers_is_not_said_to_be_an_earlier_one(reference: Path) -> None:
    reference.write_text(OF_ONE.format("(x * x).mean()", ""))
    loaded, x = problem.load(reference, "cpu", 0), torch.rand(3, 4)
    found = Causes(loaded.pair)
    for number in (float("nan"), 0.0, 0.7):
        for values in (x, x + 1):
            truth = truth_of(loaded, loaded.case(0), {"x0": values})
            assert isinstance(truth, Truth)
            clause = found.of(truth, [torch.tensor(number)])
            found.note(truth, [torch.tensor(number)])
        assert ("the answer that it gave to other inputs" in clause) == (number == 0.7)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, reference: Path) -> None:
    for arguments in ((tmp_path / "gone.py", reference), (reference, tmp_path / "gone.py")):
        done = command(*arguments)
        assert (done.exit_code, done.output) == (4, f"perfsuite judge: {tmp_path / 'gone.py'}: no such file\n")


def test_the_interval_of_a_ratio_holds_its_median() -> None:
    found = timing._ratio([2.0, 2.1, 1.9, 2.2, 2.0, 1.8, 2.0, 2.0], [1.0] * 8)
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(2.0)
    assert (found.low, found.high) == (pytest.approx(1.8), pytest.approx(2.2))


def test_what_two_processes_differ_by_is_no_speedup() -> None:
    found = timing._widened(timing.Ratio(2.0, 1.9, 2.1), 60e-6, 30e-6, 30e-6)
    assert found.value == 2.0
    assert found.low < 1 < 2.1 < found.high
    longer = timing._widened(timing.Ratio(2.0, 1.99, 2.01), 6e-3, 3e-3, 30e-6)
    assert (longer.low, longer.high) == (pytest.approx(1.96, abs=0.01), pytest.approx(2.04, abs=0.01))


def test_a_call_that_is_short_beside_its_messages_is_not_decided() -> None:
    ratio = timing._widened(timing.Ratio(2.0, 1.9, 2.1), 60e-6, 30e-6, 30e-6)
    for messages, remedy in ((120e-6, "give larger inputs in get_inputs()"), (1e-6, "measure longer, with --seconds")):
        times = timing.Times(8, 1, {"candidate": 30e-6, "reference": 60e-6}, {"reference": ratio}, messages)
        found = verdicts.Verdict(candidate="a.py")
        verdicts._decide(times, found, verdicts.Options(device="cpu"))
        assert found.status is Status.NOISY
        assert remedy in found.message


def test_a_timed_answer_may_differ_by_rounding_alone() -> None:
    right = torch.tensor([1.0, float("inf"), float("nan")])
    assert timing._near(right * (1 + 1e-7), right, 1e-6)
    assert not timing._near(right * (1 + 1e-5), right, 1e-6)
    assert not timing._near(torch.tensor([1.0, float("inf"), 0.0]), right, 1e-6)
    assert not timing._near(torch.tensor([1]), torch.tensor([2]), 1.0)
    few, others = (torch.tensor(values).to(torch.float8_e4m3fn) for values in ([1.0, 2.0], [2.0, 1.0]))
    assert timing._near(few, few, 1e-6)
    assert not timing._near(others, few, 1e-6)


def test_each_kind_of_values_is_drawn(reference: Path) -> None:
    found = problem.load(reference, "cpu", 0).cases(8, seed=1)
    assert len(found) == 8
    assert {case.inputs["x0"].regime for case in found} == set(BOUNDED_REGIMES)
    assert len({case.seed for case in found}) == 8


def test_what_a_reference_computes_with(reference: Path) -> None:
    found = problem.load(reference, "cpu", 0)
    assert {name for name, _ in found.own_work()} == {"addmm", "sigmoid", "mul"}


@pytest.mark.parametrize(
    ("low", "high", "least", "status", "says"),
    [
        (1.2, 1.4, 1.0, Status.PASS, "the reference's own operations of torch's (addmm), not with a kernel"),
        (0.99, 1.01, 1.0, Status.NOT_EQUIVALENT, "not with a kernel, and is no faster"),
        (
            1.01,
            1.2,
            1.0,
            Status.NOISY,
            "not with a kernel; between 1.01 and 1.2 times as fast as the reference, and 1.05",
        ),
        (0.8, 1.2, 1.0, Status.NOISY, "and 1.05 is asked: measure longer, with --seconds"),
        (1.2, 1.4, 1.3, Status.NOISY, "and 1.3 is asked"),
        (1.2, 1.4, 2.0, Status.TOO_SLOW, "and 2 is asked"),
    ],
)
def test_a_candidate_with_the_reference_s_operations_passes_if_it_is_surely_faster(
    low: float, high: float, least: float, status: Status, says: str
) -> None:
    found = verdicts.Verdict(candidate="a.py", borrowed="addmm")
    ratio = timing.Ratio((low + high) / 2, low, high)
    times = timing.Times(rounds=8, calls=1, seconds={"candidate": 1.0}, ratios={"reference": ratio})
    verdicts._decide(times, found, verdicts.Options(device="cpu", least=least))
    assert found.status is status
    assert says in found.message


@FULLY
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_neither_a_process_nor_a_folder(reference: Path, tmp_path: Path, number: int) -> None:
    own, scratch = tmp_path / "own.py", tmp_path / "scratch"
    scratch.mkdir()
    own.write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "perfsuite", "judge", "--no-compile", str(reference), str(own)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, cwd=tmp_path) as judge:
        until = time.monotonic() + 60
        while not list(scratch.glob("perfsuite-judge-*/candidate.py")) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1.0)
        judge.send_signal(number)
        assert judge.wait(10) == 128 + number
    assert not list(scratch.glob("perfsuite-judge-*"))


def test_the_name_of_a_candidate_stays_in_one_line() -> None:
    assert printable(Path("z.py  wrong\nPASS  good.py")) == "z.py  wrong\\nPASS  good.py"
    assert printable("größe.py") == "größe.py"


def test_complex_outputs_of_timed_calls_are_compared_as_numbers() -> None:
    spectrum = torch.fft.fft(torch.arange(16.0))
    assert timing._near(spectrum * (1 + 1e-6), spectrum, 1e-5)
    assert not timing._near(spectrum * (1 + 1e-4), spectrum, 1e-5)
    assert not timing._near(spectrum.real, spectrum, 1e-5)


def test_a_process_that_fills_its_own_pipe_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SEND_LIMIT_S", 0.1)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    full = object.__new__(process.Process)
    full._requests = writes
    monkeypatch.setattr(process.Process, "_end", lambda self: "ended")
    with pytest.raises(process.Ended, match="fills the pipe"):
        full._send(b"{}")
    os.close(reads)
    os.close(writes)


def test_a_reference_is_found_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("own", "other", "parts")]
    for folder in folders:
        folder.mkdir()
    (folders[2] / "parts_of_it.py").write_text("import torch\nclass Base(torch.nn.Module): pass\n")
    monkeypatch.syspath_prepend(str(folders[2]))
    monkeypatch.chdir(folders[0])
    text = OF_ONE.format("x.exp()", f"import os\nos.chdir({str(folders[1])!r})").replace("torch.nn.Module", "Base")
    Path("reference.py").write_text(f"from parts_of_it import Base\n{text}")
    found = problem.load(Path("reference.py"), "cpu", 0)
    assert found.file == folders[0] / "reference.py"
    assert found.imported == (str(folders[2] / "parts_of_it.py"),)
    assert found.varied().file == found.file


@FULLY
def test_a_reference_of_a_relative_path_in_an_importable_folder_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, parts = tmp_path / "own", tmp_path / "parts"
    own.mkdir()
    parts.mkdir()
    (parts / "parts_beside_it.py").write_text("import torch\nclass Base(torch.nn.Module): pass\n")
    (own / "helper_beside_it.py").write_text("def twice(x): return x + x\n")
    text = OF_ONE.format("torch.stack([twice(row) for row in x])", "").replace("torch.nn.Module", "Base")
    imports = "from parts_beside_it import Base\nfrom helper_beside_it import twice\n"
    (own / "reference.py").write_text(imports + text.replace("rand(3, 4)", "rand(64, 4)"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (own, parts))))
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.syspath_prepend(str(parts))
    monkeypatch.chdir(own)
    model = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x + x\n"
    with contextlib.closing(Nursery()) as nursery:
        found = judged(nursery, Path("reference.py"), f"{model}open({str(own / 'reference.py')!r})")
        assert "it raises PermissionError" in found.message
        found = judged(nursery, Path("reference.py"), model, least=0.01)
    assert found.seconds  # the reference's own process imports its helper
    assert [words for words in found.not_confined if words.startswith("reading")] == [
        f"reading {parts / 'parts_beside_it.py'}"
    ]


def test_a_wrong_number_is_not_said_to_be_constant(nursery: Nursery, reference: Path) -> None:
    reference.write_text(OF_ONE.format("(x * x).mean()", ""))
    own = (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return (x * x).sum() / 11\n"
    )
    with pytest.raises(NotEquivalent, match="is wrong") as raised:
        proven(nursery, reference, own)
    assert "does not read its inputs" not in str(raised.value)


def test_an_answer_is_not_said_to_be_constant_where_the_truth_is_or_the_inputs_are(reference: Path) -> None:
    reference.write_text(OF_ONE.format("x.argmax(1)", ""))
    loaded = problem.load(reference, "cpu", 0)
    case = replace(loaded.cases(1, 0)[0], inputs={"x0": InputCase(layout="contiguous", regime="zeros")})
    truth = truth_of(loaded, case, {"x0": torch.zeros(3, 4)})
    assert isinstance(truth, Truth)
    assert "does not read its inputs" not in Causes(loaded.pair).of(truth, [torch.full((3,), 3)])
    truth = truth_of(loaded, case, {"x0": torch.eye(3, 4)})
    assert isinstance(truth, Truth)
    assert "does not read its inputs" in Causes(loaded.pair).of(truth, [torch.full((3,), 3)])
    assert "does not read its inputs" in Causes(loaded.pair).of(truth, [torch.full((3,), 3)], [torch.eye(3, 4)])
    assert "does not read its inputs" not in Causes(loaded.pair).of(truth, [torch.full((3,), 3)], [torch.zeros(3, 4)])


def test_an_answer_that_may_underflow_is_not_said_to_be_constant(reference: Path) -> None:
    reference.write_text(OF_ONE.format("x * x", ""))
    loaded = problem.load(reference, "cpu", 0)
    for size, is_small in ((1e-4, True), (1.0, False)):
        x = size * (1 + torch.rand(3, 4))
        truth = truth_of(loaded, loaded.case(0), {"x0": x})
        assert isinstance(truth, Truth)
        found = Causes(loaded.pair).of(truth, [torch.zeros(3, 4)], [x])
        assert ("does not read its inputs" in found) == (not is_small)
        assert "all elements are the same" in found


def test_an_error_that_is_no_rounding_is_only_said_to_be_as_large(reference: Path) -> None:
    reference.write_text(OF_ONE.format("x.sum(1)", "def get_inputs(): return [torch.rand(64, 300)]"))
    loaded = problem.load(reference, "cpu", 0)
    x = torch.rand(64, 300)
    truth = truth_of(loaded, loaded.case(0), {"x0": x})
    assert isinstance(truth, Truth)
    found = Causes(loaded.pair)
    assert "its error is that of bfloat16" in found.of(truth, [x.sum(1).bfloat16().float()])
    assert "its error is as large as that of bfloat16" in found.of(truth, [x[:, 1:].sum(1)])


def test_answers_have_digests_whatever_views_they_are() -> None:
    spectrum = torch.fft.fft(torch.arange(16.0))
    assert causes._digest([spectrum.conj()]) == causes._digest([spectrum.conj().resolve_conj()])
    negative = spectrum.conj().imag
    assert negative.is_neg()
    assert causes._digest([negative]) == causes._digest([negative.resolve_neg()])


def test_arguments_arrive_with_their_types_and_keys() -> None:
    memory = HostMemory()
    given = {0: torch.rand(2), (1, "a"): [torch.rand(3), (4, None)], "size": torch.Size([2, 3])}
    described = json.loads(json.dumps(memory.value(given, lambda t: memory.place(t)[0])))
    found = child.Served(child.Memory(memory.file), "cpu").value(described)
    assert list(found) == list(given)
    assert torch.equal(found[0], given[0])  # type: ignore[arg-type]
    assert found[1, "a"][1] == (4, None)
    assert type(found["size"]) is torch.Size
    memory.close()


@pytest.mark.parametrize(
    "drawn",
    [
        "torch.from_numpy(numpy.random.rand(4).astype('float32'))",
        "torch.tensor([random.random() for _ in range(4)])",
        "torch.rand(4)",
    ],
)
def test_both_modules_draw_the_same_weights_whatever_generator_they_use(
    nursery: Nursery, reference: Path, drawn: str
) -> None:
    text = "import numpy, random\n" + WITH.format(f"self.own = {drawn}", "x * self.own")
    reference.write_text(text)
    assert proven(nursery, reference, text.replace("Model(", "ModelNew(")).draws == 8


def test_extra_state_that_is_no_tensor_stays_each_module_s_own(nursery: Nursery, reference: Path) -> None:
    text = WITH.format("self.extra = {'scale': 2}", "x * self.weight * self.extra['scale']") + textwrap.indent(
        "def get_extra_state(self): return self.extra\ndef set_extra_state(self, state): self.extra = state\n", "    "
    )
    head, _, methods = text.partition("def get_inputs():\n    return [torch.rand(3, 4)]\n")
    text = f"{head}{methods}def get_inputs():\n    return [torch.rand(3, 4)]\n"
    reference.write_text(text)
    assert set(problem.load(reference, "cpu", 0).state) == {"weight"}
    assert proven(nursery, reference, text.replace("Model(", "ModelNew(")).draws == 8


def test_a_reference_that_raises_in_float64_alone_is_named_with_its_error(nursery: Nursery, reference: Path) -> None:
    reference.write_text(OF_ONE.format("x @ torch.ones(4, 4)", ""))
    own = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    says = "on the first, the reference raises in float64, in which the truth is computed: RuntimeError: .*double"
    with pytest.raises(PerfsuiteError, match=says):
        proven(nursery, reference, own)


def test_a_timed_draw_on_which_the_reference_raises_is_replaced(reference: Path) -> None:
    fails = "if x[0, 0] > self.most:\n            raise AssertionError('too large')\n        return x.exp()"
    reference.write_text(WITH.format("self.most = 2.0", "x").replace("return x", fails))
    loaded = problem.load(reference, "cpu", 0)
    judge = timing._Judge(loaded, "candidate")
    loaded.module.most = 0.85  # type: ignore[assignment]
    for _ in range(60):
        assert float(judge.drawn().arguments[0][0, 0]) <= 0.85
    loaded.module.most = -1.0  # type: ignore[assignment]
    with pytest.raises(timing.Unusable, match="raises AssertionError: too large"):
        judge.drawn()


def test_the_help_names_the_fewest_rounds() -> None:
    assert f"at least {timing.FEWEST_ROUNDS} rounds" in " ".join(command("--help").output.split())


def test_the_command_leaves_the_handlers_of_signals(tmp_path: Path) -> None:
    own = {number: lambda *_: None for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    command(tmp_path / "gone.py", tmp_path / "gone.py")
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == own


def test_an_interruption_ends_the_candidates_that_wait_to_be_timed(
    nursery: Nursery, reference: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path_factory.mktemp("folders")
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    bad, good = reference.with_name("bad.py"), reference.with_name("good.py")
    bad.write_text("def (")
    good.write_text(candidate("return self.right(x)"))

    def interrupted(verdict: verdicts.Verdict) -> None:
        assert list(folders.iterdir())
        raise KeyboardInterrupt

    options = verdicts.Options(device="cpu", compiled=False)
    with pytest.raises(KeyboardInterrupt):
        verdicts.judge(reference, [bad, good], options, interrupted, nursery)
    assert not list(folders.iterdir())


def test_a_folder_is_removed_however_deeply_its_subfolders_are_nested(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "beside").mkdir(parents=True)
    (folder / "beside" / "file").touch()
    (folder / "link").symlink_to(tmp_path)
    (folder / "closed").mkdir(mode=0)
    at = os.open(folder, os.O_RDONLY)
    for _ in range(2 * sys.getrecursionlimit()):
        os.mkdir("deeper", dir_fd=at)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    process.remove(folder)
    assert not folder.exists()
    assert tmp_path.exists()


def test_a_pass_with_other_names_says_which_weights_were_not_tested(reference: Path) -> None:
    reference.write_text(
        WITH.format("self.norm = torch.nn.LayerNorm(4)", "torch.stack([self.norm(row) for row in x]) * self.weight")
    )
    loaded = problem.load(reference, "cpu", 0)
    assert loaded.neutral == ["norm.weight", "norm.bias"]
    found = verdicts.Verdict(candidate="a.py", not_tested=loaded.neutral)
    times = timing.Times(rounds=8, calls=1, seconds={"candidate": 1.0}, ratios={"reference": timing.Ratio(2, 2, 2)})
    verdicts._decide(times, found, verdicts.Options(device="cpu"))
    assert found.status is Status.PASS
    assert "whether it uses norm.weight, norm.bias (0 or 1) was not tested" in found.message


def test_a_nursery_that_has_ended_is_one_line(
    reference: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path_factory.mktemp("folders")
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    with contextlib.closing(Nursery()) as nursery:
        nursery.process.kill()
        nursery.process.wait()
        with pytest.raises(PerfsuiteError, match="has ended; run perfsuite judge again"):
            process.Process(nursery, reference, "Model", "cpu", cpu_s=9)
    assert not list(folders.iterdir())
