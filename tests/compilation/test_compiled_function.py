import math
import signal
import subprocess
import sys
import warnings
from subprocess import PIPE

import pytest
import torch
from scale import FULLY, draws

from optimized.compilation import compiled_function as module
from optimized.compilation.compiled_function import compiled_function as optimized
from perfsuite import Cost, Pair, Workload, compiled, floats, scalar, side, size, tensor
from reference.compilation.compiled_function import compiled_function as reference


def scripted(cost, states, beta):
    """Call the reference through torch.jit.script, which the source uses and PyTorch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(scripted, "function"):
            scripted.function = torch.jit.script(reference)
    return scripted.function(cost, states, beta)


def traffic(B, K, D, direction):
    forward = 4 * (B * K + B * K * D + B * D)
    backward = 4 * (2 * B * K + 2 * B * K * D + B * D)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


compiled_function = Pair(
    reference=reference,
    optimized=optimized,
    inputs={
        "cost": tensor("B", "K", values=floats(0, 8)),
        "states": tensor("B", "K", "D"),
        "beta": scalar(floats(0.5, 8)),
    },
    sizes={"B": size(0, 9), "K": size(1, 70), "D": size(0, 70)},
    max_examples=draws(cpu=2),  # some sizes are compiled separately
    rivals={
        "compile": compiled(side(reference, devices=("cuda",))),
        "scripted": side(scripted, devices=("cuda",)),
    },
    workloads=[
        Workload("batch16", B=16, K=2176, D=256, beta=5, device="cuda"),
        Workload("batch64", B=64, K=512, D=512, beta=5, device="cuda"),
        Workload("batch16_both", B=16, K=2176, D=256, beta=5, direction="both", device="cuda"),
        Workload("cpu", B=4, K=64, D=32, beta=5, clock="wall", device="cpu"),
    ],
    cost=Cost(
        bytes=traffic,
        flops=lambda B, K, D, direction: 2 * B * K * D * {"forward": 1, "backward": 2, "both": 3}[direction],
    ),
)


@pytest.mark.parametrize("call", [reference, optimized])
def test_equal_costs_get_equal_weights(call):
    states = torch.tensor([[[1.0], [3.0]]])
    assert call(torch.zeros(1, 2), states, 5.0).tolist() == [[2.0]]


@pytest.mark.parametrize("call", [reference, optimized])
def test_default_inverse_temperature_is_5(call):
    # Weights 1/4 and 3/4.
    cost, states = torch.tensor([[math.log(3.0) / 5, 0.0]]), torch.tensor([[[1.0], [3.0]]])
    assert call(cost, states).item() == pytest.approx(2.5)


@pytest.mark.parametrize("call", [reference, optimized])
def test_lowest_cost_gets_all_the_weight(call):
    states = torch.tensor([[[1.0], [3.0]]])
    assert call(torch.tensor([[0.0, 100.0]]), states, 5.0).tolist() == [[1.0]]


def test_failed_compilation_warns_once_and_runs_eagerly(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException("no compiler was found\nmore")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    module._compiled.cache_clear()
    try:
        cost, states = torch.zeros(1, 2), torch.ones(1, 2, 3)
        with pytest.warns(RuntimeWarning, match="compiled_function runs uncompiled: no compiler was found$") as said:
            assert optimized(cost, states).tolist() == [[1.0] * 3]
        assert [w.filename for w in said] == [__file__]  # the caller's line
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert optimized(cost, states).tolist() == [[1.0] * 3]
    finally:
        module._compiled.cache_clear()


def test_error_without_a_message_is_reported_by_its_type(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.TorchDynamoException

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    call = module.compile_if_possible(lambda x: x + 1, "it")
    with pytest.warns(RuntimeWarning, match="it runs uncompiled: TorchDynamoException$"):
        assert call(1) == 2


@FULLY  # it compiles with an empty cache
def test_compiler_warnings_neither_raise_nor_prevent_compilation(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the modules that it imports
        from torch._inductor import compile_fx

    def warns(*arguments, **options):
        compiled.append(1)
        warnings.warn("TensorFloat32 tensor cores available but not enabled", UserWarning, stacklevel=1)
        return inner(*arguments, **options)

    compiled = []
    inner = compile_fx.compile_fx_inner
    monkeypatch.setattr(compile_fx, "compile_fx_inner", warns)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # otherwise an earlier run's result would be used
    cost = torch.rand(3, 4, requires_grad=True)
    quiet = module.compile_quietly(lambda cost: torch.softmax(cost, 1).sum(0).exp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(cost).sum().backward()
    assert len(compiled) == 2  # forward and backward


def test_sigterm_does_not_end_compile_workers(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the modules that it imports
        from torch._inductor import compile_fx

    def works(*arguments):
        worker = subprocess.Popen([sys.executable, "-c", "print(input())"], stdin=PIPE, stdout=PIPE, text=True)
        worker.send_signal(signal.SIGTERM)
        answers.append(worker.communicate("still here")[0])

    def compiles(graph, inputs, inner_compile, config_patches):
        works()
        later.append(inner_compile)
        return graph

    answers, later = [], []
    monkeypatch.setattr(compile_fx, "compile_fx", compiles)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", works)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    module.compile_quietly(lambda x: x + 1)(torch.ones(2))
    later[0]()  # as when a backward pass is compiled
    assert answers == ["still here\n"] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


def test_recompile_limit_falls_back_to_eager_execution(monkeypatch):
    def fails(*arguments):
        raise torch._dynamo.exc.FailOnRecompileLimitHit("too many")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    call = module.compile_if_possible(lambda x: x + 1, "it", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="it runs uncompiled: too many$"):
        assert call(1) == 2


def test_twenty_static_shapes_are_each_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(module, "_inductor", lambda graph, inputs, **options: compiled.append(1) or graph)
    call = module.compile_if_possible(lambda x: x + 1, "it", fullgraph=True, dynamic=False)
    for _ in range(2):
        for n in range(2, 22):
            assert torch.equal(call(torch.ones(n)), torch.full((n,), 2.0))
    assert len(compiled) == 20


def test_ten_dtypes_and_gradient_modes_are_each_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(module, "_inductor", lambda graph, inputs, **options: compiled.append(1) or graph)
    call = module.compile_if_possible(lambda x: x * 2, "it", fullgraph=True, dynamic=True)
    floating = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    inputs = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in floating]
    inputs += [torch.ones(3, dtype=dtype) for dtype in (*floating, torch.int32, torch.int64)]
    for x in 2 * inputs:
        assert torch.equal(call(x), 2 * x)
    assert len(compiled) == 10


def test_cache_key_tag_differs_between_autocast_dtypes():
    tags = {module._cache_key_tag()}
    for dtype in (torch.bfloat16, torch.float16):
        for enabled in (True, False):
            with torch.autocast("cpu", dtype, enabled=enabled):
                tags.add(module._cache_key_tag())
    assert len(tags) == 3


def test_options_reach_the_backend(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the modules that it imports
        from torch._inductor import compile_fx

    given = []
    monkeypatch.setattr(
        compile_fx, "compile_fx", lambda graph, inputs, **options: given.append(options["config_patches"]) or graph
    )
    call = module.compile_quietly(lambda x: x + 1, options={"max_autotune": False})
    assert call(torch.ones(1)).item() == 2
    assert given == [{"max_autotune": False}]
