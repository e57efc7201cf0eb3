"""Triton's interpreter gives bitwise the same results with the faster replacements of its functions."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from perfsuite.system import triton_interpreter  # noqa: E402 - triton must be there

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@triton.jit
def _added(a, b):
    return a + b


@triton.jit
def _scaled(x, factor, POWER: tl.constexpr):
    for _ in tl.static_range(POWER):
        x = x * factor
    return x


@triton.jit
def _mixed_kernel(x_ptr, y_ptr, out_ptr, counts_ptr, n, factor, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1)
    rows, columns = row * M + tl.arange(0, M), column * N + tl.arange(0, N)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    y = tl.load(y_ptr + at, mask=inside, other=0.0)
    product = tl.dot(x, tl.trans(y), input_precision="ieee") if M == N else x * y
    product = _scaled(product, factor, 2)
    along = tl.associative_scan(product, 1, _added)
    largest = tl.max(product, 1)
    total = tl.sum(tl.where(product > 0, product, -1.5), 0)
    low = (along - largest[:, None] + total[None, :]).to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + at, low + tl.exp(-x * x) + (rows % 3)[:, None].to(tl.float16), mask=inside)
    i = 0
    while i < row:
        i += 1
    tl.atomic_add(counts_ptr + i, tl.sum((x > y).to(tl.int32)))


@triton.jit
def _counted_kernel(out_ptr, start, step, OPERATION: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    number = start + at
    if OPERATION == "add":
        number = number + step
    elif OPERATION == "sub":
        number = number - step
    else:
        number = number * step
    tl.store(out_ptr + at, number)


@contextmanager
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use Triton's original functions within the context."""
    with monkeypatch.context() as patch:
        for owner, name in places():
            shortened = getattr(owner, name)
            patch.setattr(owner, name, inspect.getclosurevars(shortened).nonlocals["own"])
        yield


def places() -> list[tuple[Any, str]]:
    """Return (owner, name) of every replaced function."""
    from triton.runtime import interpreter as module

    triton_interpreter.quicken()
    semantic = module.interpreter_semantic
    found = [(module, "_patch_lang"), (module, "_get_np_dtype"), (semantic, "broadcast_impl_value")]
    found += [(semantic, "binary_op_type_checking_impl")]
    found += [(semantic, "binary_op_sanitize_overflow_impl"), (tl.block_type, "__init__"), (tl.tensor, "__init__")]
    found = [(owner, name) for owner, name in found if getattr(owner, name).__module__ == triton_interpreter.__name__]
    if not found:
        pytest.skip("this version of Triton is left as it is")
    return found


def mixed(n: int, M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, n, n, generator=torch.Generator().manual_seed(n)).unbind(0)
    out, counts = torch.zeros(n, n), torch.zeros(8, dtype=torch.int32)
    with np.errstate(all="ignore"):
        grid = (triton.cdiv(n, M), triton.cdiv(n, N))
        _mixed_kernel[grid](x.contiguous(), y.contiguous(), out, counts, n, 0.75, M=M, N=N)
    return out, counts


@pytest.mark.parametrize(("n", "M", "N"), [(5, 8, 8), (20, 16, 16), (13, 4, 16), (9, 16, 4), (1, 1, 2)])
def test_results_are_bitwise_equal(n: int, M: int, N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [mixed(n, M, N) for _ in range(2)]  # the second call uses the tables
    with plain(monkeypatch):
        expected = mixed(n, M, N)
    assert expected[0].abs().sum() > 0
    for again in found:
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


LARGE = 2**31 - 1 - 4


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("operation", "start", "step", "overflows"),
    [
        ("add", LARGE, 1, False),
        ("add", LARGE, 2, True),
        ("sub", -LARGE, 5, False),
        ("sub", -LARGE, 6, True),
        ("mul", 2**15, 2**15, False),
        ("mul", 2**16, 2**15, True),
        ("add", 2**40, 2**40, False),
    ],
)
def test_integers_wrap_around_or_are_reported_in_debug_mode(
    operation: str, start: int, step: int, overflows: bool, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter as module

    def message() -> str:
        out = torch.zeros(4, dtype=torch.int64)
        try:
            with np.errstate(all="ignore"):
                _counted_kernel[(1,)](out, start, step, OPERATION=operation, N=4)
        except Exception as error:
            return str(error)
        return str(out.tolist())

    monkeypatch.setattr(module.interpreter_builder, "options", module.InterpreterOptions(debug=debug))
    found = message()
    with plain(monkeypatch):
        assert message() == found
    assert ("overflow" in found) == (overflows and debug)


@triton.jit
def _failing_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.arange(0, 2 * N))


