"""Build the tensors and objects that a case describes, and iterate over, copy and change them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perfsuite.declare import modules
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import BUFFERS, CHANGED
from perfsuite.declare.specs import (
    ConstantSpec,
    Floats,
    GeneratorSpec,
    ListSpec,
    ModuleSpec,
    RecordedSpec,
    ScalarSpec,
    TensorSpec,
    accepted,
    holds,
    resolve,
    tensor_spec,
)
from perfsuite.declare.workload import TF32
from perfsuite.draws import module_copies, rank_parts
from perfsuite.draws.memory_layouts import expanded_dim, memory_of, with_layout
from perfsuite.draws.tensor_values import (
    DRAW_ON_DEVICE,
    draw_values,
    dtype_of,
    generator_for,
    regimes,
    seed_for,
    to_device,
    within,
)
from perfsuite.errors import PairError
from perfsuite.records import Case, InputCase

# --- building tensors ----------------------------------------------------------------------------------------


def build(pair: Pair, case: Case, device: str, *, home: Path | None = None) -> dict[str, Any]:
    """Return the inputs that the case describes, on `device`. `home` is the folder of recorded inputs."""
    values = {
        name: _build(spec, name, case, device, home, case.inputs.get(name, InputCase()))
        for name, spec in pair.inputs.items()
    }
    if pair.adjust is not None:
        with torch.no_grad():
            if device == "cpu" or not _adjusted_on_cpu(pair, values):
                pair.adjusted(values)
    return _parted(pair, pair.inputs, _rounded(pair, case, values))


def _rounded(pair: Pair, case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """Round the inputs to the pair's declared precision, but keep the case's dtype. The truth is computed on these."""
    working = pair.precision or case.dtype
    rounded: dict[str, Any] = rounder(working, case.dtype)(rounder(case.dtype, working)(values))
    return rounded


def rounder(source: str, target: str) -> Callable[[Any], Any]:
    """Return a function that converts tensors of the source precision to the target. Other dtypes are kept."""
    if TF32 in (source, target):
        return lambda value: value
    old, new = dtype_of(source), dtype_of(target)
    if old == new:
        return lambda value: value
    return lambda value: map_tensors(value, lambda t: t.to(new) if t.dtype == old else t)


def _parted(pair: Pair, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs, with equal parts for all ranks if the pair declares that."""
    return rank_parts.equal(specs, values, pair.at_ranks) if pair.equal_parts else values


ADJUSTED_ON_CPU = 1 << 14
"""Most elements of inputs that are adjusted on the CPU. On a GPU, launches take longer, and cuDNN plans for each
size."""


def _adjusted_on_cpu(pair: Pair, values: dict[str, Any]) -> bool:
    """Adjust copies on the CPU and copy them back. Return False, with nothing changed, if that is not possible."""
    if sum(tensor.numel() for _, tensor in tensors_in(values)) > ADJUSTED_ON_CPU:
        return False
    copies = map_tensors(values, lambda tensor: tensor.detach().to("cpu", copy=True))
    try:
        pair.adjusted(copies)
    except Exception:  # the user's function may need the device; a real error is raised there again
        return False
    copy_values(values, copies)
    return True


def with_objects_of(
    pair: Pair, values: Mapping[str, Any], case: Case, device: str, *, home: Path | None = None
) -> dict[str, Any]:
    """Return the same inputs, with modules and constants as `pair` builds them, for a pair of another revision.

    Their tensors have the values in `values`. Raises PairError if the tensors' names, shapes or dtypes differ.
    """
    result = dict(values)
    for name, spec in pair.inputs.items():
        if holds(spec, (ModuleSpec, ConstantSpec)):
            built = _build(spec, name, case, device, home, case.inputs.get(name, InputCase()))
            forms = [[(path, t.shape, t.dtype) for path, t in tensors_in(v)] for v in (built, values[name])]
            if forms[0] != forms[1]:
                raise PairError(f"input {name!r} has other tensors than it had")
            copy_values(built, values[name])
            result[name] = built
    return result


def build_step(pair: Pair, case: Case, device: str, step: int) -> dict[str, Any]:
    """Return the step inputs of a stateful pair for this step. Each step has different values.

    In a proof's draw, about one step in four has zeros, if the spec allows them, like the gradients of a batch without
    error.
    """
    zeros = bool(case.inputs) and step > 1 and seed_for(case.seed, f"zeros@{step}") % 4 == 0
    values = {
        name: _build(spec, f"{name}@{step}", case, device, None, _of_step(spec, case.inputs.get(name), zeros))
        for name, spec in pair.step_inputs.items()
    }
    return _parted(pair, pair.step_inputs, _rounded(pair, case, values))


