import functools
import gc
import math
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from optimized.graphs import cuda_graph_step as module
from optimized.graphs.cuda_graph_step import CudaGraphStep
from optimized.graphs.cuda_graph_step import cuda_graph_step as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, side, size, stateful, tensor
from reference.graphs.cuda_graph_step import cuda_graph_step as reference
from suite.backends import cudnn_benchmark, deterministic_convolutions

LAYERS = 24


def network(graphed):
    """Return a recurrent step of many small kernels, which updates its state and returns an output for each input."""

    def make(state, weight):
        def step(x):
            h = x
            for _ in range(LAYERS):
                h = torch.tanh(h @ weight + state)
            state.mul_(0.9).add_(h.sum(0), alpha=0.01)
            return h

        return graphed(step)

    return make


cuda_graph_step = Pair(
    reference=stateful(network(reference)),
    optimized=stateful(network(optimized), settle=module.WARMUP + 1),
    inputs={"state": tensor("D"), "weight": tensor("D", "D", values=floats(-0.5, 0.5))},
    step_inputs={"x": tensor("B", "D")},
    mutates={"state"},
    gradients=False,
    sizes={"B": size(1, 9), "D": size(1, 9)},
    steps=(1, 2, 17),
    rivals={
        "compile": compiled(stateful(side(network(reference), devices=("cuda",)))),
        "reduce_overhead": compiled(
            stateful(side(network(reference), devices=("cuda",)), settle=3), mode="reduce-overhead"
        ),
    },
    workloads=[
        Workload("launches72", B=16, D=256, clock="wall", device="cuda", speedup=2.0, host_syncs=0),
        Workload("cpu", B=4, D=16, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=lambda B, D: 4 * (2 * B * D + D * D + 2 * D),
        flops=lambda B, D: 2 * LAYERS * B * D * D,
    ),
)


class Graphs:
    """Backend that replays as CUDA does: over the static inputs, into the capture's outputs, without Python's effects.

    `state` lists the tensors that the step changes besides its inputs: a capture leaves them unchanged.
    """

    def __init__(self, *state):
        self.state = state
        self.warmed = self.captured = self.replayed = 0

    def aside(self, call, device):
        self.warmed += 1
        return call()

    def capture(self, call, device):
        self.captured += 1
        before = [t.clone() for t in self.state]
        outputs = call()
        for t, kept in zip(self.state, before, strict=True):
            t.copy_(kept)

        def replay():
            self.replayed += 1
            again = call()
            if outputs is not again and isinstance(outputs, torch.Tensor):
                outputs.copy_(again)

        return outputs, replay


def test_warm_up_calls_run_the_step_and_later_calls_replay_it():
    state = torch.zeros(3)
    graphs = Graphs(state)
    step = optimized(lambda x: state.add_(x).clone(), warmup=2, backend=graphs)
    for call in range(1, 8):
        assert step(torch.ones(3)).tolist() == [call] * 3
    assert state.tolist() == [7.0] * 3
    assert (graphs.warmed, graphs.captured, graphs.replayed) == (2, 1, 5)
    assert (step.captures, step.reason) == (1, None)


def test_outputs_are_copies_of_the_graph_memory():
    step = optimized(lambda x: x * 2, warmup=1, backend=Graphs())
    kept = [step(torch.full((2,), float(i))) for i in range(5)]
    assert [t[0].item() for t in kept] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert len({t.data_ptr() for t in kept}) == 5


def test_input_that_the_step_changes_is_changed_and_returned_itself():
    step = optimized(lambda x, y: x.add_(y), warmup=1, backend=Graphs())
    for _ in range(4):
        x, y = torch.zeros(2), torch.ones(2)
        assert step(x, y) is x
        assert x.tolist() == [1.0, 1.0]
        assert y.tolist() == [1.0, 1.0]


def test_change_by_an_unknown_kernel_is_copied_back_only_if_in_mutates():
    def unseen(x, y):
        x.data.add_(y)  # does not increase the version counter
        return y + 0

    for mutates, value in (((), 0.0), ((0,), 1.0)):
        step = CudaGraphStep(unseen, warmup=1, mutates=mutates, backend=Graphs())
        step(torch.zeros(2), torch.ones(2))
        x = torch.zeros(2)
        step(x, torch.ones(2))
        assert x[0].item() == value


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(4), 1.0),
        (torch.ones(3, dtype=torch.float64), 1.0),
        (torch.ones(6)[::2], 1.0),
        (torch.ones(3), 2.0),
    ],
    ids=["shape", "dtype", "strides", "value"],
)
def test_inputs_of_another_form_get_their_own_graph(other):
    graphs = Graphs()
    step = optimized(lambda x, factor: x * factor, warmup=1, backend=graphs)
    for x, factor in ((torch.ones(3), 1.0), other) * 3:
        result = step(x, factor)
        assert result.dtype == x.dtype
        assert result.tolist() == (x * factor).tolist()
    assert graphs.captured == 2