def test_error_within_a_kernel_does_not_change_later_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="shape"):
        _failing_kernel[(1,)](torch.zeros(4, dtype=torch.int64), N=4)
    out, counts = mixed(5, 8, 8)
    with plain(monkeypatch):
        expected = mixed(5, 8, 8)
    assert torch.equal(out, expected[0])
    assert torch.equal(counts, expected[1])


NUMBERS = (0, 3, -1, 2.5, -0.5, True, 2**31, -(2**31), 2**40, 2**63, 2**64, 1e40, float("inf"))
OF_POINTERS = ("allow_lhs_ptr", "allow_rhs_ptr")
TYPES = ("float32", "float64", "float16", "bfloat16", "int1", "int8", "uint8", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize(
    "options", [{}, {"div_or_mod": True}, {"arithmetic_check": False}, dict.fromkeys(OF_POINTERS, True)], ids=str
)
def test_operand_conversion_follows_the_rules_of_triton(options: dict[str, bool]) -> None:
    from triton.runtime import interpreter as module

    semantic = module.interpreter_semantic
    assert (semantic, "binary_op_type_checking_impl") in places()
    shortened = semantic.binary_op_type_checking_impl
    own = inspect.getclosurevars(shortened).nonlocals["own"]

    def answer(operands: Any, lhs: Any, rhs: Any) -> Any:
        try:
            with np.errstate(all="ignore"):
                found = operands(lhs, rhs, **options)
        except Exception as error:
            return type(error), str(error)
        return [(str(t.type), t.handle.data.dtype, t.handle.data.tolist()) for t in found]

    three = semantic.to_tensor(3)
    scalars = [semantic.cast(three, getattr(tl, name)) for name in TYPES]
    blocks = [semantic.splat(scalar, size) for scalar in scalars for size in ([4], [2, 4])]
    pointer = tl.tensor(three.handle, tl.pointer_type(tl.float32))
    tensors, served = [*scalars, *blocks, pointer, semantic.splat(pointer, [4])], 0
    for lhs in (*tensors, *NUMBERS):
        for rhs in (*tensors, *NUMBERS):
            expected = answer(own, lhs, rhs)
            assert str(answer(shortened, lhs, rhs)) == str(expected), (lhs, rhs)
            served += isinstance(expected, list)
    assert served > 1000


def test_function_with_other_parameters_is_not_replaced() -> None:
    class Other:
        def broadcast_impl_value(self, lhs: Any, rhs: Any, more: Any) -> None:
            pass

    semantic = Other()
    triton_interpreter._replace(semantic, "broadcast_impl_value", ("lhs", "rhs"), triton_interpreter._broadcast)
    triton_interpreter._replace(semantic, "no_such_function", ("lhs", "rhs"), triton_interpreter._broadcast)
    assert vars(semantic) == {}


def test_full_tables_are_emptied() -> None:
    known: dict[int, int] = {}
    for i in range(triton_interpreter.MOST_KEPT + 1):
        triton_interpreter._remember(known, i, i)
    assert known == {triton_interpreter.MOST_KEPT: triton_interpreter.MOST_KEPT}
