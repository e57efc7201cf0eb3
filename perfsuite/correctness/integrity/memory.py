"""Faults of memory: changed inputs, accesses out of bounds, static buffers returned as outputs, unwritten outputs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import dlpack

from perfsuite.correctness import dispatch_modes, execution, forms, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe, bytes_of, same_leaf
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import ModuleSpec, holds
from perfsuite.draws import inputs as make
from perfsuite.draws.memory_layouts import fill_poison, memory_of
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.state import properties

LATER_CALLS = 9
"""Number of later calls that an output must survive. A side may hand out a few buffers in turn."""


def undeclared_mutation(probe: Probe) -> None:
    """Check that an input which is not in `mutates` or `writes` is unchanged bit for bit, with its whole storage, and
    that a side writes to no memory between the elements of the inputs that it may change."""
    before: list[tuple[str, torch.Tensor, torch.Tensor, torch.Size, tuple[int, ...]]] = []
    changed: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def remember(values: dict[str, Any]) -> dict[str, Any]:
        for path, tensor in make.unchanging(probe.pair, values):
            _fill_gaps(tensor)
            before.append((path, tensor, bytes_of(tensor.untyped_storage()).clone(), tensor.shape, tensor.stride()))
        for name, value in values.items():
            for path, tensor in make.changing(probe.pair, name, value):
                _fill_gaps(tensor)
                changed.append((path, tensor, memory_of(tensor).clone()))
        return values

    exchanged = _exchanged(probe, remember)
    if exchanged and not _exchanged(probe.of_reference(), lambda values: values):
        raise probe.fault(exchanged)
    for path, tensor, storage, shape, stride in before:
        if tensor.shape != shape or tensor.stride() != stride:
            raise probe.fault(f"reshapes its input {path} in place")
        if not torch.equal(bytes_of(tensor.untyped_storage()), storage):
            raise probe.fault(probe.undeclared_change(path, tensor))
    for path, tensor, storage in changed:
        after = memory_of(tensor).clone()
        if after.numel() != storage.numel():
            continue  # the side has replaced its memory
        # The elements themselves may change, so they are made equal before the comparison.
        where = tensor.shape, tensor.stride(), tensor.storage_offset()
        after.as_strided(*where).copy_(storage.as_strided(*where))
        if not torch.equal(bytes_of(after.untyped_storage()), bytes_of(storage.untyped_storage())):
            raise probe.fault(f"writes beside the elements of its input {path}, which it changes in place")


@dataclass(frozen=True)
class _Held:
    """The tensors that the inputs hold."""

    tensors: dict[str, torch.Tensor]
    """Path → tensor, without the buffers of modules and without inputs that are used up."""
    tied: dict[str, str]
    """Which parameters and buffers are one tensor."""
    places: dict[str, int]
    """Path → address of each tensor that a call changes in place. Those of modules and of stateful pairs are left out:
    parameters may be flattened into one buffer, and `contexts` writes to them between the steps."""
    paths: list[str]
    """Paths of all tensors, also of buffers and of inputs that are used up; empty for a stateful pair."""

    @classmethod
    def of(cls, pair: Pair, values: dict[str, Any]) -> _Held:
        given = {name: value for name, value in values.items() if name not in pair.changed - set(pair.mutates)}
        tensors = {path: t for name, value in given.items() for path, t in make.tensors_in(value, name, buffers=False)}
        tied = {name: whose for name, whose in properties.of(given) if name.startswith(properties.TENSOR)}
        changed = [name for name in pair.mutates if name in given and not holds(pair.inputs.get(name), ModuleSpec)]
        places = {path: t.data_ptr() for name in changed for path, t in make.changing(pair, name, given[name])}
        paths = [path for name, value in values.items() for path, _ in make.tensors_in(value, name)]
        return cls(tensors, tied, {}, []) if pair.is_stateful else cls(tensors, tied, places, paths)

    def exchanged(self, now: _Held) -> str:
        """Describe the first tensor that a call has removed, added, replaced, tied, untied or moved. Return "" if the
        inputs hold the same tensors in the same memory."""
        if regrouped := _regrouped([*self.tensors], [*now.tensors]):
            return regrouped
        for path, tensor in self.tensors.items():
            if tensor is not now.tensors[path]:
                return f"replaces {path} in its input by another tensor; the caller may hold the one before"
        for name, whose in self.tied.items():
            if now.tied.get(name, whose) != whose:
                return f"changes {name} from {whose} to {now.tied[name]}"
        if regrouped := _regrouped(self.paths, now.paths):
            return regrouped
        moved = (path for path, place in self.places.items() if now.places[path] != place)
        return next(
            (f"moves its input {path} to other memory; views of it do not change with it" for path in moved), ""
        )


def _regrouped(before: Sequence[str], after: Sequence[str]) -> str:
    """Describe the first path that a call has removed or added. Return "" if the paths are the same."""
    removed = (f"removes {path} from its input, which the caller still has" for path in before if path not in after)
    added = (f"adds {path} to its input, which the caller still has" for path in after if path not in before)
    return next(itertools.chain(removed, added), "")


def _exchanged(probe: Probe, remember: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Call the side, and describe the first tensor that is then missing in an input, or new or another one. Return ""
    if there is none. `remember` is called with the inputs, and with those of each step."""
    given: list[tuple[dict[str, Any], _Held]] = []

    def held(values: dict[str, Any]) -> dict[str, Any]:
        given.append((values, _Held.of(probe.pair, values)))
        return remember(values)

    probe.call(held(probe.drawn()), map_step=lambda values: held(make.clone(values)))
    found = (before.exchanged(_Held.of(probe.pair, values)) for values, before in given)
    return next((words for words in found if words), "")


