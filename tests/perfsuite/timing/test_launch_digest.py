"""The digest of a call's launches, as far as Python and PyTorch show it on a CPU. The rest needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perfsuite.timing import launch_digest

BODY = """
import time

import torch

SIZE = 3


def call(x):
    y = x * 2.0
    for n in range(SIZE):
        y = y + n
    return y.sum()
"""


def load(folder: Path, text: str) -> ModuleType:
    """Load the module without a .pyc file: that is matched by the source's second and size, and may be stale."""
    module = ModuleType("traced_module")
    path = folder / "traced_module.py"
    path.write_text(text)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def seen(folder: Path, text: str = BODY, x: torch.Tensor | None = None) -> launch_digest._Seen:
    call: Callable[[torch.Tensor], object] = load(folder, text).call
    found = launch_digest._Seen(folder)
    given = torch.ones(8) if x is None else x
    call(given)
    with found.python():
        call(given)
    return found


def test_the_same_call_has_the_same_digest(tmp_path: Path) -> None:
    first, second = seen(tmp_path), seen(tmp_path, x=torch.zeros(8))  # values do not count
    assert first.digest() == second.digest()
    assert first.problem() == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [("    y = x * 2.0", "    # twice\n    y = x * 2.0"), ("def call", "def unused():\n    return 1\n\n\ndef call")],
)
def test_code_that_is_not_run_does_not_change_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in BODY
    assert seen(tmp_path).digest() == seen(tmp_path, BODY.replace(old, new)).digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SIZE = 3", "SIZE = 4"),
        ("x * 2.0", "x * 3.0"),
        ("x * 2.0", "2.0 / x"),
        ("    y = x * 2.0", "    time.sleep(0.0)\n    y = x * 2.0"),
        ("    y = x * 2.0", "    sum(range(100))\n    y = x * 2.0"),
        ("    y = x * 2.0", "    waste = [n for n in range(10)]\n    y = x * 2.0"),
        ("return y.sum()", "return y.sum(0)"),
        ("return y.sum()", "y.clone()\n    return y.sum()"),
        ("y = y + n", "y = torch.add(y, n)"),
    ],
)
def test_additional_or_different_work_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert old in BODY
    assert seen(tmp_path).digest() != seen(tmp_path, BODY.replace(old, new)).digest()


def test_shape_dtype_and_strides_of_an_input_change_the_digest(tmp_path: Path) -> None:
    plain = seen(tmp_path).digest()
    for x in (torch.ones(9), torch.ones(8, dtype=torch.float64), torch.ones(16)[::2], torch.ones(8, 1)):
        assert seen(tmp_path, x=x).digest() != plain


def test_custom_operators_of_another_library_are_reported_as_a_problem(tmp_path: Path) -> None:
    name = f"perfsuite_test::double_{id(tmp_path)}"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "cpu", lambda x: x * 2)
    operator = f"torch.ops.perfsuite_test.double_{id(tmp_path)}(x)"
    found = seen(tmp_path, BODY.replace("x * 2.0", operator))
    assert found.problem().startswith("it calls operators of perfsuite_test")


def test_compiled_modules_of_another_package_are_reported_as_a_problem(tmp_path: Path) -> None:
    pytest.importorskip("yaml._yaml")
    text = BODY.replace("import time", "from yaml import _yaml").replace(
        "    y = x", "    _yaml.get_version()\n    y = x"
    )
    assert seen(tmp_path, text).problem() == "it calls yaml, whose arguments are not seen"


def test_trace_and_profile_hooks_are_restored(tmp_path: Path) -> None:
    before = sys.gettrace(), sys.getprofile()
    seen(tmp_path)
    assert (sys.gettrace(), sys.getprofile()) == before


def test_form_of_an_argument_excludes_its_address() -> None:
    a, b = torch.ones(4), torch.ones(4)
    assert launch_digest._form([a, 1, {"k": (b, None)}]) == launch_digest._form([b, 1, {"k": (a, None)}])
    assert launch_digest._form(object()) == "object"
    assert len({launch_digest._form(value) for value in (1, 1.0, True)}) == 3
