import pytest
import torch

from optimized.memory import adaptive_cleanup as module
from optimized.memory.adaptive_cleanup import adaptive_cleanup as optimized
from optimized.memory.adaptive_cleanup import can_return_memory
from perfsuite import Cost, Pair, Workload, size, stateful, tensor
from reference.memory.adaptive_cleanup import adaptive_cleanup as reference

GIB = 1 << 30


def window(cleaned, **options):
    """Return a side with a training window that needs memory of its own while it runs."""

    def make(weight):
        def step(x):
            return torch.relu(x @ weight) @ weight.t()

        return cleaned(step, **options)

    return make


def never(step):
    return reference(step, every=0)


BYTES = lambda B, D: 4 * (2 * B * D + D * D)  # noqa: E731

adaptive_cleanup = Pair(
    reference=stateful(window(reference)),
    optimized=stateful(window(optimized)),
    inputs={"weight": tensor("D", "D")},
    step_inputs={"x": tensor("B", "D")},
    gradients=False,
    sizes={"B": size(0, 9), "D": size(1, 9)},
    rivals={"never": stateful(window(never))},
    workloads=[
        # Ten calls in a row, in which the reference empties the cache once.
        Workload("windows10", B=4096, D=1024, clock="wall", device="cuda", repeat=10),
        Workload("cpu", B=16, D=64, clock="wall", device="cpu", repeat=10),
    ],
    cost=Cost(bytes=BYTES, flops=lambda B, D: 4 * B * D * D),
)


@pytest.mark.parametrize(
    ("reserved", "allocated", "free", "helps"),
    [
        (120, 118, 2, False),  # nearly all in use: the source's rule would empty it here
        (120, 60, 60, False),  # memory is not scarce
        (120, 60, 2, True),
        (120, 60, 14, False),  # a tenth of the device is free
        (120, 60, 13, True),
        (60, 53, 2, False),  # returning a twentieth of the device, or less, is not worth it
        (60, 52, 2, True),
    ],
)
def test_can_return_memory_only_if_memory_is_scarce_and_enough_is_unused(reserved, allocated, free, helps):
    assert can_return_memory(reserved * GIB, allocated * GIB, free * GIB, 140 * GIB) is helps


@pytest.mark.parametrize("call", [reference, optimized])
@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_cache_is_emptied_once_every_n_calls(call, every, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "_capturing", lambda: False)
    monkeypatch.setattr(module, "_should_empty", lambda: True)
    step = call(lambda x, *, y: x + y, every=every)
    for calls in range(1, 8):
        assert step(calls, y=1) == calls + 1
        assert len(emptied) == (calls // every if every else 0)


@pytest.mark.parametrize("reason", ["capturing", "enough"])
def test_cache_is_not_emptied_during_capture_or_if_it_does_not_help(reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("emptied"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "_capturing", lambda: reason == "capturing")
    monkeypatch.setattr(module, "_should_empty", lambda: reason == "capturing")
    step = optimized(lambda: None, every=1)
    step()


@pytest.mark.parametrize("free", [2, 60])
def test_should_empty_compares_the_memory_of_the_current_device(free, monkeypatch):
    devices = {3: {"mem_get_info": (free, 140), "memory_reserved": 120, "memory_allocated": 60}}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in devices[3]:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: devices[device][name])
    assert module._should_empty() is (free == 2)


@pytest.mark.gpu
def test_should_empty_reports_unused_memory_of_a_gpu(monkeypatch):
    total = 1 << 26
    torch.empty(total, dtype=torch.uint8, device="cuda")  # the allocator keeps its memory
    for free in (0, total):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        assert module._should_empty() is (free == 0)