def _fill_gaps(tensor: torch.Tensor) -> None:
    """Fill the memory between the elements of a floating-point tensor with ones. It holds NaN before, and adding to NaN
    would not show."""
    whole, elements = memory_of(tensor), tensor.detach()
    if not tensor.is_floating_point() or 0 in tensor.stride() or whole.numel() == tensor.numel():
        return
    kept = elements.clone()
    whole.fill_(1)
    elements.copy_(kept)


def touched_input(probe: Probe) -> None:
    """Check that no call of the other checks wrote to an undeclared input, even if it restored the values.

    This check comes last, because the other checks name a fault more precisely.
    """
    if probe.touched is not None:
        raise probe.fault(
            f"{probe.undeclared_change(*probe.touched)} (it puts the values back, or changes them now and then)"
        )


def private_buffer(probe: Probe) -> None:
    """Check that later calls with other inputs do not overwrite an output, and return none in its memory."""
    if probe.pair.is_stateful:
        return  # its state is a declared buffer
    other = probe.other_case()
    first = {n: leaf for n, leaf in probe.call(probe.drawn()).items() if isinstance(leaf, torch.Tensor)}
    kept = {n: leaf.clone() for n, leaf in first.items()}
    for _ in range(LATER_CALLS):
        later = probe.call(probe.drawn(other), other)
        for name, tensor in first.items():
            if not forms.identical(tensor, kept[name]):
                raise probe.fault(
                    f"overwrites {name} of an earlier call: it hands out a private static buffer; return a copy"
                )
            following = later.get(name)
            if (
                isinstance(following, torch.Tensor)
                and tensor.numel()
                and following.numel()
                and tensor.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
                and not reference_keeps(probe, name, other)
            ):
                raise probe.fault(
                    f"returns {name} of two calls in the same memory: it hands out a private static buffer; "
                    f"return a copy"
                )
    _kept_answers(probe)


def reference_keeps(probe: Probe, name: str, other: Case) -> bool:
    """Return whether two calls of the reference, too, return this output in the same memory, as with a constant
    table."""
    reference = probe.of_reference()
    first, later = reference.call(reference.drawn()).get(name), reference.call(reference.drawn(other), other).get(name)
    both = [t.untyped_storage().data_ptr() for t in (first, later) if isinstance(t, torch.Tensor)]
    return len(both) == 2 and both[0] == both[1]


