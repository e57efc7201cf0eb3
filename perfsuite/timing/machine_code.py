"""Compute a digest of the machine code of a compiled GPU kernel, without the file's debug information.

A cubin is an ELF file. Its debug sections contain the path of the kernel's source and line numbers, and notes may
contain names of temporary files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

MAGIC = b"\x7fELF\x02\x01"
"""First bytes of a 64-bit little-endian ELF file."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
NO_CONTENT = 8
"""Type of a section without content in the file, such as shared memory (SHT_NOBITS)."""
IS_CODE = (".text", ".rela.text", ".nv.info", ".nv.constant", ".nv.global", ".nv.shared")
"""Name prefixes of the sections with instructions, relocations, attributes for the driver, constants and memory."""


def digest(cubin: bytes) -> str:
    """Return the digest of the machine code, or of all bytes if they are not a cubin."""
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
