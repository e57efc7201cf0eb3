"""Multi-process measurements for the claims of ups: how the processes are launched, and what each of them does.

The network is the operator of ups alone, with a step of AdamW, so that DistributedDataParallel and `fully_shard` are
measured as torch provides them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from perfsuite.errors import first_line
from perfsuite.timing.profiler_counts import count_calls
from suite.claims.measuring import interleaved
from suite.seeding import seeded_on_cpu
from suite.techniques import implementation
from suite.ups.config import TrainConfig
from suite.ups.model import Block, Operator, make_operator, parameters

TIMEOUT = timedelta(seconds=120)
"""Time after which a collective fails if another rank has not joined it."""
KINDS = ("DistributedDataParallel", "fully_shard")
ORDERS = ("before", "after")
"""When the optimizer is built: before the network is wrapped, or after."""


class RankError(RuntimeError):
    """Raised if a rank fails; the message names the rank and says why."""


def launched(work: Callable[..., Any], ranks: int, gpus: int, *arguments: Any) -> list[Any]:
    """Call `work(device, *arguments)` in each of several new processes, and return the results by rank.

    work  a module-level function
    gpus  rank i gets GPU i modulo this number; 0: all ranks are on the CPU

    The default process group uses NCCL if each rank has a GPU of its own, otherwise gloo. RankError if a rank fails.
    """
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        with _handlers_kept():
            found: Mapping[int, Any] = elastic_launch(settings, _in_rank)(work, gpus, arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(f"rank {rank}: {_message(failure.message)}") from None
    return [found[rank] for rank in range(ranks)]


# --- what each rank does ----------------------------------------------------------------------------------------------


def wrapped_weights(device: torch.device, config: TrainConfig) -> dict[str, bool]:
    """Return whether a step changes the network's output, by how it is wrapped and when the optimizer was built."""
    return {
        f"{kind}, optimizer built {order} wrapping": _moves(device, config, kind, order)
        for kind in KINDS
        for order in ORDERS
    }


def held(device: torch.device, config: TrainConfig, batch: int) -> dict[str, dict[str, int]]:
    """Measure what a rank holds after steps of AdamW, by how the network is wrapped.

    parameters  number of parameters of the network
    own         bytes of its weights, gradients and moments
    peak        peak bytes of a step, with its activations, beyond those allocated before the network; only on a GPU
    """
    found = {}
    for kind in KINDS:
        gc.collect()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        network = wrapped(make_network(config, device), kind)
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            optimizer.zero_grad()
            loss_of(network, config, batch, device).backward()
            optimizer.step()
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        grads = [p.grad for p in network.parameters() if p.grad is not None]
        found[kind] = {
            "parameters": parameters(network),
            "own": sum(map(_bytes, [*network.parameters(), *grads, *states])),
        }
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            found[kind]["peak"] = torch.cuda.max_memory_allocated(device) - before
        del network, optimizer, states, grads
    return found


def reductions(device: torch.device, config: TrainConfig) -> dict[str, int]:
    """Count the all-reduces of a step, and their bytes, for three kinds of step.

    one              a step of one micro-batch
    without no_sync  a step of several micro-batches
    with no_sync     a step of several micro-batches, all but the last within `no_sync`
    """
    sent: list[int] = []
    network = DistributedDataParallel(make_network(config, device), device_ids=_ids(device))
    network.register_comm_hook(sent, lambda sent, bucket: _counted(sent, bucket))  # torch rejects string annotations
    found: dict[str, int] = {}
    for name, count, quiet in (
        ("warm-up", 1, False),  # after it DistributedDataParallel lays out its buckets again
        ("one", 1, False),
        ("without no_sync", config.accumulation, False),
        ("with no_sync", config.accumulation, True),
    ):
        sent.clear()
        network.zero_grad()
        for number in range(count):
            last = number == count - 1
            with network.no_sync() if quiet and not last else contextlib.nullcontext():
                loss_of(network, config, 2, device).backward()
        found |= {name: len(sent), f"{name}, bytes": sum(sent)}
    return found


def counted_and_held(device: torch.device, config: TrainConfig) -> dict[str, Any]:
    """Measure everything that needs no timing."""
    return {
        "moved": wrapped_weights(device, config),
        "held": held(device, config, config.batch_size if device.type == "cuda" else 2),
        "reductions": reductions(device, config),
    }


