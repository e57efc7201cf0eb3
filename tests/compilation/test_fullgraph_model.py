import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scale import draws
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from optimized.compilation import fullgraph_model as compiled
from optimized.compilation.compiled_function import _make_handles, compile_quietly, replay_begins
from optimized.compilation.fullgraph_model import fullgraph_coder as optimized_coder
from optimized.compilation.fullgraph_model import fullgraph_model as optimized
from optimized.compilation.fullgraph_model import fullgraph_operator as optimized_operator
from perfsuite import Cost, Pair, Workload, floats, integers, module, side, size, tensor
from perfsuite import compiled as compiled_side
from reference.compilation.fullgraph_model import fullgraph_coder as reference_coder
from reference.compilation.fullgraph_model import fullgraph_model as reference
from reference.compilation.fullgraph_model import fullgraph_operator as reference_operator
from suite.leak_cnn.costs import TRAINING, training_cost
from suite.leak_cnn.trial import Network, near_a_threshold, off_thresholds, on_network
from suite.ups.trial import BATCH, HEADS, LATENTS, LAYERS, OPERATOR, PLANE, STEP, operator, operator_cost, plane_decoder

EAGER = side(on_network(reference), devices=("cuda",))


@functools.cache
def replayed():
    return compile_quietly(on_network(reference), options={"triton.cudagraphs": True})


def reduce_overhead(*arguments):
    """Call the source's "before" version; copy the loss, because the next replay overwrites it."""
    replay_begins()
    return replayed()(*arguments).clone()


fullgraph_model = Pair(
    reference=on_network(reference),
    optimized=on_network(optimized),
    inputs={
        "network": module(Network),
        "segments": tensor("N", 1, 32, 1, values=floats(-3, 3), differentiable=False),
        "labels": tensor("N", dtype="int64", values=integers(0, 5)),
        "class_weights": tensor(5, values=floats(0.5, 2), differentiable=False),
    },
    # Each shape is compiled separately, which takes seconds.
    sizes={"N": size(3, 4), "c1": size(3, 3), "c2": size(4, 4), "c3": size(5, 5), "h": size(6, 6)},
    max_examples=draws(cpu=1),
    adjust=off_thresholds,
    excuse=near_a_threshold,
    unsupported={"two_graphs": "a replay writes over what the one before it kept for its backward pass"},
    rivals={"compile": compiled_side(EAGER), "reduce_overhead": side(reduce_overhead, devices=("cuda",))},
    workloads=[
        Workload(
            "batch5632_both",
            **{name: n for name, n in TRAINING.items() if name != "H"},
            clock="wall",
            direction="both",
            device="cuda",
        ),
        Workload("cpu", N=2, c1=4, c2=4, c3=4, h=8, clock="wall", direction="both", device="cpu"),
    ],
    cost=training_cost(),
)


@functools.cache
def captured():
    """Return the compiled step: one graph of forward and backward. PyTorch's operators run it; no code is generated."""
    return torch.compile(compiled.step_operator, backend="aot_eager", fullgraph=True, dynamic=False)


