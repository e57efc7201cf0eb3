"""Faults 1 to 9, 11 and 12: code that only looks fast, because of how it is timed."""

from __future__ import annotations

import dataclasses
import threading
import time as clock_module
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from catalogue import SIZES, Time, X, fast, fault, honest, lasting, pair, timed_pair, wave

from perfsuite import Pair, Workload, floats, scalar, stateful, tensor
from perfsuite.correctness import compilations


class Lazy(torch.Tensor):
    pass


def shaped(x: torch.Tensor) -> Any:
    return (x.shape, x.dtype)


# --- 1, 2: work that goes on after the call ------------------------------------------------------------------

BIG = {"m": 4096, "n": 4096}


def slow_cuda(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.sin(x)
    return x


def cuda_pair(optimized: Any, **fields: Any) -> Pair:
    workload = Workload("w", **BIG, device="cuda")
    return pair(optimized, reference=slow_cuda, **{"workloads": [workload], **fields})


@fault(1, "on a side stream", "goes on working after it has returned", timed=True, gpu=True)
def side_stream(time: Time) -> Pair:
    streams: list[Any] = []

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not streams:
            streams.append(torch.cuda.Stream())
        streams[0].wait_stream(torch.cuda.current_stream())
        out = torch.empty_like(x)
        with torch.cuda.stream(streams[0]):
            out.copy_(slow_cuda(x))
        return out

    return cuda_pair(optimized)


@honest(1, "on a side stream that is joined", timed=True, gpu=True)
def joined_stream(time: Time) -> Pair:
    streams: list[Any] = []

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if not streams:
            streams.append(torch.cuda.Stream())
        current = torch.cuda.current_stream()
        streams[0].wait_stream(current)
        out = torch.empty_like(x)
        with torch.cuda.stream(streams[0]):
            out.copy_(slow_cuda(x))
        current.wait_stream(streams[0])
        out.record_stream(streams[0])
        x.record_stream(streams[0])
        return out

    return cuda_pair(optimized)


WAITING: list[threading.Event] = []
"""Events that the test sets when the harness waits, so that the thread writes then, at any load."""


@fault(2, "in a background thread", "goes on working after it has returned: output changes later", stage="integrity")
def background(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out, go = torch.zeros_like(x), threading.Event()
        answer = fast(x)

        def write() -> None:
            go.wait(10)
            out.copy_(answer)

        threading.Thread(target=write, daemon=True).start()
        WAITING.append(go)
        return out

    return pair(optimized)


@honest(2, "in a thread that is joined")
def joined_thread(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out, inference = torch.empty_like(x), torch.is_inference_mode_enabled()
        stream = torch.cuda.current_stream() if x.is_cuda else None

        def work() -> None:
            with torch.inference_mode(inference), torch.cuda.stream(stream):  # modes and streams hold for one thread
                out.copy_(fast(x))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        return out

    return pair(optimized, unsupported={"captured_graph": "a graph captures the work of one thread"})


# --- 3: functions of the harness that are replaced -----------------------------------------------------------


@fault(3, "a patched clock", "time.perf_counter_ns has been replaced by", "optimized", timed=True)
def patched_clock(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        clock_module.perf_counter_ns = lambda: 0
        return fast(x)

    return pair(optimized)


@fault(3, "a patched event", "torch.cuda.Event.elapsed_time has been replaced by")
def patched_event(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.Event.elapsed_time = lambda *args: 1e-6  # type: ignore[method-assign,assignment]
        return fast(x)

    return pair(optimized)


@fault(3, "a patched comparison", "replaces torch.equal by")
def patched_comparison(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        torch.equal = lambda *args: True
        return fast(x)

    return pair(optimized)


@fault(3, "a patched rule", "perfsuite.correctness.rule.K_NORM has been set to 1000000.0 (installed: 6.0)")
def patched_rule(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        import perfsuite.correctness.rule

        perfsuite.correctness.rule.K_NORM = 1e6
        return fast(x)

    return pair(optimized)


@honest(3, "a side that reads the clock", timed=True)
def reads_clock(time: Time) -> Pair:
    spent = [0.0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        began = clock_module.perf_counter()
        out = fast(x)
        spent[0] += clock_module.perf_counter() - began
        return out

    return pair(optimized)


# --- 4: outputs that compute when read -----------------------------------------------------------------------


@fault(
    4, "a tensor subclass", "returns output as a Lazy, a tensor subclass that may compute when read", stage="integrity"
)
def subclass(time: Time) -> Pair:
    return pair(lambda x: fast(x).as_subclass(Lazy))


@fault(
    4,
    "an overridden method",
    "returns output with its method double overridden: it may compute when read",
    stage="integrity",
)
def overridden(time: Time) -> Pair:
    def optimized(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.double = lambda: fast(x).double()  # type: ignore[method-assign]
        return out.copy_(fast(x))

    return pair(optimized)


class LazyList(list[torch.Tensor | None]):
    """A list that computes what it holds when it is read."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__([None])
        self.x = x

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter([fast(self.x)])

    def __getitem__(self, key: Any) -> Any:
        return fast(self.x)


class LazyDict(dict[str, torch.Tensor | None]):
    """A dict that computes what it holds when it is read."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(y=None)
        self.x = x

    def items(self) -> Any:
        return {"y": fast(self.x)}.items()

    def __getitem__(self, key: str) -> torch.Tensor:
        return fast(self.x)


@dataclasses.dataclass
class Held:
    y: Any


class LazyField(Held):
    """A dataclass whose field is computed when it is read."""

    @property
    def y(self) -> Any:
        return fast(self.x)

    @y.setter
    def y(self, x: torch.Tensor) -> None:
        self.x = x


@fault(4, "a list that computes when read", "output[0] of the optimized side is None where the reference has a value")
def lazy_list(time: Time) -> Pair:
    return pair(LazyList, reference=lambda x: [wave(x)])


@fault(4, "a dict that computes when read", "output['y'] of the optimized side is None where the reference has a value")
def lazy_dict(time: Time) -> Pair:
    return pair(LazyDict, reference=lambda x: {"y": wave(x)})


@fault(4, "a dataclass that computes when read", "output is a LazyField; a side returns tensors")
def lazy_field(time: Time) -> Pair:
    return pair(LazyField, reference=lambda x: Held(wave(x)))


@fault(
    4,
    "a list that computes when read only while it is timed",
    "output[0] of the timed optimized side is None",
    timed=True,
)
def lazy_list_when_timed(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> list[torch.Tensor]:
        calls[0] += 1
        time.spend(1e-3)
        return LazyList(x) if calls[0] > 60 else [fast(x)]  # type: ignore[return-value]

    return pair(optimized, reference=lasting(time, 6e-3, lambda x: [wave(x)]))


@fault(4, "lazy only while it is timed", "returns output as a Lazy", timed=True)
def lazy_when_timed(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(1e-3)
        return fast(x).as_subclass(Lazy) if calls[0] > 60 and x.shape == tuple(SIZES.values()) else fast(x)

    return timed_pair(time, optimized)


@fault(4, "a method overridden only while it is timed", "its method double overridden", timed=True)
def overridden_when_timed(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(1e-3)
        out = fast(x)
        if calls[0] > 60:
            out.double = lambda: fast(x).double()  # type: ignore[method-assign]
        return out

    return timed_pair(time, optimized)


@fault(4, "steps that are lazy only while they are timed", "returns output as a Lazy", timed=True)
def lazy_steps_when_timed(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> Any:
        def step(y: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            time.spend(1e-3)
            return fast(x + y).as_subclass(Lazy) if calls[0] > 60 else fast(x + y)

        return step

    def reference(x: torch.Tensor) -> Any:
        return lasting(time, 6e-3, lambda y: wave(x + y))

    step_inputs = {"y": tensor("m", "n", values=floats(-4, 4))}
    return pair(stateful(optimized), reference=stateful(reference), step_inputs=step_inputs)


@honest(4, "a parameter")
def parameter(time: Time) -> Pair:
    return pair(lambda x: torch.nn.Parameter(fast(x), requires_grad=False))


class Sorted(list[torch.Tensor]):
    """A list with methods of its own, which holds what it returns."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self[0]])


class Named(NamedTuple):
    y: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    y: torch.Tensor
    n: int = 1


@honest(4, "a list with methods of its own")
def own_list(time: Time) -> Pair:
    return pair(lambda x: Sorted([fast(x)]), reference=lambda x: [wave(x)])


@honest(4, "an ordered dict for a dict")
def own_dict(time: Time) -> Pair:
    return pair(lambda x: OrderedDict(y=fast(x)), reference=lambda x: {"y": wave(x)})


@honest(4, "a named tuple")
def named_tuple(time: Time) -> Pair:
    return pair(lambda x: Named(fast(x)), reference=lambda x: Named(wave(x)))


@honest(4, "a frozen dataclass with slots")
def frozen(time: Time) -> Pair:
    return pair(lambda x: Frozen(fast(x)), reference=lambda x: Frozen(wave(x)))


# --- 5, 6, 7: cached answers, deferred work, behaviour that changes -----------------------------------------


@fault(5, "an answer kept by shape", "an earlier answer is replayed", stage="integrity")
def by_shape(time: Time) -> Pair:
    answers: dict[Any, Any] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        # Each answer is returned twice, so that a proof which draws each shape once sees nothing.
        answer = answers.pop(x.shape, None)
        if answer is None:
            answers[x.shape] = fast(x)
            return answers[x.shape].clone()
        return answer

    return pair(optimized)


def kept_by(key: Any, *, clone: bool = True) -> Any:
    """Return an optimized side that returns a stored answer for a known key."""
    answers: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        found = key(x)
        if found not in answers:
            answers[found] = fast(x)
        return answers[found].clone() if clone else answers[found]

    return optimized


@fault(5, "an answer kept by a sum", "keeps answers by a part of the values, or by their sum", stage="integrity")
def by_sum(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, round(float(x.double().sum()), 2))))


@fault(5, "an answer kept by values in bfloat16", "differ from earlier ones in their last digits", stage="integrity")
def kept_by_half_precision(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, *x.bfloat16().flatten().tolist())))


@honest(5, "an answer kept by all values")
def kept_by_all(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, *x.flatten().tolist())))


@fault(
    5, "an answer kept by the first values", "keeps answers by a part of the values, or by their sum", stage="integrity"
)
def by_first(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, *x.flatten()[:8].tolist())))


@fault(
    5, "an answer kept by probed values", "keeps answers by a part of the values, or by their sum", stage="integrity"
)
def by_probes(time: Time) -> Pair:
    def key(x: torch.Tensor) -> Any:
        every = x.flatten().tolist()
        return (x.shape, *(every[at * (len(every) - 1) // 4] for at in range(5) if every))

    return pair(kept_by(key))


@fault(
    5, "an answer kept by all but a number", "where its inputs differ from earlier ones in s alone", stage="integrity"
)
def but_a_number(time: Time) -> Pair:
    answers: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor, s: float) -> torch.Tensor:
        found = (x.shape, *x.flatten().tolist())
        if found not in answers:
            answers[found] = x * s
        return answers[found].clone()

    inputs = {**X, "s": scalar(floats(0.5, 2))}
    return pair(optimized, reference=lambda x, s: x * s, inputs=inputs, workloads=[])


@fault(5, "an answer that is kept and handed out", "what a caller writes into it comes back", stage="integrity")
def handed_out(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, *x.flatten().tolist()), clone=False))


@honest(5, "an answer that is kept by all values, and copied")
def by_all(time: Time) -> Pair:
    return pair(kept_by(lambda x: (x.shape, *x.flatten().tolist())))


@fault(5, "an answer kept by the version of its values", "it replays earlier answers", timed=True)
def by_version(time: Time) -> Pair:
    last: list[Any] = [None, -1, None]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        if last[0] is not x or last[1] != x._version:
            time.spend(3e-3)
            last[:] = [x, x._version, fast(x)]
        time.spend(1e-4)
        return last[2].clone()

    return timed_pair(time, optimized)


@fault(5, "an answer kept by address", "keeps answers by address or identity", stage="integrity")
def by_address(time: Time) -> Pair:
    answers: dict[int, Any] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        kept = answers.get(x.data_ptr())
        if kept is None or kept[0] is not x:
            answers[x.data_ptr()] = kept = (x, fast(x))
        return kept[1].clone()

    return pair(optimized)


@fault(5, "an answer kept by content", "it replays earlier answers", timed=True)
def by_content(time: Time) -> Pair:
    answers: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        key = (x.shape, x.dtype, x.numpy(force=True).tobytes())
        time.spend(1e-5 if key in answers else 4e-3)
        if key not in answers:
            answers[key] = fast(x)
        return answers[key].clone()

    return timed_pair(time, optimized)


@fault(5, "an answer kept by content, looked up at once", "it replays earlier answers", timed=True)
def by_few_elements(time: Time) -> Pair:
    answers: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        key = (x.shape, x.dtype, x.stride(), x.double().sum().item(), x.flatten()[:2].tolist().__repr__())
        time.spend(2e-6 if key in answers else 1e-3)
        if key not in answers:
            answers[key] = fast(x)
        return answers[key].clone()

    return timed_pair(time, optimized)


@honest(5, "a table kept by size", timed=True)
def table_by_size(time: Time) -> Pair:
    tables: dict[Any, torch.Tensor] = {}

    def optimized(x: torch.Tensor) -> torch.Tensor:
        time.spend(1e-3 if shaped(x) in tables else 5e-3)
        quarter = tables.setdefault(shaped(x), torch.full(x.shape, 0.25, dtype=x.dtype, device=x.device))
        return torch.exp(x * quarter).mul_(x.sin())

    return timed_pair(time, optimized)


@fault(6, "the first of sixteen does the work of all", "some calls do the work of the others", timed=True)
def first_of_sixteen(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        time.spend(16e-3 if calls[0] % 16 == 0 else 1e-4)
        calls[0] += 1
        return fast(x)

    return timed_pair(time, optimized)


@honest(6, "a time that varies", timed=True)
def varying(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(1e-3 * (1 + calls[0] % 3))
        return fast(x)

    return timed_pair(time, optimized)


@fault(7, "other answers after sixty calls", "drifts: right at first", stage="integrity")
def after_calls(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        # The integrity proof draws several small inputs, and counts the calls at one size.
        return fast(x) if calls[0] < 60 else torch.zeros_like(x)

    return pair(optimized, sizes={})


@fault(7, "no work once it is timed", "it was right before it was timed", timed=True)
def while_timed(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(1e-3)
        return fast(x) if calls[0] < 12 else torch.zeros_like(x)

    return timed_pair(time, optimized)


@honest(7, "buffers made by the first calls", timed=True)
def warms_up(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(1e-3 if calls[0] > 3 else 50e-3)
        return fast(x)

    return timed_pair(time, optimized)


# --- 8, 9, 11, 12 --------------------------------------------------------------------------------------------


@fault(8, "L2 set aside", "bytes of L2 aside for persisting lines", timed=True, gpu=True)
def persisting(time: Time) -> Pair:
    import ctypes

    def optimized(x: torch.Tensor) -> torch.Tensor:
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(16 << 20))
        return slow_cuda(x)

    return cuda_pair(optimized)


@honest(8, "L2 left alone", timed=True, gpu=True)
def not_persisting(time: Time) -> Pair:
    return cuda_pair(lambda x: slow_cuda(x).contiguous())


@fault(9, "a time of zero", "took 0 s: the clock cannot be trusted", timed=True)
def no_time(time: Time) -> Pair:
    return timed_pair(time, fast)


@honest(9, "a very short time", timed=True)
def short_time(time: Time) -> Pair:
    return timed_pair(time, lasting(time, 2e-7, fast))


@fault(
    9, "faster than the device can be", "this device needs", "does not do the work, or cost= overstates it", timed=True
)
def below_the_floor(time: Time) -> Pair:
    from perfsuite import Cost

    cost = Cost(flops=lambda m, n: 1e14)
    return timed_pair(time, lasting(time, 1e-3, fast), cost=cost)


@fault(11, "a reference that sets the precision", "the reference side sets torch's float32 matmul precision to medium")
def sets_precision(time: Time) -> Pair:
    def reference(x: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("medium")
        return wave(x)

    return pair(fast, reference=reference)


@fault(11, "a reference in half precision", "it is rounded to half precision inside; take out its casts")
def half_reference(time: Time) -> Pair:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(x.bfloat16()) * torch.exp(x.bfloat16() / 4)).to(x.dtype)

    return pair(reference, reference=lambda x: reference(x).clone())


@fault(11, "a reference that compiles while it is timed", "a slow straw man", timed=True)
def straw_man(time: Time) -> Pair:

    compiled = [0]

    def reference(x: torch.Tensor) -> torch.Tensor:
        compiled[0] += 1
        time.spend(6e-3)
        return wave(x)

    made = pair(lasting(time, 1e-3, fast), reference=reference)
    compilations.graphs = lambda: compiled[0]
    return made


@honest(11, "a reference that puts the precision back")
def restores_precision(time: Time) -> Pair:
    def reference(x: torch.Tensor) -> torch.Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return wave(x)
        finally:
            torch.set_float32_matmul_precision(before)

    return pair(fast, reference=reference)


@fault(12, "tuning while it is timed", "or tune and compile while they are timed", timed=True)
def tunes(time: Time) -> Pair:
    calls = [0]

    def optimized(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        time.spend(100e-3 if calls[0] % 40 == 0 else 1e-3)
        return fast(x)

    return timed_pair(time, optimized)


@honest(12, "tuning once, at the first call of a size", timed=True)
def tunes_once(time: Time) -> Pair:
    known: set[Any] = set()

    def optimized(x: torch.Tensor) -> torch.Tensor:
        time.spend(1e-3 if shaped(x) in known else 500e-3)
        known.add(shaped(x))
        return fast(x)

    return timed_pair(time, optimized)