def _kept_answers(probe: Probe) -> None:
    """Check that values which a caller writes into an output do not come back in a later answer to the same inputs."""
    if probe.pair.changed:
        return
    values = probe.drawn()
    first, plain = (probe.call(make.regrouped(values)) for _ in range(2))
    plain = execution.copies_of(plain)
    inputs = {t.untyped_storage().data_ptr() for n, v in values.items() for _, t in make.tensors_in(v, n)}
    owned = {
        n: leaf.detach()
        for n, leaf in first.items()
        if isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and leaf.untyped_storage().data_ptr() not in inputs
    }
    kept = {n: leaf.clone() for n, leaf in owned.items()}
    # torch refuses to write to an expanded output. A caller could not write to it either.
    with contextlib.suppress(RuntimeError):
        for leaf in owned.values():
            leaf.fill_(float("nan"))
    again = probe.call(make.regrouped(values))
    changed = [n for n, leaf in again.items() if _has_nan(leaf) and not _has_nan(plain.get(n))]
    with contextlib.suppress(RuntimeError):
        for n, leaf in owned.items():
            leaf.copy_(kept[n])  # undo it, so that the next draw finds such a side, too
    if name := next((n for n in changed if not reference_keeps(probe, n, probe.other_case())), ""):
        raise unwritten(probe) or probe.fault(
            f"keeps {name} and returns it again: what a caller writes into it comes back; return a copy"
        )


