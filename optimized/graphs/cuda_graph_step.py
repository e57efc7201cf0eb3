"""A step captured once as a CUDA graph and replayed through static inputs (trainer2, technique 000.7)."""

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

WARMUP = 3
# Each graph keeps its memory; a training loop has few shapes.
GRAPHS = 4


class CudaGraphs:
    """CUDA operations of a `CudaGraphStep`; another object with the same two methods can replace it.

    pool  a `torch.cuda.graph_pool_handle()` whose memory all graphs share; None: each graph has its own memory. In a
          shared pool a replay overwrites the results of other graphs, so a step must keep nothing that it allocated
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool = pool
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def aside(self, call: Callable[[], Any], device: torch.device) -> Any:
        """Run the call on a side stream, as capture wants it beforehand: libraries set up their workspaces there."""
        current, stream = torch.cuda.current_stream(device), self._stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = call()
        current.wait_stream(stream)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return result

    def capture(self, call: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
        """(what the call returns, in memory of the graph; a function that runs what was recorded)."""
        graph = torch.cuda.CUDAGraph()
        generator = _generator(device)
        before, current = generator.clone_state(), torch.cuda.current_stream(device)
        # cuBLAS has one workspace for a stream, and a graph keeps its address. Made during this capture it lies in this
        # graph's memory; one made before would be freed when another graph of the stream ends (pytorch issue 193402),
        # or when torch.compile records one of its own, and a replay would write to memory that is no longer there.
        torch._C._cuda_clearCublasWorkspaces()
        # Garbage of elsewhere must not be collected now: what it calls of CUDA is no part of the step, and can void it.
        collected = gc.isenabled()
        gc.disable()
        try:
            # Threads that load data may go on with CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream(device), capture_error_mode="thread_local"
            ):
                result = call()
        except BaseException:
            # A capture that fails leaves the generator capturing, and nothing random would run any more; where ending
            # it fails too, it leaves its stream the current one.
            generator.graphsafe_set_state(before)
            torch.cuda.set_stream(current)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()  # nobody else may use this graph's
            if collected:
                gc.enable()
        return result, graph.replay

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Graph:
    """One recorded step: its static inputs and outputs."""

    def __init__(
        self,
        step: Callable[..., Any],
        leaves: Sequence[Any],
        spec: Any,
        graphs: Any,
        mutates: Collection[int],
        device: torch.device,
    ) -> None:
        self.inputs = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = self._tensors(self.inputs)
        self._fill(leaves)
        versions = [t._version for t in tensors]
        args, kwargs = pytree.tree_unflatten(self.inputs, spec)
        self.outputs, self.replay = graphs.capture(lambda: step(*args, **kwargs), device)
        # A change by one of PyTorch's operations is seen; one by a kernel that it does not know has to be named.
        self.changed = [
            i
            for i, (t, version) in enumerate(zip(tensors, versions, strict=True))
            if t._version != version or i in mutates
        ]

    def run(self, leaves: Sequence[Any]) -> Any:
        self._fill(leaves)
        self.replay()
        given, static = self._tensors(leaves), self._tensors(self.inputs)
        for i in self.changed:
            given[i].copy_(static[i])
        own = {id(s): g for s, g in zip(static, given, strict=True)}

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return own[id(leaf)] if id(leaf) in own else leaf.clone()

        return pytree.tree_map(fresh, self.outputs)

    def _fill(self, leaves: Sequence[Any]) -> None:
        static, given = self._tensors(self.inputs), self._tensors(leaves)
        with torch.no_grad():
            if len(static) > 1:
                torch._foreach_copy_(static, given)
            elif static:
                static[0].copy_(given[0])

    @staticmethod
    def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class CudaGraphStep:
    """A step that is recorded once for each form of its inputs, and replayed from then on; see `cuda_graph_step`.

    reason    why the last call ran eagerly, once warmed up; None where it did not
    captures  how many graphs were recorded so far
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        warmup: int = WARMUP,
        graphs: int = GRAPHS,
        mutates: Collection[int] = (),
        device: torch.device | str | None = None,
        backend: Any = None,
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: at least one call has to run before a step can be captured")
        if graphs < 1:
            raise ValueError(f"graphs={graphs}: at least one graph has to be kept")
        self._step = step
        self._warmup, self._most, self._mutates = warmup, graphs, frozenset(mutates)
        self._device = None if device is None else torch.device(device)
        self._backend = backend
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self.reason: str | None = None
        self.captures = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.reason = self._unfit(leaves)
        if self.reason:
            return self._step(*args, **kwargs)
        key = self._form(leaves, spec)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key].run(leaves)
        if key in self._refused:
            self.reason = self._refused[key]
            return self._step(*args, **kwargs)
        graphs, device = self._backend or _shared(), self._device or _device(leaves)
        calls = self._seen[key] = self._seen.pop(key, 0) + 1
        if calls <= self._warmup:
            # These are steps like any other: nothing is run for the warm-up alone, so that no state moves by it.
            return graphs.aside(lambda: self._step(*args, **kwargs), device)
        try:
            graph = _Graph(self._step, leaves, spec, graphs, self._mutates, device)
        except RuntimeError as error:
            self._refused[key] = self.reason = (
                f"the step cannot be captured: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
            )
            warnings.warn(f"cuda_graph_step runs eagerly: {self.reason}", RuntimeWarning, stacklevel=2)
            return self._step(*args, **kwargs)
        del self._seen[key]
        self._graphs[key] = graph
        self.captures += 1
        while len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        return graph.run(leaves)

    def _unfit(self, leaves: Sequence[Any]) -> str | None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors and self._device is None:
            return "the step takes no tensor, so that its device is not known; name it in device="
        if self._backend is None or isinstance(self._backend, CudaGraphs):
            if not torch.cuda.is_available():
                return "there is no CUDA device"
            if any(not t.is_cuda for t in tensors) or (self._device is not None and self._device.type != "cuda"):
                return "the step is not on a CUDA device"
            if torch.cuda.is_current_stream_capturing():
                return "another capture is going on, which records the step"
        if len({t.device for t in tensors} | ({_with_index(self._device)} if self._device else set())) > 1:
            return "the inputs are on several devices"
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return "an input wants a gradient, which a replay does not record; capture the backward pass, too"
        unhashable = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | Hashable)]
        if unhashable:
            return f"an input of type {type(unhashable[0]).__name__} cannot be compared with another"
        return None

    def _form(self, leaves: Sequence[Any], spec: Any) -> Hashable:
        """Return all that a graph depends on except the values of its input tensors."""
        forms = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        )
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_float32_matmul_precision(),
        )
        return forms, str(spec), modes


