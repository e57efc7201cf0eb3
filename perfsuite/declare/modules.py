"""Support sides that are `torch.nn.Module`s: all are called with the reference's module and share its parameters."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from perfsuite.declare.specs import ConstantSpec, Floats, Integers, ModuleSpec, Sampled, Spec, TensorSpec, module
from perfsuite.errors import PairError

_Named: TypeAlias = "dict[str, tuple[str, Any]]"

INPUT = "module"
"""Name of the input with the parameters, in `mutates` and in messages about gradients."""
VARIED = 0.1
"""Largest relative change of a weight between draws; a tensor of zeros changes by this absolute amount."""
DYNAMO = "torch._dynamo.eval_frame"
"""Module of the objects that torch.compile returns."""
FEW_VALUES = 16
"""Most different values of a template that counts as labels, signs or a mask. Only these values are drawn for it."""


def is_module(value: object) -> bool:
    """Return whether the value is a torch.nn.Module."""
    return is_module_type(type(value))


def is_module_type(kind: type) -> bool:
    """Return whether the type is torch.nn.Module or a class derived from it."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.nn.Module)


def unwrapped(call: Any) -> Any:
    """Return the function or module inside any nesting of functools.partial, torch.compile and `Sharing`."""
    while True:
        inner = _inside(call)
        if inner is None:
            inner = _before_compiling(call)
        if inner is None:
            return call
        call = inner


def is_compiled(call: Any) -> bool:
    """Return whether torch.compile returned the callable, also inside a functools.partial or `Sharing`."""
    while (inner := _inside(call)) is not None:
        call = inner
    return _before_compiling(call) is not None


def _inside(call: Any) -> Any:
    if isinstance(call, functools.partial):
        return call.func
    return call.module if isinstance(call, Sharing) else None


def _before_compiling(call: Any) -> Any:
    """Return the callable that was passed to torch.compile; None if torch.compile did not return `call`."""
    dynamo: Any = sys.modules.get(DYNAMO)
    if dynamo is None:
        return None
    if isinstance(call, dynamo.OptimizedModule):
        return call._orig_mod
    is_its_own = getattr(call, "__globals__", None) is vars(dynamo)
    return getattr(call, "_torchdynamo_orig_callable", None) if is_its_own else None


def has_state(value: Any) -> bool:
    """Return whether the module has a parameter or a buffer."""
    return any(True for _ in value.parameters()) or any(True for _ in value.buffers())


def spec_of(reference: Any) -> ModuleSpec:
    """Return the spec of the input that is the reference's module: a copy of it, with slightly other weights in each
    draw.

    So a side that computes a value from the weights only once, and would be wrong after a training step, is detected.
    """

    def build() -> Any:
        torch: Any = sys.modules["torch"]
        clone = copy.deepcopy(reference)
        with torch.no_grad():
            for buffer in _others(clone):
                # One factor for the whole buffer, so that a sorted buffer or a mask stays one.
                buffer.mul_(1 + VARIED * float(2 * torch.rand(()) - 1))
            for tensor in [*clone.parameters(), *_statistics(clone)]:
                _vary(tensor)
        return clone

    return module(build)


def vary_constants(built: Any) -> None:
    """Change parameters, and running means and variances, that have one value only, as a layer's bias and the weight of
    a norm have before training. A side could ignore them, or use others of the same value."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        for tensor in [*built.parameters(), *_statistics(built)]:
            if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
                _vary(tensor)


def _vary(tensor: Any) -> None:
    """Change each floating-point or complex element of the tensor a little, in place, by torch's random numbers."""
    torch: Any = sys.modules["torch"]
    if tensor.is_floating_point() or tensor.is_complex():
        noise = VARIED * (2 * torch.rand(tensor.shape).to(tensor) - 1)
        # A weight that is zero at first, such as a bias, would stay zero, so that a side could ignore it.
        tensor.mul_(1 + noise) if tensor.any() else tensor.add_(noise)


def changes_buffers(module: Any) -> bool:
    """Return whether a call changes running means and variances of the module's normalisation layers, as in
    training."""
    torch: Any = sys.modules["torch"]
    return any(
        isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and part.running_mean is not None
        for part in module.modules()
    )


def _statistics(module: Any) -> Iterator[Any]:
    """Yield the running means and variances of the module's normalisation layers."""
    torch: Any = sys.modules["torch"]
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.running_mean is not None:
            yield from (part.running_mean, part.running_var)


def _others(module: Any) -> Iterator[Any]:
    """Yield the persistent floating-point buffers, except running means and variances."""
    statistics = {id(tensor) for tensor in _statistics(module)}
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            stored = name not in part._non_persistent_buffers_set
            if stored and id(buffer) not in statistics and buffer.is_floating_point():
                yield buffer


