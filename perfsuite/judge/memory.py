"""Memory that is shared with a judged process. A JSON object describes a place in it."""

from __future__ import annotations

import abc
import base64
import contextlib
import ctypes
import fcntl
import io
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError

ALIGNMENT = 256
DEVICE_PAGE = 2 << 20
"""Bytes of a page of the driver. Allocations fill whole pages: a handle opens whole pages, so the other process could
read everything else in them."""
_HANDLE_BYTES = 64


class Arena(abc.ABC):
    """Memory in which tensors are placed one after another, until it is cleared."""

    def __init__(self) -> None:
        self.end = 0

    def clear(self) -> None:
        """Start again at the beginning of the arena."""
        self.end = 0

    def take(self, size: int) -> int:
        """Reserve this many bytes and return their offset."""
        begin = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = begin + size
        self._reach(self.end)
        return begin

    def place(self, tensor: torch.Tensor, *, filled: bool = True) -> tuple[dict[str, Any], torch.Tensor]:
        """Reserve memory for a copy of the tensor, with the same strides. Return (its place, the copy).

        The values are copied only if `filled`.
        """
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        count = extent if tensor.numel() else 0
        size = count * tensor.element_size()
        offset = self.take(size)
        at = {
            **self._where(),
            "offset": offset,
            "count": count,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        whole = self._bytes(offset, size).view(tensor.dtype)
        there = whole.as_strided(tensor.shape, tensor.stride()) if count else whole.view(tensor.shape)
        if filled:
            there.copy_(tensor)
        return at, there

    @abc.abstractmethod
    def _reach(self, end: int) -> None:
        """Grow the arena to at least `end` bytes."""

    @abc.abstractmethod
    def _where(self) -> dict[str, Any]:
        """Return the fields of a place by which the other process finds the arena."""

    @abc.abstractmethod
    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        """Return this part of the arena as a tensor of bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the memory."""


class HostMemory(Arena):
    """An anonymous file whose descriptor the other process inherits."""

    def __init__(self) -> None:
        super().__init__()
        self.file = os.memfd_create("perfsuite", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Otherwise the other process could shorten it while this one uses it.
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.held: Any = b""

    def _reach(self, end: int) -> None:
        if end > len(self.held):
            os.ftruncate(self.file, max(end, 2 * len(self.held), 1 << 16))
            self.held = mmap.mmap(self.file, os.fstat(self.file).st_size)

    def _where(self) -> dict[str, Any]:
        return {}

    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.held, dtype=torch.uint8, count=size, offset=offset)

    def value(self, value: Any, place: Callable[[torch.Tensor], dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON description of an argument; `place` reserves memory for a tensor and returns its place."""
        if isinstance(value, torch.Tensor):
            return {"tensor": place(value.detach())}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.value(v, place) for v in value]}
        if isinstance(value, Mapping):
            return {"dict": [[self.value(part, place) for part in item] for item in value.items()]}
        return {"pickled": self.pickled(value)}

    def pickled(self, value: Any) -> list[int]:
        """Pickle an object into the arena and return its place: [begin, end] in bytes."""
        stream = io.BytesIO()
        torch.save(value, stream)
        data = stream.getvalue()
        begin = self.take(len(data))
        self.held[begin : begin + len(data)] = data
        return [begin, begin + len(data)]

    def close(self) -> None:
        """Close the file. Tensors in it stay valid."""
        os.close(self.file)


class DeviceMemory(Arena):
    """Memory of the current GPU, allocated by the driver.

    PyTorch's allocator is not used, because its blocks also hold this process's own tensors, such as expected values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.blocks: list[tuple[int, int, str]] = []
        """(address, size in bytes, IPC handle) of each allocation; tensors of one call may be in any of them."""
        self.whole = torch.empty(0, dtype=torch.uint8)

    def _reach(self, end: int) -> None:
        held = self.blocks[-1][1] if self.blocks else 0
        if end <= held:
            return
        torch.cuda.synchronize()  # gives this thread a context
        size = -(-max(end, 2 * held) // DEVICE_PAGE) * DEVICE_PAGE
        address, handle = ctypes.c_uint64(), (ctypes.c_ubyte * _HANDLE_BYTES)()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuIpcGetMemHandle", handle, address)
        self.blocks.append((address.value, size, base64.b64encode(bytes(handle)).decode()))
        self.whole = torch.as_tensor(_Bytes(address.value, size), device="cuda")

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.driver, name)(*arguments):
            raise PerfsuiteError(
                f"perfsuite judge: this GPU's memory cannot be shared between processes: {name} returns {code}"
            )

    def _where(self) -> dict[str, Any]:
        if not self.blocks:
            self._reach(1)
        _, size, handle = self.blocks[-1]
        return {"handle": handle, "bytes": size}

    def _bytes(self, offset: int, size: int) -> torch.Tensor:
        return self.whole[offset : offset + size]

    def close(self) -> None:
        """Free the memory; to be called once the other process has ended."""
        with contextlib.suppress(PerfsuiteError):
            for address, _, _ in self.blocks:
                self._call("cuMemFree_v2", ctypes.c_uint64(address))
        self.blocks.clear()


class _Bytes:
    """Device memory at an address, in a form that torch.as_tensor uses without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