@contextmanager
def autocast(dtype):
    """Set CUDA's autocast dtype, also on machines without a CUDA device."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextmanager
def precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def by_operator():
    """Set the precision of products alone, so that torch.get_float32_matmul_precision raises."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


MODES = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "float16": lambda: autocast(torch.float16),
    "bfloat16": lambda: autocast(torch.bfloat16),
    "medium": lambda: precision("medium"),
    "by_operator": by_operator,
    "TF32 in cuDNN": lambda: torch.backends.cudnn.flags(enabled=True, allow_tf32=True),
    "benchmark": lambda: cudnn_benchmark(on=True),
    "deterministic": deterministic_convolutions,
}


def test_each_mode_and_setting_gets_its_own_graph():
    graphs = Graphs()
    step = optimized(lambda x: x.add_(1), warmup=1, graphs=len(MODES), backend=graphs)
    for _ in range(3):
        for mode in MODES.values():
            with mode():
                x = torch.ones(2)
                assert step(x) is x
                assert x.tolist() == [2.0, 2.0]
                assert step.reason is None
    assert (graphs.warmed, graphs.captured, graphs.replayed) == tuple(n * len(MODES) for n in (1, 1, 2))


def test_most_recently_used_graphs_are_kept():
    graphs = Graphs()
    step = optimized(lambda x: x + 1, warmup=1, graphs=2, backend=graphs)
    for n in (1, 2, 1, 3):
        step(torch.ones(n))
        step(torch.ones(n))
    assert graphs.captured == 3
    step(torch.ones(1))
    assert graphs.captured == 3
    step(torch.ones(2))
    step(torch.ones(2))
    assert graphs.captured == 4


def test_defaults_are_three_warm_up_calls_and_four_graphs():
    graphs = Graphs()
    step = optimized(lambda x: x + 1, backend=graphs)
    for n in range(1, 6):
        for _ in range(4):
            step(torch.ones(n))
    assert (graphs.warmed, graphs.captured) == (15, 5)
    step(torch.ones(2))
    assert graphs.warmed == 15
    step(torch.ones(1))
    assert graphs.warmed == 16


def sign_of(number):
    """Return a number with the sign of a number, of its imaginary part, or of the only number in a list."""
    number = number[0] if isinstance(number, list) else number
    return number.imag if isinstance(number, complex) else number


def test_inputs_of_any_layout_are_replayed_correctly():
    captured = []

    class Seen(Graphs):
        def capture(self, call, device):
            seen.clear()
            made = super().capture(call, device)
            captured.append(seen[0])
            return made

    seen, graphs = [], Seen()
    step = optimized(lambda x: (seen.append(x.stride()), x * 2)[1], warmup=1, backend=graphs)
    drawn = torch.randn(4, 6)
    for x in (drawn.t(), drawn[:, ::2], torch.ones(0, 3), torch.randn(1).expand(5)):
        for _ in range(3):
            assert torch.equal(step(x), x * 2)
    # Elements of an expanded tensor share memory, which a copy cannot be written into.
    assert captured == [(1, 6), (6, 2), (3, 1), (1,)]
    assert graphs.replayed == 8


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, -0.0), (1, True), (1, 1.0), (complex(0, 0.0), complex(0, -0.0)), ([0.0], [-0.0])]
)
def test_numbers_that_are_equal_but_not_the_same_are_captured_apart(first, second):
    step = optimized(
        lambda x, number: torch.full_like(x, math.copysign(1, sign_of(number))), warmup=1, backend=Graphs()
    )
    for number in (first, second, first):
        for _ in range(2):
            assert step(torch.ones(1), number).item() == math.copysign(1, sign_of(number))
    assert step.captures == 2


def test_nan_as_an_input_is_captured_only_once():
    step = optimized(lambda x, number: x * number, warmup=1, backend=Graphs())
    for _ in range(5):
        step(torch.ones(1), float("nan"))
    assert step.captures == 1


