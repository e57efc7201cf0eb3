"""The kernels that a side's code can reach, and no others of its module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.correctness import reachable_kernels
from perfsuite.declare import modules

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")
gl = pytest.importorskip("triton.experimental.gluon.language")


@triton.jit
def own_kernel(x_ptr):
    device_function(x_ptr)


@triton.jit
def device_function(x_ptr):
    pass


@triton.jit
def other_kernel(x_ptr):
    pass


@gluon.jit
def warps_of_gluon(x_ptr):
    pass


@gluon.jit
def kernel_of_gluon(x_ptr):
    gl.warp_specialize([(warps_of_gluon, (x_ptr,)), (device_function, (x_ptr,))], [4], [24])


def launches(x: torch.Tensor) -> None:
    own_kernel[(1,)](x)


def launches_gluon(x: torch.Tensor) -> None:
    kernel_of_gluon[(1,)](x)


class Launching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        launches(x)
        return x


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Launching.apply(x)


def through_a_class(x: torch.Tensor) -> torch.Tensor:
    return Launching.apply(x)


def closing_over(call: Callable[..., Any]) -> Callable[..., Any]:
    def side(x: torch.Tensor) -> Any:
        return call(x)

    return side


TABLE = {"fast": launches}


def through_a_table(x: torch.Tensor) -> None:
    TABLE["fast"](x)


def none_at_all(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


REACH: dict[str, Callable[..., Any]] = {
    "itself": launches,
    "a class": through_a_class,
    "a module's forward": Module(),
    "a method": Module().forward,
    "a module of torch's": torch.nn.Sequential(torch.nn.ReLU(), Module()),
    "a module that shares weights": modules.Sharing(Module(), "optimized"),
    "a partial": functools.partial(launches),
    "a closure": closing_over(launches),
    "a table": through_a_table,
}


@pytest.mark.parametrize("side", REACH.values(), ids=REACH)
def test_a_kernel_is_reached_through_each_kind_of_side(side: Callable[..., Any]) -> None:
    assert list(reachable_kernels.kernels([side])) == [f"{__name__}.own_kernel"]


def test_a_kernel_is_reached_through_a_compiled_module() -> None:
    """The module is compiled here because torch.compile imports the compiler, which takes a second."""
    assert list(reachable_kernels.kernels([torch.compile(Module())])) == [f"{__name__}.own_kernel"]


def test_a_gluon_kernel_is_reached_without_its_warp_functions() -> None:
    assert list(reachable_kernels.kernels([launches_gluon])) == [f"{__name__}.kernel_of_gluon"]


def test_other_kernels_of_the_module_are_not_reached() -> None:
    assert reachable_kernels.kernels([none_at_all]) == {}


def test_code_of_other_projects_is_not_searched() -> None:
    foreign = functools.partial(launches)
    stranger = SimpleNamespace(call=foreign)

    def side(x: torch.Tensor) -> None:
        stranger.call(x)

    side.__module__ = "somewhere.else"
    assert reachable_kernels.kernels([side]) == {}


class Old:
    """Stand-in for torch.distributed.reduce_op, which warns when an attribute is read, even its class."""

    __module__ = "torch.distributed"

    def __getattribute__(self, name: str) -> Any:
        raise FutureWarning(name)


def test_an_object_that_warns_on_attribute_access_is_skipped() -> None:
    names: dict[str, Any] = {"__name__": __name__, "launches": launches, "OLD": Old()}
    exec("def side(x): launches(x if OLD is None else x)", names)
    assert set(reachable_kernels.kernels([names["side"]])) == {f"{__name__}.own_kernel"}