def cuda_graph_step(step: Callable[..., Any], **options: Any) -> CudaGraphStep:
    """The step as one launch: warm-up calls, capture, then replay through static copies of its inputs.

    For every form of the inputs (shapes, strides, dtypes, device, values that are no tensors, grad and autocast mode)
    the first `warmup` calls run eagerly on a side stream; the next one records a graph and replays it, as do all that
    follow. No call is run twice: the warm-up calls are steps like any other. A form not seen before is recorded
    anew; the `graphs` that were used last are kept.

    * Inputs are copied into static buffers; those that the step changes in place are copied back. An input that only a
      kernel unknown to PyTorch changes has to be named by its position among the tensors, in `mutates`.
    * Outputs are fresh tensors, never the graph's own memory: what a call returned stays as it is. An input that the
      step returns is returned itself.
    * A step that takes no tensors, and works on its own, is captured on `device`.
    * Tensors that the step finds elsewhere (weights, states, buffers of its own) are captured by address: they may be
      changed in place, but not replaced. Python code in the step runs at capture and not at replay.
    * Capture frees cuBLAS's workspaces, as torch.compile's graphs do: a torch.cuda.graph of your own that relies on one
      made by its stream's warm-up has to be recorded after `torch._C._cuda_clearCublasWorkspaces()`.

    It runs eagerly, and `reason` says why, without a CUDA device, with inputs elsewhere, inside another capture, where
    an input wants a gradient, and where the step cannot be captured (it waits for the device, say); the last is also
    said once as a RuntimeWarning.

    ValueError for fewer than one warm-up call or graph. Options: `warmup=3`, `graphs=4`, `mutates=()`, `device=None`.

    Source: trainer2, technique 000.7.
    """
    return CudaGraphStep(step, **options)


def aside(call: Callable[[], Any], device: torch.device) -> Any:
    """Run the call on the CUDA stream on which steps warm up and are captured; the current one waits for it."""
    return _shared().aside(call, device)


_SHARED: list[CudaGraphs] = []


def _shared() -> CudaGraphs:
    if not _SHARED:
        _SHARED.append(CudaGraphs())
    return _SHARED[0]


def _generator(device: torch.device) -> torch.Generator:
    """The one that random operations on the device draw from."""
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors have it: "cuda" alone is the current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _device(leaves: Sequence[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for it, laid out in the same way; contiguous where its own elements overlap."""
    # A tensor of inference mode counts no versions, by which a change in place is seen.
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_like(tensor)  # keeps the strides of what is dense
        if copy.stride() == tensor.stride() or 0 in tensor.stride():
            return copy
        extent = (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        )
        return tensor.new_empty(extent).as_strided(tensor.shape, tensor.stride())
