import contextlib
import gc
import os

import pytest
import torch
import torch.distributed as dist
from scale import ranks, steps

from optimized.distributed import graphed_ddp as module
from optimized.distributed.graphed_ddp import graphed_ddp as optimized
from perfsuite import Pair, Workload, floats, size, stateful, tensor
from reference.distributed.graphed_ddp import graphed_ddp as reference

BOUNDED = floats(-2, 2)


def weight(*dims):
    """Return the spec of a parameter; it is contiguous, because DistributedDataParallel warns about other layouts."""
    return tensor(*dims, values=floats(-1, 1), layouts=("contiguous",))


def without_loss(make):
    """Return a side whose steps return no loss.

    Each rank has the loss of its own rows, which no single process can compute; the weights depend on every step.
    """

    def made(weights):
        step = make(weights)

        def stepped(inputs, targets):
            step(inputs, targets)

        return stepped

    return made


graphed_ddp = Pair(
    reference=stateful(without_loss(reference)),
    optimized=stateful(without_loss(optimized), settle=module.WARMUP + 1),
    inputs={"weights": [weight("hidden", "features"), weight("hidden", "hidden"), weight("outputs", "hidden")]},
    step_inputs={
        "inputs": tensor("ranks * rows", "features", values=BOUNDED, by_rank=0),
        "targets": tensor("ranks * rows", "outputs", values=BOUNDED, by_rank=0),
    },
    mutates={"weights"},
    sizes={"rows": size(1, 9), "features": size(1, 17), "hidden": size(1, 17), "outputs": size(1, 9)},
    # Enough steps for the warm-up, the capture and a few replays.
    steps=steps(cpu=(1, 2, 5), otherwise=(1, 2, 17)),
    ranks=ranks(2, 4),
    workloads=[
        Workload("alone", rows=64, features=256, hidden=512, outputs=64, clock="wall", device="cuda", host_syncs=0),
        Workload("dp2", ranks=2, rows=64, features=256, hidden=512, outputs=64, clock="wall", device="cuda"),
        Workload("cpu", rows=16, features=32, hidden=64, outputs=8, clock="wall", device="cpu"),
    ],
)


@contextlib.contextmanager
def alone(device):
    """Run a process group whose only rank is this process."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # NCCL waits for the graphs that contain its collectives
        dist.destroy_process_group()


@pytest.mark.parametrize("call", [reference, optimized])
def test_two_steps_match_hand_computation(call):
    with alone("cpu"):
        weights = [torch.tensor([[2.0]])]
        step = call(weights, lr=0.25, momentum=0.5)
        # The error is 2 * 1 - 1, its square's gradient 2 * 1.
        assert step(torch.tensor([[1.0]]), torch.tensor([[1.0]])).item() == 1.0
        assert weights[0].item() == 1.5
        # The error is 1.5 * 2 - 3 = 0: only half of the first gradient, the momentum, moves the weight.
        assert step(torch.tensor([[2.0]]), torch.tensor([[3.0]])).item() == 0.0
        assert weights[0].item() == 1.25


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a CUDA device")
def test_reason_without_a_gpu_is_the_missing_cuda_device():
    with alone("cpu"):
        step = optimized([torch.ones(2, 2)])
        for _ in range(module.WARMUP + 2):
            step(torch.ones(3, 2), torch.ones(3, 2))
    assert (step.reason, step.captures) == ("there is no CUDA device", 0)


def test_group_is_created_once_with_nccl_error_handling_off(monkeypatch):
    made = []
    new_group = dist.new_group
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setattr(dist, "new_group", lambda: made.append([os.environ[n] for n in names]) or new_group())
    with alone("cpu"):
        optimized([torch.ones(2, 2)])
        optimized([torch.ones(2, 2)])
    assert made == [["0", "0"]]


def drawn(rows, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, n, generator=generator).to(device) for n in (5, 3)]


@pytest.mark.gpu
def test_captured_steps_match_the_reference_after_weights_change_on_a_gpu():
    def trained(call):
        weights = [t.T.contiguous() for t in (torch.randn(5, 7), torch.randn(7, 3))]
        weights = [w.to("cuda") for w in weights]
        step = call(weights)
        losses = []
        for i in range(3 * module.WARMUP + 4):
            if i == 2 * module.WARMUP:
                weights[0].mul_(0.5)  # as a loaded checkpoint does
            losses.append(step(*drawn(4 if i % 2 else 6, i, "cuda")))
        return torch.stack(losses), weights, getattr(step, "captures", None), getattr(step, "reason", None)

    with alone("cuda"):
        torch.manual_seed(0)
        expected, of_reference, *_ = trained(reference)
        torch.manual_seed(0)
        losses, weights, *said = trained(optimized)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
        for w, e in zip(weights, of_reference, strict=True):
            torch.testing.assert_close(w, e, rtol=1e-4, atol=1e-6)
        assert said == [2, None]


@pytest.mark.gpu
def test_captured_step_does_not_wait_on_a_gpu(no_host_sync):
    with alone("cuda"):
        step = optimized([torch.ones(3, 5, device="cuda")])
        batch = drawn(4, 0, "cuda")
        for _ in range(module.WARMUP + 1):
            step(*batch)
        with no_host_sync():
            step(*batch)
        del step
