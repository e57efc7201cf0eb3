"""Measurements for the claims of leak_cnn."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from suite.backends import cudnn_benchmark
from suite.claims.leak_cnn_setting import TOGETHER, Setting
from suite.claims.measuring import PASSES, Make, Operations, apart, compiled_call, counts
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.config import TrainConfig
from suite.leak_cnn.costs import BATCH
from suite.leak_cnn.dataset import LeakAudio
from suite.leak_cnn.features import MELS
from suite.leak_cnn.model import Activation, make_weights
from suite.leak_cnn.step import training_loss, with_gradients
from suite.techniques import implementation


def launches_of(s: Setting, call: Callable[[], object]) -> int:
    """Count the launches of a call on a GPU, or its operations on another device."""
    if s.device.type == "cuda":
        return counts(call)[1]
    call()
    with Operations() as seen:
        call()
    count: int = seen.count
    return count


@dataclass(frozen=True)
class Memory:
    """Bytes, scaled to the source's batch."""

    kept: float
    """Bytes that are kept for the backward after the forward."""
    forward: float
    """Peak of the forward."""
    step: float
    """Peak of forward and backward."""


@functools.cache
def memory_of(s: Setting, activation: Activation, compiled: bool) -> Memory:
    arguments, leaves = network_and_batch(s)
    call = _renewed(functools.partial(training_loss, activation=activation))
    if compiled:
        call = _compile_quietly(call, fullgraph=True, dynamic=False)
    measured = _on_a_gpu(s, call, arguments, leaves) if s.device.type == "cuda" else _anywhere(call, arguments, leaves)
    return Memory(*(n * BATCH / s.batch_size for n in measured))


def _on_a_gpu(s: Setting, call: Callable[..., torch.Tensor], arguments: Any, leaves: Any) -> tuple[int, int, int]:
    torch.autograd.grad(call(*arguments), leaves)  # warms up: libraries allocate memory of their own
    gc.collect()
    torch.cuda.synchronize(s.device)
    torch.cuda.reset_peak_memory_stats(s.device)
    before = torch.cuda.memory_allocated(s.device)
    loss = call(*arguments)
    kept, forward = torch.cuda.memory_allocated(s.device), torch.cuda.max_memory_allocated(s.device)
    torch.autograd.grad(loss, leaves)
    return kept - before, forward - before, torch.cuda.max_memory_allocated(s.device) - before


def _anywhere(call: Callable[..., torch.Tensor], arguments: Any, leaves: Any) -> tuple[int, int, int]:
    with Operations([t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]) as seen:
        loss = call(*arguments)
        kept, forward = seen.live(), seen.peak
        torch.autograd.grad(loss, leaves)
    return kept, forward, seen.peak


def network_and_batch(s: Setting) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return (arguments of `training_loss` for the source's network and the setting's batch, weights among them)."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: w.to(s.device).requires_grad_() for name, w in make_weights(0).items()}
    segments = (8 * torch.randn(s.batch_size, 1, MELS, 1, generator=generator) - 30).to(s.device)
    labels = torch.randint(len(CLASSES), (s.batch_size,), generator=generator).to(s.device)
    return (weights, segments, labels, torch.ones(len(CLASSES), device=s.device)), list(weights.values())


