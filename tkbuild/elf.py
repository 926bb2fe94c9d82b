"""Read what a cubin says about itself: its target, its sections, its kernels. Leaf; needs no CUDA tool."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tkbuild.errors import IntegrityError

EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB, _SHT_NOTE, _SHT_NOBITS = 2, 7, 8
_STT_FUNC, _STB_GLOBAL = 2, 1
# st_other bit that cuobjdump shows as ENTRY: the function is a kernel.
_STO_CUDA_ENTRY = 0x10
# From this ELF ABI version on (toolkit 13) e_flags holds the SM number in bits 8 to 15, before in bits 0 to 7.
_ABI_WITH_SHIFTED_SM = 8

_Section = tuple[int, ...]


@dataclass(frozen=True)
class CubinFacts:
    """What a cubin holds: ``arch`` such as sm_90a, section names to sizes in bytes, names of kernels in order."""

    arch: str
    sections: dict[str, int]
    kernels: tuple[str, ...]

    @property
    def has_ptx(self) -> bool:
        """Whether PTX text is embedded."""
        return any("ptx" in name.lower() for name in self.sections)


def parse_cubin(content: bytes) -> CubinFacts:
    """Return the facts of a cubin. Raises: IntegrityError for anything that is no complete CUDA ELF file."""
    with _reading(content):
        number, headers, name_table = _sections(content)
        names = [_text(name_table, header[0]) for header in headers]
        sizes = {name: header[5] for name, header in zip(names, headers, strict=True) if name}
        return CubinFacts(_arch(content, number, headers), sizes, _kernels(headers, content))


def cubin_arch(content: bytes) -> str:
    """Return ``parse_cubin(content).arch`` and look at nothing else. Raises: IntegrityError likewise."""
    with _reading(content):
        number, headers, _ = _sections(content)
        return _arch(content, number, headers)


@contextlib.contextmanager
def _reading(content: bytes) -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise IntegrityError(f"not a complete cubin: {exc}", bytes=len(content)) from exc


def _sections(content: bytes) -> tuple[int, list[_Section], bytes]:
    """Return the SM number, the headers of all sections, each inside ``content``, and the table of their names."""
    ident, _, machine, _, _, _, section_offset, flags, _, _, _, _, section_count, names_index = _HEADER.unpack_from(content)
    if ident[:6] != b"\x7fELF\x02\x01" or machine != EM_CUDA:
        raise IntegrityError(f"not a cubin: expected a 64-bit ELF file of machine {EM_CUDA}", bytes=len(content))
    headers = [_SECTION.unpack_from(content, section_offset + i * _SECTION.size) for i in range(section_count)]
    for header in headers:
        _check_end(content, header)
    number = (flags >> 8) & 0xFF if ident[8] >= _ABI_WITH_SHIFTED_SM else flags & 0xFF
    return number, headers, _body(content, headers[names_index])


def _check_end(content: bytes, header: _Section) -> None:
    kind, offset, size = header[1], header[4], header[5]
    if kind != _SHT_NOBITS and offset + size > len(content):
        raise IntegrityError(
            f"not a complete cubin: a section ends at {offset + size}, the file at {len(content)}", bytes=len(content)
        )


def _body(content: bytes, header: _Section) -> bytes:
    return b"" if header[1] == _SHT_NOBITS else content[header[4] : header[4] + header[5]]


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _arch(content: bytes, number: int, headers: list[_Section]) -> str:
    """The SM number stands in e_flags; its suffix only in the note that repeats the assembler's options."""
    notes = b"\0".join(_body(content, header) for header in headers if header[1] == _SHT_NOTE)
    match = re.search(rb"-arch[ =]sm_(\d+)([af]?)", notes)
    if match is None:
        raise IntegrityError(f"the cubin is for sm_{number} and does not say with which suffix", sm=number)
    if int(match.group(1)) != number:
        raise IntegrityError(f"the cubin's header says sm_{number}, its note sm_{int(match.group(1))}", sm=number)
    return f"sm_{number}{match.group(2).decode()}"


def _kernels(headers: list[_Section], content: bytes) -> tuple[str, ...]:
    table = next((header for header in headers if header[1] == _SHT_SYMTAB), None)
    if table is None:
        return ()
    strings = _body(content, headers[table[6]])
    return tuple(
        _text(strings, name)
        for name, kind, other, _, _, _ in _SYMBOL.iter_unpack(_body(content, table))
        if kind & 0xF == _STT_FUNC and kind >> 4 == _STB_GLOBAL and other & _STO_CUDA_ENTRY
    )
