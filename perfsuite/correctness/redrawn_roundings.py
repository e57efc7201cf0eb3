"""Run the reference with other rounding errors, as other hardware or another order of operations could cause."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.correctness.dispatch_modes import PlainMode
from perfsuite.draws import inputs as make
from perfsuite.draws.tensor_values import generator_for

_ROUNDED = """
add sub rsub mul div reciprocal addcmul addcdiv lerp sum mean prod cumsum cumprod logcumsumexp var var_mean std mm
bmm addmm baddbmm addmv mv dot vdot addr convolution convolution_backward linear_backward exp exp2 expm1 log log2
log10 log1p sqrt rsqrt pow square sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf erfc
erfinv lgamma digamma hypot logaddexp logaddexp2 logsumexp norm linalg_vector_norm linalg_cross _euclidean_dist
_cdist_forward _cdist_backward index_add scatter_add scatter_reduce embedding_dense_backward avg_pool2d _foreach_add
_foreach_sub _foreach_mul _foreach_div _foreach_addcmul _foreach_addcdiv _foreach_lerp _foreach_sqrt _foreach_pow
_foreach_norm
"""

ROUNDED = frozenset(_ROUNDED.split())
"""Operations that round: all except copies, comparisons, selections and the like."""

_COMPOSED = """
softplus silu gelu mish elu _softmax _log_softmax log_sigmoid_forward tanh_backward sigmoid_backward
softplus_backward silu_backward gelu_backward mish_backward elu_backward log_sigmoid_backward _softmax_backward_data
_log_softmax_backward_data mse_loss mse_loss_backward huber_loss smooth_l1_loss binary_cross_entropy
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward
"""

COMPOSED = frozenset(_COMPOSED.split())
"""Operations with several roundings, between which terms may cancel. They are decomposed into operations of ROUNDED."""

CONTRACTED = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Product → index of the argument whose last dimension it sums over."""

SCANS = ("cumsum", "cumprod", "logcumsumexp")
"""Operations that accumulate along the dimension in their second argument: half of its length on average."""

MAX_DEPTH = 1024
"""Approximate largest number of terms that a fast kernel sums sequentially. It sums the others in parallel."""


class _RedrawnRoundings(PlainMode):
    def __init__(self, seed: int, units: float, least: float) -> None:
        super().__init__()
        self.seed, self.units, self.least = seed, units, least
        self.generators: dict[torch.device, torch.Generator] = {}
        self.factors: dict[tuple[torch.device, torch.dtype, float], _Factors] = {}
        self.spans: dict[tuple[torch.device, torch.dtype, int], tuple[torch.dtype, float]] = {}
        self.known: dict[Any, tuple[str, bool, Callable[..., Any] | None]] = {}
        from torch._decomp import decomposition_table  # takes 0.1 s, and is needed only here

        self.parts: Mapping[Any, Callable[..., Any]] = decomposition_table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how = self.known.get(func)
        if how is None:
            how = self.known[func] = self._how(func)
        name, rounds, part = how
        if part is not None:
            with self, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return part(*args, **(kwargs or {}))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if rounds:
            changed = args[0] if result is None else result
            # The usual case, a single tensor, is fast, because a loop over time has a million operations.
            tensors = [changed] if type(changed) is torch.Tensor else [t for _, t in make.tensors_in(changed)]
            for tensor in tensors:
                self._redraw(tensor, _depth(name, args, tensor))
        return result

    def _how(self, func: Any) -> tuple[str, bool, Callable[..., Any] | None]:
        """Return (name, whether the operation rounds, its decomposition)."""
        name = func.overloadpacket.__name__
        rounds = name in ROUNDED or name in COMPOSED or name.removesuffix("_") in ROUNDED
        return name, rounds, self.parts[func] if name in COMPOSED and func in self.parts else None

    def _redraw(self, tensor: torch.Tensor, depth: int) -> None:
        count = tensor.numel()
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a DTensor has no elements of its own
        if not plain or not count or not tensor.dtype.is_floating_point or 0 in tensor.stride():
            return
        key = tensor.device, tensor.dtype, depth
        if key not in self.spans:
            self.spans[key] = self._span(tensor.dtype, depth)
        work, span = self.spans[key]
        factors = self.factors.get((tensor.device, work, span))
        if factors is None:
            factors = self._new_factors(tensor.device, work, span)
        tensor.mul_(factors.take(count).view(tensor.shape))

    def _span(self, dtype: torch.dtype, depth: int) -> tuple[torch.dtype, float]:
        """Return (dtype of the factors, largest distance of a factor from 1)."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        eps = max(torch.finfo(dtype).eps, torch.finfo(work).eps * math.sqrt(depth / 3))
        # A result in float32 has up to one unit of error in a function of half precision, too.
        least = 0.0 if dtype.itemsize < work.itemsize else eps
        return work, max(least, self.units * max(self.least, eps))

    def _new_factors(self, device: torch.device, work: torch.dtype, span: float) -> _Factors:
        if device not in self.generators:
            self.generators[device] = generator_for(self.seed, "roundings", str(device))
        if len(self.factors) == MOST_KEPT:
            del self.factors[next(iter(self.factors))]
        made = self.factors[device, work, span] = _Factors(self.generators[device], work, span)
        return made


DRAWN_AHEAD = 1 << 20
"""Most factors of one span that are drawn in advance."""

MOST_KEPT = 8
"""Most spans whose factors are kept in advance. Sums of different lengths have different spans."""


class _Factors:
    """Random factors between 1 − `span` and 1 + `span`, each used once.

    They are drawn in advance, each time twice as many, because drawing the factors of one step of a loop takes longer
    than the step.
    """

    def __init__(self, generator: torch.Generator, dtype: torch.dtype, span: float) -> None:
        self.generator, self.dtype, self.span = generator, dtype, span
        self.drawn = torch.empty(0)
        self.taken = 0

    def take(self, count: int) -> torch.Tensor:
        if count > DRAWN_AHEAD:
            return self._draw(count)
        if self.taken + count > len(self.drawn):
            self.drawn, self.taken = self._draw(max(count, min(2 * len(self.drawn), DRAWN_AHEAD))), 0
        self.taken += count
        return self.drawn[self.taken - count : self.taken]

    def _draw(self, count: int) -> torch.Tensor:
        noise = torch.rand(count, generator=self.generator, device=self.generator.device, dtype=self.dtype)
        return noise.sub_(0.5).mul_(2 * self.span).add_(1.0)


def _depth(name: str, args: Any, result: torch.Tensor) -> int:
    """Return the number of terms that are summed for one element of the result, at most MAX_DEPTH."""
    if name in CONTRACTED:
        return min(MAX_DEPTH, max(1, int(args[CONTRACTED[name]].shape[-1])))
    first = args[0] if args and type(args[0]) is torch.Tensor else None
    if name in SCANS and first is not None and first.ndim and len(args) > 1:
        return min(MAX_DEPTH, max(1, int(first.shape[args[1]]) // 2))
    if first is None:
        first = next((t for _, t in make.tensors_in(list(args))), result)
    return min(MAX_DEPTH, max(1, first.numel() // max(1, result.numel())))


def redrawn_roundings(seed: int, units: float = 1.0, least: float = 0.0) -> TorchDispatchMode:
    """Return a dispatch mode that changes the result of every operation by up to `units` in the last place, which is
    another sample of its rounding errors.

    The result of a sum of n terms changes by up to √(n/3) units of float32 if that is more, as for a sequential sum.
    `least` is the least relative size of a unit.
    """
    return _RedrawnRoundings(seed, units, least)
