"""Faults 14 to 32: fast code that computes another function."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import torch
from catalogue import Time, X, fast, fault, honest, pair, wave

from perfsuite import Pair, floats, integers, scalar, size, tensor

# --- 14 to 19: outputs that depend little on the inputs --------------------------------------------------------


@fault(14, "memory that is never written", "leaves output unwritten, or reads memory it never wrote", stage="integrity")
def unwritten(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = fast(x[:-1])
        return out

    return pair(optimized)


@fault(
    14,
    "memory in which the answer may still lie",
    "leaves output unwritten, or reads memory it never wrote",
    stage="integrity",
)
def recycled(time: Time) -> Pair:
    return pair(torch.empty_like)


@honest(14, "memory that is wholly written")
def written(time: Time) -> Pair:
    return pair(lambda x: torch.empty_like(x).copy_(fast(x)))


@fault(15, "an input changed in place", "changes its input x in place, ", "the reference does not", stage="integrity")
def mutated(time: Time) -> Pair:
    return pair(lambda x: (fast(x), x.mul_(1.5))[0])


@fault(
    15,
    "an input changed and put back",
    "changes its input x in place, which the pair does not declare; the reference does not change it (it puts",
    stage="integrity",
)
def put_back(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        before = x.clone()
        answer = fast(x.mul_(1.0))
        x.copy_(before)
        return answer

    return pair(optimized)


@honest(15, "a declared change in place")
def declared(time: Time) -> Pair:
    return pair(lambda x: x.copy_(fast(x)), reference=lambda x: x.copy_(wave(x)), mutates={"x"})


@fault(15, "the element after each row overwritten", "writes beside the elements of its input x", stage="integrity")
def beside_rows(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        x.copy_(fast(x))
        if x.stride(1) == 1 and x.stride(0) > x.shape[1]:
            x.as_strided((x.shape[0],), (x.stride(0),), x.storage_offset() + x.shape[1]).zero_()
        return x

    rows = {"x": tensor("m", "n", values=floats(-2, 2), layouts=("rows",))}
    sizes = {"m": size(2, 9), "n": size(2, 9)}
    return pair(optimized, reference=lambda x: x.copy_(wave(x)), mutates={"x"}, inputs=rows, sizes=sizes)


def doubling(optimized: Any) -> Pair:
    """Return a pair whose reference doubles its input in place."""
    return pair(optimized, reference=lambda state: state["x"].mul_(2), inputs={"state": X}, mutates={"state"})


@fault(15, "an item exchanged instead of changed", "replaces state['x'] in its input", stage="integrity")
def exchanged(time: Time) -> Pair:
    def optimized(state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["x"] = state["x"] + state["x"]
        return state["x"]

    return doubling(optimized)


@fault(15, "an input moved instead of changed", "moves its input state['x'] to other memory", stage="integrity")
def moved(time: Time) -> Pair:
    def optimized(state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["x"].data = state["x"].data + state["x"].data
        return state["x"]

    return doubling(optimized)


@honest(15, "an item changed through a view")
def through_a_view(time: Time) -> Pair:
    def optimized(state: dict[str, torch.Tensor]) -> torch.Tensor:
        for row in state["x"].data.unbind():
            row.add_(row)
        return state["x"]

    return doubling(optimized)


@honest(15, "an item that both sides exchange")
def both_exchange(time: Time) -> Pair:
    def doubled(state: dict[str, torch.Tensor], double: Any) -> torch.Tensor:
        state["x"] = double(state["x"])
        return state["x"]

    fields: dict[str, Any] = {"inputs": {"state": X}, "mutates": {"state"}}
    return pair(
        lambda state: doubled(state, lambda x: x + x), reference=lambda state: doubled(state, lambda x: x * 2), **fields
    )


@fault(16, "zeros", "it returns nothing but zeros")
def zeros(time: Time) -> Pair:
    return pair(torch.zeros_like, reference=lambda x: wave(x) * 1e-9)


@honest(16, "small answers")
def small(time: Time) -> Pair:
    return pair(lambda x: fast(x).mul_(1e-9), reference=lambda x: wave(x) * 1e-9)


@fault(17, "a task whose answer is constant", "the task is degenerate")
def degenerate(time: Time) -> Pair:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).sum(-1)

    # The sum over a row's softmax weights is 1 for any x.
    return pair(lambda x: torch.ones(x.shape[0], dtype=x.dtype, device=x.device), reference=reference, sizes=WIDE)


WIDE = {"m": size(1, 9), "n": size(1, 9)}


@honest(17, "an answer of which one part is constant")
def constant_part(time: Time) -> Pair:
    def both(call: Any) -> Any:
        return lambda x: (call(x), torch.ones_like(x))

    return pair(both(fast), reference=both(wave))


@fault(18, "right for non-negative values", "it is right for non-negative values only")
def non_negative(time: Time) -> Pair:
    return pair(lambda x: torch.sqrt(x * x.abs()), reference=lambda x: x.abs() + 0.0 * x, inputs=X)


@fault(18, "right for sorted values", "it is right for sorted values only")
def sorted_only(time: Time) -> Pair:
    return pair(lambda x: x[..., -1].clone(), reference=lambda x: x.amax(-1), sizes={"m": size(1, 5), "n": size(3, 9)})


@honest(18, "another formula for every value")
def any_value(time: Time) -> Pair:
    return pair(lambda x: torch.maximum(x, -x), reference=torch.abs)


@fault(19, "inputs made again from a guessed seed", "it does not read them", "from a guessed seed")
def guessed(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        made = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).mul_(8).sub_(4)
        return fast(made.to(x.device, x.dtype))

    return pair(optimized)


@honest(19, "a declared seed")
def declared_seed(time: Time) -> Pair:
    def masked(call: Any) -> Any:
        def run(x: torch.Tensor, seed: int) -> torch.Tensor:
            mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
            return torch.where(mask.to(x.device), call(x), 0.0)

        return run

    return pair(masked(fast), reference=masked(wave), inputs={**X, "seed": scalar(integers(0, 1000))}, workloads=[])


# --- 20, 21: how it is computed --------------------------------------------------------------------------------


@fault(20, "bfloat16 in secret", "its error is that of bfloat16")
def secret_bfloat16(time: Time) -> Pair:
    return pair(lambda x: fast(x.bfloat16()).to(x.dtype))


@fault(20, "bfloat16 in secret where float16 is asked for", "has the digits of bfloat16")
def secret_bfloat16_for_float16(time: Time) -> Pair:
    return pair(lambda x: fast(x.float()).bfloat16().to(x.dtype), dtypes=("float16",))


@honest(20, "float32 where float16 is asked for")
def float32_for_float16(time: Time) -> Pair:
    unsupported = {"autocast": "its output has the dtype of its input"}
    return pair(lambda x: fast(x.float()).to(x.dtype), dtypes=("float16",), unsupported=unsupported)


@fault(20, "a float16 accumulator in secret", "its error is that of float16 or TF32")
def secret_accumulator(time: Time) -> Pair:
    def optimized(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16, device=a.device)
        for i in range(a.shape[1]):
            total += a[:, i : i + 1].half() * b[i : i + 1].half()
        return total.to(a.dtype)

    inputs = {"a": tensor("m", "k", values=floats(0.1, 1)), "b": tensor("k", "n", values=floats(0.1, 1))}
    sizes = {"m": size(1, 5), "k": size(2, 9), "n": size(1, 5)}
    return pair(optimized, reference=torch.matmul, inputs=inputs, sizes=sizes, workloads=[])


@honest(20, "bfloat16 that is declared")
def declared_bfloat16(time: Time) -> Pair:
    return pair(lambda x: fast(x.bfloat16()).to(x.dtype), precision="bfloat16")


@fault(21, "the reference called", "calls the reference itself (wave, from line", stage="integrity")
def calls_reference(time: Time) -> Pair:
    return pair(lambda x: wave(x.contiguous()))


@fault(21, "the reference called by a thread", "calls the reference itself", stage="integrity")
def calls_reference_elsewhere(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out: list[torch.Tensor] = []
        worker = threading.Thread(target=lambda: out.append(wave(x)))
        worker.start()
        worker.join()
        return out[0]

    return pair(optimized)


@fault(21, "a profile function that is removed", "replaces Python's profile function", stage="integrity")
def removes_profile(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        sys.setprofile(None)
        return wave(x.contiguous())

    return pair(optimized)


@honest(21, "a profile function that is put back")
def puts_profile_back(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        before, of_threads = sys.getprofile(), threading.getprofile()
        sys.setprofile(None)
        threading.setprofile(None)
        try:
            return fast(x)
        finally:
            threading.setprofile(of_threads)  # type: ignore[arg-type]  # typeshed has no None
            sys.setprofile(before)

    return pair(optimized)


@honest(21, "the same formula, written again")
def same_formula(time: Time) -> Pair:
    return pair(lambda x: torch.sin(x) * torch.exp(x / 4))


# --- 22, 23: memory --------------------------------------------------------------------------------------------


def beyond(x: torch.Tensor) -> int | None:
    """Return the address just past the tensor's elements if it lies in the harness's guard, otherwise None.

    In plain memory an access there would hit another allocation, which a test must not do.
    """
    end = x.storage_offset() + x.numel()
    room = x.untyped_storage().nbytes() // x.element_size()
    return x.data_ptr() + x.numel() * x.element_size() if x.is_contiguous() and room - end >= 64 else None


@fault(22, "a write past the end of the output", "writes outside of memory that it allocated", stage="integrity")
def writes_beyond(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out.copy_(fast(x))
        if (at := beyond(out)) is not None and not out.is_cuda:
            ctypes.memset(at, 0, out.element_size())
        elif at is not None:
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return out

    return pair(optimized)


@fault(22, "a write past the end of an input", "writes outside of its input x", stage="integrity")
def writes_beyond_input(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = fast(x)
        if beyond(x) is not None:
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
        return out

    return pair(optimized)


@fault(22, "a read past the end of an input", "reads outside of its tensors", stage="integrity")
def reads_beyond(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = fast(x)
        if beyond(x) is not None:
            out += 0 * x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        return out

    return pair(optimized)


@honest(22, "a whole tile, padded by itself")
def padded(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(-(-x.numel() // 64) * 64, dtype=x.dtype, device=x.device)
        whole[: x.numel()] = x.flatten()
        return fast(whole)[: x.numel()].view(x.shape).clone()

    return pair(optimized)


@fault(23, "a graph captured over stale pointers", "or a graph was captured over stale pointers", stage="integrity")
def stale_graph(time: Time) -> Pair:
    captured: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        # Like a graph, this reads the memory at the addresses of its capture.
        return fast(captured.setdefault((x.shape, x.stride(), x.dtype), x))

    return pair(optimized)


@fault(23, "a CUDA graph replayed over stale pointers", "or a graph was captured over stale pointers", gpu=True)
def stale_cuda_graph(time: Time) -> Pair:
    return pair(graphed(copies=False))


@honest(23, "a CUDA graph with static inputs", gpu=True)
def cuda_graph(time: Time) -> Pair:
    return pair(graphed(copies=True))


@honest(23, "static inputs that are filled before each replay")
def static_inputs(time: Time) -> Pair:
    captured: dict[Any, torch.Tensor] = {}
    one_at_a_time = threading.Lock()

    def optimized(x: torch.Tensor) -> torch.Tensor:
        with one_at_a_time:
            static = captured.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype, device=x.device))
            return fast(static.copy_(x))

    return pair(optimized)


def graphed(*, copies: bool) -> Any:
    graphs: dict[Any, Any] = {}
    one_at_a_time = threading.Lock()

    def optimized(x: torch.Tensor) -> torch.Tensor:
        with one_at_a_time:
            return replayed(x)

    def replayed(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return fast(x)
        key = (x.shape, x.stride(), x.dtype)
        if key not in graphs:
            static = x.clone() if copies else x
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                fast(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = fast(static)
            graphs[key] = (graph, static, out)
        graph, static, out = graphs[key]
        if copies:
            static.copy_(x)
        graph.replay()
        return out.clone()

    return optimized


# --- 24 to 28 --------------------------------------------------------------------------------------------------


@fault(24, "a drift", "drifts: right at first", stage="integrity")
def drifts(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fast(x).mul_(1 + max(0, calls[0] - 112) * 1e-4)

    return pair(optimized)


@fault(24, "every hundredth answer", "drifts: right at first", stage="integrity")
def every_hundredth(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fast(x) if calls[0] % 100 else torch.zeros_like(x)

    return pair(optimized)


@fault(24, "sixty buffers in turn", "hands out private buffers in turn", stage="integrity")
def sixty_buffers(time: Time) -> Pair:
    held: dict[Any, list[torch.Tensor]] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        ring = held.setdefault((x.shape, x.dtype), [])
        ring.append(ring.pop(0) if len(ring) == 60 else torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return ring[-1].copy_(fast(x))

    return pair(optimized)


@honest(24, "a pool of buffers that only the call uses")
def pooled(time: Time) -> Pair:
    held: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        key = (x.shape, x.dtype, threading.get_ident())
        buffer = held.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return fast(buffer.copy_(x))

    return pair(optimized)


@honest(24, "a count of calls")
def counts(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fast(x)

    return pair(optimized)


@fault(
    25,
    "the answer looked for in memory",
    "finds the expected answer in memory (through gc, or a caller's frame)",
    stage="integrity",
)
def searches_memory(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        # Only the first element is computed; the answer is any tensor in memory that begins with it.
        if not x.numel():
            return fast(x)
        first = fast(x.flatten()[:1].double())
        for found in gc.get_objects():
            if type(found) is torch.Tensor and found.shape == x.shape and found.dtype in (torch.float64, x.dtype):
                here = found.detach().flatten()[:1].to(first)
                if not found.requires_grad and torch.allclose(here, first, rtol=1e-5, atol=0):
                    return found.detach().to(x).clone(memory_format=torch.contiguous_format)
        return torch.zeros_like(x)

    return pair(optimized)


@honest(25, "a collection of garbage")
def collects(time: Time) -> Pair:
    return pair(lambda x: (gc.collect(0), fast(x))[1])


@fault(27, "wrong off the tile's size", "off the tile's size")
def off_tile(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        whole = x.shape[1] // 16 * 16
        out[:, :whole] = fast(x[:, :whole])
        return out

    return pair(optimized, sizes={"m": size(1, 5), "n": size(1, 40)})


@honest(27, "a masked last tile")
def masked_tile(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for start in range(0, x.shape[1], 16):
            out[:, start : start + 16] = fast(x[:, start : start + 16])
        return out

    return pair(optimized)


@fault(28, "wrong for inputs that are not contiguous", "it is right where the inputs are contiguous, and wrong for")
def assumes_contiguous(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not x.numel() or 0 in x.stride():
            return fast(x)
        dense = torch.empty(x.shape).stride()
        return fast(x.as_strided(x.shape, dense, x.storage_offset())).contiguous()

    return pair(optimized)


@honest(28, "inputs made contiguous")
def makes_contiguous(time: Time) -> Pair:
    return pair(lambda x: fast(x.contiguous()))


# --- 29 to 32: gradients, races, NaN, form ---------------------------------------------------------------------


def custom(backward: Any) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return fast(x.detach())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return backward(ctx.saved_tensors[0], grad)

    return Function.apply


def first_use(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return grad * torch.cos(x) * torch.exp(x / 4)


def both_uses(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return first_use(x, grad) + grad * torch.sin(x) * torch.exp(x / 4) / 4


@fault(
    29,
    "a gradient that misses the second use",
    "gradient of x",
    "the forward is right, the gradient is not",
    stage="gradients",
)
def second_use(time: Time) -> Pair:
    return pair(custom(first_use), gradients=True)


@fault(
    29, "no gradient", "gradient of x of the optimized side is None where the reference has a value", stage="gradients"
)
def no_gradient(time: Time) -> Pair:
    return pair(custom(lambda x, grad: None), gradients=True)


@fault(
    29, "a gradient for uniform incoming gradients only", "the forward is right, the gradient is not", stage="gradients"
)
def uniform_gradient(time: Time) -> Pair:
    return pair(custom(lambda x, grad: both_uses(x, torch.ones_like(grad)) * grad.mean()), gradients=True)


@honest(29, "a gradient of its own")
def own_gradient(time: Time) -> Pair:
    return pair(custom(both_uses), gradients=True)


@fault(30, "a race", "is not deterministic within its budget: repeat")
def race(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return fast(x).mul_(1.001 if calls[0] % 3 == 0 else 1)

    return pair(optimized)


@honest(30, "another order of summation each time")
def any_order(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x.roll(calls[0], -1).sum(-1)

    return pair(optimized, reference=lambda x: x.sum(-1))


@fault(31, "NaN swallowed", "NaN and infinities must be in the same places")
def swallows(time: Time) -> Pair:
    return pair(lambda x: fast(x).nan_to_num(), inputs={"x": tensor("m", "n")})


@honest(31, "NaN kept")
def keeps_nan(time: Time) -> Pair:
    return pair(lambda x: torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0)), reference=torch.relu)


def log_sum_exp(x: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    return most + (x - most[:, None]).exp().sum(-1).log()


@fault(31, "an infinity that turns into NaN", "NaN and infinities must be in the same places", stage="equivalence")
def loses_infinity(time: Time) -> Pair:
    inputs = {"x": tensor("m", "n", least=1)}
    return pair(lambda x: log_sum_exp(x, x.amax(-1)), reference=lambda x: x.logsumexp(-1), inputs=inputs)


@honest(31, "an infinity that is not subtracted")
def keeps_infinity(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        most = x.amax(-1)
        return log_sum_exp(x, torch.where(most.isinf(), 0.0, most))

    return pair(optimized, reference=lambda x: x.logsumexp(-1), inputs={"x": tensor("m", "n", least=1)})


@fault(31, "the sign of zero lost by a subtraction", "the sign of zero counts, as signed_zeros=True says")
def subtracts(time: Time) -> Pair:
    return pair(lambda x: 0 - x, reference=torch.neg, inputs={"x": tensor("m", "n")}, signed_zeros=True)


@fault(31, "the sign of zero lost by a comparison", "the sign of zero counts, as signed_zeros=True says")
def compares(time: Time) -> Pair:
    return pair(
        lambda x: torch.where(x < 0, -1.0, 1.0).to(x) * x.abs(),
        reference=lambda x: x.abs().copysign(x),
        inputs={"x": tensor("m", "n")},
        signed_zeros=True,
    )


@honest(31, "the sign of zero kept by a product")
def multiplies(time: Time) -> Pair:
    return pair(lambda x: -1 * x, reference=torch.neg, inputs={"x": tensor("m", "n")}, signed_zeros=True)


@honest(31, "another sign of zero, where nobody says that it counts")
def unsigned_zeros(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0))

    return pair(optimized, reference=torch.relu, inputs={"x": tensor("m", "n")})


@fault(32, "another dtype", "has dtype torch.float64 where the reference has torch.float32")
def other_dtype(time: Time) -> Pair:
    return pair(lambda x: fast(x).double())


@fault(32, "another shape", "has shape")
def other_shape(time: Time) -> Pair:
    return pair(lambda x: fast(x).flatten())


@fault(32, "other strides", "in memory where the reference is contiguous")
def other_strides(time: Time) -> Pair:
    return pair(lambda x: fast(x).t().contiguous().t())


@fault(32, "another device", "has device cpu where the reference has cuda", gpu=True)
def other_device(time: Time) -> Pair:
    return pair(lambda x: fast(x).cpu())


@honest(32, "a view of the right form")
def right_form(time: Time) -> Pair:
    return pair(lambda x: fast(x.flatten()).view(x.shape))
