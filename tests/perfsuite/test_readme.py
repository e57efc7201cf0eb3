"""The README's messages, commands and declarations are correct.

test_scratch_project.py runs its example from the first proof to the gate, and test_workflows.py tests its workflows.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scale import FULLY
from scratch import ROOT, Project
from test_documents import commands_of, refusal
from test_scratch_project import FAST, example

import perfsuite

pytest_plugins = ["pytester"]

README = ROOT / "README.md"
TEXT = README.read_text()
CODE = re.compile(r"`([^`\n]+)`")
TABLE = TEXT[TEXT.index("| what is true of the kernel |") : TEXT.index("Pairs may be in a list")]


def test_the_failure_in_the_readme_is_what_pytest_prints(project: Project) -> None:
    found = re.search(r"leaves\s+out the rest, `(return .+?)`:\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert found
    project.write("test_dots.py", example().replace(FAST, found[1]))
    result = project.run("-m", "correctness", "-k", "equivalence")
    result.assert_outcomes(failed=1)
    assert " ".join(found[2].split()) in " ".join(result.stdout.str().split())


def snippets() -> Iterator[str]:
    """Yield the code of the second column of the table of what a pair can declare."""
    for row in TABLE.splitlines()[2:]:
        columns = re.split(r"(?<!\\)\|", row.strip("| "))
        yield from CODE.findall(columns[-1])


class Model(torch.nn.Linear):
    def __init__(self, width: int = 2) -> None:
        super().__init__(width, width)


STANDS_FOR: dict[str, Any] = {
    **{name: getattr(perfsuite, name) for name in perfsuite.__all__},
    **dict.fromkeys(("f", "make", "slow", "fast_triton", "factory", "act_"), abs),
    **dict.fromkeys(("Model", "FastModel", "ModelNew"), Model),
    **dict.fromkeys(("get_inputs", "get_init_inputs"), list),
}
"""Names that the snippets use; the functions are the reader's."""
OTHER = re.compile(r"@?once_differentiable|torch\.Generator|F\.linear|x @|make\(generator|\w+\(\)$")
"""Start of snippets that declare nothing: code of PyTorch, or of the reader."""
WORDS = (
    "backward",
    "gradients",
    "count",
    "autograd",
    "sqrt",
    "norm.weight",
    "−0.0",
    "inputs",
    "step_inputs",
    "eps",
    "0",
    "mutates",
)
"""Names and numbers in the table's text."""
DECLARED = {
    name
    for declares in (perfsuite.Pair, perfsuite.Workload, perfsuite.tensor)
    for name in inspect.signature(declares).parameters
}


@pytest.mark.parametrize("snippet", [s for s in snippets() if re.fullmatch(r'"[^"]+"', s) is None])
def test_each_declaration_in_the_table_is_accepted(snippet: str) -> None:
    whole = snippet.replace("…", "1") if "Cost" in snippet else snippet.replace(", …", "")
    for form in ("dict({})", "{{{}}}", "{}"):  # options, entries of a dict, calls
        try:
            code = compile(form.format(whole), "README.md", "eval")
        except SyntaxError:
            continue
        try:
            given = eval(code, STANDS_FOR)
        except (NameError, TypeError, ValueError, AttributeError):
            continue
        assert form != "dict({})" or set(given) <= DECLARED
        return
    assert OTHER.match(snippet) or snippet in WORDS or snippet.rstrip("=") in DECLARED, "it is not accepted"


def test_every_command_in_the_readme_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(ROOT)
    found = [
        shlex.split(code) for code in CODE.findall(TEXT) if code.startswith("perfsuite ") and len(code.split()) > 2
    ]
    assert len(found) > 8
    assert [words[1] for words in commands_of(README)] == ["accept", "train", "train", "curve", "ablate", "ab"]
    assert {shlex.join(words): why for words in found if (why := refusal(words))} == {}


def test_make_has_the_targets_in_the_readme() -> None:
    targets = re.findall(r"^make (\S+) +#", TEXT, re.MULTILINE)
    assert targets == ["run", "test", "test-all"]
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True)


@FULLY  # two minutes
def test_the_training_commands_in_the_readme_run(tmp_path: Path) -> None:
    ran = []
    for words in commands_of(README):
        if words[:2] in (["perfsuite", "train"], ["perfsuite", "curve"]):
            given = [str(ROOT / word) if word.startswith("configs/") else word for word in words[1:]]
            done = subprocess.run(
                [sys.executable, "-m", "perfsuite", *given],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            ran.append(words[1])
    assert ran == ["train", "train", "curve"]
