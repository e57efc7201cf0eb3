"""`perfsuite judge` accepts unusual correct candidates, and describes unusual failures of others."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from judging import PIPE, REFERENCE, candidate, proven

from perfsuite.errors import NotEquivalent
from perfsuite.judge.process import Ended, Nursery

HONEST = {
    "a pool of threads": candidate(
        """
        if not self.kept:
            self.kept["pool"] = ThreadPoolExecutor(3)
        return torch.cat(list(self.kept["pool"].map(self.right, x.chunk(4))))
        """,
        "from concurrent.futures import ThreadPoolExecutor",
    ),
    "a function that returns no module": """
import torch
class Plain:
    def __init__(self, width):
        layer = torch.nn.Linear(width, width)
        self.weight, self.bias, self.out = layer.weight.detach().t(), layer.bias.detach(), torch.empty(16, width)
    def __call__(self, x):
        torch.addmm(self.bias, x, self.weight, out=self.out)
        return torch.nn.functional.silu(self.out, inplace=True)
def ModelNew(width):
    return Plain(width)
""",
    "a negated and transposed view": candidate(
        "return torch.complex(torch.zeros_like(x), -self.right(x)).conj().imag.t().contiguous().t()"
    ),
    "a parameter as its output": candidate("return torch.nn.Parameter(self.right(x))"),
    "a lazy layer": candidate("return self.right(x)").replace("Linear(width, width)", "LazyLinear(width)"),
}
FAILING = {
    "an exception without a message": (
        candidate("raise Odd", "class Odd(Exception):\n    def __str__(self): raise ValueError"),
        "raises Odd$",
    ),
    "an exception with a long message": (candidate("raise ValueError('x' * 2_000_000)"), "raises ValueError: xxx"),
    "many outputs": (
        candidate("return [x[0, 0]] * 100_000"),
        r"it returns float32\[\], float32\[\], … where the reference returns float32\[16, 64\]$",
    ),
    "nested outputs": (
        candidate("""
            y = []
            y.append(y)
            return y
        """),
        "raises RecursionError",
    ),
    "a sparse output": (candidate("return self.right(x).to_sparse()"), "raises RuntimeError: .*[Ss]parse"),
    "an output without values": (candidate("return torch.empty(16, 64, device='meta')"), "raises NotImplementedError"),
    "a quantized output": (
        candidate("return torch.quantize_per_tensor(self.right(x), 0.01, 0, torch.qint8)"),
        "it returns qint8",
    ),
    "an abort in another thread": (
        candidate("threading.Thread(target=os.abort).start()\ntime.sleep(9)"),
        "ends its process with signal 6",
    ),
    "a word that begins its own time": (
        candidate(
            """
            if not self.kept:
                self.kept["pipe"] = os.open(f"/proc/self/fd/{held('asked').fileno()}", os.O_WRONLY)
            os.write(self.kept["pipe"], b"go\\n")
            return self.right(x)
            """,
            PIPE,
        ),
        "ends its process with exit code 0",
    ),
}


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    path = tmp_path / "reference.py"
    path.write_text(textwrap.dedent(REFERENCE))
    return path


@pytest.mark.parametrize("name", HONEST)
def test_an_unusual_candidate_that_is_right_is_proven(nursery: Nursery, reference: Path, name: str) -> None:
    assert proven(nursery, reference, HONEST[name]).draws == 8


@pytest.mark.parametrize("name", FAILING)
def test_an_unusual_failure_is_described(nursery: Nursery, reference: Path, name: str) -> None:
    text, says = FAILING[name]
    with pytest.raises((NotEquivalent, Ended)) as raised:
        proven(nursery, reference, text)
    assert re.search(says, f"{raised.value}")


def test_an_argument_that_the_reference_changes_is_sent_as_it_was(nursery: Nursery, reference: Path) -> None:
    text = textwrap.dedent(REFERENCE).replace("super().__init__()", "super().__init__()\n        width = width.pop()")
    reference.write_text(text.replace("return [64]", "return [[64]]"))
    assert proven(nursery, reference, reference.read_text().replace("Model(", "ModelNew(")).draws == 8
