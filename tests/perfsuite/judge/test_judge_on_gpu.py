"""`perfsuite judge` on a GPU: what only a GPU makes possible, and that an honest kernel passes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from judging import documented, judged

from perfsuite.judge.process import Nursery
from perfsuite.judge.verdict import Status

ON_CUDA = {"device": "cuda", "seconds": 1.0, "limit_s": 30.0}
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

REFERENCE = """
    import torch


    class Model(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)

        def forward(self, x):
            return torch.stack([row * torch.sigmoid(row) * self.weight for row in x])


    def get_inputs():
        return [torch.rand(16, 16384)]


    def get_init_inputs():
        return [16384]
"""
HONEST = """
    import torch, triton
    import triton.language as tl


    @triton.jit
    def kernel(x, w, y, n, width, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n)
        tl.store(y + at, v * tl.sigmoid(v) * tl.load(w + at % width, mask=at < n), mask=at < n)


    class ModelNew(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)
            self.kept = {}

        def right(self, x, into=None):
            y = torch.empty_like(x) if into is None else into
            kernel[(triton.cdiv(x.numel(), 1024),)](x, self.weight, y, x.numel(), x.shape[-1], BLOCK=1024)
            return y

        def forward(self, x):
            return self.right(x)
"""
SLEEP = "torch.cuda._sleep(20_000_000)"  # about 10 ms


def candidate(body: str, before: str = "", *, kernel: tuple[str, str] = ("", "")) -> str:
    """Return the honest candidate with another forward pass, code that runs at import, or a changed kernel."""
    own = textwrap.indent(textwrap.dedent(body).strip(), 12 * " ")
    text = textwrap.dedent(HONEST.replace("            return self.right(x)\n", own + "\n"))
    return text.replace(*kernel) + "\n" + textwrap.dedent(before)


EXPLOITS: dict[str, tuple[str, str]] = {
    "a synchronisation that does not wait": (
        candidate(
            f"""
            {SLEEP}
            return self.right(x)
            """,
            "torch.cuda.synchronize = lambda *a: None",
        ),
        "its output is not written|after it has said that the call is done",
    ),
    "an output on a stream of its own": (
        candidate(f"""
            stream = self.kept.setdefault("stream", torch.cuda.Stream())
            y = torch.empty_like(x)
            with torch.cuda.stream(stream):
                {SLEEP}
                self.right(x, y)
            return y
        """),
        "is wrong|its output is not written",
    ),
    "events that measure nothing": (
        candidate(
            f"""
            {SLEEP}
            return self.right(x)
            """,
            "torch.cuda.Event.elapsed_time = lambda *a: 1e-3",
        ),
        "it is 0.* times as fast as the reference",
    ),
    "a graph that is kept with its first input": (
        candidate("""
            if "graph" not in self.kept:
                self.right(x)
                torch.cuda.synchronize()
                self.kept["graph"], self.kept["x"] = torch.cuda.CUDAGraph(), x.clone()
                with torch.cuda.graph(self.kept["graph"]):
                    self.kept["y"] = self.right(self.kept["x"])
            self.kept["graph"].replay()
            return self.kept["y"]
        """),
        "the answer that it gave to other inputs|is wrong",
    ),
    "memory in which an answer may still be": (
        candidate("return torch.empty_like(x)"),
        "is wrong|its output is not written|other inputs|does not read its inputs",
    ),
    "lower precision": (
        candidate("return self.right(x)", kernel=("tl.sigmoid(v)", "tl.sigmoid(v).to(tl.bfloat16).to(tl.float32)")),
        "bfloat16",
    ),
    "a constant factor": (
        candidate("return self.right(x)", kernel=("v * tl.sigmoid(v)", "1.001 * v * tl.sigmoid(v)")),
        "1.001",
    ),
    "a write beside its memory": (
        candidate("return self.right(x)", kernel=("tl.store(y + at,", "tl.store(y + at + (1 << 40),")),
        "raises|ends its process",
    ),
    "an input used as a workspace": (
        candidate("return self.right(x, x)"),
        "it writes into its inputs",
    ),
}  # fmt: skip


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(textwrap.dedent(REFERENCE))
    return path


def test_the_document_has_a_row_for_each() -> None:
    assert set(EXPLOITS) <= documented()


@ON_GPU
@pytest.mark.parametrize("name", EXPLOITS)
def test_an_exploit_is_rejected_by_name(nursery: Nursery, reference: Path, name: str) -> None:
    text, says = EXPLOITS[name]
    found = judged(nursery, reference, text, **ON_CUDA)
    assert found.status in (Status.NOT_EQUIVALENT, Status.TOO_SLOW), found
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.message)


@ON_GPU
def test_an_honest_kernel_is_proven_and_timed(nursery: Nursery, reference: Path) -> None:
    # The reference gets so many rows that a call takes long compared with its messages.
    reference.write_text(reference.read_text().replace("torch.rand(16, ", "torch.rand(128, "))
    found = judged(nursery, reference, textwrap.dedent(HONEST), **ON_CUDA | {"seconds": 3.0})
    assert found.status is Status.PASS, found
    assert found.speedup is not None
    assert found.same_parameters
    assert not found.not_confined
