"""The digest of a kernel's machine code, computed from ELF files that are built section by section."""

from __future__ import annotations

import pytest

from perfsuite.timing.machine_code import HEADER, MAGIC, NO_CONTENT, SECTION, digest

CODE = {".text.k": b"multiply, store", ".nv.info.k": b"32 registers", ".nv.constant0.k": b"2.0"}
DEBUG = {
    ".debug_line": b"/home/a/kernel.py:7",
    ".nv_debug_ptx_txt": b"// /tmp/tmpa.ptx",
    ".note.nv.tkinfo": b"-o /tmp/a",
}


def elf(sections: dict[str, bytes], shared: int = 0) -> bytes:
    """Build a 64-bit ELF file of these sections, one of `shared` bytes without content, and the section of names."""
    names, body, rows = b"\0", b"", [SECTION.pack(*[0] * 10)]
    for name, content in {**sections, ".nv.shared.k": b"", ".shstrtab": b""}.items():
        at, names = len(names), names + name.encode() + b"\0"
        kind, length = (NO_CONTENT, shared) if name == ".nv.shared.k" else (1, len(content))
        content = names if name == ".shstrtab" else content
        length = len(names) if name == ".shstrtab" else length
        rows.append(SECTION.pack(at, kind, 0, 0, HEADER.size + len(body), length, 0, 0, 1, 0))
        body += content
    header = HEADER.pack(2, 190, 1, 0, 0, HEADER.size + len(body), 0, 64, 0, 0, SECTION.size, len(rows), len(rows) - 1)
    return MAGIC + header[len(MAGIC) :] + body + b"".join(rows)


def test_path_of_the_source_does_not_change_the_digest() -> None:
    elsewhere = {".debug_line": b"/b/kernel.py:8", ".nv_debug_ptx_txt": b"", ".note.nv.tkinfo": b"-o /tmp/other"}
    assert digest(elf(CODE | DEBUG)) == digest(elf(CODE | elsewhere)) == digest(elf(CODE))


@pytest.mark.parametrize("name", CODE)
def test_instructions_registers_and_constants_change_the_digest(name: str) -> None:
    assert digest(elf(CODE | {name: b"another"})) != digest(elf(CODE))


def test_shared_memory_size_changes_the_digest() -> None:
    assert digest(elf(CODE, shared=1024)) != digest(elf(CODE))


@pytest.mark.parametrize(
    "file", [b"", b"\x7fELF", MAGIC, MAGIC + b"\xff" * 200, elf(CODE)[:100], b"an interpreted kernel"]
)
def test_all_bytes_are_digested_if_the_file_is_not_a_cubin(file: bytes) -> None:
    assert digest(file) != digest(file + b"x")
    for at in range(len(file)):
        changed = bytearray(file)
        changed[at] ^= 1
        assert digest(bytes(changed)) != digest(file), at