def _of_step(spec: Any, how: InputCase | None, zeros: bool) -> InputCase:
    how, leaf = how or InputCase(), tensor_spec(spec)
    return replace(how, regime="zeros") if zeros and leaf is not None and "zeros" in regimes(leaf) else how


def _build(spec: Any, name: str, case: Case, device: str, home: Path | None, how: InputCase) -> Any:
    match spec:
        case ListSpec():
            count = resolve(spec.count, case.sizes)
            # One item of several is contiguous, because a side may check one item and assume the same layout for the
            # others.
            plain = count % 2 * (count - 1) if count > 1 else None
            hows = [replace(how, layout="contiguous") if i == plain else how for i in range(count)]
            return [_build(spec.item, f"{name}.{i}", case, device, home, hows[i]) for i in range(count)]
        case tuple() | list():
            built = [_build(s, f"{name}.{i}", case, device, home, how) for i, s in enumerate(spec)]
            return type(spec)(built)
        case dict():
            return {k: _build(s, f"{name}.{k}", case, device, home, how) for k, s in spec.items()}
        case _:
            return _build_one(spec, name, case, device, home, how)


def _build_one(spec: Any, name: str, case: Case, device: str, home: Path | None, how: InputCase) -> Any:
    """Build the input of a spec that does not contain other specs."""
    match spec:
        case TensorSpec():
            return _tensor(spec, name, case, device, how)
        case ScalarSpec():
            return case.sizes[name]
        case ConstantSpec():
            return spec.value
        case ModuleSpec():
            return _module(spec, name, case, device)
        case GeneratorSpec():
            return generator_for(case.seed, name, device)
        case RecordedSpec():
            return _recorded(spec, case, device, home)
    raise PairError(
        f"input {name!r}: {spec!r} is not a spec; use tensor(), scalar(), listof(), module(), generator() or constant()"
    )


def _tensor(spec: TensorSpec, name: str, case: Case, device: str, how: InputCase) -> torch.Tensor:
    shape = tuple(resolve(d, case.sizes) for d in spec.dims)
    if spec.layouts is not None and how.layout not in spec.layouts:  # as in a workload, whose layout is the default
        how = replace(how, layout=spec.layouts[0])
    dim = expanded_dim(spec, how.layout, shape)
    if dim is not None:
        once = draw_values(spec, name, case, device, how.regime, (*shape[:dim], 1, *shape[dim + 1 :]))
        return once.expand(shape)
    return with_layout(draw_values(spec, name, case, device, how.regime, shape), how.layout, spec.align)


def _module(spec: ModuleSpec, name: str, case: Case, device: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        _seed(seed_for(case.seed, name))
        built = spec.build(**accepted(spec.build, case.sizes))
        modules.vary_constants(built)
    dtype = dtype_of(case.dtype)
    moved: dict[torch.Tensor, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in moved:
            cast = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)
            moved[tensor] = to_device(cast, device)
        return moved[tensor]

    # Not built.to, which would make complex parameters real, and a buffer with two names two buffers.
    built._apply(move)
    return built


def _seed(seed: int) -> None:
    """Seed the CPU and CUDA generators, without the millisecond that torch.manual_seed takes for absent devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _recorded(spec: RecordedSpec, case: Case, device: str, home: Path | None) -> Any:
    path = (home or Path.cwd()) / spec.path
    try:
        value = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise PairError(f"recorded({spec.path!r}): no such file {path}; record it again with torch.save") from None
    return map_tensors(value, lambda t: t.to(dtype_of(case.dtype)) if t.is_floating_point() else t)


# --- walking and copying -------------------------------------------------------------------------------------


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the nested value with `change` applied to every tensor. Modules are copied with changed tensors, and
    generators are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, torch.Generator):
        return torch.Generator(device=value.device).set_state(value.get_state())
    if isinstance(value, torch.nn.Module):
        return module_copies.changed_copy(value, change)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, change) for v in value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    return value


def regrouped(value: Any) -> Any:
    """Return the nested value with the same tensors, modules and generators in new lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(regrouped, value))
    return {k: regrouped(v) for k, v in value.items()} if isinstance(value, dict) else value


def tensors_in(value: Any, path: str = "", *, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor in a nested value, including the parameters of modules and their
    `buffers`."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, torch.nn.Module):
        for name, parameter in [*value.named_parameters(), *(value.named_buffers() if buffers else ())]:
            yield f"{path}.{name}", parameter
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{i}]", buffers=buffers)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]", buffers=buffers)


