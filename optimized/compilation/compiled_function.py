"""Softmax-weighted sum of states with torch.compile, and helpers for compilation (trainer2, technique 000.4)."""

import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

VARIANTS = 64
"""Number of variants (of shapes, dtypes, gradient modes) for which a function is compiled whose calls past the limit
would be slow or fail; PyTorch's default limit is 8."""


def compiled_function(cost: torch.Tensor, states: torch.Tensor, beta: float = 5.0) -> torch.Tensor:
    """Return `sum_k softmax(-beta * cost)_k * state_k`, [B, D]; compiled at the first call.

    cost    [B, K]
    states  [B, K, D]
    beta    inverse temperature

    Shapes are dynamic: all sizes of 2 or more share one compiled function. If compilation fails (without a C++
    compiler, for example), one warning says why, and the function runs eagerly. The source uses `torch.jit.script`,
    which PyTorch has since deprecated.

    Source: trainer2, technique 000.4.
    """
    return _compiled()(cost, states, beta)


def compile_quietly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the function compiled by `torch.compile`, whose backend then emits no warnings while it compiles.

    A caller cannot fix their causes, and with warnings as errors they would abort the compilation. The options are
    those of torch.compile except `backend` and `mode`.
    """
    with _quiet():
        return torch.compile(function, backend=_inductor, **options)


def compile_if_possible(
    function: Callable[..., Any], name: str, *, quiet_calls: bool = False, **options: Any
) -> Callable[..., Any]:
    """Return the function compiled by `compile_quietly`; if that fails, one warning says why, and it runs eagerly.

    name         the function's name in the warning
    quiet_calls  whether to suppress warnings during calls, too: tracing warns about an argument that was computed from
                 a tensor that requires a gradient

    With `dynamic=False` or `fullgraph=True`, up to VARIANTS variants are compiled.
    """
    compiled = compile_quietly(function, **options)
    if options.get("dynamic") is False or options.get("fullgraph"):
        compiled = torch._dynamo.config.patch(recompile_limit=VARIANTS)(compiled)
    # CUDA graphs are captured during calls, and PyTorch warns if one is empty.
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
    """Call `torch.compiler.cudagraph_mark_step_begin`: the next replay may overwrite the results of the last one.

    The first call in a thread also creates the thread's cuBLAS and cuDNN handles. PyTorch may capture a graph in
    another thread than the one that ran the warm-up, and cuDNN cannot create a handle during a capture.
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
    """Compile with Inductor, torch.compile's default backend, without warnings.

    The backward pass may be compiled later, by the same `inner`.
    """
    with _quiet(), _workers_outlive_sigterm(), torch.compiler.config.patch(cache_key_tag=_cache_key_tag()):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            with _quiet(), _workers_outlive_sigterm():
                return compile_fx_inner(*args, **kwargs)

        return compile_fx(graph, inputs, inner_compile=inner, config_patches=options)


def _cache_key_tag() -> str:
    """Return torch.compile's cache key tag, with autocast's dtypes appended.

    Without it, PyTorch 2.11 would use cached bfloat16 code when autocast is in float16 (pytorch pull request 181564).
    """
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
    """Block SIGTERM in this thread inside the context, and permanently in processes that are started there.

    A scheduler, systemd or `timeout` sends SIGTERM to every process of a job. It would kill PyTorch's compile workers,
    and this process, which may have to finish a step first, would wait for them forever. The workers already ignore
    Ctrl-C, and they end when this process does.
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
