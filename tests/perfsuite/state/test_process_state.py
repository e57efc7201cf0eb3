"""A change that a call leaves in the process is detected, reported and undone."""

from __future__ import annotations

import cProfile
import math
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from scale import FULLY
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite.state import patches, process_state


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    with process_state.kept():
        yield


def enter_mode() -> None:
    class Looks(torch.overrides.TorchFunctionMode):
        pass

    Looks().__enter__()


LEFT: dict[str, Callable[[], object]] = {
    "sets torch's default dtype to torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "sets torch's default device to meta": lambda: torch.set_default_device("meta"),
    "sets torch's grad mode to False": lambda: torch.set_grad_enabled(False),
    "sets torch's flash sdp enabled to False": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "sets torch's mkldnn enabled to False": lambda: torch.backends.mkldnn.set_flags(False),
    "sets torch's cudnn deterministic to True": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "sets torch's deterministic algorithms to True": lambda: torch.use_deterministic_algorithms(True),
    "allow_fp16_reduced_precision_reduction to False": lambda: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "sets Python's switch interval to 0.5": lambda: sys.setswitchinterval(0.5),
    "sets torch's number of function modes to 1 (before: 0)": enter_mode,
    "sets hooks of all modules (_global_forward_hooks)": lambda: torch.nn.modules.module.register_module_forward_hook(
        lambda *given: None
    ),
    "sets hooks of all optimizers (_global_optimizer_post_hooks)": (
        lambda: register_optimizer_step_post_hook(lambda *given: None)
    ),
    "replaces torch.nn.modules.batchnorm._BatchNorm.forward by": lambda: setattr(
        torch.nn.modules.batchnorm._BatchNorm, "forward", lambda self, x: x
    ),
    "replaces torch.utils.checkpoint.checkpoint by": lambda: setattr(
        torch.utils.checkpoint, "checkpoint", lambda call, *given: call(*given)
    ),
    "replaces torch.nn.functional.relu by": lambda: setattr(torch.nn.functional, "relu", lambda x: x),
    "replaces torch.nn.Linear.forward by": lambda: setattr(torch.nn.Linear, "forward", lambda self, x: x),
    "replaces torch.Tensor.matmul by": lambda: setattr(torch.Tensor, "matmul", lambda self, x: x),
    "replaces builtins.len by": lambda: setattr(__import__("builtins"), "len", lambda x: x.__len__()),
}


@pytest.mark.parametrize("words", LEFT)
def test_changes_left_by_a_call_are_reported_and_undone(words: str) -> None:
    with process_state.kept() as changed:
        LEFT[words]()
    assert any(words in said for said in changed.values()), changed
    with process_state.kept() as again:
        pass
    assert not again
    with process_state.kept() as after:
        LEFT[words]()
    assert after.keys() == changed.keys(), "it was put back"


def test_replacing_a_kernel_of_a_torch_operator_is_reported() -> None:
    library = torch.library.Library("aten", "IMPL")
    with process_state.kept() as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("tanh", torch.sin, "CPU")
    library._destroy()
    assert [*changed] == ["the Python kernels of torch's operators"]
    assert "aten/tanh/CPU" in next(iter(changed.values()))
    with process_state.kept() as after:
        torch.library.Library("perfsuite_test", "DEF").define("f(Tensor x) -> Tensor")
    assert not after


def test_changes_that_the_block_undoes_are_not_reported() -> None:
    with process_state.kept() as changed:
        with torch.inference_mode(), torch.backends.cudnn.flags(deterministic=True):
            torch.ones(2).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert not changed


@FULLY
def test_wrappers_that_torch_installs_are_not_reported() -> None:
    """Importing the compiler wraps some functions of torch's, which is not reported."""
    code = """
import torch
from perfsuite.state import process_state
with process_state.kept() as changed:
    import torch._dynamo, torch._inductor.compile_fx
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
print(changed)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{}"


def test_quick_reads_only_some_settings() -> None:
    assert set(process_state.QUICK) <= process_state.settings().keys()
    with process_state.kept(quick=True) as changed:
        torch.set_default_dtype(torch.float64)
        torch.backends.cuda.enable_flash_sdp(False)
    assert [*changed] == ["torch's default dtype"]


def test_attributes_added_before_the_call_are_neither_reported_nor_removed() -> None:
    """transformers adds a method to torch.nn.Module when it first initializes a model."""
    theirs, other = lambda self: 1, lambda self: 2
    with process_state.kept():  # the known attributes are listed once per process
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "smart_apply", theirs, raising=False)
        with process_state.kept() as changed:
            assert torch.nn.Linear(1, 1).smart_apply() == 1
        assert changed == {}
        assert torch.nn.Module.smart_apply is theirs
        with process_state.kept() as changed:
            torch.nn.Module.smart_apply, torch.Tensor.added = other, other
        assert set(changed) == {"torch.nn.Module.smart_apply", "torch.Tensor.added"}
        assert torch.nn.Module.smart_apply is theirs
        assert not hasattr(torch.Tensor, "added")


def test_generators_show_which_random_states_changed() -> None:
    before = process_state.generators()
    assert process_state.generators() == before
    torch.rand(1)
    random.random()
    after = process_state.generators()
    assert {name for name in after if after[name] != before[name]} == {"torch's random state", "Python's random state"}


HELD = 2


def inner(x: int) -> int:
    return x * HELD


class Helper:
    def run(self, x: int) -> int:
        return inner(x)


def outer(x: int) -> int:
    return (lambda y: Helper().run(y))(x) + len(str(torch.float32))


def test_bindings_are_followed_through_the_projects_own_functions_and_classes() -> None:
    found = patches.bindings(outer)
    names = {f"{__name__}.{n}" for n in ("Helper", "inner", "HELD", "torch")}
    functions = [f"{__name__}.{n}" for n in ("outer", "inner", "Helper.run")]
    assert found.keys() == names | {f"the {part} of {n}" for part in ("code", "defaults") for n in functions}
    assert found[f"{__name__}.HELD"] == HELD
    assert patches.bindings(torch.relu) == {}


def through_a_module(x: float) -> float:
    return math.floor(x) + sum(LISTED)


LISTED = [1, 2]


def test_module_attributes_and_container_items_are_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = patches.bindings(through_a_module)
    assert patches.is_same_binding(before, patches.bindings(through_a_module))
    monkeypatch.setattr(math, "floor", int)
    monkeypatch.setattr(f"{__name__}.LISTED", [1, 2])  # another list with the same items
    after = patches.bindings(through_a_module)
    assert [n for n in before if not patches.is_same_binding(before[n], after[n])] == ["math.floor"]
    LISTED.append(3)
    assert not patches.is_same_binding(before[f"{__name__}.LISTED"], LISTED)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ({1, 2}, {1, 2}, True),
        ({1, 2}, {1, 3}, False),
        ((2.0,), (2.0, 3.0), False),
        ([1], (1,), False),
    ],
)
def test_containers_with_the_same_items_are_the_same_binding(before: object, after: object, same: bool) -> None:
    assert patches.is_same_binding(before, after) == same


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile is no profile function since Python 3.12")
def test_set_profile_resumes_a_profiler_in_c() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: None)
    process_state.set_profile(before)
    math.sqrt(2.0)
    assert sys.getprofile() is before
    profiler.disable()
    assert any("sqrt" in str(entry.code) for entry in profiler.getstats())