def training_step(s: Setting) -> Callable[[], torch.Tensor]:
    """Return a training step that returns its loss and never waits for the device."""
    (weights, *batch), leaves = network_and_batch(s)
    optimizer = torch.optim.AdamW(leaves, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = training_loss(weights, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gradients_of(
    s: Setting, low: torch.dtype | None, channels_last: bool
) -> Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return a function that computes the loss and its gradients, under autocast to `low` unless that is None."""
    (weights, segments, *rest), _ = network_and_batch(s)
    if channels_last:
        segments = segments.contiguous(memory_format=torch.channels_last)
        weights = {
            n: w.detach().contiguous(memory_format=torch.channels_last) if w.ndim == 4 else w
            for n, w in weights.items()
        }

    def call() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast(s.device.type, low or torch.bfloat16, enabled=low is not None):
            return with_gradients(training_loss, weights, segments, *rest)

    return call


def tuned_steps(s: Setting, on: bool, low: torch.dtype | None, channels_last: bool) -> Callable[[], object]:
    """Return a function that computes the gradients TOGETHER times and waits for the device.

    It must run in a process of its own: cuDNN keeps the algorithms that it has found, whatever the setting is.
    """
    call = gradients_of(s, low, channels_last)

    def several() -> None:
        with cudnn_benchmark(on=on):
            for _ in range(TOGETHER):
                call()
        wait(s.device)

    return several


def trained_epochs(
    config: TrainConfig, audio: LeakAudio, device: torch.device, optimized: bool = True
) -> Callable[[], None]:
    """Return a function that trains one more epoch and does not wait for its end on the device.

    It raises UncompiledError if the network runs uncompiled.
    """
    trainer = implementation("trainers.leak_cnn", "Trainer", optimized=optimized)(config, audio, device)
    numbers = itertools.count()

    def epoch() -> None:
        compiled_call(lambda: trainer.train_window({"epoch": torch.tensor(next(numbers))}))

    return epoch


def finished_epochs(config: TrainConfig, audio: LeakAudio, device: torch.device) -> Callable[[], None]:
    """Return a function that trains one more epoch and waits for its end on the device."""
    train = trained_epochs(config, audio, device)

    def epoch() -> None:
        train()
        wait(device)

    return epoch


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounds_apart(
    made: Mapping[str, Make], rounds: int, enough: Callable[[dict[str, list[float]]], bool] | None = None
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return (seconds of the first call, seconds by round). Each function has its own process; no two run at a time.

    While `enough` returns False for the seconds, `rounds` more rounds are timed, up to PASSES × `rounds` in total.
    """
    with apart(made) as calls:
        first = {name: call() for name, call in calls.items()}
        for call in calls.values():
            call()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(PASSES * rounds):
            if number and number % rounds == 0 and (enough is None or enough(seconds)):
                break
            for name in list(calls)[:: 1 if number % 2 else -1]:
                seconds[name].append(calls[name]())
    return first, seconds


def first_batch_of_worker(way: str) -> None:
    """Start a worker, load one batch with it, and end it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a fork in a process with threads, which is what is measured
        loader = DataLoader(TensorDataset(torch.zeros(4)), 4, num_workers=1, multiprocessing_context=way)
        next(iter(loader))


def with_graph_break(*arguments: Any) -> torch.Tensor:
    """Compute twice the training loss, with a graph break before the product."""
    loss = training_loss(*arguments)
    torch._dynamo.graph_break()
    return 2 * loss


def graphs_of(function: Callable[..., torch.Tensor], whole: bool, s: Setting) -> list[str]:
    """Return the code of each graph that torch.compile makes of a function."""
    (weights, segments, labels, balance), _ = network_and_batch(dataclasses.replace(s, batch_size=2))
    found: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        found.append(str(graph.code).strip())
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what the compiler's modules import
        compiled = torch.compile(_renewed(function), backend=note, fullgraph=whole, dynamic=False)
        compiled(weights, segments, labels, balance)
    return found


def compiled_step(s: Setting, whole: bool) -> Callable[[], object]:
    """Return a step under torch.compile with its own CUDA graphs, as the source compiles it."""
    arguments, leaves = network_and_batch(s)
    options = {"triton.cudagraphs": True} if s.device.type == "cuda" else None
    replay_begins = implementation("compilation.compiled_function", "replay_begins", optimized=True)
    call = _compile_quietly(_renewed(training_loss), fullgraph=whole, dynamic=False, options=options)

    def step() -> None:
        replay_begins()
        torch.autograd.grad(call(*arguments), leaves)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about empty graphs
        for _ in range(3):  # compiles, captures, replays
            step()
    return step


def _compile_quietly(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    compile_quietly = implementation("compilation.compiled_function", "compile_quietly", optimized=True)
    compiled: Callable[..., torch.Tensor] = compile_quietly(function, **options)
    return compiled


def _renewed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function with a new code object, so that torch.compile reuses no earlier result."""

    def call(*arguments: Any) -> torch.Tensor:
        return function(*arguments)

    call.__code__ = call.__code__.replace()
    return call
