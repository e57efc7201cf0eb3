"""Run a Gluon kernel for Hopper GPUs on a CPU: one thread for each group of warps, barriers that block.

Operations that may complete late on a GPU complete late here. A copy into shared memory gives NaN until a thread waits
for its barrier. A copy out of shared memory reads it when the thread waits for the read, and writes when the thread
waits until the copy is visible. A product reads its operands when the thread waits for it. A kernel that waits too
little computes wrong numbers, and one that waits too much raises. Fences, and barriers within a group of warps, are not
tested.
"""

import importlib.util
import random
import struct
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

LIMIT_S = 60
"""A longer wait counts as a deadlock."""
LOCK = threading.RLock()
"""Held during an atomic operation on global memory, and during any change of a barrier."""
CHANGED = threading.Condition(LOCK)
LOCAL = threading.local()


class Value(torch.Tensor):
    """A tensor whose `type` has a layout, as in Gluon."""

    type = SimpleNamespace(layout=None)


class Whole(int):
    """An integer loaded from memory."""

    def to(self, dtype, bitcast=False):
        assert dtype == torch.float32
        assert bitcast
        return struct.unpack("f", struct.pack("i", self))[0]


class Pointer:
    """One or more positions in a tensor."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


class Barrier:
    """A barrier in shared memory: a phase is complete after all its arrivals and bytes."""

    def __init__(self):
        self.count = self.arrivals = self.phase = self.bytes = 0
        self.coming = []

    def init(self, count):
        self.count = count

    def arrive(self, arrivals=1, expected=0, come=0):
        with CHANGED:
            self.arrivals += arrivals
            self.bytes += expected - come
            assert self.arrivals <= self.count, "more arrivals than a phase has"
            if self.arrivals == self.count and self.bytes == 0:
                self.arrivals = 0
                self.phase += 1
                CHANGED.notify_all()

    def wait(self, parity):
        def is_complete():
            while self.phase & 1 == parity and self.coming:
                self.coming.pop(0)()
            return self.phase & 1 != parity

        pause()
        with CHANGED:
            if not CHANGED.wait_for(is_complete, LIMIT_S):
                raise RuntimeError("waits for a barrier that does not complete")


class Shared:
    """Shared memory, or barriers in it."""

    def __init__(self, held):
        self.held = held

    def index(self, i):
        return self.held[i] if isinstance(self.held, list) else Shared(self.held[i])

    def slice(self, start, length):
        return Shared(self.held[start : start + length])

    def _reinterpret(self, dtype, shape, layout):
        return Columns(self, shape)

    def permute(self, order):
        return Shared(self.held.permute(order))

    def load(self, layout):
        return self.held.clone().as_subclass(Value)

    def store(self, value):
        self.held.copy_(value)

    @property
    def dtype(self):
        return self.held.dtype


class Columns:
    """Shared memory as a matrix stored in consecutive panels."""

    def __init__(self, memory, shape, order=(0, 1)):
        self.memory, self.shape, self.order = memory, shape, order

    def permute(self, order):
        return Columns(self.memory, self.shape, order)

    @property
    def held(self):
        rows, columns = self.shape
        panels = self.memory.held.view(-1, rows, self.memory.held.shape[1])
        return panels.transpose(0, 1).reshape(rows, columns).permute(self.order)


class Descriptor:
    """A matrix in global memory that is copied in blocks."""

    def __init__(self, tensor, block, layout):
        self.tensor, self.block, self.layout, self.dtype = tensor, block, layout, tensor.dtype

    def at(self, row, column):
        rows, columns = self.block
        assert 0 <= row <= len(self.tensor) - rows
        return self.tensor[row : row + rows, column : column + columns]


class Kernel:
    """A Gluon function that can be launched."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **options):
        return self.function(*args, **options)

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg, **options):
            given = [Pointer(t.flatten()) if isinstance(t, torch.Tensor) else t for t in args]
            together([(self.function, given, options) for _ in range(grid[0])])

        return launch


def pause():
    time.sleep(random.choice([0, 0, 0, 1e-4]))


def together(calls):
    """Run each call in its own thread; raise the first error."""
    raised = []

    def run(function, args, options):
        LOCAL.stores, LOCAL.written = [], []
        try:
            function(*args, **options)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not raised:
            thread.join(0.1)
    if raised:
        raise raised[0]


