"""Digest of what a compiled GPU kernel does: of its machine code, and not of the file's debug information.

A cubin is an ELF file. Its debug sections hold the path of the kernel's source and the numbers of its lines, and notes
may hold the names of temporary files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

MAGIC = b"\x7fELF\x02\x01"
"""A 64-bit file, with the lowest byte first."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
NO_CONTENT = 8
"""The type of a section without content in the file, such as shared memory."""
IS_CODE = (".text", ".rela.text", ".nv.info", ".nv.constant", ".nv.global", ".nv.shared")
"""Sections of the instructions, their relocations, what the driver must know of them, constants and memory."""


def digest(cubin: bytes) -> str:
    """Return the digest of the machine code; for bytes that are no such file, of all of them."""
    try:
        parts = [part for name, part in _sections(cubin) if name.startswith(IS_CODE)]
    except (struct.error, ValueError, IndexError, OverflowError):
        parts = []
    found = hashlib.sha256()
    for part in parts or [cubin]:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:16]


def _sections(file: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, name and content) of each section. Raises ValueError if it is not an ELF file."""
    if not file.startswith(MAGIC):
        raise ValueError("not a 64-bit ELF file")
    *_, offset, _, _, _, _, size, count, names = HEADER.unpack_from(file)
    sections = [SECTION.unpack_from(file, offset + n * size) for n in range(count)]
    strings = _content(file, sections[names])
    for section in sections:
        name = strings[section[0] :].partition(b"\0")[0]
        yield name.decode(errors="replace"), name + b"\0" + _content(file, section)


def _content(file: bytes, section: tuple[int, ...]) -> bytes:
    _, kind, _, _, start, length, *_ = section
    return length.to_bytes(8, "little") if kind == NO_CONTENT else file[start : start + length]