def changing(pair: Pair, name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor of an input that a call may change."""
    if name in pair.changed:
        keeps = name in pair.keeping_parameters
        parameters = {path for path, _ in tensors_in(value, name, buffers=False)} if keeps else set()
        yield from ((path, tensor) for path, tensor in tensors_in(value, name) if path not in parameters)


def unchanging(pair: Pair, values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor of these inputs that no call may change."""
    for name, value in values.items():
        if name not in pair.changed:
            yield from tensors_in(value, name)
        elif name in pair.keeping_parameters:
            yield from tensors_in(value, name, buffers=False)


def undeclared_change(pair: Pair, path: str, tensor: torch.Tensor, when: str = "", *, by_reference: bool = True) -> str:
    """Return the words for a side that changes this tensor of an input, with the declaration that permits it if the
    reference changes it, too."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    remedy = f"add {'it' if path == name else repr(name)} to mutates="
    if holds(pair.inputs.get(name), ModuleSpec):
        kind = CHANGED if isinstance(tensor, torch.nn.Parameter) else BUFFERS
        remedy = f"declare mutates={{{name!r}: {kind!r}}}"
    if not by_reference:
        remedy = "the reference does not change it"
    return f"changes its input {path} in place{when}, which the pair does not declare; {remedy}"


def generators_in(value: Any) -> Iterator[torch.Generator]:
    """Yield every generator in a nested value."""
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from generators_in(item)


def bytes_in(value: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    return sum(t.numel() * t.element_size() for _, t in tensors_in(value))


def clone(value: Any) -> Any:
    """Return a copy in new memory that keeps each tensor's layout (strides and storage offset)."""
    return map_tensors(value, _clone_tensor)


def _clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor.clone()
    if 0 in tensor.stride() and tensor.numel() > 1:
        index = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
        return tensor[index].clone().expand(tensor.shape)
    # The whole storage is copied, so that the view keeps its strides and offset.
    whole = memory_of(tensor).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def copy_values(into: Any, values: Any, *, counted: bool = True) -> None:
    """Copy values in place between two nested values of the same structure, tensor by tensor, and states of generators.

    Unless `counted`, torch's version counters do not change, as when a custom kernel writes.
    """
    for (_, tensor), (_, value) in zip(tensors_in(into), tensors_in(values), strict=True):
        _copy_tensor(tensor.detach() if counted else tensor.data, value)
    for generator, other in zip(generators_in(into), generators_in(values), strict=True):
        generator.set_state(other.get_state())


def _copy_tensor(target: torch.Tensor, values: torch.Tensor) -> None:
    # Each element of an expanded tensor is written once.
    for dim, stride in enumerate(target.stride()):
        if not stride:
            width = min(1, target.shape[dim])
            target, values = target.narrow(dim, 0, width), values.narrow(dim, 0, width)
    target.copy_(values)


def upcast(value: Any) -> Any:
    """Return floating-point tensors in float64 and complex ones in complex128, in new memory, and copies of everything
    else."""

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
        return _clone_tensor(tensor)

    return map_tensors(value, doubled)


def jitter(pair: Pair, values: Mapping[str, Any], seed: int, name: str, eps: float) -> dict[str, Any]:
    """Return the inputs with random relative changes up to `eps`, within their declared bounds.

    Subnormal numbers have the spacing of the smallest normal number, so they change by up to `eps` times that. The real
    and the imaginary part of a complex number change independently.
    """

    def moved(spec: Any, generator: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return torch.complex(moved(spec, generator, tensor.real), moved(spec, generator, tensor.imag))
        if not tensor.is_floating_point():
            return _clone_tensor(tensor)
        work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        drawn = torch.rand(tensor.shape, generator=generator, device=generator.device, dtype=work)
        noise = to_device(drawn, tensor.device)
        share, tiny, old = noise.sub_(0.5).mul_(2 * eps), torch.finfo(tensor.dtype).tiny, tensor.detach()
        subnormal = old + old.sign() * tiny * share
        near = torch.where(old.abs() < tiny, subnormal, old * share.add(1.0)).to(tensor.dtype)
        leaf = tensor_spec(spec)
        if leaf is not None and isinstance(leaf.values, Floats) and (leaf.values.low, leaf.values.high) != (None, None):
            return within(near, leaf.values)
        return near

    every = {**pair.inputs, **pair.step_inputs}
    result: dict[str, Any] = {}
    for key, value in values.items():
        large = next((t.device.type for _, t in tensors_in(value) if t.numel() > DRAW_ON_DEVICE), "cpu")
        generator = generator_for(seed, f"jitter {name} {key}", large)
        result[key] = map_tensors(value, functools.partial(moved, every[key], generator))
    return result