def atomic_add(pointer, value, sem):
    pause()
    with LOCK:
        before = int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] += value
    return before


def load(pointer, mask=None, other=None):
    if isinstance(pointer.offset, int):
        return Whole(pointer.memory[pointer.offset])
    found = pointer.memory[torch.where(mask, pointer.offset, 0)]
    return torch.where(mask, found, other).as_subclass(Value)


def where(condition, yes, no):
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def assembly(text, *_):
    """Make the stores visible if the assembly text waits for them."""
    if "wait_group" in text:
        read_stored()
        for place, value in LOCAL.written:
            place.copy_(value)
        LOCAL.written.clear()


def read_stored():
    LOCAL.written += [(descriptor.at(*place), source.held.clone()) for descriptor, place, source in LOCAL.stores]
    LOCAL.stores.clear()


def copy_in(descriptor, place, barrier, to):
    value = descriptor.at(*place).clone()
    to.held.fill_(torch.nan)

    def come():
        to.held.copy_(value)
        barrier.arrive(0, come=value.nbytes)

    with CHANGED:
        barrier.coming.append(come)
        CHANGED.notify_all()


class Products:
    """A sum of products, some of which are pending."""

    def __init__(self, total):
        self.total, self.pending = total, []


def multiply(left, right, products, is_async):
    assert is_async
    products.pending.append((left, right))
    return products


def wait_for_products(left, of):
    (products,) = of
    while len(products.pending) > left:
        a, b = products.pending.pop(0)
        products.total = products.total + a.held.float() @ b.held.float()
    return products if left else products.total.as_subclass(Value)


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype))


class Layout:
    """A layout in shared memory; it has no effect here."""

    def __init__(self, *_):
        pass

    @classmethod
    def get_default_for(cls, block, dtype):
        return cls()


LANGUAGE = {
    "constexpr": lambda value: value,
    "allocate_shared_memory": allocate,
    "arange": lambda first, end, layout: torch.arange(first, end).as_subclass(Value),
    "atomic_add": atomic_add,
    "barrier": pause,
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "inline_asm_elementwise": assembly,
    "join": lambda a, b: torch.stack([a, b], -1),
    "load": load,
    "max": lambda value, axis: int(value.max()),
    "maximum": lambda value, least: max(float(value), least),
    "permute": lambda value, order: value.permute(order),
    "reshape": lambda value, shape: value.reshape(shape),
    "split": lambda value: value.unbind(-1),
    "sqrt_rn": lambda value: float(value) ** 0.5,
    "static_range": range,
    "sum": lambda value, axis: value.sum(axis),
    "warp_specialize": lambda groups, warps, registers: together([(f, given, {}) for f, given in groups]),
    "where": where,
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    **{name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int32", "int64")},
    **{name: lambda *_, **__: None for name in ("BlockedLayout", "NVMMADistributedLayout", "SliceLayout")},
    "SwizzledSharedLayout": lambda *_: None,
    "NVMMASharedLayout": Layout,
}

HOPPER = {
    "fence_async_shared": lambda: None,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, expected: barrier.arrive(expected=expected),
        arrive=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
        wait=lambda barrier, phase, pred=True: barrier.wait(phase) if pred else None,
    ),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=copy_in,
        async_copy_shared_to_global=lambda descriptor, place, source: LOCAL.stores.append((descriptor, place, source)),
        store_wait=lambda left: read_stored(),
    ),
    "warpgroup_mma": multiply,
    "warpgroup_mma_init": lambda total: total if isinstance(total, Products) else Products(total),
    "warpgroup_mma_wait": wait_for_products,
}


def on_cpu(module):
    """Return a copy of the module whose Gluon kernels run on the CPU."""
    gluon = "triton.experimental.gluon"
    fakes = {
        "triton.experimental": {"gluon": SimpleNamespace(jit=Kernel)},
        gluon: {"language": SimpleNamespace(**LANGUAGE)},
        f"{gluon}.language.nvidia.hopper": HOPPER,
        f"{gluon}.nvidia.hopper": {"TensorDescriptor": SimpleNamespace(from_tensor=Descriptor)},
    }
    made = {}
    for name, members in fakes.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(members)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_cpu", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, made):
        spec.loader.exec_module(copy)
    return copy