class Own:
    """Callable of the reference: calls the module that it is given."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.__wrapped__ = type(module).forward  # the function by which the side's source is found

    def __call__(self, module: Any, *inputs: Any) -> Any:
        return module(*inputs)


class Sharing:
    """Callable of another side: calls a copy of its own module that shares the parameters and buffers of the given one.

    Raises PairError if the names or the shapes of their parameters or buffers differ.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name
        self.__wrapped__ = type(module).forward
        self._held: tuple[Callable[[], Any], Any] = (lambda: None), None
        """(Weak reference to the module that was given last, copy that shares its parameters)."""

    def __call__(self, module: Any, *inputs: Any) -> Any:
        return self.sharing(module)(*inputs)

    def sharing(self, module: Any) -> Any:
        """Return the copy that shares the parameters of the given module."""
        held = self._held  # read once, because another thread may call this with another module
        if held[0]() is not module:
            held = self._held = weakref.ref(module), self._sharing(module)
        return held[1]

    def _sharing(self, module: Any) -> Any:
        # The memo keeps deepcopy from copying tensors. All of them are replaced below.
        kept = {id(tensor): tensor for tensor in (*self.module.parameters(), *self.module.buffers())}
        clone = copy.deepcopy(self.module, kept).train(module.training)
        every = {"remove_duplicate": False}  # a parameter with two names is shared under both
        for what, mine, theirs in (
            ("parameter", _by_name(clone.named_parameters(**every)), _by_name(module.named_parameters(**every))),
            ("buffer", _by_name(clone.named_buffers(**every)), _by_name(module.named_buffers(**every))),
        ):
            for name in sorted(mine.keys() ^ theirs.keys()):
                has, lacks = (self.name, "reference") if name in mine else ("reference", self.name)
                raise PairError(
                    f"the {has} module has a {what} {name!r} and the {lacks} module has none: give them the same names"
                )
            self._check_ties(what, mine, theirs)
            for name, (_, tensor) in theirs.items():
                own_name, own = mine[name]
                if own.shape != tensor.shape:
                    raise PairError(
                        f"{what} {name!r} has shape {tuple(own.shape)} in the {self.name} module and "
                        f"{tuple(tensor.shape)} in the reference: build both with the same arguments"
                    )
                owner, _, leaf = own_name.rpartition(".")
                holder = clone.get_submodule(owner)
                (holder._parameters if what == "parameter" else holder._buffers)[leaf] = tensor
        return clone

    def _check_ties(self, what: str, mine: _Named, theirs: _Named) -> None:
        """Raise PairError if two names are one tensor in one of the modules only."""
        own, of_reference = _first_names(mine), _first_names(theirs)
        for name in sorted(theirs):
            if own[name] == of_reference[name]:
                continue
            tied = own[name] if of_reference[name] == name else of_reference[name]
            has, lacks = (self.name, "reference") if tied == own[name] else ("reference", self.name)
            raise PairError(
                f"{what}s {tied!r} and {name!r} are one tensor in the {has} module and two in the {lacks} module, "
                f"which are trained apart: tie them in both or in neither"
            )


def _first_names(named: _Named) -> dict[str, str]:
    """Return name → the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(named[name][1]), name) for name in sorted(named)}


def _by_name(named: Iterable[tuple[str, Any]]) -> _Named:
    """Return name without torch.compile's "_orig_mod" → (name, tensor)."""
    return {".".join(part for part in name.split(".") if part != "_orig_mod"): (name, t) for name, t in named}


def specs_of(templates: Sequence[Any]) -> dict[str, Spec]:
    """Return specs of inputs with the shapes, dtypes and layouts of these templates, and values in the same range."""
    return {f"x{number}": _spec(value) for number, value in enumerate(templates)}


def _spec(template: Any) -> Spec:
    torch: Any = sys.modules["torch"]
    if isinstance(template, (list, tuple)) and not isinstance(template, torch.Size):
        if type(template) not in (list, tuple):
            raise PairError(f"get_inputs() returns a {type(template).__name__}: return a list or a plain tuple instead")
        return type(template)(_spec(value) for value in template)
    if isinstance(template, Mapping):
        return {key: _spec(value) for key, value in template.items()}
    if not isinstance(template, torch.Tensor):
        return ConstantSpec(value=template)
    if template.is_meta:
        raise PairError(
            "get_inputs() returns a tensor on the meta device, which has no values from which a range could be taken: "
            "create it on the CPU"
        )
    if template.is_complex():
        raise PairError(
            f"get_inputs() returns a tensor of {str(template.dtype).removeprefix('torch.')}, and only real inputs are "
            f"drawn: return its real and imaginary parts, and let the module join them with torch.complex"
        )
    if template.layout is not torch.strided or template.is_nested:
        raise PairError(
            "get_inputs() returns a sparse or nested tensor, and only dense inputs are drawn: return the parts of it, "
            "and let the module join them"
        )
    dtype = None if template.dtype == torch.float32 else str(template.dtype).removeprefix("torch.")
    return TensorSpec(dims=tuple(template.shape), dtype=dtype, values=_values(template), layouts=(_layout(template),))


def _values(template: Any) -> Floats | Integers | Sampled:
    torch: Any = sys.modules["torch"]
    some = template.detach().flatten()[:: max(1, template.numel() // (1 << 16))].cpu()
    different = some.unique()
    if not template.numel():
        return Floats()
    if not template.dtype.is_floating_point:
        return Integers(low=int(template.min()), high=int(template.max()) + 1)
    if different.numel() <= min(FEW_VALUES, some.numel() - 1):

        def chosen(generator: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            return different[torch.randint(0, different.numel(), shape, generator=generator)].to(dtype)

        return Sampled(make=chosen)
    low, high = float(some.min()), float(some.max())
    return Floats(low=0.0, high=max(1.0, high)) if low >= 0 else Floats(low=low, high=high)


def _layout(template: Any) -> str:
    if template.is_contiguous():
        return "contiguous"
    return "transposed" if template.ndim >= 2 and template.transpose(-1, -2).is_contiguous() else "strided"