def captured_operator(operator, *inputs):
    if _get_current_dispatch_mode() is not None:
        return compiled.step_operator(operator, *inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing reads `.grad` of inputs that are not leaves
        return captured()(operator, *(t.contiguous() for t in inputs))


fullgraph_operator = Pair(
    reference=reference_operator,
    optimized=optimized_operator,
    inputs=STEP,
    # One shape only, because each is compiled.
    sizes={name: size(n, n) for name, n in {"B": 2, "T": 3, "L": 4, "heads": 2, "head_width": 4, "depth": 1}.items()},
    max_examples=6,
    unsupported={"two_graphs": "a replay writes over what the one before it kept for its backward pass"},
    rivals={"compile": compiled_side(side(reference_operator, devices=("cuda",)))},
    variants={"captured": captured_operator},
    workloads=[
        Workload("ups_both", **OPERATOR, clock="wall", direction="both", device="cuda", speedup=1.1),
        Workload("cpu", B=2, T=8, L=8, heads=2, head_width=8, depth=1, clock="wall", direction="both", device="cpu"),
    ],
    cost=operator_cost(),
)


def decoder_flops(B, T, L, heads, head_width, layers, Q, direction):
    """Count the operations of a decoder's matrix products."""
    width = heads * head_width
    of_a_point = 16 * width + layers * (2 * width**2 + 2 * T * width) + width**2 + width
    products = B * (Q * of_a_point + layers * T * L * 2 * width)
    return {"forward": 2, "backward": 4, "both": 6}[direction] * products


fullgraph_coder = Pair(
    reference=reference_coder,
    optimized=optimized_coder,
    inputs={
        "coder": module(plane_decoder),
        "values": tensor("B", "T", "L", values=floats(-2, 2)),
        "points": tensor("Q", 2, values=floats(0, 1), differentiable=False),
    },
    # One shape only, because each is compiled.
    sizes={
        name: size(n, n)
        for name, n in {"B": 2, "T": 3, "L": 4, "heads": 2, "head_width": 4, "layers": 1, "Q": 5}.items()
    },
    max_examples=6,
    rivals={"compile": compiled_side(side(reference_coder, devices=("cuda",)))},
    workloads=[
        # The grid of darcy2d; the second inverse loss decodes all of it.
        Workload(
            "darcy_both",
            **LATENTS,
            **HEADS,
            B=BATCH // 2,
            layers=LAYERS,
            Q=PLANE**2,
            clock="wall",
            direction="both",
            device="cuda",
        ),
        Workload(
            "cpu", B=2, T=8, L=8, heads=2, head_width=8, layers=1, Q=16, clock="wall", direction="both", device="cpu"
        ),
    ],
    cost=Cost(flops=decoder_flops),
)


@pytest.fixture
def compilations(monkeypatch):
    """Record the options given to torch.compile and the calls of its results; nothing is compiled."""
    asked, calls = [], []

    def compile_(function, **options):
        asked.append(options)
        return lambda *arguments: calls.append(1) or function(*arguments)

    monkeypatch.setattr(torch, "compile", compile_)
    compiled._compiled.cache_clear()
    yield asked, calls
    compiled._compiled.cache_clear()


def drawn():
    torch.manual_seed(0)
    weights = dict(Network(3, 4, 5, 6).named_parameters())
    return weights, torch.randn(3, 1, 32, 1), torch.tensor([0, 1, 2]), torch.ones(5)


def test_model_is_compiled_once_with_fullgraph(compilations):
    asked, calls = compilations
    expected = reference(*drawn())
    assert torch.equal(optimized(*drawn()), expected)
    assert torch.equal(optimized(*drawn()), expected)
    assert len(calls) == 2
    assert [options["fullgraph"] for options in asked] == [True]


def test_model_is_compiled_without_cuda_graphs_on_a_cpu(compilations):
    asked, _ = compilations
    optimized(*drawn())
    assert [(o["options"], o["dynamic"]) for o in asked] == [(None, False)]


class OnCuda(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.usefixtures("compilations")
def test_model_uses_cuda_graphs_on_cuda_and_returns_a_copy_of_the_loss(monkeypatch):
    asked, began, replays = [], [], []

    def compile_(function, **options):
        asked.append(options)
        own = torch.zeros(())

        def replay(*arguments):
            assert len(began) == len(replays) + 1  # called before each replay, not after it
            replays.append(own.copy_(function(*arguments).detach()))
            return own

        return replay

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiled, "replay_begins", lambda: began.append(1))
    weights, segments, *others = drawn()
    first = optimized(weights, segments.as_subclass(OnCuda), *others)
    optimized(weights, (segments + 1).as_subclass(OnCuda), *others)
    torch.testing.assert_close(first, reference(weights, segments, *others).detach())
    assert len(replays) == 2
    assert [(o["options"], o["dynamic"], o["fullgraph"]) for o in asked] == [({"triton.cudagraphs": True}, False, True)]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_model_runs_eagerly_under_a_dispatch_mode(compilations):
    _, calls = compilations
    with Watching():
        loss = optimized(*drawn())
    assert torch.equal(loss, reference(*drawn()))
    assert not calls


def test_training_loss_has_no_graph_break():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the modules that the compiler imports
        found = torch._dynamo.explain(compiled.training_loss)(*drawn())
    assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_operators_of_the_same_sizes_share_compiled_code(monkeypatch):
    compilations, graphs = [], []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    def compile_(function, **options):
        compilations.append(options)
        return whole(function, backend=counting, fullgraph=options["fullgraph"], dynamic=options["dynamic"])

    whole = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiled, "replay_begins", lambda: None)
    compiled._compiled.cache_clear()
    inputs = torch.randn(2, 3, 4), torch.rand(2), torch.ones(1, 2, 2)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = operator(4, 2, 4, 1)
        found = compiled._compiled(compiled.step_operator, True)(model, *inputs)
        torch.testing.assert_close(found, reference_operator(model, *inputs))
    compiled._compiled.cache_clear()
    assert len(graphs) == 1
    assert [(o["options"], o["fullgraph"]) for o in compilations] == [({"triton.cudagraphs": True}, True)]


@pytest.mark.usefixtures("compilations")
def test_operator_on_cuda_returns_a_copy_of_the_replayed_result(monkeypatch):
    began, owns = [], []

    def compile_(function, **options):
        def replay(*arguments):
            assert len(began) == len(owns) + 1
            owns.append(function(*arguments).detach())
            return owns[-1]

        return replay

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiled, "replay_begins", lambda: began.append(1))
    torch.manual_seed(0)
    model, latents, dt, scales = operator(4, 2, 4, 1), torch.randn(2, 3, 4), torch.rand(2), torch.rand(1, 2, 2)
    found = optimized_operator(model, latents.as_subclass(OnCuda), dt, scales)
    torch.testing.assert_close(torch.Tensor(found), reference_operator(model, latents, dt, scales).detach())
    assert found.data_ptr() != owns[0].data_ptr()


def test_operator_is_not_compiled_on_a_cpu(compilations):
    asked, _ = compilations
    inputs = operator(4, 2, 4, 1), torch.randn(2, 3, 4), torch.rand(2), torch.ones(1, 2, 2)
    assert torch.equal(optimized_operator(*inputs), reference_operator(*inputs))
    assert not asked


@pytest.mark.gpu
def test_graph_can_be_captured_in_another_thread_than_the_warm_up_on_a_gpu():
    """cuDNN needs a handle in each thread, and cannot create one during a capture."""
    convolve = compiled._compiled(lambda images, weights: torch.conv2d(images, weights).relu(), True)
    given = torch.randn(2, 3, 8, 8, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda")

    def called():
        replay_begins()
        return convolve(*given).clone()

    first = called()  # warm-up; the next call captures
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(called).result(), first)


def test_each_thread_creates_its_handles_once_per_device(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: calls.append("cuBLAS"))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: calls.append(str(device)))
    monkeypatch.setattr(torch.nn.functional, "conv1d", lambda *tensors: calls.append("cuDNN"))
    for _ in range(2):
        with ThreadPoolExecutor(1) as threads:
            for device in (0, 1, 0):
                threads.submit(_make_handles, device).result()
    assert calls == 2 * ["cuBLAS", "cuda:0", "cuDNN", "cuBLAS", "cuda:1", "cuDNN"]
