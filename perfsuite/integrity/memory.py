"""Faults of memory: inputs changed or overrun, static buffers handed out, outputs left unwritten."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import dlpack

from perfsuite import dispatch_modes, execution, forms, truths
from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.execution import Leaves
from perfsuite.integrity.probe import Probe, bytes_of, same_leaf
from perfsuite.memory_layouts import fill_poison, memory_of
from perfsuite.pair import Pair
from perfsuite.pair_fields import BUFFERS
from perfsuite.records import Case
from perfsuite.specs import ModuleSpec, holds

LATER_CALLS = 9
"""Number of later calls, since a side may hand out a few buffers in turn."""


def undeclared_mutation(probe: Probe) -> None:
    """An input that is not in `mutates` or `writes` must come back untouched, bit for bit, storage and all."""
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

    values = probe.drawn()
    held = _held(probe.pair, values)
    probe.call(remember(values), given=lambda values: remember(make.clone(values)))
    if (exchanged := _exchanged(held, _held(probe.pair, values))) and not _reference_exchanges(probe):
        raise probe.fault(exchanged)
    for path, tensor, storage, shape, stride in before:
        if tensor.shape != shape or tensor.stride() != stride:
            raise probe.fault(f"reshapes its input {path} in place")
        if not torch.equal(bytes_of(tensor.untyped_storage()), storage):
            remedy = declaration_of_change(probe.pair, path)
            raise probe.fault(f"changes its input {path} in place, which the pair does not declare; {remedy}")
    for path, tensor, storage in changed:
        after = memory_of(tensor).clone()
        if after.numel() != storage.numel():
            continue  # it has other memory now
        # It may change each of the elements themselves.
        where = tensor.shape, tensor.stride(), tensor.storage_offset()
        after.as_strided(*where).copy_(storage.as_strided(*where))
        if not torch.equal(bytes_of(after.untyped_storage()), bytes_of(storage.untyped_storage())):
            raise probe.fault(f"writes beside the elements of its input {path}, which it changes in place")


def _held(pair: Pair, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return path → tensor, for the lists and the modules' parameters among the inputs that no call may change."""
    unchanging = {name: value for name, value in values.items() if name not in pair.changed}
    return {path: t for name, value in unchanging.items() for path, t in make.tensors_in(value, name, buffers=False)}


def _exchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    """Describe the first tensor that a call has removed, added or replaced; empty if the inputs hold the same ones."""
    for path in (*before, *after):
        if path not in after:
            return f"removes {path} from its input, which the caller still has"
        if path not in before:
            return f"adds {path} to its input, which the caller still has"
        if before[path] is not after[path]:
            return f"replaces {path} in its input by another tensor; the caller may hold the one before"
    return ""


def _reference_exchanges(probe: Probe) -> bool:
    values = probe.drawn()
    held = _held(probe.pair, values)
    probe.of_reference().call(values)
    return bool(_exchanged(held, _held(probe.pair, values)))


def declaration_of_change(pair: Pair, path: str) -> str:
    """Return the declaration by which a pair says that a side changes the input at this path."""
    name, _, within = path.partition(".")
    if within and holds(pair.inputs.get(name), ModuleSpec):
        return f"declare mutates={{{name!r}: {BUFFERS!r}}}"
    return "add it to mutates="


def _fill_gaps(tensor: torch.Tensor) -> None:
    """Fill the memory between the elements with ones, where there is any: an addition to NaN would not show."""
    whole, elements = memory_of(tensor), tensor.detach()
    if not tensor.is_floating_point() or 0 in tensor.stride() or whole.numel() == tensor.numel():
        return
    kept = elements.clone()
    whole.fill_(1)
    elements.copy_(kept)


def touched_input(probe: Probe) -> None:
    """No call of the other checks may have written to an undeclared input, also where it put the values back.

    This check is the last: a fault of another kind gets a better name.
    """
    if probe.touched is not None:
        remedy = declaration_of_change(probe.pair, probe.touched)
        raise probe.fault(
            f"changes its input {probe.touched} in place, which the pair does not declare; {remedy} (it puts the "
            f"values back, or changes them now and then)"
        )


def private_buffer(probe: Probe) -> None:
    """An output must survive the calls after it, with other inputs: no static buffer is handed out."""
    if probe.pair.is_stateful:
        return  # its state is a buffer, and declared
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
    """Return whether two calls of the reference return this output in the same memory, too, as a constant table."""
    reference = probe.of_reference()
    first, later = reference.call(reference.drawn()).get(name), reference.call(reference.drawn(other), other).get(name)
    both = [t.untyped_storage().data_ptr() for t in (first, later) if isinstance(t, torch.Tensor)]
    return len(both) == 2 and both[0] == both[1]


