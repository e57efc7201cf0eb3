"""A step captured once as a CUDA graph and replayed through static inputs (trainer2, technique 000.7)."""

import gc
import numbers
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

WARMUP = 3
# Each graph keeps its memory, and a training loop has few input shapes.
GRAPHS = 4
# Forms whose warm-up calls are counted, and whose refusals are kept. A step with more forms has an input that changes
# at each call, such as the number of the step.
FORMS = 64


class CudaGraphs:
    """CUDA operations of a `CudaGraphStep`; any object with the methods `aside` and `capture` can replace it.

    pool  a `torch.cuda.graph_pool_handle()` whose memory all graphs share; None: each graph has its own memory. With a
          shared pool, a replay overwrites the results of other graphs, so a step must keep nothing that it allocated
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool = pool
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def aside(self, call: Callable[[], Any], device: torch.device) -> Any:
        """Run the call on the side stream used for capture. Warm-up calls run there to set up libraries' workspaces."""
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
        """Capture the call; return (its result, in memory of the graph; a function that replays the graph)."""
        graph = torch.cuda.CUDAGraph()
        generator = _generator(device)
        before, current = generator.clone_state(), torch.cuda.current_stream(device)
        # cuBLAS has one workspace per stream, and a graph keeps its address. If it is allocated during this capture, it
        # is part of this graph's memory. An older workspace would be freed when another graph of the stream is
        # destroyed (pytorch issue 193402) or when torch.compile captures a graph, and a replay would write to freed
        # memory.
        torch._C._cuda_clearCublasWorkspaces()
        # No garbage collection during capture: destructors of unrelated objects may call CUDA and invalidate it.
        collected = gc.isenabled()
        gc.disable()
        try:
            # thread_local: data loading threads may use CUDA during the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream(device), capture_error_mode="thread_local"
            ):
                result = call()
        except BaseException:
            # After a failed capture the generator is still in capture mode, and random operations would fail. If ending
            # the capture fails too, the capture stream is still the current stream.
            generator.graphsafe_set_state(before)
            torch.cuda.set_stream(current)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()  # it belongs to this graph
            if collected:
                gc.enable()
        return result, graph.replay

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Graph:
    """A captured step with its static inputs and outputs."""

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
        # PyTorch operations that change a tensor raise its version. Changes by other kernels are named in `mutates`.
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
    """A step that is captured once for each form of its inputs and then replayed; see `cuda_graph_step`.

    reason    why the last call ran eagerly; None for a warm-up call and for a replay
    captures  number of graphs captured so far
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
        self._warned = False
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
        if len(self._seen) > FORMS:
            self._seen.popitem(last=False)
            self._warn_of_forms()
        if calls <= self._warmup:
            # Warm-up calls are regular steps. No additional call runs that would change the step's state.
            return graphs.aside(lambda: self._step(*args, **kwargs), device)
        try:
            graph = _Graph(self._step, leaves, spec, graphs, self._mutates, device)
        except RuntimeError as error:
            if len(self._refused) >= FORMS:
                self._refused.clear()
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

    def _warn_of_forms(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cuda_graph_step has seen {FORMS} forms of its inputs that were never captured: an input that is no "
                "tensor changes from call to call; pass it as a tensor",
                RuntimeWarning,
                stacklevel=3,
            )

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
        """Return a key for the inputs and the modes that a graph depends on, without the values of tensors."""
        forms = tuple(_form_of(leaf) for leaf in leaves)
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            _float32_precisions(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        )
        return forms, str(spec), modes


def _float32_precisions() -> Hashable:
    """Return the settings of float32 products and convolutions."""
    backends = torch.backends
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # settings by operator, which these two cannot express
        operators = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        return tuple(operator.fp32_precision for operator in operators)


def _form_of(leaf: Any) -> Hashable:
    """Return a key for one input. Numbers are compared as text, since 0.0 equals -0.0, and NaN differs from itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), repr(leaf) if isinstance(leaf, numbers.Number) else leaf


def cuda_graph_step(step: Callable[..., Any], **options: Any) -> CudaGraphStep:
    """Return the step as one graph launch: warm-up calls, capture, then replay with static copies of its inputs.

    The form of the inputs is their shapes, strides, dtypes and device, the values that are not tensors, the grad,
    inference, autocast and matmul precision modes, and cuDNN's settings. For each form, the first `warmup` calls run
    eagerly on a side stream. The next call captures a graph and replays it, and all later calls replay it. No call runs
    twice: warm-up calls are regular steps. A new form is captured again. The `graphs` most recently used graphs are
    kept.

    * Inputs are copied into static buffers. Inputs that the step changes in place are copied back. If only a kernel
      unknown to PyTorch changes an input, name its position among the input tensors in `mutates`.
    * Outputs are fresh tensors, never the graph's own memory, so later calls do not change them. If the step returns
      one of its inputs, the caller's tensor is returned.
    * A step without tensor arguments is captured on `device`.
    * Other tensors that the step uses (weights, states, its own buffers) are captured by address. They may be changed
      in place, but not replaced. Python code in the step runs at capture, not at replay.
    * Capture frees cuBLAS's workspaces, as torch.compile's graphs do. If you capture a torch.cuda.graph yourself, call
      `torch._C._cuda_clearCublasWorkspaces()` before, so that it does not use a workspace of its stream's warm-up.

    The step runs eagerly, and `reason` says why, if: there is neither an input tensor nor `device`; there is no CUDA
    device; inputs are not on CUDA, or on several devices; another capture is in progress; an input requires a gradient;
    a value that is not a tensor is not hashable; or the step cannot be captured, for example because it waits for the
    device. The last case also issues a RuntimeWarning, once per form. So does a step with more than 64 forms that were
    not captured: pass an input that changes at each call, such as a step number, as a tensor.

    ValueError if `warmup` or `graphs` is below 1. Options: `warmup=3`, `graphs=4`, `mutates=()`, `device=None`.

    Source: trainer2, technique 000.7.
    """
    return CudaGraphStep(step, **options)


def aside(call: Callable[[], Any], device: torch.device) -> Any:
    """Run the call on the CUDA stream of warm-up and capture; the current stream waits for it."""
    return _shared().aside(call, device)


_SHARED: list[CudaGraphs] = []


def _shared() -> CudaGraphs:
    if not _SHARED:
        _SHARED.append(CudaGraphs())
    return _SHARED[0]


def _generator(device: torch.device) -> torch.Generator:
    """Return the device's default random generator."""
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors report it: "cuda" without an index is the current device."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def _device(leaves: Sequence[Any]) -> torch.device:
    return next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return uninitialised memory with the tensor's shape and strides, or dense if a stride is 0 (expanded)."""
    # Changes in place are detected by version, which tensors of inference mode do not have.
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_like(tensor)  # keeps the strides of a dense tensor
        if copy.stride() == tensor.stride() or 0 in tensor.stride():
            return copy
        extent = (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        )
        return tensor.new_empty(extent).as_strided(tensor.shape, tensor.stride())
