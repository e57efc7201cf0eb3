"""Softmax weights and the mix of states under torch.compile (trainer2, technique 000.4)."""

import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

SHAPES = 64
"""Shapes for each of which a function is compiled; PyTorch stops at 8."""


def compiled_function(cost: torch.Tensor, states: torch.Tensor, beta: float = 5.0) -> torch.Tensor:
    """`sum_k softmax(-beta * cost)_k * state_k`, [B, D], compiled at the first call.

    cost    [B, K]
    states  [B, K, D]
    beta    inverse temperature

    Shapes are dynamic: sizes from 2 on share one compiled function. Where nothing can be compiled (no C++ compiler,
    say) a warning says why, once, and the function runs as it is. The source compiled with `torch.jit.script`, which
    PyTorch has given up since.

    Source: trainer2, technique 000.4.
    """
    return _compiled()(cost, states, beta)


def compile_quietly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile`, without the warnings that its backend raises while it compiles.

    A caller cannot fix them, and with warnings as errors the function would not be compiled. Options as
    torch.compile's, but for `backend` and `mode`.
    """
    with _quiet():
        return torch.compile(function, backend=_inductor, **options)


def compile_if_possible(
    function: Callable[..., Any], name: str, *, quiet_calls: bool = False, **options: Any
) -> Callable[..., Any]:
    """`compile_quietly`. Where nothing can be compiled a warning says why, once, and the function runs as it is.

    name         what the warning calls it
    quiet_calls  whether warnings are kept back while it is called, too: tracing warns where an argument was computed
                 from what wants a gradient

    With `dynamic=False` up to SHAPES shapes are compiled.
    """
    compiled = compile_quietly(function, **options)
    if options.get("dynamic") is False:
        compiled = torch._dynamo.config.patch(recompile_limit=SHAPES)(compiled)
    # Graphs are captured when it runs, which warns of empty ones.
    if quiet_calls or (options.get("options") or {}).get("triton.cudagraphs"):
        compiled = _quiet()(compiled)
    failed = []

    def call(*args: Any) -> Any:
        if failed:
            return function(*args)
        try:
            return compiled(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            failed.append(error)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(f"{name} runs uncompiled: {reason}", RuntimeWarning, stacklevel=3)
            return function(*args)

    return call


def replay_begins() -> None:
    """`torch.compiler.cudagraph_mark_step_begin`: what compiled functions' last replay left may be written over.

    The first call of a thread also makes the thread's handles of cuBLAS and cuDNN. PyTorch may capture a graph in
    another thread than the one that ran its launches before, and cuDNN cannot make a handle during a capture.
    """
    _make_handles(torch.cuda.current_device())
    with _quiet():  # the first call imports the backend
        torch.compiler.cudagraph_mark_step_begin()


_of_thread = threading.local()


def _make_handles(device: int) -> None:
    devices = _of_thread.__dict__.setdefault("devices", set())
    if device in devices or torch.cuda.is_current_stream_capturing():
        return
    devices.add(device)
    torch.cuda.current_blas_handle()
    with torch.inference_mode():
        one = torch.ones(1, 1, 1, device=torch.device("cuda", device))
        torch.nn.functional.conv1d(one, one)


def _inductor(graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any] | None = None) -> Any:
    """The backend that torch.compile takes of itself. A backward pass may be compiled later, by the same `inner`."""
    with _quiet(), _workers_outlive_sigterm(), torch.compiler.config.patch(cache_key_tag=_cache_key_tag()):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            with _quiet(), _workers_outlive_sigterm():
                return compile_fx_inner(*args, **kwargs)

        return compile_fx(graph, inputs, inner_compile=inner, config_patches=options)


def _cache_key_tag() -> str:
    """Name the precisions of autocast: PyTorch 2.11 would take code in bfloat16 from its cache where autocast asks for
    float16 (pytorch pull request 181564)."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    of_autocast = [f"{kind}: {torch.get_autocast_dtype(kind)}" for kind in kinds]
    return ", ".join([torch.compiler.config.cache_key_tag, *of_autocast])


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _workers_outlive_sigterm() -> Iterator[None]:
    """Processes started here keep SIGTERM blocked, as this thread does until it leaves.

    A scheduler, systemd or `timeout` sends SIGTERM to every process of a job. PyTorch's compile workers would die of
    it, and this process, which may want to finish a step first, would wait for them forever. They ignore Ctrl-C by
    themselves, and end when this process does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mix(cost: torch.Tensor, states: torch.Tensor, beta: float) -> torch.Tensor:
    weights = torch.softmax(-beta * cost, dim=1)
    return torch.bmm(weights.unsqueeze(1), states).squeeze(1)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return compile_if_possible(_mix, "compiled_function", dynamic=True)