def test_step_without_tensors_is_captured_on_the_given_device():
    state = torch.zeros(2)
    graphs = Graphs(state)
    step = optimized(lambda: state.add_(1), warmup=1, device="cpu", backend=graphs)
    for _ in range(5):
        step()
    assert state.tolist() == [5.0, 5.0]
    assert (graphs.captured, graphs.replayed) == (1, 4)
    assert "several devices" in str(step._unfit([torch.ones(1, device="meta")]))


def test_cuda_without_an_index_is_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(module._with_index(torch.device(d))) for d in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]


class Refuses(Graphs):
    def capture(self, call, device):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_step_that_cannot_be_captured_runs_eagerly_and_warns_once():
    step = optimized(lambda x: x * 3, warmup=1, backend=Refuses())
    step(torch.ones(1))
    with pytest.warns(
        RuntimeWarning, match=r"cuda_graph_step runs eagerly: .* not permitted when stream is capturing$"
    ) as said:
        assert step(torch.ones(1)).item() == 3.0
    assert [w.filename for w in said] == [__file__]  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(torch.ones(1)).item() == 3.0
    assert "cannot be captured" in step.reason
    assert step.captures == 0


def test_a_value_that_changes_at_each_call_is_reported_and_not_kept():
    step = optimized(lambda x, i: x * i, warmup=3, backend=Graphs(torch.zeros(1)))
    with pytest.warns(RuntimeWarning, match="an input that is no tensor changes from call to call") as said:
        results = [step(torch.ones(1), call).item() for call in range(200)]
    assert results == list(range(200))
    assert len(said) == 1
    assert said[0].filename == __file__  # the caller's line
    assert len(step._seen) == module.FORMS
    assert step.captures == 0


def test_failed_capture_restores_the_stream_and_the_generator_state(monkeypatch):
    """If ending a failed capture also fails, PyTorch leaves the capture's stream the current one."""
    now = {"stream": "own", "state": "before"}

    class Graph:
        def __init__(self, graph, **options):
            pass

        def __enter__(self):
            now.update(stream="the capture's", state="capturing")

        def __exit__(self, *error):
            raise RuntimeError("capture invalidated")

    class Generator:
        def clone_state(self):
            return now["state"]

        def graphsafe_set_state(self, state):
            now["state"] = state

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(module, "_generator", lambda device: Generator())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "aside")
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now["stream"])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.update(stream=stream))
    with pytest.raises(RuntimeError, match="capture invalidated"):
        module.CudaGraphs().capture(lambda: None, torch.device("cuda"))
    assert now == {"stream": "own", "state": "before"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "takes no tensor, so that its device is not known"),
        ((torch.ones(2, requires_grad=True),), "wants a gradient"),
        ((torch.ones(2), {1, 2}), "an input of type set"),
    ],
)
def test_inputs_that_cannot_be_replayed_run_eagerly(arguments, why):
    graphs = Graphs()
    step = optimized(lambda *given: len(given), warmup=1, backend=graphs)
    assert [step(*arguments) for _ in range(3)] == [len(arguments)] * 3
    assert why in step.reason
    assert graphs.warmed == graphs.captured == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a CUDA device")
def test_reason_without_a_gpu_is_the_missing_cuda_device():
    step = optimized(lambda x: x + 1)
    assert [step(torch.ones(1)).item() for _ in range(6)] == [2.0] * 6
    assert step.reason == "there is no CUDA device"


@pytest.mark.parametrize("option", ["warmup", "graphs"])
def test_bad_options_raise_value_error(option):
    with pytest.raises(ValueError, match=f"{option}=0"):
        optimized(lambda x: x, **{option: 0})