def graphed(device: torch.device, config: TrainConfig, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure steps of a network compiled with mode="reduce-overhead", inside DistributedDataParallel and around it.

    right     whether the gradients equal those of the eager network
    launches  launches of a step
    seconds   seconds of a step, by round
    error     why it failed, in one line
    """
    eager = DistributedDataParallel(make_network(config, device), device_ids=_ids(device), gradient_as_bucket_view=True)
    truth = _gradients(eager, config, device)
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {"eager": _call(eager, config, device)}
    for name, make in (("compiled inside", _compiled_inside), ("compiled around", _compiled_around)):
        try:
            network = make(make_network(config, device), device)
            for _ in range(4):  # compiles, captures, and replays twice
                gradients = _gradients(network, config, device)
        except Exception as error:  # the compiler's exceptions have no common class
            found[name] = {"right": False, "error": first_line(error) or type(error).__name__}
            continue
        apart = _distance(gradients, truth)
        found[name] = {"right": apart < ROUNDING_BF16, "apart": apart}
        calls[name] = _call(network, config, device)
    if device.type == "cuda":
        counts = count_calls({name: (_nothing, call) for name, call in calls.items()})
        for name, (_, launches) in counts.items():
            found.setdefault(name, {})["launches"] = launches
    for name, seconds in interleaved(device, rounds, calls, count=4).items():
        found.setdefault(name, {})["seconds"] = seconds
    return found


def all_reduce_times(
    device: torch.device, elements: int, rounds: int, count: int, variables: Mapping[str, str]
) -> tuple[list[float], list[float]]:
    """Return the seconds of an all-reduce by round, with these environment variables and without, in turn.

    NCCL reads its variables once per process. The processes therefore form two halves with the same devices and one
    group each, and only the first half sets the variables. One half waits while the other is timed.
    """
    half, rank = dist.get_world_size() // 2, dist.get_rank()
    first = rank < half
    if first:
        os.environ.update(variables)
    backend = "nccl" if device.type == "cuda" else "gloo"
    groups = [
        dist.new_group(list(ranks), timeout=TIMEOUT, backend=backend) for ranks in (range(half), range(half, 2 * half))
    ]
    group = groups[0 if first else 1]
    tensor = torch.ones(elements, device=device)
    seconds: list[float] = []
    for number in range(rounds + 1):  # round 0 warms up
        turns = (True, False) if number % 2 else (False, True)
        for turn in turns:
            dist.barrier()
            if turn == first:
                taken = interleaved(device, 1, {"": lambda: dist.all_reduce(tensor, group=group)}, count=count)[""][0]
                if number:
                    seconds.append(taken)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return _slowest(every[:half]), _slowest(every[half:])


def scaling(
    device: torch.device, config: TrainConfig, batches: Sequence[int], rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Return batch size per GPU → seconds of the slowest rank, by round.

    alone       a step of each rank without communication
    together    a step with DistributedDataParallel
    all-reduce  an all-reduce of the gradients alone
    """
    found: dict[int, dict[str, list[float]]] = {}
    for batch in batches:
        alone = make_network(config, device)
        together = DistributedDataParallel(
            make_network(config, device), device_ids=_ids(device), gradient_as_bucket_view=True
        )
        gradients = torch.zeros(sum(p.numel() for p in alone.parameters()), device=device)
        calls: dict[str, Callable[[], object]] = {
            "alone": _step(alone, config, batch, device),
            "together": _step(together, config, batch, device),
            "all-reduce": functools.partial(dist.all_reduce, gradients),
        }
        own = interleaved(device, rounds, calls, count=4)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        found[batch] = {name: _slowest([seconds[name] for seconds in every]) for name in calls}
    return found


# --- the network ------------------------------------------------------------------------------------------------------

ROUNDING_BF16 = 0.05
"""Two gradients under autocast to bfloat16 may differ by this share: the compiler rounds at other places."""


def make_network(config: TrainConfig, device: torch.device) -> Operator:
    """Build the operator, with the same weights in every rank."""
    with seeded_on_cpu(0):
        return make_operator(config).to(device)


def wrapped(network: Operator, kind: str) -> nn.Module:
    """Wrap the network as a rank trains it."""
    device = next(network.parameters()).device
    if kind == "DistributedDataParallel":
        return DistributedDataParallel(network, device_ids=_ids(device), gradient_as_bucket_view=True)
    for block in network.blocks:
        assert isinstance(block, Block)
        fully_shard(block)
        for name in ("attend", "feed"):  # the operator calls these methods, and never the block itself
            register_fsdp_forward_method(block, name)
    fully_shard(network)
    return network


def loss_of(network: nn.Module, config: TrainConfig, batch: int, device: torch.device) -> torch.Tensor:
    """Compute the mean squared output for latents that are the same at each call but differ between ranks."""
    return _loss(network, *_inputs(config, batch, device))


def _inputs(config: TrainConfig, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (latents [B, T, latent width], time steps [B])."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    latents = torch.randn(batch, config.tokens, config.latent_width, generator=generator)
    return latents.to(device), torch.full((batch,), 0.01, device=device)


def _loss(network: nn.Module, latents: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        predicted: torch.Tensor = network(latents, dt)
    return predicted.float().square().mean()


def _moves(device: torch.device, config: TrainConfig, kind: str, order: str) -> bool:
    network = make_network(config, device)
    early = torch.optim.AdamW(network.parameters())
    parallel = wrapped(network, kind)
    optimizer = early if order == "before" else torch.optim.AdamW(parallel.parameters())
    first = loss_of(parallel, config, 2, device)
    first.backward()
    optimizer.step()
    return not torch.equal(first.detach(), loss_of(parallel, config, 2, device).detach())


def _step(network: nn.Module, config: TrainConfig, batch: int, device: torch.device) -> Callable[[], None]:
    """Return a step of fused AdamW on a batch that is on the device."""
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    inputs = _inputs(config, batch, device)

    def step() -> None:
        optimizer.zero_grad()
        _loss(network, *inputs).backward()
        optimizer.step()

    return step


def _gradients(network: nn.Module, config: TrainConfig, device: torch.device) -> list[torch.Tensor]:
    """Return copies of a batch's gradients: the next replay of a graph overwrites the originals."""
    _call(network, config, device)()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def _call(network: nn.Module, config: TrainConfig, device: torch.device) -> Callable[[], None]:
    inputs = _inputs(config, config.batch_size, device)
    replay_begins = implementation("compilation.compiled_function", "replay_begins", optimized=True)

    def call() -> None:
        network.zero_grad()
        if device.type == "cuda":
            replay_begins()
        _loss(network, *inputs).backward()

    return call


def _compiled_inside(network: Operator, device: torch.device) -> nn.Module:
    compiled = cast("nn.Module", torch.compile(network, mode="reduce-overhead", dynamic=False))
    return DistributedDataParallel(compiled, device_ids=_ids(device), gradient_as_bucket_view=True)


def _compiled_around(network: Operator, device: torch.device) -> nn.Module:
    parallel = DistributedDataParallel(network, device_ids=_ids(device), gradient_as_bucket_view=True)
    return cast("nn.Module", torch.compile(parallel, mode="reduce-overhead", dynamic=False))


def _counted(sent: list[int], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks as torch does, and record its bytes."""
    sent.append(bucket.buffer().nbytes)
    assert dist.group.WORLD is not None
    return allreduce_hook(dist.group.WORLD, bucket)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers, e.g. for Ctrl-C, that the launcher changes."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number, handler in before.items():
                signal.signal(number, handler)


def _in_rank(work: Callable[..., Any], gpus: int, arguments: tuple[Any, ...]) -> Any:
    """Call `work` in a process that `launched` has started."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group("nccl" if gpus >= ranks else "gloo", timeout=TIMEOUT)
    try:
        return work(device, *arguments)
    finally:
        dist.destroy_process_group()


def _ids(device: torch.device) -> list[int] | None:
    return [torch.cuda.current_device()] if device.type == "cuda" else None


def _bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*by_rank, strict=True)]


def _message(found: Any) -> str:
    """Return a rank's error in one line."""
    detail = found.get("message", "") if isinstance(found, Mapping) else str(found)
    return " ".join(str(detail).split())[:300]


def _distance(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Return the distance of all tensors together, relative to the norm of the true ones."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, truth, strict=True))
    return math.sqrt(wrong / sum(float(b.square().sum()) for b in truth))


def _nothing() -> None:
    pass
