"""Ways of calling that only a GPU has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfsuite import execution
from perfsuite import inputs as make
from perfsuite.contexts.calling import hold
from perfsuite.execution import Leaves
from perfsuite.integrity.probe import Probe
from perfsuite.memory_layouts import fill_poison
from perfsuite.pair import Pair

WARMUP_CALLS = 3
"""Calls before one is captured in a graph."""
EMPTY_GRAPH = "The CUDA Graph is empty"
"""Begin of torch's warning where a capture holds no work."""
DELAY_CYCLES = 20_000_000
"""About 10 ms of a GPU: the side's own stream is delayed by this before the inputs are there."""


def other_stream(probe: Probe) -> None:
    """Call on a stream that is not the default one, where the inputs are there only later."""
    if torch.device(probe.device).type != "cuda":
        return

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
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

    hold(probe, way, "on a stream that is not the default one")


def captured_graph(probe: Probe) -> None:
    """Capture the call in a CUDA graph, and replay it on inputs that were not there when it was captured."""
    if torch.device(probe.device).type != "cuda":
        return
    others = probe.drawn(probe.other_case())

    def way(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        held = make.clone(values)
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            torch.cuda.synchronize()
            with torch.cuda.stream(aside):
                for _ in range(WARMUP_CALLS):  # compilation and allocation at a first call cannot be captured
                    call(*make.clone(others).values())
                with _waits_refused():  # a wait raises here, and not within the capture
                    call(*make.clone(others).values())
            torch.cuda.synchronize()
            _overwrite(held)
            with _capturing(graph, aside):
                leaves = execution.with_changed(pair, held, call(*held.values()))
            _overwrite(leaves)
            make.copy_values(held, values)
            execution.poison(pair, held)
            graph.replay()
            torch.cuda.synchronize()
            return execution.copies_of(leaves)

    words = "when a CUDA graph that captured it is replayed"
    hold(probe, way, words, refusable=True, reference_first=True)


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Make calls of torch that wait for the GPU raise within the block."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not know of every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture with torch.cuda.graph. Where the capture fails, torch leaves its stream current and the random generator
    unusable; both are restored."""
    before, generator = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=EMPTY_GRAPH)  # its answer shows it
            with torch.cuda.graph(graph, stream=stream):
                yield
    except BaseException:
        generator.graphsafe_set_state(generator.clone_state())  # a copy is in no capture
        raise
    finally:
        torch.cuda.set_stream(before)


def _overwrite(value: Any) -> None:
    """Fill the GPU tensors in the value with values that are no answer."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        if tensor.is_cuda:
            fill_poison(made)
        return made

    make.copy_values(value, make.map_tensors(value, other))