@pytest.mark.parametrize("fails", [False, True])
def test_cublas_workspaces_are_cleared_before_and_after_a_capture(fails, monkeypatch):
    """A graph writes to its cuBLAS workspace by address, so other graphs must not use that workspace."""
    events, collecting = [], []

    @contextmanager
    def recording(graph, **options):
        events.append("recording")
        yield

    def step():
        events.append("step")
        collecting.append(gc.isenabled())
        if fails:
            raise RuntimeError("no")
        return 1

    generator = SimpleNamespace(clone_state=lambda: 0, graphsafe_set_state=lambda state: None)
    monkeypatch.setattr(module, "_generator", lambda device: generator)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)
    for name in ("CUDAGraph", "Stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        assert module.CudaGraphs().capture(step, torch.device("cuda"))[0] == 1
    assert events == ["clear", "recording", "step", "clear"]
    assert collecting == [False]  # destroying objects during a capture can invalidate it
    assert gc.isenabled()


# --- on a GPU -------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
def test_state_changes_once_per_call_and_a_replay_does_not_wait_on_a_gpu(no_host_sync):
    state = torch.zeros(3, device="cuda")
    step = optimized(lambda x: state.add_(x).clone())
    kept = [step(torch.ones(3, device="cuda")) for _ in range(10)]
    assert [k[0].item() for k in kept] == [float(i) for i in range(1, 11)]
    assert (step.captures, step.reason) == (1, None)
    x = torch.ones(3, device="cuda")
    with no_host_sync():
        step(x)


@gpu
def test_step_that_waits_falls_back_to_eager_execution_on_a_gpu():
    step = optimized(lambda x: x * x.sum().item(), warmup=1)
    step(torch.ones(2, device="cuda"))
    with pytest.warns(RuntimeWarning, match="cuda_graph_step runs eagerly"):
        assert step(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert step(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert (torch.ones(4, device="cuda") + 1).sum().item() == 8.0


@gpu
def test_random_numbers_advance_after_a_failed_capture_on_a_gpu():
    step = optimized(lambda x: (torch.rand_like(x) + x) * x.sum().item(), warmup=1)
    step(torch.ones(2, device="cuda"))
    with pytest.warns(RuntimeWarning, match="cuda_graph_step runs eagerly"):
        step(torch.ones(2, device="cuda"))
    drawn = {tuple(torch.rand(4, device="cuda").tolist()) for _ in range(3)}
    step = optimized(lambda x: torch.rand_like(x) + x, warmup=1)
    drawn |= {tuple(step(torch.zeros(4, device="cuda")).tolist()) for _ in range(4)}
    assert (len(drawn), step.captures) == (7, 1)


@gpu
def test_random_numbers_advance_at_each_replay_on_a_gpu():
    step = optimized(lambda x: torch.rand_like(x) + x, warmup=1)
    drawn = [tuple(step(torch.zeros(4, device="cuda")).tolist()) for _ in range(6)]
    assert len(set(drawn)) == 6


@gpu
def test_each_shape_gets_its_own_graph_on_a_gpu():
    step = optimized(lambda x: x.cumsum(0), warmup=1)
    for n in (3, 5, 3, 5, 3, 5):
        assert step(torch.ones(n, device="cuda"))[-1].item() == n
    assert step.captures == 2


@gpu
def test_graphs_with_shared_memory_replay_in_any_order_on_a_gpu():
    """Two steps with separate sums replay in any order, although their intermediate results share memory."""
    sums = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]

    def step(x, sum_of, n):
        y = (x * 2).cumsum(0)
        sum_of.add_(y + n)
        return y[-1] + n

    graphs = module.CudaGraphs(torch.cuda.graph_pool_handle())
    steps = [
        module.CudaGraphStep(functools.partial(step, sum_of=sums[n], n=n), warmup=1, backend=graphs) for n in range(2)
    ]
    x = torch.ones(1 << 20, device="cuda")
    found = {(n, round): steps[n](x) for round in range(5) for n in ((0, 1) if round % 2 else (1, 0))}
    assert all(value.item() == 2 * len(x) + n for (n, _), value in found.items())
    for n in range(2):
        assert torch.equal(sums[n], 5 * ((x * 2).cumsum(0) + n))
        assert (steps[n].captures, steps[n].reason) == (1, None)


WORKSPACES = """
import gc
import torch
from optimized.graphs.cuda_graph_step import cuda_graph_step

torch.manual_seed(0)
x = torch.randn(64, 32768, device="cuda")

def make():
    w = torch.randn(32768, 64, device="cuda")  # long and narrow: the product is split, and summed in the workspace
    return cuda_graph_step(lambda x: (x @ w, x.bfloat16() @ w.bfloat16()), warmup=1)

other, kept = make(), make()
for step in (other, kept):
    for _ in range(3):
        wanted = step(x)
assert (other.captures, kept.captures) == (1, 1)
del other, step
gc.collect()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
filler = [torch.zeros(1 << 20, device="cuda") for _ in range(64)]  # where the workspaces were, if they were freed
for _ in range(3):
    assert all(map(torch.equal, kept(x), wanted))
torch.cuda.synchronize()
assert not any(f.any().item() for f in filler)
"""


@gpu
def test_graph_survives_the_workspaces_of_other_graphs_on_a_gpu():
    done = subprocess.run([sys.executable, "-c", WORKSPACES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