def _kept_answers(probe: Probe) -> None:
    """Values that a caller writes into an output must not come back in the answer to the same inputs."""
    if probe.pair.changed:
        return
    values = probe.drawn()
    first, plain = probe.call(values), probe.call(values)
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
    # torch refuses to write to an expanded output, and so would a caller's writing fail.
    with contextlib.suppress(RuntimeError):
        for leaf in owned.values():
            leaf.fill_(float("nan"))
    again = probe.call(values)
    changed = [n for n, leaf in again.items() if _has_nan(leaf) and not _has_nan(plain.get(n))]
    with contextlib.suppress(RuntimeError):
        for n, leaf in owned.items():
            leaf.copy_(kept[n])  # a side that keeps it is to be found at the next draw, too
    if name := next((n for n in changed if not reference_keeps(probe, n, probe.other_case())), ""):
        raise probe.fault(f"keeps {name} and returns it again: what a caller writes into it comes back; return a copy")


def _has_nan(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and bool(leaf.isnan().any())


def unwritten_output(probe: Probe) -> None:
    """Every element of an output must be written: fresh memory reads as NaN here, so that one that the side never
    writes shows."""
    try:
        probe.truth()
    except truths.Discard:
        return
    with poisoned_memory():
        poisoned = probe.call(probe.drawn())
    try:
        probe.judge(poisoned)
    except NotEquivalent as error:
        if not _holds_nan(poisoned) and (drifted := probe.drifted(error)):
            raise drifted from None
        if _gives(probe, poisoned):
            raise  # wrong, but not because of the memory
        with deterministic_algorithms(fill=False):
            same = _gives(probe, poisoned)
        if same:
            return  # a library takes another, less precise algorithm where determinism is asked for
        raise probe.fault(
            f"leaves output unwritten, or reads memory it never wrote: with fresh memory filled with NaN, {error}"
        ) from None


def out_of_bounds(probe: Probe) -> None:
    """Inputs and what the side allocates lie between guards: none may be written to, and none may be read."""
    if not probe.answers_rightly():
        return  # wrong without guards, too: equivalence says how
    try:
        fences, produced = _between_guards(probe)
    except RuntimeError as error:
        if NOT_RESIZABLE not in str(error):
            raise
        # Some sides free memory by setting the size of its storage to 0, which that between guards does not allow.
        fences, produced = _between_guards(probe, allocated=False)
    for guard in fences:
        if not guard.stands():
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
    """Call the side. Return the guards around the inputs and around the memory that the side allocates, and its
    outputs."""
    fences: list[_Fence] = []

    def fence(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: make.map_tensors(value, functools.partial(_fenced, what=f"its input {name}", fences=fences))
            for name, value in values.items()
        }

    values = fence(probe.drawn())
    with _Guarded(fences) if allocated else contextlib.nullcontext():
        return fences, probe.call(values, given=fence)


def unwritten(probe: Probe) -> NotEquivalent | None:
    """Return the fault of a side whose wrong answers come from memory that it never wrote, if that is so.

    Such memory makes a side look as if its answers changed from call to call. Filled with NaN, it gives the same NaN
    each time.
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
"""Part of torch's message where memory has another owner."""
GUARD_BYTES = 4096
"""Bytes of a guard: enough for a whole tile's row past the end, and a multiple of every alignment."""


@dataclass(slots=True)
class _Fence:
    """The memory on both sides of a tensor."""

    what: str
    sides: tuple[torch.Tensor, torch.Tensor]
    filled: tuple[torch.Tensor, torch.Tensor]

    def stands(self) -> bool:
        return all(torch.equal(bytes_of_tensor(a), b) for a, b in zip(self.sides, self.filled, strict=True))


def _fenced(tensor: torch.Tensor, what: str, fences: list[_Fence]) -> torch.Tensor:
    """Return the same values, strides and offset in a storage that has a guard before and one after it."""
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
    # A storage that begins after the first guard: of new memory, code may take for granted that it is at 0.
    inner = dlpack.from_dlpack(bytes_of_tensor(whole[guard:])).view(tensor.dtype)
    return inner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bytes_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
ALLOCATES_FILLED = frozenset({"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "new_full"})


class _Guarded(dispatch_modes.OutsideCompiled):
    """Mode that puts guards around the memory that the side allocates."""

    def __init__(self, fences: list[_Fence]) -> None:
        super().__init__()
        self.fences = fences

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and (name in ALLOCATES or name in ALLOCATES_FILLED):
            return _fenced(result, "memory that it allocated", self.fences)
        return result


def poisoned_memory() -> AbstractContextManager[None]:
    """Make every tensor without values (torch.empty and the like) hold NaN, or the largest integer."""
    return deterministic_algorithms(fill=True)


@contextmanager
def deterministic_algorithms(*, fill: bool) -> Iterator[None]:
    """Turn on torch's deterministic mode. It `fill`s memory only where it is on, and makes libraries take other
    algorithms."""
    # Not use_deterministic_algorithms, which imports torch._inductor, seconds of work.
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