def _has_nan(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and bool(leaf.isnan().any())


def unwritten_output(probe: Probe) -> None:
    """Check that every element of an output is written. Fresh memory is filled with NaN here, so that an unwritten
    element shows."""
    try:
        probe.truth()
    except truths.Discard:
        return
    with poisoned_memory():
        poisoned = probe.call(probe.drawn())
    try:
        probe.judge(poisoned)
    except NotEquivalent as error:
        if not _holds_nan(poisoned):
            if drifted := probe.drifted(error):
                raise drifted from None
            with poisoned_memory():
                again = _gives(probe, poisoned)
            if not again:
                raise  # not the memory decides: the same memory gives another answer
        with _Zeroed():
            same = _gives(probe, poisoned)
        if same:
            raise  # also wrong without poisoned memory
        with deterministic_algorithms(fill=False), _Zeroed():
            same = _gives(probe, poisoned)
        if same:
            return  # in deterministic mode a library uses another, less precise algorithm
        raise probe.fault(
            f"leaves output unwritten, or reads memory it never wrote: with fresh memory filled with NaN, {error}"
        ) from None


def out_of_bounds(probe: Probe) -> None:
    """Check that the side neither writes to nor reads from guards, which surround its inputs and the memory that it
    allocates."""
    if not probe.answers_rightly():
        return  # wrong without guards, too: the equivalence proof reports it
    try:
        fences, produced = _between_guards(probe)
    except RuntimeError as error:
        if NOT_RESIZABLE not in str(error):
            raise
        # Some sides free memory by resizing its storage to 0, which a storage between guards does not allow.
        fences, produced = _between_guards(probe, allocated=False)
    for guard in fences:
        if not guard.is_intact():
            raise probe.fault(f"writes outside of {guard.what}: the memory beside it has changed")
    try:
        probe.judge(produced)
    except NotEquivalent as error:
        if not _holds_nan(produced) and (drifted := probe.drifted(error)):
            raise drifted from None
        raise probe.fault(
            f"reads outside of its tensors: with NaN in the memory beside them, which it should not see, {error}"
        ) from None


def _between_guards(probe: Probe, *, allocated: bool = True) -> tuple[list[_Fence], Leaves]:
    """Call the side. Return its outputs, and the guards around the inputs and, if `allocated`, around the memory that
    the side allocates."""
    fences: list[_Fence] = []

    def fence(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: make.map_tensors(value, functools.partial(_fenced, what=f"its input {name}", fences=fences))
            for name, value in values.items()
        }

    values = fence(probe.drawn())
    with _Guarded(fences) if allocated else contextlib.nullcontext():
        return fences, probe.call(values, map_step=fence)


def unwritten(probe: Probe) -> NotEquivalent | None:
    """Return the fault of a side whose wrong answers come from memory that it never wrote; None if that is not so.

    Unwritten memory makes answers change from call to call, which looks like another fault. If such memory is filled
    with NaN, the answers hold the same NaN each time.
    """
    with poisoned_memory():
        first, again = probe.call(probe.drawn()), probe.call(probe.drawn())
    if not _holds_nan(first) or not all(same_leaf(leaf, again.get(name)) for name, leaf in first.items()):
        return None
    if probe.is_right(first):
        return None
    return probe.fault("leaves output unwritten, or reads memory it never wrote: what lay there before comes out")


def _gives(probe: Probe, leaves: Leaves) -> bool:
    """Return whether another call gives the same outputs, bit for bit."""
    return all(same_leaf(leaves.get(name), leaf) for name, leaf in probe.call(probe.drawn()).items())


def _holds_nan(leaves: Leaves) -> bool:
    return any(_has_nan(leaf) for leaf in leaves.values())


NOT_RESIZABLE = "resize storage that is not resizable"
"""Part of torch's message about resizing memory that another library owns."""
GUARD_BYTES = 4096
"""Bytes of a guard. It holds a whole row of a tile past the end, and is a multiple of every alignment."""


@dataclass(slots=True)
class _Fence:
    """The guards before and after a tensor, and the bytes with which they were filled."""

    what: str
    sides: tuple[torch.Tensor, torch.Tensor]
    filled: tuple[torch.Tensor, torch.Tensor]

    def is_intact(self) -> bool:
        return all(torch.equal(bytes_of_tensor(a), b) for a, b in zip(self.sides, self.filled, strict=True))


def _fenced(tensor: torch.Tensor, what: str, fences: list[_Fence]) -> torch.Tensor:
    """Return a tensor with the same values, strides and offset, whose storage has a guard before and after it.

    Add the guards to `fences`. A complex, empty, or not plain strided tensor is returned as it is.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a DTensor has no memory of its own
    if not plain or not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor
    if tensor.dtype.is_complex:
        return tensor
    size = tensor.element_size()
    held = tensor.untyped_storage().nbytes() // size
    guard = GUARD_BYTES // size
    whole = torch.empty(held + 2 * guard, dtype=tensor.dtype, device=tensor.device)
    fill_poison(whole)
    whole[guard : guard + held] = memory_of(tensor)[:held]
    sides = (whole[:guard], whole[guard + held :])
    fences.append(_Fence(what, sides, (bytes_of_tensor(sides[0]).clone(), bytes_of_tensor(sides[1]).clone())))
    # The storage begins after the first guard, because code may assume that new memory has storage offset 0.
    inner = dlpack.from_dlpack(bytes_of_tensor(whole[guard:])).view(tensor.dtype)
    return inner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bytes_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
ALLOCATES_FILLED = frozenset({"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "new_full"})


class _Guarded(dispatch_modes.OutsideCompiled):
    """Dispatch mode that puts guards around the memory that the side allocates."""

    def __init__(self, fences: list[_Fence]) -> None:
        super().__init__()
        self.fences = fences

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and (name in ALLOCATES or name in ALLOCATES_FILLED):
            return _fenced(result, "memory that it allocated", self.fences)
        return result


class _Zeroed(dispatch_modes.OutsideCompiled):
    """Dispatch mode that fills uninitialized memory with zeros. The NaN of freed memory may still be there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = isinstance(result, torch.Tensor) and func.overloadpacket.__name__ in ALLOCATES
        return result.zero_() if fresh else result


def poisoned_memory() -> AbstractContextManager[None]:
    """Fill every uninitialized tensor (from torch.empty and the like) with NaN, or with the largest integer."""
    return deterministic_algorithms(fill=True)


@contextmanager
def deterministic_algorithms(*, fill: bool) -> Iterator[None]:
    """Turn on torch's deterministic mode, in which libraries use other algorithms. With `fill`, torch also fills
    uninitialized memory, which it does only in this mode."""
    # use_deterministic_algorithms would import torch._inductor, which takes seconds.
    mode = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = fill
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = filled
            torch.set_deterministic_debug_mode(mode)
