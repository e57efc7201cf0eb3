"""Ways of calling that exist only on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.correctness.contexts.calling import hold
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare.pair import Pair
from perfsuite.draws import inputs as make
from perfsuite.draws.memory_layouts import fill_poison

WARMUP_CALLS = 3
"""Warm-up calls before a call is captured in a CUDA graph."""
EMPTY_GRAPH = "The CUDA Graph is empty"
"""Start of torch's warning about a capture that holds no work."""
DELAY_CYCLES = 20_000_000
"""GPU clock cycles, about 10 ms, by which the stream is delayed before the inputs are written on it."""


def other_stream(probe: Probe) -> None:
    """Call on a stream other than the default one, on which the inputs are written only after a delay."""
    if torch.device(probe.device).type != "cuda":
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        late = make.map_tensors(values, torch.empty_like)
        execution.poison(pair, values)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(DELAY_CYCLES)
            make.copy_values(late, values)
            leaves = execution.copies_of(execution.with_changed(pair, late, call(*late.values())))
        stream.synchronize()
        return leaves

    hold(probe, call_side, "on a stream that is not the default one")


def captured_graph(probe: Probe) -> None:
    """Capture the call in a CUDA graph, and replay it on values that were written to the inputs after the capture."""
    if torch.device(probe.device).type != "cuda":
        return
    others = probe.drawn(probe.other_case())

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        held = make.clone(values)
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            torch.cuda.synchronize()
            with torch.cuda.stream(aside):
                for _ in range(WARMUP_CALLS):  # the first calls may compile and allocate, which cannot be captured
                    call(*make.clone(others).values())
                with _waits_refused():  # a call that waits for the GPU raises here, not within the capture
                    call(*make.clone(others).values())
            torch.cuda.synchronize()
            _overwrite(held)
            given = make.map_tensors(held, torch.Tensor.detach)  # the call may put other tensors in their places
            with _capturing(graph, aside):
                leaves = execution.with_changed(pair, held, call(*held.values()))
            _overwrite(leaves)
            make.copy_values(given, values)
            make.copy_values([*make.generators_in(held)], [*make.generators_in(values)])
            execution.poison(pair, given)
            graph.replay()
            torch.cuda.synchronize()
            return execution.copies_of(leaves)

    words = "when a CUDA graph that captured it is replayed"
    hold(probe, call_side, words, refusable=True, reference_first=True)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Make torch calls inside the block raise if they wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture with torch.cuda.graph. If a capture fails, torch leaves its stream current and the random generator
    unusable, so both are restored."""
    before, generator = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=EMPTY_GRAPH)  # an empty graph gives wrong outputs
            with torch.cuda.graph(graph, stream=stream):
                yield
    except BaseException:
        generator.graphsafe_set_state(generator.clone_state())  # a copied state belongs to no capture
        raise
    finally:
        torch.cuda.set_stream(before)


def _overwrite(value: Any) -> None:
    """Fill the GPU tensors in the value with NaN, or with the largest integer, so that stale values show."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        if tensor.is_cuda:
            fill_poison(made)
        return made

    make.copy_values(value, make.map_tensors(value, other))
