"""Reading cubins: target, kernels, embedded PTX, and damage."""

from __future__ import annotations

import pytest
from fake_toolkit import make_cubin

from tkbuild.elf import parse_cubin
from tkbuild.errors import IntegrityError


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a"])
def test_arch_is_read_with_its_suffix(arch: str) -> None:
    assert parse_cubin(make_cubin(arch)).arch == arch


def test_kernels_and_sections() -> None:
    facts = parse_cubin(make_cubin(kernels=("one", "two")))
    assert facts.kernels == ("one", "two")
    assert facts.sections[".text.one"] == 64
    assert not facts.has_ptx
    assert parse_cubin(make_cubin(extra_section=".nv_debug_ptx_txt")).has_ptx


def test_every_truncation_is_refused() -> None:
    whole = make_cubin()
    for length in range(len(whole)):
        with pytest.raises(IntegrityError):
            parse_cubin(whole[:length])


def test_header_and_note_must_agree() -> None:
    content = bytearray(make_cubin("sm_90a"))
    content[49] = 100  # the SM number in e_flags
    with pytest.raises(IntegrityError, match="header says sm_100, its note sm_90"):
        parse_cubin(bytes(content))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"MZ" + bytes(200), make_cubin(machine=62)])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_cubin(content)
